"""Graphs of tokens in the same cluster of their features: routing attention."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int, as_points
from graphattn.graphs.search.nearest_neighbors import nearest_index
from graphattn.graphs.token_graph import TokenGraph

ITERATIONS = 10  # of Lloyd's algorithm, as the docstring of routing_graph says
LARGEST = 1e150  # squares of larger coordinates overflow


def routing_graph(x: Tensor, clusters: int | Tensor, *, causal: bool = False) -> TokenGraph:
    """Every token sees the tokens that are in its cluster by k-means, including itself.

    This is the pattern of the Routing Transformer (Roy et al., 2021). A token is in the
    cluster of the centroid nearest to it, by Euclidean distance; of equally near centroids it
    is that with the smaller index. (The paper compares unit vectors: give
    ``torch.nn.functional.normalize(x, dim=-1)``. There, clusters are also cut to equal sizes, which
    they are not here.)

    If `clusters` is a number k, the centroids are found by 10 iterations of Lloyd's algorithm in
    float64. It begins at token 0 and adds, k - 1 times, the token farthest from all centroids so
    far. A cluster without tokens keeps its centroid. Nothing is random: the same `x` always gives
    the same graph. The choice of clusters has no gradient. The graph is a list of edges, made in
    time proportional to its edges, beside N k distances. For several sequences, use
    :func:`~graphattn.batch`.

    Args:
        x: features of the tokens, [N, C].
        clusters: the number of clusters k, >= 1 (more than N are N); or their centroids, [k, C].
        causal: whether a token sees only itself and earlier tokens of its cluster. (If `x` or the
            centroids depend on later tokens, so does the choice of the cluster.)

    Returns:
        A graph over N tokens; with `causal`, its :attr:`TokenGraph.is_causal` is True.

    Raises:
        ValueError: if `x` or `clusters` does not have such a shape, their dtypes or devices differ,
            k < 1, or a number is not finite or is beyond 1e150.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[0.0], [5.0], [0.2], [5.1]])
        >>> ga.routing_graph(x, clusters=2).to_mask().int()
        tensor([[1, 0, 1, 0],
                [0, 1, 0, 1],
                [1, 0, 1, 0],
                [0, 1, 0, 1]], dtype=torch.int32)
        >>> ga.routing_graph(x, torch.tensor([[0.0], [4.0]]), causal=True).edge_index
        tensor([[0, 1, 0, 2, 1, 3],
                [0, 1, 2, 2, 3, 3]])
    """
    tokens = _as_finite("x", as_points("x", x))
    if isinstance(clusters, Tensor) and clusters.dim():
        centroids = _as_centroids(clusters, x)
    else:
        centroids = _k_means(tokens, as_int("clusters", clusters, 1))
    edges = _edges_within(_nearest(tokens, centroids), bool(causal))
    N = len(x)
    return TokenGraph(
        edge_index=edges,
        num_targets=N,
        num_sources=N,
        is_causal=bool(causal),
        has_causal_part=bool(causal) and N > 1,
    )


def _as_finite(name: str, x: Tensor) -> Tensor:
    """Check numbers [n, C], and return them in float64."""
    x = x.detach().double()
    bad = ~(x.abs() <= LARGEST).all(dim=1)  # also NaN
    if bad.any():
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} must be finite and within -1e150 .. 1e150, got {name}[{i}] = {x[i].tolist()}"
        )
    return x


def _as_centroids(clusters: Tensor, x: Tensor) -> Tensor:
    """Check centroids [k, C] for the tokens `x` [N, C]."""
    if clusters.dim() != 2 or len(clusters) == 0 or clusters.shape[1] != x.shape[1]:
        raise ValueError(
            f"clusters must be a number or centroids [k, {x.shape[1]}] with k >= 1, "
            f"got a tensor of shape {list(clusters.shape)}"
        )
    if clusters.dtype != x.dtype or clusters.device != x.device:
        raise ValueError(
            f"clusters must have the dtype and device of x ({x.dtype}, {x.device}), "
            f"got {clusters.dtype}, {clusters.device}"
        )
    return _as_finite("clusters", clusters)


def _nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """Return the cluster of every token, [N]."""
    return nearest_index(x, 1, source=centroids)[:, 0]


def _k_means(x: Tensor, k: int) -> Tensor:
    """Find at most `k` centroids of the tokens [N, C]; one that no token uses if there are none."""
    if len(x) == 0:
        return x.new_zeros(1, x.shape[1])
    chosen = [torch.zeros((), dtype=torch.int64, device=x.device)]
    distance = (x - x[0]).square().sum(dim=1)
    for _ in range(min(k, len(x)) - 1):
        chosen.append(distance.argmax())
        distance = torch.minimum(distance, (x - x[chosen[-1]]).square().sum(dim=1))
    centroids, before = x[torch.stack(chosen)], None
    for _ in range(ITERATIONS):
        cluster = _nearest(x, centroids)
        if before is not None and torch.equal(cluster, before):
            break  # The remaining iterations would change nothing.
        before, order = cluster, cluster.argsort(stable=True)
        count = cluster.bincount(minlength=len(centroids))
        # Not index_add_, whose order of addition, and so its rounding, varies on a GPU.
        total = torch.segment_reduce(x[order], "sum", lengths=count, axis=0)
        mean = total / count.clamp(min=1)[:, None]
        centroids = torch.where(count[:, None] > 0, mean, centroids)
    return centroids


def _edges_within(cluster: Tensor, causal: bool) -> Tensor:
    """List the edges within clusters, sorted by target, then source, [2, E]."""
    order = cluster.argsort(stable=True)  # members of a cluster side by side, in ascending order
    count = cluster.bincount()
    first = (count.cumsum(0) - count)[cluster]  # where the cluster of every token begins
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    degree = place - first + 1 if causal else count[cluster]
    target = torch.arange(len(order), device=order.device).repeat_interleave(degree)
    begin = degree.cumsum(0) - degree  # the first edge of every target
    source = order[torch.arange(len(target), device=order.device) + (first - begin)[target]]
    return torch.stack([source, target])
