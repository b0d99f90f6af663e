"""Exact nearest-neighbour search."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int, as_points
from graphattn.graphs.distances import (
    TILE,
    DistanceProducts,
    exact_squared_distances,
    nearest_pairs,
    place_self,
    rounded_distances,
    with_rounding,
)
from graphattn.graphs.token_graph import TokenGraph, as_token_graph


def knn(
    x: Tensor,
    k: int,
    *,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
) -> tuple[Tensor, Tensor]:
    """The `k` nearest sources of every token, by squared Euclidean distance.

    Squared distances come from coordinate differences in float64, never from
    ``|a|^2 + |b|^2 - 2 a.b``, so a common offset costs no accuracy. Neighbours stand in order of
    distance, equal distances in order of index. Tokens holding NaN or infinity are never neighbours
    and have none. The search itself is not differentiable; the returned distances are.

    Args:
        x: tokens that look, [N, C]; half precision is searched in float32.
        k: neighbours per token, 1 <= k <= number of possible sources.
        source: tokens that are looked at, [M, C]; the tokens `x` themselves if None.
        within: only edges of this graph are candidates (a TokenGraph, or an edge_index [2, E]).
            A token with fewer than k candidates keeps them all.
        self_loops: with ``source=None``, whether a token may be its own neighbour; it then comes
            first and counts as one of the k.

    Returns:
        ``(index, squared_distance)``, both [N, k]; -1 and infinity where there are fewer than k.

    Raises:
        ValueError: if shapes, dtypes or devices disagree or k is not in the range above.

    Example:
        >>> import torch, graphattn as ga
        >>> index, squared_distance = ga.knn(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), k=2)
        >>> index
        tensor([[1, 2],
                [0, 2],
                [3, 1],
                [2, 1]])
        >>> squared_distance[0]
        tensor([1., 9.])
    """
    x, k = as_points("x", x), as_int("k", k, 1)
    to_self = source is None
    sources = x if source is None else as_points("source", source)
    if sources.shape[1] != x.shape[1]:
        raise ValueError(
            f"source must have as many coordinates as x ({x.shape[1]}), got {sources.shape[1]}"
        )
    if sources.dtype != x.dtype or sources.device != x.device:
        raise ValueError(
            f"source must have the dtype and device of x ({x.dtype}, {x.device}), "
            f"got {sources.dtype}, {sources.device}"
        )
    if self_loops and not to_self:
        raise ValueError("self_loops=True needs source=None: other sources are other tokens")
    possible = max(len(sources) - int(to_self and not self_loops), 0)
    if k > possible:
        raise ValueError(f"k must be <= {possible}, the number of possible sources, got {k}")
    points = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    candidates = sources.detach().to(points.dtype)
    if within is None:
        index = _nearest_of_all(points, candidates, k, to_self, bool(self_loops))
    else:
        index = _nearest_in_graph(
            points, candidates, k, _candidate_graph(within, x, sources), to_self, bool(self_loops)
        )
    # Distances again, differentiable. What is missing is 0 before the subtraction and infinite
    # after it, so its gradient is exactly 0.
    found = index >= 0
    row, slot = found.nonzero().T
    if torch.is_grad_enabled() and (x.requires_grad or sources.requires_grad):
        gap = x[row].double() - sources[index[row, slot]].double()
        distance = gap.square().sum(-1)
    else:
        distance = exact_squared_distances(x, sources, row, index[row, slot])
    squared = torch.full(index.shape, torch.inf, dtype=torch.float64, device=x.device)
    squared = squared.index_put((row, slot), distance)
    return index, squared.to(x.dtype)


def _candidate_graph(within: TokenGraph | Tensor, x: Tensor, sources: Tensor) -> TokenGraph:
    try:
        graph = as_token_graph(within, len(x), len(sources))
    except ValueError as error:
        raise ValueError(f"within does not fit the tokens: {error}") from None
    if graph.device != x.device:
        raise ValueError(f"within must be on {x.device}, like x, got {graph.device}")
    return graph


def _nearest_of_all(
    points: Tensor, candidates: Tensor, k: int, to_self: bool, self_loops: bool
) -> Tensor:
    """A tile of rows at a time; N x M is never stored.

    Rounding may exchange neighbours that are nearly equally far, so everything within rounding of
    the k-th is a candidate, and exact distances decide. Distances from matrix products find few
    candidates fast; where they find many (tokens closer to each other than products can tell), or
    have no bound, differences do.
    """
    index = torch.empty((len(points), k), dtype=torch.int64, device=points.device)
    finite = points.isfinite().all(dim=1), candidates.isfinite().all(dim=1)
    products = DistanceProducts.of(points, candidates, finite)
    own = None if not to_self else -torch.inf if self_loops else torch.inf
    rows = max(1, TILE // max(len(candidates), 1))
    for start in range(0, len(points), rows):
        tile = points[start : start + rows]
        pairs = None if products is None else products.nearest(start, len(tile), k, own)
        if pairs is None:
            pairs = _near_by_differences(tile, candidates, k, start, own, finite)
        row, source = pairs
        squared = exact_squared_distances(tile, candidates, row, source)
        if to_self:
            place_self(squared, row + start == source, self_loops)
        index[start : start + rows] = nearest_pairs(row, source, squared, len(tile), k)
    return index


def _near_by_differences(
    tile: Tensor,
    candidates: Tensor,
    k: int,
    start: int,
    own: float | None,
    finite: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Rows and sources of all pairs that may be among the k nearest, sorted by row, then source."""
    distance = rounded_distances(tile, candidates)
    if own is not None:
        distance.diagonal(start).fill_(max(own, 0))
    kth = distance.topk(k, dim=1, largest=False).values.amax(dim=1, keepdim=True)
    near = distance <= with_rounding(kth, tile)
    near &= finite[0][start : start + len(tile), None] & finite[1]
    row, source = near.nonzero().T
    return row, source


def _nearest_in_graph(
    points: Tensor,
    candidates: Tensor,
    k: int,
    graph: TokenGraph,
    to_self: bool,
    self_loops: bool,
) -> Tensor:
    """The same for the edges of a graph."""
    source, target = graph.edge_index
    squared = exact_squared_distances(points, candidates, target, source)
    if to_self:
        place_self(squared, target == source, self_loops)
    return nearest_pairs(target, source, squared, len(points), k)
