"""Collectives with gradients that layers need beside the exchange of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def maximum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the elementwise maximum of a tensor over all ranks, on every rank.

    Its gradient goes to the ranks that have the maximum, as that of ``torch.amax``.
    """
    return torch.stack(all_gathered(x, group)).amax(0)


def all_gathered(x: Tensor, group: Any) -> tuple[Tensor, ...]:
    """Return the tensors of all ranks; in the backward pass, ranks add up their gradients."""
    from torch.distributed import _functional_collectives as functional

    ranks = group.size()
    whole = functional.all_gather_tensor_autograd(x.contiguous()[None], 0, group)
    return tuple(whole.view(ranks, *x.shape))


def gathered(x: Tensor, dim: int, sizes: list[int], rank: int, group: Any) -> Tensor:
    """Concatenate the tensors of all ranks, whose sizes in dimension `dim` are `sizes`."""
    result: Tensor = _Gathered.apply(x, dim, sizes, rank, group)
    return result


class _Gathered(torch.autograd.Function):
    """Tensors of all ranks, of which each rank differentiates its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], rank: int, group: Any) -> Tensor:
        from torch.distributed import _functional_collectives as functional

        ctx.place = dim, sum(sizes[:rank]), sizes[rank]
        first = x.movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))
        padded[: sizes[rank]] = first
        whole = functional.all_gather_tensor(padded, 0, group)
        rows = [part[:size] for part, size in zip(whole.chunk(len(sizes)), sizes, strict=True)]
        return torch.cat(rows).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return d_whole.narrow(*ctx.place), None, None, None, None
