"""Exact nearest neighbours by looking at all pairs: in many dimensions, and on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.distances import (
    TILE,
    DistanceProducts,
    exact_squared_distances,
    nearest_pairs,
    place_self,
    rounded_distances,
    with_rounding,
)
from graphattn.kernels.cpu.neighbors import has_neighbors
from graphattn.kernels.launch import untraced


def nearest_by_pairs(
    points: Tensor,
    candidates: Tensor,
    k: int,
    to_self: bool,
    self_loops: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """The k nearest candidates of every point, or of some rows; N x M is never stored.

    Rounding may exchange neighbours that are nearly equally far, so everything within rounding of
    the k-th is a candidate, and exact distances decide. Distances from matrix products find few
    candidates fast; where they find many (tokens closer to each other than products can tell), or
    have no bound, differences do.
    """
    finite = points.isfinite().all(dim=1), candidates.isfinite().all(dim=1)
    products = None if rows is not None else DistanceProducts.of(points, candidates, finite)
    if rows is None:
        rows = torch.arange(len(points), device=points.device)
    index = torch.empty((len(rows), k), dtype=torch.int64, device=points.device)
    own = None if not to_self else -torch.inf if self_loops else torch.inf
    left = [slice(0, len(rows))]
    if products is not None and has_neighbors(points):
        left = untraced(_scan)(products, points, candidates, own, self_loops, index)
    step = max(1, TILE // max(len(candidates), 1))
    for part in left:
        for start in range(part.start, part.stop, step):
            places = rows[start : min(start + step, part.stop)]
            tile = points[places]
            pairs = None if products is None else products.nearest(start, len(tile), k, own)
            if pairs is None:
                distance = rounded_distances(tile, candidates)
                if own is not None:
                    distance.scatter_(1, places[:, None], max(own, 0))
                pairs = _near_by_differences(distance, tile, k, (finite[0][places], finite[1]))
            row, source = pairs
            squared = exact_squared_distances(tile, candidates, row, source)
            if to_self:
                place_self(squared, places[row] == source, self_loops)
            index[start : start + len(tile)] = nearest_pairs(row, source, squared, len(tile), k)
    return index


def _scan(
    products: DistanceProducts,
    points: Tensor,
    candidates: Tensor,
    own: float | None,
    self_loops: bool,
    index: Tensor,
) -> list[slice]:
    """Writes neighbours by compiled code; returns the rows that have too many candidates for it."""
    points, candidates = points.contiguous(), candidates.contiguous()
    k, left = index.shape[1], []
    step = products.scanned_rows(k)
    for start in range(0, len(points), step):
        some = slice(start, min(start + step, len(points)))
        smallest = products.scan(start, some.stop - start, k, own)
        if smallest.has_all:
            itself = None if own is None else start
            index[some] = smallest.nearest(points[some], candidates, itself, self_loops)
        else:
            left.append(some)
    return left


def _near_by_differences(
    distance: Tensor, tile: Tensor, k: int, finite: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rows and sources of all pairs that may be among the k nearest, sorted by row, then source."""
    kth = distance.topk(k, dim=1, largest=False).values.amax(dim=1, keepdim=True)
    near = distance <= with_rounding(kth, tile)
    near &= finite[0][:, None] & finite[1]
    row, source = near.nonzero().T
    return row, source
