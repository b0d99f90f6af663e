"""A short path through an attention layer, for calls of a kind that was checked before.

A call is plain if it has only tokens and a graph (no masks, biases, positions or dropout), if no
method of the layer is overridden, and if no hook or mode observes it. The checks of such a call
depend only on sizes, dtypes and options, so the graph stores their result. All other calls take the
usual path.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.graphs.arguments import as_float
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.base.graph_layer import FEW_ANGLES, GraphLayer
from graphattn.nn.base.overrides import HOOKS
from graphattn.nn.edges.network import EdgeNetwork
from graphattn.ops.attention.native.flat import FlatCall, flat_attention, known_call
from graphattn.ops.backends import choose, is_followed, wanted_backend
from graphattn.ops.consensus.backends import BACKENDS
from graphattn.ops.consensus.calls import ConsensusKind, as_step, check_energy_graph, check_network
from graphattn.ops.consensus.native.flat import FlatConsensus, flat_consensus
from graphattn.ops.linear_attention.flat import FlatLinear, flat_linear_attention
from graphattn.ops.linear_attention.sums import pairs_outside
from graphattn.ops.memory import keep_freed_memory

PLAIN = (Tensor, nn.Parameter)
DTYPES = (torch.float32, torch.float64)
NUMBERS = (int, float)


def is_plain_call(layer: GraphLayer, x: Any, graph: Any, backends: tuple[str, ...]) -> bool:
    """Whether a call may be plain, as far as it does not depend on the kind of layer."""
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


Projected = tuple[Tensor, Tensor, Tensor | None]  # query, key, value; see `project_flat`


# Layers have the type Any here, because their files import this one.


def flat_call(layer: Any, x: Any, context_dim: int, graph: Any) -> tuple[Tensor, Projected] | None:
    """The output of a plain call of an attention layer, [*, N, dim], and its projections.

    None if the call is not plain.
    """
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
    ):  # the operation itself must check these
        return None
    kind = (
        flat_call,  # makes the key unique
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
    if not _reads(call, x, query, key, value):  # replaced projections, with other results
        assert value is not None
        tensors = layer.split_and_rotate(query, other, value, layer.rotations(x, x, graph, None))
        mixed = layer.mix(*tensors, graph, (None, None)).flatten(-2)
    else:
        scales = call.scale
        if scales is None:
            scales = layer.score().ready(layer.heads, query).strength
            assert scales is not None
        mixed = flat_attention(call, query, key, value, scales)
    return layer.output_proj(mixed), projected


def flat_linear_call(
    layer: Any, x: Any, graph: Any
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
    """The output of a plain call of linear attention, and its projections.

    None if the call is not plain. With rotary positions, or if several heads share keys, it is not.
    """
    if (
        not is_plain_call(layer, x, graph, ("auto", "structured"))
        or layer.rotary is not None
        or type(layer.eps) not in NUMBERS
    ):
        return None
    kind = (
        flat_linear_call,  # makes the key unique
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
    known = FlatLinear(graph, *call)  # the graph stores `call`, which must not store the graph
    mixed = None
    if all(_reads_one(projected, x, known.shape) for projected in (query, key, value)):
        mixed = flat_linear_attention(known, query, key, value)
    if mixed is None:
        features = layer.features_of(query, key, value, None)
        mixed = layer.mix(features, graph, (None, None)).flatten(-2)
    return layer.output_proj(mixed), (query, key, value)


def _linear_call(layer: Any, x: Tensor, graph: TokenGraph) -> tuple[Any, ...] | None:
    """Everything that calls of one kind share; None if such calls take the usual path."""
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


def flat_consensus_call(layer: Any, x: Any, graph: Any) -> Tensor | None:
    """The output of a plain call of self-consensus, [*, N, dim]; None if the call is not plain."""
    network = layer.edge_net
    if (
        not is_plain_call(layer, x, graph, ("auto", "native"))
        or layer.rotary is not None
        or layer.edge_features
        or not (layer.step_size in ("auto", "learned") or type(layer.step_size) in NUMBERS)
        or not _is_as_shipped_network(network)
    ):
        return None
    second = (
        network.alpha, network.alpha_bias, network.beta, network.beta_bias,
        network.shear, network.shear_bias,
    )  # fmt: skip
    kind = (
        flat_consensus_call,  # makes the key unique
        x.shape,
        x.dtype,
        (layer.source_proj.weight.dtype, layer.output_proj.weight.dtype),
        (layer.dim, layer.heads, network.groups, layer.trunk, layer.update_rule),
        (layer.step_size, layer.backend),
        tuple([(w.shape, w.dtype) for w in second]),
    )
    call: FlatConsensus | None
    call = graph.derived(kind, lambda: _consensus_call(layer, x, graph))
    if call is None:
        return None
    u = layer.source_proj(x)
    by_group = x.view(*x.shape[:-1], network.groups, layer.dim // network.groups)
    hidden = network.target(by_group), network.source(by_group)
    step = None
    if layer.step_size == "learned":
        step = functional.softplus(layer.raw_step_size)
    if _reads_states(call, x, u, hidden, step):
        u = u.reshape(*x.shape[:-1], *call.state[2:])
        both_hidden = hidden[0].reshape(call.hidden), hidden[1].reshape(call.hidden)
        new_state = flat_consensus(call, graph, u, both_hidden, second, step).view(x.shape)
    else:  # replaced projections, with other results
        u = layer.split(u, layer.heads)
        new_state = layer.move(u, (u, u), hidden, graph, (None, None)).flatten(-2)
    out: Tensor = layer.output_proj(new_state)
    return out


# Methods of an edge network whose work a plain call does itself.
NETWORK_METHODS = "target_hidden", "source_hidden", "by_group", "second_layer", "edge_matrix"
_SHIPPED = {name: getattr(EdgeNetwork, name) for name in NETWORK_METHODS}


def _is_as_shipped_network(network: Any) -> bool:
    """Whether an edge network is the library's own, with none of its methods replaced."""
    return (
        type(network) is EdgeNetwork
        and vars(network).keys().isdisjoint(_SHIPPED)
        and all(getattr(EdgeNetwork, name) is own for name, own in _SHIPPED.items())
    )


def _consensus_call(layer: Any, x: Tensor, graph: TokenGraph) -> FlatConsensus | None:
    """Everything that calls of one kind share; None if such calls take the usual path."""
    network = layer.edge_net
    try:
        layer.prepare(x, x, layer.dim, graph, None)
        if layer.update_rule == "energy":
            if not graph.is_table and graph.points_backward:
                return None  # the usual path gives a warning
            check_energy_graph(graph)
        B, N = math.prod(x.shape[:-2]), x.shape[-2]
        state = B, N, layer.heads, layer.head_dim
        width = network.target.weight.shape[1]
        u = x.detach().new_empty(()).expand(state)  # a tensor of the right size, without memory
        case = ConsensusKind(u, 1 if layer.trunk == "shared" else 3)
        if choose(BACKENDS, case, layer.backend).name != "native":
            return None
        hidden = B, N, network.groups, width
        second = check_network(network.second_layer(), u, torch.Size(hidden), torch.Size(hidden))
        if any(w.dtype is not x.dtype for w in network.second_layer()):
            return None
        if (second.shear.shape[0], second.shear.shape[2]) != state[2:]:
            return None
        step = None
        if not isinstance(layer.step_size, str):
            step = as_step(layer.step_size, u, x.dtype)
    except ValueError:
        return None
    keep_freed_memory()
    heads, rank, features, xi = second.shear.shape
    shear = heads, rank, features, xi
    return FlatConsensus(graph, state, hidden, shear, x.dtype, layer.update_rule, step)


def _call(layer: Any, x: Tensor, context_dim: int, graph: TokenGraph) -> FlatCall | None:
    """Everything that calls of one kind share; None if such calls take the usual path."""
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
    """Whether the results of projections have the expected shapes and dtype."""
    return (
        _reads_one(query, x, call.query)
        and (key is None or _reads_one(key, x, call.key))
        and (value is None or _reads_one(value, x, call.key))
    )


def _reads_one(projected: Any, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a result is a plain tensor like x, [*, N, H * D] or [*, N, H, D]."""
    B, N, H, D = shape
    return (
        type(projected) in PLAIN
        and projected.dtype is x.dtype
        and projected.is_cpu
        and projected.layout is torch.strided
        and projected.numel() == B * N * H * D
        and projected.shape[: x.dim() - 1] == x.shape[:-1]
    )


def _reads_states(
    call: FlatConsensus, x: Tensor, u: Any, hidden: tuple[Any, Any], step: Any
) -> bool:
    """Whether the results of projections, first layers and step size have the expected form."""
    return (
        _reads_one(u, x, call.state)
        and _reads_one(hidden[0], x, call.hidden)
        and _reads_one(hidden[1], x, call.hidden)
        and hidden[0].shape[-2:] == call.hidden[2:]
        and hidden[1].shape[-2:] == call.hidden[2:]
        and (step is None or (step.dtype is x.dtype and step.shape == call.state[2:3]))
    )


# Whether a layer runs the library's own methods: short paths do their work without calling them.


def is_as_shipped(layer: Any) -> bool:
    """Whether a step of this layer runs only methods of the library, and no hook observes them.

    Then C++ code that does all their work gives the same. This runs once per token, so it is short.
    """
    overrides = type(layer).class_overrides
    return overrides.as_shipped and _is_untouched(layer, overrides.methods)


def is_called_as_shipped(layer: Any) -> bool:
    """Whether a plain call of this layer runs only methods of the library, without hooks."""
    overrides = type(layer).class_overrides
    return overrides.call_as_shipped and _is_untouched(layer, overrides.call_methods)


def _is_untouched(layer: Any, known: dict[str, Any]) -> bool:
    """Whether no method was replaced in the instance or its class since, and there are no hooks."""
    cls, attributes = type(layer), vars(layer)
    return (
        not attributes.get("_explain")
        and attributes.keys().isdisjoint(known)
        and all(map(operator.is_, map(getattr, itertools.repeat(cls), known), known.values()))
        and not any(map(attributes.get, HOOKS))
    )
