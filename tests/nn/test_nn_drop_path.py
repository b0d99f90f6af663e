"""Stochastic depth: which sequences lose a branch, and what the others get for it."""

import torch

import graphattn as ga
from graphattn.nn.blocks.drop_path import drop_paths


def test_packed_sequences_are_dropped_one_by_one():
    """Each by its own chance and whole; those that stay are divided by the chance to stay."""
    lengths, share, batch = [3, 1, 4], 0.3, 4000
    graph = ga.batch([ga.complete_graph(n) for n in lengths])
    torch.manual_seed(0)
    dropped = drop_paths(torch.ones(batch, 8, 2, dtype=torch.float64), share, graph)
    scales = []
    for part in dropped.split(lengths, dim=1):
        assert torch.equal(part, part[:, :1, :1].expand_as(part))
        scales.append(part[:, 0, 0])
    kept = torch.stack(scales) != 0
    torch.testing.assert_close(
        torch.stack(scales)[kept], torch.full((int(kept.sum()),), 1 / 0.7).double()
    )
    p, five = 1 - share, 5 / batch**0.5  # five deviations of a mean
    for part in kept.double():
        assert abs(float(part.mean()) - p) < five * (p * (1 - p)) ** 0.5
    for a, b in ((0, 1), (1, 2), (0, 2)):  # of two sequences, both stay with probability p^2
        both = float((kept[a] & kept[b]).double().mean())
        assert abs(both - p**2) < five * (p**2 * (1 - p**2)) ** 0.5
