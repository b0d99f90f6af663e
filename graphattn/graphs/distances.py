"""Distances between tokens, and the nearest of them: rounded first, exact where it matters."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1 << 22  # distances held at a time


def nearest_pairs(row: Tensor, source: Tensor, squared: Tensor, num_rows: int, k: int) -> Tensor:
    """The k nearest sources of every row, [num_rows, k]; -1 where fewer are in finite reach.

    Pairs stand sorted by row, then source. Two stable sorts, by distance and then by row, leave
    equal distances in order of source.
    """
    order = squared.argsort(stable=True)
    order = order[row[order].argsort(stable=True)]
    count = torch.bincount(row, minlength=num_rows)
    rank = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    keep = (rank < k) & (squared[order] < torch.inf)
    index = torch.full((num_rows, k), -1, dtype=torch.int64, device=row.device)
    index[row[keep], rank[keep]] = source[order][keep]
    return index


def rounded_distances(points: Tensor, candidates: Tensor) -> Tensor:
    """Distances [n, M], up to rounding; infinite where a coordinate is not finite."""
    distance = torch.cdist(points, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def with_rounding(limit: Tensor | float, points: Tensor) -> Tensor | float:
    """What a rounded distance may come to where the exact one is `limit`, generously.

    One rounding per coordinate and a few more, and squares that vanish below the smallest number.
    """
    finfo, coordinates = torch.finfo(points.dtype), points.shape[1]
    return limit * (1 + 2 * (coordinates + 8) * finfo.eps) + (coordinates * finfo.tiny) ** 0.5


def exact_squared_distances(
    points: Tensor, candidates: Tensor, row: Tensor, source: Tensor
) -> Tensor:
    """Squared distances of pairs, [E], in float64; infinite where a coordinate is not finite."""
    squared = torch.empty(len(row), dtype=torch.float64, device=points.device)
    step = max(1, TILE // max(points.shape[1], 1))
    for e in range(0, len(row), step):
        pairs = slice(e, e + step)
        gap = points[row[pairs]].double() - candidates[source[pairs]].double()
        squared[pairs] = gap.square_().sum(dim=1)
    return squared.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def place_self(squared: Tensor, own: Tensor, self_loops: bool) -> None:
    """Give pairs of a token with itself a distance that makes them first, or never chosen.

    First even before equal points of smaller index; a token that holds NaN has no neighbours.
    """
    first = own & squared.isfinite() & self_loops
    squared.masked_fill_(own, torch.inf).masked_fill_(first, -1)
