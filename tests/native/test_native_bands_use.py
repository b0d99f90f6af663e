"""Compiled attention over bands in use: sizes, derivatives, compilation, layers, and names."""

from __future__ import annotations

from typing import Any

import bands_by_hand as by_hand
import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

each_score = pytest.mark.parametrize("score", ["dot", "rbf"])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return by_hand.numbers(*shape, seed=seed, dtype=dtype)


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
    results = [out, lse]
    expected = [exact[0], sums[0]]
    heard = sums[0].isfinite()
    if heard.any():
        results += torch.autograd.grad(out.sum() + lse[heard].square().sum(), mine)
        loss = exact.sum() + sums[0][heard].square().sum()
        expected += torch.autograd.grad(loss, loops)
    torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)


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
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (3,), (1, 3)], ids=str)
def test_only_what_asks_for_a_gradient_has_one(which: tuple[int, ...], score: str) -> None:
    graph = ga.causal_window_graph(40, 9)
    given = [numbers(40, 2, 5, seed=s) for s in range(3)] + [numbers(9, 2, seed=3)]
    gradients = []
    for asks in (which, range(4)):
        leaves = [x.clone().requires_grad_(k in asks) for k, x in enumerate(given)]
        out, lse = attend(leaves[:3], graph, score, edge_bias=leaves[3])
        loss = out.sum() + lse.sum()
        gradients.append(torch.autograd.grad(loss, [leaves[k] for k in which]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@each_score
def test_it_is_differentiated_twice_by_operations_of_torch(score: str) -> None:
    graph = ga.window_path_graph(6, 2)
    leaves = [numbers(6, 2, 3, seed=s).requires_grad_() for s in range(3)]
    table = numbers(5, 2, seed=3).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return attend([q, k, v], graph, score, edge_bias=b)

    assert torch.autograd.gradcheck(run, (*leaves, table))
    assert torch.autograd.gradgradcheck(run, (*leaves, table))
