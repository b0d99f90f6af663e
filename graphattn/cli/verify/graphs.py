"""The graphs on which claims are checked: graphs of several families, and random graphs."""

from __future__ import annotations

import torch
from torch import Tensor

import graphattn as ga


def generator(seed: int) -> torch.Generator:
    """Make a separate generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def random_digraph(seed: int, *, num_tokens: int | None = None) -> tuple[ga.TokenGraph, Tensor]:
    """Draw a connected digraph, and weights of different sizes, [E].

    The graph has self-loops, and edges without the edge in the opposite direction.
    """
    draw = generator(seed)
    N = num_tokens or int(torch.randint(4, 25, (), generator=draw))
    share = float(torch.rand((), generator=draw)) * 0.5
    mask = torch.rand(N, N, generator=draw) < share
    token = torch.arange(N)
    mask[token, (token + 1) % N] = True  # a ring makes the graph connected
    graph = ga.from_mask(mask)
    weight = torch.empty(graph.num_edges, dtype=torch.float64).exponential_(generator=draw)
    return graph, weight


def star(leaves: int) -> ga.TokenGraph:
    """Make a star: `leaves` targets see one hub, which is their only source and sees no token.

    The hub is in the middle. If the hub were the first token, all edges would point backward, and
    the graph would be taken for a causal one.
    """
    hub = leaves // 2
    others = torch.tensor([i for i in range(leaves + 1) if i != hub])
    return ga.from_edge_index(torch.stack([torch.full((leaves,), hub), others]), leaves + 1)
