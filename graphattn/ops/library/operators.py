"""One way to make an engine an operator of torch.library, which torch.compile does not trace into.

The backward pass is an operator, too. The graph is passed as tensors
(:mod:`graphattn.graphs.structures.graph_code`), so one compilation serves all windows and lengths.
Torch stores compiled functions on disk, with the shapes that fake kernels returned, and may load
them under another version of this library. So shapes must depend on the arguments only.

Second derivatives of eager calls are computed in operations that can be differentiated again.
Compiled functions have no second derivatives.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from graphattn.kernels.shared.launch import on_its_device
from graphattn.ops.inputs import full_precision, gradients_by_autograd

GRAPH = "Tensor? valid_targets, Tensor? valid_sources, Tensor code, Tensor? listed"

Tensors = tuple[Any, ...]
Results = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


def register(
    name: str,
    inputs: str,
    options: str,
    *,
    forward: Callable[[Tensors, Any], Results],
    shapes: Callable[[Tensors, Any], Results],
    backward: Callable[[Tensors, Any, list[Tensor], list[Tensor], list[bool]], Gradients],
    again: Callable[[Tensors, Any], tuple[Tensor | None, ...]],
    results: int,
    saved: int = 0,
    copies: tuple[int, ...] = (),
) -> tuple[CustomOpDef, CustomOpDef]:
    """Make the operators ``graphattn::name`` and ``graphattn::name_backward``.

    Functions get the inputs as a tuple, and the other arguments as a named tuple of options.

    Args:
        name: of the operator.
        inputs: the tensors that have gradients, as in a schema of torch.
        options: all other arguments, tensors first, likewise; one of them is `shared`.
        forward: computes the results.
        shapes: empty tensors with the shapes and dtypes of the results.
        backward: from inputs, options, results, gradients of the results, and for every input
            whether its gradient is needed, to the gradients of the inputs. Those that are not
            needed are dropped.
        again: the results that have gradients, in operations that can be differentiated again.
        results: how many results there are.
        saved: how many of them, the last ones, only `backward` reads. If there are none, it gets
            no results.
        copies: the inputs that are the same tensor as the one before if `shared`; the gradient of
            the first is then that of all.

    Returns:
        The two operators.
    """
    count, num_options = inputs.count("Tensor"), options.count(",") + 1
    num_tensors = count + options.count("Tensor")
    names = [part.split()[-1] for part in options.split(",")]
    make_options: Any = namedtuple("Options", names)  # type: ignore[misc]

    def split(arguments: Tensors) -> tuple[Tensors, Any]:
        return arguments[:count], make_options(*arguments[count : count + num_options])

    @torch.library.custom_op(
        f"graphattn::{name}",
        mutates_args=(),
        schema=f"({inputs}, {options}) -> ({', '.join(['Tensor'] * results)})",
    )
    @on_its_device
    def operator(*arguments: Any) -> Results:
        with full_precision(arguments[0].device):
            return forward(*split(arguments))

    @operator.register_fake
    def _(*arguments: Any) -> Results:
        return shapes(*split(arguments))

    @torch.library.custom_op(
        f"graphattn::{name}_backward",
        mutates_args=(),
        schema=f"({inputs}, {options}, Tensor[] results, Tensor[] upstream, bool[] needed) -> "
        f"({', '.join(['Tensor'] * count)})",
    )
    @on_its_device
    def backward_operator(*arguments: Any) -> Results:
        """The gradients of the inputs; an empty tensor for one that is missing or not needed."""
        tensors, own = split(arguments)
        with full_precision(tensors[0].device):  # autocast may be on around backward()
            found = backward(tensors, own, *arguments[-3:])
        return tuple(
            tensors[0].new_empty(0) if x is None or d is None or not need else d.reshape(x.shape)
            for x, d, need in zip(tensors, found, arguments[-1], strict=True)
        )

    @backward_operator.register_fake
    def _(*arguments: Any) -> Results:
        tensors = arguments[:count]
        return tuple(
            tensors[0].new_empty(0) if x is None or not need else x.new_empty(x.shape)
            for x, need in zip(tensors, arguments[-1], strict=True)
        )

    def remember(ctx: Any, inputs: Tensors, output: Results) -> None:
        tensors, ctx.others = inputs[:num_tensors], inputs[num_tensors:]
        ctx.save_for_backward(*tensors, *(output if saved else ()))

    def differentiate(ctx: Any, *upstream: Tensor) -> Gradients:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        stored = ctx.saved_tensors
        arguments, output = (*stored[:num_tensors], *ctx.others), stored[num_tensors:]
        tensors, own = split(arguments)
        upstream = upstream[: results - saved]
        needed = list(ctx.needs_input_grad[:count])
        found: Gradients
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # create_graph=True: this is differentiated again.
            with full_precision(tensors[0].device):
                found = gradients_by_autograd(
                    lambda *xs: again(xs, own), tensors, needed, upstream, zeros=True
                )
        else:
            needed = [n and not (own.shared and i in copies) for i, n in enumerate(needed)]
            run = getattr(torch.ops.graphattn, f"{name}_backward")
            found = run(*arguments, list(output), list(upstream), needed)
            found = tuple(d if n else None for d, n in zip(found, needed, strict=True))
        return *found, *[None] * num_options

    operator.register_autograd(differentiate, setup_context=remember)
    return operator, backward_operator
