"""Attention over complete and causal graphs by torch's fused attention, where that is fastest.

Fused attention knows scaled dot products and a mask. The logit of a Gaussian kernel is
``s q . k - s |k|^2 / 2`` but for a number per row, so -s |k|^2 / 2 is its mask, or one more
feature of the keys where its gradient is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.structures.structure import Band, Complete, GraphStructure
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import featurewise
from graphattn.ops.attention.calls import Inputs
from graphattn.ops.attention.structured.recompute import Gradients, Plan, PlanOptions
from graphattn.ops.inputs import repeat_heads

NEVER = 1 << 62
# The largest scale * |q| |k| that is left to fused attention, because its backward pass rounds
# logits in another way than its forward pass. Those of a Gaussian kernel are differences, too.
LARGEST = {"dot": 1024.0, "rbf": 64.0}
# From how many targets and sources on fused attention is faster than the C++ code of each
# instruction set: over complete graphs, the same for more than 64 features, and both over causal
# graphs (docs/log.md, "whole sequences"). It always is faster than operations of torch.
FEWEST = {
    ("AVX-512", "dot"): (4096, 512, NEVER, 4096), ("AVX-512", "rbf"): (512, 512, NEVER, 4096),
    ("AVX2", "dot"): (128, 128, 1024, 1024), ("AVX2", "rbf"): (256, 128, 1024, 1024),
    ("baseline", "dot"): (128, 64, 1024, 512), ("baseline", "rbf"): (128, 64, 1024, 512),
}  # fmt: skip
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns log-sums, too
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def suits(structure: GraphStructure, options: PlanOptions) -> bool:
    """Whether fused attention knows a graph, which has edges, and all options."""
    match structure:
        case Complete():
            known = structure.num_edges() > 0
        case Band(num_tokens, before, 0, dilation=1, self_loops=True):
            known = 0 < num_tokens <= before + 1
        case _:
            known = False
    plain = options == PlanOptions(options.score)
    return known and plain and options.score in LARGEST


@dataclass
class WholePlan(Plan):
    """Attention over a complete or causal graph; see :class:`~.recompute.Plan`.

    `other` computes what fused attention cannot: few tokens, what is differentiated twice, and
    rows that are not *sound*, because numbers that they see are too large or not finite. What a row
    does not see decides nothing. Saved are the log-sums of fused attention, infinite for rows that
    are not sound, and if there are any, what `other` saves.
    """

    other: Plan
    options: PlanOptions
    compiled: bool  # whether `other` is C++ code
    causal: bool  # whether the graph is causal, or complete

    @property
    def saved_per_head(self) -> int:
        return self.other.saved_per_head + 1

    def is_faster(self, inputs: Inputs) -> bool:
        """Whether fused attention is faster than `other`."""
        if not self.compiled:
            return True
        fewest = FEWEST[library.instruction_set() or "baseline", str(self.options.score)]
        tokens = min(inputs.query.shape[-3], inputs.key.shape[-3])
        return tokens >= fewest[2 * self.causal + (inputs.query.shape[-1] > 64)]

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and what is saved."""
        if not self.is_faster(inputs):
            return self.other.forward(inputs)
        operands = _Operands.of(inputs, self.options.score, self.causal)
        sound = operands.sound_rows()
        if sound is not None:
            operands = operands.without(~sound)
        out, fused_lse = operands.attend()
        empty = self._rows_without_edges(inputs)
        if empty is not None:
            out, fused_lse = out.masked_fill(empty[..., None], 0), fused_lse.masked_fill(empty, 0)
        of_query = operands.half_squares(0)
        lse = fused_lse if of_query is None else fused_lse + of_query.transpose(1, 2)
        if empty is not None:
            lse = lse.masked_fill(empty, -torch.inf)
        if sound is None:
            return out.contiguous(), lse.contiguous(), fused_lse.contiguous()
        sound = sound.transpose(1, 2)
        other_out, other_lse, of_other = self.other.forward(inputs)
        out = torch.where(sound[..., None], out, other_out)
        lse = torch.where(sound, lse, other_lse)
        return out, lse, torch.cat([fused_lse.masked_fill(~sound, torch.inf), of_other], dim=-1)

    def _rows_without_edges(self, inputs: Inputs) -> Tensor | None:
        """Mark targets that are invalid or see no valid source, bool [B, N, 1]; None: none."""
        of_target, of_source, _ = inputs.masks
        alone = None
        if of_source is not None:
            alone = of_source.cumsum(-1) == 0 if self.causal else ~of_source.any(-1, keepdim=True)
        if of_target is None:
            return None if alone is None else alone[..., None]
        return (~of_target if alone is None else alone | ~of_target)[..., None]

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs; fused attention computes the logits of every tile again."""
        H = out.shape[2]
        if not self.is_faster(inputs):
            width = H * self.other.saved_per_head
            saved = saved[..., :width] if saved.shape[-1] > width else saved  # an operator pads
            return self.other.backward(inputs, out, saved, d_out, d_lse)
        lse, of_other = saved[..., :H], saved[..., H:]
        sound, upstream = lse != torch.inf, (out, d_out, d_lse)
        if bool(sound.all()):
            return self._by_fused(inputs, lse, None, *upstream)
        if not bool(sound.any()):
            return self.other.backward(inputs, out, of_other, d_out, d_lse)
        lse = lse.masked_fill(~sound, 0)
        by_fused = self._by_fused(inputs, lse, sound, *(_among(sound, x) for x in upstream))
        _, d_out, d_lse = (_among(~sound, x) for x in upstream)
        by_other = self.other.backward(inputs, out, of_other, d_out, d_lse)
        query, key, value, scale = (a + b for a, b in zip(by_fused[:4], by_other[:4], strict=True))
        return query, key, value, scale, None

    def _by_fused(
        self,
        inputs: Inputs,
        lse: Tensor,
        sound: Tensor | None,
        out: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
    ) -> Gradients:
        empty = self._rows_without_edges(inputs)
        if empty is not None:
            d_out, d_lse = _among(~empty, d_out), _among(~empty, d_lse)
        operands = _Operands.of(inputs, self.options.score, self.causal)
        if sound is not None:
            operands = operands.without(~sound.transpose(1, 2))
        return operands.gradients(out, lse, d_out, d_lse)

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        return self.other.backward_from_log_sums(inputs, out, lse, d_out, d_lse)

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.other.by_autograd(inputs)


def _among(rows: Tensor, x: Any) -> Any:
    """x [B, N, H, ...] with zeros outside of these rows [B, N, H]; None if x is."""
    if x is None:
        return None
    return x.masked_fill(~(rows[..., None] if x.dim() > rows.dim() else rows), 0)


@dataclass
class _Operands:
    """Tensors of fused attention, [B, H, tokens, features], in which heads come before tokens.

    Attributes:
        kv_heads: Hk; key and value are repeated for the query heads that share them.
        query, key, value: query and key of a Gaussian kernel minus a centre that all rows see.
        score: "dot" or "rbf".
        scales: the factor of the logits, [H, 1, 1].
        scale: the same as a number, or None if heads differ.
        norms: |x| of queries and keys of a Gaussian kernel, [B, H, tokens]; None for dot products.
        mask: 0 for valid sources and -inf for others, [B, 1, 1, M]; None if all are valid.
        causal: whether row i sees the keys up to i, or all.
    """

    kv_heads: int
    query: Tensor
    key: Tensor
    value: Tensor
    score: Any
    scales: Tensor
    scale: float | None
    norms: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    causal: bool

    @classmethod
    def of(cls, inputs: Inputs, score: Any, causal: bool) -> _Operands:
        """The operands of a call."""
        H, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
        query, key, value = (repeat_heads(x, H).transpose(1, 2) for x in inputs[:3])
        mask, norms, of_source = None, None, inputs.masks.sources
        if score == "rbf":
            centre = key[:, :, :1] if causal else key.mean(2, keepdim=True)
            query, key = query - centre, key - centre
            norms = _norms(query), _norms(key)
        if of_source is not None:
            mask = query.new_zeros(of_source.shape).masked_fill_(~of_source, -torch.inf)
            mask = mask[:, None, None]
        numbers, scales = set(inputs.scale.tolist()), inputs.scale[:, None, None]
        scale = numbers.pop() if len(numbers) == 1 else None
        return cls(kv_heads, query, key, value, score, scales, scale or None, norms, mask, causal)

    def sound_rows(self) -> Tensor | None:
        """Whether the numbers that a row sees are finite and not too large, [B, H, N].

        The result is None if they are in all rows, which the largest numbers alone often tell.
        """
        most = LARGEST[self.score]
        if self.query.numel() and self.key.numel() and self.value.numel():
            of_value = self.value.sum()  # NaN if one number is, in place of which others may be
            if self.norms is None:
                of_query, of_key = (
                    torch.maximum(x.amax(), -x.amin()) for x in (self.query, self.key)
                )
                of_query = of_query * self.query.shape[-1]
            else:
                of_query, of_key = (x.amax() for x in self.norms)
            largest = of_query * of_key * self.scales.abs().amax()
            if bool((largest <= most) & of_key.square().isfinite() & of_value.isfinite()):
                return None
        of_query, of_key = self.norms or (_norms(self.query), _norms(self.key))
        of_value = self.value.sum(-1)
        of_key = of_key.cummax(-1).values if self.causal else of_key.amax(-1, keepdim=True)
        total = of_value.cumsum(-1) if self.causal else of_value.sum(-1, keepdim=True)
        largest = of_query * of_key * self.scales[..., 0].abs()
        # Comparisons with NaN are false.
        sound = (largest <= most) & of_key.square().isfinite() & total.isfinite()
        return None if bool(sound.all()) else sound

    def without(self, unsound: Tensor) -> _Operands:
        """Replace queries of these rows by 0, and keys and values that are not finite."""
        bad = ~(_norms(self.key).isfinite() & self.value.sum(-1).isfinite())
        query = self.query.masked_fill(unsound[..., None], 0)
        key, value = (x.masked_fill(bad[..., None], 0) for x in (self.key, self.value))
        norms = self.norms and (_norms(query), _norms(key))
        return replace(self, query=query, key=key, value=value, norms=norms)

    def half_squares(self, of: int) -> Tensor | None:
        """-scale |x|^2 / 2 of queries (0) or keys (1), [B, H, tokens]; None for dot products."""
        return None if self.norms is None else self.norms[of].square() * (self.scales[..., 0] / -2)

    def scaled(self) -> tuple[Tensor, float]:
        """Queries, and a number: the logits are their products with keys times this."""
        return (self.query * self.scales, 1.0) if self.scale is None else (self.query, self.scale)

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output [B, N, H, Dv] and log-sums [B, N, H], without half squares of queries."""
        mask, of_key, (query, scale) = self.mask, self.half_squares(1), self.scaled()
        if of_key is not None:
            mask = of_key[:, :, None] if mask is None else mask + of_key[:, :, None]
        width = max(query.shape[-1], self.value.shape[-1])
        tensors = [_widened(x, width) for x in (query, self.key, self.value)]
        out, lse = FUSED(*tensors, is_causal=self.causal, attn_mask=mask, scale=scale)
        return out[..., : self.value.shape[-1]].transpose(1, 2), lse.transpose(1, 2)

    def gradients(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Gradients:
        """Gradients of the inputs, from tensors [B, N, H, ...].

        One more feature carries what fused attention does not know. In `out` it is -d_lse and in
        `d_out` 1, because the gradient of a log-sum enters where the sum of out * d_out does. In
        queries of a Gaussian kernel it is 1 and in keys the half square, whose gradient is the sum
        of the gradients of all logits of a key.
        """
        D, Dv = self.query.shape[-1], self.value.shape[-1]
        out, lse, d_out = (x.transpose(1, 2) for x in (out, lse[..., None], d_out))
        (scaled, scale), query, key, value = self.scaled(), self.query, self.key, self.value
        of_key = self.half_squares(1)
        if of_key is not None:
            scaled = torch.cat([scaled, torch.ones_like(lse)], dim=-1)
            key = torch.cat([key, of_key[..., None] / scale], dim=-1)
        if d_lse is not None:
            d_lse = d_lse.transpose(1, 2)[..., None]
            out = torch.cat([out, -d_lse], dim=-1)
            d_out = torch.cat([d_out, torch.ones_like(d_lse)], dim=-1)
        width = max(scaled.shape[-1], out.shape[-1])
        tensors = [_widened(x, width) for x in (d_out, scaled, key, value, out)]
        d_scaled, d_key, d_value = FUSED_BACKWARD(
            *tensors, lse[..., 0].contiguous(), 0.0, self.causal, attn_mask=self.mask, scale=scale
        )
        pull, d_key = d_key[..., D : D + 1] / scale, d_key[..., :D]
        d_scaled, d_value = d_scaled[..., :D], d_value[..., :Dv]
        d_query = d_scaled if self.scale else d_scaled * self.scales
        d_scale = (d_scaled * query).sum((0, 2, 3)) / scale
        if self.norms is not None:
            d_key = d_key - self.key * pull * self.scales
            of_query, of_key = (norms.square() for norms in self.norms)
            d_scale = d_scale - (of_key * pull[..., 0]).sum((0, 2)) / 2
            if d_lse is not None:
                d_query = d_query - query * d_lse * self.scales
                d_scale = d_scale - (of_query * d_lse[..., 0]).sum((0, 2)) / 2
        d_key, d_value = (
            x.unflatten(1, (self.kv_heads, -1)).sum(2) if self.kv_heads < x.shape[1] else x
            for x in (d_key, d_value)
        )
        return (
            d_query.transpose(1, 2),
            d_key.transpose(1, 2),
            d_value.transpose(1, 2),
            d_scale,
            None,
        )


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _widened(x: Tensor, width: int) -> Tensor:
    """x with zeros added to its features, which lie side by side.

    Fused attention is fast only if all widths are equal, and reads features as if side by side.
    """
    return functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else featurewise(x)
