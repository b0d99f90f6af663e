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
from graphattn.ops.attention.structured.workspace import Workspace

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
    room = operands.workspace or Workspace()
    query, key = operands.scaled_query, operands.key
    mask, bias = _mask(allowed, query.dtype), operands.scaled_bias
    if mask is None:
        mask = bias
    elif bias is not None:
        shape = *bias.shape[:2], mask.shape[-2], bias.shape[-1]
        mask = torch.add(mask, bias, out=room.matrices("mask", bias, *shape))
    width = max(query.shape[-1], value.shape[-1])
    query, key = _wider(query, width, room, "query"), _wider(key, width, room, "key")
    padded = _wider(value, width, room, "value")
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the scaled query, `key` and `value`; row and column sums of the logits'.

    Rows with lse = inf take no part. The sums [G, H, n], [G, H, m] mean nothing for dot products.
    """
    own, features = operands.key.shape[-1], value.shape[-1]
    rbf = operands.bias is not None
    width = max(own + 2 * int(rbf), features + int(d_lse is not None))
    # A feature that is constant on one side gives the sums over it on the other.
    room = operands.workspace or Workspace()
    query, key = operands.scaled_query, operands.key
    if operands.bias is None:
        query, key = _wider(query, width, room, "query"), _wider(key, width, room, "key")
    else:
        query = _wider(query, width, room, "query", 1.0)
        key = _wider(key, width, room, "key", operands.scale[..., 0] * operands.bias, 1.0)
    out = _wider(out, width, room, "out", None if d_lse is None else -d_lse)
    d_out = _wider(d_out, width, room, "d_out", None if d_lse is None else 1.0)
    value = _wider(value, width, room, "value")
    mask = _expanded(_mask(allowed, query.dtype), query, key)
    d_query, d_key, d_value = _backward(
        d_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=1.0
    )
    row_sums, column_sums = (d_query[..., own + 1], d_key[..., own]) if rbf else (lse, lse)
    return d_query[..., :own], d_key[..., :own], d_value[..., :features], row_sums, column_sums


def _wider(
    x: Tensor, width: int, room: Workspace, name: str, *following: Tensor | float | None
) -> Tensor:
    """x with more features: what is `following`, then zeros."""
    own = x.shape[-1]
    if own == width:
        return x
    wide = room.room("wide " + name, x, *x.shape[:-1], width)
    wide[..., :own] = x
    for feature in following:
        if feature is not None:
            wide[..., own] = feature
            own += 1
    if own < width:
        wide[..., own:] = 0
    return wide
