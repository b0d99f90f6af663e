"""The tokens that clusters look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.dynamics.arguments import as_labels
from graphattn.dynamics.clusters import cluster
from graphattn.dynamics.simulate import Trajectory
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.ops import attention_weights, dot_product_attention, rbf_attention

Received = Callable[[Tensor], Tensor]


class Leaders(NamedTuple):
    """One leader per cluster, in order of the labels."""

    tokens: Tensor  # the token that the cluster's tokens attend to most, int64 [K]
    share: Tensor  # mean weight that they give it, [K]; 1 if they see nothing else


def leader_tokens(
    source: Trajectory | Tensor,
    labels: Tensor | None = None,
    *,
    graph: TokenGraph | Tensor | None = None,
    step: int = -1,
) -> Leaders:
    r"""The leader of every cluster: the token that receives most of its members' attention.

    Source: Attention Clusters, Section 3.1 and Figure 4: "the strongest connections are
    consistently between leader tokens and their cluster members". The paper defines no more; it
    cites Geshkovski et al. (2023), where leaders are the columns that remain when the attention
    matrix tends to a Boolean one. So, for cluster c, the token j of the largest

    .. math:: \frac{1}{|c|} \sum_{i \in c} a_{ij},

    the smaller index where equal; it need not be a member. From a trajectory with all sources kept
    the sums come from attention over the transposed graph, and no weight is stored; with top-k, or
    from weights, edge by edge.

    Args:
        source: a trajectory; or weights, one per edge in the order of ``graph.edge_index``, [E].
        labels: cluster of every token, integers [N]; ``cluster(trajectory.updates[step])`` if None
            (required for weights).
        graph: where the weights belong; for weights only.
        step: which update of the trajectory, 0 .. T - 1, or from the end if negative.

    Raises:
        ValueError: if an argument is missing or sizes disagree, or there is no such step.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.2], [-1.0], [-0.8], [0.9], [1.0], [1.1]], dtype=torch.float64)
        >>> trajectory = ga.dynamics.simulate(x, ga.complete_graph(6), steps=8)
        >>> ga.dynamics.leader_tokens(trajectory).tokens  # the outermost ones
        tensor([0, 5])
    """
    if isinstance(source, Trajectory):
        if graph is not None:
            raise ValueError("graph goes with weights; a trajectory has its own")
        step = _checked_step(step, source.num_steps)
        if labels is None:
            labels = cluster(source.updates[step])
        labels = as_labels("labels", labels, len(source.states[step]))
        received = _by_attention(source, step)
    else:
        if graph is None or labels is None:
            missing = "graph" if graph is None else "labels"
            raise ValueError(f"{missing} must be given together with weights")
        labels = as_labels("labels", labels)
        received = _by_edge(source, as_token_graph(graph, len(labels), len(labels)))
    best = [
        received(members).max(dim=0)  # of equal ones the first
        for members in _members(labels)
    ]
    share = torch.cat([found.values for found in best])
    return Leaders(torch.cat([found.indices for found in best]).cpu(), share.cpu())


def _checked_step(step: int, num_steps: int) -> int:
    if isinstance(step, int) and not isinstance(step, bool) and -num_steps <= step < num_steps:
        return step % num_steps
    if num_steps == 0:
        raise ValueError("trajectory must have at least one step to have attention, got 0")
    raise ValueError(f"step must be an integer in {-num_steps} .. {num_steps - 1}, got {step!r}")


def _members(labels: Tensor) -> Iterator[Tensor]:
    """Columns with 1 / |c| for the members of a cluster, [N, up to 64]: never [N, K]."""
    size = torch.bincount(labels).double()
    for clusters in torch.arange(len(size)).split(64):
        yield (labels[:, None] == clusters) / size[clusters]


def _by_attention(trajectory: Trajectory, step: int) -> Received:
    """members [N, n] -> sum_i a_ij members_ic of one step, [N, n]."""
    x, graph, rule = trajectory.states[step], trajectory.graph, trajectory.rule
    if rule.score == "rbf":
        x = x - x.mean(dim=0)  # distances stay; the products below lose no digits to an offset
    query, key, scale = rule.operands(x, graph)
    q, k = query[:, None], key[:, None]
    if rule.top_k is not None:
        sigma = rule.sigma if rule.score == "rbf" else None
        weights = attention_weights(
            q,
            k,
            graph,
            sigma=sigma,
            scale=scale if sigma is None else None,
            top_k=rule.top_k,
        )
        return _by_edge(weights[:, 0], graph)
    # a_ij = exp(scale q_i . k_j - b_i), with b_i the logarithm of the row's sum (and half of the
    # squares of "rbf", those of j as well). Over the transposed graph that is attention of j to
    # all i with one more feature, whose own log-sum tells how much j receives altogether.
    if rule.score == "rbf":
        assert rule.sigma is not None
        _, lse = rbf_attention(q, k, k, graph, rule.sigma, return_lse=True)
        half = x.square().sum(dim=1, keepdim=True) * scale / 2
        row, column = lse + half, half
    else:
        _, row = dot_product_attention(q, k, k, graph, scale=scale, return_lse=True)
        column = torch.zeros_like(row)
    row = torch.where(row.isneginf(), 0.0, row)  # a row without edges: nobody reads it
    asking = torch.cat([key, torch.ones_like(row)], dim=1)[:, None]
    asked = torch.cat([query, -row / scale], dim=1)[:, None]
    flipped = graph.transpose()

    def received(members: Tensor) -> Tensor:
        mean, lse = dot_product_attention(
            asking, asked, members.to(x)[:, None], flipped, scale=scale, return_lse=True
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
        for c in range(members.shape[1]):  # one at a time: [E, n] may be large
            total[:, c].index_add_(0, source, weights * members[target, c])
        return total

    return received
