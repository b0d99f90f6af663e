"""Exponential moving average (EMA) of the weights of a model in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class WeightAverage(AveragedModel):
    r"""torch's AveragedModel with an exponential moving average of weights and buffers.

    After every step of the optimizer, :meth:`update_parameters` computes

    .. math::
        \bar w_1 = w_1, \qquad \bar w_t = d \bar w_{t-1} + (1 - d) w_t

    Buffers of floating-point numbers, such as the statistics of batch norms, are averaged, too.
    Integers, booleans, and buffers that contain infinities, such as masks, are copied.

    Source: GKA paper, Section 4.1, with d = 0.99996.

    Args:
        model: the model; it is copied to ``module``, and does not change.
        decay: d, in [0, 1). About 1 / (1 - d) steps have a share in the average.

    Raises:
        ValueError: if `decay` is not allowed, or a weight is in half precision, in which small
            changes would be lost.

    Example:
        >>> import torch
        >>> from graphattn.train.averaging import WeightAverage
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(model, decay=0.75)
        >>> for value in (4.0, 8.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     average.update_parameters(model)
        >>> average.module.weight.item()
        5.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        for name, weight in model.named_parameters():
            if weight.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"ema_decay must be 0 for a model in half precision, got {decay} and "
                    f"{name!r} in {weight.dtype}: keep the weights in float32 (model.float()), and "
                    "set precision to 'bfloat16' for the computation"
                )
        average = get_ema_multi_avg_fn(decay)

        def of_this_process(averages: Any, values: Any, count: Any) -> None:
            # fully_shard makes DTensors of weights, which torch does not average beside buffers.
            average([_own_part(x) for x in averages], [_own_part(x) for x in values], count)

        super().__init__(model, multi_avg_fn=of_this_process, use_buffers=True)
        # The average of two infinities would be NaN, and integers would be rounded.
        self._copied = [
            name
            for name, buffer in model.named_buffers()
            if not (buffer.is_floating_point() and bool(buffer.isfinite().all()))
        ]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the present weights of the model to the average."""
        super().update_parameters(model)
        for name in self._copied:
            self.module.get_buffer(name).copy_(model.get_buffer(name))


def _own_part(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x
