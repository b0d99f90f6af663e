"""Losses over the tokens of all ranks, for parameters whose gradients ranks average.

DistributedDataParallel and fully_shard average gradients over their ranks. What training then
minimises is the mean of the losses of all ranks. Losses here have this mean in mind: their gradient
is right after that average, and no gradient has to be scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_mean(losses: Tensor, mask: Tensor | None = None, group: Any = None) -> Tensor:
    r"""Return the mean of a loss per token over the tokens of all ranks, on every rank.

    .. math::
        \frac{\sum_r \sum_{i \in M_r} \ell_{r,i}}{\sum_r |M_r|}

    Ranks may have different numbers of tokens, also none. The gradient on a rank is that of its own
    tokens, times the number of ranks. So it is right when ranks average their gradients, as
    :class:`torch.nn.parallel.DistributedDataParallel` and
    :func:`torch.distributed.fsdp.fully_shard` do, over the same ranks as `group`. If you add up
    gradients yourself, divide them by the number of ranks.

    Args:
        losses: floating-point, the loss of every token of this rank, in any shape.
        mask: bool, broadcastable to `losses`, True where a loss counts; all if None. Losses that do
            not count may be NaN.
        group: all ranks that share the parameters: a process group; or a
            :class:`torch.distributed.DeviceMesh` of any number of dimensions, such as the mesh of
            data parallelism and context parallelism; or None for the default group. Without an
            initialised default group, it is this process alone.

    Returns:
        A scalar, float32 for losses of half precision; 0 if no loss counts.

    Raises:
        ValueError: if an argument has another type or shape.

    Example:
        A step of training, over a mesh with the dimensions "dp" and "cp"::

            model = DistributedDataParallel(model)  # over all ranks, of both dimensions
            shard = ga.distributed.shard(graph, mesh["cp"])
            tokens, labels, counts = shard.split(tokens, labels, counts)
            logits = model(tokens, shard)
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), reduction="none")
            ga.distributed.token_mean(losses, counts.flatten()).backward()

        >>> import torch, graphattn as ga
        >>> losses = torch.tensor([1.0, 2.0, torch.nan])
        >>> ga.distributed.token_mean(losses, torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        got = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"losses must be a floating-point tensor, got {got}")
    count: Tensor = torch.tensor(losses.numel(), dtype=torch.float64, device=losses.device)
    losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
    if mask is not None:
        losses, count = _counted(losses, mask)
    of_rank = losses.sum()
    sums = torch.stack([of_rank.detach().double(), count])
    ranks = 1
    for one in _groups_of(group):
        sums, ranks = _added_up(sums, one), ranks * one.size()
    total, count = sums.unbind()
    count = count.clamp_min(1)
    mean: Tensor = _ValueAndSlope.apply(of_rank, total / count, ranks / count)
    return mean


def same_loss_on_all_ranks(x: Tensor, ranks: int) -> Tensor:
    """Return rows that :meth:`ShardedGraph.gather` gave, for a loss that every rank computes.

    All ranks compute the same loss, and each takes the gradient of its own rows only. So this
    function multiplies that gradient by the number of ranks. When the ranks then average the
    gradients of all parameters, the average is the gradient of the loss.
    """
    if ranks == 1:
        return x
    one = torch.ones((), dtype=x.dtype, device=x.device)
    scaled: Tensor = _ValueAndSlope.apply(x, x.detach(), one * ranks)
    return scaled


class _ValueAndSlope(torch.autograd.Function):
    """A tensor with a value of its own, and `slope` times the gradient of the given one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return gradient * slope.to(gradient.dtype), None, None


def _counted(losses: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Return losses that are 0 where they do not count, and the number of others."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be a bool tensor, got {got}")
    try:
        mask = mask.expand(losses.shape)
    except RuntimeError:
        raise ValueError(
            f"mask must be broadcastable to losses {list(losses.shape)}, got {list(mask.shape)}"
        ) from None
    return losses.masked_fill(~mask, 0), mask.sum(dtype=torch.float64)


def _added_up(x: Tensor, group: Any) -> Tensor:
    """Return the sum of the tensors of all ranks of a group."""
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(x, "sum", group)


def _groups_of(group: Any) -> list[Any]:
    """Return the process groups along which all ranks are reached, one after the other."""
    import torch.distributed as dist

    there = dist.is_available() and dist.is_initialized()
    if group is None:
        return [dist.group.WORLD] if there and dist.get_world_size() > 1 else []
    if there and isinstance(group, dist.DeviceMesh):
        return [group.get_group(dim) for dim in range(group.ndim)]
    if there and isinstance(group, dist.ProcessGroup):
        return [group]
    raise ValueError(
        f"group must be a DeviceMesh, a process group or None, got {type(group).__name__}"
    )
