"""Compiled attention over bands reads and writes half precision, and computes in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
each_score = pytest.mark.parametrize("score", ["dot", "rbf"])
OPTIONS = {"top-k": {"top_k": 9}}  # of some of these graphs
GRAPHS = {
    "causal window": lambda: ga.causal_window_graph(300, 70),
    "narrow": lambda: ga.window_path_graph(150, 2, self_loops=True),
    "dilated": lambda: ga.dilated_window_graph(90, 18, 3),
    "blocks": lambda: ga.block_window_graph(100, 30),
    "batch": lambda: ga.batch([ga.causal_graph(60), ga.window_path_graph(40, 3)]),
    "top-k": lambda: ga.causal_window_graph(120, 40),
}
each_graph = pytest.mark.parametrize("name", GRAPHS)


def attend(
    leaves: list[Tensor], graph: ga.TokenGraph, score: str, **options: Any
) -> tuple[Tensor, Tensor]:
    options = {"backend": "native", "return_lse": True, **options}
    if score == "rbf":
        return ga.rbf_attention(*leaves, graph, 2.0, **options)
    return ga.dot_product_attention(*leaves, graph, scale=0.3, **options)


def tensors(graph: ga.TokenGraph, dtype: torch.dtype, width: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (graph.num_targets, 4), (graph.num_sources, 2), (graph.num_sources, 2)
    return [
        torch.randn(2, *shape, d, generator=generator).to(dtype)
        for shape, d in zip(shapes, (width, width, width + 3), strict=True)
    ]


@each_dtype
@pytest.mark.parametrize("width", [1, 7, 8, 16, 23, 64])
def test_every_number_is_read_and_written_as_it_is(dtype: torch.dtype, width: int) -> None:
    """Tokens that see but themselves; infinity and NaN are rows of their own."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    tokens = -(-len(every) // width)
    value = torch.zeros(tokens * width, dtype=dtype)
    value[: len(every)] = every
    value = value.view(tokens, 1, width)
    graph = ga.causal_window_graph(tokens, 1)
    query = torch.zeros(tokens, 1, 3, dtype=dtype)
    out, _ = attend([query, query, value], graph, "dot")
    assert out.dtype == dtype
    nan = value.isnan()
    assert torch.equal(out.isnan(), nan)
    # Sums begin with +0, to which -0 adds nothing.
    assert torch.equal(out.masked_fill(nan, 0), value.masked_fill(nan, 0))


@pytest.mark.long
@pytest.mark.parametrize("build", ["base", "v3"])
def test_every_build_converts_all_numbers(build: str) -> None:
    """float16 by integers, and by other instructions."""
    builds.run_with(
        build,
        "import torch, test_native_bands_half as half\n"
        "for dtype in (torch.float16, torch.bfloat16):\n"
        "    for width in (7, 16):\n"
        "        half.test_every_number_is_read_and_written_as_it_is(dtype, width)\n"
        "    half.test_a_mean_between_two_numbers_is_rounded_to_the_even_one(dtype)\n"
        "half.test_denormal_numbers_of_float16_are_read_where_those_of_float32_are_flushed()",
    )


def test_denormal_numbers_of_float16_are_read_where_those_of_float32_are_flushed() -> None:
    value = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16).view(-1, 1, 11)
    graph = ga.causal_window_graph(len(value), 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # it is a setting of a thread
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush denormal numbers")
        out, _ = attend([value, value, value], graph, "dot")
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert torch.equal(out, value)


@each_dtype
def test_a_mean_between_two_numbers_is_rounded_to_the_even_one(dtype: torch.dtype) -> None:
    """Two edges of equal weight, whose values are neighbours among the numbers of the dtype."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(4000, 1, 9, generator=generator).to(dtype)
    value[1::2] = (value[::2].view(torch.int16) + 1).view(dtype)
    graph = ga.block_window_graph(len(value), 2)
    query = torch.zeros(len(value), 1, 2, dtype=dtype)
    out, _ = attend([query, query, value], graph, "dot")
    exact = value.float().view(-1, 2, 1, 9).mean(1)
    assert (exact != exact.to(dtype)).all()
    assert torch.equal(out[::2], exact.to(dtype))


@each_dtype
@each_score
@each_graph
def test_outputs_are_those_of_float32_rounded_once(
    name: str, score: str, dtype: torch.dtype
) -> None:
    graph = GRAPHS[name]()
    leaves = tensors(graph, dtype)
    generator = torch.Generator().manual_seed(1)
    valid = torch.rand(2, graph.num_targets, generator=generator) < 0.8
    options: dict[str, Any] = {"valid": valid, **OPTIONS.get(name, {})}
    out, lse = attend(leaves, graph, score, **options)
    exact, sums = attend([x.float() for x in leaves], graph, score, **options)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))
    assert torch.equal(lse, sums)


@each_dtype
@each_score
@each_graph
def test_gradients_are_those_of_float32_rounded_once(
    name: str, score: str, dtype: torch.dtype
) -> None:
    graph = GRAPHS[name]()
    gradients, exact = gradients_of(tensors(graph, dtype), graph, score, **OPTIONS.get(name, {}))
    for mine, near in zip(gradients, exact, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, near.to(dtype))


def gradients_of(
    halves: list[Tensor], graph: ga.TokenGraph, score: str, **options: Any
) -> list[tuple[Tensor, ...]]:
    """Compute gradients for inputs in half precision, and for the same inputs in float32.

    The loss is a sum of outputs and log-sums with random weights.
    """
    gradients = []
    for leaves in (halves, [x.float() for x in halves]):
        mine = [x.detach().requires_grad_() for x in leaves]
        inputs = mine + [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
        out, lse = attend(mine, graph, score, **options)
        generator = torch.Generator().manual_seed(2)
        d_out = torch.randn(out.shape, generator=generator).to(halves[0].dtype).to(out.dtype)
        d_lse = torch.where(lse.isfinite(), torch.randn(lse.shape, generator=generator), 0)
        gradients.append(torch.autograd.grad([out, lse], inputs, [d_out, d_lse]))
    return gradients


@each_dtype
def test_values_far_from_zero(dtype: torch.dtype) -> None:
    """Gradients want outputs with all their digits: those of queries cancel what values share."""
    graph = ga.causal_window_graph(200, 40)
    halves = tensors(graph, dtype)
    halves[2] += 100
    gradients, near = gradients_of(halves, graph, "dot")
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(gradients, near, strict=True))
    exact, _ = gradients_of([x.double() for x in halves], graph, "dot", backend="reference")
    error = (gradients[0].double() - exact[0]).abs().max() / exact[0].abs().max()
    assert error < torch.finfo(dtype).eps


@each_dtype
def test_a_table_softcap_sink_and_eps(dtype: torch.dtype) -> None:
    graph = ga.causal_window_graph(80, 20)
    halves = tensors(graph, dtype)
    table = torch.randn(graph.structure.num_offsets, 4, requires_grad=True)
    sink = torch.tensor(0.3, requires_grad=True)
    for score, options in (
        ("dot", {"softcap": 2.0}),
        ("dot", {"sink": sink}),
        ("dot", {"softcap": 1.0, "sink": sink, "top_k": 5}),
        ("rbf", {"eps": 0.5}),
    ):
        options = {"edge_bias": table, **options}
        out, _ = attend(halves, graph, score, **options)
        exact, _ = attend([x.float() for x in halves], graph, score, **options)
        assert torch.equal(out, exact.to(dtype))
        for mine, near in zip(*gradients_of(halves, graph, score, **options), strict=True):
            assert torch.equal(mine, near.to(mine.dtype))


@each_dtype
def test_rows_computed_by_themselves(dtype: torch.dtype) -> None:
    """Rows that are computed by themselves have the results of float32, rounded once.

    Such rows see NaN or infinity, or have ties among the last edges kept, or steep logits.
    """
    graph = ga.causal_window_graph(90, 20)
    leaves = tensors(graph, dtype)
    leaves[1][0, 5] = torch.nan
    leaves[2][1, 40] = torch.inf
    leaves[1][:, 60:70] = leaves[1][:, 60:61]
    for options in ({}, {"top_k": 4}):
        for factor in (1, 20):
            near = [leaves[0] * factor, *leaves[1:]]
            mine = [x.clone().requires_grad_() for x in near]
            floats = [x.float().requires_grad_() for x in near]
            out, lse = attend(mine, graph, "rbf", **options)
            exact, sums = attend(floats, graph, "rbf", **options)
            torch.testing.assert_close(out, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(lse, sums, rtol=0, atol=0, equal_nan=True)
            d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            d_out[:, 5:25] = 0  # whom NaN reaches
            d_out[1, 40:60] = 0
            gradients = torch.autograd.grad(out, mine, d_out)
            expected = torch.autograd.grad(exact, floats, d_out.float())
            for a, b in zip(gradients, expected, strict=True):
                assert b.isfinite().all()
                assert torch.equal(a, b.to(dtype))


@each_dtype
def test_nothing_is_kept_or_converted_as_a_whole(dtype: torch.dtype) -> None:
    graph = ga.causal_window_graph(200, 30)
    leaves = [x.requires_grad_() for x in tensors(graph, dtype)]
    kept: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out, _ = attend(leaves, graph, "rbf")
    wide = [x for x in kept if x.dtype == torch.float32]
    assert sum(x.dtype == dtype for x in kept) == 4  # query, key, value, output
    assert sum(x.numel() for x in wide) <= out.numel() + 2 * out.shape[:-1].numel() + 4
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        attend(leaves, graph, "rbf")
    copied = [e.input_shapes[0] for e in profile.events() if e.name == "aten::_to_copy"]
    assert all(math.prod(shape) <= 4 for shape in copied), copied  # the scale of every head


@each_dtype
def test_dropout_and_compiled_functions_convert_whole_tensors(dtype: torch.dtype) -> None:
    graph = ga.causal_window_graph(60, 12)

    def run(leaves: list[Tensor], dropout: float = 0.0) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return attend(leaves, graph, "dot", dropout=dropout, generator=generator)[0]

    halves = tensors(graph, dtype)
    floats = [x.float() for x in halves]
    dropped = run(halves, 0.3)
    assert torch.equal(dropped, run(floats, 0.3).to(dtype))
    assert not torch.equal(dropped, run(halves))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *leaves: attend([*leaves], graph, "dot")[0], fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*halves), run(halves))


@each_dtype
def test_strided_inputs_and_any_number_of_threads(dtype: torch.dtype) -> None:
    graph = ga.causal_window_graph(700, 60)
    projected = torch.randn(2, 700, 3, 4, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    projected.requires_grad_()
    plain = [x.clone() for x in projected.unbind(2)]

    def run(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out, _ = attend(list(leaves), graph, "dot")
        return out, *torch.autograd.grad(out.float().square().sum(), projected)

    strided = same_on_threads(lambda: run(projected.unbind(2)), (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(strided, run(plain), strict=True))


@each_dtype
def test_graphs_without_bands_are_computed_in_float32(dtype: torch.dtype) -> None:
    for graph in (
        ga.from_edge_index(ga.causal_window_graph(50, 9).edge_index, 50),
        ga.longformer_graph(200, 5, [3]),
        ga.grid_window_graph(9, 9, 2, class_token=True),
        ga.neighborhood_graph((12, 12), 3),
    ):
        leaves = [x.requires_grad_() for x in tensors(graph, dtype)]
        out, lse = attend(leaves, graph, "rbf")
        exact, sums = attend([x.float() for x in leaves], graph, "rbf")
        assert out.dtype == dtype
        assert torch.equal(out, exact.to(dtype))
        assert torch.equal(lse, sums)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        assert [x.dtype for x in gradients] == [dtype] * 3
