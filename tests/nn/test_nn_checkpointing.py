"""Activations that are thrown away and computed again, or kept elsewhere, change no bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nn_by_hand import DIM, HEADS, ONE_OF_EACH, graph_of, tokens_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import graphattn as ga

Call = Callable[..., Tensor]


def again(call: Call, *, reentrant: bool) -> Call:
    """`call`, whose activations are computed again when the gradient asks for them."""
    return lambda *arguments, **keywords: checkpoint(
        lambda *given: call(*given, **keywords), *arguments, use_reentrant=reentrant
    )


def elsewhere(call: Call) -> Call:
    def run(*arguments: Any, **keywords: Any) -> Tensor:
        with save_on_cpu():
            return call(*arguments, **keywords)

    return run


def read_once(call: Call) -> Call:
    """Every saved tensor can be taken back a single time, as under nested checkpointing."""

    def unpack(box: list[Tensor]) -> Tensor:
        assert box, "a saved tensor is read twice"
        return box.pop()

    def run(*arguments: Any, **keywords: Any) -> Tensor:
        with saved_tensors_hooks(lambda x: [x], unpack):
            return call(*arguments, **keywords)

    return run


WAYS: dict[str, Callable[[Call], Call]] = {
    "reentrant": lambda call: again(call, reentrant=True),
    "non-reentrant": lambda call: again(call, reentrant=False),
    "on the CPU": elsewhere,
    "read once": read_once,
    "non-reentrant twice": lambda call: again(again(call, reentrant=False), reentrant=False),
    "non-reentrant in reentrant": lambda call: again(again(call, reentrant=False), reentrant=True),
    "reentrant in non-reentrant": lambda call: again(again(call, reentrant=True), reentrant=False),
    "non-reentrant, on the CPU": lambda call: elsewhere(again(call, reentrant=False)),
    "on the CPU, non-reentrant": lambda call: again(elsewhere(call), reentrant=False),
}


def value_and_gradients(
    call: Call, module: nn.Module, arguments: tuple[Any, ...], **keywords: Any
) -> list[Tensor]:
    leaves = [
        x.requires_grad_() for x in arguments if isinstance(x, Tensor) and x.is_floating_point()
    ]
    module.zero_grad()
    for leaf in leaves:
        leaf.grad = None
    out = call(*arguments, **keywords)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weight).sum().backward()  # reentrant checkpointing knows no autograd.grad
    results = [out.detach()]
    for x in (*leaves, *module.parameters()):
        assert x.grad is not None
        results.append(x.grad.clone())
    return results


def assert_same_bits(
    module: nn.Module, arguments: tuple[Any, ...], way: str, **keywords: Any
) -> None:
    plain = value_and_gradients(module, module, arguments, **keywords)
    mine = value_and_gradients(WAYS[way](module), module, arguments, **keywords)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["auto", "structured", "reference"])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_layer_gives_the_same_bits_however_activations_are_kept(
    case: Any, backend: str, way: str
) -> None:
    layer, graph = case.make(dtype=torch.float32, backend=backend), graph_of(case)
    x, *context = tokens_of(case, graph, dtype=torch.float32)
    assert_same_bits(layer, (x, graph, *context), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if not c.context_width], ids=str)
def test_a_block_does_with_padding_packed_sequences_and_autocast(
    case: Any, autocast: bool, way: str
) -> None:
    torch.manual_seed(0)
    block = ga.nn.PreNormBlock(case.make(dtype=torch.float32))
    graph = ga.batch([ga.window_path_graph(6, 2, self_loops=True), ga.complete_graph(5)])
    x = torch.randn(2, DIM, 11).mT  # not contiguous
    valid = torch.rand(2, 11) < 0.8
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        assert_same_bits(block, (x, graph), way, valid=valid)


@pytest.mark.parametrize("way", [way for way in WAYS if "reentrant" not in way.split()])
@pytest.mark.parametrize("inner", ["plain", "reentrant", "non-reentrant", "on the CPU"])
@pytest.mark.parametrize("mixer", ["dot", "consensus", "mix"])
def test_an_encoder_does_with_its_blocks_checkpointed_within(
    mixer: Any, inner: str, way: str
) -> None:
    """(Around a whole model reentrant checkpointing has no gradient: tokens are integers.)"""
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, DIM, 2, HEADS, mixer=mixer, edge_hidden=6)
    tokens = torch.randint(9, (2, 13))
    expected = value_and_gradients(model, model, (tokens,))
    for block in model.blocks:
        if inner != "plain":
            block.forward = WAYS[inner](block.forward)
    mine = value_and_gradients(WAYS[way](model), model, (tokens,))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if not c.context_width], ids=str)
def test_second_gradients_too(case: Any) -> None:
    """create_graph=True takes another way back, which reads what was saved once as well."""
    layer, graph = case.make(), graph_of(case)
    (x,) = tokens_of(case, graph)
    results = []
    for hooks in (False, True):
        x = x.detach().requires_grad_()
        call: Call = again(layer, reentrant=False) if hooks else layer
        (gradient,) = torch.autograd.grad(call(x, graph).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if not c.context_width], ids=str)
def test_a_compiled_layer_does_too(case: Any) -> None:
    torch._dynamo.reset()
    layer, graph = case.make(dtype=torch.float32), graph_of(case)
    compiled: Any = torch.compile(layer, backend="aot_eager")
    (x,) = tokens_of(case, graph, dtype=torch.float32)
    plain = value_and_gradients(compiled, layer, (x, graph))
    for way in ("non-reentrant", "on the CPU", "read once"):
        mine = value_and_gradients(WAYS[way](compiled), layer, (x, graph))
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch._dynamo.reset()
