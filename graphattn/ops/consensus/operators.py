"""The sums of a consensus step as one operator, which torch.compile does not trace into.

Second derivatives of eager calls are computed by structured consensus. See
:mod:`graphattn.ops.library.operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph, decode
from graphattn.ops.consensus.edge_network import EdgeNetworkParameters, FirstLayer
from graphattn.ops.consensus.native import sums as native
from graphattn.ops.consensus.structured import sums as structured
from graphattn.ops.consensus.triton import Groups, add_layer_gradients
from graphattn.ops.inputs import ValidPair, compute_dtype
from graphattn.ops.library.operators import GRAPH, Gradients, Results, Tensors, register

LAYER = ("tokens", "weight", "bias")
NAMES = (
    *(f"target_{name}" for name in LAYER), *(f"source_{name}" for name in LAYER), "u", "v",
    "alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias", "edge", "edge_weight",
)  # fmt: skip
U, V, EDGE = NAMES.index("u"), NAMES.index("v"), NAMES.index("edge")
OF_TOKENS = ("target_tokens", "source_tokens", "u", "v")
# Weights and biases are None if hidden vectors are given; the last two if edges have no features.
OPTIONAL = (*NAMES[1:3], *NAMES[4:6], *NAMES[EDGE:])
INPUTS = ", ".join(f"Tensor{'?' if name in OPTIONAL else ''} {name}" for name in NAMES)
OPTIONS = f"{GRAPH}, bool energy, bool degrees, str backend, bool shared"


def sums_over_edges(
    graph: TokenGraph,
    tensors: Sequence[Any],
    valid: ValidPair,
    *,
    energy: bool,
    degrees: bool,
    backend: str,
    shared: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The sums g [B, N, H, D], and the sums of alpha + beta [B, N, H] if `degrees` are needed.

    The arguments are those of :func:`.structured.sums.sums_over_edges`. For "triton", the first two
    tensors may be first layers, and `shared` says whether u and v are one tensor.
    """
    target, source, u, v, *network = tensors
    layers = (x if isinstance(x, FirstLayer) else (x, None, None) for x in (target, source))
    of_edges = network[6:] or (None, None)
    options = *valid, graph.code, graph.listed, energy, degrees, backend, shared
    gradient, degree = torch.ops.graphattn.consensus(
        *next(layers), *next(layers), u, v, *network[:6], *of_edges, *options
    )
    return gradient, degree if degrees else None


def _groups(inputs: Tensors, options: Any) -> Groups:
    """The call of the kernels of "triton"."""
    return Groups(
        (inputs[:3], inputs[3:6]),
        (inputs[U], inputs[V]),
        EdgeNetworkParameters(*inputs[V + 1 : EDGE]),
        decode(options.code, options.listed, inputs[U].device),
        (options.valid_targets, options.valid_sources),
        energy=options.energy,
        degrees=options.degrees,
        shared=options.shared,
    )


def _of_structured(inputs: Tensors, options: Any) -> tuple[Any, ...]:
    """The graph, the tensors, and the masks of a call of "structured" or "native"."""
    graph = decode(options.code, options.listed, inputs[U].device)
    hidden = (
        x if weight is None else FirstLayer(x, weight, bias).hidden()
        for x, weight, bias in (inputs[:3], inputs[3:6])
    )
    return graph, (*hidden, *inputs[U:]), (options.valid_targets, options.valid_sources)


def _forward(inputs: Tensors, options: Any) -> Results:
    """The sums g [B, N, H, D], and the degrees [B, N, H], empty if not needed."""
    if options.backend == "triton":
        return _forward_of_triton(inputs, options)
    module: Any = native if options.backend == "native" else structured
    gradient, degree = module.sums_over_edges(
        *_of_structured(inputs, options), energy=options.energy, degrees=options.degrees
    )
    return gradient, gradient.new_empty(0) if degree is None else degree


def _forward_of_triton(inputs: Tensors, options: Any) -> Results:
    from graphattn.kernels.consensus.forward import forward

    groups = _groups(inputs, options)
    gradient, degree = _shapes(inputs, options)
    for batch, heads in groups.cut(backward=False):
        of_group, degree_of_group = forward(groups.inputs_of(batch, heads))
        gradient[batch, :, heads] = of_group
        if degree_of_group is not None:
            degree[batch, :, heads] = degree_of_group
    return gradient, degree


def _shapes(inputs: Tensors, options: Any) -> Results:
    """Empty tensors like the results of :func:`_forward`."""
    u = inputs[U]
    shape = u.shape[:-1] if options.degrees else (0,)
    return u.new_empty(u.shape), u.new_empty(shape, dtype=compute_dtype(u.dtype))


def _backward(
    inputs: Tensors, options: Any, _: list[Tensor], upstream: list[Tensor], needed: list[bool]
) -> Gradients:
    """The gradients of the inputs."""
    if options.backend == "triton":
        return _backward_of_triton(inputs, options, upstream, needed)
    d_sums = upstream[0].contiguous(), upstream[1] if options.degrees else None
    graph, tensors, valid = _of_structured(inputs, options)
    of_tensors = (needed[0], needed[3], *needed[U:])
    gradients: Gradients
    if options.backend == "native":
        gradients = native.gradients_of_sums(
            graph, tensors, of_tensors, valid, d_sums, options.energy
        )
    else:
        kind = {"energy": options.energy, "degrees": options.degrees}
        plan = structured.plan_of(graph, tensors, valid, **kind)
        gradients = structured.gradients_of_sums(tensors, of_tensors, plan, d_sums)
    return gradients[0], None, None, gradients[1], None, None, *gradients[2:]


def _backward_of_triton(
    inputs: Tensors, options: Any, upstream: list[Tensor], needed: list[bool]
) -> Gradients:
    from graphattn.kernels.consensus.backward import backward, no_sums, unpack

    d_gradient, d_degree = upstream
    network = any(needed[:U]) or any(needed[V + 1 :])
    groups = _groups(inputs, options)
    wanted = dict.fromkeys(NAMES, network) | {"u": True, "v": not options.shared}
    totals = [
        inputs[U].new_empty(0) if x is None or not wanted[name] else _no_sum(name, x)
        for name, x in zip(NAMES, inputs, strict=True)
    ]
    of_layers, d_u, d_v = (totals[:3], totals[3:6]), totals[U], totals[V]
    sums = None
    for batch, heads in groups.cut(backward=True):
        of_degree = d_degree[batch, :, heads].contiguous() if groups.degrees else None
        group = groups.inputs_of(batch, heads)
        if network and sums is None:
            sums = no_sums(group, d_u.shape[2])
        of_group = backward(
            group,
            d_gradient[batch, :, heads],
            of_degree,
            network=None if sums is None else sums[heads],
        )
        d_u[batch, :, heads] = of_group.u
        if of_group.v is not None:
            d_v[batch, :, heads] = of_group.v
        if sums is not None:
            sides = of_group.target_hidden, of_group.source_hidden
            for layer, totals_of, d_hidden in zip(groups.layers, of_layers, sides, strict=True):
                assert d_hidden is not None
                add_layer_gradients(totals_of, layer, d_hidden, batch, heads)
            del sides, d_hidden
        del group, of_group  # before those of the next group are made
    if sums is not None:
        shear = inputs[V + 5]
        for total, gradient in zip(totals[V + 1 : EDGE], unpack(sums, shear.shape), strict=True):
            total.copy_(gradient)
    return tuple(
        None if x is None else total.to(x.dtype) for total, x in zip(totals, inputs, strict=True)
    )


def _no_sum(name: str, x: Tensor) -> Tensor:
    """Zeros to which the gradients of x are added.

    Sums over several groups are computed in float32: half precision would lose small parts.
    """
    is_of_one_group = name in OF_TOKENS and x.shape[2] > 1
    return x.new_zeros(x.shape, dtype=x.dtype if is_of_one_group else torch.float32)


def _again(inputs: Tensors, options: Any) -> tuple[Tensor, Tensor | None]:
    """The sums by structured consensus, in the compute dtype."""
    dtype = compute_dtype(inputs[U].dtype)
    wide = tuple(None if x is None else x.to(dtype) for x in inputs)
    graph, tensors, valid = _of_structured(wide, options)
    kind = {"energy": options.energy, "degrees": options.degrees}
    return structured.sums_by_autograd(tensors, structured.plan_of(graph, tensors, valid, **kind))


OPERATORS = register(
    "consensus",
    INPUTS,
    OPTIONS,
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    again=_again,
    results=2,
    copies=(V,),
)
