"""Consensus over a graph on several ranks, whose rows travel on a ring.

A step is a sum over edges of a matrix that depends on both of their tokens. It does not factor into
sums over tokens, but it is a sum over blocks of edges. So a rank computes with the rows of one
other rank at a time. Tokens travel, which are narrower than their hidden vectors, and states where
they do not follow from the tokens: rotated ones, and those of later iterations.

Layers have the type Any here, because their files import this one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.ring.operations import Given, Results, SumParts, Tensors
from graphattn.distributed.ring.passes import on_ring
from graphattn.distributed.ring.rounds import RingBlock
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.nn.base.across_ranks import own_methods
from graphattn.ops.backends import choose
from graphattn.ops.consensus.backends import BACKENDS
from graphattn.ops.consensus.calls import (
    ConsensusCall,
    as_step,
    check_arguments,
    check_energy_graph,
)
from graphattn.ops.consensus.step_size import automatic_move, bounds_of_degrees
from graphattn.ops.inputs import compute_dtype, full_precision


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
            of_target, of_source = hidden
            network = check_arguments(u, v, of_target, of_source, layer.edge_net.second_layer())
        call = ConsensusCall(
            state=u,
            target_hidden=of_target,
            source_hidden=of_source,
            network=network,
            graph=block.graph,
            step_size=None if self.is_auto else 0.0,
            update="energy" if block.ends == "both" else "target",
            disagreement=(u, v),
            valid=masks,
            edge_hidden=None,
            only_sums=True,
        )
        gradient, degree = choose(BACKENDS, call, layer.backend)(call)
        return (gradient,) if degree is None else (gradient, degree[..., None])

    def _as_in_forward(self) -> AbstractContextManager[object]:
        """Autocast as in the forward pass: the backward pass computes parts again outside of it."""
        if torch.is_autocast_enabled(self.device) == self.autocast:
            return nullcontext()
        return torch.autocast(self.device, self.dtype, enabled=self.autocast)
