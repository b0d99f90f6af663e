"""The inside of a tile by torch's fused attention on the CPU: no matrix of logits is ever stored.

The operator under ``scaled_dot_product_attention`` is called itself, because it also gives the
log-sums, and because its backward can be made to give their gradient: a row's log-sum enters the
gradient of the logits where ``rowsum(d_out * out)`` does, with the other sign, so one more feature
of ``out`` and ``d_out`` that multiplies to -d_lse carries it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.ops.attention.structured.operands import Operands

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _mask(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where allowed and -inf elsewhere, in the shape of `allowed`."""
    if allowed is None:
        return None
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _expanded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A view [G, H, n, m]."""
    if mask is None:
        return None
    return mask.expand(*query.shape[:2], query.shape[-2], key.shape[-2])


def forward(
    operands: Operands, value: Tensor, allowed: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [G, H, n, Dv] and the log-sums of the operands' logits [G, H, n].

    A row without any allowed source gets numbers without meaning; the caller knows which.
    """
    query, key, scale = operands.query, operands.key, operands.scale
    mask = _mask(allowed, query.dtype)
    if operands.rbf and (mask is None or mask.shape[-2] == 1):
        # The bias added as a mask of one row costs nothing, as a feature of its own a tenth.
        bias = (scale * key[..., -1:]).transpose(-1, -2)
        mask = bias if mask is None else mask + bias
        query, key = query[..., :-1], key[..., :-1]
    width = max(query.shape[-1], value.shape[-1])
    query, key, padded = _wider(query * scale, width), _wider(key, width), _wider(value, width)
    out, lse = _attention(
        query, key, padded, 0.0, causal, attn_mask=_expanded(mask, query, key), scale=1.0
    )
    return out[..., : value.shape[-1]], lse


def backward(
    operands: Operands,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the scaled query, `key` and `value`, and the row sums of the logits' gradient.

    Rows with lse = inf take no part.
    """
    own, features = operands.query.shape[-1], value.shape[-1]
    width = max(own + int(operands.rbf), features + int(d_lse is not None))
    query = _wider(operands.query, width)
    query = query.mul_(operands.scale) if query is not operands.query else query * operands.scale
    # A constant feature of the keys, where queries have none, gives the row sums.
    key = _wider(operands.key, width, None if not operands.rbf else 1.0)
    out = _wider(out, width, None if d_lse is None else -d_lse)
    d_out = _wider(d_out, width, None if d_lse is None else 1.0)
    value = _wider(value, width)
    mask = _expanded(_mask(allowed, query.dtype), query, key)
    d_query, d_key, d_value = _backward(
        d_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=1.0
    )
    row_sums = d_query[..., own] if operands.rbf else lse
    return d_query[..., :own], d_key[..., :own], d_value[..., :features], row_sums


def _wider(x: Tensor, width: int, following: Tensor | float | None = None) -> Tensor:
    """x with more features: what is `following`, then zeros."""
    own = x.shape[-1]
    if own == width:
        return x
    wide = x.new_empty((*x.shape[:-1], width))
    wide[..., :own] = x
    if following is not None:
        wide[..., own] = following
        own += 1
    wide[..., own:] = 0
    return wide
