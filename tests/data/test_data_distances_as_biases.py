"""A protein: distances between its C-alpha atoms as edge features of every attention layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphattn as ga

LAYERS: dict[str, Callable[[], Any]] = {
    "DotProductAttention": lambda: ga.nn.DotProductAttention(16, 4, rope=True),
    "KrauseAttention": lambda: ga.nn.KrauseAttention(16, 4, top_k=8),
    "GaussianKernelAttention": lambda: ga.nn.GaussianKernelAttention(16, 4),
}


@pytest.mark.parametrize("backend", ["structured", "reference"])
@pytest.mark.parametrize("near", [True, False], ids=["within 12 Angstrom", "all pairs"])
@pytest.mark.parametrize("name", LAYERS)
def test_distances_change_every_attention_layer_and_learn(name, near, backend, real_file):
    torch.manual_seed(0)
    chain = ga.data.read_structure(real_file("structure/pdb/1l2y.pdb"))  # Trp-cage, 20 residues
    places = chain.ca_positions.clone().requires_grad_()
    N = len(chain.sequence)
    graph = (
        ga.radius_graph(chain.ca_positions, 12.0, self_loops=True) if near else ga.complete_graph(N)
    )
    embedding, layer = torch.nn.Embedding(26, 16), LAYERS[name]()
    tokens = embedding(torch.tensor([ord(letter) - ord("A") for letter in chain.sequence]))
    bias = ga.nn.DistanceBias(4, num_radial=16, cutoff=20.0)
    with ga.use_backend(backend):
        out = layer(tokens, graph, edge_bias=bias(places, graph))
        plain = layer(tokens, graph)
        turned = layer(tokens, graph, edge_bias=bias(places.flip(1) + 5.0, graph))
    assert (out - plain).abs().max() > 1e-3
    torch.testing.assert_close(turned, out, rtol=1e-3, atol=1e-4)  # a mirror keeps distances
    of_map, of_places = torch.autograd.grad(out.square().sum(), (bias.projection.weight, places))
    assert (of_map.abs().sum(1) > 0).all()  # every head
    assert of_places.isfinite().all()
    assert of_places.abs().sum() > 0
