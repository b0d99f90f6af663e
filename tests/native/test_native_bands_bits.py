"""Compiled attention over bands gives the same bits whatever happens around a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import builds
import pytest
import torch
from threads import same_on_threads
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

SCORES = ("dot", "rbf")
OPTIONS: dict[str, dict[str, Any]] = {"all": {}, "top-k": {"top_k": 5}}
each_score = pytest.mark.parametrize("score", SCORES)
each_option = pytest.mark.parametrize("option", OPTIONS)


def tensors(
    *batch: int, tokens: int, width: int = 19, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Query of four heads, key and value of two."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(*batch, tokens, heads, width) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attend(
    leaves: list[Tensor], graph: ga.TokenGraph, score: str, backend: str = "native", **options: Any
) -> tuple[Tensor, Tensor]:
    if score == "rbf":
        return ga.rbf_attention(*leaves, graph, 2.0, backend=backend, return_lse=True, **options)
    return ga.dot_product_attention(*leaves, graph, backend=backend, return_lse=True, **options)


def run(
    given: list[Tensor],
    graph: ga.TokenGraph,
    score: str,
    rows: Tensor | slice = slice(None),
    backend: str = "native",
    **options: Any,
) -> list[Tensor]:
    """Output and log-sums of some rows, and the gradients if only those count."""
    leaves = [x.detach().requires_grad_() for x in given]
    named = {k: v.detach().requires_grad_() for k, v in options.items() if k == "edge_bias"}
    out, lse = attend(leaves, graph, score, backend, **{**options, **named})
    out, lse = out.movedim(-3, 0)[rows], lse.movedim(-2, 0)[rows]
    loss = (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sum() + lse.square().sum()
    return [out, lse, *torch.autograd.grad(loss, [*leaves, *named.values()])]


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_score
@each_option
@pytest.mark.parametrize("window", [40, 4])
def test_any_number_of_threads_gives_the_same_bits(window: int, score: str, option: str) -> None:
    """Several tasks and sequences, a table, and rows that are done by themselves."""
    parts = [ga.window_path_graph(n, window, self_loops=True) for n in (600, 9, 300)]
    graph, given = ga.batch(parts), tensors(2, tokens=909)
    given[1][:, 77], given[1][:, 700:] = 1e25, given[1][:, 700:] * 30  # enormous; steep
    table = torch.randn(2 * window + 1, 4, generator=torch.Generator().manual_seed(0))
    same_on_threads(lambda: run(given, graph, score, edge_bias=table, **OPTIONS[option]))


@each_score
@each_option
def test_a_sample_has_the_bits_that_it_has_alone(score: str, option: str) -> None:
    given = tensors(3, tokens=150)
    graph = ga.causal_window_graph(150, 40)
    together = run(given, graph, score, **OPTIONS[option])
    alone = run([x[1] for x in given], graph, score, **OPTIONS[option])
    out, lse, *gradients = together
    assert same_bits([out[:, 1], lse[:, 1], *(x[1] for x in gradients)], alone)


@each_score
@each_option
@pytest.mark.parametrize(
    "kind",
    [
        lambda n: ga.causal_window_graph(n, 40),
        lambda n: ga.window_path_graph(n, 70),
        lambda n: ga.window_path_graph(n, 4),
        lambda n: ga.block_window_graph(n, 17),
        lambda n: ga.dilated_window_graph(n, 5, 3),
    ],
    ids=["causal window", "path", "narrow path", "blocks", "dilated"],
)
def test_a_sequence_has_the_bits_that_it_has_alone(
    kind: Callable[[int], ga.TokenGraph], score: str, option: str
) -> None:
    """A sequence in a packed batch has the results and gradients that it has alone, bit by bit.

    (Without AVX-512, a sequence that its window covers goes to torch's own attention when it is
    alone.)
    """
    lengths = (45, 150, 41, 300)
    given, graph = tensors(tokens=sum(lengths)), ga.batch([kind(n) for n in lengths])
    together, start = run(given, graph, score, **OPTIONS[option]), 0
    for n in lengths:
        place = slice(start, start + n)
        alone = run([x[place] for x in given], kind(n), score, **OPTIONS[option])
        assert same_bits([x[place] for x in together], alone)
        start += n


def laid_out(x: Tensor, how: str) -> Tensor:
    """Return the numbers of `x` in another layout in memory."""
    match how:
        case "heads first":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        case "part of a wider tensor":
            return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
        case "not aligned":
            return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
        case "every other token":
            return torch.stack([x, x], dim=-3).flatten(-4, -3)[..., ::2, :, :]
        case "features apart":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        case "backwards":
            return x.flip(0).clone().flip(0)
        case "negative":
            return torch.complex(torch.zeros_like(x), -x).conj().imag
    raise AssertionError(how)


@each_score
@pytest.mark.parametrize("how", ["heads first", "part of a wider tensor", "features apart", "one"])
def test_gradients_from_above_may_lie_anywhere(how: str, score: str) -> None:
    graph, given = ga.causal_window_graph(90, 20), tensors(2, tokens=90)
    leaves = [x.requires_grad_() for x in given]
    out, lse = attend(leaves, graph, score)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    d_lse = torch.randn(2, 4, 90, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    d_out = torch.ones(()).expand(out.shape) if how == "one" else d_out
    moved = d_out if how == "one" else laid_out(d_out, how)
    plain = torch.autograd.grad(
        [out, lse], leaves, [d_out.contiguous(), d_lse.contiguous()], retain_graph=True
    )
    assert same_bits(list(plain), list(torch.autograd.grad([out, lse], leaves, [moved, d_lse])))


@each_score
@pytest.mark.parametrize("which", ["query", "key", "value", "table", "upstream"])
@pytest.mark.parametrize("content", [torch.nan, torch.inf, -torch.inf, 1e160])
@pytest.mark.parametrize("window", [8, 5, 3])
def test_rows_that_see_something_bad_are_the_reference(
    window: int, content: float, which: str, score: str
) -> None:
    graph = ga.window_path_graph(60, window)
    given = tensors(tokens=60, width=5, dtype=torch.float64)
    table = torch.randn(2 * window + 1, 4, generator=torch.Generator().manual_seed(0)).double()
    places = {"query": 0, "key": 1, "value": 2}
    if which in places:
        given[places[which]][30, 1:, 2] = content
    elif which == "table":
        table[3, 1] = content
    both = []
    for backend in ("native", "reference"):
        leaves = [x.detach().requires_grad_() for x in (*given, table)]
        out, lse = attend(leaves[:3], graph, score, backend, edge_bias=leaves[3])
        d_out = torch.ones_like(out)
        if which == "upstream":
            d_out[30, 1, 2] = content
        # Of an infinite logit the reference says that the log-sum is infinite, the others NaN.
        lse = lse.masked_fill(lse == torch.inf, torch.nan)
        both.append([out, lse, *torch.autograd.grad(out, leaves, d_out)])
    has_infinite_logits = content in (torch.inf, -torch.inf) and which in ("query", "key", "table")
    for place, (mine, theirs) in enumerate(zip(*both, strict=True)):
        if has_infinite_logits and place > 1:
            away = mine[: 30 - 2 * window]  # no row of theirs sees token 30
            # Rows with an infinite logit have no weights at all here; there finite ones have 0.
            assert which == "table" or place == 5 or away.isfinite().all()
            theirs = torch.where(mine.isnan(), mine, theirs)
            if which == "query" and score == "rbf":  # infinitely far from all: an empty row
                theirs = torch.where(theirs.isnan(), mine, theirs)
        torch.testing.assert_close(
            mine, theirs, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m, p=place: f"{p}: {m}"
        )


@each_score
@pytest.mark.parametrize("which", ["key", "value", "upstream"])
@pytest.mark.parametrize("window", [20, 3])
def test_what_is_bad_reaches_only_gradients_of_those_who_share_a_row_with_it(
    window: int, which: str, score: str
) -> None:
    graph = ga.window_path_graph(300, window)
    mask = graph.to_mask()
    both = []
    for content in (None, torch.nan):
        leaves = tensors(tokens=300, width=5)
        out_of = torch.ones(300, 4, 5)
        if content is not None:
            {"key": leaves[1], "value": leaves[2], "upstream": out_of}[which][100, 1] = content
        leaves = [x.requires_grad_() for x in leaves]
        out, _ = attend(leaves, graph, score)
        both.append(torch.autograd.grad(out, leaves, out_of))
    rows = torch.zeros(300, dtype=torch.bool).index_fill_(0, torch.tensor([100]), True)
    rows = rows if which == "upstream" else mask[:, 100]
    shared = mask[rows].any(0)
    for k, (clean, spoilt) in enumerate(zip(*both, strict=True)):
        away = ~(shared if k else rows)
        assert torch.equal(clean[away], spoilt[away])
        assert spoilt[~away].isnan().any() or (k == 2 and which == "value")


@pytest.mark.parametrize("build", ["base", "v3"])
def test_every_build_is_what_loops_say(build: str) -> None:
    builds.run_with(
        build,
        "import test_native_bands_sweep as sweep\nfor seed in range(25):\n    sweep.check(seed)",
    )
