"""Ticks of axes. This module imports matplotlib, so it is only imported inside functions."""

from __future__ import annotations

import math

from matplotlib.ticker import Locator, MaxNLocator

FEW = 6  # ticks


class IntegerTicks(Locator):
    """Ticks of a logarithmic axis of counts: a few integers, also on a short axis.

    matplotlib's default ticks are powers of ten or, on an axis without a power of ten, multiples
    such as ``3 x 10^1``.
    """

    def __call__(self) -> list[int]:
        """Return the ticks of the visible part of the axis."""
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return a few integers from `vmin` to `vmax`."""
        low, high = max(1, math.ceil(vmin)), math.floor(vmax)
        if high - low < FEW:
            return list(range(low, high + 1))
        powers = [10**k for k in range(len(str(high)))]
        for leads in ((1,), (1, 2, 5)):
            ticks = [lead * power for power in powers for lead in leads]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) >= 3:
                return ticks
        even = MaxNLocator(FEW, integer=True).tick_values(low, high)
        return [round(tick) for tick in even if low <= tick <= high]
