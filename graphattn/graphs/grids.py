"""Graphs of windows on an image."""

from __future__ import annotations

from typing import Literal

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.graphs.structure import Grid
from graphattn.graphs.token_graph import TokenGraph


def grid_window_graph(
    height: int,
    width: int,
    radius: int,
    *,
    metric: Literal["chebyshev", "manhattan"] = "chebyshev",
    class_token: bool = False,
) -> TokenGraph:
    """Every token of a height x width image sees the tokens within `radius` of it, itself too.

    Tokens stand in row-major order. Windows are cut at the border of the image (NATTEN shifts
    them inward instead), so tokens at the border see fewer::

        chebyshev, radius 1:   x x x      manhattan, radius 1:   . x .
                               x i x                             x i x
                               x x x                             . x .

    Args:
        height, width: size of the image in tokens, >= 1.
        radius: reach of the window, >= 1.
        metric: `"chebyshev"` (squares) or `"manhattan"` (diamonds).
        class_token: puts a token before the image (token 0) that sees and is seen by all.

    Raises:
        ValueError: if a size is < 1 or `metric` is another word.

    Example:
        >>> import graphattn as ga
        >>> ga.grid_window_graph(3, 3, radius=1).in_degree().view(3, 3)
        tensor([[4, 6, 4],
                [6, 9, 6],
                [4, 6, 4]])
    """
    height, width = as_int("height", height, 1), as_int("width", width, 1)
    radius = as_int("radius", radius, 1)
    metric = as_choice("metric", metric, ("chebyshev", "manhattan"))
    return TokenGraph(structure=Grid(height, width, radius, metric, bool(class_token)))
