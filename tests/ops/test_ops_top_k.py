"""top_k keeps exactly k sources per target and head; of equal ones, the smaller index."""

import pytest
import torch
from torch import Tensor

import graphattn as ga


def integers(*shape: int, seed: int, high: int = 2) -> Tensor:
    """Small integers of both signs, zeros of both signs among them: ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-high, high + 1, shape, generator=generator).double()
    negative = torch.rand(shape, generator=generator) < 0.5
    return torch.where((x == 0) & negative, -0.0, x)


def kept_edges(weights: Tensor) -> Tensor:
    return weights > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_negative_zero_ties_with_zero(dtype: torch.dtype) -> None:
    """Keys, or biases, are -0.0 for the even sources, 0.0 for the odd: index 0 and 1 must win."""
    q = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 1, 2)
    k = torch.tensor([-0.0, 0.0] * 20, dtype=dtype).view(40, 1, 1) * torch.ones(2, dtype=dtype)
    graph = ga.bipartite_complete_graph(1, 40)
    bias = torch.tensor([-0.0, 0.0] * 20, dtype=dtype).view(40, 1)
    for arguments in ({}, {"edge_bias": bias}, {"sigma": 1.0}):
        weights = ga.attention_weights(q, k, graph, top_k=2, **arguments)
        assert weights.flatten().nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_both_zeros_tie(dtype: torch.dtype) -> None:
    """A sum never gives -0.0, but -||q - k||^2 / (2 sigma^2) does, and beside it a bias of -0.0."""
    zeros = torch.zeros(40, 1, 2, dtype=dtype)
    graph = ga.bipartite_complete_graph(1, 40)
    bias = torch.tensor([-0.0, 0.0] * 20, dtype=dtype).view(40, 1)
    weights = ga.attention_weights(zeros[:1], zeros, graph, sigma=1.0, top_k=2, edge_bias=bias)
    assert weights.flatten().nonzero().flatten().tolist() == [0, 1]


def test_equal_distances_on_both_sides_keep_the_left_one() -> None:
    x = torch.arange(9.0).view(9, 1, 1)
    graph = ga.window_path_graph(9, 2)
    weights = ga.attention_weights(x, x, graph, sigma=1.0, top_k=1).flatten()
    source, target = graph.edge_index[:, weights > 0]
    assert target.tolist() == list(range(9))
    assert source.tolist() == [1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_a_thousand_equal_sources_keep_the_first_k() -> None:
    """Sorting may be stable for short rows and not for long ones."""
    q, k = torch.zeros(2, 3, 1), torch.zeros(1000, 3, 1)
    weights = ga.attention_weights(q, k, ga.bipartite_complete_graph(2, 1000), top_k=17)
    kept = kept_edges(weights).view(2, 1000, 3)
    assert kept[:, :17].all()
    assert not kept[:, 17:].any()
