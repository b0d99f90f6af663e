"""Nearest neighbours by kernels: the torch path says who is nearest, index for index."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from watched_memory import watched_memory

import graphattn as ga
from graphattn.kernels.shared.launch import recording, tensors_in

pytest.importorskip("triton")
from graphattn.kernels.neighbors import candidates, exact

pytestmark = pytest.mark.usefixtures("device")

TOKENS = 50


def small(k: int, width: int) -> candidates.Sizes:
    """Tiles that few tokens fill several of."""
    return candidates.Sizes(
        16, 32, 4, max(16, candidates.triton.next_power_of_2(k + 2 + candidates.SPARE))
    )


@pytest.fixture(autouse=True)
def _quick(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles in the interpreter, but many rows per program where the order is made."""
    if device == "cpu":
        monkeypatch.setattr(candidates, "choose", small)
        monkeypatch.setattr(exact, "NUMBERS", 1 << 16)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, most: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most + 1, shape, generator=generator).float()


def holed(x: Tensor) -> Tensor:
    x = x.clone()
    x[3, 0], x[11], x[-1, -1] = math.nan, math.inf, -math.inf
    return x


@dataclass(frozen=True)
class Case:
    x: Tensor
    k: int = 5
    source: Tensor | None = None
    within: ga.TokenGraph | None = None
    both: bool = True  # with and without self loops


WITHIN = {
    "path": ga.window_path_graph(TOKENS, 4),
    "path with loops": ga.window_path_graph(TOKENS, 20, self_loops=True),
    "causal": ga.causal_graph(TOKENS),
    "causal window": ga.causal_window_graph(TOKENS, 37),
    "blocks": ga.block_window_graph(TOKENS, 16, shift=5),
    "dilated": ga.dilated_window_graph(TOKENS, 4, 3),
    "complete without loops": ga.complete_graph(TOKENS, self_loops=False),
    "sequences": ga.batch(
        [ga.causal_graph(40), ga.complete_graph(3), ga.window_path_graph(TOKENS - 43, 9)]
    ),
    # Token 20 is a target of the first part and a source of the second: no edge of its own.
    "rectangles": ga.batch(
        [ga.bipartite_complete_graph(30, 20), ga.bipartite_complete_graph(20, 30)]
    ),
}
CASES = {
    "one coordinate": Case(random(TOKENS, 1)),
    "three": Case(random(TOKENS, 3)),
    "seventeen": Case(random(TOKENS, 17)),
    "more than a product takes at once": Case(random(40, 67), both=False),
    "hundreds": Case(random(20, 257), k=3, both=False),
    "ties": Case(integers(TOKENS, 2, most=3)),
    "a lattice": Case(torch.cartesian_prod(*[torch.arange(4.0)] * 3), k=26, both=False),
    "duplicates": Case(torch.ones(50, 2)),
    "two places": Case(random(2, 3)[torch.arange(TOKENS) % 2]),
    "an offset of 10 000": Case(integers(TOKENS, 3, most=64) / 16 + 1e4),
    "not finite": Case(holed(random(TOKENS, 3))),
    "nothing is finite": Case(torch.full((5, 2), math.nan), k=2),
    "squares overflow": Case(torch.tensor([[0.0], [1e25], [3e25], [-3e38], [3e38]]), k=4),
    "squares vanish": Case(integers(TOKENS, 3, most=64) * 1e-26),
    "clusters": Case(random(3, 9)[torch.arange(TOKENS) % 3] + 1e-3 * random(TOKENS, 9, seed=1)),
    "every other token": Case(random(20, 3), k=19, both=False),
    "other tokens": Case(random(TOKENS, 3), source=random(40, 3, seed=1)),
    "all other tokens": Case(random(5, 3), source=holed(random(33, 3, seed=1)), k=33),
    "one source": Case(random(33, 3), source=random(1, 3, seed=1), k=1),
    "no targets": Case(torch.zeros(0, 3), source=random(7, 3), k=2),
    "no coordinates": Case(torch.zeros(9, 0), k=3),
    **{
        f"within {name}": Case(random(TOKENS, 3), within=graph) for name, graph in WITHIN.items()
    },
    "ties within": Case(integers(TOKENS, 2, most=2), within=WITHIN["sequences"]),
    "not finite within": Case(holed(random(TOKENS, 3)), within=WITHIN["causal window"]),
    "other tokens within": Case(
        random(TOKENS, 3), source=random(TOKENS, 3, seed=1), within=WITHIN["path"]
    ),
    "fewer than k within": Case(random(TOKENS, 3), k=20, within=WITHIN["path"], both=False),
}  # fmt: skip


def both_ways(case: Case, device: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Indices by kernels on the device and by torch on the CPU."""
    index = ga.knn(
        case.x.to(device),
        case.k,
        source=None if case.source is None else case.source.to(device),
        within=None if case.within is None else case.within.to(device),
        backend="triton",
        **options,
    )[0]
    expected, _ = ga.knn(
        case.x, case.k, source=case.source, within=case.within, backend="reference", **options
    )
    return index.cpu(), expected


@pytest.mark.parametrize("name", CASES)
def test_kernels_find_exactly_whom_torch_finds(name: str, device: str) -> None:
    case = CASES[name]
    with watched_memory(device):
        index, expected = both_ways(case, device)
    assert index.dtype == torch.int64
    assert torch.equal(index, expected)
    if case.both and case.source is None:
        index, expected = both_ways(case, device, self_loops=True)
        assert torch.equal(index, expected)


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 9, 24, 25, 121, 248, 256])
def test_any_number_of_neighbours(k: int, device: str) -> None:
    """Kernels find exactly the k nearest sources of torch, for k from 1 to 256.

    The number of candidates that are kept is a power of two of at least k + 8: it doubles between
    24 and 25, just before 9 and 121, and just after 248.
    """
    case = Case(random(4, 3), source=random(260, 3, seed=1), k=k)
    with watched_memory(device):
        index, expected = both_ways(case, device)
    assert torch.equal(index, expected)


def test_the_real_tiles_find_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
    index, expected = both_ways(Case(random(140, 3)), device)
    assert torch.equal(index, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_searched_in_float32(dtype: torch.dtype, device: str) -> None:
    index, expected = both_ways(Case(random(TOKENS, 9).to(dtype)), device)
    assert torch.equal(index, expected)


def unsure(monkeypatch: pytest.MonkeyPatch, case: Case, device: str) -> Tensor:
    """Return which rows are searched again; what is found must be right."""
    seen = []

    def spy(x: Tensor, y: Tensor, index: Tensor, unsure: Tensor, *more: Any) -> None:
        seen.append(unsure.cpu().bool())
        exact.search_again(x, y, index, unsure, *more)

    monkeypatch.setattr(candidates, "search_again", spy)
    index, expected = both_ways(case, device)
    assert torch.equal(index, expected)
    return seen[0]


@pytest.mark.long
def test_random_rows_are_proved_and_not_searched_again(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = random(TOKENS, 3)
    half[::2] = math.nan  # no token that is not finite takes the place of one that is
    for case in (CASES["seventeen"], Case(half), CASES["within causal"]):
        assert not unsure(monkeypatch, case, device).any()


def cut(x: Tensor, bits: int, *, rounded: bool) -> Tensor:
    """float64 numbers cut off, or rounded, to so many bits behind the first."""
    mantissa, exponent = torch.frexp(x)
    scaled = mantissa * 2.0 ** (bits + 1)
    return torch.ldexp(scaled.round() if rounded else scaled.trunc(), exponent - bits - 1)


def by_tf32x3(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T of float32 numbers as tensor cores form it, every sum cut off: the worst of them."""
    a, b = a.double(), b.double()
    large_a, large_b = (cut(x, 10, rounded=True) for x in (a, b))
    small_a, small_b = (cut(x - y, 10, rounded=False) for x, y in ((a, large_a), (b, large_b)))
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for one, other in ((small_a, large_b), (large_a, small_b), (large_a, large_b)):
        for c in range(a.shape[1]):
            total = cut(total + one[:, c, None] * other[None, :, c], 23, rounded=False)
    return total.float()


POINTS = {
    "random": lambda: random(40, 24),
    "clusters": lambda: random(4, 24)[torch.arange(40) % 4] + 1e-4 * random(40, 24, seed=1),
    "offset": lambda: random(40, 5) + 1e4,
    "scales": lambda: random(40, 7) * torch.logspace(-6, 6, 40)[:, None],
    "tiny": lambda: random(40, 3) * 1e-25,
    "parallel": lambda: torch.linspace(1.0, 2.0, 40)[:, None] * random(1, 64),
}


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_a_squared_distance_is_at_least_s_plus_the_margin(name: str, precision: str) -> None:
    """The claim that the proof of a row rests on, and that it is not given away."""
    x = POINTS[name]()
    tokens = candidates.centred(x, x, precision)
    a, b = tokens.a, tokens.b
    s = tokens.square[None] - 2 * (a @ b.T if precision == "ieee" else by_tf32x3(a, b))
    squared = (x.double()[:, None] - x.double()[None]).square().sum(-1)
    slack = squared - (s.double() + tokens.margin[:, None])
    assert bool((slack >= 0).all())
    reach = a.double().norm(dim=1).max() * 2
    assert float(slack.max()) <= 2e-4 * float(reach) ** 2 + 1e-30


@pytest.mark.long
def test_nothing_is_read_out_of_bounds(device: str) -> None:
    """NaN before the first and after the last token reaches nobody; nor does another part."""
    for rows, width in ((33, 3), (47, 17)):
        wide = torch.full((rows + 200, width), math.nan, device=device)
        x = wide[100 : 100 + rows]
        for tokens in (random(rows, width), torch.ones(rows, width)):
            x.copy_(tokens)
            index, _ = ga.knn(x, 5, backend="triton")
            assert torch.equal(index.cpu(), ga.knn(tokens, 5)[0])


def test_gradients_are_those_of_torch_and_zero_where_nobody_is_near(device: str) -> None:
    gradients = []
    for backend in ("triton", "reference"):
        x = holed(random(30, 3)).to(device).requires_grad_()
        within = ga.causal_window_graph(30, 4).to(device)
        _, squared = ga.knn(x, 5, within=within, backend=backend)
        (gradient,) = torch.autograd.grad(squared[squared.isfinite()].square().sum(), x)
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert gradients[0].any()
    assert not gradients[0][[3, 11, 29]].any()


@pytest.mark.parametrize("within", [None, ga.causal_window_graph(5000, 64)])
def test_nothing_waits_for_the_device(within: ga.TokenGraph | None) -> None:
    """Tensors without numbers: whoever asked for one would fail."""
    x = torch.empty(5000, 12, device="meta", requires_grad=True)
    graph = None if within is None else within.to("meta")
    with recording() as launches:
        index, squared = ga.knn(x, 16, within=graph, backend="triton")
        squared.sum().backward()
    assert [each.kernel.fn.__name__ for each in launches] == [
        "candidates_kernel", "order_kernel", "search_kernel",
    ]  # fmt: skip
    assert index.shape == squared.shape == (5000, 16)
    assert index.dtype == torch.int64
    largest = max(t.numel() for each in launches for t in tensors_in(each.arguments.values()))
    assert largest <= 5000 * 32  # N x N would be 25 million
