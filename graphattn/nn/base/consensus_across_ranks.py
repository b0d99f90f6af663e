"""Consensus over a graph on several ranks: on a ring, or while rows travel.

A step is a sum over edges of a matrix that depends on both of their tokens. It does not factor into
sums over tokens, but it is a sum over blocks of edges. So on a ring, a rank computes with the rows
of one other rank at a time. If all rows travel at once, it computes the edges among its own tokens
meanwhile. Tokens travel, which are narrower than their hidden vectors, and states where they do not
follow from the tokens: those of later iterations, and on a ring rotated ones.

Layers have the type Any here, because their files import this one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.local_graph import LocalPart
from graphattn.distributed.planning.plans import WORTH_HIDING
from graphattn.distributed.ring.operations import Given, Results, SumParts, Tensors
from graphattn.distributed.ring.passes import on_ring
from graphattn.distributed.ring.rounds import RingBlock
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.base.across_ranks import of_rows, own_methods
from graphattn.ops.backends import choose
from graphattn.ops.consensus.backends import BACKENDS
from graphattn.ops.consensus.calls import (
    ConsensusCall,
    as_step,
    check_arguments,
    check_energy_graph,
)
from graphattn.ops.consensus.step_size import automatic_move, bounds_of_degrees
from graphattn.ops.inputs import ValidPair, compute_dtype, full_precision


def may_use_ring(layer: Any, shard: ShardedGraph, positions: Any, features: Any) -> bool:
    """Whether a call computes with the rows of one rank at a time.

    Otherwise all rows are fetched: for the features of edges, of which a rank has one row per edge
    in the order of its own graph; for messages and projections of the layer's own; and if a token
    that moves as both ends of an edge has a position for each, so two states.
    """
    plain = not layer.edge_features and features is None and not own_methods(layer, "project")
    if layer.update_rule == "energy" and isinstance(positions, tuple):
        plain &= len({*map(id, positions)}) == 1
    return shard.exchange == "ring" and plain


def consensus_on_ring(
    layer: Any, x: Tensor, context: Tensor, shard: ShardedGraph, valid: Any, positions: Any
) -> Tensor:
    """The output [*, N, dim] of a layer for the tokens of this rank."""
    alone, both = context is x, layer.update_rule == "energy"
    x, context, tokens, masks = layer.prepare(x, context, shard, valid)
    if both:
        check_energy_graph(shard.whole)
    rotations = layer.rotations(x, context, tokens, positions)
    u, compared = layer.moving_states(x, context, rotations)
    operation = ConsensusParts(layer)
    of_both = masks if both else (None, None)
    for iteration in range(layer.iterations):
        if iteration:
            plain = layer.rotate_back(u, rotations)
            compared = layer.compared_again(plain, compared, rotations, alone)
        # Other ranks project states from tokens, unless they are rotated or have moved.
        has_moved = rotations is not None or (alone and iteration)
        targets = x[..., None, :], compared[0], masks[0], of_both[1]
        sources = context[..., None, :], compared[1] if has_moved else None, masks[1], of_both[0]
        sums = on_ring(operation, shard, targets, sources)
        u = _moved(layer, u, sums, shard, masks[0], iteration)
    output: Tensor = layer.project_back(u, rotations)
    return output


def may_go_own_first(layer: Any, x: Tensor, shard: ShardedGraph, local: LocalPart) -> bool:
    """Whether edges among a rank's own tokens are computed while rows travel.

    The same rows travel in both ways. torch.compile computes nothing while it waits for rows.
    """
    if torch.compiler.is_compiling() or not local.exchange.total:
        return False
    if layer.edge_features or own_methods(layer, "project"):
        return False
    row = math.prod((*x.shape[:-2], x.shape[-1])) * x.itemsize
    return row * shard.most_received >= WORTH_HIDING


def consensus_own_first(
    layer: Any,
    x: Tensor,
    context: Tensor,
    shard: ShardedGraph,
    masks: ValidPair,
    places: tuple[Tensor | None, Tensor | None],
    sent: dict[str, tuple[Tensor, int]],
) -> Tensor:
    """The output [*, N, dim] of a layer for the tokens of this rank.

    Args:
        layer: the layer.
        x, context, shard, masks: as its `prepare` returns them.
        places: positions of targets and sources; None for those of the graph.
        sent: what travels, by name, each with the dimension that counts the tokens.
    """
    alone, both = context is x, layer.update_rule == "energy"
    own, rest, exchange, rows = shard.own_first_of_both_ends if both else shard.own_first
    if both:
        check_energy_graph(shard.by_both_ends.graph)
    tensors, dims = [x for x, _ in sent.values()], [dim for _, dim in sent.values()]
    started = exchange.start(tensors, dims)
    rotations = layer.rotations(x, context, shard.tokens, places)
    u, compared, hidden = layer.project(x, context, rotations)
    sums = _sums(layer, compared, hidden, own, masks)
    arrived = dict(zip(sent, exchange.context(started, tensors, dims), strict=True))
    seen, mask, place = arrived["sources"], arrived.get("valid"), arrived.get("positions")
    if both:  # the same tokens are targets and sources
        x, mask_of_x, place_of_x = seen, arrived.get("valid targets"), arrived.get("of targets")
    else:
        x = x.index_select(-2, rows)
        mask_of_x, place_of_x = (of_rows(y, rows) for y in (masks[0], places[0]))
    turns = layer.rotations(x, seen, rest, (place_of_x, place))
    _, others, hidden_of_rest = layer.project(x, seen, turns)
    for iteration in range(layer.iterations):
        if iteration:
            plain = layer.rotate_back(u, rotations)
            started = exchange.start([plain], [-3]) if alone else []
            compared = layer.compared_again(plain, compared, rotations, alone)
            sums = _sums(layer, compared, hidden, own, masks)
            moved = plain.index_select(-3, rows)
            if alone:
                (states,) = exchange.context(started, [plain], [-3])
                others = layer.rotate(states if both else moved, states, turns)
            else:
                others = layer.compared_again(moved, others, turns, alone)
        more = _sums(layer, others, hidden_of_rest, rest, (mask_of_x, mask))
        last = [y.narrow(-3, y.shape[-3] - len(rows), len(rows)) for y in more]
        sums = tuple(x.index_add(-3, rows, y) for x, y in zip(sums, last, strict=True))
        u = _moved(layer, u, sums, shard, masks[0], iteration)
    output: Tensor = layer.project_back(u, rotations)
    return output


def _sums(
    layer: Any,
    compared: tuple[Tensor, Tensor],
    hidden: tuple[Any, Any],
    graph: TokenGraph,
    masks: ValidPair,
    update: str | None = None,
) -> Tensors:
    """The sums [*, N, H, D] of a step over the edges of a graph; and degrees if it is automatic."""
    network = check_arguments(*compared, *hidden, layer.edge_net.second_layer())
    call = ConsensusCall(
        state=compared[0],
        target_hidden=hidden[0],
        source_hidden=hidden[1],
        network=network,
        graph=graph,
        step_size=None if isinstance(layer.step_of(0), str) else 0.0,
        update=update or layer.update_rule,
        disagreement=compared,
        valid=masks,
        edge_hidden=None,
        only_sums=True,
    )
    gradient, degree = choose(BACKENDS, call, layer.backend)(call)
    return (gradient,) if degree is None else (gradient, degree[..., None])


def _moved(
    layer: Any,
    u: Tensor,
    sums: Tensors,
    shard: ShardedGraph,
    valid: Tensor | None,
    iteration: int,
) -> Tensor:
    """The states after a step, from the sums over all ranks."""
    gradient, degree = sums[0], sums[1][..., 0] if len(sums) > 1 else None
    dtype = compute_dtype(u.dtype)
    with full_precision(u.device):
        step = as_step(layer.step_of(iteration), u, dtype)
        if step is not None:
            new = torch.addcmul(u.to(dtype), step[..., None], gradient, value=-1)
        else:
            assert degree is not None
            bound = bounds_of_degrees(degree, shard.sequences, layer.update_rule)
            new = automatic_move(u.to(dtype), gradient, bound)
        new = new.to(u.dtype)
    if valid is None:
        return new
    # A token that does not move may be seen in later iterations, and must not spread a NaN.
    return torch.where(valid[..., None, None], new, u.nan_to_num(0.0, 0.0, 0.0))


class ConsensusParts(SumParts):
    """The sums of a consensus step, and the degrees if the step is automatic.

    Targets and sources are tokens [*, tokens, 1, features], states [*, tokens, H, D], and masks. If
    both ends of an edge move, they are masks of these tokens as one end and as the other. States of
    sources may be None if they are to be projected from their tokens.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.device, self.both = layer.output_proj.weight.device.type, layer.update_rule == "energy"
        self.is_auto = isinstance(layer.step_of(0), str)
        self.autocast = torch.is_autocast_enabled(self.device)
        self.dtype = torch.get_autocast_dtype(self.device)

    def results(self, targets: Given, sources: Given) -> Results:
        u = targets[1]
        widths = (u.shape[-1], 1) if self.is_auto else (u.shape[-1],)
        return Results(u.shape[:-1], widths, [compute_dtype(u.dtype)] * len(widths))

    def part(self, targets: Given, sources: Given, block: RingBlock) -> Tensors:
        (x, u, of_targets, as_sources), (c, v, of_sources, as_targets) = targets, sources
        x, c, layer = x.squeeze(-2), c.squeeze(-2), self.layer
        masks = of_targets, of_sources
        with self._as_in_forward():
            if v is None:
                v = layer.states(x, c)[1]
            if block.ends == "sources":
                hidden, masks = layer.hidden_vectors(u, c, x)[::-1], (as_sources, as_targets)
            else:
                hidden = layer.hidden_vectors(u, x, c)
            update = "energy" if block.ends == "both" else "target"
            return _sums(layer, (u, v), hidden, block.graph, masks, update)

    def _as_in_forward(self) -> AbstractContextManager[object]:
        """Autocast as in the forward pass: the backward pass computes parts again outside of it."""
        if torch.is_autocast_enabled(self.device) == self.autocast:
            return nullcontext()
        return torch.autocast(self.device, self.dtype, enabled=self.autocast)
