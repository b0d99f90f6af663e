"""Exact nearest neighbours from the distances of all pairs, with torch operations on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.search.distances import (
    TILE,
    DistanceProducts,
    exact_squared_distances,
    nearest_pairs,
    place_self,
    rounded_distances,
    with_rounding,
)


def nearest_by_pairs(
    points: Tensor,
    candidates: Tensor,
    k: int,
    to_self: bool,
    self_loops: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """Find the k nearest candidates of every point (or of some rows), without storing N x M.

    Rounding may change the order of neighbours that are nearly equally far. So all sources whose
    distance is within rounding of the k-th are selected, and exact distances decide among them.
    Distances from matrix products select them fast. Distances from differences of coordinates are
    used if products select too many (because tokens are closer to each other than the rounding of
    products) or if the rounding of products is unknown.
    """
    finite = points.isfinite().all(dim=1), candidates.isfinite().all(dim=1)
    products = None if rows is not None else DistanceProducts.of(points, candidates, finite)
    if rows is None:
        rows = torch.arange(len(points), device=points.device)
    index = torch.empty((len(rows), k), dtype=torch.int64, device=points.device)
    to_itself = None if not to_self else -torch.inf if self_loops else torch.inf
    step = max(1, TILE // max(len(candidates), 1))
    for start in range(0, len(rows), step):
        places = rows[start : start + step]
        tile = points[places]
        pairs = None if products is None else products.nearest(start, len(tile), k, to_itself)
        if pairs is None:
            distance = rounded_distances(tile, candidates)
            if to_itself is not None:
                distance.scatter_(1, places[:, None], max(to_itself, 0))
            pairs = _near_by_differences(distance, tile, k, (finite[0][places], finite[1]))
        row, source = pairs
        squared = exact_squared_distances(tile, candidates, row, source)
        if to_self:
            place_self(squared, places[row] == source, self_loops)
        index[start : start + len(tile)] = nearest_pairs(row, source, squared, len(tile), k)
    return index


def _near_by_differences(
    distance: Tensor, tile: Tensor, k: int, finite: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Select all pairs that may be among the k nearest; rows and sources, sorted by both."""
    kth = distance.topk(k, dim=1, largest=False).values.amax(dim=1, keepdim=True)
    near = distance <= with_rounding(kth, tile)
    near &= finite[0][:, None] & finite[1]
    row, source = near.nonzero().T
    return row, source
