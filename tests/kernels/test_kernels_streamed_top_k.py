"""Selections that hold no logits keep the same sources as a sort, whatever the logits are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases_kernels import Case, coins, random
from cases_top_k import chosen, largest, streamed
from torch import Tensor

import graphattn as ga
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device")
INF, NAN = torch.inf, torch.nan
TOKENS = 130  # two tiles of targets, and two rows of another, which have no room for candidates


@pytest.fixture(autouse=True)
def _streamed(device: str) -> Iterator[None]:
    """The interpreter is slow to start a program: few of them."""
    with streamed(), tuning.override(band_select=tuning.Choice(64, 32, 4, 1)):
        yield


def one_of(values: list[float]) -> Tensor:
    """One of some values for each source."""
    places = torch.randint(len(values), (TOKENS,), generator=torch.Generator().manual_seed(3))
    return torch.tensor(values, dtype=torch.float64)[places]


def some(rare: float, usual: Tensor, share: float) -> Tensor:
    """`rare` with probability `share`, and `usual` otherwise."""
    return torch.where(coins(len(usual), seed=4, share=share), rare, usual)


NORMAL = random(TOKENS, seed=1)
PLACE = torch.arange(TOKENS).double()
LOGITS = {
    "normal": NORMAL,
    "Cauchy": NORMAL / random(TOKENS, seed=2),
    "rising": PLACE,
    "falling": -PLACE,
    "two clusters": some(1000.0, torch.zeros(TOKENS), 0.5).double() + NORMAL,
    "an outlier": torch.where(PLACE == 77, 1e30, NORMAL),
    "two outliers of either sign": torch.where(PLACE % 60 == 7, 3e38 * NORMAL.sign(), NORMAL),
    "all sizes": NORMAL.sign() * 10.0 ** (30 * random(TOKENS, seed=5).clamp(-1, 1)),
    "two values": one_of([1.0, 2.0]),
    "neighbouring numbers": 1.0 + one_of([0.0, 1.0, 2.0, 3.0]) * 2.0**-7,
    "all equal": torch.full((TOKENS,), -3.0).double(),
    "zeros of either sign": one_of([-0.0, 0.0]),
    "zeros and the least numbers": one_of([-0.0, 0.0, 1e-38, -1e-38, 1.0, -1.0]),
    "a few of inf": some(INF, NORMAL, 0.05),
    "many of inf": some(INF, NORMAL, 0.8),
    "a few of -inf": some(-INF, NORMAL, 0.05),
    "many of -inf": some(-INF, NORMAL, 0.9),
    "-inf alone": torch.full((TOKENS,), -INF).double(),
    "a few of NaN": some(NAN, NORMAL, 0.05),
    "many of NaN": some(NAN, NORMAL, 0.8),
    "NaN alone": torch.full((TOKENS,), NAN).double(),
    "everything": one_of([NAN, INF, -INF, -0.0, 0.0, 1.0, -1.0, 3e38, -3e38]),
}
GRAPHS = {
    "window": ga.window_path_graph(TOKENS, 70, self_loops=True),
    "causal": ga.causal_graph(TOKENS),
    "no self-loops": ga.window_path_graph(TOKENS, 60),
    "dilated": ga.dilated_window_graph(TOKENS, 30, 2),
    "sequences": ga.batch([ga.causal_graph(70), ga.complete_graph(1), ga.complete_graph(59)]),
    "wider than the sequence": ga.window_path_graph(TOKENS, 500, self_loops=True),
}


def choices(
    logit: Tensor, k: int, graph: ga.TokenGraph, dtype: torch.dtype, device: str, valid: str = ""
) -> tuple[Tensor, Tensor]:
    """The pairs that are kept, and those that should be.

    Source i has the logit logit[i], for all targets: queries are 1, keys are logits. They are
    rounded to bfloat16, so that a product with 1 is exact with every matrix instruction.
    """
    case = Case(
        graph, "dot", heads=1, kv_heads=1, features=1, value_features=1, strength=(1.0,),
        valid=valid, options={"top_k": k},
    )  # fmt: skip
    tensors = case.tensors(dtype)
    tensors["query"] = torch.ones_like(tensors["query"])
    rounded = logit.to(torch.bfloat16).to(dtype)
    tensors["key"] = rounded.view(1, -1, 1, 1)
    n = graph.num_targets
    expected = largest(case, rounded.double().view(1, 1, 1, -1).expand(1, 1, n, -1))
    return chosen(case, tensors, device), expected


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 40, 128, 129])
@pytest.mark.parametrize("logits", LOGITS)
def test_the_choice_is_that_of_a_sort(logits: str, k: int, device: str) -> None:
    """Rows keep one source, or up to all that they see; the sequence cuts windows off."""
    kept, expected = choices(LOGITS[logits], k, GRAPHS["window"], torch.float32, device)
    assert torch.equal(kept, expected)


@pytest.mark.long
@pytest.mark.parametrize("valid", ["", "both"], ids=["all valid", "padding"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_kind_of_window_has_its_choice(graph: str, valid: str, device: str) -> None:
    for logits in ("normal", "everything"):
        kept, expected = choices(LOGITS[logits], 23, GRAPHS[graph], torch.bfloat16, device, valid)
        assert torch.equal(kept, expected), logits


@pytest.mark.long
@pytest.mark.parametrize(
    "logits",
    [
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("normal", "two values", "everything")
        ),
        "Cauchy",
    ],
)
def test_a_long_window_writes_many_candidates_down(logits: str, device: str) -> None:
    """Rows have 67 words, so that the sample skips sources and many logits are written down."""
    tokens = 2100
    usual = random(tokens, seed=1)
    logit = {
        "normal": usual,
        "Cauchy": usual / random(tokens, seed=2),
        "two values": usual.sign(),
        "everything": LOGITS["everything"].repeat(17)[:tokens],
    }[logits]
    graph = ga.bipartite_complete_graph(20, tokens)
    for k in (1, 300, 2050):
        kept, expected = choices(logit, k, graph, torch.float32, device)
        assert torch.equal(kept, expected)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_exactly_k_are_kept(score: str, dtype: torch.dtype, device: str) -> None:
    """Logits that need rounding are the same in every pass, or one more or one less were kept."""
    case = Case(
        ga.window_path_graph(150, 70), score, heads=4, kv_heads=2, features=40, value_features=3,
        options={"top_k": 31},
    )  # fmt: skip
    number = case.edges[:, None].sum(-1).clamp(max=31)
    kept = chosen(case, case.tensors(dtype), device)
    assert torch.equal(kept.sum(-1), number.expand(kept.shape[:-1]))


def test_no_sources_are_no_choice(device: str) -> None:
    graph = ga.bipartite_complete_graph(5, 0)
    kept, expected = choices(torch.zeros(0).double(), 3, graph, torch.float32, device)
    assert torch.equal(kept, expected)
