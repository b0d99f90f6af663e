"""The autograd function of all plans: it stores inputs and results and computes the rest again."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.calls import Inputs, Masks
from graphattn.ops.attention.logits.score import Kernel, Score
from graphattn.ops.inputs import full_precision, gradients_by_autograd

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # of the tensors of inputs


MOST_SAVED = 4  # the most numbers that a plan saves per row and head for its backward pass


class PlanOptions(NamedTuple):
    """Options of a plan, on which it depends beside its graph.

    Attributes:
        score: the name of a score that compiled code knows, or a score of your own.
        top_k: sources kept per target and head; all if None.
        softcap: the bound of the logits; none if None.
        bias: what the rows of a bias belong to: edges, offsets, or all pairs of a complete graph,
            whose edges they are; None without one.
        drops: whether there is dropout.
    """

    score: Kernel | Score
    top_k: int | None = None
    softcap: float | None = None
    bias: Literal["edges", "offsets", "pairs"] | None = None
    drops: bool = False


class Plan:
    """How to attend over one graph with one set of options.

    A plan holds nothing of a call, so a graph keeps it. Inputs have one leading dimension B. No
    tensor with a number per edge is stored for the backward pass.
    """

    @property
    def saved_per_head(self) -> int:
        """How many numbers are saved per row and head; the saved tensor is [B, N, H * this]."""
        return 1

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, N, H, Dv], log-sums [B, N, H], and what to save for the backward pass."""
        raise NotImplementedError

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs."""
        raise NotImplementedError

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        """Gradients from outputs and log-sums over more edges than the plan has.

        The result is None if the plan starts from log-sums of its own, or for numbers that this is
        not exact for.
        """
        return None

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in operations that can be differentiated any number of times."""
        raise NotImplementedError


def flattened(inputs: Inputs) -> Inputs:
    """Queries, keys and values with one leading dimension, and scale and bias as they are."""
    if inputs.query.dim() == 4:
        return inputs
    B = inputs.query.shape[:-3].numel()
    query, key, value = (x.reshape(B, *x.shape[-3:]) for x in inputs[:3])
    return Inputs(query, key, value, *inputs[3:])


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
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:5]):
        out, lse = Recomputed.apply(plan, inputs.masks, *inputs[:5])
        return out, lse
    out, lse, _ = plan.forward(flattened(inputs))
    batch = inputs.query.shape[:-3]
    return restored(out, batch), restored(lse, batch)


class Recomputed(torch.autograd.Function):
    """Runs a plan, with memory for one chunk beside inputs and outputs, forward and backward.

    The leading dimensions of queries, keys and values are flattened here, so that autograd sees one
    operation.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, masks: Masks, *tensors: Any) -> tuple[Tensor, Tensor]:
        batch = tensors[0].shape[:-3]
        out, lse, saved = plan.forward(flattened(Inputs._make((*tensors, masks))))
        if saved is lse and len(batch) != 1:
            saved = lse.detach()  # another tensor, because the shape of `lse` changes
        out = restored(out, batch)
        ctx.plan, ctx.masks = plan, masks
        ctx.save_for_backward(*tensors, out, saved)
        ctx.set_materialize_grads(False)
        return out, restored(lse, batch)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        *tensors, out, saved = ctx.saved_tensors

        def again(*tensors: Any) -> tuple[Tensor, Tensor]:
            return differentiable(ctx.plan, Inputs._make((*tensors, ctx.masks)))

        with full_precision(out.device):
            if torch.is_grad_enabled():  # create_graph=True: this is differentiated again
                needed = ctx.needs_input_grad[2:]
                gradients = gradients_by_autograd(again, tensors, needed, (d_out, d_lse))
                return None, None, *gradients
            if d_out is None:  # then values are not used, and may even be NaN
                out = d_out = torch.zeros_like(out)
                tensors[2] = torch.zeros_like(tensors[2])
            inputs = flattened(Inputs._make((*tensors, ctx.masks)))
            if out.dim() != 4:
                B, out_shape = len(inputs.query), out.shape[-3:]
                out, d_out = out.reshape(B, *out_shape), d_out.reshape(B, *out_shape)
                d_lse = None if d_lse is None else d_lse.reshape(B, *out_shape[:-1])
            *of_tokens, d_scale, d_bias = ctx.plan.backward(inputs, out, saved, d_out, d_lse)
            batch = tensors[0].shape[:-3]
            return None, None, *(restored(d, batch) for d in of_tokens), d_scale, d_bias


def differentiable(plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H], by operations that autograd can follow."""
    out, lse = plan.by_autograd(flattened(inputs))
    batch = inputs.query.shape[:-3]
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


def zeros_like(inputs: Inputs) -> Gradients:
    """Make the sums that gradients of the inputs are added to."""
    query, key, value, scale = (torch.zeros_like(x) for x in inputs[:4])
    bias = None if inputs.bias is None else torch.zeros_like(inputs.bias)
    return query, key, value, scale, bias


def unused_rows(d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """Mark rows whose results have no gradient, bool [..., H].

    They must not add to any gradient, not even if they hold NaN.
    """
    unused = (d_out == 0).all(-1)
    return unused if d_lse is None else unused & (d_lse == 0)
