"""Exact nearest-neighbour search."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int, as_points
from graphattn.graphs.token_graph import TokenGraph, as_token_graph

TILE = 1 << 24  # distances held at a time


def knn(
    x: Tensor,
    k: int,
    *,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
) -> tuple[Tensor, Tensor]:
    """The `k` nearest sources of every token, by squared Euclidean distance.

    Distances come from coordinate differences, never from |a|^2 + |b|^2 - 2 a.b, so they do not
    suffer from a common offset. Neighbours stand in order of distance, equal distances in order of
    index. Tokens holding NaN or infinity are never neighbours and have none. The search itself is
    not differentiable; the returned distances are.

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
    possible = len(sources) - int(to_self and not self_loops)
    if k > possible:
        raise ValueError(f"k must be <= {possible}, the number of possible sources, got {k}")
    compute = torch.promote_types(x.dtype, torch.float32)
    points, candidates = x.to(compute), sources.to(compute)
    with torch.no_grad():
        if within is None:
            index = _nearest_of_all(points, candidates, k, to_self, self_loops)
        else:
            graph = as_token_graph(within, len(x), len(sources))
            if graph.device != x.device:
                raise ValueError(f"within must be on {x.device}, like x, got {graph.device}")
            index = _nearest_in_graph(points, candidates, k, graph, to_self, self_loops)
    found = index >= 0
    neighbour = candidates[index.clamp(min=0)] if len(sources) else candidates.new_zeros(0, k, 1)
    # Missing neighbours are replaced before the subtraction: their gradient is exactly 0.
    neighbour = torch.where(found[..., None], neighbour, points.detach()[:, None].nan_to_num())
    point = torch.where(found[..., None], points[:, None], points.detach()[:, None].nan_to_num())
    squared = (point - neighbour).square().sum(-1).to(x.dtype)
    return index, torch.where(found, squared, torch.inf)


def _nearest_of_all(
    points: Tensor, candidates: Tensor, k: int, to_self: bool, self_loops: bool
) -> Tensor:
    """Rows of distances a tile at a time; N x M is never stored."""
    index = torch.full((len(points), k), -1, dtype=torch.int64, device=points.device)
    rows = max(1, TILE // max(len(candidates), 1))
    for start in range(0, len(points), rows):
        tile = points[start : start + rows]
        distance = torch.cdist(tile, candidates, compute_mode="donot_use_mm_for_euclid_dist")
        distance = distance.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if to_self:
            place_self(distance.diagonal(start), self_loops)
        index[start : start + rows] = smallest(distance, k)
    return index


def place_self(own: Tensor, self_loops: bool) -> None:
    """Overwrite the distances `own` of tokens to themselves, so that self comes first or never.

    Before equal points of smaller index; a token that holds NaN is never its own neighbour.
    """
    first = own.isfinite() & self_loops
    own.fill_(torch.inf).masked_fill_(first, -1)


def smallest(distance: Tensor, k: int) -> Tensor:
    """Columns of the k smallest finite entries of each row, ties by column; -1 where fewer."""
    kth = distance.topk(k, dim=1, largest=False).values.amax(dim=1, keepdim=True)
    closer, tied = distance < kth, distance == kth
    room = k - closer.sum(dim=1, keepdim=True)
    keep = closer | (tied & (tied.cumsum(dim=1) <= room))  # topk promises nothing about ties
    column = keep.nonzero()[:, 1].view(-1, k)
    kept, order = distance.gather(1, column).sort(dim=1, stable=True)
    return torch.where(kept < torch.inf, column.gather(1, order), -1)


def _nearest_in_graph(
    points: Tensor,
    candidates: Tensor,
    k: int,
    graph: TokenGraph,
    to_self: bool,
    self_loops: bool,
) -> Tensor:
    """The same, edge by edge, for the edges of a graph."""
    source, target = graph.edge_index
    distance = torch.empty(len(source), dtype=points.dtype, device=points.device)
    step = max(1, TILE // max(points.shape[1], 1))
    for e in range(0, len(source), step):
        gap = points[target[e : e + step]] - candidates[source[e : e + step]]
        # Square roots as in cdist, so that both searches break the same ties.
        distance[e : e + step] = torch.linalg.vector_norm(gap, dim=1)
    distance = distance.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if to_self:
        own = source == target
        own_distance = distance[own]
        place_self(own_distance, self_loops)
        distance[own] = own_distance
    # Two stable sorts: by target, then distance, then (from edge_index's own order) source.
    order = distance.argsort(stable=True)
    order = order[target[order].argsort(stable=True)]
    rank = torch.arange(len(source), device=points.device) - graph.rowptr[target]
    keep = (rank < k) & (distance[order] < torch.inf)
    index = torch.full((len(points), k), -1, dtype=torch.int64, device=points.device)
    index[target[keep], rank[keep]] = source[order][keep]
    return index
