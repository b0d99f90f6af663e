"""Consensus by Triton kernels as one operator, which torch.compile does not trace into.

The graph is passed as tensors (:mod:`graphattn.graphs.encoding`). Second derivatives of eager calls
are computed by structured consensus. Compiled functions have no second derivatives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.encoding import decode
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.launch import on_its_device
from graphattn.ops.consensus.edge_network.parameters import EdgeNetworkParameters, FirstLayer
from graphattn.ops.consensus.step_size import automatic_move, bounds_of_degrees
from graphattn.ops.consensus.structured import sums as structured
from graphattn.ops.consensus.triton import Groups, add_layer_gradients
from graphattn.ops.inputs import ValidPair, flat_masks, full_precision, gradients_by_autograd

LAYER = ("tokens", "weight", "bias")
NAMES = (
    *(f"target_{name}" for name in LAYER), *(f"source_{name}" for name in LAYER), "u", "v",
    "alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias",
)  # fmt: skip
COUNT = len(NAMES)
OF_TOKENS = ("target_tokens", "source_tokens", "u", "v")
OPTIONAL = (
    "target_weight",
    "target_bias",
    "source_weight",
    "source_bias",
)  # None if hidden vectors are given
INPUTS = ", ".join(f"Tensor{'?' if name in OPTIONAL else ''} {name}" for name in NAMES)
OPTIONS = (
    "Tensor? valid_targets, Tensor? valid_sources, Tensor code, Tensor? listed, "
    "bool energy, bool degrees, bool shared"
)
Hidden = Tensor | FirstLayer


def consensus_update(
    state: Tensor,
    target_hidden: Hidden,
    source_hidden: Hidden,
    network: EdgeNetworkParameters,
    graph: TokenGraph,
    step_size: Tensor | None,
    *,
    update: str,
    disagreement: tuple[Tensor, Tensor],
    valid: ValidPair,
) -> Tensor:
    """Compute u' = u - step * g in float32.

    `step_size` is broadcastable to [*, N, H], or None for the automatic one. All tensors except
    those of the edge network have one dtype.
    """
    u, v = disagreement
    batch = state.shape[:-3]
    layers = [_as_layer(hidden, state.dtype) for hidden in (target_hidden, source_hidden)]
    for layer in layers:
        layer[0] = _flat(layer[0], math.prod(batch))
    compared = [_flat(x, math.prod(batch)) for x in disagreement]
    options = graph.code, graph.listed, update == "energy", step_size is None, u is v
    gradient, degree = torch.ops.graphattn.consensus(
        *layers[0], *layers[1], *compared, *network, *flat_masks(valid, batch), *options
    )
    gradient = gradient.view(state.shape)
    if step_size is None:
        bound = bounds_of_degrees(degree.view(state.shape[:-1]), graph, update)
        return automatic_move(state, gradient, bound)
    return torch.addcmul(state, step_size[..., None], gradient, value=-1)


def _as_layer(hidden: Hidden, dtype: torch.dtype) -> list[Any]:
    """A first layer in the dtype of the state; hidden vectors become one without weights."""
    layer = hidden if isinstance(hidden, FirstLayer) else (hidden, None, None)
    return [None if x is None else x.to(dtype) for x in layer]


def _flat(x: Tensor, entries: int) -> Tensor:
    """x [*, tokens, heads, features] with one batch dimension."""
    return x.reshape(entries, *x.shape[-3:])


def _groups(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Groups:
    of_target, of_source, code, listed, energy, degrees, shared = options
    return Groups(
        (tensors[:3], tensors[3:6]),
        (tensors[6], tensors[7]),
        EdgeNetworkParameters(*tensors[8:]),
        decode(code, listed, tensors[6].device),
        (of_target, of_source),
        energy=energy,
        degrees=degrees,
        shared=shared,
    )


@torch.library.custom_op(
    "graphattn::consensus",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor)",
)
@on_its_device
def _consensus(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The sums g [B, N, H, D], and the degrees [B, N, H] in float32, empty if not needed."""
    from graphattn.kernels.consensus.forward import forward

    groups = _groups(arguments[:COUNT], arguments[COUNT:])
    u = groups.u
    gradient = torch.empty_like(u, memory_format=torch.contiguous_format)
    degree = u.new_empty(u.shape[:-1] if groups.degrees else (0,), dtype=torch.float32)
    with full_precision(u.device):
        for batch, heads in groups.cut(backward=False):
            of_group, degree_of_group = forward(groups.inputs_of(batch, heads))
            gradient[batch, :, heads] = of_group
            if degree_of_group is not None:
                degree[batch, :, heads] = degree_of_group
    return gradient, degree


@_consensus.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    u, degrees = arguments[6], arguments[-2]
    degree = u.new_empty(u.shape[:-1] if degrees else (0,), dtype=torch.float32)
    return u.new_empty(u.shape), degree


@torch.library.custom_op(
    "graphattn::consensus_backward",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}, Tensor d_gradient, Tensor d_degree, bool network) -> "
    f"({', '.join(['Tensor'] * COUNT)})",
)
@on_its_device
def _consensus_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of the inputs; an empty tensor for one that is missing or not needed."""
    from graphattn.kernels.consensus.backward import backward

    tensors, options = arguments[:COUNT], arguments[COUNT:-3]
    d_gradient, d_degree, network = arguments[-3:]
    groups = _groups(tensors, options)
    totals = [
        # Sums over several groups are computed in float32: half precision would lose small parts.
        x.zero_() if name in OF_TOKENS and x.dim() == 4 and x.shape[2] > 1 else x.float().zero_()
        for name, x in zip(NAMES, _empty_gradients(*arguments), strict=True)
    ]
    of_layers, (d_u, d_v, *of_network) = (totals[:3], totals[3:6]), totals[6:]
    with full_precision(groups.u.device):  # autocast may be on around backward()
        for batch, heads in groups.cut(backward=True):
            upstream = d_gradient[batch, :, heads]
            of_degree = d_degree[batch, :, heads].contiguous() if groups.degrees else None
            found = backward(groups.inputs_of(batch, heads), upstream, of_degree, network=network)
            d_u[batch, :, heads] = found.u
            if found.v is not None:
                d_v[batch, :, heads] = found.v
            if not network:
                continue
            for total, gradient in zip(of_network, found.network or (), strict=True):
                total[heads] += gradient
            for layer, totals_of, d_hidden in zip(
                groups.layers, of_layers, (found.target_hidden, found.source_hidden), strict=True
            ):
                assert d_hidden is not None
                add_layer_gradients(totals_of, layer, d_hidden, batch, heads)
    return tuple(
        total if x is None else total.to(x.dtype) for total, x in zip(totals, tensors, strict=True)
    )


@_consensus_backward.register_fake
def _empty_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, shared, network = arguments[:COUNT], arguments[-4], arguments[-1]

    def there(name: str, x: Tensor | None) -> bool:
        return x is not None and (name == "u" or (not shared if name == "v" else network))

    u = tensors[6]
    return tuple(
        x.new_empty(x.shape) if there(name, x) else u.new_empty(0)
        for name, x in zip(NAMES, tensors, strict=True)
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, energy, degrees, shared = inputs
    ctx.options = energy, degrees, shared
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_gradient: Tensor, d_degree: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:COUNT]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph=True: this is differentiated again.
        with full_precision(d_gradient.device):
            found = _gradients_by_autograd(ctx, (d_gradient, d_degree), needed)
        return *found, *[None] * 7
    network = any(needed[:6]) or any(needed[8:])
    found = torch.ops.graphattn.consensus_backward(
        *ctx.saved_tensors, *ctx.options, d_gradient, d_degree, network
    )
    there = list(needed)
    if ctx.options[-1]:  # one tensor, one gradient
        there[7] = False
    return *(x if n else None for x, n in zip(found, there, strict=True)), *[None] * 7


def _gradients_by_autograd(
    ctx: Any, upstream: tuple[Tensor, Tensor], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients by structured consensus, in float32, which can be differentiated again."""
    *tensors, of_target, of_source, code, listed = ctx.saved_tensors
    energy, degrees, _ = ctx.options

    def sums_again(*tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        wide: list[Any] = [None if x is None else x.float() for x in tensors]
        hidden = (
            wide[i] if wide[i + 1] is None else FirstLayer(*wide[i : i + 3]).hidden()
            for i in (0, 3)
        )
        return structured.sums_over_edges(
            decode(code, listed, wide[6].device),
            (*hidden, *wide[6:]),
            (of_target, of_source),
            energy=energy,
            degrees=degrees,
        )

    return gradients_by_autograd(sums_again, tensors, needed, upstream)


_consensus.register_autograd(_backward, setup_context=_remember)
