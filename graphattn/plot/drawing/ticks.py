"""Ticks of axes. This module imports matplotlib: import it where it is used."""

from __future__ import annotations

import math

from matplotlib.ticker import Locator, MaxNLocator

FEW = 6


class WholeNumbers(Locator):
    """Ticks of a logarithmic axis of counts: whole numbers, a few however short the axis is.

    matplotlib's own are powers of ten, and parts of them where there is no power: ``3 x 10^1``.
    """

    def __call__(self) -> list[int]:
        """The ticks of what is in view."""
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Whole numbers from `vmin` to `vmax`."""
        low, high = max(1, math.ceil(vmin)), math.floor(vmax)
        if high - low < FEW:
            return list(range(low, high + 1))
        powers = [10**k for k in range(len(str(high)))]
        for leads in ((1,), (1, 2, 5)):
            ticks = [lead * power for power in powers for lead in leads]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) >= 3:
                return ticks
        evenly = MaxNLocator(FEW, integer=True).tick_values(low, high)
        return [round(tick) for tick in evenly if low <= tick <= high]
