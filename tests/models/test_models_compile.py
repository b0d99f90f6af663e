"""torch.compile keeps models whole, graphs that they build included: two compilations in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga

MIXERS: dict[str, Any] = {
    "dot": lambda: "dot",
    "consensus": lambda: "consensus",
    "mix": lambda: "mix",
    "krause": lambda: [ga.nn.KrauseAttention(8, 2, top_k=3) for _ in range(2)],
    "gka": lambda: [ga.nn.GaussianKernelAttention(8, 2, rope=True, eps=0.1), "consensus"],
}
LENGTHS = (17, 12, 40, 25)  # one compilation for the first, one for any


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def encoder(mixer: str, **options: Any) -> ga.models.SequenceEncoder:
    return ga.models.SequenceEncoder(
        9, 8, 2, 2, mixer=MIXERS[mixer](), edge_hidden=4, rank=2, **options
    )


def compilations(
    model: nn.Module,
    call: Callable[..., Tensor],
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
) -> int:
    """How often a call is compiled for all these inputs; what it gives is what it gave before."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for arguments, keywords in inputs:
        mine, expected = compiled(*arguments, **keywords), call(*arguments, **keywords)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        if arguments is not inputs[-1][0]:
            continue  # gradients are compared at the last length
        weight = torch.randn_like(expected)
        actual = (
            torch.autograd.grad(out, list(model.parameters()), weight, allow_unused=True)
            for out in (mine, expected)
        )
        for a, b in zip(*actual, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    return counter.frame_count


@pytest.mark.long
def test_also_with_safe_steps_positions_and_batches_of_other_sizes() -> None:
    model, inputs = encoder("mix", rope="isometric", step_size="auto"), []
    for n, batch in zip(LENGTHS, (2, 3, 5, 4), strict=True):
        inputs.append(((torch.randint(9, (batch, n)),), {"positions": torch.arange(n) * 2}))
    assert compilations(model, model, inputs) <= 2


@pytest.mark.long
def test_also_where_the_graphs_are_given() -> None:
    """One per block, and of packed sequences."""
    model, inputs = encoder("mix"), []
    for n in LENGTHS:
        packed = [ga.batch([build(n), build(6)]) for build in (ga.complete_graph, near)]
        inputs.append(((torch.randint(9, (n + 6,)), packed), {}))
    assert compilations(model, model, inputs) <= 2


def near(n: int) -> ga.TokenGraph:
    return ga.window_path_graph(n, 2, self_loops=True)


@pytest.mark.long
def test_also_under_autocast_and_without_fullgraph() -> None:
    model = encoder("mix")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for n in LENGTHS:
        tokens = torch.randint(9, (2, n))
        with torch.autocast("cpu", torch.bfloat16):
            mine, expected = compiled(tokens), model(tokens)
        assert mine.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(mine, expected, rtol=0.05, atol=0.05)
    assert counter.frame_count <= 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["krause", "consensus"])
def test_two_compilations_serve_a_block_at_all_lengths(name: str) -> None:
    mixer = {
        "krause": lambda: ga.nn.KrauseAttention(8, 2, top_k=3, rope=True),
        "consensus": lambda: ga.nn.SelfConsensus(8, 2, rank=2, edge_hidden=4, step_size="auto"),
    }[name]()
    block, inputs = ga.nn.PreNormBlock(mixer), []
    for n in LENGTHS:
        inputs.append(((torch.randn(2, n, 8), near(n)), {"valid": torch.rand(2, n) < 0.8}))
    assert compilations(block, block, inputs) <= 2


BUILDERS: dict[str, Callable[[Any], ga.TokenGraph]] = {
    "causal window": lambda n: ga.causal_window_graph(n, n // 2),
    "longformer": lambda n: ga.longformer_graph(n, 2, (0,)),
    "union": lambda n: ga.union(near(n), ga.dilated_window_graph(n, 2, 4)),
    "batch": lambda n: ga.batch([ga.causal_graph(n - 5), ga.complete_graph(5)]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BUILDERS)
def test_graphs_can_be_built_inside_what_is_compiled(name: str) -> None:
    layer = ga.nn.DotProductAttention(8, 2, rope=True)

    def call(x: Tensor) -> Tensor:
        return layer(x, BUILDERS[name](x.shape[-2]))

    inputs: list[Any] = [((torch.randn(2, n, 8),), {}) for n in LENGTHS]
    assert compilations(layer, call, inputs) <= 2


@pytest.mark.nightly
def test_a_sequence_shorter_than_the_window_comes_after_longer_ones() -> None:
    model = encoder("mix", window=5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (12, 17, 3):
        tokens = torch.randint(9, (2, length))
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_are_checked_inside_what_is_compiled_too(dynamic: bool) -> None:
    with torch.no_grad() if dynamic else nullcontext():
        compiled = torch.compile(
            lambda x: x + ga.causal_graph(len(x) - 5).num_tokens, backend="eager", dynamic=dynamic
        )
        assert compiled(torch.zeros(8)).tolist() == [3.0] * 8
        with pytest.raises(Exception, match="num_tokens must be >= 0, got"):
            compiled(torch.zeros(3))


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.ZOO)
def test_two_compilations_serve_every_model_at_all_lengths_and_batch_sizes(name: str) -> None:
    """Lengths and batch sizes vary; models of images have one number of tokens, at all batch sizes.

    Models build the graphs of their blocks themselves, for a length that the compiler leaves open.
    """
    model, inputs = zoo.made(name).eval(), []
    for tokens, examples in zip(LENGTHS, (3, 2, 4, 5), strict=True):
        batch = zoo.batch_of(name, tokens, examples, tokens)
        # Neighbours in space are as many as there are: found outside of what is compiled.
        keywords = {key: given for key, given in batch.keywords.items() if key != "structure"}
        inputs.append((batch.inputs, keywords))
    assert compilations(model, model, inputs) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_inductor_gives_the_same(mixer: str) -> None:
    model = encoder(mixer)
    compiled = torch.compile(model, fullgraph=True)
    for n in LENGTHS:
        tokens = torch.randint(9, (2, n))
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)
