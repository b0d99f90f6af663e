"""Image of a matrix of any size in which no row or column falls between two pixels.

This module imports matplotlib, so it is only imported inside functions that draw.
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

# A cell must cover at least one pixel, and a little more because of rounding; otherwise
# nearest-neighbor resampling drops it. It must also cover at least one point (1/72 inch), so that
# it can be seen on paper or on a phone.
LEAST_PIXELS, LEAST_POINTS = 1.2, 1.0


class CellImage(AxesImage):
    """Image of a matrix, divided into the smallest cells that can still be told apart.

    A cell stands for several rows and columns if the matrix is larger than the image. Their number
    is chosen when the figure is drawn, because only then the size of the image and the visible part
    are known; `cells` then computes the value of every cell. matplotlib alone would draw one row
    out of several and leave out the others.

    Args:
        ax: where to draw; its limits must be set.
        shape: (rows, columns) of the matrix.
        cells: returns the values of the cells for given cuts of rows and columns, an array
            [rows.number, columns.number].
        first: the number of the first row and column.
        style: keyword arguments of an AxesImage, such as `cmap` and `norm`.

    Attributes:
        sizes: number of rows and of columns per cell; some cells have one more if the numbers do
            not divide evenly.
        on_new_cells: function that is called with `sizes` whenever they change, for example to
            update a label.
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
        """Divide the visible part into cells that fit its present size."""
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
            # A last cell with the few remaining tokens would be too thin to see; instead, these
            # tokens are distributed over all cells.
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
        """Fit the cells, then draw.

        The magnification is needed because images in vector files have their own pixel size.
        """
        if self.get_visible():
            self.fit(renderer.get_image_magnification())
        super().draw(renderer)


def cell_sizes(ax: Axes, shape: tuple[int, int], magnification: float = 1.0) -> tuple[int, int]:
    """Return how many rows and how many columns a cell needs at the present size of the axes."""
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
    """Return a function for cells that show their largest entry, or NaN if all entries are NaN."""

    def cells(rows: Cut, columns: Cut) -> NDArray[Any]:
        part = matrix[rows.start : rows.stop, columns.start : columns.stop]
        for axis, cut in ((0, rows), (1, columns)):
            if cut.number < cut.stop - cut.start:
                starts = (cut.bounds()[:-1] - cut.start).numpy()
                part = np.fmax.reduceat(part, starts, axis=axis)
        return part

    return cells
