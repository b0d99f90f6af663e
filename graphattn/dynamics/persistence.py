"""Groups of tokens that stay apart for ever under top-k attention by distance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from graphattn.dynamics.arguments import as_tokens
from graphattn.dynamics.clusters import largest_first
from graphattn.graphs.arguments import as_int
from graphattn.graphs.token_graph import TokenGraph, as_token_graph

Array = NDArray[np.float64]
SLACK = 1e-9  # of the largest distance; a smaller gap is not trusted, because steps round


def persistent_groups(
    points: Tensor, top_k: int, graph: TokenGraph | Tensor | None = None
) -> Tensor:
    r"""Find the groups of tokens that stay apart for ever under top-k attention by distance.

    It is a certificate before anything is simulated. Let every token move to a convex combination
    of itself and the k sources in `graph` that are nearest to it now (all, if it has fewer), with
    any weights, as in every step of ``krause_flow(points, graph, top_k=k, sigma=...)``.

    **Theorem.** Divide the tokens into groups such that

    1. every token has k sources in its own group, or none outside of it. (On the complete graph:
       every group has at least k tokens, where each is a source of itself);
    2. the convex hulls of any two groups are farther apart than the diameter of either (its
       largest distance of two tokens).

    Then no token ever attends to another group, and hulls of different groups never come nearer.

    *Proof.* A source in the own group is at most one diameter away; by 2, one in another group is
    farther. By 1, the k nearest sources are thus in the own group, however ties among them are
    broken. So after the step, every token is in the old hull of its group. Then diameters are not
    larger (that of a hull is that of its points), and hulls are not nearer to each other, so 2
    holds again. 1 does not depend on the positions. By induction, this holds for ever.

    Of all divisions that satisfy 1 and 2, one is the finest, and this is the result. (By 2, the
    tokens of a group are nearer to each other than to any other token. So two groups of any two
    divisions are disjoint or one contains the other, and the groups that contain no other form a
    division, which satisfies 1 and 2.) Groups are components of single linkage; those that break 2
    are merged until none does. The division into a single group always satisfies the conditions,
    and says nothing.

    The conditions are sufficient, not necessary: other tokens may form separate clusters, too. They
    are about queries, keys and values that are equal, as in :func:`krause_flow`. Learned
    projections of a trained layer are not of this kind.

    Source: Krause Synchronization Transformers, Multi-Cluster Synchronization, which assumes groups
    outside each other's reach (the paper lists their origin as open). The conditions, the proof
    and the search are ours.

    Args:
        points: tokens, [N, C]; distances and hulls are computed in float64.
        top_k: k >= 1.
        graph: the graph of N tokens whose edges are the possible sources; if None, every token sees
            all tokens, including itself.

    Returns:
        Labels [N] (int64, on the CPU), numbered as by :func:`cluster`. All groups are certified. So
        the tokens end in at least as many clusters, however near these are. Memory grows as N^2.

    Raises:
        ValueError: if `points` is no finite tensor [N, C] (call it once for every text of a batch),
            `top_k` is not >= 1, or `graph` has another number of tokens.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [9.0], [9.2]])
        >>> ga.dynamics.persistent_groups(x, top_k=2)
        tensor([0, 0, 0, 1, 1, 2, 2])
        >>> ga.dynamics.persistent_groups(x, top_k=3)  # pairs look elsewhere for a third source
        tensor([1, 1, 1, 0, 0, 0, 0])
    """
    points = as_tokens("points", points).cpu().double()
    k = as_int("top_k", top_k, 1)
    N = len(points)
    sources = _Sources(None if graph is None else as_token_graph(graph, N, N), N, k)
    x = (points - points.mean(dim=0)).numpy()
    nodes = [node for node in _compact_nodes(x) if sources.are_inside(node)]
    group = _smallest(nodes, N)
    while (pair := _too_near(x, group)) is not None:
        joined = next(node for node in nodes if pair[0] in node and pair[1] in node)
        group[joined] = group.max() + 1
    return largest_first(group)


class _Sources:
    """Condition 1: every token has k sources in its own group, or none outside of it."""

    def __init__(self, graph: TokenGraph | None, num_tokens: int, k: int) -> None:
        self.num_tokens = num_tokens
        self.edges = None if graph is None else graph.edge_index.cpu().numpy()
        if graph is None:
            self.needed = np.full(num_tokens, min(k, num_tokens))
        else:
            self.needed = graph.in_degree().cpu().numpy().clip(max=k)

    def are_inside(self, group: NDArray[np.int64]) -> bool:
        if self.edges is None:
            return len(group) >= self.needed[0]
        inside = np.zeros(self.num_tokens, dtype=bool)
        inside[group] = True
        source, target = self.edges
        own = np.bincount(target[inside[source]], minlength=self.num_tokens)
        return bool((own[group] >= self.needed[group]).all())


def _compact_nodes(x: Array) -> list[NDArray[np.int64]]:
    """List all groups that are nearer to each other than to any other token, small ones first.

    Each is a node of the tree of single linkage, and the height at which it is joined to others is
    its distance from them.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import pdist, squareform

    N = len(x)
    if N == 1:
        return [np.zeros(1, dtype=np.int64)]
    near = pdist(x)
    slack = SLACK * near.max()
    members = [np.array([i]) for i in range(N)]
    diameter = [0.0] * N
    found = []
    distance = squareform(near)
    for a, b, height, _ in linkage(near, "single"):
        left, right = members[int(a)], members[int(b)]
        for node, width in ((left, diameter[int(a)]), (right, diameter[int(b)])):
            if width + slack < height:
                found.append(node)
        between = float(distance[np.ix_(left, right)].max())
        diameter.append(max(diameter[int(a)], diameter[int(b)], between))
        members.append(np.concatenate([left, right]))
    return [*sorted(found, key=len), members[-1]]


def _smallest(nodes: list[NDArray[np.int64]], num_tokens: int) -> NDArray[np.int64]:
    """Number the tokens such that every token is with the smallest of the groups it is in."""
    group = np.full(num_tokens, -1)
    for number, node in enumerate(nodes):
        if (group[node] < 0).any():
            group[node] = number
    return group


def _too_near(x: Array, group: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return a token of each of two groups that break condition 2; None if there are none."""
    from scipy.spatial.distance import pdist

    members = [np.flatnonzero(group == name) for name in np.unique(group)]
    width = [float(pdist(x[own]).max()) if len(own) > 1 else 0.0 for own in members]
    slack = SLACK * float(np.linalg.norm(x.max(axis=0) - x.min(axis=0)))
    for b in range(len(members)):
        for a in range(b):
            if not _farther(x[members[a]], x[members[b]], max(width[a], width[b]) + slack):
                return int(members[a][0]), int(members[b][0])
    return None


def _farther(a: Array, b: Array, distance: float) -> bool:
    """Return whether two convex hulls are farther apart than `distance`.

    The point of least norm among all differences is found by Wolfe's method (Mathematical
    Programming 11, 1976). Along any direction w, the hulls are at least min a.w - max b.w apart,
    so the answer True is proven by a direction, and rounding of the search cannot make it wrong.
    """
    corners = (a[0] - b[0])[None]
    weight = np.ones(1)
    for _ in range(100 + 10 * (len(a) + len(b))):
        nearest = weight @ corners
        norm = float(np.linalg.norm(nearest))
        if norm <= distance:
            return False
        corner = a[(a @ nearest).argmin()] - b[(b @ nearest).argmax()]
        if corner @ nearest > distance * norm:
            return True
        if norm**2 - corner @ nearest <= 1e-12 * norm**2:
            return False  # nothing is nearer: the distance is `norm`, equal up to rounding
        corners, weight = np.vstack([corners, corner]), np.append(weight, 0.0)
        while True:  # towards the affine minimum, as far as all weights stay positive
            n = len(corners)
            system = np.ones((n + 1, n + 1))
            system[0, 0] = 0.0
            system[1:, 1:] = corners @ corners.T
            target = np.linalg.lstsq(system, np.eye(n + 1)[0], rcond=None)[0][1:]
            if (target > 1e-12).all():
                weight = target
                break
            falls = target <= 1e-12
            share = (weight[falls] / (weight[falls] - target[falls]).clip(min=1e-300)).min()
            weight = weight + min(share, 1.0) * (target - weight)
            kept = weight > 1e-12
            corners, weight = corners[kept], weight[kept] / weight[kept].sum()
    return False
