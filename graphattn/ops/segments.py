"""Softmax and top-k over the in-edges of every target, for per-edge values [*, E, H]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphattn.ops.top_k import order_of_selection


def segment_softmax(
    logits: Tensor, target: Tensor, num_targets: int, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [*, E, H] that sum to 1 over the edges of every target, and log-sums [*, N, H].

    Only edges where `keep` is True count. A target without any gets weights 0 and log-sum -inf,
    and no gradient turns NaN there.
    """
    if keep is not None:
        logits = logits.masked_fill(~keep, -torch.inf)
    rows = (*logits.shape[:-2], num_targets, logits.shape[-1])
    index = target[:, None].expand_as(logits)
    highest = logits.new_full(rows, -torch.inf)
    highest = highest.scatter_reduce(-2, index, logits.detach(), "amax")
    highest = torch.where(highest.isfinite(), highest, 0)
    exponential = (logits - highest.index_select(-2, target)).exp()
    total = logits.new_zeros(rows).index_add(-2, target, exponential)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    weights = exponential / total.index_select(-2, target)
    return weights, (total.log() + highest).masked_fill(empty, -torch.inf)


def segment_top_k(logits: Tensor, target: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """Mark the `k` largest logits among the edges of every target, bool [*, E, H].

    Edges are in the order of edge_index, so of two edges of a target the earlier one has the
    smaller source. They are sorted twice, stably: by logit, then by target.
    """
    order = order_of_selection(logits, dim=-2)
    order = order.gather(-2, target[order].argsort(dim=-2, stable=True))
    rank = torch.arange(len(target), device=target.device) - rowptr[target]
    keep = torch.zeros_like(logits, dtype=torch.bool)
    return keep.scatter(-2, order, (rank < k)[:, None].expand_as(keep))


def edge_softmax(
    logits: Tensor,
    target: Tensor,
    rowptr: Tensor,
    *,
    keep: Tensor | None = None,
    top_k: int | None = None,
    eps: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights [*, E, H], log-sums [*, N, H], and the edges that count (None: all).

    The softmax is over the edges of `keep` (broadcastable to the logits), and of these over the
    `top_k` largest of every target. Log-sums do not include eps and the sink.
    """
    if keep is not None:
        keep = keep.expand_as(logits)
    if top_k is not None:
        candidates = logits if keep is None else logits.masked_fill(~keep, -torch.inf)
        best = segment_top_k(candidates, target, rowptr, top_k)
        keep = best if keep is None else best & keep
    weights, lse = segment_softmax(logits, target, len(rowptr) - 1, keep)
    if eps > 0 or sink is not None:
        weights = weights * share_beside_eps(lse, eps, sink).index_select(-2, target)
    return weights, lse, keep


def even_sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid, with bits that do not depend on where a number lies in its tensor.

    On a CPU, torch computes the exponentials of a vector of numbers otherwise than those that are
    left at the end, so the last bit of a row would depend on the rest of the batch. In float64 this
    difference is far below the last bit of float32.
    """
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return torch.sigmoid(x)
    return torch.sigmoid(x.double()).to(x.dtype)


def share_beside_eps(lse: Tensor, eps: float, sink: Tensor | None = None) -> Tensor:
    """Compute sum / (eps + exp(sink) + sum) from log(sum), so that no gradient overflows.

    `lse` is [*, H] and `sink` [H]. A sink of -inf counts as none and gets no gradient.
    """
    if sink is None:
        return even_sigmoid(lse - math.log(eps))
    if eps > 0:
        sink = torch.logaddexp(sink, torch.full_like(sink, math.log(eps)))
    none = sink == -torch.inf  # -inf - -inf is NaN
    return even_sigmoid(lse - sink.masked_fill(none, 0)).masked_fill(none, 1)


def segment_sum(messages: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """Sum of the messages [*, E, H, D] of every target, [*, N, H, D]."""
    shape = (*messages.shape[:-3], num_targets, *messages.shape[-2:])
    return messages.new_zeros(shape).index_add(-3, target, messages)
