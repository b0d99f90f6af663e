"""Distances between tokens, rounded of many pairs and exact of few, and the nearest by them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from graphattn.kernels.cpu.neighbors import has_neighbors, squared_distances
from graphattn.kernels.shared.launch import is_transformed, untraced

TILE = 1 << 21  # distances in memory at a time
PAIRS = 1 << 19  # coordinates of pairs in memory at a time
# Up to this many terms, a sum of torch adds them one after the other. So adding the coordinates in
# a loop gives the same bits.
IN_ORDER = 3


def nearest_pairs(row: Tensor, source: Tensor, squared: Tensor, num_rows: int, k: int) -> Tensor:
    """Select the k nearest sources of every row, [num_rows, k]; -1 if there are fewer than k.

    The pairs must be sorted by row, then source. Two stable sorts, by distance and then by row,
    leave equal distances in the order of sources. Pairs at infinite distance are left out.
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
    """Compute distances [n, M] up to rounding; infinite if a coordinate is not finite."""
    distance = torch.cdist(points, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.nan_to_num_(nan=torch.inf, posinf=torch.inf)


class DistanceProducts:
    r"""Squared distances by matrix products, with a bound on their rounding errors.

    With both sets of points centred, :math:`s_{ij} = |b_j|^2 - 2 a_i \cdot b_j` orders the sources
    j of row i as :math:`|a_i - b_j|^2` does, up to an error of
    :math:`E_i = (C + 8) \, \epsilon \, (|a_i| + \max_j |b_j|)^2`. A product of C terms has an error
    of at most C eps / 2 times the product of the norms (Higham, *Accuracy and Stability of
    Numerical Algorithms*, 3.1), which counts twice. Centring and the norms add a few eps.
    """

    BLOCK = 32  # sources per block; the smallest s of every block is found first
    COLUMNS = 2048  # sources that are multiplied at a time, so that the products stay in cache
    MOST = 8  # the most candidates per neighbour; with more, differences are faster

    def __init__(self, rows: Tensor, columns: Tensor, rounding: Tensor) -> None:
        self.rows, self.columns, self.rounding = rows, columns, rounding
        self.products = rows.new_empty(0)  # a buffer that every tile overwrites

    @classmethod
    def of(
        cls, points: Tensor, candidates: Tensor, finite: tuple[Tensor, Tensor]
    ) -> DistanceProducts | None:
        """Prepare products of all pairs; None if their error is unknown (TF32) or they overflow."""
        if torch.get_float32_matmul_precision() != "highest" or len(candidates) < 2 * cls.BLOCK:
            return None
        if points.device.type != "cpu" and torch.backends.cuda.matmul.allow_tf32:
            return None
        known = candidates[finite[1]]
        if len(known) < len(candidates) or not finite[0].all():
            return None  # Tokens with NaN are rare, and differences handle them.
        center = known.double().mean(dim=0).to(points.dtype)
        a, b = points - center, candidates - center
        square_of_b = b.square().sum(dim=1)
        reach = a.square().sum(dim=1).sqrt() + square_of_b.max().sqrt()
        finfo, coordinates = torch.finfo(points.dtype), points.shape[1]
        rounding = (coordinates + 8) * finfo.eps * reach.square() + coordinates * finfo.tiny
        if not (4 * reach.square()).isfinite().all():
            return None
        return cls(
            torch.cat([-2 * a, torch.ones_like(a[:, :1])], dim=1),
            torch.cat([b, square_of_b[:, None]], dim=1),
            rounding[:, None],
        )

    def nearest(
        self, start: int, count: int, k: int, to_itself: float | None
    ) -> tuple[Tensor, Tensor] | None:
        """Select the pairs that may be among the k nearest, sorted; None if they are too many.

        Args:
            start: the first row.
            count: the number of rows.
            k: neighbours per row.
            own: the value that replaces s of a token with itself; None if targets and sources are
                different tokens.
        """
        M = len(self.columns)
        blocks = -(-M // self.BLOCK)
        if self.products.shape != (count, blocks * self.BLOCK):
            self.products = self.rows.new_full((count, blocks * self.BLOCK), torch.inf)
        s, least = self.products, self.rows.new_empty((count, blocks))
        for j in range(0, M, self.COLUMNS):
            part, columns = s[:, j : j + self.COLUMNS], self.columns[j : j + self.COLUMNS]
            torch.mm(self.rows[start : start + count], columns.T, out=part[:, : len(columns)])
            if to_itself is not None:
                part.diagonal(start - j).fill_(to_itself)
            some = slice(j // self.BLOCK, j // self.BLOCK + part.shape[1] // self.BLOCK)
            least[:, some] = part.unflatten(1, (-1, self.BLOCK)).amin(dim=2)
        # The k-th smallest of the minima of blocks. At least k sources are no farther, and few more
        # than k if there are many blocks per neighbour. It is finite, because at most one minimum
        # is infinite: that of a block which holds only the token itself.
        kth = untraced(kth_smallest)(least if blocks >= 4 * k else s, k)
        limit = kth + 2 * self.rounding[start : start + count]
        near = (least <= limit).flatten().nonzero()[:, 0]
        row = near.div(blocks, rounding_mode="floor")
        within = s.view(-1, self.BLOCK).index_select(0, near) <= limit.index_select(0, row)
        places = within.flatten().nonzero()[:, 0]
        if len(places) > self.MOST * k * count:
            return None
        near = near.repeat_interleave(within.sum(dim=1))
        row = near.div(blocks, rounding_mode="floor")
        return row, (near - row * blocks) * self.BLOCK + places % self.BLOCK


def kth_smallest(values: Tensor, k: int) -> Tensor:
    """Find the k-th smallest value of every row, [N, 1]."""
    if values.device.type != "cpu" or is_transformed():
        return values.topk(k, dim=1, largest=False).values.amax(dim=1, keepdim=True)
    return torch.from_numpy(np.partition(values.numpy(), k - 1, axis=1)[:, k - 1 : k])


def with_rounding(limit: Tensor | float, points: Tensor) -> Tensor | float:
    """Return an upper bound of the rounded distance of points whose exact distance is `limit`.

    The bound allows one rounding per coordinate, a few more, and squares that underflow to 0.
    """
    finfo, coordinates = torch.finfo(points.dtype), points.shape[1]
    return limit * (1 + 2 * (coordinates + 8) * finfo.eps) + (coordinates * finfo.tiny) ** 0.5


def squared_reach(radius: float, dtype: torch.dtype) -> float:
    """Return the largest squared distance, in float64, of points within a radius.

    Its root, rounded to the dtype of the points, is at most the radius, rounded to the same dtype.
    So points whose exact distance is the radius are always within it.
    """
    number = np.float32 if dtype == torch.float32 else np.float64
    largest = float(np.finfo(np.float64).max)
    with np.errstate(over="ignore"):
        limit = number(radius)
        if not np.isfinite(limit):
            return largest
        spacing = np.spacing(limit)  # to the next number of the dtype
        if not np.isfinite(spacing):
            spacing = limit - np.nextafter(limit, number(0))
        middle = float(limit) + float(spacing) / 2
        squared = min(middle * middle, largest)
        while number(math.sqrt(squared)) > limit:
            squared = math.nextafter(squared, 0)
        while squared < largest and number(math.sqrt(math.nextafter(squared, math.inf))) <= limit:
            squared = math.nextafter(squared, math.inf)
    return squared


def exact_squared_distances(
    points: Tensor, candidates: Tensor, row: Tensor, source: Tensor
) -> Tensor:
    """Compute squared distances of pairs [E] in float64; infinite if a coordinate is not finite."""
    if has_neighbors(points):
        squared = untraced(squared_distances)(points, candidates, row, source)
        return squared.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    squared = torch.zeros(len(row), dtype=torch.float64, device=points.device)
    if points.shape[1] <= IN_ORDER:
        for a, b in zip(points.double().T, candidates.double().T, strict=True):
            squared += a.take(row).sub_(b.take(source)).square_()
        return squared.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    step = max(1, PAIRS // max(points.shape[1], 1))
    for e in range(0, len(row), step):
        pairs = slice(e, e + step)
        gap = points.index_select(0, row[pairs]).double()
        gap -= candidates.index_select(0, source[pairs])
        squared[pairs] = gap.square_().sum(dim=1)
    return squared.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def place_self(squared: Tensor, is_itself: Tensor, self_loops: bool) -> None:
    """Set the squared distance of a token to itself, in place.

    With `self_loops` it is -1, so that the token comes first, even before an equal point with a
    smaller index. Without, or if the token has a NaN, it is infinite, so that it is not selected.
    """
    first = is_itself & squared.isfinite() & self_loops
    squared.masked_fill_(is_itself, torch.inf).masked_fill_(first, -1)


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
