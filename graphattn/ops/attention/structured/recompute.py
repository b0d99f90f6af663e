"""One autograd function for every plan: inputs and results are saved, the rest computed again."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from graphattn.ops.inputs import full_precision

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Plan(Protocol):
    """How to attend over one graph with one set of options.

    Inputs are query [B, N, H, D], key [B, M, Hk, D], value [B, M, Hk, Dv], scale [H] and a bias of
    the plan's own kind. Nothing the size of the edges is kept.
    """

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, N, H, Dv], log-sums [B, N, H], and what the backward wants to see again."""
        ...

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs."""
        ...

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in operations that can be differentiated any number of times."""
        ...


def saved_per_head(plan: Plan) -> int:
    """How many numbers of every row and head a plan wants to see again: [B, N, H * so many]."""
    return getattr(plan, "saved_per_head", 1)


class Recomputed(torch.autograd.Function):
    """Memory beside inputs and outputs is that of one chunk, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = plan.forward((query, key, value, scale, bias))
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, scale, bias, out, saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors  # asked for once: checkpoints compute them again
        with full_precision(out.device):
            if torch.is_grad_enabled():  # create_graph=True: somebody differentiates this again
                return None, *_plain_gradients(ctx, tuple(inputs), (d_out, d_lse))
            if d_out is None:  # values take no part then, whatever they hold
                out = d_out = torch.zeros_like(out)
                inputs[2] = torch.zeros_like(inputs[2])
            return None, *ctx.plan.backward(tuple(inputs), out, lse, d_out, d_lse)


def _plain_gradients(
    ctx: Any, inputs: Any, upstream: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, ...]:
    # Each apart, also where one tensor was given several times: each gets a share of the gradient.
    inputs = tuple(None if x is None else x.view_as(x) for x in inputs)
    results = ctx.plan.by_autograd(inputs)
    pairs = [(r, d) for r, d in zip(results, upstream, strict=True) if d is not None]
    needed = ctx.needs_input_grad[1:]
    wanted = [x for x, n in zip(inputs, needed, strict=True) if n and x is not None]
    found = iter(
        torch.autograd.grad(
            [r for r, _ in pairs],
            wanted,
            [d for _, d in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return tuple(next(found) if n else None for n in needed)


def zeros_like(inputs: Inputs) -> Gradients:
    """Make the sums that gradients of the inputs are added to."""
    query, key, value, scale = (torch.zeros_like(x) for x in inputs[:4])
    return query, key, value, scale, None if inputs[4] is None else torch.zeros_like(inputs[4])


def all_sound(inputs: Inputs, *upstream: Tensor | None) -> bool:
    """Whether all are numbers, and so small that no product of two overflows.

    A bias of -inf takes an edge away, no more. Elsewhere than on a CPU nobody waits to know: False.
    """
    *tensors, scale, bias = inputs
    if scale.device.type != "cpu":
        return False
    limit = torch.finfo(scale.dtype).max ** 0.5 / 1e3
    if bias is not None and bias.numel() and not bool(bias.detach().amax() <= limit):
        return False
    found = [x.detach().aminmax() for x in (*tensors, *upstream) if x is not None and x.numel()]
    return all(bool(-limit <= low) and bool(high <= limit) for low, high in found)


def silent(d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """Bool [..., H]: rows whose results nobody asks for; whatever they saw, they give nothing."""
    quiet = (d_out == 0).all(-1)
    return quiet if d_lse is None else quiet & (d_lse == 0)
