"""Linear attention of plain calls: from the projections of a layer to averages, in one function.

The arithmetic is that of :func:`~graphattn.linear_attention` over :func:`~graphattn.elu_features`,
operation by operation. In a call with few tokens, autograd takes longer than arithmetic, and here
it has one function in place of many.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import full_precision, gradients_by_autograd
from graphattn.ops.linear_attention.api import elu_features, linear_attention
from graphattn.ops.linear_attention.sums import plain_sums, sums_over_graph


class FlatLinear(NamedTuple):
    """Everything that plain calls of one kind share.

    Attributes:
        shape: [B, N, H, D] of queries, keys and values.
        out: the shape [*, N, H * D].
        eps: added to the denominator.
        outside: bool [N, M], the pairs that are no edges, if tokens are so few that sums are over
            all pairs; None otherwise.
        one: a tensor [], the number 1 in the dtype of the tokens.
    """

    graph: TokenGraph
    shape: tuple[int, int, int, int]
    out: tuple[int, ...]
    eps: float
    outside: Tensor | None
    one: Tensor


def flat_linear_attention(
    call: FlatLinear, query: Tensor, key: Tensor, value: Tensor
) -> Tensor | None:
    """The averages [*, N, H * D], on a CPU, from projections before the feature function.

    None if a sum is not finite; then the operation itself must be called.
    """
    with torch.no_grad():
        found = _Saved.of(call, query, key, value)
    if found is None:
        return None
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        out: Tensor = _FlatLinearAttention.apply(call, found, query, key, value)
        return out
    return found.flat(call)


class _Saved(NamedTuple):
    """The tensors that are saved for the backward pass, head by head, [B * H, N, features]."""

    query: Tensor  # positive features
    key: Tensor
    value: Tensor  # with a column of ones, for the denominator
    out: Tensor
    total: Tensor  # denominators, with 1 in place of 0
    empty: Tensor  # where denominators are 0
    pairs: Tensor | None  # products of all pairs, [B * H, N, N], if sums are over all pairs

    @classmethod
    def of(cls, call: FlatLinear, query: Tensor, key: Tensor, value: Tensor) -> _Saved | None:
        a, b = (_by_head(_features(x), call.shape) for x in (query, key))
        B, N, H, D = call.shape
        values = value.reshape(call.shape).transpose(1, 2)
        c = torch.cat([values, call.one.expand(B, H, N, 1)], dim=-1).view(B * H, N, D + 1)
        pairs = None
        if call.outside is None:
            both = plain_sums(a, b, c, call.graph)
        else:
            pairs = torch.bmm(a, b.transpose(1, 2)).masked_fill_(call.outside, 0)
            both = torch.bmm(pairs, c)
        if not math.isfinite(both.sum()):
            return None
        total = both[..., D:]
        if call.eps > 0:
            total = total + call.eps
        empty = total == 0
        total = total.masked_fill(empty, 1)
        out = both[..., :D] / total
        found = cls(a, b, c, out, total, empty, pairs)
        return found if math.isfinite(out.sum()) else None

    def flat(self, call: FlatLinear) -> Tensor:
        """The output, a tensor of its own and no view of one."""
        B, N, H, D = call.shape
        by_token = self.out.view(B, H, N, D).transpose(1, 2)
        return by_token.clone(memory_format=torch.contiguous_format).resize_(call.out)


class _FlatLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: FlatLinear, found: _Saved, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(query, key, value, *found)
        return found.flat(call)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        query, key, value, *saved = ctx.saved_tensors
        call: FlatLinear = ctx.call
        needs = ctx.needs_input_grad[2:]
        with full_precision(d_out.device):
            if torch.is_grad_enabled():  # create_graph=True: this is differentiated again
                return (
                    None,
                    None,
                    *gradients_by_autograd(
                        partial(_attend_again, call),
                        (query, key, value),
                        needs,
                        (d_out.reshape(call.shape),),
                    ),
                )
            a, b, c, out, total, empty, pairs = saved
            d = _by_head(d_out, call.shape)
            d_above = d / total
            d_below = (out / total).mul_(d).sum(-1, keepdim=True).neg_().masked_fill_(empty, 0)
            d_both = torch.cat([d_above, d_below], dim=-1)
            d_a, d_b, d_c = _gradients(call, a, b, c, pairs, d_both, needs)
        return (
            None,
            None,
            None if d_a is None else _flat(_through_features(d_a, a, call.one), call, query),
            None if d_b is None else _flat(_through_features(d_b, b, call.one), call, key),
            None if d_c is None else _flat(d_c[..., :-1], call, value),
        )


def _attend_again(call: FlatLinear, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
    """The averages [B, N, H, D], in operations that can be differentiated any number of times."""
    q, k, v = (x.reshape(call.shape) for x in (query, key, value))
    return (linear_attention(elu_features(q), elu_features(k), v, call.graph, eps=call.eps),)


def _gradients(
    call: FlatLinear,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    pairs: Tensor | None,
    d_out: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The needed gradients of the three factors of the sums."""
    if pairs is not None and call.outside is not None:
        d_pairs = torch.bmm(d_out, c.transpose(1, 2)).masked_fill_(call.outside, 0)
        d_a = torch.bmm(d_pairs, b)
        # Otherwise NaN could spread through pairs that are no edges.
        if math.isfinite(d_a.sum() + d_out.sum()):
            return (
                d_a if needs[0] else None,
                torch.bmm(d_pairs.transpose(1, 2), a) if needs[1] else None,
                torch.bmm(pairs.transpose(1, 2), d_out) if needs[2] else None,
            )
    graph = call.graph
    return (
        sums_over_graph(d_out, c, b, graph, transposed=False) if needs[0] else None,
        sums_over_graph(c, d_out, a, graph, transposed=True) if needs[1] else None,
        sums_over_graph(b, a, d_out, graph, transposed=True) if needs[2] else None,
    )


def _features(x: Tensor) -> Tensor:
    """:func:`elu_features` in fewer tensors."""
    return x.clamp(max=0).exp_().add_(x.relu())


def _through_features(gradient: Tensor, features: Tensor, one: Tensor) -> Tensor:
    """The gradient of x, from that of its features: their slope is e^x below 0, and 1 above."""
    return gradient.mul_(features.fmin(one))  # fmin: 1 for a NaN, too, since no edge reads it


def _by_head(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """x [*, N, H * D] as [B * H, N, D]."""
    B, N, H, D = shape
    if B == 1:
        return x.reshape(N, H, D).transpose(0, 1)
    return x.reshape(shape).transpose(1, 2).reshape(B * H, N, D)


def _flat(x: Tensor, call: FlatLinear, like: Tensor) -> Tensor:
    """x [B * H, N, D] in the shape of `like`, [*, N, H * D]."""
    B, N, H, D = call.shape
    return x.reshape(B, H, N, D).transpose(1, 2).reshape(like.shape)
