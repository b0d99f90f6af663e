"""What a protein model knows of an edge between two residues: their distance, and their offset."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.nn.offsets import offsets_of_table
from graphattn.ops.inputs import compute_dtype, full_precision


class Residues(NamedTuple):
    """Where the residues of a call stand; None is not known of them.

    Attributes:
        ca_positions: [N, 3], Angstrom; a row that is not finite is an atom that is not known.
        chain_index: integers [N].
        positions: integers [N] or [*, N], places along the chain.
    """

    ca_positions: Tensor | None = None
    chain_index: Tensor | None = None
    positions: Tensor | None = None


class ResidueEdges:
    """Features of edges, F numbers each, as :meth:`graphattn.data.Structure.edge_features` has them.

    Without a structure there are no distances, and the numbers in their place are 0; places are
    then those of the graph, of one chain.

    Args:
        num_distances: how many radial basis functions of a distance.
        max_distance: the last centre, in Angstrom.
        max_offset: the farthest offset along the chain with a feature of its own.
    """

    def __init__(self, num_distances: int, max_distance: float, max_offset: int) -> None:
        self.num_distances = as_int("num_distances", num_distances, 1)
        self.max_distance = as_float("max_distance", max_distance, positive=True)
        self.max_offset = as_int("max_offset", max_offset, 0)

    @property
    def width(self) -> int:
        """F."""
        return self.num_distances + 2 * self.max_offset + 2

    def of_edges(self, graph: TokenGraph, residues: Residues, dtype: torch.dtype) -> Tensor:
        """[E, F] or [*, E, F], in the order of ``graph.edge_index``."""
        source, target = graph.edge_index
        places = graph.positions if residues.positions is None else residues.positions
        offset = places.index_select(-1, source) - places.index_select(-1, target)
        same = torch.ones_like(source, dtype=torch.bool)
        if residues.chain_index is not None:
            same = residues.chain_index[source] == residues.chain_index[target]
        along = self._offsets(offset, same, dtype)
        distances = self._distances(residues.ca_positions, graph.edge_index, dtype)
        return torch.cat([distances.expand(*along.shape[:-1], -1), along], -1)

    def of_offsets(self, graph: TokenGraph, dtype: torch.dtype) -> Tensor | None:
        """[offsets, F], a row per offset of a graph's table: the features of one chain by itself.

        None where the graph has no such table.
        """
        found = offsets_of_table(graph, 1)
        if found is None:
            return None
        (offset,) = found
        along = self._offsets(offset, torch.ones_like(offset, dtype=torch.bool), dtype)
        return torch.cat([along.new_zeros(len(along), self.num_distances), along], -1)

    def _distances(
        self, ca_positions: Tensor | None, edge_index: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Radial basis functions of the distance along every edge, [E, num_distances]."""
        source, target = edge_index
        if ca_positions is None:
            return torch.zeros(len(source), self.num_distances, dtype=dtype, device=source.device)
        with full_precision(source.device):
            places = ca_positions.to(compute_dtype(ca_positions.dtype))
            distance = (places[source] - places[target]).norm(dim=-1, keepdim=True)
            known = distance.isfinite()
            distance = distance.masked_fill(~known, 0).clamp(max=self.max_distance)
            centers = torch.linspace(
                0,
                self.max_distance,
                self.num_distances,
                dtype=distance.dtype,
                device=distance.device,
            )
            spacing = self.max_distance / max(self.num_distances - 1, 1)
            basis = (((distance - centers) / spacing).square() / -2).exp()
            return basis.masked_fill(~known, 0).to(dtype)

    def _offsets(self, offset: Tensor, same: Tensor, dtype: torch.dtype) -> Tensor:
        """Which offset it is, and whether it is one along a chain, [*, E, 2 max_offset + 2]."""
        most = self.max_offset
        which = torch.zeros(*offset.shape, 2 * most + 2, dtype=dtype, device=offset.device)
        which.scatter_(-1, (offset.long().clamp(-most, most) + most)[..., None], 1.0)
        which[..., -1] = 1
        return which * same[:, None]
