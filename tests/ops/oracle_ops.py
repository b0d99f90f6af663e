"""The mechanisms in plain Python loops, float64: what every operation is compared with.

Straight from the equations (Projection-Free Transformers, Krause Synchronization Transformers,
Stabilizing Transformer Training Through Consensus). Nothing of graphattn is called: a graph
arrives as its mask [N, M], True where target i sees source j.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """out [*, N, H, Dv], lse [*, N, H] (after top-k, before eps), weights [*, N, M, H]."""

    out: Tensor
    lse: Tensor
    weights: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    top_k: int | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    valid: Tensor | tuple | None = None,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
    dropped: Tensor | None = None,
    dropout: float = 0.0,
) -> Attention:
    """RBF attention with `sigma`, dot-product attention otherwise; `bias` [N, M, H].

    The share `dropout` of the weights, which pairs are `dropped` [*, N, M, H], is left out of the
    output alone.
    """
    N, H, D = query.shape[-3:]
    M, Hk, Dv = value.shape[-3:]
    batch = query.shape[:-3]
    if sigma is None:
        scales = _per_head(1 / math.sqrt(D) if scale is None else scale, H)
    else:
        sigmas = _per_head(sigma, H)
    sinks = None if sink is None else _per_head(sink, H)
    edges, biases = mask.tolist(), None if bias is None else bias.tolist()
    out = torch.zeros(*batch, N, H, Dv, dtype=torch.float64)
    lse = torch.full((*batch, N, H), -math.inf, dtype=torch.float64)
    weights = torch.zeros(*batch, N, M, H, dtype=torch.float64)
    for place in _places(batch):
        q, k, v = (x[place].detach().double().tolist() for x in (query, key, value))
        valid_target, valid_source = _valid(valid, place, N, M)
        for i, h in itertools.product(range(N), range(H)):
            g = h // (H // Hk)  # the key head that query head h reads
            affinity = {}
            for j in range(M):
                if not (edges[i][j] and valid_target[i] and valid_source[j]):
                    continue
                if sigma is None:
                    score = scales[h] * math.fsum(
                        a * b for a, b in zip(q[i][h], k[j][g], strict=True)
                    )
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                else:
                    squared = math.fsum((a - b) ** 2 for a, b in zip(q[i][h], k[j][g], strict=True))
                    score = -squared / (2 * sigmas[h] ** 2)
                affinity[j] = score + (0.0 if biases is None else biases[i][j][h])
            kept = sorted(affinity, key=lambda j: (-affinity[j], j))[:top_k]
            if not kept:
                continue
            highest = max(affinity[j] for j in kept)
            exponential = {j: math.exp(affinity[j] - highest) for j in kept}
            total = math.fsum(exponential.values())
            log_sum = highest + math.log(total)
            # sum / (eps + sum), in the log domain
            beside = log_sum if eps == 0 else _log_add(log_sum, math.log(eps))
            if sinks is not None and sinks[h] > -math.inf:
                beside = _log_add(beside, sinks[h])
            share = math.exp(log_sum - beside)
            lse[place][i, h] = log_sum
            own = [exponential[j] / total * share for j in kept]
            weights[place][i, kept, h] = torch.tensor(own, dtype=torch.float64)
            if dropped is not None:
                left = [j for j in kept if not dropped[place][i, j, h]]
                own = [w / (1 - dropout) for w, j in zip(own, kept, strict=True) if j in left]
                kept = left
            mean = [
                math.fsum(a * v[j][g][d] for a, j in zip(own, kept, strict=True)) for d in range(Dv)
            ]
            out[place][i, h] = torch.tensor(mean, dtype=torch.float64)
    return Attention(out, lse, weights)


def per_edge(dense: Tensor, mask: Tensor) -> Tensor:
    """[*, N, M, H] -> [*, E, H], edges sorted by target, then source."""
    pairs = mask.nonzero().tolist()
    rows = [dense[..., i, j, :] for i, j in pairs]
    return torch.stack(rows, -2) if rows else dense.new_zeros(*dense.shape[:-3], 0, dense.shape[-1])


def dense_bias(edge_bias: Tensor, mask: Tensor) -> Tensor:
    """[E, H] -> [N, M, H]: the e-th edge in the order of target, then source, has row e."""
    dense = torch.zeros(*mask.shape, edge_bias.shape[1], dtype=torch.float64)
    for e, (i, j) in enumerate(mask.nonzero().tolist()):
        dense[i, j] = edge_bias[e]
    return dense


class Edge(NamedTuple):
    """alpha, beta and R = alpha I + beta Lambda^T Lambda, a D x D nested list."""

    alpha: float
    beta: float
    R: list[list[float]]


def edge_network(
    target_hidden: list, source_hidden: list, network: list, h: int, of_edge: list | None = None
) -> Edge:
    """Algorithm 2 for head h of one edge; hidden vectors [G, xi or 3 xi] as nested lists.

    `of_edge` is F e_ij, a third input of the first layer, in the same form.
    """
    alpha_w, alpha_b, beta_w, beta_b, shear_w, shear_b = (x[h] for x in network)
    own = h if len(target_hidden) > 1 else 0
    total = [a + b for a, b in zip(target_hidden[own], source_hidden[own], strict=True)]
    if of_edge is not None:
        total = [a + b for a, b in zip(total, of_edge[own], strict=True)]
    hidden = [_gelu(a) for a in total]
    xi = len(alpha_w)
    if len(hidden) == 3 * xi:  # one trunk for each of the three
        of_alpha, of_beta, of_shear = hidden[:xi], hidden[xi : 2 * xi], hidden[2 * xi :]
    else:
        of_alpha = of_beta = of_shear = hidden
    alpha = _softplus(_dot(alpha_w, of_alpha) + alpha_b)
    beta = _softplus(_dot(beta_w, of_beta) + beta_b)
    rank, D = len(shear_w), len(shear_w[0])
    Lambda = []
    for k in range(rank):
        row = [_dot(shear_w[k][d], of_shear) + shear_b[k][d] for d in range(D)]
        norm = math.hypot(*row)
        Lambda.append([x / norm / math.sqrt(rank) if norm > 0 else 0.0 for x in row])
    R = [
        [
            (alpha if a == b else 0.0) + beta * sum(row[a] * row[b] for row in Lambda)
            for b in range(D)
        ]
        for a in range(D)
    ]
    return Edge(alpha, beta, R)


def edge_hidden(features: Tensor, weight: Tensor) -> Tensor:
    """F e_ij, [*, E, G, xi], of features [*, E, F] and weight [G, xi, F]."""
    batch, (E, F), (G, xi, _) = features.shape[:-2], features.shape[-2:], weight.shape
    numbers = weight.detach().double().tolist()
    out = torch.zeros(*batch, E, G, xi, dtype=torch.float64)
    for place in _places(batch):
        own = features[place].detach().double().tolist()
        for e, g, k in itertools.product(range(E), range(G), range(xi)):
            out[place][e, g, k] = math.fsum(numbers[g][k][f] * own[e][f] for f in range(F))
    return out


def edge_matrices(
    target_hidden: Tensor,
    source_hidden: Tensor,
    network: tuple,
    mask: Tensor,
    of_edges: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """R [*, E, H, D, D], alpha and beta [*, E, H] of every edge, by target, then source.

    `of_edges` [E, G, xi] or [*, E, G, xi] is F e_ij of the edges in that order.
    """
    H, _, D = network[5].shape
    batch, pairs = target_hidden.shape[:-3], mask.nonzero().tolist()
    R = torch.zeros(*batch, len(pairs), H, D, D, dtype=torch.float64)
    alpha, beta = (torch.zeros(*batch, len(pairs), H, dtype=torch.float64) for _ in range(2))
    numbers = [x.detach().double().tolist() for x in network]
    for place in _places(batch):
        a, b = (x[place].detach().double().tolist() for x in (target_hidden, source_hidden))
        third = _of_edges(of_edges, place)
        for e, (i, j) in enumerate(pairs):
            for h in range(H):
                edge = edge_network(a[i], b[j], numbers, h, third[e] if third else None)
                R[place][e, h] = torch.tensor(edge.R, dtype=torch.float64)
                alpha[place][e, h], beta[place][e, h] = edge.alpha, edge.beta
    return R, alpha, beta


def consensus(
    state: Tensor,
    neighbor_state: Tensor,
    target_hidden: Tensor,
    source_hidden: Tensor,
    network: tuple,
    mask: Tensor,
    step_size: float | Tensor | str,
    *,
    update: str = "energy",
    disagreement: tuple[Tensor, Tensor] | None = None,
    valid: Tensor | tuple | None = None,
    lengths: tuple[int, ...] | None = None,
    of_edges: Tensor | None = None,
) -> Tensor:
    """u' = u - eta g (Algorithms 1 to 6); `lengths` of the sequences side by side, for "auto".

    `of_edges` [E, G, xi] or [*, E, G, xi] is F e_ij of the edges by target, then source.
    """
    N, H, D = state.shape[-3:]
    M, batch = neighbor_state.shape[-3], state.shape[:-3]
    pairs = mask.nonzero().tolist()
    numbers = [x.detach().double().tolist() for x in network]
    new = torch.zeros(*batch, N, H, D, dtype=torch.float64)
    eta = None
    if not isinstance(step_size, str):
        eta = torch.as_tensor(step_size, dtype=torch.float64).broadcast_to(state.shape[:-1])
    u_own, v_own = disagreement or (state, neighbor_state)
    for place in _places(batch):
        moving, u, v, a, b = (
            x[place].detach().double().tolist()
            for x in (state, u_own, v_own, target_hidden, source_hidden)
        )
        valid_target, valid_source = _valid(valid, place, N, M)
        third = _of_edges(of_edges, place)
        for h in range(H):
            g = [[0.0] * D for _ in range(N)]
            degree = [0.0] * N
            for e, (i, j) in enumerate(pairs):
                if not (valid_target[i] and valid_source[j]):
                    continue
                edge = edge_network(a[i], b[j], numbers, h, third[e] if third else None)
                apart = [x - y for x, y in zip(u[i][h], v[j][h], strict=True)]
                if update == "target":
                    degree[i] += edge.alpha + edge.beta
                elif i != j:  # a self-loop exerts no force
                    degree[i] += edge.alpha + edge.beta
                    degree[j] += edge.alpha + edge.beta
                for d in range(D):
                    pull = _dot(edge.R[d], apart)
                    g[i][d] += pull
                    if update == "energy":  # the other end feels the opposite
                        g[j][d] -= pull
            if eta is not None:
                steps = eta[place][:, h].tolist()
            elif update == "target":
                steps = [1 / d if d > 0 else 0.0 for d in degree]
            else:
                steps, start = [], 0
                for length in lengths or (N,):
                    largest = max(degree[start : start + length], default=0.0)
                    steps += [1 / (2 * largest) if largest > 0 else 0.0] * length
                    start += length
            for i, d in itertools.product(range(N), range(D)):
                new[place][i, h, d] = moving[i][h][d] - steps[i] * g[i][d]
    return new


def energy(u: Tensor, R: Tensor, mask: Tensor) -> Tensor:
    """E(u) = 1/2 sum over edges of (u_i - u_j)^T R_ij (u_i - u_j); u [N, H, D], R [E, H, D, D]."""
    total = u.new_zeros(())
    for e, (i, j) in enumerate(mask.nonzero().tolist()):
        for h in range(u.shape[1]):
            apart = u[i, h] - u[j, h]
            total = total + apart @ R[e, h] @ apart / 2
    return total


def _of_edges(of_edges: Tensor | None, place: tuple) -> list | None:
    if of_edges is None:
        return None
    return (of_edges if of_edges.dim() == 3 else of_edges[place]).detach().double().tolist()


def _places(batch: torch.Size) -> itertools.product:
    return itertools.product(*(range(size) for size in batch))


def _per_head(number: float | Tensor, heads: int) -> list[float]:
    return torch.as_tensor(number, dtype=torch.float64).detach().broadcast_to((heads,)).tolist()


def _valid(valid: Tensor | tuple | None, place: tuple, N: int, M: int) -> list[list[bool]]:
    pair = valid if isinstance(valid, tuple) else (valid, valid)
    lists = []
    for mask, count in zip(pair, (N, M), strict=True):
        if mask is None:
            lists.append([True] * count)
        else:
            lists.append((mask if mask.dim() == 1 else mask[place]).tolist())
    return lists


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _log_add(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def _gelu(x: float) -> float:
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
