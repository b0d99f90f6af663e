"""Positions and window graphs along chains, and features of edges: distances and offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.builders.windows import window_path_graph
from graphattn.graphs.conversions.from_libraries import from_edge_index
from graphattn.graphs.token_graph import TokenGraph


def window_graph_of_chains(
    positions: Tensor, chain_index: Tensor, window: int, self_loops: bool
) -> TokenGraph:
    """Every residue sees the residues of its chain that are at most `window` positions away."""
    N = len(positions)
    if N == 0 or int(positions[-1]) == N - 1:  # One chain without gaps has a closed form.
        return window_path_graph(N, window, self_loops=self_loops).to(positions.device)
    token = torch.arange(N, device=positions.device)
    pieces = [torch.stack([token, token])] if self_loops else []
    # Positions increase, so two residues are at least as far apart in positions as in tokens.
    for hop in range(1, min(window, N - 1) + 1):
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
    """Compute radial basis functions of the distance of every edge, [E, num_distances].

    The centres are evenly spaced from 0 to `max_distance`, and the width is their spacing. Larger
    distances count as `max_distance`. If a residue has no known coordinates, the result is 0.
    """
    source, target = edge_index
    is_known = ca_positions.isfinite().all(dim=1, keepdim=True)
    places = ca_positions.masked_fill(~is_known, 0)  # NaN would spread to other gradients.
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
    """Encode the offset of every edge along its chain as one-hot columns.

    The last column is 1 if both residues are in the same chain. If they are not, all columns are 0.
    Offsets beyond `max_offset` count as `max_offset`. `positions` are [*, N], and the result is
    [*, E, 2 * max_offset + 2].
    """
    source, target = edge_index
    same_chain = chain_index[source] == chain_index[target]
    offset = positions[..., source] - positions[..., target]
    offset = offset.clamp(-max_offset, max_offset)
    features = torch.zeros((*offset.shape, 2 * max_offset + 2), device=edge_index.device)
    features.scatter_(-1, (offset + max_offset).long()[..., None], 1.0)
    features[..., -1] = 1
    return features * same_chain[:, None]


CA_DISTANCE = 3.8  # distance in Angstrom of C-alpha atoms joined by a trans peptide bond
SLACK = 0.7  # Angstrom, for coordinates of low resolution: neighbours are at most 4.5 apart
CHAIN_BREAK = 512  # positions between two chains, which is more than models see along a chain


def places_along_chains(
    chain_index: Tensor,
    residue_numbers: Tensor,
    insertion_codes: tuple[str, ...],
    ca_positions: Tensor,
) -> Tensor:
    """Compute an increasing position for every residue.

    The difference of positions of neighbours in a chain is the difference of their residue numbers,
    if the numbers increase. It is larger if the distance of their C-alpha atoms requires more
    steps, because n steps reach at most 3.8 n Angstrom. If the numbers do not increase (because
    numbering restarts, for example after 9999), the difference is 1 if the residues are near
    enough to be joined, and as large as between two chains otherwise.
    """
    if len(chain_index) == 0:
        return torch.zeros_like(chain_index)
    step = residue_numbers.diff()
    code = {code: number for number, code in enumerate(dict.fromkeys(insertion_codes))}
    codes = torch.tensor([code[letter] for letter in insertion_codes], device=step.device)
    restarts = (step < 0) | (step == 0) & (codes.diff() == 0)
    distance = ca_positions.diff(dim=0).norm(dim=1)
    fewest = ((distance - SLACK) / CA_DISTANCE).ceil().nan_to_num(1.0, posinf=1.0).long()
    step = torch.maximum(step.clamp(min=1), fewest)
    is_chain_break = (chain_index.diff() != 0) | restarts & (fewest > 1)
    step = step.masked_fill(is_chain_break, CHAIN_BREAK)
    return torch.cat([step.new_zeros(1), step.cumsum(0)])
