"""Compiled attention over bands where float32 has too few digits: ties, and steep distances."""

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
each_float = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# Rows of wide windows are computed in tiles, those of narrow ones offset by offset.
each_window = pytest.mark.parametrize("window", [30, 4])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return by_hand.numbers(*shape, seed=seed, dtype=dtype)


def attend(leaves: list[Tensor], window: int, score: str, scale: Tensor, **options: Any) -> Tensor:
    graph = ga.window_path_graph(90, window, self_loops=True)
    if score == "rbf":
        return ga.rbf_attention(*leaves, graph, scale**-0.5, backend="native", **options)
    return ga.dot_product_attention(*leaves, graph, scale=scale, backend="native", **options)


def exactly(leaves: list[Tensor], window: int, score: str, scale: Tensor, **options: Any) -> Tensor:
    """Compute the output by loops in float64."""
    tensors = [x.double()[None] for x in leaves]
    if score == "rbf":
        scale = (scale**-0.5).double() ** -2
    seen, affinity = by_hand.path(90, window, True), by_hand.AFFINITIES[score]
    return by_hand.rows(*tensors, seen, affinity, scale.double(), **options)[0][0]


@each_float
@each_score
@each_window
@pytest.mark.parametrize("top_k", [1, 3, 39])
def test_of_equal_sources_the_first_are_kept(
    top_k: int, window: int, score: str, dtype: torch.dtype
) -> None:
    query = numbers(90, 2, 19, seed=0, dtype=dtype)
    key = numbers(1, 1, 19, seed=1, dtype=dtype).expand(90, 1, 19)
    value = torch.arange(90, dtype=dtype)[:, None, None].requires_grad_()
    out = attend([query, key, value], window, score, torch.ones(2, dtype=dtype), top_k=top_k)
    i = torch.arange(90, dtype=dtype)
    first, last = (i - window).clamp(min=0), (i + window).clamp(max=89)
    last = torch.minimum(last, first + top_k - 1)
    torch.testing.assert_close(out, ((first + last) / 2)[:, None, None].expand(90, 2, 1))
    is_kept = (first[:, None] <= i) & (i <= last[:, None])
    weight = is_kept / (last - first + 1)[:, None]
    (d_value,) = torch.autograd.grad(out.sum(), value)  # over two heads
    torch.testing.assert_close(d_value.flatten(), 2 * weight.sum(0))


@each_float
@each_window
def test_zero_and_minus_zero_tie(window: int, dtype: torch.dtype) -> None:
    query, value = numbers(90, 1, 3, seed=0, dtype=dtype), torch.arange(90.0, dtype=dtype)
    key = torch.tensor([0.0, -0.0], dtype=dtype).repeat(45)[:, None, None].expand(90, 1, 3)
    one = torch.ones(1, dtype=dtype)
    out = attend([query, key, value[:, None, None]], window, "dot", one, top_k=1)
    assert torch.equal(out.flatten(), (value - window).clamp(min=0))


def almost_equal_keys(score: str, gap: float, seed: int) -> tuple[Tensor, Tensor]:
    """Queries, and keys of which every row has logits that differ by less than float32 rounds to.

    The next key is a little larger or smaller in one feature that does not matter much.
    """
    width, generator = 33, torch.Generator().manual_seed(seed)
    query, key = numbers(90, 2, width, seed=seed), numbers(1, 1, width, seed=seed + 1)
    key = key.repeat(90, 1, 1) * 3
    key[:, :, 5] += gap * torch.randn(90, 1, generator=generator)
    if score == "rbf":
        query, key = query + 100, key + 100
    return query, key


@each_score
@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("top_k", [1, 4])
@each_window
def test_near_ties_are_decided_as_by_float64(
    window: int, top_k: int, with_table: bool, score: str
) -> None:
    for seed in range(4):
        sign = -1 if score == "dot" and seed % 2 else 1
        query, key = almost_equal_keys(score, 3e-5 if score == "rbf" else 3e-7, seed)
        value = torch.arange(90.0)[:, None, None]
        scale = torch.full((2,), float(sign))
        options: dict[str, Any] = {"top_k": top_k}
        exact = dict(options)
        if with_table:  # whose entries are equal, and large
            table = torch.full((2 * window + 1, 2), 40.0)
            options["edge_bias"], exact["table"] = table, table.double()
        out = attend([query, key, value], window, score, scale, **options)
        expected = exactly([query, key, value], window, score, scale, **exact)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


STEEP = {
    "small sigma": (0.0, 0.02, 1.0),
    "small sigma, far from zero": (100.0, 0.3, 1.0),
    "tiny": (1000.0, 1e-2, 1.0),
    "outliers": (0.0, 1.0, 60.0),
}


@pytest.mark.parametrize("name", STEEP)
@pytest.mark.parametrize("options", [{}, {"top_k": 6}], ids=str)
@pytest.mark.parametrize("with_table", [False, True])
@each_window
def test_steep_rows_are_exact(
    window: int, name: str, options: dict[str, Any], with_table: bool
) -> None:
    """Output and gradients: by 1e-5 of the largest, as where distances are small."""
    offset, sigma, outlier = STEEP[name]
    width = 16
    leaves = [numbers(90, h, width, seed=s) for s, h in enumerate((2, 1, 1))]
    leaves[0][::7] *= outlier
    leaves = [leaves[0] + offset, leaves[1] + offset, leaves[2]]
    scale = torch.full((2,), sigma**-2 / width)
    table = numbers(2 * window + 1, 2, seed=9) * 30
    seen = by_hand.path(90, window, True)
    leaves += [scale, table]
    mine = [x.clone().requires_grad_() for x in leaves]
    loops = [x.double().requires_grad_() for x in leaves]
    # Both make the same width of it, so that what is compared is attention alone.
    extra = {"edge_bias": mine[4]} if with_table else {}
    out = ga.rbf_attention(
        *mine[:3], seen.graph, mine[3] ** -0.5, backend="native", **options, **extra
    )
    strength = (mine[3].detach() ** -0.5).double().requires_grad_()
    exact, _ = by_hand.rows(
        *(x[None] for x in loops[:3]), seen, by_hand.distances, strength**-2,
        loops[4] if with_table else None, **options,
    )  # fmt: skip
    upstream = numbers(*out.shape, seed=5)
    gradients = torch.autograd.grad(out, mine[:3] + mine[4:] * with_table, upstream)
    expected = torch.autograd.grad(
        exact, loops[:3] + loops[4:] * with_table, upstream.double()[None]
    )
    for a, b in zip([out, *gradients], [exact[0], *expected], strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=2e-5 * float(b.detach().abs().max()) + 1e-6
        )


@each_float
@each_score
@each_window
@pytest.mark.parametrize("width", [1, 5, 16, 33, 100])
def test_a_weight_of_exactly_one_leaves_nothing_of_its_logits_gradient(
    width: int, window: int, score: str, dtype: torch.dtype
) -> None:
    """Not the rounding of two sums either, which a steep scale would make large."""
    leaves = [numbers(90, h, 8, seed=s, dtype=dtype) for s, h in enumerate((2, 1))]
    leaves.append(numbers(90, 1, width, seed=2, dtype=dtype))
    leaves = [x.requires_grad_() for x in leaves]
    scale = torch.full((2,), 0.5, dtype=dtype, requires_grad=True)
    out = attend(leaves, window, score, scale, top_k=1)
    upstream = numbers(*out.shape, seed=3, dtype=dtype)
    d_query, d_key, d_value, d_scale = torch.autograd.grad(out, [*leaves, scale], upstream)
    assert not d_query.any()
    assert not d_key.any()
    assert not d_scale.any()
    torch.testing.assert_close(d_value.sum((0, 1)), upstream.sum((0, 1)), rtol=1e-4, atol=1e-4)
