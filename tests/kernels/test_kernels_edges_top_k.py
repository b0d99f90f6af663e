"""Kernels keep exactly k edges of a row; of equal ones, those of the smaller sources."""

from dataclasses import replace

import pytest
import torch
from cases_edges import CASES, EVERY, cut_at, only, top
from cases_kernels import Case, Tensors, check, in_float64, random, solve

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device", "edge_tiles")

SINGLE = 5e-6
HALF = (torch.float16, torch.bfloat16)


def with_ties(name: str) -> tuple[Case, Tensors]:
    """Features, biases and scales whose logits are exact: equal ones are equal bit by bit."""
    case = replace(CASES[name], strength=(0.5, 2.0), features=2)
    tensors = case.tensors()
    for n in ("query", "key", "edge_bias"):
        if n in tensors:
            tensors[n] = tensors[n].clamp(-1.4, 1.4).round()
    return case, tensors


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "score", "k", "longest"),
    [
        ("list of many edges", "rbf", 1, 512),
        ("list of many edges", "dot", 5, 24),
        ("grid with a class token", "rbf", 2, 512),
        ("grid with a class token", "dot", 5, 512),
        ("hubs", "rbf", 2, 8),
        ("hubs", "dot", 1, 512),
        ("bias of neighbours", "rbf", 2, 512),
        ("bias of neighbours", "dot", 1, 8),
        ("bias of every sample", "dot", 3, 512),
    ],
)
def test_of_equal_sources_the_smaller_index_is_kept(
    name: str, score: str, k: int, longest: int, device: str
) -> None:
    case, tensors = with_ties(name)
    case = top(k, case, score=score)
    with cut_at(longest):
        results = solve(case, tensors, case.upstream(), backend="triton", device=device)
    check(results, in_float64(case, tensors, case.upstream()), SINGLE, floor=0.1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_negative_zero_ties_with_zero(dtype: torch.dtype, device: str) -> None:
    """Logits and biases are -0.0 for even sources and 0.0 for odd: the first two must win."""
    graph = only(1, 40, (0, EVERY)).to(device)
    q = torch.tensor([1.0, 0.0], dtype=dtype, device=device).view(1, 1, 2)
    k = torch.tensor([-0.0, 0.0] * 20, dtype=dtype, device=device).view(40, 1, 1).repeat(1, 1, 2)
    v = torch.arange(40, device=device).to(dtype).view(40, 1, 1)
    bias = torch.tensor([-0.0, 0.0] * 20, device=device).view(40, 1)
    for arguments in ({}, {"edge_bias": bias.to(dtype)}):
        options = {"top_k": 2, "backend": "triton", **arguments}
        assert ga.dot_product_attention(q, k, v, graph, **options).item() == 0.5
        assert ga.rbf_attention(q, k, v, graph, 1.0, **options).item() == 0.5
        same = q.expand(40, 1, 2)  # distances 0, logits -0.0 plus the bias
        assert ga.rbf_attention(q, same, v, graph, 1.0, **options).item() == 0.5


def test_top_1_is_the_nearest_source(device: str) -> None:
    """The output with top_k=1 is exactly the value of the nearest source.

    No gradient flows through the one weight, which is always 1; only the log-sum, which is not used
    here, would bring one to query and key.
    """
    x = random(30, 1, 3, seed=0).float().to(device).requires_grad_()
    value = random(30, 1, 4, seed=1).float().to(device).requires_grad_()
    graph = ga.knn_graph(x[:, 0].detach(), 6)
    out = ga.rbf_attention(x, x, value, graph, 1.0, top_k=1, backend="triton")
    index, _ = ga.knn(x[:, 0].detach(), 1)
    assert torch.equal(out, value[index[:, 0]])
    d_out = torch.ones_like(out)
    d_x, d_value = torch.autograd.grad(out, (x, value), d_out)
    assert d_x.abs().max() <= 1e-6
    counts = torch.bincount(index[:, 0], minlength=30).to(d_value)
    assert torch.equal(d_value, counts[:, None, None].expand_as(d_value))
