"""Graphs along the chains, and features of edges: distances, and places along a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.builders.windows import window_path_graph
from graphattn.graphs.conversions.from_libraries import from_edge_index
from graphattn.graphs.token_graph import TokenGraph


def window_graph_of_chains(
    positions: Tensor, chain_index: Tensor, window: int, self_loops: bool
) -> TokenGraph:
    """Every residue sees those of its chain that are at most `window` places from it."""
    N = len(positions)
    if N == 0 or int(positions[-1]) == N - 1:  # one chain without gaps: known in closed form
        return window_path_graph(N, window, self_loops=self_loops).to(positions.device)
    token = torch.arange(N, device=positions.device)
    pieces = [torch.stack([token, token])] if self_loops else []
    for hop in range(1, min(window, N - 1) + 1):  # places increase: never more tokens than places
        near = (positions[hop:] - positions[:-hop] <= window) & (
            chain_index[hop:] == chain_index[:-hop]
        )
        first, second = token[:-hop][near], token[hop:][near]
        pieces += [torch.stack([first, second]), torch.stack([second, first])]
    edges = torch.cat(pieces, dim=1) if pieces else token.new_empty(2, 0)
    return from_edge_index(edges, N)


def distance_features(
    ca_positions: Tensor, edge_index: Tensor, num_distances: int, max_distance: float
) -> Tensor:
    """Radial basis functions of the distance along every edge, [E, num_distances].

    Centres lie evenly from 0 to `max_distance`, as wide as they are apart; what is farther counts
    as `max_distance`. An end without a known place gives 0.
    """
    source, target = edge_index
    is_known = ca_positions.isfinite().all(dim=1, keepdim=True)
    places = ca_positions.masked_fill(~is_known, 0)  # NaN would reach gradients of other residues
    known = is_known[source] & is_known[target]
    distance = (places[source] - places[target]).norm(dim=1, keepdim=True).clamp(max=max_distance)
    centers = torch.linspace(
        0, max_distance, num_distances, dtype=distance.dtype, device=distance.device
    )
    spacing = max_distance / max(num_distances - 1, 1)
    return (((distance - centers) / spacing).square() / -2).exp().masked_fill(~known, 0)


def offset_features(
    positions: Tensor, chain_index: Tensor, edge_index: Tensor, max_offset: int
) -> Tensor:
    """One-hot places from target to source; the last column: one chain.

    `positions` are [*, N], and what comes out is [*, E, 2 * max_offset + 2]. Offsets beyond
    `max_offset` count as `max_offset`; between chains all columns are 0.
    """
    source, target = edge_index
    same_chain = chain_index[source] == chain_index[target]
    offset = positions[..., source] - positions[..., target]
    offset = offset.clamp(-max_offset, max_offset)
    features = torch.zeros((*offset.shape, 2 * max_offset + 2), device=edge_index.device)
    features.scatter_(-1, (offset + max_offset).long()[..., None], 1.0)
    features[..., -1] = 1
    return features * same_chain[:, None]
