"""Attention over rows of edges by compiled code: the reference's results, and the same bits always.

The sweeps of tests/ops run on it, too; here is what its own ways need: layouts, threads, blocks of
long rows, and every build.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import builds
import pytest
import torch
from threads import same_on_threads
from torch import Tensor

import graphattn as ga
from graphattn.graphs.edges import index_width
from graphattn.kernels.cpu import library
from graphattn.ops.attention.native import rows
from graphattn.ops.attention.structured import plans

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

CASES = int(os.environ.get("GRAPHATTN_SWEEP", "200"))


class Case:
    """A list of edges, tensors in some layout, and options, all drawn from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        targets, sources = self.draw(1, 2, 5, 17, 40), self.draw(1, 3, 9, 33)
        batch, kv_heads = self.draw((), (1,), (3,), (2, 2)), self.draw(1, 2)
        heads, width = kv_heads * self.draw(1, 2, 3), self.draw(1, 3, 8, 16, 19, 32, 64)
        value_width = self.draw(width, width, 5, 64)
        density = self.draw(0.0, 0.1, 0.4, 1.0)
        mask = torch.rand(targets, sources, generator=self.generator) < density
        self.graph = ga.from_mask(mask)
        self.tensors = [
            self.tensor(*batch, targets, heads, width),
            self.tensor(*batch, sources, kv_heads, width),
            self.tensor(*batch, sources, kv_heads, value_width),
        ]
        self.strength = 0.3 + torch.rand(heads, generator=self.generator, dtype=dtype)
        self.is_rbf = self.draw(True, False)
        self.options: dict[str, Any] = {"top_k": self.draw(None, None, 1, 2, 5)}
        if self.draw(True, False):
            self.options["valid"] = (
                torch.rand(*batch, targets, generator=self.generator) < 0.7,
                torch.rand(*batch, sources, generator=self.generator) < 0.7,
            )
        if self.draw(True, False):
            samples = self.draw((), batch)
            self.options["edge_bias"] = self.tensor(*samples, self.graph.num_edges, heads)
        if self.draw(True, False, False):
            self.options["dropout"] = 0.4
        if not self.is_rbf and self.draw(True, False, False):
            self.options["softcap"] = 0.7

    def draw(self, *options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def tensor(self, *shape: int) -> Tensor:
        """Contiguous, part of a larger tensor, or transposed."""
        kind = self.draw("whole", "part", "transposed")
        if kind == "part":
            wide = torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=self.generator)
            return wide.to(self.dtype)[..., 1 : 1 + shape[-1]]
        if kind == "transposed" and len(shape) >= 3:
            turned = (*shape[:-3], shape[-2], shape[-3], shape[-1])
            return torch.randn(turned, generator=self.generator).to(self.dtype).transpose(-3, -2)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def run(self, backend: str, *, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Output, log-sums, and the gradients of all that has one."""
        options = dict(self.options)
        named = {"query": 0, "key": 1, "value": 2}
        leaves = [x.to(dtype or self.dtype).detach() for x in self.tensors]
        leaves.append(self.strength.to(dtype or self.dtype).clone())
        if "edge_bias" in options:
            leaves.append(options.pop("edge_bias").to(dtype or self.dtype).detach())
        leaves = [x.requires_grad_() for x in leaves]
        options["sigma" if self.is_rbf else "scale"] = leaves[3]
        if len(leaves) > 4:
            options["edge_bias"] = leaves[4]
        if "dropout" in options:
            options["generator"] = torch.Generator().manual_seed(1)
        attend = ga.rbf_attention if self.is_rbf else ga.dot_product_attention
        given = {name: leaves[place] for name, place in named.items()}
        out, lse = attend(**given, graph=self.graph, backend=backend, return_lse=True, **options)
        d_out, d_lse = self.upstream(out, lse)
        sums = lse.masked_fill(lse == -torch.inf, 0)
        gradients = torch.autograd.grad([out, sums], leaves, [d_out, d_lse], allow_unused=True)
        zeros = (
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
        )
        return [out, lse, *zeros]

    def upstream(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of output and log-sums; of empty rows' log-sums 0."""
        generator = torch.Generator().manual_seed(2)
        d_out, d_lse = (
            torch.randn(x.shape, generator=generator, dtype=torch.float64)
            .to(self.dtype)
            .to(x.dtype)
            for x in (out, lse)
        )
        return d_out, d_lse.masked_fill(lse == -torch.inf, 0)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_it_is_the_reference(part: int) -> None:
    for seed in range(part, CASES, 4):
        case = Case(seed)
        close = {"rtol": 1e-11, "atol": 1e-11, "msg": f"seed {seed}"}
        torch.testing.assert_close(case.run("native"), case.run("reference"), **close)


def test_float32_is_float64_to_its_rounding() -> None:
    for seed in range(30):
        case = Case(seed, torch.float32)
        case.options["top_k"] = None  # rounding may choose others
        exact = case.run("native", dtype=torch.float64)
        close = {"rtol": 2e-5, "atol": 2e-5, "check_dtype": False, "msg": f"seed {seed}"}
        torch.testing.assert_close(case.run("native"), exact, **close)


@pytest.mark.long
@pytest.mark.parametrize("build", ["base", "v3"])
def test_every_build_is_the_reference(build: str) -> None:
    builds.run_with(
        build,
        "import torch, test_native_rows as rows\n"
        "for seed in range(40):\n"
        "    case = rows.Case(seed)\n"
        "    both = case.run('native'), case.run('reference')\n"
        "    torch.testing.assert_close(*both, rtol=1e-11, atol=1e-11)",
    )


def rows_of(lengths: list[int], sources: int, seed: int = 0) -> ga.TokenGraph:
    """Rows of so many sources each, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(lengths), sources, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row[torch.randperm(sources, generator=generator)[:length]] = True
    return ga.from_mask(mask)


@pytest.mark.parametrize("top_k", [None, 300])
def test_long_rows_and_sources_that_many_see_add_up_in_blocks(top_k: int | None) -> None:
    graph = rows_of([1000, 0, 257, 256, 1] + [3] * 600, 1000)
    seen = torch.cat(
        [graph.edge_index, torch.stack([torch.full((600,), 7), torch.arange(5, 605)])], 1
    )
    graph = ga.from_edge_index(seen.unique(dim=1), 605, 1000)  # source 7 is seen by 600
    torch.manual_seed(0)
    query = torch.randn(605, 2, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1000, 2, 8, dtype=torch.float64).requires_grad_() for _ in "kv")
    both = []
    for backend in ("native", "reference"):
        out = ga.dot_product_attention(query, key, value, graph, top_k=top_k, backend=backend)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        both.append([out, *torch.autograd.grad((out * weight).sum(), (query, key, value))])
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    points = torch.randn(700, 3, generator=torch.Generator().manual_seed(0))
    graph = ga.knn_graph(points, 16)
    torch.manual_seed(0)
    leaves = [torch.randn(2, 700, 4, 32).requires_grad_() for _ in range(3)]
    sigma = torch.full((4,), 2.0, requires_grad=True)

    def run() -> list[Tensor]:
        out = ga.rbf_attention(*leaves, graph, sigma, top_k=9, backend="native")
        return [out, *torch.autograd.grad(out.square().sum(), (*leaves, sigma))]

    same_on_threads(run, (1, 2, 3, 7))


def test_the_order_of_visits_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.randn(1500, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    leaves = [torch.randn(2, 1500, n, 8).requires_grad_() for n in (4, 2, 2)]
    sigma = torch.full((4,), 2.0, requires_grad=True)
    both = []
    for cache in (1 << 40, 0):  # what is kept near a core: everything, nothing
        monkeypatch.setattr(rows, "CACHE", cache)
        graph = ga.knn_graph(points, 8)
        for _ in range(2):  # from the second call on
            out = ga.rbf_attention(*leaves, graph, sigma, backend="native")
        both.append([out, *torch.autograd.grad(out.square().sum(), (*leaves, sigma))])
    (*lying, of_sigma), (*visited, again) = both
    assert all(torch.equal(a, b) for a, b in zip(lying, visited, strict=True))
    torch.testing.assert_close(of_sigma, again, rtol=1e-5, atol=0)


@pytest.mark.parametrize("at_once", [1, 2])
def test_heads_that_go_apart_have_the_same_bits(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [Case(seed) for seed in range(40)]
    together = [case.run("native") for case in cases]
    monkeypatch.setattr(rows, "_is_large", lambda *_: True)
    monkeypatch.setattr(rows.Edges, "visits", rows.Visits(None, True))
    monkeypatch.setattr(rows, "_heads_at_once", lambda *_: at_once)
    for case, expected in zip(cases, together, strict=True):
        assert all(map(torch.equal, case.run("native"), expected))


def test_heads_go_apart_where_rows_read_tokens_all_over_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scattered = rows_of([8] * 1000, 4000)
    near = ga.window_path_graph(4000, 4)
    lists = ga.from_edge_index(near.edge_index, 4000)
    assert rows.edges_of(scattered).visits == (None, True)
    assert rows.edges_of(lists).visits == (None, False)
    key = torch.randn(1, 4000, 8, 64)
    assert rows._heads_at_once(key, key) == 0
    monkeypatch.setattr(rows, "SHARED_CACHE", 6 << 20)  # bytes; a head has 2,048,000
    assert rows._heads_at_once(key, key) == 3
    monkeypatch.setattr(rows, "SHARED_CACHE", 1 << 20)
    assert rows._heads_at_once(key, key) == 2  # of 256 bytes each


def test_a_sample_has_the_bits_that_it_has_alone() -> None:
    graph = rows_of([5, 300, 0, 17, 64], 400)
    torch.manual_seed(0)
    shapes = (5, 4, 16), (400, 2, 16), (400, 2, 16)
    leaves = [torch.randn(3, *shape).requires_grad_() for shape in shapes]

    def run(*tensors: Tensor) -> list[Tensor]:
        out = ga.dot_product_attention(*tensors, graph, backend="native")
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    together = run(*leaves)
    alone = run(*(x[1].detach().requires_grad_() for x in leaves))
    assert all(torch.equal(a[1], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_sources_the_first_are_kept(dtype: torch.dtype) -> None:
    graph = rows_of([40, 40], 40)
    key = torch.randn(1, 1, 19, dtype=dtype).expand(40, 1, 19)
    query, value = (
        torch.randn(2, 1, 19, dtype=dtype),
        torch.arange(40.0, dtype=dtype)[:, None, None],
    )
    for k in (1, 3, 39):
        out = ga.dot_product_attention(query, key, value, graph, top_k=k, backend="native")
        torch.testing.assert_close(out.flatten(), torch.full((2,), (k - 1) / 2, dtype=dtype))
    zeros = key * torch.tensor([1.0, -1.0], dtype=dtype).repeat(20)[:, None, None] * 0
    out = ga.dot_product_attention(query, zeros, value, graph, top_k=2, backend="native")
    assert out.flatten().tolist() == [0.5, 0.5]  # 0 and -0 tie


def test_it_is_differentiated_twice_by_operations_of_torch() -> None:
    graph = rows_of([3, 2, 0, 4], 5)
    torch.manual_seed(0)
    leaves = [torch.randn(n, 2, 3, dtype=torch.float64).requires_grad_() for n in (4, 5, 5)]
    bias = torch.randn(graph.num_edges, 2, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return ga.rbf_attention(q, k, v, graph, 1.3, edge_bias=b, backend="native")

    assert torch.autograd.gradcheck(attend, (*leaves, bias))
    assert torch.autograd.gradgradcheck(attend, (*leaves, bias))


@pytest.mark.parametrize("Layer", [ga.nn.DotProductAttention, ga.nn.KrauseAttention])
@pytest.mark.parametrize(
    "build",
    [lambda n: ga.knn_graph(torch.randn(n, 3), 5), lambda n: ga.causal_window_graph(n, 9)],
    ids=["neighbours", "window"],
)
def test_compiled_functions_hold_it_whole(build: Any, Layer: Any) -> None:
    layer = Layer(16, heads=2, backend="native")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (20, 31, 47):
        graph = build(tokens)
        x = torch.randn(2, tokens, 16, requires_grad=True)
        both = compiled(x, graph), layer(x, graph)
        torch.testing.assert_close(*both)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in both))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_half_precision_is_float64_rounded_once(dtype: torch.dtype, rounding: float) -> None:
    for seed in range(15):
        case = Case(seed, dtype)
        case.options["top_k"] = None
        exact = case.run("native", dtype=torch.float64)
        # The least number of float16 that has all its digits is 6e-5.
        close = {"rtol": 1.1 * rounding, "atol": 2e-5, "check_dtype": False, "msg": f"seed {seed}"}
        torch.testing.assert_close(case.run("native"), exact, **close)


class Wrapped(Tensor):
    """A tensor whose numbers lie in another one, as those of DTensor do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def plain(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)


def test_tensors_without_memory_of_their_own_go_another_way() -> None:
    graph, x = rows_of([3, 2, 0], 3), torch.randn(3, 1, 4)
    expected = ga.rbf_attention(x, x, x, graph, 1.0)
    assert torch.allclose(
        ga.rbf_attention(Wrapped(x), Wrapped(x), Wrapped(x), graph, 1.0), expected
    )
    with pytest.raises(ValueError, match="plain tensors, which a Wrapped is not"):
        ga.rbf_attention(Wrapped(x), x, x, graph, 1.0, backend="native")
    negative = torch.complex(torch.zeros(3, 1, 4), -x).conj().imag  # a view that only says "minus"
    assert negative.is_neg()
    torch.testing.assert_close(ga.rbf_attention(negative, negative, x, graph, 1.0), expected)


def test_what_looks_into_steps_is_refused_by_name() -> None:
    graph, x = rows_of([3, 2, 0], 3), torch.randn(5, 3, 1, 4)

    def attend(x: Tensor, backend: str) -> Tensor:
        return ga.rbf_attention(x, x, x, graph, 1.0, backend=backend)

    torch.testing.assert_close(torch.vmap(lambda x: attend(x, "auto"))(x), attend(x, "native"))
    with pytest.raises(ValueError, match=r"backend 'native' cannot run inside torch\.func"):
        torch.vmap(lambda x: attend(x, "native"))(x)


def test_where_there_is_none_the_fallback_runs_and_says_why() -> None:
    code = """
import torch, graphattn as ga
graph, x = ga.knn_graph(torch.randn(9, 2), 3), torch.randn(9, 1, 4)
print(ga.backends("rbf_attention", graph, x)["native"])
assert ga.rbf_attention(x, x, x, graph, 1.0).shape == x.shape
try:
    ga.rbf_attention(x, x, x, graph, 1.0, backend="native")
except ValueError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"GRAPHATTN_NATIVE": "0"},
    )  # fmt: skip
    reason = "the compiled CPU kernels are turned off by GRAPHATTN_NATIVE=0"
    assert run.stdout.splitlines() == [reason, f"backend 'native' cannot run this case: {reason}"]


# Lists of edges in 64 bits, as graphs have them whose numbers need it.


def test_lists_of_64_bits_give_what_lists_of_32_bits_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(min(CASES, 60)):
        for dtype in (torch.float32, torch.float64):
            narrow, wide = Case(seed, dtype), Case(seed, dtype)
            with monkeypatch.context() as patch:
                patch.setattr(index_width, "MOST", -1)
                wide.graph = ga.from_edge_index(
                    narrow.graph.edge_index, narrow.graph.num_targets, narrow.graph.num_sources
                )
                assert not rows.edges_of(wide.graph).is_narrow
                theirs = wide.run("native")
            assert rows.edges_of(narrow.graph).is_narrow
            torch.testing.assert_close(narrow.run("native"), theirs, msg=f"seed {seed}, {dtype}")


@pytest.mark.parametrize("most", [index_width.MOST, -1])
def test_a_table_of_offsets_is_read_in_either_width(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_width, "MOST", most)
    graph = ga.volume_window_graph(3, 4, 5, 1)
    structure = graph.structure
    assert structure is not None
    assert structure.num_offsets == 27
    plans._graph_of.cache_clear()  # of the other width
    torch.manual_seed(0)
    bias = torch.randn(27, 2, requires_grad=True)
    q, k, v = (torch.randn(60, 2, 19, requires_grad=True) for _ in range(3))
    out = ga.dot_product_attention(q, k, v, graph, edge_bias=bias, backend="native")
    exact = ga.dot_product_attention(q, k, v, graph, edge_bias=bias, backend="reference")
    assert rows.edges_of(plans._graph_of(structure, graph.device)).is_narrow == (most > 0)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), (q, k, v, bias)) for y in (out, exact))
    )
    plans._graph_of.cache_clear()
