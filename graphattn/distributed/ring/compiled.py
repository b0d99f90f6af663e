"""A ring as one operator, which torch.compile does not trace into.

A compiler could keep rows of all ranks from the forward pass, or merge the two times that they
travel. The operator runs the passes of :mod:`.passes` when the compiled function runs, with the
layer and the graph that it finds by their numbers. So one compilation serves all layers of a kind,
and a second one all lengths.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.distributed.agreement import OpenFacts, agree, facts_in_graph
from graphattn.distributed.exchange import in_places_of
from graphattn.distributed.ring.operations import Given, RingOperation, Tensors
from graphattn.ops.library.numbered import object_of

OPTIONS = "bool[] present, int[] counts, str kind, bool both, ScalarType? autocast"
RESULTS = "SymInt[] shape, SymInt[] widths, ScalarType[] dtypes, str[] texts, SymInt[] sizes"


class RingOptions(NamedTuple):
    """Arguments of the operators beside tensors; the names are those of their schema.

    Attributes:
        present: whether each of these is a tensor, and not None: the targets, the sources, the
            parameters of the layer, other tensors of the operation, and the numbers of the layer
            and of the graph.
        counts: how many targets, sources and parameters there are.
        kind: the class of the operation, "module:name".
        both: whether it moves both ends of an edge.
        autocast: the dtype of autocast around the call; None without it.
    """

    present: Sequence[bool]
    counts: Sequence[int]
    kind: str
    both: bool
    autocast: torch.dtype | None

    def run(self, given: Sequence[Tensor], step: Callable[..., Any]) -> Any:
        """Call ``step(operation, rounds, given)``, for a layer with the parameters that are given.

        In the call, None stands for tensors that are not present.
        """
        rest = iter(given)
        everything = [next(rest) if there else None for there in self.present]
        *everything, number, of_shard = everything
        assert of_shard is not None
        t, s, count = self.counts
        parameters, tensors = everything[t + s : t + s + count], everything[t + s + count :]
        layer, shard = None if number is None else object_of(number), object_of(of_shard)

        def computed() -> Any:
            with self.as_in_forward(given[0]):
                operation = pkgutil.resolve_name(self.kind)(layer, *tensors)
            rounds = shard.rounds_of_both_ends if self.both else shard.rounds
            return step(operation, rounds, everything)

        if layer is None:
            return computed()
        names = [f"layer.{name}" for name, _ in layer.named_parameters()]
        values: dict[str, Any] = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_Within(layer), values, (computed,))

    def as_in_forward(self, like: Tensor) -> AbstractContextManager[object]:
        """Autocast as around the call."""
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


def as_operator(operation: RingOperation, shard: Any, given: Sequence[Given]) -> Tensors:
    """Return the results on a ring while torch.compile traces.

    `given` are the targets, the sources, the parameters of the layer, and other tensors.
    """
    layer, kind, device = operation.layer, type(operation), shard.device.type
    everything = [x for part in given for x in part]
    everything += [None if layer is None else layer._number, shard._number]
    shape, widths, dtypes = operation.results(*given[:2])
    facts = facts_in_graph() or OpenFacts([], [])
    results: list[Tensor] = torch.ops.graphattn.ring(
        [x for x in everything if x is not None],
        [x is not None for x in everything],
        [len(part) for part in given[:3]],
        f"{kind.__module__}:{kind.__name__}",
        operation.both,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        list(shape),
        list(widths),
        list(dtypes),
        # autograd takes empty lists for such of tensors
        ["", *facts.texts],
        [0, *facts.sizes],
    )
    return tuple(results)


def register(forward: Callable[..., Tensors], backward: Callable[..., Given]) -> None:
    """Make the operators ``graphattn::ring`` and ``graphattn::ring_backward`` of two passes."""

    @torch.library.custom_op(
        "graphattn::ring",
        mutates_args=(),
        schema=f"(Tensor[] given, {OPTIONS}, {RESULTS}) -> Tensor[]",
    )
    def operator(given: list[Tensor], *arguments: Any) -> list[Tensor]:
        options, (*_, texts, sizes) = RingOptions(*arguments[:5]), arguments
        if len(texts) > 1:
            group = object_of(given[-1]).group
            agree(group, OpenFacts(texts[1:], sizes[1:]).filled())
        t, s, _ = options.counts

        def step(operation: RingOperation, rounds: Any, given: Given) -> Tensors:
            with options.as_in_forward(given[0]), torch.no_grad():
                return forward(operation, rounds, given[:t], given[t : t + s])

        return [x.contiguous() for x in options.run(given, step)]

    @operator.register_fake
    def _(given: list[Tensor], *arguments: Any) -> list[Tensor]:
        shape, widths, dtypes, *_ = arguments[5:]
        kinds = zip(widths, dtypes, strict=True)
        return [given[0].new_empty([*shape, width], dtype=dtype) for width, dtype in kinds]

    def backward_operator(given: list[Tensor], *arguments: Any) -> list[Tensor]:
        """The gradients of all that is given; an empty tensor for one that is not needed."""
        options, (whole, d_whole, needed) = RingOptions(*arguments[:5]), arguments[5:]
        counts = options.counts[:2]

        def step(operation: RingOperation, rounds: Any, given: Given) -> Given:
            wanted = [need is True for need in in_places_of(given, needed)]
            return backward(operation, rounds, counts, given, wanted, whole, d_whole)

        # autograd differentiates parts of the operation with respect to the parameters.
        leaves = [x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)]
        found = [*options.run(leaves, step), None, None]
        gradients = [d for d, there in zip(found, options.present, strict=True) if there]
        return [
            x.new_zeros(x.shape if need else 0) if d is None else d.contiguous()
            for x, d, need in zip(given, gradients, needed, strict=True)
        ]

    def shapes(given: list[Tensor], *arguments: Any) -> list[Tensor]:
        needs = zip(given, arguments[-1], strict=True)
        return [x.new_empty(x.shape if need else 0) for x, need in needs]

    # Not a custom_op, within which autograd does not work.
    library = torch.library.Library("graphattn", "FRAGMENT")
    library.define(
        f"ring_backward(Tensor[] given, {OPTIONS}, Tensor[] results, Tensor[] upstream, "
        "bool[] needed) -> Tensor[]"
    )
    library.impl("ring_backward", backward_operator, "CompositeExplicitAutograd")
    library.impl("ring_backward", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("graphattn::ring_backward", shapes, lib=library)
    _LIBRARIES.append(library)

    def remember(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
        given, *ctx.options = inputs[:6]
        ctx.count = len(given)
        ctx.save_for_backward(*given, *output)

    def differentiate(ctx: Any, upstream: list[Tensor]) -> tuple[Any, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        saved, needed = ctx.saved_tensors, list(ctx.needs_input_grad[0])
        tensors = [*saved[: ctx.count]], *ctx.options, [*saved[ctx.count :]], [*upstream], needed
        found = torch.ops.graphattn.ring_backward(*tensors)
        gradients = [d if need else None for d, need in zip(found, needed, strict=True)]
        return gradients, *[None] * 10

    operator.register_autograd(differentiate, setup_context=remember)


_LIBRARIES: list[torch.library.Library] = []  # whose operators are there as long as they live
