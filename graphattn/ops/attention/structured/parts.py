"""Plans that combine other plans: of several sequences, of reordered tokens, of global tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphattn.ops.attention.merge import merged
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    Plan,
    saved_per_head,
    unused_rows,
    zeros_like,
)

Result = tuple[Tensor, Tensor]


@dataclass
class PartsPlan:
    """Attention over several sequences: one plan for each, with its targets and sources.

    A bias, if there is one, is a table that all sequences share.
    """

    parts: list[tuple[Plan, slice, slice]]

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        results = [plan.forward(_some(inputs, t, s)) for plan, t, s in self.parts]
        outs, sums, saved = zip(*results, strict=True)
        most = max(x.shape[-1] for x in saved)
        padded = [pad(x, (0, most - x.shape[-1])) for x in saved]
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1), torch.cat(padded, dim=1)

    @property
    def saved_per_head(self) -> int:
        """The largest number that a part saves; the others are padded to it."""
        return max(saved_per_head(plan) for plan, _, _ in self.parts)

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        sums = zeros_like(inputs)
        for plan, t, s in self.parts:
            own = saved[:, t, : out.shape[2] * saved_per_head(plan)]
            of_rows = out[:, t], own, d_out[:, t], None if d_lse is None else d_lse[:, t]
            _add(_some(sums, t, s), plan.backward(_some(inputs, t, s), *of_rows))
        return sums

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        results = [plan.by_autograd(_some(inputs, t, s)) for plan, t, s in self.parts]
        outs, sums = zip(*results, strict=True)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


@dataclass
class ReorderedPlan:
    """Attention over reordered tokens, in whose order the sources of a target are neighbours.

    Targets and sources are the same tokens. A bias, if there is one, is a table that does not
    depend on the order.
    """

    tokens: Tensor  # [N], the token at every place
    places: Tensor  # [N], the place of every token
    ordered: Plan

    @property
    def saved_per_head(self) -> int:
        return saved_per_head(self.ordered)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, saved = self.ordered.forward(self._in_order(inputs))
        return self._back(out), self._back(lse), self._back(saved)

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        out, saved, d_out = (x.index_select(1, self.tokens) for x in (out, saved, d_out))
        d_lse = None if d_lse is None else d_lse.index_select(1, self.tokens)
        found = self.ordered.backward(self._in_order(inputs), out, saved, d_out, d_lse)
        d_query, d_key, d_value = (self._back(x) for x in found[:3])
        return d_query, d_key, d_value, *found[3:]

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = self.ordered.by_autograd(self._in_order(inputs))
        return self._back(out), self._back(lse)

    def _in_order(self, inputs: Inputs) -> Inputs:
        query, key, value = (x.index_select(1, self.tokens) for x in inputs[:3])
        return query, key, value, *inputs[3:]

    def _back(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.places)


@dataclass
class GlobalTokensPlan:
    """Attention with global tokens, which see all tokens and are seen by all tokens.

    The edges are three disjoint sets:

    - `near`: edges between tokens that are not global;
    - `far`: a token that is not global sees the global tokens;
    - `own`: a global token sees all tokens.

    The rows of the first two are the same, and their results are merged by their log-sums.

    `tokens` are the indices of the global tokens as targets, `sources` those as sources. They
    differ in a section of a graph, where some global tokens may be sources and not targets.
    """

    tokens: Tensor
    sources: Tensor
    near: Plan
    far: Plan
    own: Plan

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        near, far = self.near.forward(inputs), self.far.forward(self._seen_far(inputs))
        out, lse = self._merged(near[:2], far[:2], self.own.forward(self._of_tokens(inputs))[:2])
        return out, lse, lse

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        far, own = self._seen_far(inputs), self._of_tokens(inputs)
        return self._merged(
            self.near.by_autograd(inputs), self.far.by_autograd(far), self.own.by_autograd(own)
        )

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Differentiate out = sum_p share_p out_p, share_p = exp(lse_p - lse), p = near and far."""
        tokens, sums = self.tokens, zeros_like(inputs)
        query, key, value, scale, _ = sums
        own = self._of_tokens(inputs)
        own_out, _, own_saved = self.own.forward(own)
        own_d_lse = None if d_lse is None else d_lse.index_select(1, tokens)
        d_own = self.own.backward(own, own_out, own_saved, d_out.index_select(1, tokens), own_d_lse)
        query.index_add_(1, tokens, d_own[0])
        _add(sums[1:], d_own[1:])
        d_out = d_out.index_fill(1, tokens, 0)
        lse = saved.masked_fill(saved == -torch.inf, 0)
        unused = unused_rows(d_out, d_lse)
        for plan, seen in ((self.near, inputs), (self.far, self._seen_far(inputs))):
            part, part_lse, part_saved = plan.forward(seen)
            share = (part_lse - lse).exp().masked_fill(unused, 0)
            d_part = (d_out * (part - out)).sum(-1)
            d_part = share * (d_part if d_lse is None else d_part + d_lse)
            d_part = d_part.index_fill(1, tokens, 0).masked_fill(unused, 0)
            gradients = plan.backward(seen, part, part_saved, share[..., None] * d_out, d_part)
            if plan is self.near:
                _add(sums, gradients)
                continue
            query += gradients[0]
            key.index_add_(1, self.sources, gradients[1])
            value.index_add_(1, self.sources, gradients[2])
            scale += gradients[3]
        return sums

    def _merged(self, near: Result, far: Result, own: Result) -> Result:
        out, lse = merged((near[0], far[0]), (near[1], far[1]))
        return out.index_copy(1, self.tokens, own[0]), lse.index_copy(1, self.tokens, own[1])

    def _seen_far(self, inputs: Inputs) -> Inputs:
        query, key, value, scale, bias = inputs
        tokens = self.sources
        return query, key.index_select(1, tokens), value.index_select(1, tokens), scale, bias

    def _of_tokens(self, inputs: Inputs) -> Inputs:
        query, key, value, scale, bias = inputs
        return query.index_select(1, self.tokens), key, value, scale, bias


def _some(inputs: Inputs, targets: slice, sources: slice) -> Inputs:
    """The inputs, or the gradients, of one sequence, as views."""
    query, key, value, scale, bias = inputs
    return query[:, targets], key[:, sources], value[:, sources], scale, bias


def _add(sums: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...]) -> None:
    """sums += parts, in place."""
    for total, part in zip(sums, parts, strict=True):
        if total is not None and part is not None:
            total += part
