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
                allowed = rows > torch.finfo(rows.dtype).min / 2
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


# Operands from the arguments of a call.


def of_sdpa(
    output: Tensor,
    caller_query: Tensor | None,
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
    """Return the operands of ``scaled_dot_product_attention``, without dropout.

    The result is a string with the reason if the weights cannot be computed.
    """
    if reason := _unreadable(query, key, attn_mask):
        return reason
    if attn_mask is not None and type(attn_mask) is not Tensor:
        materialize = getattr(attn_mask, "_materialize", None)  # torch.nn.attention.bias
        if materialize is None:
            return f"its mask is a {type(attn_mask).__name__}"
        attn_mask = materialize(query.device)
    same_tokens = (is_causal and query.shape[-2] == key.shape[-2]) or are_parts_of_one(query, key)
    packed = (
        caller_query is not None
        and caller_query.dim() == query.dim() == 4
        and caller_query.shape[2] == 1
        and caller_query.shape[1] == query.shape[1] * query.shape[2]
        and query.shape[2] > 1
    )
    if attn_mask is not None:
        mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
        if query.dim() == 3:
            mask = mask[:, None]
        elif query.dim() > 4:
            mask = mask.expand(*output.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        if packed and mask.shape[1] > 1:
            mask = mask.flatten(1, 2)[:, :, None]
        elif packed and mask.shape[2] > 1:
            mask = mask.mT.reshape(mask.shape[0], 1, 1, -1)
    else:
        mask = None
    if query.dim() == 3:  # a batch with one head
        query = query.expand(*output.shape[:-2], *query.shape[-2:])[:, None]
        key = key.expand(*output.shape[:-2], *key.shape[-2:])[:, None]
    elif query.dim() == 2:
        query, key = query[None, None], key[None, None]
    else:
        # Batch dimensions may broadcast. Keys are not expanded over the heads of a group.
        query = query.expand(*output.shape[:-2], *query.shape[-2:]).flatten(0, -4)
        key = key.expand(*output.shape[:-3], *key.shape[-3:]).flatten(0, -4)
    if packed:  # For a single query, transformers puts the heads of a group into the query axis.
        query = query.flatten(1, 2)[:, :, None]
    if output.dim() == 4 and packed:
        output = output.flatten(1, 2)[:, :, None]
    return Operands(
        _tokens_first(output),
        query,
        key,
        mask,
        is_causal=bool(is_causal),
        scale=scale,
        same_tokens=same_tokens or None,
    )


def of_flex(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Operands | str:
    """Return the operands of ``flex_attention_forward`` of transformers, or a reason."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

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
    return Operands(
        output,
        query,
        key,
        mask,
        scale=scaling,
        softcap=softcap,
        sink=s_aux,
        bias=position_bias,
    )


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


def of_multi_head(output: Tensor, *args: Any, **keywords: Any) -> Operands | str:
    """Return the operands of ``multi_head_attention_forward`` with weights, or a reason."""
    bound = _MULTI_HEAD.bind(*args, **keywords)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = given["query"], given["key"], given["value"]
    heads, same_tokens = given["num_heads"], is_same_tensor(query, key) or None
    if reason := _unreadable(query, key, given["attn_mask"]):
        return reason
    padding = given["key_padding_mask"]
    if query.dim() == 2:
        query, key, value = query[:, None], key[:, None], value[:, None]
        padding = None if padding is None else padding[None]
    biases = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        matrices = tuple(given[f"{part}_proj_weight"] for part in "qkv")
    else:
        matrices = given["in_proj_weight"].chunk(3)
    q = _linear(query, matrices[0], _third(biases, 0))
    L, B, E = q.shape

    def sources(x: Tensor, which: int, extra: Tensor | None, static: Tensor | None) -> Tensor:
        """Return keys or values [B, H, K, D]."""
        x = _linear(x, matrices[which], _third(biases, which))
        if extra is not None:
            x = torch.cat([x, extra.expand(1, B, E)])
        if static is None:
            x = x.view(len(x), B, heads, -1).permute(1, 2, 0, 3)
        else:
            x = static.view(B, heads, -1, E // heads)
        if given["add_zero_attn"]:
            x = torch.cat([x, x.new_zeros(B, heads, 1, x.shape[-1])], dim=2)
        return x

    k = sources(key, 1, given["bias_k"], given["static_k"])
    K = k.shape[2]
    mask: Tensor | None = None
    for part, shape in (
        (given["attn_mask"], (-1, heads if _dim(given["attn_mask"]) == 3 else 1, L)),
        (padding, (B, 1, 1)),
    ):
        if part is None:
            continue
        added = (
            torch.zeros_like(part, dtype=q.dtype).masked_fill(part, -torch.inf)
            if (part.dtype == torch.bool)
            else part
        )
        added = functional.pad(added.view(*shape, part.shape[-1]), (0, K - part.shape[-1]))
        mask = added if mask is None else mask + added
    q = q.view(L, B, heads, -1).permute(1, 2, 0, 3)
    operands = Operands(output, q, k, mask, same_tokens=same_tokens)
    return _with_averages(operands, sources(value, 2, given["bias_v"], given["static_v"]))


def of_native_multi_head(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> Operands | str:
    """Return the operands of torch's fused attention in inference, or a reason.

    Its mask is True for keys that may not be seen.
    """
    if query.is_nested:
        return _of_nested(query, num_heads, in_weight, in_bias, output)
    if reason := _unreadable(query, key, mask):
        return reason
    q, k = _projected(query, key, num_heads, in_weight, in_bias)
    same_tokens = is_same_tensor(query, key) or None
    operands = Operands(output, q, k, _as_allowed(mask, mask_type), same_tokens=same_tokens)
    return _with_averages(operands, _values(value, num_heads, in_weight, in_bias))


def of_encoder_layer(
    source: Tensor,
    embed_dim: int,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *rest: Any,
) -> Operands | str:
    """Return the operands of torch's fused transformer layer in inference, or a reason.

    The last entries of `rest` are the mask and its type.
    """
    mask, mask_type = rest[6], rest[7]
    if not source.is_nested and (reason := _unreadable(source, source, mask)):
        return reason

    def normal(x: Tensor) -> Tensor:
        weight, bias = norm_weight.to(x.dtype), norm_bias.to(x.dtype)
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    if source.is_nested:
        return _of_nested(
            source, num_heads, in_weight, in_bias, None, normal if norm_first else None
        )
    x = normal(source) if norm_first else source
    q, k = _projected(x, x, num_heads, in_weight, in_bias)
    operands = Operands(source, q, k, _as_allowed(mask, mask_type), same_tokens=True)
    return _with_averages(operands, _values(x, num_heads, in_weight, in_bias))


def _of_nested(
    query: Tensor,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    output: Tensor | None,
    normal: Any = None,
) -> Operands:
    """Return the operands for nested tensors, into which torch's encoder packs padded sequences."""
    lengths = torch.tensor([len(part) for part in query.unbind()], device=query.device)
    x = query.to_padded_tensor(0.0)
    x = x if normal is None else normal(x)
    q, k = _projected(x, x, num_heads, in_weight, in_bias)
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    mask = real[:, None, None] & real[:, None, :, None]
    operands = Operands(x, q, k, mask, same_tokens=True)
    return _with_averages(operands, _values(x, num_heads, in_weight, in_bias))


def _with_averages(operands: Operands, value: Tensor) -> Operands:
    """Set the output to the attention before the output projection, which is computed again."""
    value = value.to(operands.dtype)
    averages = [operands.rows(a, b) @ value for a, b in operands.blocks()]
    operands.output = _tokens_first(torch.cat(averages, dim=2))
    return operands


def _projected(
    query: Tensor, key: Tensor, heads: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    q = _linear(query, weight.chunk(3)[0], _third(bias, 0))
    k = _linear(key, weight.chunk(3)[1], _third(bias, 1))
    return _heads(q, heads), _heads(k, heads)


def _values(x: Tensor, heads: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _heads(_linear(x, weight.chunk(3)[2], _third(bias, 2)), heads)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a projection in one dtype, because under autocast inputs and weights may differ."""
    dtype = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    return functional.linear(
        x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    )


def _third(bias: Tensor | None, which: int) -> Tensor | None:
    return None if bias is None else bias.chunk(3)[which]


def _heads(x: Tensor, heads: int) -> Tensor:
    """Split [B, N, E] into heads [B, H, N, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _tokens_first(output: Tensor) -> Tensor:
    """Transpose [B, H, N, D] to [B, N, H, D]."""
    return output.transpose(-3, -2) if output.dim() > 3 else output


def _as_allowed(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Convert a mask of torch's fused functions to one that is True for allowed keys."""
    if mask is None:
        return None
    allowed = ~mask.to(torch.bool)
    return allowed[:, None, None] if mask_type == 1 else allowed


def _dim(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.dim()


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
        if torch._C._functorch.is_functorch_wrapped_tensor(part):
            return "it runs inside a transform of torch.func"
    return ""
