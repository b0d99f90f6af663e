"""The keyword `backend` of nearest-neighbour search: what is taken, and why something is not."""

import re

import pytest
import torch

import graphattn as ga
from graphattn.graphs.search import nearest_neighbors
from graphattn.kernels.shared import launch


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(300, 3, generator=torch.Generator().manual_seed(0))


def test_reference_and_auto_are_the_same_on_a_cpu(x, monkeypatch):
    # Also where kernels could be interpreted: that is for tests, and slow.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for by_default, expected in zip(ga.knn(x, 4), ga.knn(x, 4, backend="reference"), strict=True):
        assert torch.equal(by_default, expected)
    monkeypatch.setattr(nearest_neighbors, "_nearest_by_kernels", None)
    ga.knn(x, 4, backend="auto")


def test_kernels_asked_for_on_a_cpu_are_refused(x, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = "backend 'triton' cannot run this case: its kernels run on CUDA and HIP devices, not"
    with pytest.raises(ValueError, match=re.escape(message)):
        ga.knn(x, 4, backend="triton")


REFUSED = {
    "float64": (lambda x: (x.double(), 4, {}), "take float32, float16 and bfloat16, not float64"),
    "k": (lambda x: (x, 257, {}), "find up to 256 neighbours, not 257"),
    "edge list": (
        lambda x: (x, 4, {"within": ga.from_edge_index(torch.tensor([[0], [1]]), 300)}),
        (
            "only windows, blocks, causal and complete graphs "
            "and batches of these, not a list or table"
        ),
    ),
    "grid": (
        lambda x: (x, 4, {"within": ga.grid_window_graph(15, 20, 2)}),
        "only windows, blocks, causal and complete graphs and batches of these, not Grid",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cases_without_a_kernel_are_refused_with_the_reason(name, x, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "HAS_TRITON", True)
    make, reason = REFUSED[name]
    tokens, k, options = make(x)
    with pytest.raises(ValueError, match=re.escape(reason)):
        ga.knn(tokens, k, backend="triton", **options)
    ga.knn(tokens, k, **options)  # "auto" takes torch


def test_without_triton_kernels_are_refused(x, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        ga.knn(x, 4, backend="triton")


@pytest.mark.parametrize("backend", ["structured", "", None])
def test_other_backends_are_named_with_those_there_are(backend, x):
    message = f"backend must be one of 'auto', 'reference', 'triton', got {backend!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        ga.knn(x, 4, backend=backend)


def test_distances_of_many_rows_are_the_same_piece_by_piece(x, monkeypatch):
    """Values and gradients, with rows that have fewer neighbours."""
    within = ga.causal_window_graph(300, 3)
    results = []
    for pairs in (1 << 19, 7):
        monkeypatch.setattr(nearest_neighbors, "PAIRS", pairs)
        leaf = x.clone().requires_grad_()
        _, squared = ga.knn(leaf, 4, within=within)
        (gradient,) = torch.autograd.grad(squared[squared.isfinite()].sqrt().sum(), leaf)
        results.append((squared, gradient))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_a_search_inside_torch_func_keeps_to_torch(x, monkeypatch):
    """Kernels look at memory, which a tensor that is followed step by step does not have."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(launch, "HAS_TRITON", True)
    points = x[:20]
    expected = torch.func.grad(lambda p: ga.knn(p, 2)[1].sum())(points)
    assert expected.isfinite().all()
    with pytest.raises(ValueError, match=r"cannot run inside torch\.func or under forward-mode"):
        torch.func.grad(lambda p: ga.knn(p, 2, backend="triton")[1].sum())(points)
