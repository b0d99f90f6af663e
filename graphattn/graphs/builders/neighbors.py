"""Graphs of nearest neighbours, and of neighbours within a radius, in coordinates or features."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int, as_points, as_sources
from graphattn.graphs.batches.batch_vectors import BatchVector, Sizes, pair_sizes, part_sizes
from graphattn.graphs.edges.lists import edges_of_rows
from graphattn.graphs.search.distances import (
    TILE,
    exact_squared_distances,
    nearest_pairs,
    place_self,
    rounded_distances,
    squared_reach,
    with_rounding,
)
from graphattn.graphs.search.kd_tree import is_for_trees, nearest_by_tree, pairs_by_tree
from graphattn.graphs.search.nearest_neighbors import nearest_in_items, nearest_index
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu.neighbors import edges_within, has_nearest, nearest
from graphattn.kernels.shared.launch import is_transformed, untraced
from graphattn.kernels.shared.stored import makes_fakes


def knn_graph(
    x: Tensor,
    k: int,
    *,
    source: Tensor | None = None,
    within: TokenGraph | Tensor | None = None,
    self_loops: bool = False,
    backend: str = "auto",
    batch: BatchVector | None = None,
    shard: Any = None,
) -> TokenGraph:
    """Every token sees its `k` nearest sources.

    :func:`~graphattn.knn` describes the search. The graph is generally not symmetric. It is causal
    if `within` is. It is stored as a table (:attr:`TokenGraph.neighbors`), so a model on a GPU can
    build it from features in every forward pass without waiting for the device. The choice of
    neighbours has no gradient.

    In a batch, every item is searched separately, and the result is one packed graph, as from
    :func:`~graphattn.batch`. If an item has fewer than `k` other tokens, each of its tokens sees
    all of them, as in PyG. (A batch vector is read on the host. To avoid waiting for a GPU, make a
    :func:`~graphattn.batch` of complete graphs once, and give it as `within`.)

    Args:
        x: coordinates or features of the targets, [N, C]; [B, N, C] for B items of one length.
        k: sources per token.
        source: coordinates or features of the sources, [M, C] (or [B, M, C]); `x` if None.
        within: a graph; only its edges are candidates.
        self_loops: whether a token counts as its own first neighbour (only with ``source=None``).
        backend: "auto", "reference" or "triton", as in :func:`~graphattn.knn`.
        batch: the item to which every token belongs, [N] in ascending order, as in PyG; with
            `source`, a pair for the targets [N] and the sources [M].
        shard: a graph that is divided among ranks (:func:`graphattn.distributed.shard`), if `x` are
            the tokens of this rank. The result is then divided in the same way, see
            :meth:`graphattn.distributed.ShardedGraph.knn_graph`.

    Raises:
        ValueError: in the same cases as :func:`~graphattn.knn`; if `batch` is not in ascending
            order; if `within` is given although x holds several items; if `within` or `batch` is
            given together with `shard`.

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
        >>> points = torch.tensor([[0.0], [1.0], [1.1], [5.0]])  # of two clouds
        >>> ga.knn_graph(points, k=1, batch=torch.tensor([0, 0, 1, 1])).edge_index
        tensor([[1, 0, 3, 2],
                [0, 1, 2, 3]])
    """
    if shard is not None:
        over_ranks = _of_shard(shard, "knn_graph", within=within, batch=batch)
        return over_ranks(x, k, source=source, self_loops=self_loops, backend=backend)
    if batch is not None or (isinstance(x, Tensor) and x.dim() == 3):
        if within is not None:
            raise ValueError(
                "within must be None if x holds several items (with batch=, or with shape "
                f"[B, N, C]), got a {type(within).__name__}: give x as [N_total, C] without "
                "batch=, and as within a graphattn.batch of one graph per item"
            )
        x, source, sizes = _items(x, source, batch)
        index = nearest_in_items(x, k, source, sizes, self_loops, backend)
        return TokenGraph(
            neighbors=_ascending(index),
            num_targets=len(x),
            num_sources=len(x if source is None else source),
            sizes=sizes,
        )
    index = nearest_index(
        x, k, source=source, within=within, self_loops=self_loops, backend=backend
    )
    base = within if isinstance(within, TokenGraph) else None
    return TokenGraph(
        neighbors=_ascending(index),
        num_targets=len(x),
        num_sources=len(x if source is None else source),
        sizes=None if base is None else base.sizes,
        starts=None if base is None else base.starts,
        positions=None if base is None else base.own_positions,
        is_causal=base is not None and base.is_causal,
        has_causal_part=base is not None and base.has_causal_part,
    )


def _of_shard(shard: Any, name: str, **others: Any) -> Any:
    """Return the method of a ShardedGraph that searches over all ranks."""
    if not hasattr(shard, name):
        raise ValueError(
            f"shard must be a ShardedGraph, got {type(shard).__name__}: "
            "graphattn.distributed.shard makes one"
        )
    for argument, given in others.items():
        if given is not None:
            raise ValueError(
                f"{argument} must be None with shard, whose sequences are searched separately, got "
                f"{type(given).__name__}"
            )
    return getattr(shard, name)


def _ascending(index: Tensor) -> Tensor:
    """Sort every row of a table. On a CPU, numpy sorts such short rows five times faster."""
    traced = torch.compiler.is_compiling() or is_transformed() or makes_fakes()
    if index.device.type != "cpu" or traced:
        return index.sort(dim=1).values
    return torch.from_numpy(np.sort(index.numpy(), axis=1))


def radius_graph(
    positions: Tensor,
    radius: float,
    *,
    source: Tensor | None = None,
    max_neighbors: int | None = None,
    self_loops: bool = False,
    batch: BatchVector | None = None,
    shard: Any = None,
) -> TokenGraph:
    """Every token sees the sources at Euclidean distance <= `radius`.

    The distance is computed in float64. It and the radius are then rounded to the dtype of
    `positions` (float32 for half precision) and compared. So a lattice finds its neighbours: the
    tokens at distance sqrt(2) are within the radius ``2**0.5`` in every dtype.

    With `max_neighbors`, a token sees only the nearest of them; of equally near tokens it sees
    those with the smaller index. Then the graph may be asymmetric. Tokens whose coordinates contain
    NaN or infinity have no edges. Tokens of different items in a batch do not see each other, and
    the result is one packed graph, as from :func:`~graphattn.batch`.

    Args:
        positions: coordinates of the targets, [N, C]; [B, N, C] for B items of one length.
        radius: the largest distance, in the unit of `positions`, >= 0.
        source: coordinates of the sources, [M, C] (or [B, M, C]); `positions` if None.
        max_neighbors: the largest number of sources per token, >= 1; None for no limit.
        self_loops: whether a token sees itself (it then counts as its first neighbour); only with
            ``source=None``.
        batch: the item to which every token belongs, [N] in ascending order, as in PyG; with
            `source`, a pair for the targets [N] and the sources [M].
        shard: a graph that is divided among ranks, as in :func:`~graphattn.knn_graph`.

    Raises:
        ValueError: if an argument is outside its range, `source` does not fit `positions`,
            `batch` is not in ascending order, or is given together with `shard`.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.radius_graph(torch.tensor([[0.0], [1.0], [3.0]]), radius=1.0).edge_index
        tensor([[1, 0],
                [0, 1]])
        >>> square = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> ga.radius_graph(square, radius=2**0.5).in_degree()  # the diagonal, too
        tensor([3, 3, 3, 3])
        >>> centre = torch.tensor([[0.5, 0.5]])
        >>> ga.radius_graph(centre, radius=0.8, source=square).edge_index
        tensor([[0, 1, 2, 3],
                [0, 0, 0, 0]])
    """
    if shard is not None:
        over_ranks = _of_shard(shard, "radius_graph", batch=batch)
        return over_ranks(
            positions, radius, source=source, max_neighbors=max_neighbors, self_loops=self_loops
        )
    sizes: Sizes | None = None
    if batch is not None or (isinstance(positions, Tensor) and positions.dim() == 3):
        positions, source, sizes = _items(positions, source, batch, name="positions")
    positions = as_points("positions", positions).detach()
    to_self = source is None
    source = as_sources(source, positions, bool(self_loops), name="positions").detach()
    radius = as_float("radius", radius, positive=False)
    if max_neighbors is not None:
        max_neighbors = as_int("max_neighbors", max_neighbors, 1)
    wide = torch.promote_types(positions.dtype, torch.float32)
    points = positions.to(wide)
    candidates = points if to_self else source.to(wide)
    N, M, t, s = len(points), len(candidates), 0, 0
    pieces = [torch.empty((2, 0), dtype=torch.int64, device=points.device)]
    for num_targets, num_sources in ((N, M),) if sizes is None else sizes:
        search = _Ball(
            points[t : t + num_targets],
            candidates[s : s + num_sources],
            squared_reach(radius, wide),
            max_neighbors,
            to_self,
            bool(self_loops),
        )
        first = torch.tensor([[s], [t]], device=points.device)
        pieces += [piece + first for piece in search.edges()]
        t, s = t + num_targets, s + num_sources
    return TokenGraph(
        edge_index=torch.cat(pieces, dim=1), num_targets=N, num_sources=M, sizes=sizes
    )


class _Ball(NamedTuple):
    """A search for the sources of one item within a radius."""

    points: Tensor  # [N, C], float32 or float64
    candidates: Tensor  # [M, C]; the points themselves if `to_self`
    reach: float  # the largest squared distance
    max_neighbors: int | None
    to_self: bool
    self_loops: bool

    def edges(self) -> list[Tensor]:
        """List the sorted edges, in pieces [2, n]."""
        points, candidates, reach, max_neighbors, *_ = self
        selves = self.to_self, self.self_loops
        k = len(candidates) - (self.to_self and not self.self_loops)
        if len(points) == 0 or k <= 0:
            return []
        if has_nearest(points, candidates):
            if max_neighbors is None:
                return [untraced(edges_within)(points, candidates, reach, *selves)]
            index = untraced(nearest)(points, candidates, min(max_neighbors, k), *selves, reach)
            return [edges_of_rows(index)]
        if max_neighbors is not None:
            k = min(max_neighbors, k)
            if is_for_trees(points, candidates, k):
                by_tree = untraced(nearest_by_tree)(points, candidates, k, *selves, reach)
                if by_tree is not None and not len(by_tree[1]):
                    return [edges_of_rows(by_tree[0])]
        elif self.to_self and is_for_trees(points, points):
            pairs = untraced(pairs_by_tree)(points, reach)
            if pairs is not None:
                squared = exact_squared_distances(points, points, *pairs)
                return [_sorted_both_ways(pairs[:, squared <= reach], points, self.self_loops)]
        return self._edges_by_differences()

    def _edges_by_differences(self) -> list[Tensor]:
        """List the edges from the distances of all pairs, a tile of rows at a time."""
        points, candidates, pieces = self.points, self.candidates, []
        largest = max(
            x.nan_to_num(nan=0, posinf=0, neginf=0).abs().sum(dim=1).max()
            for x in (points, candidates)
        )
        if largest > torch.finfo(points.dtype).max ** 0.5 / 2:  # rounded distances would overflow
            points, candidates = points.double(), candidates.double()
        limit = with_rounding(self.reach**0.5, points)
        M = len(candidates)
        rows = max(1, TILE // M)
        for start in range(0, len(points), rows):
            tile = points[start : start + rows]
            row, source = (rounded_distances(tile, candidates) <= limit).nonzero().T
            squared = exact_squared_distances(tile, candidates, row, source)
            squared.masked_fill_(squared > self.reach, torch.inf)
            if self.to_self:
                place_self(squared, row + start == source, self.self_loops)
            if self.max_neighbors is None:
                inside = squared < torch.inf
                pieces.append(torch.stack([source[inside], row[inside] + start]))
            else:
                k = min(self.max_neighbors, M)
                index = nearest_pairs(row, source, squared, len(tile), k)
                pieces.append(edges_of_rows(index, start))
        return pieces


def _sorted_both_ways(pairs: Tensor, points: Tensor, self_loops: bool) -> Tensor:
    """Return both directions of pairs [2, P] as edges [2, E], sorted by target, then source."""
    N = len(points)
    keys = [pairs[0] * N + pairs[1], pairs[1] * N + pairs[0]]
    if self_loops:
        keys.append(points.isfinite().all(dim=1).nonzero()[:, 0] * (N + 1))
    key = torch.cat(keys)
    if torch.iinfo(torch.int32).max >= N * N:  # int32 is sorted in half the time
        key = key.int()
    key = key.sort().values.long()
    target = key.div(N, rounding_mode="floor")
    return torch.stack([key - target * N, target])


def _items(
    x: Tensor, source: Tensor | None, batch: BatchVector | None, *, name: str = "x"
) -> tuple[Tensor, Tensor | None, Sizes]:
    """Return targets [N, C] and sources [M, C] of all items, and their numbers in every item."""
    if isinstance(x, Tensor) and x.dim() == 3:
        if batch is not None:
            raise ValueError(
                f"batch must be None if {name} has shape [B, N, C], because the first dimension "
                f"separates the items already, got both ({name} of shape {list(x.shape)})"
            )
        sources = x if source is None else source
        if not isinstance(sources, Tensor) or sources.dim() != 3 or len(sources) != len(x):
            got = list(sources.shape) if isinstance(sources, Tensor) else type(sources).__name__
            raise ValueError(
                f"source must have shape [{len(x)}, M, C] if {name} has shape {list(x.shape)}, "
                f"got {got}"
            )
        sizes = ((x.shape[1], sources.shape[1]),) * len(x)
        x = as_points(name, x.flatten(0, 1))
        return x, None if source is None else as_points("source", source.flatten(0, 1)), sizes
    x = as_points(name, x)
    if source is None:
        return x, None, tuple((size, size) for size in part_sizes("batch", batch, len(x)))
    source = as_points("source", source)
    if not isinstance(batch, tuple | list):
        raise ValueError(
            f"batch must be a pair (targets [{len(x)}], sources [{len(source)}]) if source is "
            f"given, got {type(batch).__name__}"
        )
    return x, source, pair_sizes(batch, len(x), len(source))
