"""Exact neighbours of points in few dimensions, found by scipy's k-d tree.

The tree selects candidates, which are then sorted by exact squared distances in float64. The result
of a row is used only if all points that the tree did not select are provably farther than the k-th.
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

FEWEST = 256  # the fewest candidates: with less, the products of all pairs are as fast
# The most coordinates: with more, a tree visits so many of its points that products are as fast.
# This was measured for the 16 nearest of 16,384 and of 65,536 normally distributed points.
WIDEST = 6
WIDEST_OF_MANY = 8  # the same, for at least MANY candidates
MANY = 1 << 16
LARGEST = 1e150  # the largest coordinate or radius whose square fits into float64
# A generous bound on the relative error of a tree's distances. The tree adds up the distance to a
# cell on the way down, with one rounding per level. Even coordinates that halve from point to point
# make only about ten thousand levels.
ROUNDING = 1e-9
SPARE = 1  # additional candidates, which give a lower bound for the distance of all others
ROWS = 4096  # rows that are searched at a time
FIRST_ROWS = 256  # the same, until it is known how many candidates are needed
SAMPLE = 64  # points whose neighbours are counted first, as a sample


def is_for_trees(points: Tensor, candidates: Tensor, k: int = 1) -> bool:
    """Whether a tree is the fastest way to find the k nearest candidates of points."""
    widest = WIDEST if len(candidates) < MANY else WIDEST_OF_MANY
    return (
        points.device.type == "cpu"
        and 1 <= points.shape[1] <= widest
        and len(candidates) >= max(FEWEST, 16 * k)
        and len(points) > 0
        and not is_transformed()
    )


class PointTree:
    """A tree of finite points, with at most `copies` of equal ones, to search for neighbours."""

    def __init__(self, candidates: Floats, copies: int) -> None:
        from scipy.spatial import cKDTree

        selected = np.flatnonzero(np.isfinite(candidates).all(axis=1))
        selected = selected[_among_first_copies(candidates[selected], copies)]
        self.is_whole = len(selected) == len(candidates)
        self.tree = cKDTree(candidates[selected])
        self.coordinates = candidates.shape[1]
        # If there are too few points, the tree returns n, the number of its points, as an index.
        self.source = np.append(selected, -1)
        infinite = np.full((1, self.coordinates), np.inf)
        self.places = np.concatenate([candidates[selected], infinite])

    def __len__(self) -> int:
        return len(self.source) - 1

    def candidates(self, points: Floats, many: int, reach: float) -> tuple[Integers, Floats]:
        """Find the sources nearest to points, and their exact squared distances, [rows, many].

        They are sorted up to rounding. No source that was left out is nearer than the last one by
        more than :data:`ROUNDING`. If fewer sources are within `reach`, the rest of a row is -1 and
        infinity.
        """
        index = self.tree.query(
            points,
            many,
            distance_upper_bound=_widened(np.sqrt(reach), self.coordinates),
            workers=max(1, min(torch.get_num_threads(), len(points) // FIRST_ROWS)),
        )[1].reshape(len(points), many)
        return self.source.take(index), _squared(points, self.places, index)


def nearest_by_tree(
    points: Tensor,
    candidates: Tensor,
    k: int,
    to_self: bool,
    self_loops: bool,
    reach: float = np.inf,
) -> tuple[Tensor, Tensor] | None:
    """Find the k nearest candidates of every point, [N, k]; -1 if fewer are within `reach`.

    `reach` is the largest squared distance of a neighbour.
    The second result lists the rows for which the tree gives no proof, because too many candidates
    are nearly as far as the k-th. The result is None if there are many such rows, or if squares of
    coordinates overflow.
    """
    a = points.numpy(force=True).astype(np.float64)
    b = a if to_self else candidates.numpy(force=True).astype(np.float64)
    if not (_fits(a) and _fits(b)) or LARGEST < np.sqrt(reach) < np.inf:
        return None
    # Of equal points, the k + 1 with the smallest indices are enough, including the point itself.
    tree = PointTree(b, copies=k + 1)
    if to_self and tree.is_whole:  # In the order of the tree, neighbouring rows share the cache.
        rows = np.asarray(tree.tree.indices, dtype=np.int64)
    else:
        rows = np.flatnonzero(np.isfinite(a).all(axis=1))
    index = np.full((len(a), k), -1, dtype=np.int64)
    search = _TreeSearch(a, tree, k, to_self, self_loops, reach)
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
    """The arguments of a search in a tree."""

    points: Floats
    tree: PointTree
    k: int
    to_self: bool
    self_loops: bool
    reach: float  # squared

    def answer(self, rows: Integers, many: int, index: Integers) -> Integers:
        """Write the neighbours of rows into `index`; return the rows that need more candidates.

        The neighbours of a row are proven if its last candidate is farther than the k-th (or than
        the reach) by more than rounding, or if all points of the tree are candidates.

        Args:
            rows: the points to search for.
            many: candidates per row.
            index: int64 [N, k], the result.
        """
        many = min(many, len(self.tree))
        if many == 0:
            return rows[:0]
        source, squared = _in_order(*self.tree.candidates(self.points[rows], many, self.reach))
        last = squared[:, -1]  # infinite if all points within reach were found
        if self.reach < np.inf:
            squared[squared > self.reach] = np.inf
        if self.to_self:
            source, squared = _with_oneself_first(rows, source, squared)
            if not self.self_loops:
                source, squared = source[:, 1:], squared[:, 1:]
        k = min(self.k, source.shape[1])
        limit = np.maximum(squared[:, k - 1], 0)
        if self.reach < np.inf:
            limit = np.minimum(limit, self.reach)
            source = np.where(np.isinf(squared), -1, source)
        index[rows, :k] = source[:, :k]
        if many == len(self.tree):
            return rows[:0]
        return rows[last <= _widened(np.sqrt(limit), self.tree.coordinates) ** 2]


def _in_order(source: Integers, squared: Floats) -> tuple[Integers, Floats]:
    """Sort every row by distance, and equal distances by index."""
    in_order = squared[:, 1:] > squared[:, :-1]
    if not in_order.all():  # These are few rows, unless the points form a lattice.
        rows = np.flatnonzero(~(in_order | np.isinf(squared[:, 1:])).all(axis=1))
        order = np.lexsort((source[rows], squared[rows]), axis=1)
        source[rows] = np.take_along_axis(source[rows], order, axis=1)
        squared[rows] = np.take_along_axis(squared[rows], order, axis=1)
    return source, squared


def _with_oneself_first(
    rows: Integers, source: Integers, squared: Floats
) -> tuple[Integers, Floats]:
    """Put every point before its candidates, even if equal points displaced it from them."""
    if (source[:, 0] == rows).all():
        return source, squared
    is_itself = source == rows[:, None]
    if (absent := ~is_itself.any(axis=1)).any():
        source = np.column_stack([source, np.where(absent, rows, -1)])
        squared = np.column_stack([squared, np.where(absent, 0, np.inf)])
        is_itself = np.column_stack([is_itself, absent])
    return _in_order(source, np.where(is_itself, -1, squared))


def pairs_by_tree(points: Tensor, squared: float) -> Tensor | None:
    """Find the pairs i < j that may be at a squared distance <= `squared`, [2, pairs], unsorted.

    The result is None if there are so many pairs that a tree is no faster, or if squares of
    coordinates overflow.
    """
    a = points.numpy(force=True).astype(np.float64)
    if not _fits(a) or squared > LARGEST**2:
        return None
    tree = PointTree(a, copies=len(a))
    reach = _widened(np.sqrt(squared), tree.coordinates)
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
    """Return an upper bound for the distance that a tree computes for points at this distance.

    The bound also allows for squares that underflow to 0.
    """
    tiny = np.finfo(np.float64).tiny
    return distance * (1 + 2 * ROUNDING) + 2 * (coordinates * tiny) ** 0.5


def _squared(points: Floats, places: Floats, index: Integers) -> Floats:
    """Compute squared distances of candidates, with the same bits as `exact_squared_distances`."""
    if points.shape[1] > IN_ORDER:
        tensors = torch.from_numpy(points), torch.from_numpy(places)
        if has_neighbors(tensors[0]):
            row = torch.arange(len(points)).repeat_interleave(index.shape[1])
            exact = squared_distances(*tensors, row, torch.from_numpy(index).flatten())
            return exact.view(index.shape).numpy()
        gap = points[:, None] - places[index]
        return torch.from_numpy(np.square(gap, out=gap)).sum(dim=-1).numpy()
    squared = np.square(points[:, :1] - places[:, 0].take(index))
    for c in range(1, points.shape[1]):
        squared += np.square(points[:, c, None] - places[:, c].take(index))
    return squared


def _among_first_copies(points: Floats, copies: int) -> Integers:
    """Return the indices of points, leaving out a point that has `copies` equal ones before it."""
    everyone = np.arange(len(points))
    if len(points) <= copies:
        return everyone
    # Equal points have equal weighted sums. With irrational weights, few other points do.
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
