"""The sums of linear attention as one operator, whose gradients are three such sums.

torch.compile does not trace into it. The graph is passed as tensors
(:mod:`graphattn.graphs.structures.graph_code`), so one compilation serves all windows and lengths.
Because the backward pass calls the operator itself, it can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph, decode
from graphattn.ops.backends import is_watched
from graphattn.ops.inputs import full_precision, may_be_differentiated
from graphattn.ops.linear_attention.sums import sums_over_graph


def linear_sums(a: Tensor, b: Tensor, c: Tensor, graph: TokenGraph) -> Tensor:
    """sum_j (a_i . b_j) c_j over the sources of every target, [*, H, N, Dv].

    Args:
        a: [*, H, N, D], a row per target.
        b, c: [*, H, M, D] and [*, H, M, Dv], a row per source.
        graph: N targets, M sources.
    """
    if not is_watched(a):  # to call an operator takes longer than a few tokens do
        return _eager_sums(a, b, c, graph, False)
    out: Tensor = torch.ops.graphattn.linear_sums(a, b, c, graph.code, graph.listed, False)
    return out


def _eager_sums(a: Tensor, b: Tensor, c: Tensor, graph: TokenGraph, transposed: bool) -> Tensor:
    if may_be_differentiated((a, b, c)):
        out: Tensor = _LinearSums.apply(graph, transposed, a, b, c)
        return out
    return _over(a, b, c, graph, transposed)


class _LinearSums(torch.autograd.Function):
    """Sums whose gradients are three such sums, which can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, graph: TokenGraph, transposed: bool, a: Tensor, b: Tensor, c: Tensor
    ) -> Tensor:
        ctx.graph, ctx.transposed = graph, transposed
        ctx.save_for_backward(a, b, c)
        return _over(a, b, c, graph, transposed)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        def sums(a: Tensor, b: Tensor, c: Tensor, transposed: bool) -> Tensor:
            return _eager_sums(a, b, c, ctx.graph, transposed)

        needed = ctx.needs_input_grad[2:]
        return None, None, *_gradients(sums, d_out, ctx.saved_tensors, needed, ctx.transposed)


def _gradients(
    sums: Callable[..., Tensor],
    d_out: Tensor,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    transposed: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of a, b and c, each a sum over the graph or its transpose."""
    (a, b, c), (of_a, of_b, of_c) = tensors, needed
    d_a = sums(d_out, c, b, transposed) if of_a else None
    d_b = sums(c, d_out, a, not transposed) if of_b else None
    d_c = sums(b, a, d_out, not transposed) if of_c else None
    return d_a, d_b, d_c


def _over(a: Tensor, b: Tensor, c: Tensor, graph: TokenGraph, transposed: bool) -> Tensor:
    groups = a.shape[:-2].numel()
    rows_a, rows_b, rows_c = (
        x if x.dim() == 3 else x.reshape(groups, *x.shape[-2:]) for x in (a, b, c)
    )
    with full_precision(a.device):  # autocast may be on around backward()
        out = sums_over_graph(rows_a, rows_b, rows_c, graph, transposed=transposed)
    return out.contiguous().view(*a.shape[:-1], c.shape[-1])


@torch.library.custom_op(
    "graphattn::linear_sums",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor c, Tensor code, Tensor? listed, bool transposed) -> Tensor",
)
def _linear_sums(
    a: Tensor, b: Tensor, c: Tensor, code: Tensor, listed: Tensor | None, transposed: bool
) -> Tensor:
    return _over(a, b, c, decode(code, listed, a.device), transposed)


@_linear_sums.register_fake
def _(
    a: Tensor, b: Tensor, c: Tensor, code: Tensor, listed: Tensor | None, transposed: bool
) -> Tensor:
    return a.new_empty(*a.shape[:-1], c.shape[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, code, listed = ctx.saved_tensors

    def sums(a: Tensor, b: Tensor, c: Tensor, transposed: bool) -> Tensor:
        out: Tensor = torch.ops.graphattn.linear_sums(a, b, c, code, listed, transposed)
        return out

    needed = ctx.needs_input_grad[:3]
    return *_gradients(sums, d_out, tensors, needed, ctx.transposed), None, None, None


_linear_sums.register_autograd(_backward, setup_context=_remember)
