"""Leaders of clusters, which are the tokens that receive most attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.dynamics.arguments import as_labels
from graphattn.dynamics.clusters import cluster
from graphattn.dynamics.simulate import Trajectory
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.ops import (
    attention_weights,
    dot_product_attention,
    linear_attention_weights,
    rbf_attention,
)

Received = Callable[[Tensor], Tensor]


class Leaders(NamedTuple):
    """The leader of every cluster, in the order of labels, from :func:`leader_tokens`.

    Attributes:
        tokens: the token to which the cluster's tokens attend most, int64 [K].
        share: the mean weight that they give it, [K]; 1 if they attend to no other token.
    """

    tokens: Tensor
    share: Tensor


def leader_tokens(
    source: Trajectory | Tensor,
    labels: Tensor | None = None,
    *,
    graph: TokenGraph | Tensor | None = None,
    step: int = -1,
) -> Leaders:
    r"""Find the leader of every cluster: the token that receives most attention of its members.

    For cluster c, it is the token j with the largest

    .. math:: \frac{1}{|c|} \sum_{i \in c} a_{ij},

    and the one with the smaller index if two are equal. It need not be a member of the cluster.
    For a trajectory without top-k, the sums are computed by attention over the transposed graph,
    and no weights are stored. With top-k, or for given weights, they are computed edge by edge.

    Source: Attention Clusters, Section 3.1 and Figure 4: "the strongest connections are
    consistently between leader tokens and their cluster members". The paper gives no formula. It
    cites Geshkovski et al. (2023), where leaders are the columns that are left when the attention
    matrix converges to a Boolean one.

    Args:
        source: a trajectory; or weights in the order of ``graph.edge_index``, [E].
        labels: the cluster of every token, integers [N]. With None, it is
            ``cluster(trajectory.updates[step])``; for weights it must be given.
        graph: the graph of the weights; for a trajectory it must be None.
        step: the number of an update of the trajectory, 0 .. T - 1, or negative from the end.

    Raises:
        ValueError: if an argument is missing, shapes do not fit, or there is no such step.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.2], [-1.0], [-0.8], [0.9], [1.0], [1.1]], dtype=torch.float64)
        >>> trajectory = ga.dynamics.simulate(x, ga.complete_graph(6), steps=8)
        >>> ga.dynamics.leader_tokens(trajectory).tokens  # the outermost ones
        tensor([0, 5])
    """
    if isinstance(source, Trajectory):
        if graph is not None:
            raise ValueError(
                "graph must be None if source is a trajectory, which has a graph, got "
                f"{type(graph).__name__}"
            )
        step = _checked_step(step, source.num_steps)
        if labels is None:
            labels = cluster(source.updates[step])
        labels = as_labels("labels", labels, len(source.states[step]))
        received = _by_attention(source, step)
    else:
        if graph is None or labels is None:
            missing = "graph" if graph is None else "labels"
            raise ValueError(f"{missing} must be given if source is weights, got None")
        labels = as_labels("labels", labels)
        received = _by_edge(source, as_token_graph(graph, len(labels), len(labels)))
    best = [
        received(members).max(dim=0)  # the first of equal ones
        for members in _members(labels)
    ]
    share = torch.cat([top.values for top in best])
    return Leaders(torch.cat([top.indices for top in best]).cpu(), share.cpu())


def _checked_step(step: int, num_steps: int) -> int:
    if isinstance(step, int) and not isinstance(step, bool) and -num_steps <= step < num_steps:
        return step % num_steps
    if num_steps == 0:
        raise ValueError("source must be a trajectory with at least one step, got one with 0 steps")
    raise ValueError(f"step must be an integer in {-num_steps} .. {num_steps - 1}, got {step!r}")


def _members(labels: Tensor) -> Iterator[Tensor]:
    """Yield columns with 1 / |c| for the members of clusters, [N, n] for n <= 64 clusters.

    All K columns together would need too much memory.
    """
    size = torch.bincount(labels).double()
    for clusters in torch.arange(len(size)).split(64):
        yield (labels[:, None] == clusters) / size[clusters]


def _by_attention(trajectory: Trajectory, step: int) -> Received:
    """Return a function from `members` [N, n] to sum_i a_ij members_ic of one step, [N, n]."""
    x, graph, rule = trajectory.states[step], trajectory.graph, trajectory.rule
    if rule.score == "linear":
        return _by_edge(linear_attention_weights(*rule.features(x), graph)[:, 0], graph)
    if rule.score == "rbf":
        x = x - x.mean(dim=0)  # Distances do not change, and the products below are more exact.
    query, key, scale = rule.operands(x, graph)
    q, k = query[:, None], key[:, None]
    if rule.top_k is not None:
        sigma = rule.sigma if rule.score == "rbf" else None
        weights = attention_weights(
            q, k, graph, sigma=sigma, scale=scale if sigma is None else None, top_k=rule.top_k
        )
        return _by_edge(weights[:, 0], graph)
    # a_ij = exp(scale q_i . k_j - b_i), where b_i is the log-sum of row i. (For "rbf", half of the
    # squares of i and j are subtracted, too.) Over the transposed graph, this is attention of j to
    # all i, with one more feature for b_i. Its log-sum is the logarithm of all that j receives.
    if rule.score == "rbf":
        assert rule.sigma is not None
        _, lse = rbf_attention(q, k, k, graph, rule.sigma, return_lse=True)
        half = x.square().sum(dim=1, keepdim=True) * scale / 2
        row, column = lse + half, half
    else:
        _, row = dot_product_attention(q, k, k, graph, scale=scale, return_lse=True)
        column = torch.zeros_like(row)
    row = torch.where(row.isneginf(), 0.0, row)  # a row without edges, which is never read
    # Keys and queries exchange their roles over the transposed graph.
    new_query = torch.cat([key, torch.ones_like(row)], dim=1)[:, None]
    new_key = torch.cat([query, -row / scale], dim=1)[:, None]
    flipped = graph.transpose()

    def received(members: Tensor) -> Tensor:
        mean, lse = dot_product_attention(
            new_query, new_key, members.to(x)[:, None], flipped, scale=scale, return_lse=True
        )
        return mean[:, 0] * (lse - column).exp()

    return received


def _by_edge(weights: Any, graph: TokenGraph) -> Received:
    """Return a function that sums the weights tokens receive, from one weight per edge."""
    if not isinstance(weights, Tensor) or weights.shape != (graph.num_edges,):
        got = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"source must be a Trajectory or weights [{graph.num_edges}], one per edge, got {got}"
        )
    weights = weights.detach()
    source, target = graph.edge_index

    def received(members: Tensor) -> Tensor:
        members = members.to(weights)
        total = torch.zeros_like(members)
        for c in range(members.shape[1]):  # one at a time, because [E, n] may be large
            total[:, c].index_add_(0, source, weights * members[target, c])
        return total

    return received
