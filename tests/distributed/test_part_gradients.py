"""Gradients of a part of the sources, from the output and the log-sums over all of them."""

import itertools
from typing import Any

import pytest
import torch
from part_cases import CASES, Case, check, is_left_to_the_parts
from sharded_cases import parts_computed_in_backward
from torch import Tensor

import graphattn as ga
from graphattn.ops.attention.part_gradients import part_gradients
from graphattn.ops.backends import why_not_native

N, M, H, D = 11, 19, 2, 3
WIDE = torch.float64

NO_CODE = why_not_native(torch.zeros(1))
compiled = pytest.mark.skipif(NO_CODE is not None, reason=f"there is no compiled code: {NO_CODE}")
NATIVE = pytest.param("native", marks=compiled)


def drawn(dtype: torch.dtype = WIDE) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value, d_out = (torch.randn(2, n, H, D, dtype=dtype) for n in (N, M, M, N))
    return [query, key, value, d_out, torch.randn(2, N, H, dtype=dtype)]


def in_parts(
    tensors: list[Tensor], score: Any, whole: Any, borders: tuple[int, ...], **options: Any
) -> list[Tensor | None]:
    """Gradients of queries, keys, values and the strength of the score, from some parts."""
    query, key, value, d_out, d_lse = tensors
    gradients: list[Any] = [0, [], [], 0]
    of_targets, of_sources = options.pop("valid", (None, None))
    for first, last in itertools.pairwise(borders):
        mask = None if of_sources is None else of_sources[first:last]
        pairs = part_gradients(
            query, key[:, first:last], value[:, first:last],
            ga.bipartite_complete_graph(N, last - first), score,
            whole=whole, d_whole=(d_out, d_lse), valid=(of_targets, mask), backend="auto",
            edge_bias=None, **options,
        )  # fmt: skip
        if pairs is None:
            return [None]
        (_, d_query), (_, d_key), (_, d_value), (_, d_scale) = pairs
        gradients[0], gradients[3] = gradients[0] + d_query, gradients[3] + d_scale
        gradients[1].append(d_key)
        gradients[2].append(d_value)
    return [gradients[0], torch.cat(gradients[1], 1), torch.cat(gradients[2], 1), gradients[3]]


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("score", ["dot", "softcap", "rbf"])
def test_parts_add_up_to_the_gradient_over_all_sources(score: str, valid: bool) -> None:
    query, key, value, d_out, d_lse = drawn()
    masks = (torch.arange(N) % 5 > 0, torch.arange(M) % 3 > 0) if valid else (None, None)
    strength = torch.tensor([0.7, 1.3], dtype=WIDE, requires_grad=True)
    softcap = 2.0 if score == "softcap" else None

    def made() -> ga.Score:
        return ga.GaussianKernel(strength.rsqrt()) if score == "rbf" else ga.DotProduct(strength)

    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    out, lse = ga.score_attention(
        *inputs, ga.bipartite_complete_graph(N, M), made(),
        valid=masks, softcap=softcap, return_lse=True, backend="reference",
    )  # fmt: skip
    live = ~lse.isinf()
    assert live.all() != valid
    total = (out * d_out).sum() + (lse.masked_fill(~live, 0) * d_lse).sum()
    expected = torch.autograd.grad(total, [*inputs, strength])
    actual = in_parts(
        [query, key, value, d_out, d_lse], made(), (out.detach(), lse.detach()), (0, 4, 5, M),
        valid=masks, softcap=softcap,
    )  # fmt: skip
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13), (a - b).abs().max()


def results(tensors: list[Tensor], score: ga.Score) -> tuple[Tensor, Tensor]:
    graph = ga.bipartite_complete_graph(N, M)
    return ga.score_attention(*tensors[:3], graph, score, return_lse=True)


@compiled
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
def test_numbers_whose_products_overflow_are_left_to_the_parts(place: int, number: float) -> None:
    tensors = drawn(torch.float32)
    tensors[place][0, 3, 1] = number
    whole = results(tensors, ga.DotProduct())
    assert in_parts(tensors, ga.DotProduct(), whole, (0, M)) == [None]


@compiled
def test_targets_far_from_all_sources_are_left_to_the_parts() -> None:
    score = ga.GaussianKernel(1.0)
    for dtype, far, is_left in (
        (torch.float32, 0.0, False), (torch.float32, 15.0, True), (WIDE, 15.0, False),
    ):  # fmt: skip
        tensors = drawn(dtype)
        tensors[0][0, 3] += far
        gradients = in_parts(tensors, score, results(tensors, score), (0, 7, M))
        assert (gradients == [None]) == is_left


def test_a_score_of_your_own_is_left_to_the_parts() -> None:
    class Cosine(ga.Score):
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            return torch.nn.functional.cosine_similarity(query, key, dim=-1)

    tensors = drawn()
    assert in_parts(tensors, Cosine(), results(tensors, Cosine()), (0, M)) == [None]


@pytest.mark.every_case
@pytest.mark.parametrize("backend", [NATIVE, "structured"])
@pytest.mark.parametrize(("graph", "score", "biased"), CASES)
def test_parts_of_any_graph_add_up(backend: str, graph: str, score: str, biased: bool) -> None:
    case = Case(graph, score, biased=biased, valid=True, kv=1)
    check(case, backend, WIDE, 1e-12)


@pytest.mark.parametrize("backend", [NATIVE, "structured"])
@pytest.mark.parametrize("size", [1.0, 3e3, torch.nan])
def test_log_sums_too_large_for_float32_are_left_to_the_parts(backend: str, size: float) -> None:
    assert is_left_to_the_parts(backend, size) == (size != 1.0)


@compiled
@pytest.mark.every_case
def test_the_backward_pass_of_a_ring_computes_no_part_again(ranks: Any) -> None:
    counts = ranks.run(parts_computed_in_backward, 2)
    assert counts == [{"dot": 0, "gka": 0, "krause": 2, "edges": 0, "structured": 0}] * 2
