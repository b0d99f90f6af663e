"""A matrix drawn at whatever size there is, so that none of its lines falls between two pixels.

This module imports matplotlib: import it where something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from graphattn.plot.drawing.cells import Cut

# A cell covers at least a pixel (and a bit: rounding may cost some) or nearest-neighbour resampling
# drops it, and at least a point of 1/72 inch, so that it is still seen on paper or a phone.
LEAST_PIXELS, LEAST_POINTS = 1.2, 1.0


class CellImage(AxesImage):
    """Cells of whole rows and columns, as small as can be told apart where they are drawn.

    How many rows and columns share a cell is decided when the picture is drawn, when its size and
    the part in view are known; `cells` then gives the value of every cell. matplotlib alone would
    pick one row out of several.

    Args:
        ax: where to draw; its limits must be set.
        shape: (rows, columns) of the matrix.
        cells: what the cells of these rows and columns show; an array [rows, columns].
        first: the number of the first row and column.
        style: of an AxesImage, such as `cmap` and `norm`.

    Attributes:
        sizes: rows and columns per cell; where they do not come out even, some have one more.
        on_new_cells: called with them where they change, to tell it in a legend.
    """

    def __init__(
        self,
        ax: Axes,
        shape: tuple[int, int],
        cells: Callable[[Cut, Cut], NDArray[Any]],
        first: int = 0,
        **style: Any,
    ) -> None:
        super().__init__(ax, interpolation="nearest", **style)
        self.sizes: tuple[int, ...] = (1, 1)
        self.on_new_cells: Callable[[int, int], None] | None = None
        self._shape = shape
        self._cells, self._first = cells, first
        self._cut: tuple[Cut, Cut] | None = None
        self.set_clip_path(ax.patch)
        self.fit()

    def fit(self, magnification: float = 1.0) -> None:
        """Cut the part in view into cells that suit the size it has now."""
        ax = self.axes
        assert ax is not None
        cuts = []
        sizes = cell_sizes(ax, self._shape, magnification)
        for number, limits, size in zip(
            self._shape, (ax.get_ylim(), ax.get_xlim()), sizes, strict=True
        ):
            low, high = (limit - self._first + 0.5 for limit in sorted(limits))
            start = min(max(math.floor(low), 0), number - 1)
            stop = min(max(math.ceil(high), start + 1), number)
            # A last cell of a few tokens left over would be a hair: all get their share of them.
            cuts.append(Cut(start, stop, max(1, (stop - start) // size)))
        rows, columns = cuts
        if self._cut == (rows, columns):
            return
        self._cut = rows, columns
        self.set_data(self._cells(rows, columns))
        edge = self._first - 0.5
        left, right = columns.start + edge, columns.stop + edge
        self.set_extent((left, right, rows.stop + edge, rows.start + edge))
        before = self.sizes
        self.sizes = tuple((cut.stop - cut.start) // cut.number for cut in cuts)
        if self.on_new_cells is not None and self.sizes != before:
            self.on_new_cells(*self.sizes)

    def draw(self, renderer: RendererBase) -> None:
        """Fit, then draw: vector files have pixels of their own in the pictures they hold."""
        if self.get_visible():
            self.fit(renderer.get_image_magnification())
        super().draw(renderer)


def cell_sizes(ax: Axes, shape: tuple[int, int], magnification: float = 1.0) -> tuple[int, int]:
    """How many rows and columns share a cell at the size the axes have now."""
    ax.apply_aspect()
    least = max(LEAST_POINTS * ax.figure.dpi / 72, LEAST_PIXELS / magnification)
    origin, one = ax.transData.transform([(0, 0), (1, 1)])
    across, down = abs(one - origin)
    rows, columns = (
        min(number, max(1, math.ceil(least / pixels * (1 - 1e-6)))) if pixels > 0 else number
        for number, pixels in zip(shape, (down, across), strict=True)
    )
    return rows, columns


def largest(matrix: NDArray[Any]) -> Callable[[Cut, Cut], NDArray[Any]]:
    """Cells that show the largest of their entries; NaN where all are."""

    def cells(rows: Cut, columns: Cut) -> NDArray[Any]:
        part = matrix[rows.start : rows.stop, columns.start : columns.stop]
        for axis, cut in ((0, rows), (1, columns)):
            if cut.number < cut.stop - cut.start:
                starts = (cut.bounds()[:-1] - cut.start).numpy()
                part = np.fmax.reduceat(part, starts, axis=axis)
        return part

    return cells
