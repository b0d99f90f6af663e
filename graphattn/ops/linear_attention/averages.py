"""Linear attention as one autograd function, from features to averages.

The same in single operations of torch takes twice as long for few tokens: autograd then has twenty
operations in place of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import full_precision, gradients_by_autograd, may_be_differentiated
from graphattn.ops.linear_attention.sums import plain_sums, sums_over_graph

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the tensors of `Features`, in their order


def averages(inputs: Inputs, graph: TokenGraph, eps: float, differentiable: Any) -> Tensor:
    """Numerators divided by denominators, [*, N, H, Dv], on a CPU.

    A row that is not finite gets the gradient 0, so that NaN in a row that a loss does not use
    cannot spread.

    Args:
        inputs: query [*, N, H, D], key [*, M, H, D], value [*, M, H, Dv] and the rotated query and
            key of the numerator; the same tensors again if nothing is rotated.
        graph: N targets, M sources.
        eps: added to the denominator.
        differentiable: the same function from `inputs` alone, in operations that autograd can
            follow; for second derivatives.
    """
    if may_be_differentiated(inputs):
        result: Tensor = _Averages.apply((graph, eps, differentiable), *inputs)
        return result
    return _by_token(_averages(inputs, graph, eps)[0], inputs[0])


class _Averages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of_call: Any, *inputs: Any) -> Tensor:
        ctx.graph, eps, ctx.differentiable = of_call
        out, bad, *saved = _averages(inputs, ctx.graph, eps)
        of_finite = out if bad is None else out.masked_fill(bad, 0)
        ctx.save_for_backward(*inputs, bad, of_finite, *saved)
        return _by_token(out, inputs[0])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        tensors = ctx.saved_tensors
        inputs, needed = tensors[:5], ctx.needs_input_grad[1:]
        with full_precision(d_out.device):
            if torch.is_grad_enabled():  # create_graph=True: this is differentiated again
                return None, *gradients_by_autograd(
                    lambda *tensors: (ctx.differentiable(tensors),), inputs, needed, (d_out,)
                )
            gradients = _gradients(plain_sums, ctx.graph, needed, d_out, *tensors[5:])
            if not all(d is None or math.isfinite(d.sum()) for d in gradients):
                # NaN may have spread to tokens that the rows of d_out do not see.
                gradients = _gradients(sums_over_graph, ctx.graph, needed, d_out, *tensors[5:])
        return None, *(
            None if d is None else _by_token(d, x) for d, x in zip(gradients, inputs, strict=True)
        )


def _averages(inputs: Inputs, graph: TokenGraph, eps: float) -> tuple[Any, ...]:
    """Averages [G, N, Dv], and what the backward pass needs of them.

    It needs the rows that are not finite, bool [G, N, 1] or None; the denominators [G, N, 1], and
    where these are 0; and the inputs as [G, tokens, features]. Values have a column of ones if
    nothing is rotated.
    """
    rows = [_by_head(x) for x in inputs[: 3 if inputs[3] is inputs[0] else 5]]
    if len(rows) == 3:  # one pass for numerators and denominators
        rows[2] = torch.cat([rows[2], torch.ones_like(rows[2][..., :1])], dim=-1)
    above, total = _sums(plain_sums, rows, graph)
    is_finite = math.isfinite(above.sum() + total.sum())
    if not is_finite:
        above, total = _sums(sums_over_graph, rows, graph)
    if eps > 0:
        total = total + eps
    empty = total == 0
    total = total.masked_fill(empty, 1)
    out, bad = above / total, None
    if not is_finite or not math.isfinite(out.sum()):
        of_finite = above.isfinite().all(-1, keepdim=True) & total.isfinite()
        bad = ~(of_finite & out.isfinite().all(-1, keepdim=True))
        total = total.masked_fill(bad, 1)
    return out, bad, total, empty, *rows


def _sums(
    sums: Callable[..., Tensor], rows: list[Tensor], graph: TokenGraph
) -> tuple[Tensor, Tensor]:
    """Numerators [G, N, Dv] and denominators [G, N, 1]."""
    query, key, value, *rotated = rows
    if rotated:
        above = sums(rotated[0], rotated[1], value, graph, transposed=False)
        ones = torch.ones_like(value[..., :1])
        return above, sums(query, key, ones, graph, transposed=False)
    both = sums(query, key, value, graph, transposed=False)
    return both[..., :-1], both[..., -1:]


def _gradients(
    sums: Callable[..., Tensor],
    graph: TokenGraph,
    needed: Sequence[bool],
    d_out: Tensor,
    bad: Tensor | None,
    out: Tensor,
    total: Tensor,
    empty: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rotated: Tensor,
) -> tuple[Tensor | None, ...]:
    """The needed gradients of the five inputs, head by head.

    The last two are None if nothing is rotated, because they are those of the first two.
    """
    needs_query, needs_key, needs_value, needs_turned_query, needs_turned_key = needed

    def of_factors(
        d: Tensor, a: Tensor, b: Tensor, c: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (
            sums(d, c, b, graph, transposed=False) if needs[0] else None,
            sums(c, d, a, graph, transposed=True) if needs[1] else None,
            sums(b, a, d, graph, transposed=True) if needs[2] else None,
        )

    d = _by_head(d_out)
    d_above = (d if bad is None else d.masked_fill(bad, 0)) / total
    d_total = (out * d_above).sum(-1, keepdim=True).neg_().masked_fill_(empty, 0)
    if not rotated:
        d_both = torch.cat([d_above, d_total], dim=-1)
        needs = needs_query, needs_key, needs_value
        d_query, d_key, d_value = of_factors(d_both, query, key, value, needs)
        return d_query, d_key, None if d_value is None else d_value[..., :-1], None, None
    needs = needs_turned_query, needs_turned_key, needs_value
    d_turned_query, d_turned_key, d_value = of_factors(
        d_above, rotated[0], rotated[1], value, needs
    )
    ones = torch.ones_like(value[..., :1])
    d_query, d_key, _ = of_factors(d_total, query, key, ones, (needs_query, needs_key, False))
    return d_query, d_key, d_value, d_turned_query, d_turned_key


def _by_head(x: Tensor) -> Tensor:
    """x [*, N, H, D] as [G, N, D], one group for every sample and head."""
    *batch, tokens, heads, features = x.shape
    if math.prod(batch) == 1:  # a view, where one of several samples is a copy
        return x.reshape(tokens, heads, features).transpose(0, 1)
    return x.transpose(-3, -2).reshape(math.prod(batch) * heads, tokens, features)


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """x [G, N, D] as [*, N, H, D], with the leading dimensions and heads of `like`."""
    *batch, _, heads, _ = like.shape
    # A tensor of its own and no view, because callers may change it in place.
    by_token = x.view(*batch, heads, *x.shape[1:]).transpose(-3, -2)
    return by_token.clone(memory_format=torch.contiguous_format)
