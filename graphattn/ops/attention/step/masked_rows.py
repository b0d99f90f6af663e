"""A few rows of attention over many keys in operations of torch, for gradients and torch.compile.

All logits of a row are computed, whatever the mask. Sources that a row does not see are set to 0
first, and distances are sums of squared differences, which do not cancel. On a CPU without
gradients, `cached` is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.ops.attention.logits.score import Kernel


def attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    *,
    score: Kernel,
    scale: float | Tensor,
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, Hk, g, Dv] and log-sums [B, T, Hk, g], which can be differentiated again.

    Args:
        query: [B, T, Hk, g, D], where g heads share a key head.
        key, value: [B, n, Hk, D] and [B, n, Hk, Dv].
        allowed: bool [B or 1, T, n], the sources that every row sees.
        score, scale: as in :mod:`.reference`; scale a number or [Hk, g].
    """
    rows = [
        _row(query[:, t], key, value, allowed[:, t], score, scale, top_k)
        for t in range(query.shape[1])
    ]
    if not rows:
        out = query.new_empty(*query.shape[:-1], value.shape[-1]) + 0 * (key.sum() + value.sum())
        return out, out.sum(-1)
    outs, sums = zip(*rows, strict=True)
    return torch.stack(outs, dim=1), torch.stack(sums, dim=1)


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    score: Kernel,
    scale: float | Tensor,
    top_k: int | None,
) -> tuple[Tensor, Tensor]:
    """One token of every sequence: query [B, Hk, g, D], allowed [B, n]."""
    hidden = ~allowed[..., None, None]
    query = query.masked_fill(
        ~allowed.any(-1)[:, None, None, None], 0
    )  # a row that sees nothing may hold NaN
    key = key.masked_fill(hidden, 0).transpose(1, 2)  # [B, Hk, n, D]
    value = value.masked_fill(hidden, 0).transpose(1, 2)
    if isinstance(scale, Tensor):
        scale = scale[..., None]
    if score == "rbf":
        logits = scale / -2 * (query[..., None, :] - key[:, :, None]).square().sum(-1)
    elif top_k is None:
        logits = scale * (query @ key.mT)
    else:  # pair by pair, so that equal keys give equal bits
        logits = scale * (query[..., None, :] * key[:, :, None]).sum(-1)
    keep = allowed[:, None, None].expand(logits.shape)
    logits = logits.masked_fill(~keep, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        best = logits.detach().argsort(dim=-1, descending=True, stable=True)[..., :top_k]
        keep = keep & torch.zeros_like(keep).scatter(-1, best, True)
        logits = logits.masked_fill(~keep, -torch.inf)
        bad = ~value.isfinite()  # a value that is not selected may be NaN, and 0 * NaN is NaN
        value = value.masked_fill(bad, 0)
        reads_bad = keep.to(value.dtype) @ bad.to(value.dtype) > 0
    empty = ~keep.any(-1)
    logits = logits.masked_fill(empty[..., None], 0)
    weights = logits.softmax(-1).masked_fill(empty[..., None], 0)
    out = weights @ value
    if top_k is not None and top_k < logits.shape[-1]:
        out = out.masked_fill(reads_bad, torch.nan)
    return out, logits.logsumexp(-1).masked_fill(empty, -torch.inf)
