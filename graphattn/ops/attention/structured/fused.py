"""The inside of a tile by torch's fused attention on the CPU: no matrix of logits is ever stored.

The operator under ``scaled_dot_product_attention`` is called itself, because it also gives the
log-sums, and because its backward can be made to give their gradient: a row's log-sum enters the
gradient of the logits where ``rowsum(d_out * out)`` does, with the other sign, so one more feature
of ``out`` and ``d_out`` that multiplies to -d_lse carries it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
    query, key = operands.scaled_query, operands.key
    mask = _mask(allowed, query.dtype)
    if operands.rbf and (mask is None or mask.shape[-2] == 1):
        # The bias added as a mask of one row costs nothing, as a feature of its own a tenth.
        bias = (operands.scale * operands.key[..., -1:]).transpose(-1, -2)
        mask = bias if mask is None else mask + bias
        query, key = query[..., :-1], key[..., :-1]
    width = max(query.shape[-1], value.shape[-1])
    query, key, padded = (_wider(x, width) for x in (query, key, value))
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
    """Gradients of `scaled_query`, `key` and `value`, and the row sums of the logits' gradient.

    Rows with lse = inf take no part.
    """
    query, key = operands.scaled_query, operands.key
    own, features = query.shape[-1], value.shape[-1]
    if d_lse is not None:
        out = torch.cat([out, -d_lse[..., None]], dim=-1)
        d_out = functional.pad(d_out, (0, 1), value=1.0)
    if operands.rbf:  # a constant feature of the keys gives the row sums
        query, key = functional.pad(query, (0, 1)), functional.pad(key, (0, 1), value=1.0)
    mask = _expanded(_mask(allowed, query.dtype), query, key)
    width = max(query.shape[-1], out.shape[-1])
    query, key, value, out, d_out = (_wider(x, width) for x in (query, key, value, out, d_out))
    d_query, d_key, d_value = _backward(
        d_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=1.0
    )
    row_sums = d_query[..., own] if operands.rbf else lse
    return d_query[..., :own], d_key[..., :own], d_value[..., :features], row_sums


def _wider(x: Tensor, width: int) -> Tensor:
    """Zeros as further features, so that all operands have as many."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))
