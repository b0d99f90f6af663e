"""Attention over complete graphs by torch's fused attention, the fastest there is on every CPU.

Fused attention knows scaled dot products and a mask. The logit of a Gaussian kernel is
``s q . k - s |k|^2 / 2``, but for a number per row, so -s |k|^2 / 2 is its mask, or one more
feature of the keys where its gradient is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.ops.attention.structured.options import PlanOptions
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    Plan,
    backward_from_log_sums,
    saved_per_head,
)
from graphattn.ops.inputs import repeat_heads

FEWEST = 16  # targets: for fewer, fused attention is not the fastest
# The largest scale * |q| |k| that is left to it, because the backward pass rounds logits in another
# way than the forward pass. Those of a Gaussian kernel also are differences of such numbers.
LARGEST_DOT, LARGEST_RBF = 1024.0, 64.0
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # with log-sums
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def suits_fused(options: PlanOptions) -> bool:
    """Whether a call has no option that fused attention does not know."""
    known = options.score in ("dot", "rbf")
    return known and (options.top_k, options.softcap, options.dropout) == (None, None, None)


@dataclass
class WholePlan:
    """Attention over a complete graph; see :class:`~.recompute.Plan`.

    `other` computes what fused attention cannot: numbers that are not finite or too large, few
    targets, and what is differentiated twice. Whether fused attention computed a call is the last
    number of what is saved.
    """

    other: Plan
    options: PlanOptions

    @property
    def saved_per_head(self) -> int:
        return saved_per_head(self.other) + 1

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and what the backward pass reads: log-sums as fused attention has them.

        Log-sums of a Gaussian kernel lack -s |q|^2 / 2 there.
        """
        query = inputs[0]
        (B, N, H, _), count = query.shape, self.saved_per_head
        operands = _Operands.of(inputs, self.options) if N >= FEWEST else None
        if operands is None:
            out, lse, saved = self.other.forward(inputs)
            return out, lse, torch.cat([saved, saved.new_zeros(B, N, H)], dim=-1)
        out, lse = operands.attend()
        saved = query.new_zeros(B, N, H * count)
        saved[..., :H] = lse
        saved[..., -1] = 1
        of_query, empty = operands.half_squares(0), self._rows_without_edges()
        if of_query is not None:
            lse = lse + of_query.transpose(1, 2)
        if empty is not None:
            out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
        return out.contiguous(), lse.contiguous(), saved

    def _rows_without_edges(self) -> Tensor | None:
        """Mark invalid targets, and all of a sample without valid sources, bool [B, N, 1]."""
        of_target, of_source = self.options.valid
        alone = None if of_source is None else ~of_source.any(-1, keepdim=True)
        if of_target is None:
            return None if alone is None else alone[..., None]
        return (~of_target if alone is None else alone | ~of_target)[..., None]

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs; fused attention computes the logits of every tile again."""
        H = out.shape[2]
        if saved.numel() == 0 or not bool(saved[0, 0, -1]):
            return self.other.backward(inputs, out, saved[..., :-H], d_out, d_lse)
        operands, empty = _Operands.of(inputs, self.options), self._rows_without_edges()
        if empty is not None:
            d_out = d_out.masked_fill(empty[..., None], 0)
            d_lse = None if d_lse is None else d_lse.masked_fill(empty, 0)
        if operands is not None:
            gradients = operands.gradients(out, saved[..., :H], d_out, d_lse)
            if gradients is not None:
                return gradients
        out, _, saved = self.other.forward(inputs)
        return self.other.backward(inputs, out, saved, d_out, d_lse)

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        return backward_from_log_sums(self.other, inputs, out, lse, d_out, d_lse)

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.other.by_autograd(inputs)


@dataclass
class _Operands:
    """Tensors of fused attention, [B, H, tokens, features], in which heads come before tokens.

    Attributes:
        kv_heads: Hk; key and value are repeated for the query heads that share them.
        query, key, value: query and key of a Gaussian kernel minus the mean of all keys.
        scale: [H, 1, 1], by which queries are multiplied.
        squares: |x|^2 of queries and keys of a Gaussian kernel, [B, H, tokens]; None for dot
            products.
        mask: 0 for valid sources and -inf for others, [B, 1, 1, M]; None if all are valid.
    """

    kv_heads: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    squares: tuple[Tensor, Tensor] | None
    mask: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs, options: PlanOptions) -> _Operands | None:
        """The operands of a call; None if its numbers are not finite, or too large."""
        H, kv_heads, scale = inputs[0].shape[2], inputs[1].shape[2], inputs[3][:, None, None]
        query, key, value = (repeat_heads(x, H).transpose(1, 2) for x in inputs[:3])
        is_rbf, of_source = options.score == "rbf", options.valid[1]
        if is_rbf:  # all queries see all keys, so no query sees what it must not
            centre = key.mean(2, keepdim=True)
            query, key = query - centre, key - centre
        norms = [torch.linalg.vector_norm(x, dim=-1) for x in (query, key)]
        products = norms[0].amax(-1) * norms[1].amax(-1) * scale[:, 0, 0].abs()
        if not bool((products <= (LARGEST_RBF if is_rbf else LARGEST_DOT)).all()):  # or NaN
            return None
        mask = None
        if of_source is not None:
            mask = query.new_zeros(of_source.shape).masked_fill_(~of_source, -torch.inf)
            mask = mask[:, None, None]
        squares = (norms[0].square_(), norms[1].square_()) if is_rbf else None
        return cls(kv_heads, query, key, value, scale, squares, mask)

    def half_squares(self, of: int) -> Tensor | None:
        """-scale |x|^2 / 2 of queries (0) or keys (1), [B, H, tokens]; None for dot products."""
        return None if self.squares is None else self.squares[of] * (self.scale[..., 0] / -2)

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output [B, N, H, Dv] and log-sums [B, N, H], without half squares of queries."""
        mask, of_key = self.mask, self.half_squares(1)
        if of_key is not None:
            mask = of_key[:, :, None] if mask is None else mask + of_key[:, :, None]
        width = max(self.query.shape[-1], self.value.shape[-1])
        tensors = [_widened(x, width) for x in (self.query * self.scale, self.key, self.value)]
        out, lse = FUSED(*tensors, attn_mask=mask, scale=1.0)
        return out[..., : self.value.shape[-1]].transpose(1, 2), lse.transpose(1, 2)

    def gradients(
        self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients | None:
        """Gradients of the inputs from tensors [B, N, H, ...]; None if some are not finite.

        One more feature carries what fused attention does not know. In `out` it is -d_lse and in
        `d_out` 1, because the gradient of a log-sum enters where the sum of out * d_out does. In
        queries of a Gaussian kernel it is 1 and in keys the half square, whose gradient is the sum
        of the gradients of all logits of a key.
        """
        D, Dv = self.query.shape[-1], self.value.shape[-1]
        out, lse, d_out = (x.transpose(1, 2) for x in (out, lse[..., None], d_out))
        query, key, value, scaled = self.query, self.key, self.value, self.query * self.scale
        of_key = self.half_squares(1)
        if of_key is not None:
            scaled = torch.cat([scaled, torch.ones_like(lse)], dim=-1)
            key = torch.cat([key, of_key[..., None]], dim=-1)
        if d_lse is not None:
            d_lse = d_lse.transpose(1, 2)[..., None]
            out = torch.cat([out, -d_lse], dim=-1)
            d_out = torch.cat([d_out, torch.ones_like(d_lse)], dim=-1)
        width = max(scaled.shape[-1], out.shape[-1])
        tensors = [_widened(x, width) for x in (d_out, scaled, key, value, out)]
        d_scaled, d_key, d_value = FUSED_BACKWARD(
            *tensors, lse[..., 0].contiguous(), 0.0, False, attn_mask=self.mask, scale=1.0
        )
        d_scaled, d_value = d_scaled[..., :D], d_value[..., :Dv]
        d_query, d_scale = d_scaled * self.scale, (d_scaled * query).sum((2, 3))
        if self.squares is not None:
            pull, d_key = d_key[..., D : D + 1], d_key[..., :D]
            d_key = d_key - self.key * pull * self.scale
            d_scale = d_scale - (self.squares[1] * pull[..., 0]).sum(2) / 2
            if d_lse is not None:
                d_query = d_query - query * d_lse * self.scale
                d_scale = d_scale - (self.squares[0] * d_lse[..., 0]).sum(2) / 2
        else:
            d_key = d_key[..., :D]
        if not all(math.isfinite(x.sum()) for x in (d_query, d_key, d_value)):
            return None
        d_key, d_value = (
            x.unflatten(1, (self.kv_heads, -1)).sum(2) if self.kv_heads < x.shape[1] else x
            for x in (d_key, d_value)
        )
        d_query, d_key, d_value = (x.transpose(1, 2) for x in (d_query, d_key, d_value))
        return d_query, d_key, d_value, d_scale.sum(0), None


def _widened(x: Tensor, width: int) -> Tensor:
    """x with zeros added to its features: fused attention is fast only if all widths are equal."""
    return functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
