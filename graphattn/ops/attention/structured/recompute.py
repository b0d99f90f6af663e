"""The autograd function of all plans: it stores inputs and results and computes the rest again."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from graphattn.ops.inputs import full_precision, gradients_by_autograd

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Plan(Protocol):
    """How to attend over one graph with one set of options.

    Inputs are query [B, N, H, D], key [B, M, Hk, D], value [B, M, Hk, Dv], scale [H] and a bias,
    whose shape depends on the plan. No tensor with a number per edge is stored for the backward
    pass.
    """

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, N, H, Dv], log-sums [B, N, H], and what to save for the backward pass."""
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
    """How many numbers a plan saves per row and head; the saved tensor is [B, N, H * this]."""
    return getattr(plan, "saved_per_head", 1)


def backward_from_log_sums(
    plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> Gradients | None:
    """Gradients from outputs [B, N, H, Dv] and log-sums [B, N, H] over more edges than a plan has.

    The result is None if the plan starts from log-sums of its own, or for numbers that this is not
    exact for.
    """
    compute = getattr(plan, "backward_from_log_sums", None)
    found: Gradients | None = None
    if compute is not None:
        found = compute(inputs, out, lse, d_out, d_lse)
    return found


def flattened(inputs: Inputs) -> Inputs:
    """Queries, keys and values with one leading dimension, and scale and bias as they are."""
    query, key, value, scale, bias = inputs
    if query.dim() == 4:
        return inputs
    if query.dim() == 3:
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), scale, bias
    B = query.shape[:-3].numel()
    query, key, value = (x.reshape(B, *x.shape[-3:]) for x in (query, key, value))
    return query, key, value, scale, bias


def restored(x: Tensor, batch: torch.Size) -> Tensor:
    """x [B, ...] with the leading dimensions `batch` in place of B, and not as a view.

    The result of an autograd function must be no view, because callers may change it in place.
    """
    if len(batch) == 1:
        return x
    if not batch:
        return x.squeeze_(0)
    step, steps = x.stride(0), []
    for size in reversed(batch):
        steps.append(step)
        step *= max(size, 1)
    return x.as_strided_((*batch, *x.shape[1:]), (*reversed(steps), *x.stride()[1:]))


def run(plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run a plan on inputs with any leading dimensions: output and log-sums have the same."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        out, lse = Recomputed.apply(plan, *inputs)
        return out, lse
    out, lse, _ = plan.forward(flattened(inputs))
    batch = inputs[0].shape[:-3]
    return restored(out, batch), restored(lse, batch)


class Recomputed(torch.autograd.Function):
    """Runs a plan, with memory for one chunk beside inputs and outputs, forward and backward.

    The leading dimensions of queries, keys and values are flattened here, so that autograd sees one
    operation.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: Any) -> tuple[Tensor, Tensor]:
        batch = inputs[0].shape[:-3]
        out, lse, saved = plan.forward(flattened(inputs))
        if saved is lse and len(batch) != 1:
            saved = lse.detach()  # another tensor, because the shape of `lse` changes
        out = restored(out, batch)
        ctx.plan = plan
        ctx.save_for_backward(*inputs, out, saved)
        ctx.set_materialize_grads(False)
        return out, restored(lse, batch)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        *inputs, out, saved = ctx.saved_tensors
        with full_precision(out.device):
            if torch.is_grad_enabled():  # create_graph=True: this is differentiated again
                needed = ctx.needs_input_grad[1:]
                return None, *gradients_by_autograd(
                    lambda *tensors: differentiable(ctx.plan, tensors),
                    inputs,
                    needed,
                    (d_out, d_lse),
                )
            if d_out is None:  # then values are not used, and may even be NaN
                out = d_out = torch.zeros_like(out)
                inputs[2] = torch.zeros_like(inputs[2])
            given = flattened(tuple(inputs))
            if out.dim() != 4:
                B, out_shape = len(given[0]), out.shape[-3:]
                out, d_out = out.reshape(B, *out_shape), d_out.reshape(B, *out_shape)
                d_lse = None if d_lse is None else d_lse.reshape(B, *out_shape[:-1])
            *of_tokens, d_scale, d_bias = ctx.plan.backward(given, out, saved, d_out, d_lse)
            batch = inputs[0].shape[:-3]
            return None, *(restored(d, batch) for d in of_tokens), d_scale, d_bias


def differentiable(plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H], by operations that autograd can follow."""
    out, lse = plan.by_autograd(flattened(inputs))
    batch = inputs[0].shape[:-3]
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


def zeros_like(inputs: Inputs) -> Gradients:
    """Make the sums that gradients of the inputs are added to."""
    query, key, value, scale = (torch.zeros_like(x) for x in inputs[:4])
    return query, key, value, scale, None if inputs[4] is None else torch.zeros_like(inputs[4])


def products_are_finite(inputs: Inputs, *upstream: Tensor | None) -> bool:
    """Whether all numbers are finite, and so small that no product of two overflows.

    A bias of -inf is allowed: it only removes an edge. The answer is False on other devices than a
    CPU, where to read the numbers would wait for the device.
    """
    *tensors, scale, bias = inputs
    if scale.device.type != "cpu":
        return False
    limit = torch.finfo(scale.dtype).max ** 0.5 / 1e3
    if bias is not None and bias.numel() and not bool(bias.detach().amax() <= limit):
        return False
    ranges = [x.detach().aminmax() for x in (*tensors, *upstream) if x is not None and x.numel()]
    return all(bool(-limit <= low) and bool(high <= limit) for low, high in ranges)


def unused_rows(d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """Mark rows whose results have no gradient, bool [..., H].

    They must not add to any gradient, not even if they hold NaN.
    """
    unused = (d_out == 0).all(-1)
    return unused if d_lse is None else unused & (d_lse == 0)
