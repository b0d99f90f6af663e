"""Compiled attention over bands in use: sizes, derivatives, compilation, layers, and names."""

from __future__ import annotations

import copy
from typing import Any

import bands_by_hand as by_hand
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import graphattn as ga
from graphattn.kernels.cpu import library

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

each_score = pytest.mark.parametrize("score", ["dot", "rbf"])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def attend(
    leaves: list[Tensor], graph: ga.TokenGraph, score: str, **options: Any
) -> tuple[Tensor, Tensor]:
    options = {"backend": "native", "return_lse": True, **options}
    if score == "rbf":
        return ga.rbf_attention(*leaves, graph, leaves[0].shape[-1] ** 0.5 + 1, **options)
    return ga.dot_product_attention(*leaves, graph, scale=0.3, **options)


def check(seen: by_hand.Seen, leaves: list[Tensor], score: str, **options: Any) -> None:
    """Output, log-sums, and gradients against loops."""
    width = leaves[0].shape[-1]
    strength = 0.3 if score == "dot" else (width**0.5 + 1) ** -2
    scale = torch.full((leaves[0].shape[-2],), strength, dtype=torch.float64)
    mine = [x.clone().requires_grad_() for x in leaves]
    loops = [x.clone().requires_grad_() for x in leaves]
    out, lse = attend(mine, seen.graph, score, **options)
    exact, sums = by_hand.rows(
        *(x[None] for x in loops), seen, by_hand.AFFINITIES[score], scale, **options
    )
    found = [out, lse]
    expected = [exact[0], sums[0]]
    heard = sums[0].isfinite()
    if heard.any():
        found += torch.autograd.grad(out.sum() + lse[heard].square().sum(), mine)
        loss = exact.sum() + sums[0][heard].square().sum()
        expected += torch.autograd.grad(loss, loops)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@each_score
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
@pytest.mark.parametrize("window", [1, 3, 1000])
def test_few_tokens_and_windows_larger_than_the_sequence(
    tokens: int, window: int, score: str
) -> None:
    for seen in (
        by_hand.causal_window(tokens, window, 2),
        by_hand.path(tokens, window, False),
        by_hand.dilated(tokens, window, 4, True),
        by_hand.blocks(tokens, window, 0),
    ):
        n, m = seen.mask.shape
        leaves = [numbers(n, 2, 3, seed=0), numbers(m, 1, 3, seed=1), numbers(m, 1, 2, seed=2)]
        check(seen, leaves, score)
        check(seen, leaves, score, top_k=2)


@each_score
@pytest.mark.parametrize("width", [1, 3, 17, 100, 300])
def test_any_width(width: int, score: str) -> None:
    seen = by_hand.causal_window(50, 9, 0)
    leaves = [numbers(50, 2, width, seed=0), numbers(50, 1, width, seed=1)]
    check(seen, [*leaves, numbers(50, 1, width, seed=2)], score)
    check(seen, [*leaves, numbers(50, 1, 5, seed=2)], score)
    check(seen, [*leaves, numbers(50, 1, 0, seed=2)], score, top_k=3)


@each_score
@pytest.mark.parametrize("top_k", [None, 300])
def test_windows_of_several_long_sums(score: str, top_k: int | None) -> None:
    """Windows that take several long sums and several tasks are computed right.

    The halos of these tasks reach over more than one other task.
    """
    seen = by_hand.path(700, 600, True)
    leaves = [numbers(700, 1, 3, seed=s) for s in range(3)]
    check(seen, leaves, score, top_k=top_k)


@each_score
def test_rows_without_sources_are_zero_and_pass_nothing_on(score: str) -> None:
    seen = by_hand.path(1, 3, False), by_hand.path(70, 1, False)
    leaves = [numbers(71, 2, 3, seed=s).requires_grad_() for s in range(3)]
    sources = torch.ones(71, dtype=torch.bool)
    sources[[10, 12]] = False
    both = by_hand.side_by_side(list(seen))
    out, lse = attend(leaves, both.graph, score, valid=(None, sources))
    assert (out[[0, 11]] == 0).all()
    assert (lse[[0, 11]] == -torch.inf).all()
    d_query, d_key, d_value = torch.autograd.grad(out.sum(), leaves)
    assert (d_query[[0, 11]] == 0).all()
    for gradient in (d_key, d_value):
        assert (gradient[[0, 10, 12]] == 0).all()
        assert (gradient[1:10] != 0).any()


@each_score
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (3,), (1, 3)], ids=str)
def test_only_what_asks_for_a_gradient_has_one(which: tuple[int, ...], score: str) -> None:
    graph = ga.causal_window_graph(40, 9)
    given = [numbers(40, 2, 5, seed=s) for s in range(3)] + [numbers(9, 2, seed=3)]
    found = []
    for asks in (which, range(4)):
        leaves = [x.clone().requires_grad_(k in asks) for k, x in enumerate(given)]
        out, lse = attend(leaves[:3], graph, score, edge_bias=leaves[3])
        loss = out.sum() + lse.sum()
        found.append(torch.autograd.grad(loss, [leaves[k] for k in which]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@each_score
@pytest.mark.parametrize("of", ["out", "lse"])
def test_results_may_be_asked_alone(score: str, of: str) -> None:
    graph = ga.causal_window_graph(40, 9)
    found = []
    for backend in ("native", "reference"):
        leaves = [numbers(40, 2, 5, seed=s).requires_grad_() for s in range(3)]
        out, lse = attend(leaves, graph, score, backend=backend)
        loss = (out if of == "out" else lse).square().sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        found.append([torch.zeros(1) if g is None else g for g in gradients])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(*torch.broadcast_tensors(mine.double(), theirs.double()))


@each_score
def test_it_is_differentiated_twice_by_operations_of_torch(score: str) -> None:
    graph = ga.window_path_graph(6, 2)
    leaves = [numbers(6, 2, 3, seed=s).requires_grad_() for s in range(3)]
    table = numbers(5, 2, seed=3).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return attend([q, k, v], graph, score, edge_bias=b)

    assert torch.autograd.gradcheck(run, (*leaves, table))
    assert torch.autograd.gradgradcheck(run, (*leaves, table))


@pytest.mark.parametrize("Layer", [ga.nn.DotProductAttention, ga.nn.KrauseAttention])
def test_compiled_functions_hold_it_whole(Layer: Any) -> None:
    layer = Layer(16, heads=2, backend="native")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (20, 31, 47):
        graph = ga.causal_window_graph(tokens, 9)
        x = torch.randn(2, tokens, 16, requires_grad=True)
        mine, theirs = compiled(x, graph), layer(x, graph)
        torch.testing.assert_close(mine, theirs)
        for a, b in zip(
            *(torch.autograd.grad(y.square().sum(), x) for y in (mine, theirs)), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_checkpoints_and_copies_of_a_layer_have_its_bits() -> None:
    layer = ga.nn.KrauseAttention(16, heads=2, top_k=4, backend="native")
    graph, x = ga.causal_window_graph(40, 9), torch.randn(2, 40, 16, requires_grad=True)
    other, found = copy.deepcopy(layer), []
    for run in (
        lambda: layer(x, graph),
        lambda: other(x, graph),
        lambda: checkpoint(layer, x, graph, use_reentrant=False),
        lambda: checkpoint(layer, x, graph, use_reentrant=True),
    ):
        y = run()
        y.square().sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad.clone()))
        x.grad = None
    for y, gradient in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(gradient, found[0][1])


def test_autocast_leaves_results_near() -> None:
    layer = ga.nn.DotProductAttention(16, heads=2, backend="native")
    graph, x = ga.causal_window_graph(40, 9), torch.randn(2, 40, 16)
    exact = layer(x, graph)
    with torch.autocast("cpu", torch.bfloat16):
        rough = layer(x, graph)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.1, atol=0.05)


def test_what_looks_into_steps_is_refused_by_name() -> None:
    graph, x = ga.causal_window_graph(12, 3), torch.randn(5, 12, 1, 4)

    def run(x: Tensor, backend: str) -> Tensor:
        return ga.rbf_attention(x, x, x, graph, 1.0, backend=backend)

    torch.testing.assert_close(torch.vmap(lambda x: run(x, "auto"))(x), run(x, "native"))
    with pytest.raises(ValueError, match=r"backend 'native' cannot run inside torch\.func"):
        torch.vmap(lambda x: run(x, "native"))(x)


def test_auto_takes_it_and_says_so() -> None:
    graph, x = ga.causal_window_graph(300, 17), torch.randn(300, 1, 8)
    support = ga.backends("rbf_attention", graph, x)
    assert support["native"] is None
    assert torch.equal(
        ga.rbf_attention(x, x, x, graph, 1.0),
        ga.rbf_attention(x, x, x, graph, 1.0, backend="native"),
    )
