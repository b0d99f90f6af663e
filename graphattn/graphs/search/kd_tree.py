"""Exact neighbours of points in few dimensions, found by scipy's k-d tree.

The tree proposes and float64 decides: its proposals are ordered by exact squared distances, and a
row counts as found only where whatever the tree left out is provably farther than the k-th.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.graphs.search.distances import IN_ORDER
from graphattn.kernels.cpu.neighbors import has_neighbors, squared_distances
from graphattn.kernels.shared.launch import is_transformed

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FEWEST = 256  # candidates, below which the products of all pairs are as fast
# Coordinates, beyond which a tree visits so many of its points that products are as fast (of
# normally distributed points, 16 nearest: as measured with 16,384 and with 65,536 of them).
WIDEST = 6
WIDEST_OF_MANY = 8
MANY = 1 << 16
LARGEST = 1e150  # coordinates and radii whose squares fit into float64
# What distances of a tree may be off by, relatively, generously: it adds up the distance to a cell
# on the way down, one rounding a level, and not even coordinates that halve from point to point
# make more than some ten thousand levels.
ROUNDING = 1e-9
SPARE = 1  # candidates beyond those that are asked for: they say how far all others are
ROWS = 4096  # asked at a time
FIRST_ROWS = 256  # the same, until it is known how many candidates are needed
SAMPLE = 64  # points whose neighbours are counted first


def is_for_trees(points: Tensor, candidates: Tensor, k: int = 1) -> bool:
    """Whether a tree is the faster way to the k nearest candidates of points."""
    widest = WIDEST if len(candidates) < MANY else WIDEST_OF_MANY
    return (
        points.device.type == "cpu"
        and 1 <= points.shape[1] <= widest
        and len(candidates) >= max(FEWEST, 16 * k)
        and len(points) > 0
        and not is_transformed()
    )


class PointTree:
    """Points that are finite, and few of each that are equal, to be asked for neighbours."""

    def __init__(self, candidates: Floats, copies: int) -> None:
        from scipy.spatial import cKDTree

        kept = np.flatnonzero(np.isfinite(candidates).all(axis=1))
        kept = kept[_among_first_copies(candidates[kept], copies)]
        self.is_whole = len(kept) == len(candidates)
        self.tree = cKDTree(candidates[kept])
        self.coordinates = candidates.shape[1]
        # The tree says n, the number of its points, where there is none.
        self.source = np.append(kept, -1)
        nowhere = np.full((1, self.coordinates), np.inf)
        self.places = np.concatenate([candidates[kept], nowhere])

    def __len__(self) -> int:
        return len(self.source) - 1

    def candidates(self, points: Floats, many: int, radius: float) -> tuple[Integers, Floats]:
        """Sources near points and their exact squared distances, [rows, many].

        They stand in order up to rounding, and nobody is left out who is nearer than the last by
        more than :data:`ROUNDING`. Where fewer are within the radius, -1 and infinity are last.
        """
        found = self.tree.query(
            points,
            many,
            distance_upper_bound=_widened(radius, self.coordinates),
            workers=max(1, min(torch.get_num_threads(), len(points) // FIRST_ROWS)),
        )[1].reshape(len(points), many)
        return self.source.take(found), _squared(points, self.places, found)


def nearest_by_tree(
    points: Tensor,
    candidates: Tensor,
    k: int,
    to_self: bool,
    self_loops: bool,
    radius: float = np.inf,
) -> tuple[Tensor, Tensor] | None:
    """The k nearest candidates of every point, [N, k], -1 where fewer are within the radius.

    Beside them the rows that a tree has not found: too many candidates are nearly as far as the
    k-th. None where that is the rule, or squares of coordinates overflow.
    """
    a = points.numpy(force=True).astype(np.float64)
    b = a if to_self else candidates.numpy(force=True).astype(np.float64)
    if not (_fits(a) and _fits(b)) or LARGEST < radius < np.inf:
        return None
    # Of equal points the k + 1 of the smallest indices are enough for everyone, oneself included.
    tree = PointTree(b, copies=k + 1)
    if to_self and tree.is_whole:  # neighbours one after the other find what they read in cache
        rows = np.asarray(tree.tree.indices, dtype=np.int64)
    else:
        rows = np.flatnonzero(np.isfinite(a).all(axis=1))
    index = np.full((len(a), k), -1, dtype=np.int64)
    search = _TreeSearch(a, tree, k, to_self, self_loops, radius)
    many = k + 1 + SPARE
    most, start, left = 8 * many, 0, [rows[:0]]
    while start < len(rows):
        some = rows[start : start + (FIRST_ROWS if start < 4 * FIRST_ROWS else ROWS)]
        start += len(some)
        left.append(search.answer(some, many, index))
        if 4 * len(left[-1]) > len(some):
            if many == most:
                return None
            many = min(2 * many, most)
    unsure = np.concatenate(left)
    step = max(1, ROWS * k // most)
    again = [search.answer(unsure[i : i + step], most, index) for i in range(0, len(unsure), step)]
    return torch.from_numpy(index), torch.from_numpy(np.concatenate([rows[:0], *again]))


class _TreeSearch(NamedTuple):
    """Search in a tree: the number of neighbors, their sources and their targets."""

    points: Floats
    tree: PointTree
    k: int
    to_self: bool
    self_loops: bool
    radius: float

    def answer(self, rows: Integers, many: int, index: Integers) -> Integers:
        """Writes neighbours of rows; returns the rows that need more than so many candidates.

        A row is proven where its last candidate is farther than the k-th (or than the radius) by
        more than rounding, or where the tree has left nobody out.
        """
        many = min(many, len(self.tree))
        if many == 0:
            return rows[:0]
        source, squared = _in_order(*self.tree.candidates(self.points[rows], many, self.radius))
        last = squared[:, -1]  # infinite where all in reach were found
        if self.radius < np.inf:
            squared[squared > self.radius * self.radius] = np.inf
        if self.to_self:
            source, squared = _with_oneself_first(rows, source, squared)
            if not self.self_loops:
                source, squared = source[:, 1:], squared[:, 1:]
        k = min(self.k, source.shape[1])
        limit = np.maximum(squared[:, k - 1], 0)
        if self.radius < np.inf:
            limit = np.minimum(limit, self.radius * self.radius)
            source = np.where(np.isinf(squared), -1, source)
        index[rows, :k] = source[:, :k]
        if many == len(self.tree):
            return rows[:0]
        return rows[last <= _widened(np.sqrt(limit), self.tree.coordinates) ** 2]


def _in_order(source: Integers, squared: Floats) -> tuple[Integers, Floats]:
    """Every row by distance, equal distances by index."""
    in_order = squared[:, 1:] > squared[:, :-1]
    if not in_order.all():  # a few rows, but for lattices
        rows = np.flatnonzero(~(in_order | np.isinf(squared[:, 1:])).all(axis=1))
        order = np.lexsort((source[rows], squared[rows]), axis=1)
        source[rows] = np.take_along_axis(source[rows], order, axis=1)
        squared[rows] = np.take_along_axis(squared[rows], order, axis=1)
    return source, squared


def _with_oneself_first(
    rows: Integers, source: Integers, squared: Floats
) -> tuple[Integers, Floats]:
    """Every row itself before its candidates: also where equal points were, and it was none."""
    if (source[:, 0] == rows).all():
        return source, squared
    own = source == rows[:, None]
    if (absent := ~own.any(axis=1)).any():
        source = np.column_stack([source, np.where(absent, rows, -1)])
        squared = np.column_stack([squared, np.where(absent, 0, np.inf)])
        own = np.column_stack([own, absent])
    return _in_order(source, np.where(own, -1, squared))


def pairs_by_tree(points: Tensor, radius: float) -> Tensor | None:
    """The pairs i < j of points that may be at distance <= radius, [2, pairs], in no order.

    None where they are so many that a tree does not help, or squares of coordinates overflow.
    """
    a = points.numpy(force=True).astype(np.float64)
    if not _fits(a) or radius > LARGEST:
        return None
    tree = PointTree(a, copies=len(a))
    reach = _widened(radius, tree.coordinates)
    some = tree.places[:-1][:: max(1, len(tree) // SAMPLE)]
    degrees = tree.tree.query_ball_point(some, reach, return_length=True)
    if np.sum(degrees) * 8 > len(some) * len(tree):
        return None
    pairs = tree.tree.query_pairs(reach, output_type="ndarray")
    return torch.from_numpy(tree.source.take(pairs.T))


def _fits(points: Floats) -> bool:
    """Whether the squares of all finite coordinates are finite."""
    size = np.abs(points)
    return not bool(((size > LARGEST) & np.isfinite(size)).any())


def _widened(distance: Any, coordinates: int) -> Any:
    """Bound the distance in a tree of points up to this distance, generously: squares may vanish,
    too.
    """
    tiny = np.finfo(np.float64).tiny
    return distance * (1 + 2 * ROUNDING) + 2 * (coordinates * tiny) ** 0.5


def _squared(points: Floats, places: Floats, found: Integers) -> Floats:
    """Squared distances from candidates, rounded as `exact_squared_distances` rounds them."""
    if points.shape[1] > IN_ORDER:
        tensors = torch.from_numpy(points), torch.from_numpy(places)
        if has_neighbors(tensors[0]):
            row = torch.arange(len(points)).repeat_interleave(found.shape[1])
            exact = squared_distances(*tensors, row, torch.from_numpy(found).flatten())
            return exact.view(found.shape).numpy()
        gap = points[:, None] - places[found]
        return torch.from_numpy(np.square(gap, out=gap)).sum(dim=-1).numpy()
    squared = np.square(points[:, :1] - places[:, 0].take(found))
    for c in range(1, points.shape[1]):
        squared += np.square(points[:, c, None] - places[:, c].take(found))
    return squared


def _among_first_copies(points: Floats, copies: int) -> Integers:
    """Places of points without those that so many equal points stand before."""
    everyone = np.arange(len(points))
    if len(points) <= copies:
        return everyone
    # Equal points have equal sums; and few others, where weights are no ratios of whole numbers.
    sums = np.zeros(len(points))
    for c in range(points.shape[1]):
        sums += points[:, c] * np.sqrt(2 + c)
    sums.sort()
    if not (sums[copies:] == sums[:-copies]).any():
        return everyone
    order = np.lexsort(points.T)
    is_new = np.ones(len(points), dtype=bool)
    is_new[1:] = (points[order[1:]] != points[order[:-1]]).any(axis=1)
    first = np.maximum.accumulate(np.where(is_new, everyone, 0))
    return np.sort(order[everyone - first < copies])
