"""The sums of a consensus step as one operator, which torch.compile does not trace into.

The graph is passed as tensors (:mod:`graphattn.graphs.encoding`), so one compilation serves all
windows and lengths. Second derivatives of eager calls are computed by autograd. Compiled functions
have no second derivatives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.encoding import decode
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus import native
from graphattn.ops.consensus.structured import sums as structured
from graphattn.ops.inputs import ValidPair, full_precision

NAMES = (
    "target_hidden", "source_hidden", "u", "v",
    "alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias",
)  # fmt: skip
INPUTS = ", ".join(f"Tensor {name}" for name in NAMES)
OPTIONS = (
    "Tensor? valid_targets, Tensor? valid_sources, Tensor code, Tensor? listed, "
    "bool energy, bool degrees, str backend"
)
OF_EDGES = "Tensor? edge, Tensor? edge_weight"
COUNT, PLACES = len(NAMES), len(NAMES) + 7  # tensors, and arguments before those of edges


def _sums_over_edges(
    graph: TokenGraph,
    tensors: tuple[Any, ...],
    valid: ValidPair,
    *,
    energy: bool,
    degrees: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    options = *valid, graph.code, graph.listed, energy, degrees, backend
    gradient, degree = torch.ops.graphattn.consensus_sums(
        *tensors[:COUNT], *options, *tensors[COUNT:]
    )
    return gradient, degree if degrees else None


def consensus_update(*arguments: Any, backend: str, **options: Any) -> Tensor:
    """Compute u' = u - step * g by the code of `backend`, "structured" or "native"."""
    sums = partial(_sums_over_edges, backend=backend)
    return structured.consensus_update(*arguments, sums=sums, **options)


def _decoded(
    arguments: tuple[Any, ...],
) -> tuple[tuple[Any, ...], TokenGraph, ValidPair, dict[str, bool]]:
    """The tensors, graph, masks and options of a step, from the arguments of the operator."""
    tensors = arguments[:COUNT] + arguments[PLACES : PLACES + 2]
    of_target, of_source, code, listed, energy, degrees, _ = arguments[COUNT:PLACES]
    graph = decode(code, listed, tensors[0].device)
    return tensors, graph, (of_target, of_source), {"energy": energy, "degrees": degrees}


@torch.library.custom_op(
    "graphattn::consensus_sums",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}, {OF_EDGES}) -> (Tensor, Tensor)",
)
def _consensus_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The sums g, and the degrees, or an empty tensor if they are not needed."""
    tensors, graph, valid, options = _decoded(arguments)
    module: Any = native if arguments[PLACES - 1] == "native" else structured
    gradient, degree = module.sums_over_edges(graph, tensors, valid, **options)
    return gradient, gradient.new_empty(0) if degree is None else degree


@_consensus_sums.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    u, degrees = arguments[2], arguments[PLACES - 2]
    return u.new_empty(u.shape), u.new_empty(u.shape[:-1] if degrees else (0,))


@torch.library.custom_op(
    "graphattn::consensus_sums_backward",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}, {OF_EDGES}, Tensor d_gradient, Tensor d_degree, "
    f"bool d_edge, bool d_edge_weight) -> ({', '.join(['Tensor'] * (COUNT + 2))})",
)
def _consensus_sums_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of the ten inputs and of the two of edges; empty tensors if not needed."""
    tensors, graph, valid, options = _decoded(arguments)
    d_gradient, d_degree, *wanted = arguments[PLACES + 2 :]
    d_sums = d_gradient.contiguous(), d_degree if options["degrees"] else None
    needed = (*[True] * COUNT, *wanted)
    found: tuple[Tensor | None, ...]
    if arguments[PLACES - 1] == "native":
        found = native.gradients_of_sums(graph, tensors, needed, valid, d_sums, options["energy"])
    else:
        plan = structured.plan_of(graph, tensors, valid, **options)
        found = structured.gradients_of_sums(tensors, needed, plan, d_sums)
    return tuple(
        d_gradient.new_empty(0) if x is None or like is None else x.reshape(like.shape)
        for x, like in zip(found, tensors, strict=True)
    )


@_consensus_sums_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    of_edges, wanted = arguments[PLACES : PLACES + 2], arguments[-2:]
    return tuple(x.new_empty(x.shape) for x in arguments[:COUNT]) + tuple(
        x.new_empty(x.shape) if want else arguments[2].new_empty(0)
        for x, want in zip(of_edges, wanted, strict=True)
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *before, ctx.energy, ctx.degrees, ctx.backend, edge, edge_weight = inputs
    ctx.save_for_backward(*before, edge, edge_weight)


def _backward(ctx: Any, d_gradient: Tensor, d_degree: Tensor) -> tuple[Tensor | None, ...]:
    *before, edge, edge_weight = ctx.saved_tensors
    arguments = *before, ctx.energy, ctx.degrees, ctx.backend, edge, edge_weight
    wanted = ctx.needs_input_grad[PLACES:]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph=True: this is differentiated again.
        tensors, graph, valid, options = _decoded(arguments)
        plan = structured.plan_of(graph, tensors, valid, **options)
        d_sums = d_gradient, d_degree if ctx.degrees else None
        needed = (*ctx.needs_input_grad[:COUNT], *wanted)
        with full_precision(d_gradient.device):
            *found, d_edge, d_weight = structured.gradients_of_sums_by_autograd(
                tensors, needed, plan, d_sums
            )
        return (*found, *[None] * 7, d_edge, d_weight)
    *gradients, d_edge, d_edge_weight = torch.ops.graphattn.consensus_sums_backward(
        *arguments, d_gradient, d_degree, *wanted
    )
    of_edges = (
        x if want else None for x, want in zip((d_edge, d_edge_weight), wanted, strict=True)
    )
    return (*gradients, *[None] * 7, *of_edges)


_consensus_sums.register_autograd(_backward, setup_context=_remember)
