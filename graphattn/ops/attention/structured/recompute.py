"""One autograd function for every plan: inputs and results are saved, the rest computed again."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
CACHE_LINE = 64  # bytes


class Plan(Protocol):
    """How to attend over one graph with one set of options.

    Inputs are query [B, N, H, D], key [B, M, Hk, D], value [B, M, Hk, Dv], scale [H] and a bias of
    the plan's own kind. Nothing the size of the edges is kept.
    """

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, N, H, Dv], log-sums [B, N, H], and log-sums for the backward to see again."""
        ...

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the inputs."""
        ...

    def plainly(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
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
        *inputs, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: somebody differentiates this again
            return None, *_plain_gradients(ctx, tuple(inputs), (d_out, d_lse))
        if d_out is None:  # values take no part then, whatever they hold
            out = d_out = torch.zeros_like(out)
            inputs[2] = torch.zeros_like(inputs[2])
        return None, *ctx.plan.backward(tuple(inputs), out, lse, d_out, d_lse)


def _plain_gradients(
    ctx: Any, inputs: Inputs, upstream: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, ...]:
    results = ctx.plan.plainly(inputs)
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


def zeros_like(inputs: Inputs, covered: bool = False) -> Gradients:
    """Where the gradients of the inputs are summed up; `covered`: every query's will be written."""
    query, key, value, scale, bias = inputs
    return (
        torch.empty_like(query) if covered else torch.zeros_like(query),
        torch.zeros_like(key),
        torch.zeros_like(value),
        torch.zeros_like(scale),
        None if bias is None else torch.zeros_like(bias),
    )


def laid_out(x: Tensor) -> Tensor:
    """x contiguous and aligned, copied where it is not: products round by how numbers lie.

    So whoever puts zeros in place of some numbers, which is a copy, changes no bit elsewhere.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % CACHE_LINE else x


def largest(scale: Tensor) -> Tensor:
    """Up to which size numbers are sound: products of two of them, scaled, cannot overflow."""
    if scale.numel() == 0:
        return scale.new_ones(())
    room = torch.finfo(scale.dtype).max / scale.detach().abs().amax().clamp(min=1)
    return room.sqrt() / 1e3


def sound(x: Tensor, largest: Tensor) -> Tensor:
    """Bool: numbers, and no larger than that."""
    return x.detach().abs() <= largest


def sound_entries(bias: Tensor, largest: Tensor) -> Tensor:
    """Bool: those of a table that are sound; -inf, which says that nobody is seen there, is."""
    return sound(bias, largest) | (bias == -torch.inf)


def extent(x: Tensor | None) -> Tensor | float:
    """The largest size of its numbers, NaN if one is; infinite where looking would mean waiting."""
    if x is None or x.numel() == 0:
        return 0.0
    if x.device.type != "cpu":
        return torch.inf
    x = x.detach()
    return torch.maximum(x.amax(), -x.amin())


def all_sound(largest: Tensor, *tensors: Tensor | None) -> bool:
    """Whether all numbers are; elsewhere than on a CPU nobody waits to know: False."""
    return all(bool(extent(x) <= largest) for x in tensors)


def cleaned(x: Tensor, largest: Tensor) -> Tensor:
    """x with zeros in place of what is not sound."""
    return x.masked_fill(~sound(x, largest), 0)


def silent(d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """Bool [..., H]: rows whose results nobody asks for; whatever they saw, they give nothing."""
    quiet = (d_out == 0).all(-1)
    return quiet if d_lse is None else quiet & (d_lse == 0)
