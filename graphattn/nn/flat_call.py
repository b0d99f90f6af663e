"""The short way through an attention layer, for calls of a kind that it has checked before.

A call is plain where there are tokens and a graph, no masks, biases, positions or dropout, and
nobody has replaced or looks into what the layer runs. What the checks of such a call find depends
on sizes, dtypes and options alone: a graph keeps it. Everything else goes the long way.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_float
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.graph_layer import FEW_ANGLES, GraphLayer
from graphattn.nn.overrides import HOOKS
from graphattn.ops.attention.native.flat import FlatCall, flat_attention, known_call
from graphattn.ops.backends import is_followed, wanted_backend
from graphattn.ops.linear_attention.flat import FlatLinear, flat_linear_attention
from graphattn.ops.linear_attention.sums import pairs_outside

if TYPE_CHECKING:
    from graphattn.nn.attention import GraphAttention
    from graphattn.nn.linear_attention import LinearAttention

PLAIN = (Tensor, nn.Parameter)
DTYPES = (torch.float32, torch.float64)
NUMBERS = (int, float)


def is_plain_call(layer: GraphLayer, x: Any, graph: Any, backends: tuple[str, ...]) -> bool:
    """Whether nothing about a call, but for what its kind may be, asks for the long way."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and type(graph) is TokenGraph
        and x.is_cpu
        and x.dtype in DTYPES
        and x.layout is torch.strided
        and not is_followed()
        and not torch.is_autocast_enabled("cpu")
        and wanted_backend(layer.backend) in backends
        and is_called_as_shipped(layer)
        and (layer.rotary is None or layer.rotary.is_plain())
    )


Projected = tuple[Tensor, Tensor, Tensor | None]


def flat_call(
    layer: GraphAttention, x: Any, context_dim: int, graph: Any
) -> tuple[Tensor, Projected] | None:
    """The output of a plain call, [*, N, dim], and its projections; None if a call is not plain."""
    if (
        not is_plain_call(layer, x, graph, ("auto", "native"))
        or type(layer.eps) not in NUMBERS
        or layer.eps != 0
        or layer.sink is not None
    ):
        return None
    if layer.training and layer.attention_dropout:
        return None
    rotary, top_k, softcap = layer.rotary, layer.top_k, layer.softcap
    if not (top_k is None or type(top_k) is int) or not (
        softcap is None or type(softcap) in NUMBERS
    ):  # somebody's own, which the operation checks
        return None
    kind = (
        flat_call,  # a key that nobody else has
        x.shape,
        x.dtype,
        layer.output_proj.weight.dtype,
        (layer.dim, context_dim, layer.heads, layer.kv_heads, layer.head_dim),
        (top_k, softcap, layer.backend),
        type(layer),
        None if rotary is None else (rotary.dim, rotary.base, graph.positions._version),
    )
    call: FlatCall | None = graph.derived(kind, lambda: _call(layer, x, context_dim, graph))
    if call is None or (projected := layer.project_flat(x)) is None:
        return None
    query, other, value = projected
    key = None if other is query and call.key == call.query else other
    if not _reads(call, x, query, key, value):  # somebody's own projections
        assert value is not None
        tensors = layer.turned(query, other, value, layer.rotations(x, x, graph, None))
        mixed = layer.mix(*tensors, graph, (None, None)).flatten(-2)
    else:
        scales = call.scale
        if scales is None:
            scales = layer.score().ready(layer.heads, query).strength
            assert scales is not None
        mixed = flat_attention(call, query, key, value, scales)
    return layer.output_proj(mixed), projected


def flat_linear_call(
    layer: LinearAttention, x: Any, graph: Any
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
    """The output of a plain call of linear attention, and its projections.

    None where a call is not plain.

    Queries and keys that are turned, or shared by several heads, go the long way.
    """
    if (
        not is_plain_call(layer, x, graph, ("auto", "structured"))
        or layer.rotary is not None
        or type(layer.eps) not in NUMBERS
    ):
        return None
    kind = (
        flat_linear_call,  # a key that nobody else has
        x.shape,
        x.dtype,
        layer.output_proj.weight.dtype,
        (layer.dim, layer.context_dim, layer.heads, layer.kv_heads, layer.head_dim),
        (layer.eps, layer.backend),
    )
    call: tuple[Any, ...] | None
    call = graph.derived(kind, lambda: _linear_call(layer, x, graph))
    if call is None:
        return None
    query, key, value = layer.query_proj(x), layer.key_proj(x), layer.value_proj(x)
    known = FlatLinear(graph, *call)  # the graph does not keep itself
    mixed = None
    if all(_reads_one(projected, x, known.shape) for projected in (query, key, value)):
        mixed = flat_linear_attention(known, query, key, value)
    if mixed is None:
        features = layer.features_of(query, key, value, None)
        mixed = layer.mix(features, graph, (None, None)).flatten(-2)
    return layer.output_proj(mixed), (query, key, value)


def _linear_call(layer: LinearAttention, x: Tensor, graph: TokenGraph) -> tuple[Any, ...] | None:
    """What is known of a kind of call; None where all go the long way."""
    try:
        layer.prepare(x, x, layer.context_dim, graph, None)
        eps = as_float("eps", layer.eps, positive=False)
    except ValueError:
        return None
    if layer.kv_heads != layer.heads:
        return None
    shape = x.shape[:-2].numel(), x.shape[-2], layer.heads, layer.head_dim
    out = *x.shape[:-1], layer.heads * layer.head_dim
    return shape, out, eps, pairs_outside(graph), torch.ones((), dtype=x.dtype, device=x.device)


def _call(layer: GraphAttention, x: Tensor, context_dim: int, graph: TokenGraph) -> FlatCall | None:
    """What is known of a kind of call; None where all go the long way."""
    try:
        layer.prepare(x, x, context_dim, graph, None)
        rotations = layer.rotations(x, x, graph, None)
        if rotations is not None and (
            rotations[0] is not rotations[1] or rotations[0][0].numel() > FEW_ANGLES
        ):
            return None
        score = layer.score()
        return known_call(
            x,
            graph,
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            score,
            top_k=layer.top_k,
            softcap=layer.softcap,
            backend=layer.backend,
            rotation=None if rotations is None else rotations[0],
            keeps_scale=score.kernel == "dot",
        )
    except ValueError:
        return None


def _reads(
    call: FlatCall, x: Tensor, query: Tensor, key: Tensor | None, value: Tensor | None
) -> bool:
    """Whether projections gave what those of the library do."""
    return (
        _reads_one(query, x, call.query)
        and (key is None or _reads_one(key, x, call.key))
        and (value is None or _reads_one(value, x, call.key))
    )


def _reads_one(projected: Any, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether something is [*, N, H * D], or by head, of the numbers of `x`."""
    B, N, H, D = shape
    return (
        type(projected) in PLAIN
        and projected.dtype is x.dtype
        and projected.is_cpu
        and projected.layout is torch.strided
        and projected.numel() == B * N * H * D
        and projected.shape[: x.dim() - 1] == x.shape[:-1]
    )


# Whether a layer is what the library made: its short ways restate methods.


def is_as_shipped(layer: Any) -> bool:
    """Whether nothing that a step runs was replaced, by a class or since, and nobody looks on.

    Then one that restates all of it gives the same. Asked once a token, so it is short.
    """
    overrides = type(layer).class_overrides
    return overrides.as_shipped and _is_untouched(layer, overrides.methods)


def is_called_as_shipped(layer: Any) -> bool:
    """Whether nothing that a plain forward pass runs was replaced, and nobody looks on."""
    overrides = type(layer).class_overrides
    return overrides.call_as_shipped and _is_untouched(layer, overrides.call_methods)


def _is_untouched(layer: Any, known: dict[str, Any]) -> bool:
    """Whether neither an instance nor its class has other methods by now, and nobody looks on."""
    cls, attributes = type(layer), vars(layer)
    return (
        not attributes["_explain"]
        and attributes.keys().isdisjoint(known)
        and all(map(operator.is_, map(getattr, itertools.repeat(cls), known), known.values()))
        and not any(map(attributes.__getitem__, HOOKS))
    )
