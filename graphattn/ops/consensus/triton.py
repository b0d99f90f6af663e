"""Consensus by Triton kernels: which calls they can run, and the tables that they read of a graph.

Kernels store no numbers of edges, neither forward nor backward. Hidden vectors are larger than the
tokens, so they are computed from a :class:`~graphattn.FirstLayer` for a few heads and entries of
the batch at a time, and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs.structures.structure import GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.consensus.schedule import ConsensusSchedule
from graphattn.kernels.shared.launch import why_not_heads
from graphattn.kernels.shared.stored import copied, stores_results
from graphattn.ops.consensus.edge_network import EdgeNetworkParameters
from graphattn.ops.consensus.pieces import equal_bands, moves_of, shift_of
from graphattn.ops.edge_cache import cached_by_edges
from graphattn.ops.inputs import ValidPair

if TYPE_CHECKING:
    from graphattn.kernels.consensus.inputs import ConsensusInputs

SHARE_OF_PLACES = 0.4  # if fewer of a window's offsets are edges, the edges are listed


def why_not(state: Tensor, trunks: int = 1, edge_hidden: bool = False) -> str | None:
    """The reason why no kernel can run a step with states like these; None if one can."""
    if (reason := why_not_heads(state)) is not None:
        return reason
    if trunks > 1:
        return "its kernels take one trunk that feeds alpha, beta and Lambda (trunk='shared')"
    if edge_hidden:
        return "its kernels take no features of edges (edge_hidden, edge_features)"
    return None


class Groups:
    """A consensus step in groups: a few heads of a few entries of the batch at a time.

    Args:
        layers: the first layers of targets and of sources, each tokens [B, N, G, in], weight
            [G, xi, in] and bias [G, xi] or None; or hidden vectors [B, N, G, xi], None and None.
        states: u [B, N, H, D] and v [B, M, H, D], one tensor if `shared`.
        energy, degrees: as of :class:`~graphattn.kernels.consensus.inputs.ConsensusInputs`.
    """

    def __init__(
        self,
        layers: tuple[tuple[Any, ...], tuple[Any, ...]],
        states: tuple[Tensor, Tensor],
        network: EdgeNetworkParameters,
        graph: TokenGraph,
        valid: ValidPair,
        *,
        energy: bool,
        degrees: bool,
        shared: bool,
    ) -> None:
        self.layers, self.network, self.valid = layers, network, valid
        self.u, self.v = states
        self.energy, self.degrees, self.shared = energy, degrees, shared
        self.edges = edges_of(graph, loops=not energy)
        self._weights: Any = None

    def cut(self, backward: bool) -> Iterator[tuple[slice, slice]]:
        """Slices of the batch and of heads whose hidden vectors and messages fit into memory."""
        from graphattn.kernels.consensus import inputs

        (B, N, H, D), M, xi = self.u.shape, self.v.shape[1], self.network.alpha.shape[-1]
        size = self.u.element_size()
        numbers = D + backward * (self.network.shear[0].numel() // max(xi, 1) + 2 * xi)
        of_head = self.edges.places * numbers + (1 + backward) * (N + M) * xi
        workspace = inputs.WORKSPACE if backward else inputs.WORKSPACE // 2
        fitting = max(1, workspace // max(of_head * size, 1))
        heads = min(H, fitting)
        entries = max(1, min(B, fitting // H))
        for b in range(0, B, entries):
            for h in range(0, H, heads):
                yield slice(b, min(b + entries, B)), slice(h, min(h + heads, H))

    def inputs_of(self, batch: slice, heads: slice) -> ConsensusInputs:
        """The arguments of the kernels for a group, with its hidden vectors."""
        from graphattn.kernels.consensus.inputs import ConsensusInputs

        hidden = [form(layer, batch, heads) for layer in self.layers]
        u, v = (x[batch, :, heads] for x in (self.u, self.v))
        of_target, of_source = (x.expand(*x.shape[:2], u.shape[2], -1) for x in hidden)
        valid_target, valid_source = (None if m is None else m[batch] for m in self.valid)
        group = ConsensusInputs(
            of_target,
            of_source,
            u,
            u if self.shared else v,
            tuple(x[heads] for x in self.network),
            self.edges,
            self.energy,
            self.degrees,
            valid_target,
            valid_source,
            self.shared,
        )
        if self._weights is None:  # packed once, for all groups
            self._weights = replace(group, network=tuple(self.network)).weights
        group.weights = type(self._weights)(*(weight[heads] for weight in self._weights))
        return group


def form(layer: tuple[Any, ...], batch: slice, heads: slice) -> Tensor:
    """The hidden vectors of a group, [entries, tokens, heads or 1, xi]."""
    tokens, weight, bias = layer
    tokens = part_of(tokens, batch, heads)
    if weight is None:
        return tokens
    if len(weight) > 1:
        weight, bias = weight[heads], None if bias is None else bias[heads]
    by_head = by_group(tokens)
    if bias is None:
        hidden = torch.bmm(by_head, weight.mT)
    else:
        hidden = torch.baddbmm(bias[:, None], by_head, weight.mT)
    return hidden.unflatten(1, tokens.shape[:2]).permute(1, 2, 0, 3)


def part_of(x: Tensor, batch: slice, heads: slice) -> Tensor:
    """The part of x [B, tokens, H or 1, features] that a group reads."""
    return x[batch] if x.shape[2] == 1 else x[batch, :, heads]


def by_group(x: Tensor) -> Tensor:
    """Reorder x [entries, tokens, groups, features] to [groups, entries * tokens, features]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def add_layer_gradients(
    total: Sequence[Tensor], layer: tuple[Any, ...], d_hidden: Tensor, batch: slice, heads: slice
) -> None:
    """Add gradients of a first layer from d_hidden, [entries, tokens, heads, xi]."""
    tokens, weight, bias = layer
    if tokens.shape[2] == 1:
        d_hidden = d_hidden.sum(2, keepdim=True)
    d_tokens = part_of(total[0], batch, heads)
    if weight is None:
        d_tokens += d_hidden
        return
    tokens, shared = part_of(tokens, batch, heads), len(weight) == 1
    weight = weight if shared else weight[heads]
    d_weight, d_bias = (x if shared else x[heads] for x in total[1:])
    by_head = by_group(d_hidden)
    d_tokens += torch.bmm(by_head, weight).unflatten(1, tokens.shape[:2]).permute(1, 2, 0, 3)
    d_weight += torch.bmm(by_head.mT, by_group(tokens))
    if bias is not None:
        d_bias += by_head.sum(1, dtype=torch.float32)


# Tables that the kernels read in place of a graph; they are cached.


def edges_of(graph: TokenGraph, *, loops: bool) -> ConsensusSchedule:
    """The edges of a graph, with or without self-loops."""
    if graph.structure is not None:
        schedule = _of_structure(graph.structure, graph.device, loops)
        if schedule is not None:
            return schedule
    return cached_by_edges(graph, _listed_with_loops if loops else _listed_without_loops)


@stores_results(64)
def _of_structure(
    structure: GraphStructure, device: torch.device, loops: bool
) -> ConsensusSchedule | None:
    bands = equal_bands(structure)
    if not bands:
        return None
    N, M = structure.num_targets, structure.num_sources
    moves = tuple(
        move
        for move in moves_of(bands, loops=loops, shift=shift_of(structure))
        if -N < move < M  # others join no target and source
    )
    if len(moves) * N * SHARE_OF_PLACES > structure.num_edges():
        return None
    sequence = None
    if len(bands) > 1:
        lengths = torch.tensor([band.num_tokens for band in bands])
        ids = torch.arange(len(bands), dtype=torch.int32)
        sequence = copied(ids.repeat_interleave(lengths), device)
    return ConsensusSchedule(N, M, device, moves, sequence)


def _listed_with_loops(graph: TokenGraph, listed: Tensor) -> ConsensusSchedule:
    return _of_list(graph, listed, loops=True)


def _listed_without_loops(graph: TokenGraph, listed: Tensor) -> ConsensusSchedule:
    return _of_list(graph, listed, loops=False)


def _of_list(graph: TokenGraph, listed: Tensor, *, loops: bool) -> ConsensusSchedule:
    N, M = graph.num_targets, graph.num_sources
    listed = listed.long()
    if graph.is_table:
        target = torch.arange(N, device=listed.device).repeat_interleave(listed.shape[1])
        listed = torch.stack([listed.flatten(), target])
    if not loops:  # marked as no edge: to know the length of a shorter list, one would have to wait
        source, target = listed
        listed = torch.stack([source.masked_fill(source == target, -1), target])
    return ConsensusSchedule(N, M, listed.device, edge_index=listed)
