"""The sums of a consensus step as one operator of torch.library, which torch.compile keeps whole.

The graph travels as tensors (:mod:`graphattn.graphs.encoding`), so one compilation serves all
windows and lengths. Eager second derivatives go through plain autograd; of a compiled function
nobody can take second ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.encoding import decode
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus import structured
from graphattn.ops.inputs import ValidPair, full_precision

NAMES = (
    "target_hidden", "source_hidden", "u", "v",
    "alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias",
)  # fmt: skip
INPUTS = ", ".join(f"Tensor {name}" for name in NAMES)
OPTIONS = (
    "Tensor? valid_targets, Tensor? valid_sources, Tensor code, Tensor? listed, "
    "bool energy, bool degrees"
)
COUNT = len(NAMES)


def _sums_over_edges(
    graph: TokenGraph,
    tensors: tuple[Tensor, ...],
    valid: ValidPair,
    *,
    energy: bool,
    degrees: bool,
) -> tuple[Tensor, Tensor | None]:
    gradient, degree = torch.ops.graphattn.consensus_sums(
        *tensors, *valid, graph.code, graph.listed, energy, degrees
    )
    return gradient, degree if degrees else None


consensus_update = partial(structured.consensus_update, sums=_sums_over_edges)


def _understood(options: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Graph and valid tokens of the operator's options."""
    of_target, of_source, code, listed, _, _ = options
    return decode(code, listed, device), (of_target, of_source)


@torch.library.custom_op(
    "graphattn::consensus_sums",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor)",
)
def _consensus_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
    """g and the degrees; an empty tensor where nobody wants them."""
    tensors, options = arguments[:COUNT], arguments[COUNT:]
    graph, valid = _understood(options, tensors[0].device)
    energy, degrees = options[-2:]
    gradient, degree = structured.sums_over_edges(
        graph, tensors, valid, energy=energy, degrees=degrees
    )
    return gradient, gradient.new_empty(0) if degree is None else degree


@_consensus_sums.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    u, degrees = arguments[2], arguments[-1]
    return u.new_empty(u.shape), u.new_empty(u.shape[:-1] if degrees else (0,))


@torch.library.custom_op(
    "graphattn::consensus_sums_backward",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}, Tensor d_gradient, Tensor d_degree) -> "
    f"({', '.join(['Tensor'] * COUNT)})",
)
def _consensus_sums_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of the ten inputs."""
    tensors, options = arguments[:COUNT], arguments[COUNT:-2]
    d_gradient, d_degree = arguments[-2:]
    graph, valid = _understood(options, tensors[0].device)
    energy, degrees = options[-2:]
    plan = structured.plan_of(graph, tensors, valid, energy=energy, degrees=degrees)
    d_sums = d_gradient.contiguous(), d_degree if degrees else None
    found = structured.gradients_of_sums(tensors, (True,) * COUNT, plan, d_sums)
    return tuple(x.reshape(like.shape) for x, like in zip(found, tensors, strict=True))  # type: ignore[union-attr]


@_consensus_sums_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[:COUNT])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.energy, ctx.degrees = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_gradient: Tensor, d_degree: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph=True: somebody differentiates this again.
        tensors, options = saved[:COUNT], (*saved[COUNT:], ctx.energy, ctx.degrees)
        graph, valid = _understood(options, tensors[0].device)
        plan = structured.plan_of(graph, tensors, valid, energy=ctx.energy, degrees=ctx.degrees)
        d_sums = d_gradient, d_degree if ctx.degrees else None
        with full_precision(tensors[0].device):
            plainly = structured.gradients_plainly(
                tensors, ctx.needs_input_grad[:COUNT], plan, d_sums
            )
        return (*plainly, *[None] * 6)
    gradients = torch.ops.graphattn.consensus_sums_backward(
        *saved, ctx.energy, ctx.degrees, d_gradient, d_degree
    )
    return (*gradients, *[None] * 6)


_consensus_sums.register_autograd(_backward, setup_context=_remember)
