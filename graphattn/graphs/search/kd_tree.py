"""Exact neighbours of points in few dimensions, found by scipy's k-d tree.

It serves where there is no compiled code. The tree selects candidates, which are then sorted by
exact squared distances in float64. The result of a row is used only if all points that the tree did
not select are provably farther than the k-th.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.graphs.search.distances import TILE, exact_squared_distances
from graphattn.kernels.shared.launch import is_transformed

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


def nearest_by_tree(
    points: Tensor, candidates: Tensor, k: int, to_self: bool, self_loops: bool
) -> tuple[Tensor, Tensor] | None:
    """Find the k nearest candidates of every point, [N, k]; -1 if there are fewer.

    The second result lists the rows for which the tree gives no proof, because too many candidates
    are nearly as far as the k-th. The result is None if there are many such rows, or if squares of
    coordinates overflow.
    """
    if not (_fits(points) and _fits(candidates)):
        return None
    # Of equal points, the k + 1 with the smallest indices are enough, including the point itself.
    tree, source = _tree_of(candidates, copies=k + 1)
    index = torch.full((len(points), k), -1)
    if not len(source):
        return index, source
    rows = points.isfinite().all(dim=1).nonzero()[:, 0]
    lead = int(to_self and self_loops)  # A token that sees itself is its own first neighbour.
    if lead:
        index[rows, 0] = rows
    # One candidate more than the neighbours and the token itself bounds the distance of all others.
    # Inside a lattice, two to four times as many are needed.
    for many in (k + 2, 2 * (k + 2), 8 * (k + 2)):
        many = min(many, len(source))
        unsure = [rows[:0]]
        for some in rows.split(max(1, TILE // many)):
            place = tree.query(points[some].numpy(), many, workers=torch.get_num_threads())[1]
            near = source[torch.from_numpy(place.reshape(-1))]
            row = some.repeat_interleave(many)
            squared = exact_squared_distances(points, candidates, row, near).view(-1, many)
            last = squared.amax(dim=1)
            near = near.view(-1, many)
            if to_self:
                squared.masked_fill_(near == some[:, None], torch.inf)
            near, order = near.sort(dim=1)  # of equal distances, the smaller index is nearer
            squared, order = squared.gather(1, order).sort(dim=1, stable=True)
            near = near.gather(1, order).masked_fill_(squared == torch.inf, -1)[:, : k - lead]
            index[some, lead : lead + near.shape[1]] = near
            if many < len(source):
                kth = squared[:, max(near.shape[1], 1) - 1].sqrt()
                unsure.append(some[last <= _widened(kth, points.shape[1]) ** 2])
        rows = torch.cat(unsure)
    return None if 4 * len(rows) > len(points) else (index, rows)


def pairs_by_tree(points: Tensor, squared: float) -> Tensor | None:
    """Find the pairs i < j that may be at a squared distance <= `squared`, [2, pairs], unsorted.

    The result is None if there are so many pairs that a tree is no faster, or if squares of
    coordinates overflow.
    """
    if not _fits(points) or squared > LARGEST**2:
        return None
    tree, source = _tree_of(points, copies=len(points))
    reach = _widened(squared**0.5, points.shape[1])
    sample = tree.data[:: max(1, len(source) // SAMPLE)]
    degrees = tree.query_ball_point(sample, reach, return_length=True)
    if np.sum(degrees) * 8 > len(sample) * len(source):
        return None
    return source[torch.from_numpy(tree.query_pairs(reach, output_type="ndarray")).T]


def _tree_of(points: Tensor, copies: int) -> tuple[Any, Tensor]:
    """Make a tree of finite points, at most `copies` of equal ones, and return their indices."""
    from scipy.spatial import cKDTree

    source = points.isfinite().all(dim=1).nonzero()[:, 0].numpy()
    coordinates = points.numpy()[source].astype(np.float64)
    selected = _first_copies(coordinates, copies)
    return cKDTree(coordinates[selected]), torch.from_numpy(source[selected])


def _first_copies(points: NDArray[np.float64], copies: int) -> NDArray[np.int64]:
    """Return the indices of points, leaving out a point that has `copies` equal ones before it."""
    everyone = np.arange(len(points))
    if len(points) <= copies:
        return everyone
    order = np.lexsort(points.T)  # stable, so equal points stay in the order of their indices
    is_new = np.ones(len(points), dtype=bool)
    is_new[1:] = (points[order[1:]] != points[order[:-1]]).any(axis=1)
    first = np.maximum.accumulate(np.where(is_new, everyone, 0))
    return np.sort(order[everyone - first < copies])


def _fits(points: Tensor) -> bool:
    """Whether the squares of all finite coordinates are finite."""
    size = points.double().abs()
    return not bool(((size > LARGEST) & size.isfinite()).any())


def _widened(distance: Any, coordinates: int) -> Any:
    """Return the most that a tree computes as this distance, even if squares underflow."""
    tiny = np.finfo(np.float64).tiny
    return distance * (1 + 2 * ROUNDING) + 2 * (coordinates * tiny) ** 0.5
