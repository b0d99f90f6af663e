"""Edge features of a protein model, for two residues: their distance, and their offset."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.data import Structure
from graphattn.data.structures.edges import distance_features, offset_features
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.nn.edges.offsets import offsets_of_table


class Residues(NamedTuple):
    """Positions of the residues of a call; None means unknown.

    Attributes:
        ca_positions: [N, 3], in Angstrom; NaN if the atom is unknown.
        chain_index: integers [N].
        positions: integers [N] or [*, N], positions along the chain.
    """

    ca_positions: Tensor | None = None
    chain_index: Tensor | None = None
    positions: Tensor | None = None

    @property
    def are_unknown(self) -> bool:
        """Whether everything except the graph is unknown."""
        return self.ca_positions is None and self.positions is None


class ResidueEdges:
    """Features of edges, F numbers each, as in :meth:`graphattn.data.Structure.edge_features`.

    Without a structure, the distance features are 0, and all tokens are one chain with the
    positions of the graph.

    Args:
        num_distances: number of radial basis functions of a distance.
        max_distance: the last centre, in Angstrom.
        max_offset: the largest offset along the chain with its own feature.
    """

    def __init__(self, num_distances: int, max_distance: float, max_offset: int) -> None:
        self.num_distances = as_int("num_distances", num_distances, 1)
        self.max_distance = as_float("max_distance", max_distance, positive=True)
        self.max_offset = as_int("max_offset", max_offset, 0)

    @property
    def width(self) -> int:
        """Return F, the number of features per edge."""
        return Structure.num_edge_features(self.num_distances, self.max_distance, self.max_offset)

    def of_edges(
        self, graph: TokenGraph | ShardedGraph, residues: Residues, dtype: torch.dtype
    ) -> Tensor:
        """Return features [E, F] or [*, E, F], in the order of ``graph.edge_index``.

        For one rank's part of a graph, residues are those of this rank, and edges those of
        ``shard.graph``.
        """
        if isinstance(graph, ShardedGraph):
            edges, residues = _ends_of_shard(graph, residues)
            assert residues.positions is not None
            places = residues.positions
        else:
            edges = graph.edge_index
            places = graph.positions if residues.positions is None else residues.positions
        chains = residues.chain_index
        if chains is None:
            chains = torch.zeros(places.shape[-1:], dtype=torch.int64, device=edges.device)
        if places.is_floating_point():
            raise ValueError(
                "positions must be integers, because offsets along the chain are edge features, "
                f"got {places.dtype}"
            )
        along = offset_features(places, chains, edges, self.max_offset).to(dtype)
        if residues.ca_positions is None:
            distances = along.new_zeros(edges.shape[1], self.num_distances)
        else:
            distances = distance_features(
                residues.ca_positions, edges, self.num_distances, self.max_distance
            ).to(dtype)
        return torch.cat([distances.expand(*along.shape[:-1], -1), along], -1)

    def of_offsets(self, graph: TokenGraph | ShardedGraph, dtype: torch.dtype) -> Tensor | None:
        """Return features [offsets, F], one row per offset of a graph's table, for a single chain.

        Return None if the graph has no such table.
        """
        offsets = offsets_of_table(graph.whole if isinstance(graph, ShardedGraph) else graph, 1)
        if offsets is None:
            return None
        (offset,) = offsets
        # Compute them as edges between a residue at position 0 and one at every offset.
        place = torch.arange(len(offset), device=offset.device)
        edges = torch.stack([place, place.new_full((len(offset),), len(offset))])
        positions = torch.cat([offset, offset.new_zeros(1)])
        along = offset_features(positions, torch.zeros_like(positions), edges, self.max_offset)
        along = along.to(dtype)
        return torch.cat([along.new_zeros(len(offset), self.num_distances), along], -1)


def _ends_of_shard(shard: ShardedGraph, residues: Residues) -> tuple[Tensor, Residues]:
    """Return the edges of one rank, among its targets and then their sources, and these residues.

    `residues` are those of this rank.
    """
    local = shard.graph
    joined: dict[str, Tensor] = {}
    if residues.positions is None:
        joined["positions"] = torch.cat([local.positions, local.source_positions], -1)
    for name, x in residues._asdict().items():
        if x is not None:
            dim = -2 if name == "ca_positions" else -1
            (of_source,) = shard.by_targets.exchange(x, dims=[dim])
            joined[name] = torch.cat([x, of_source], dim)
    source, target = local.edge_index
    return torch.stack([source + local.num_targets, target]), Residues(**joined)
