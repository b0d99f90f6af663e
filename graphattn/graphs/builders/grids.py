"""Graphs of windows and blocks on images, volumes and grids of any number of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import GridWindows
from graphattn.graphs.structures.structure import Band, Grid
from graphattn.graphs.token_graph import TokenGraph

PerAxis = int | Sequence[int]
Switches = bool | Sequence[bool]


def grid_window_graph(
    height: int,
    width: int,
    radius: PerAxis,
    *,
    metric: Literal["chebyshev", "manhattan"] = "chebyshev",
    class_token: bool = False,
    dilation: PerAxis = 1,
    causal: Switches = False,
    border: Literal["cut", "shift"] = "cut",
) -> TokenGraph:
    """Every token of a height x width image sees the tokens within `radius` of it, itself too.

    Tokens stand in row-major order. `radius`, `dilation` and `causal` take one value, or one for
    each axis, (down, right). Windows are cut at the border of the image, so tokens there see fewer;
    with ``border="shift"`` they are moved inside and everyone sees equally many, as in NATTEN
    (whose own words for it :func:`~graphattn.neighborhood_graph` takes)::

        chebyshev, radius 1:   x x x      manhattan, radius 1:   . x .
                               x i x                             x i x
                               x x x                             . x .

        dilation 2:   x . x . x           causal=(True, False):  x x x
                      . . . . .                                  x i x
                      x . i . x                                  . . .
                      . . . . .
                      x . x . x

    Args:
        height, width: size of the image in tokens, >= 1.
        radius: reach of the window in hops, >= 1; of one axis alone also 0.
        metric: `"chebyshev"` (squares) or `"manhattan"` (diamonds: hops along both axes together;
            one radius, and windows that are cut).
        class_token: puts a token before the image (token 0) that sees and is seen by all.
        dilation: tokens from one hop to the next, >= 1.
        causal: whether a token sees nothing ahead of it along that axis. The graph is causal,
            token by token, where no axis looks ahead.
        border: `"cut"`, or `"shift"`: a window that would leave the image is moved inside; a causal
            axis is cut in any case.

    Raises:
        ValueError: if a size is too small, `metric` or `border` is another word, a window of
            ``border="shift"`` is larger than its axis, or diamonds have two radii or are shifted.

    Example:
        >>> import graphattn as ga
        >>> ga.grid_window_graph(3, 3, radius=1).in_degree().view(3, 3)
        tensor([[4, 6, 4],
                [6, 9, 6],
                [4, 6, 4]])
        >>> ga.grid_window_graph(3, 3, radius=1, border="shift").in_degree().view(3, 3)
        tensor([[9, 9, 9],
                [9, 9, 9],
                [9, 9, 9]])
        >>> ga.grid_window_graph(3, 3, radius=1, causal=(True, False)).in_degree().view(3, 3)
        tensor([[2, 3, 2],
                [4, 6, 4],
                [4, 6, 4]])
    """
    shape = as_int("height", height, 1), as_int("width", width, 1)
    found = _windows(shape, radius, metric, class_token, dilation, causal, border)
    same = found.before == found.after and len({*found.before, *found.after}) == 1
    if same and set(found.dilation) == {1} and not any(found.shift):
        reach = found.before[0]
        return TokenGraph(structure=Grid(*shape, reach, found.metric, found.class_token))
    return TokenGraph(structure=found)


def grid_block_graph(
    height: int, width: int, block_size: PerAxis, *, shift: PerAxis = 0
) -> TokenGraph:
    """Non-overlapping windows on an image: every token sees those of its own block, itself too.

    The windows of Swin (Liu et al., 2021). Tokens stand in row-major order; `block_size` and
    `shift` take one value, or one for each axis, (down, right). With `shift`, the borders of blocks
    move to shift, shift + block_size, ... along every axis. What Swin rolls around the image and
    masks is here not an edge: blocks at the border of the image are cut, not wrapped around, as in
    :func:`~graphattn.block_window_graph`::

        block_size = 4, shift = 2, 8 x 8 tokens, numbered by their block:

            0 0 1 1 1 1 2 2
            0 0 1 1 1 1 2 2
            3 3 4 4 4 4 5 5
            3 3 4 4 4 4 5 5
            3 3 4 4 4 4 5 5
            3 3 4 4 4 4 5 5
            6 6 7 7 7 7 8 8
            6 6 7 7 7 7 8 8

    A table of relative positions (``edge_bias``) has ``(2 * block_size - 1)**2`` rows, as Swin's.

    Args:
        height, width: size of the image in tokens, >= 1.
        block_size: tokens per block along an axis, >= 1.
        shift: 0 <= shift < block_size; Swin's is 0 and ``block_size // 2`` in turns.

    Raises:
        ValueError: if a size is too small or `shift` is not in [0, block_size).

    Example:
        >>> import graphattn as ga
        >>> graph = ga.grid_block_graph(8, 8, block_size=4, shift=2)
        >>> graph.in_degree().view(8, 8)[::2, ::2]
        tensor([[ 4,  8,  8,  4],
                [ 8, 16, 16,  8],
                [ 8, 16, 16,  8],
                [ 4,  8,  8,  4]])
        >>> ga.nn.OffsetBias.for_graph(3, graph)
        OffsetBias(3, max_offset=(3, 3))
    """
    height, width = as_int("height", height, 1), as_int("width", width, 1)
    block = _per_axis("block_size", block_size, 2, 1, 1)
    moved = _per_axis("shift", shift, 2, 0, 0)
    for axis, (own, size) in enumerate(zip(moved, block, strict=True)):
        if own >= size:
            raise ValueError(f"shift must be < block_size = {size} along axis {axis}, got {own}")
    return TokenGraph(structure=GridBlocks(height, width, block, moved))


def volume_window_graph(
    depth: int,
    height: int,
    width: int,
    radius: PerAxis,
    *,
    metric: Literal["chebyshev", "manhattan"] = "chebyshev",
    class_token: bool = False,
    dilation: PerAxis = 1,
    causal: Switches = False,
    border: Literal["cut", "shift"] = "cut",
) -> TokenGraph:
    """Every token of a volume, or of a video of `depth` frames, sees the tokens within `radius`.

    As :func:`~graphattn.grid_window_graph` with one axis more: tokens stand in row-major order, the
    frames one after the other, and `radius`, `dilation` and `causal` take one value or three,
    (through, down, right). ``causal=(True, False, False)`` is a video in which nobody sees a later
    frame; ``metric="manhattan"`` with radius 1 joins the voxels that share a face.

    Raises:
        ValueError: as :func:`~graphattn.grid_window_graph`.

    Example:
        >>> import graphattn as ga
        >>> video = ga.volume_window_graph(8, 14, 14, radius=(3, 2, 2), causal=(True, False, False))
        >>> video
        TokenGraph(num_tokens=1568, num_edges=106496, structure=GridWindows)
        >>> voxels = ga.volume_window_graph(3, 3, 3, radius=1, metric="manhattan")
        >>> voxels.in_degree()[13]  # in the middle: six faces, and itself
        tensor(7)
    """
    shape = as_int("depth", depth, 1), as_int("height", height, 1), as_int("width", width, 1)
    return TokenGraph(
        structure=_windows(shape, radius, metric, class_token, dilation, causal, border)
    )


def neighborhood_graph(
    shape: PerAxis,
    kernel_size: PerAxis,
    *,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: Switches = False,
) -> TokenGraph:
    """Neighborhood attention's windows, in NATTEN's own words: the edges of `na1d`, `na2d`, `na3d`.

    Every token of a grid sees `kernel_size` tokens along every axis. Near a border the window is
    moved inside, so that its size stays; along a causal axis it ends at the token itself, and is
    cut where it begins. Of an even `kernel_size` one more lies before the token than behind it.
    `stride` neighbouring tokens share one window, that of the middle one (along a causal axis, of
    the last one, of which everyone sees what is not ahead). With `dilation` all this holds among
    the tokens of one remainder. Tokens stand in row-major order: ``x.flatten(1, 2)`` of NATTEN's
    ``[B, height, width, ...]``.

    A table of relative positions (``edge_bias``) has ``2 * kernel_size - 1`` rows along an axis
    that is not causal, as NATTEN's ``rpb``, and `kernel_size` along one that is.

    Hassani et al., Neighborhood Attention Transformer (CVPR 2023); Dilated Neighborhood Attention
    Transformer (2022); Faster Neighborhood Attention (NeurIPS 2024) for causal axes; Generalized
    Neighborhood Attention (2025) for strides.

    Args:
        shape: the grid in tokens: one size for a sequence, or one for each axis; all >= 1.
        kernel_size: tokens of a window, one value or one for each axis, >= 1.
        stride: tokens that share a window, >= 1 and <= `kernel_size`.
        dilation: tokens from one hop to the next, >= 1; ``kernel_size * dilation <= shape``.
        is_causal: whether a token sees nothing ahead of it along that axis.

    Raises:
        ValueError: if a value is outside its range, which are NATTEN's own.

    Example:
        >>> import graphattn as ga
        >>> graph = ga.neighborhood_graph((4, 4), kernel_size=3)
        >>> rowptr, source = graph.csr()
        >>> source[rowptr[0] : rowptr[1]]  # the corner sees the nine tokens at the corner
        tensor([ 0,  1,  2,  4,  5,  6,  8,  9, 10])
        >>> ga.neighborhood_graph(6, kernel_size=2, dilation=3).edge_index[0].view(6, 2)
        tensor([[0, 3],
                [1, 4],
                [2, 5],
                [0, 3],
                [1, 4],
                [2, 5]])
    """
    sizes = _sizes(shape)
    kernel = _per_axis("kernel_size", kernel_size, len(sizes), 1, 1)
    strides = _per_axis("stride", stride, len(sizes), 1, 1)
    dilations = _per_axis("dilation", dilation, len(sizes), 1, 1)
    causal = _switches("is_causal", is_causal, len(sizes))
    for axis, (size, window, step, apart) in enumerate(
        zip(sizes, kernel, strides, dilations, strict=True)
    ):
        if window * apart > size:
            raise ValueError(
                f"kernel_size * dilation must be <= shape = {size} along axis {axis}, got "
                f"{window} * {apart}"
            )
        if step > window:
            raise ValueError(
                f"stride must be <= kernel_size = {window} along axis {axis}, got {step}"
            )
    if len(sizes) == 1 and causal[0] and strides[0] == 1:
        return TokenGraph(structure=Band(sizes[0], kernel[0] - 1, 0, dilations[0]))
    before = tuple(k - 1 if c else k // 2 for k, c in zip(kernel, causal, strict=True))
    return TokenGraph(
        structure=GridWindows(
            sizes,
            before,
            tuple(k - 1 - b for k, b in zip(kernel, before, strict=True)),
            dilations,
            strides,
            tuple(not c for c in causal),
        )
    )


def _windows(
    shape: tuple[int, ...],
    radius: Any,
    metric: Any,
    class_token: Any,
    dilation: Any,
    causal: Any,
    border: Any,
) -> GridWindows:
    """The structure of checked arguments."""
    axes = len(shape)
    radii = _per_axis("radius", radius, axes, 1, 0)
    metric = as_choice("metric", metric, ("chebyshev", "manhattan"))
    dilations = _per_axis("dilation", dilation, axes, 1, 1)
    causes = _switches("causal", causal, axes)
    border = as_choice("border", border, ("cut", "shift"))
    if metric == "manhattan" and len(set(radii)) > 1:
        raise ValueError(f"radius must be one number with metric='manhattan', got {radius!r}")
    if metric == "manhattan" and border == "shift":
        raise ValueError("border must be 'cut' with metric='manhattan', got 'shift'")
    shift = tuple(border == "shift" and not cause for cause in causes)
    for axis, (size, reach, apart) in enumerate(zip(shape, radii, dilations, strict=True)):
        if shift[axis] and (2 * reach + 1) * apart > size:
            raise ValueError(
                f"radius must leave the window inside with border='shift': (2 * radius + 1) * "
                f"dilation <= {size} along axis {axis}, got radius {reach} and dilation {apart}"
            )
    return GridWindows(
        shape,
        radii,
        tuple(0 if cause else reach for cause, reach in zip(causes, radii, strict=True)),
        dilations,
        (1,) * axes,
        shift,
        metric,
        bool(class_token),
    )


def _sizes(shape: Any) -> tuple[int, ...]:
    """A grid's sizes, one for each axis."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        return (as_int("shape", shape, 1),)
    if not shape:
        raise ValueError(f"shape must hold a size >= 1 for each axis, got {shape!r}")
    return tuple(as_int(f"shape[{axis}]", size, 1) for axis, size in enumerate(shape))


def _per_axis(name: str, value: Any, axes: int, least: int, least_of_one: int) -> tuple[int, ...]:
    """One whole number for all axes, or one for each of them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (as_int(name, value, least),) * axes
    if len(value) != axes:
        raise ValueError(
            f"{name} must be an integer >= {least}, or {axes} of them (>= {least_of_one}), one for "
            f"each axis, got {value!r}"
        )
    found = tuple(as_int(f"{name}[{a}]", own, least_of_one) for a, own in enumerate(value))
    if max(found) < least:
        raise ValueError(f"{name} must be >= {least} along some axis, got {value!r}")
    return found


def _switches(name: str, value: Any, axes: int) -> tuple[bool, ...]:
    """True or False for all axes, or for each of them."""
    each = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * axes
    if len(each) != axes or any(own not in (False, True) for own in each):
        raise ValueError(
            f"{name} must be True or False, or {axes} of them, one for each axis, got {value!r}"
        )
    return tuple(bool(own) for own in each)
