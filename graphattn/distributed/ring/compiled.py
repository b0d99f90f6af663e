"""A ring as one operator, which torch.compile does not trace into.

A compiler could keep rows of all ranks from the forward pass, or merge the two times that they
travel. The operator runs the passes of :mod:`.passes`, with the layer and the graph that it finds
by their numbers. So one compilation serves all layers of a kind, and a second one all lengths.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.distributed.agreement import OpenFacts, agree
from graphattn.distributed.exchange import in_places_of
from graphattn.distributed.ring import passes
from graphattn.ops.library.numbered import object_of

OPTIONS = (
    "bool[] present, int[] counts, Tensor shard, Tensor? layer, str make, bool both, "
    "ScalarType? autocast"
)


class _Options(NamedTuple):
    """What the operators get beside tensors; the names are those of their schema.

    Attributes:
        present: which of the targets, sources, parameters and other tensors are not None.
        counts: how many targets, sources and parameters there are.
        shard, layer: the numbers of the graph and the layer.
        make: the function that makes the operation, "module:name".
        both: whether both ends of an edge move.
        autocast: the dtype of autocast around the call, None without it.
    """

    present: Sequence[bool]
    counts: Sequence[int]
    shard: Tensor
    layer: Tensor | None
    make: str
    both: bool
    autocast: torch.dtype | None

    def run(self, given: Sequence[Tensor], step: Callable[..., Any]) -> Any:
        """Call ``step(operation, rounds, counts, given)`` with the layer's parameters `given`."""
        rest = iter(given)
        everything = [next(rest) if there else None for there in self.present]
        t, s, count = self.counts
        parameters, tensors = everything[t + s :][:count], everything[t + s + count :]
        layer = None if self.layer is None else object_of(self.layer)
        shard = object_of(self.shard)
        rounds = shard.rounds_of_both_ends if self.both else shard.rounds

        def computed() -> Any:
            with self._autocast(given[0]):
                operation = pkgutil.resolve_name(self.make)(layer, *tensors)
            return step(operation, rounds, (t, s), everything)

        if layer is None:
            return computed()
        names = (f"layer.{name}" for name, _ in layer.named_parameters())
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_Within(layer), values, (computed,))

    def _autocast(self, like: Tensor) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(like.device.type, self.autocast)


class _Within(nn.Module):
    """Calls a function while a layer has other parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@torch.library.custom_op(
    "graphattn::ring",
    mutates_args=(),
    schema=f"(Tensor[] given, {OPTIONS}, SymInt[] shape, SymInt[] widths, ScalarType[] dtypes, "
    "str[] texts, SymInt[] sizes) -> Tensor[]",
)
def _ring(given: list[Tensor], *arguments: Any) -> list[Tensor]:
    options = _Options(*arguments[:-5])
    *_, texts, sizes = arguments
    if len(texts) > 1:
        agree(object_of(options.shard).group, OpenFacts(texts[1:], sizes[1:]).filled())

    def step(operation: Any, rounds: Any, counts: tuple[int, int], given: Any) -> Any:
        t, s = counts
        with options._autocast(given[0]), torch.no_grad():
            return passes.forward(operation, rounds, given[:t], given[t : t + s])

    return [x.contiguous() for x in options.run(given, step)]


@_ring.register_fake
def _(given: list[Tensor], *arguments: Any) -> list[Tensor]:
    shape, widths, dtypes = arguments[-5:-2]
    sizes = zip(widths, dtypes, strict=True)
    return [given[0].new_empty([*shape, width], dtype=dtype) for width, dtype in sizes]


def _remember(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    given, *arguments = inputs
    options = _Options(*arguments[:-5])
    numbers = [options.shard] if options.layer is None else [options.shard, options.layer]
    ctx.save_for_backward(*given, *output, *numbers)
    ctx.count, ctx.options = len(given), options._replace(shard=None, layer=None)  # type: ignore[arg-type]
    ctx.has_layer = options.layer is not None


def _differentiate(ctx: Any, upstream: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    end = len(saved) - 1 - ctx.has_layer
    given, output, (shard, *layer) = saved[: ctx.count], saved[ctx.count : end], saved[end:]
    options = ctx.options._replace(shard=shard, layer=layer[0] if layer else None)
    needed = list(ctx.needs_input_grad[0])
    found = torch.ops.graphattn.ring_backward(
        list(given), *options, list(output), list(upstream), needed
    )
    gradients = [d if need else None for d, need in zip(found, needed, strict=True)]
    return gradients, *[None] * (len(options) + 5)


_ring.register_autograd(_differentiate, setup_context=_remember)


def _backward(given: list[Tensor], *arguments: Any) -> list[Tensor]:
    """The gradients of all that is given; an empty tensor for one that is not needed."""
    *rest, output, upstream, needed = arguments
    options = _Options(*rest)
    t, s, _ = options.counts

    def step(operation: Any, rounds: Any, counts: tuple[int, int], given: Any) -> Any:
        wanted = [need is True for need in in_places_of(given, needed)]
        return passes.backward(operation, rounds, counts, given, wanted, output, upstream)

    # autograd differentiates the parts with respect to parameters.
    leaves = [x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)]
    found = options.run(leaves, step)
    there = [d for d, present in zip(found, options.present, strict=True) if present]
    return [
        x.new_zeros(x.shape if need else 0) if d is None else d.contiguous()
        for x, d, need in zip(given, there, needed, strict=True)
    ]


def _shapes_of_gradients(given: list[Tensor], *arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape if need else 0) for x, need in zip(given, arguments[-1], strict=True)]


# Not a custom_op: autograd must work within it.
_LIBRARY = torch.library.Library("graphattn", "FRAGMENT")
_LIBRARY.define(
    f"ring_backward(Tensor[] given, {OPTIONS}, Tensor[] results, Tensor[] upstream, "
    "bool[] needed) -> Tensor[]"
)
_LIBRARY.impl("ring_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("ring_backward", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("graphattn::ring_backward", _shapes_of_gradients, lib=_LIBRARY)
