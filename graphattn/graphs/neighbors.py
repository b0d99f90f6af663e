"""Graphs from coordinates or features: nearest neighbours and radius."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int, as_points
from graphattn.graphs.distances import (
    TILE,
    exact_squared_distances,
    nearest_pairs,
    place_self,
    rounded_distances,
    with_rounding,
)
from graphattn.graphs.edge_lists import edges_of_rows
from graphattn.graphs.nearest_neighbors import nearest_index
from graphattn.graphs.token_graph import TokenGraph


def knn_graph(
    x: Tensor,
    k: int,
    *,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
    backend: str = "auto",
) -> TokenGraph:
    """Every token sees its `k` nearest sources; see :func:`~graphattn.knn` for the rules.

    The graph is generally not symmetric. It is causal where `within` is. It is held as a table
    (:attr:`TokenGraph.neighbors`), so that a model on a GPU may build it anew from features in
    every forward pass without waiting for the device. No gradient flows through the choice.

    Args:
        x: tokens that look, [N, C]: coordinates or features.
        k: sources per token.
        source: tokens that are looked at, [M, C]; `x` itself if None.
        within: only edges of this graph are candidates.
        self_loops: whether a token counts as its own first neighbour (``source=None`` only).
        backend: "auto", "reference" or "triton", as in :func:`~graphattn.knn`.

    Raises:
        ValueError: as :func:`~graphattn.knn`.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.knn_graph(torch.tensor([[0.0], [1.0], [3.0]]), k=1)
        >>> graph.edge_index
        tensor([[1, 0, 1],
                [0, 1, 2]])
        >>> graph.neighbors
        tensor([[1],
                [0],
                [1]])
    """
    index = nearest_index(
        x, k, source=source, within=within, self_loops=self_loops, backend=backend
    )
    base = within if isinstance(within, TokenGraph) else None
    return TokenGraph(
        neighbors=index.sort(dim=1).values,
        num_targets=len(x),
        num_sources=len(x if source is None else source),
        sizes=None if base is None else base.sizes,
        starts=None if base is None else base.starts,
        is_causal=base is not None and base.is_causal,
        has_causal_part=base is not None and base.has_causal_part,
    )


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
    reach = float(points.new_tensor(radius))  # 0.1 means the 0.1 of the coordinates' own dtype
    N = len(points)
    pieces = [torch.empty((2, 0), dtype=torch.int64, device=points.device)]
    rows = max(1, TILE // max(N, 1))
    for start in range(0, N, rows):
        tile = points[start : start + rows]
        near = rounded_distances(tile, points) <= with_rounding(reach, points)
        row, source = near.nonzero().T
        squared = exact_squared_distances(tile, points, row, source)
        squared.masked_fill_(squared > reach**2, torch.inf)
        place_self(squared, row + start == source, bool(self_loops))
        if max_neighbors is None:
            inside = squared < torch.inf
            pieces.append(torch.stack([source[inside], row[inside] + start]))
        else:
            index = nearest_pairs(row, source, squared, len(tile), min(max_neighbors, N))
            pieces.append(edges_of_rows(index, start))
    return TokenGraph(edge_index=torch.cat(pieces, dim=1), num_targets=N, num_sources=N)
