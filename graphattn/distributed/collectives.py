"""Collectives with gradients that layers need beside the exchange of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.layout import Layout


def maximum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the elementwise maximum of a tensor over all ranks, on every rank.

    Its gradient goes to the ranks that have the maximum, as that of ``torch.amax``.
    """
    return torch.stack(all_gathered(x, group)).amax(0)


def all_gathered(x: Tensor, group: Any) -> tuple[Tensor, ...]:
    """Return the tensors of all ranks; in the backward pass, ranks add up their gradients."""
    gather = _functional("all_gather_single_autograd", "all_gather_tensor_autograd")
    whole: Tensor = gather(x.contiguous()[None], 0, group)
    return tuple(whole.view(group.size(), *x.shape))


def _functional(name: str, older_name: str) -> Callable[..., Any]:
    """Return a functional collective by its name, or by the one that it had before torch 2.13."""
    from torch.distributed import _functional_collectives as functional

    collective: Callable[..., Any] = getattr(functional, name, None) or getattr(
        functional, older_name
    )
    return collective


def gathered(x: Tensor, dim: int, layout: Layout, rank: int, group: Any) -> Tensor:
    """Return the tensor of all tokens, whose dimension `dim` counts them, from those of all ranks.

    In the backward pass, every rank takes the gradient of its own tokens.
    """
    result: Tensor = _Gathered.apply(x, dim, layout, rank, group)
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, rank: int, group: Any) -> Tensor:
        ctx.dim, ctx.runs = dim, layout.runs(rank)
        sizes = layout.sizes()
        first = x.movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))
        padded[: sizes[rank]] = first
        gather = _functional("all_gather_single", "all_gather_tensor")
        arrived = gather(padded, 0, group).chunk(layout.ranks)
        whole = padded.new_empty((layout.num_tokens, *first.shape[1:]))
        for other, rows in enumerate(arrived):
            start = 0
            for run in layout.runs(other):
                whole[run.start : run.stop] = rows[start : start + len(run)]
                start += len(run)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor | None, ...]:
        own = [d_whole.narrow(ctx.dim, run.start, len(run)) for run in ctx.runs]
        return torch.cat(own, dim=ctx.dim), None, None, None, None
