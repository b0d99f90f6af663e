"""Attention over a graph on several ranks, where results are merged: on a ring, or global tokens.

The operations are in :mod:`graphattn.distributed.ring.operations`. Layers have the type Any here,
because their files import this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.exchange import Travelling, head_token_dim
from graphattn.distributed.own_first import OwnFirst
from graphattn.distributed.planning.plans import WORTH_HIDING
from graphattn.distributed.ring.operations import (
    BestParts,
    LinearParts,
    SoftmaxParts,
    Tensors,
    TopKParts,
)
from graphattn.distributed.ring.passes import on_ring, own_first
from graphattn.distributed.ring.states import linear_with_states
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.nn.base.overrides import names_of, overridden, overridden_edges
from graphattn.ops.dropout import SEEDS
from graphattn.ops.inputs import ValidPair, clear_invalid
from graphattn.ops.linear_attention.api import average, linear_attention_sums
from graphattn.ops.segments import even_sigmoid

FEW = 8  # what is projected twice, or merged, is at most 1 / FEW of all
INSTEAD = "make the shard with exchange='rows'"


def averages_in_parts(
    layer: Any,
    projected: Any,
    shard: ShardedGraph,
    valid: ValidPair,
    weights: object,
    of_edges: dict[str, Tensor],
) -> Tensor | None:
    """The averages [*, N, H, D] merged from results of several ranks; None if rows are fetched.

    Args:
        layer: an attention layer.
        projected: what its `project` returns, of the tokens of this rank.
        shard: the graph.
        valid: masks of this rank's targets and sources, or None.
        weights: whether weights are wanted.
        of_edges: values of edges, such as `edge_bias`.

    Raises:
        ValueError: if rows are exchanged on a ring, and the layer, or what is wanted of it, cannot
            be computed in parts.
    """
    on_ring, with_globals, _ = layer.merged_by
    if shard.exchange == "ring":
        check_no_weights(weights)
        averages: Tensor = on_ring(layer, *projected, shard, valid, **of_edges)
    elif may_broadcast(layer, shard, weights, *of_edges.values()):
        averages = with_globals(layer, *projected, shard, valid)
    else:
        return None
    return averages


def may_compute_meanwhile(
    layer: Any, x: Tensor, shard: ShardedGraph, weights: object, of_edges: Any
) -> bool:
    """Whether something is computed while the rows of a call over tokens x travel.

    Values and weights of edges are in the order of all edges of a rank. torch.compile computes
    nothing while it waits. The same rows travel either way, so ranks may decide differently.
    """
    if torch.compiler.is_compiling() or shard.broadcast or weights or of_edges:
        return False
    row = 2 * layer.kv_heads * layer.head_dim * math.prod(x.shape[:-2]) * x.itemsize
    if row * shard.most_received < WORTH_HIDING:
        return False
    if overridden(layer, ("mix", "fused", "fetch", "project", "project_back")):
        return False
    if shard.has_inside:
        return True
    return may_merge(layer) and FEW * len(shard.own_first.rows) <= shard.num_targets


def others_own_first(sources: Sequence[Tensor], shard: ShardedGraph) -> OwnFirst | None:
    """The edges of targets beside global tokens in two parts; None if rows are waited for."""
    if torch.compiler.is_compiling():
        return None
    row = sum(math.prod((*x.shape[:-3], *x.shape[-2:])) * x.itemsize for x in sources)
    enough = row * shard.most_received >= WORTH_HIDING
    return shard.own_first_of_others if enough else None


def may_merge(layer: Any) -> bool:
    """Whether results of a layer over several parts of the sources of a target can be merged."""
    top_k = getattr(layer, "top_k", None)
    return top_k is None and not own_methods(layer) and layer.backend != "reference"


def output_meanwhile(
    layer: Any,
    x: Tensor,
    context: Tensor,
    rotations: Any,
    tokens: Tensor | None,
    shard: ShardedGraph,
    valid: ValidPair,
) -> Tensor:
    """The output [*, N, dim] of a layer that computes something while rows travel.

    If the rows that others need are few, they are projected first, and again with all others while
    they travel. The arguments are those of the layer's `forward_pass` after its checks.
    """
    exchange, mask = shard.by_targets.exchange, valid[1]

    def projected_of(x: Tensor, context: Tensor, turns: Any, *of_context: Any) -> Any:
        projected = layer.project(x, context, turns)
        if tokens is not None or layer.embeds_values:
            *others, value = projected
            projected = *others, layer.with_embedding(value, context, *of_context)
        return projected

    def sent(projected: Any, mask: Tensor | None, are_rows: bool) -> list[Travelling]:
        tensors = _once(layer.sides(projected)[1], mask)
        return exchange.start(tensors, [head_token_dim(y) for y in tensors], are_rows=are_rows)

    started = None
    if FEW * len(exchange.send) <= shard.num_sources:
        few = context.index_select(-2, exchange.send)
        turns = rotations
        if rotations is not None:
            of_few = tuple(y.index_select(-3, exchange.send) for y in rotations[1])
            turns = tuple(y[..., :0, :, :] for y in of_few), of_few
        of_context = of_rows(tokens, exchange.send), of_rows(mask, exchange.send)
        leaving = projected_of(few[..., :0, :], few, turns, *of_context)
        started = sent(leaving, of_context[1], are_rows=True)
    projected = projected_of(x, context, rotations, tokens, mask)
    started = started or sent(projected, mask, are_rows=False)
    if shard.has_inside:
        return inside_first(layer, projected, rotations, shard, valid, started)
    output: Tensor = layer.merged_by[2](layer, *projected, shard, valid, started)
    return output


def _once(sources: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Return what travels: by identity, since what occurs twice travels once."""
    return [*{id(x): x for x in (*sources, mask) if x is not None}.values()]


def inside_first(
    layer: Any,
    projected: Any,
    rotations: Any,
    shard: ShardedGraph,
    valid: ValidPair,
    started: Sequence[Travelling],
) -> Tensor:
    """The output of every target, [*, N, dim]: first of those that see no other rank.

    What the others see has `started` to travel.
    """
    targets, sources = layer.sides(projected)
    split, (of_targets, of_sources) = shard.inside_first, valid
    masks = (None, None) if of_targets is None else split.split(of_targets, -1)
    rows = {id(x): split.split(x, -3) for x in targets}
    sent = _once(sources, of_sources)
    dims = [head_token_dim(x) for x in sent]
    outputs = []
    for number, (graph, exchange, *_) in enumerate((split.inside, split.outside)):
        context = exchange.context(started, sent, dims)
        seen: dict[int, Tensor] = {id(x): y for x, y in zip(sent, context, strict=True)}
        arguments = layer.from_sides(
            [rows[id(x)][number] for x in targets], [seen[id(x)] for x in sources]
        )
        mixed = layer.mix(*arguments, graph, (masks[number], seen.get(id(of_sources))))
        outputs.append(layer.project_back(mixed, rotations))
    inside, outside = outputs
    return split.merge(inside, outside, -2)


def attention_on_ring(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: ShardedGraph,
    valid: ValidPair,
    edge_bias: Tensor | None = None,
) -> Tensor:
    """Average the values of every target's sources, on whatever rank they are, [*, N, H, D].

    `edge_bias` must be a table per offset, [offsets, H].
    """
    check_layer(layer)
    check_bias(edge_bias, shard)
    operation: SoftmaxParts
    if layer.top_k is not None:
        check_top_k(layer, edge_bias)
        with torch.no_grad():
            best = BestParts(layer)
            _, index = on_ring(best, shard, (query, valid[0]), (key, valid[1]))
        operation = TopKParts(layer, index)
    else:
        operation = softmax_of(layer, edge_bias)
    out, lse = on_ring(operation, shard, (query, valid[0]), (key, value, valid[1]))
    return clear_invalid(_normalised(layer, out, lse), valid[0]).to(query.dtype)


def attention_own_first(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: ShardedGraph,
    valid: ValidPair,
    started: Sequence[Travelling],
) -> Tensor:
    """The output [*, N, dim], first over the sources of this rank; others have `started`."""

    def outputs(parts: Tensors, rows: Tensor | None) -> Tensors:
        averages = clear_invalid(_normalised(layer, *parts), of_rows(valid[0], rows))
        return (layer.project_back(averages.to(query.dtype), None),)

    targets, sources = (query, valid[0]), (key, value, valid[1])
    return own_first(softmax_of(layer), shard.own_first, targets, sources, outputs, -2, started)[0]


def of_rows(mask: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Take some tokens of a mask or of positions, [*, N]; all of them if `rows` is None."""
    return mask if mask is None or rows is None else mask.index_select(-1, rows)


def softmax_of(layer: Any, edge_bias: Tensor | None = None) -> SoftmaxParts:
    """Return the attention of a layer without top-k, as an operation in parts."""
    seed = torch.randint(SEEDS, ()) if layer.current_dropout else None
    return SoftmaxParts(layer, edge_bias, seed)


def _normalised(layer: Any, out: Tensor, lse: Tensor) -> Tensor:
    """Add what eps and the sink add to the denominator of merged results."""
    floor = _extra_term(layer, lse)
    return out if floor is None else out * even_sigmoid(lse - floor[:, None])


def may_broadcast(layer: Any, shard: ShardedGraph, *others: object) -> bool:
    """Whether a call sends the queries of global tokens to all ranks.

    Otherwise their owner fetches all rows: if results cannot be merged (top-k, own messages), or
    if `others`, a bias or a wish for weights, need all edges of a target on one rank.
    """
    return (
        bool(shard.broadcast)
        and may_merge(layer)
        and not any(x is not None and x is not False for x in others)
    )


def attention_with_globals(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, shard: ShardedGraph, valid: ValidPair
) -> Tensor:
    """The averages of every target, [*, N, H, D], if the graph has global tokens."""
    split = shard.global_targets
    out, lse = split.computed(softmax_of(layer), (query, valid[0]), (key, value, valid[1]))
    of_globals = _normalised(layer, out, lse).to(query.dtype)
    mask = of_rows(valid[0], split.rows)
    rows = query.index_select(-3, split.rows)
    if (edges := others_own_first((key, value), shard)) is not None:
        parts = own_first(softmax_of(layer), edges, (rows, mask), (key, value, valid[1]))
        others = _normalised(layer, *parts).to(query.dtype)
    else:
        graph, (key, value), pair = shard.fetch_for(
            split.others, (key, value), (-3, -3), (mask, valid[1])
        )
        others = layer.mix(rows, key, value, graph, pair)
    whole = torch.cat([others, of_globals], dim=-3).index_select(-3, split.place)
    return clear_invalid(whole, valid[0])


def _extra_term(layer: Any, like: Tensor) -> Tensor | None:
    """Return the logarithm of what eps and the sink add to the denominator, [H]."""
    sink: Tensor | None = layer.sink_logits(like)
    if not layer.eps:
        return sink
    eps = like.new_full((layer.heads,), math.log(layer.eps))
    return eps if sink is None else torch.logaddexp(eps, sink)


def linear_with_globals(layer: Any, features: Any, shard: ShardedGraph, valid: ValidPair) -> Tensor:
    """The averages of linear attention, [*, N, H, D], if the graph has global tokens."""
    split = shard.global_targets
    query, key, value, turned_query, turned_key = features
    turned = (turned_query, turned_key) if turned_query is not query else (None, None)
    above, below = split.computed(
        LinearParts(), (query, turned[0], valid[0]), (key, value, turned[1], valid[1])
    )
    mask = of_rows(valid[0], split.rows)
    rows = query.index_select(-3, split.rows)
    turned_rows = None if turned[0] is None else turned_query.index_select(-3, split.rows)
    if (edges := others_own_first((key, value), shard)) is not None:
        sources = key, value, turned[1], valid[1]
        others = own_first(LinearParts(), edges, (rows, turned_rows, mask), sources)
    else:
        fetched = (key, value, turned_key)
        graph, (key, value, turned_key), pair = shard.fetch_for(
            split.others, fetched, (-3, -3, -3), (mask, valid[1])
        )
        rotated = None if turned_rows is None else (turned_rows, turned_key)
        others = linear_attention_sums(
            rows, key, value, graph, rotated=rotated, valid=pair, backend=layer.backend
        )
    whole = (
        torch.cat([x, y], dim=-3).index_select(-3, split.place)
        for x, y in zip(others, (above, below), strict=True)
    )
    return _linear_average(layer, query, *whole)


def linear_on_ring(layer: Any, features: Any, shard: ShardedGraph, valid: ValidPair) -> Tensor:
    """The averages of linear attention, [*, N, H, D], over the sources of all ranks.

    States travel where they are exact and smaller than the rows, which otherwise travel on a ring.
    """
    check_layer(layer)
    query, key, value, turned_query, turned_key = features
    turned = (turned_query, turned_key) if turned_query is not query else (None, None)
    targets, sources = (query, turned[0], valid[0]), (key, value, turned[1], valid[1])
    if shard.sends_states(query.shape[-1], rope=turned[0] is not None):
        above, below = linear_with_states(shard.states, shard.rounds, targets, sources)
    else:
        above, below = on_ring(LinearParts(), shard, targets, sources)
    return _linear_average(layer, query, above, below)


def linear_own_first(
    layer: Any,
    features: Any,
    shard: ShardedGraph,
    valid: ValidPair,
    started: Sequence[Travelling],
) -> Tensor:
    """The output [*, N, dim], first over the sources of this rank; others have `started`."""

    def outputs(parts: Tensors, rows: Tensor | None) -> Tensors:
        return (layer.project_back(_linear_average(layer, query, *parts), None),)

    query, key, value, turned_query, turned_key = features
    turned = (turned_query, turned_key) if turned_query is not query else (None, None)
    targets, sources = (query, turned[0], valid[0]), (key, value, turned[1], valid[1])
    return own_first(LinearParts(), shard.own_first, targets, sources, outputs, -2, started)[0]


def _linear_average(layer: Any, query: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """The average of numerators and denominators, in the dtype of the layer's output projection."""
    return average(above, below, layer.eps).to(layer.mixed_dtype(query))


def check_no_weights(wanted: object) -> None:
    """Refuse to return weights, because no rank has all sources of its targets."""
    if wanted:
        raise ValueError(
            f"return_attention_weights must be False if rows are exchanged on a ring, got "
            f"{wanted!r}: {INSTEAD}"
        )


def check_layer(layer: Any) -> None:
    """Refuse a layer whose messages are its own: their results cannot be merged."""
    if replaced := own_methods(layer):
        raise ValueError(
            f"graph must not exchange its rows on a ring, because this {type(layer).__name__} has "
            f"its own {names_of(replaced)}, whose results cannot be merged: {INSTEAD}"
        )


def own_methods(layer: Any, *others: str) -> tuple[str, ...]:
    """Return the names of overrides that an operation in parts would not call."""
    return *overridden_edges(layer), *overridden(layer, ("mix", "fused", *others))


def check_bias(edge_bias: Tensor | None, shard: ShardedGraph) -> None:
    """Refuse values per edge: a rank computes its edges in another order."""
    if edge_bias is None:
        return
    whole = shard.whole.structure
    rows = None if whole is None else whole.num_offsets
    if edge_bias.dim() != 2 or len(edge_bias) != rows:
        raise ValueError(
            "edge_bias must be a table per offset if rows are exchanged on a ring, got shape "
            f"{list(edge_bias.shape)}: {INSTEAD} for values per edge"
        )


def check_top_k(layer: Any, edge_bias: Tensor | None) -> None:
    """Refuse what changes the logits that top-k selects by."""
    if edge_bias is not None or layer.softcap is not None or layer.current_dropout:
        raise ValueError(
            f"top_k = {layer.top_k} cannot be used with edge_bias, softcap or attention_dropout if "
            f"rows are exchanged on a ring: {INSTEAD}"
        )
