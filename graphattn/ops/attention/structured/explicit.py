"""The inside of a tile by products with the logits stored: top-k, tables, and what is not finite.

A product touches every pair of a tile, edges or not, and 0 * NaN is NaN. So what is summed up holds
zeros in place of NaN and infinity, and rows that see one are marked by a second product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.ops.attention.structured.operands import Operands


def logits_of(operands: Operands, bias: Tensor | None) -> Tensor:
    """[G, H, n, m], of edges and others; `bias` [H, n, m]."""
    return operands.logits if bias is None else operands.logits + bias


def kept(logits: Tensor, allowed: Tensor | None, top_k: int | None, finite: bool) -> Tensor | None:
    """Bool, broadcastable to the logits: the edges that count; None: all pairs.

    Of equal logits the earlier source is kept.
    """
    if top_k is None or top_k >= logits.shape[-1]:
        return allowed
    candidates = logits.detach()
    if allowed is not None:
        candidates = candidates.masked_fill(~allowed, -torch.inf)
    if not finite:  # NaN counts as the largest, as in a sort
        order = candidates.argsort(dim=-1, descending=True, stable=True)
        best = order.argsort(dim=-1) < top_k
        return best if allowed is None else best & allowed
    threshold = candidates.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    best = candidates >= threshold
    if bool((best.sum(-1) > top_k).any()):
        ties = candidates == threshold
        above = candidates > threshold
        room = top_k - above.sum(-1, keepdim=True)
        best = above | (ties & (ties.cumsum(-1) <= room))
    return best if allowed is None else best & allowed


def softmax(logits: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [G, H, n, m] and log-sums [G, H, n]; a row that keeps nothing: zeros and -inf."""
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], -torch.inf)
    if keep is not None:
        logits = logits.masked_fill(~keep, -torch.inf)
    highest = logits.detach().amax(dim=-1, keepdim=True)
    highest = torch.where(highest.isfinite(), highest, 0)
    weights = (logits - highest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (total.log() + highest).masked_fill(empty, -torch.inf)
    return weights / total, lse[..., 0]


def product(weights: Tensor, x: Tensor, keep: Tensor | None, finite: bool) -> Tensor:
    """weights @ x over the kept pairs: NaN in x reaches the rows that keep it and no other."""
    if finite:
        return weights @ x
    bad = ~x.isfinite()
    marked = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    seen = marked @ bad.to(x.dtype) > 0
    return (weights @ x.masked_fill(bad, 0)).masked_fill(seen, torch.nan)


def forward(
    operands: Operands,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
    finite: bool,
) -> tuple[Tensor, Tensor]:
    """Output [G, H, n, Dv] and the log-sums of the operands' logits [G, H, n]."""
    logits = logits_of(operands, bias)
    keep = kept(logits, allowed, top_k, finite)
    weights, lse = softmax(logits, keep)
    return product(weights, value, keep, finite), lse


def backward(
    operands: Operands,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
    finite: bool,
    d_out: Tensor,
    d_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `scaled_query`, `key`, `value` and of the logits [G, H, n, m]."""
    logits = logits_of(operands, bias)
    keep = kept(logits, allowed, top_k, finite)
    weights, _ = softmax(logits, keep)
    if not finite and keep is not None:
        weights = weights.masked_fill(~keep, 0)  # 0 / NaN
    d_value = product(
        weights.transpose(-1, -2),
        d_out,
        None if keep is None else keep.transpose(-1, -2),
        finite,
    )
    d_logits = d_out @ value.transpose(-1, -2)
    if not finite and keep is not None:
        d_logits = d_logits.masked_fill(~keep, 0)
    d_logits = d_logits - (weights * d_logits).sum(-1, keepdim=True)
    if d_lse is not None:
        d_logits = d_logits + d_lse[..., None]
    d_logits = d_logits * weights
    if not finite and keep is not None:
        d_logits = d_logits.masked_fill(~keep, 0)
    d_query = product(d_logits, operands.key, keep, finite)
    d_key = product(
        d_logits.transpose(-1, -2),
        operands.scaled_query,
        None if keep is None else keep.transpose(-1, -2),
        finite,
    )
    return d_query, d_key, d_value, d_logits
