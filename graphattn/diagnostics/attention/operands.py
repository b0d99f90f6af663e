"""Operands of an attention call, and the computation of its weights in blocks of rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from graphattn.diagnostics.attention.same_tokens import are_parts_of_one, is_same_tensor
from graphattn.ops.inputs import compute_dtype

CHUNK = 1 << 23  # weights that are computed at a time, 32 MB in float32


@dataclass
class Operands:
    """One call of attention: its output, and the tensors from which its weights are computed.

    Either `weights` are given, or `query` and `key`. `mask` is boolean (True where a query may see
    a key), or is added to the logits.
    """

    output: Tensor  #: the output of the call, in any layout
    query: Tensor | None = None  #: [B, H, Q, D]
    key: Tensor | None = None  #: [B, Hk, K, D]
    mask: Any = None  #: broadcastable to [B, H, Q, K]
    is_causal: bool = False  #: whether query i sees only keys 0 .. i
    scale: float | None = None  #: the scale of the logits; 1 / sqrt(D) if None
    softcap: float | None = None  #: the bound of the logits, by tanh
    sink: Tensor | None = None  #: [H], a logit that is added to the denominator of the softmax
    bias: Tensor | None = None  #: broadcastable to [B, H, Q, K]
    weights: Tensor | None = None  #: [B, H, Q, K]
    same_tokens: bool | None = None  #: whether queries and keys are the same tokens, if known

    def __post_init__(self) -> None:
        if self.weights is not None:
            self.weights = self.weights.detach()
            B, H, Q, K = self.weights.shape
        else:
            assert self.query is not None
            assert self.key is not None
            self.query, self.key = self.query.detach(), self.key.detach()
            (B, H, Q, _), K = self.query.shape, self.key.shape[2]
        self.shape = (B, H, Q, K)
        if self.mask is not None:
            mask = self.mask.detach()[(None,) * (4 - self.mask.dim())][..., : self.shape[-1]]
            if 1 < mask.shape[-1] < self.shape[-1]:  # Keys beyond the mask may not be seen.
                mask = functional.pad(
                    mask,
                    (0, self.shape[-1] - mask.shape[-1]),
                    value=False if mask.dtype == torch.bool else -torch.inf,
                )
            self.mask = mask
        likes = self.weights if self.weights is not None else self.query
        assert likes is not None
        self.dtype = compute_dtype(likes.dtype)
        self.device = likes.device

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of blocks of rows."""
        B, H, Q, K = self.shape
        height = max(1, CHUNK // max(1, B * H * K))
        for start in range(0, Q, height):
            yield start, min(Q, start + height)

    def allowed(self, start: int, stop: int) -> Tensor | None:
        """Return which keys the queries may see, bool, broadcastable to [B, H, stop - start, K].

        None means all keys.
        """
        allowed = None
        if self.mask is not None:
            rows = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, start:stop]
            if rows.dtype == torch.bool:
                allowed = rows
            else:
                allowed = rows > _least(rows.dtype)
        if self.is_causal:
            row = torch.arange(start, stop, device=self.device)
            past = torch.arange(self.shape[-1], device=self.device) <= row[:, None]
            allowed = past[None, None] if allowed is None else allowed & past
        return allowed

    def rows(self, start: int, stop: int) -> Tensor:
        """Compute the weights [B, H, stop - start, K]; 0 in rows without allowed keys."""
        allowed = self.allowed(start, stop)
        if self.weights is not None:
            weights = self.weights[:, :, start:stop].to(self.dtype)
        else:
            weights = self._softmax(start, stop, allowed)
        if allowed is not None:
            weights = weights.masked_fill(~allowed.any(dim=-1, keepdim=True), 0)
        return weights

    def _softmax(self, start: int, stop: int, allowed: Tensor | None) -> Tensor:
        assert self.query is not None
        assert self.key is not None
        query = self.query[:, :, start:stop].to(self.dtype)
        key = self.key.to(self.dtype)
        groups = query.shape[1] // key.shape[1]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        # Heads of a group share keys: the shapes are [B, Hk, G, q, D] and [B, Hk, 1, K, D].
        logits = query.unflatten(1, (-1, groups)) @ key[:, :, None].mT
        logits = logits.flatten(1, 2) * scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        for added in (self.bias, self.mask):
            if added is not None and added.dtype != torch.bool:
                logits = logits + (added if added.shape[2] == 1 else added[:, :, start:stop])
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        top = logits.amax(dim=-1, keepdim=True)
        if self.sink is not None:
            sink = self.sink.to(self.dtype).view(1, -1, 1, 1)
            top = torch.maximum(top, sink)
        top = top.masked_fill(top == -torch.inf, 0)
        weights = (logits - top).exp()
        total = weights.sum(dim=-1, keepdim=True)
        if self.sink is not None:
            total = total + (sink - top).exp()
        return weights / total.masked_fill(total == 0, 1)

    def seen_keys(self) -> Tensor:
        """Return a bool [B, K] of keys that at least one query may see; others are padding."""
        B, _, _, K = self.shape
        seen = torch.zeros(B, K, dtype=torch.bool, device=self.device)
        for start, stop in self.blocks():
            allowed = self.allowed(start, stop)
            if allowed is None:
                return ~seen
            seen |= allowed.expand(-1, -1, stop - start, K).any(dim=2).any(dim=1)
        return seen


# Operands from the arguments of a call, or a string with the reason if they cannot be read.


def of_sdpa(
    sdpa: Any,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Operands | str:
    """Return the operands of ``scaled_dot_product_attention``, without dropout."""
    if isinstance(attn_mask, CausalBias):
        lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
        Q, K = query.shape[-2], key.shape[-2]
        allowed = torch.ones(Q, K, dtype=torch.bool, device=query.device)
        attn_mask = allowed.tril(K - Q if lower_right else 0)
    if reason := _unreadable(query, key, attn_mask):
        return reason
    same_tokens = (is_causal and query.shape[-2] == key.shape[-2]) or are_parts_of_one(query, key)
    mask = attn_mask
    if mask is not None:
        mask = mask[(None,) * (query.dim() - mask.dim())]
        if query.dim() == 3:
            mask = mask[:, None]
        elif query.dim() > 4:
            mask = mask.expand(*output.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    if query.dim() == 3:  # a batch with one head
        query = query.expand(*output.shape[:-2], *query.shape[-2:])[:, None]
        key = key.expand(*output.shape[:-2], *key.shape[-2:])[:, None]
    elif query.dim() == 2:
        query, key = query[None, None], key[None, None]
    else:
        # Batch dimensions may broadcast. Keys are not expanded over the heads of a group.
        query = query.expand(*output.shape[:-2], *query.shape[-2:]).flatten(0, -4)
        key = key.expand(*output.shape[:-3], *key.shape[-3:]).flatten(0, -4)
    return Operands(
        output.transpose(-3, -2) if output.dim() > 3 else output,
        query,
        key,
        mask,
        is_causal=bool(is_causal),
        scale=scale,
        same_tokens=same_tokens or None,
    )


def of_interface(
    kind: str,
    module: Any,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Any,
    *,
    is_causal: bool | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Operands | str:
    """Return the operands of the attention "sdpa" or "flex_attention" of transformers."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask  # slow to import

    if isinstance(mask, BlockMask):
        B, H = query.shape[0], query.shape[1]
        batch, per_head = mask.shape[0], mask.shape[1]
        mask = create_mask(
            mask.mask_mod,
            B if batch > 1 else None,
            H if per_head > 1 else None,
            query.shape[2],
            key.shape[2],
            device=str(query.device),
        )
    if reason := _unreadable(query, key, mask):
        return reason
    # transformers' "sdpa" is causal by itself only without a mask, and not for a single query.
    # Keys beyond the last query are then free places of a cache.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and kind == "sdpa_attention_forward" and mask is None and query.shape[2] > 1
    return Operands(
        output,
        query.expand(len(output), -1, -1, -1),
        key[:, :, : query.shape[2]] if causal else key,
        mask,
        is_causal=causal,
        scale=scaling,
        softcap=softcap,
        sink=s_aux,
        bias=position_bias,
    )


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


def of_multi_head(multi_head: Any, output: Any, *args: Any, **keywords: Any) -> Operands | str:
    """Return the operands of ``multi_head_attention_forward``, which is called a second time.

    This call returns the weights of every head without dropout. Its output projection is the
    identity, so it also returns the attention outputs.
    """
    bound = _MULTI_HEAD.bind(*args, **keywords)
    bound.apply_defaults()
    given = bound.arguments
    query, attn_mask = given["query"], given["attn_mask"]
    if reason := _unreadable(query, given["key"], attn_mask):
        return reason
    same_tokens = is_same_tensor(query, given["key"]) or None
    # Under autocast, inputs and weights may have different dtypes.
    dtype = compute_dtype(torch.promote_types(query.dtype, given["out_proj_weight"].dtype))
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            given[name] = x.to(dtype)
    given |= {
        "out_proj_weight": torch.eye(query.shape[-1], dtype=dtype, device=query.device),
        "out_proj_bias": None,
        "training": False,
        "need_weights": True,
        "average_attn_weights": False,
    }
    averages, weights = multi_head(**given)
    if query.dim() == 2:
        averages, weights = averages[:, None], weights[None]
    B, H, L, S = weights.shape
    allowed = weights.new_ones(1, 1, 1, S, dtype=torch.bool)
    for mask, shape in (
        (attn_mask, (-1, 1 if attn_mask is None or attn_mask.dim() == 2 else H, L)),
        (given["key_padding_mask"], (B, 1, 1)),
    ):
        if mask is not None:
            seen = ~mask if mask.dtype == torch.bool else mask > _least(mask.dtype)
            extra_keys = S - mask.shape[-1]  # of add_bias_kv and add_zero_attn
            seen = functional.pad(seen.view(*shape, mask.shape[-1]), (0, extra_keys), value=True)
            allowed = allowed & seen
    return Operands(
        averages.transpose(0, 1), weights=weights, mask=allowed, same_tokens=same_tokens
    )


def _least(dtype: torch.dtype) -> float:
    """Return the number such that a key with a smaller number in its mask may not be seen."""
    return torch.finfo(dtype).min / 2


def _unreadable(query: Any, key: Any, mask: Any) -> str:
    """Return the reason why weights cannot be computed from these; "" if they can."""
    for part in (query, key, mask):
        if part is None:
            continue
        if not isinstance(part, Tensor):
            return f"its mask is a {type(part).__name__}"
        if part.is_nested:
            return "its tensors are nested"
        if part.is_meta:
            return "its tensors are on the device meta"
        try:
            part.data_ptr()
        except RuntimeError:
            return "its tensors have no memory, as inside a transform of torch.func"
    return ""
