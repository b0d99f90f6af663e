"""Graphs from coordinates or features: nearest neighbours and radius."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int, as_points
from graphattn.graphs.knn import TILE, knn, place_self, smallest
from graphattn.graphs.token_graph import TokenGraph


def knn_graph(
    x: Tensor,
    k: int,
    *,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
) -> TokenGraph:
    """Every token sees its `k` nearest sources; see :func:`~graphattn.knn` for the rules.

    The graph is generally not symmetric. It is causal where `within` is.

    Args:
        x: tokens that look, [N, C]: coordinates or features.
        k: sources per token.
        source: tokens that are looked at, [M, C]; `x` itself if None.
        within: only edges of this graph are candidates.
        self_loops: whether a token counts as its own first neighbour (``source=None`` only).

    Raises:
        ValueError: as :func:`~graphattn.knn`.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.knn_graph(torch.tensor([[0.0], [1.0], [3.0]]), k=1).edge_index
        tensor([[1, 0, 1],
                [0, 1, 2]])
    """
    index, _ = knn(x.detach() if isinstance(x, Tensor) else x, k, source=source, within=within,
                   self_loops=self_loops)  # fmt: skip
    num_sources = len(x) if source is None else len(source)
    is_causal = isinstance(within, TokenGraph) and within.is_causal
    sizes = within.sizes if isinstance(within, TokenGraph) else None
    return _from_rows(index, num_sources, is_causal=is_causal, sizes=sizes)


def radius_graph(
    positions: Tensor,
    radius: float,
    *,
    max_neighbors: int | None = None,
    self_loops: bool = False,
) -> TokenGraph:
    """Every token sees the tokens at Euclidean distance <= `radius`.

    With `max_neighbors` only the nearest are kept (equal distances: the smaller index), so the
    graph can then be one-sided. Tokens holding NaN or infinity have no edges.

    Args:
        positions: coordinates, [N, C].
        radius: in the unit of `positions`, >= 0.
        max_neighbors: at most so many sources per token, >= 1; all if None.
        self_loops: whether a token sees itself (it then counts as one neighbour, the first).

    Raises:
        ValueError: if an argument is outside its range.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.radius_graph(torch.tensor([[0.0], [1.0], [3.0]]), radius=1.0).edge_index
        tensor([[1, 0],
                [0, 1]])
    """
    positions = as_points("positions", positions).detach()
    radius = as_float("radius", radius, positive=False)
    if max_neighbors is not None:
        max_neighbors = as_int("max_neighbors", max_neighbors, 1)
    points = positions.to(torch.promote_types(positions.dtype, torch.float32))
    N = len(points)
    pieces = []
    rows = max(1, TILE // max(N, 1))
    for start in range(0, N, rows):
        tile = points[start : start + rows]
        distance = torch.cdist(tile, points, compute_mode="donot_use_mm_for_euclid_dist")
        place_self(distance.diagonal(start), self_loops)
        distance = torch.where(distance <= radius, distance, torch.inf)  # NaN is not <= radius
        if max_neighbors is not None and max_neighbors < N:
            row, slot = (index := smallest(distance, max_neighbors)).ge(0).nonzero().T
            pieces.append(torch.stack([index[row, slot], row + start]))
        else:
            row, column = distance.isfinite().nonzero().T
            pieces.append(torch.stack([column, row + start]))
    edge_index = torch.cat(pieces, dim=1) if pieces else torch.empty((2, 0), dtype=torch.int64)
    order = (edge_index[1] * N + edge_index[0]).argsort()
    return TokenGraph(edge_index=edge_index[:, order], num_targets=N, num_sources=N)


def _from_rows(
    index: Tensor,
    num_sources: int,
    *,
    is_causal: bool,
    sizes: tuple[tuple[int, int], ...] | None,
) -> TokenGraph:
    """The graph of a neighbour table [N, k], -1 meaning none."""
    index = index.sort(dim=1).values
    row, slot = (index >= 0).nonzero().T
    return TokenGraph(
        edge_index=torch.stack([index[row, slot], row]),
        num_targets=len(index),
        num_sources=num_sources,
        sizes=sizes,
        is_causal=is_causal,
    )
