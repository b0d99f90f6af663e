"""Graphs of windows and blocks on images, volumes, and grids with any number of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import Grid, GridWindows
from graphattn.graphs.structures.structure import Band
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
    """Every token of a height x width image sees itself and the tokens within `radius` of it.

    Tokens are in row-major order. `radius`, `dilation` and `causal` take one value, or one value
    per axis: (down, right). At the border of the image, windows are cut, so a token there sees
    fewer tokens. With ``border="shift"``, windows are shifted inside instead, and all tokens see
    equally many, as in NATTEN. (:func:`~graphattn.neighborhood_graph` takes NATTEN's own
    arguments.) ::

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
        radius: how many hops the window reaches to each side, >= 1. With one value per axis, one of
            them may be 0.
        metric: `"chebyshev"` makes the window a square. `"manhattan"` makes it a diamond, which
            limits the sum of hops along both axes; it takes one radius, and only `border="cut"`.
        class_token: whether there is a token before the image (token 0) that sees all tokens and is
            seen by all.
        dilation: the distance from one hop to the next, in tokens, >= 1.
        causal: whether a token sees no tokens ahead of it along that axis. If all axes are causal
            and there is no class token, the graph is causal.
        border: `"cut"`, or `"shift"`, which shifts a window that would leave the image inside. A
            causal axis is always cut.

    Raises:
        ValueError: if a size is too small, `metric` or `border` is not one of the values above, a
            window is larger than its axis with ``border="shift"``, or ``metric="manhattan"`` has
            two radii or ``border="shift"``.

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
    windows = _windows(shape, radius, metric, class_token, dilation, causal, border)
    same = windows.before == windows.after and len({*windows.before, *windows.after}) == 1
    if same and set(windows.dilation) == {1} and not any(windows.shift):
        reach = windows.before[0]
        return TokenGraph(structure=Grid(*shape, reach, windows.metric, windows.class_token))
    return TokenGraph(structure=windows)


def grid_block_graph(
    height: int, width: int, block_size: PerAxis, *, shift: PerAxis = 0
) -> TokenGraph:
    """Every token of a height x width image sees all tokens of its own block, including itself.

    These are the windows of Swin (Liu et al., 2021), which do not overlap. Tokens are in row-major
    order. `block_size` and `shift` take one value, or one value per axis: (down, right). With
    `shift`, blocks begin at shift, shift + block_size, ... along every axis. Blocks at the border
    of the image are cut, not wrapped around, as in :func:`~graphattn.block_window_graph`. (Swin
    rolls the image around and masks the pairs that do not belong together. The result is the
    same.) ::

        block_size = 4, shift = 2, 8 x 8 tokens, numbered by their block:

            0 0 1 1 1 1 2 2
            0 0 1 1 1 1 2 2
            3 3 4 4 4 4 5 5
            3 3 4 4 4 4 5 5
            3 3 4 4 4 4 5 5
            3 3 4 4 4 4 5 5
            6 6 7 7 7 7 8 8
            6 6 7 7 7 7 8 8

    A table of relative positions for this graph (:class:`~graphattn.nn.OffsetBias`) has
    ``(2 * block_size - 1)**2`` rows, as in Swin.

    Args:
        height, width: size of the image in tokens, >= 1.
        block_size: tokens per block along an axis, >= 1.
        shift: 0 <= shift < block_size. In Swin it is 0 and ``block_size // 2`` in alternate layers.

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
    shifts = _per_axis("shift", shift, 2, 0, 0)
    for axis, (move, size) in enumerate(zip(shifts, block, strict=True)):
        if move >= size:
            raise ValueError(f"shift must be < block_size = {size} along axis {axis}, got {move}")
    return TokenGraph(structure=GridBlocks(height, width, block, shifts))


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

    It is :func:`~graphattn.grid_window_graph` with one axis more. Tokens are in row-major order,
    one frame after the other. `radius`, `dilation` and `causal` take one value, or one value per
    axis: (through, down, right). With ``causal=(True, False, False)``, no token of a video sees a
    later frame. With ``metric="manhattan"`` and radius 1, voxels that share a face see each other.

    Raises:
        ValueError: in the same cases as :func:`~graphattn.grid_window_graph`.

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
    """Every token of a grid sees its window of neighborhood attention, with NATTEN's arguments.

    The edges are those of NATTEN's `na1d`, `na2d` and `na3d`. A window has `kernel_size` tokens
    along every axis. If `kernel_size` is even, there is one token more before the target than after
    it. Near a border the window is shifted inside, so that its size stays the same. Along a causal
    axis, the window ends at the target and is cut at the border. With `stride`, that many
    neighbouring tokens share the window of the middle one. (Along a causal axis they share the
    window of the last one, and each sees the part that is not ahead of it.) With `dilation`, all
    this applies separately to the tokens of each remainder modulo `dilation`. Tokens are in
    row-major order, which is ``x.flatten(1, 2)`` of NATTEN's ``[B, height, width, ...]``.

    A table of relative positions for this graph (:class:`~graphattn.nn.OffsetBias`) has
    ``2 * kernel_size - 1`` rows along an axis that is not causal, as NATTEN's ``rpb``, and
    `kernel_size` rows along a causal axis.

    Sources: Hassani et al., Neighborhood Attention Transformer (CVPR 2023); Dilated Neighborhood
    Attention Transformer (2022); Faster Neighborhood Attention (NeurIPS 2024) for causal axes;
    Generalized Neighborhood Attention (2025) for strides.

    Args:
        shape: the size of the grid in tokens: one number for a sequence, or one number per axis;
            all >= 1.
        kernel_size: tokens of a window, one value or one value per axis, >= 1.
        stride: tokens that share a window, >= 1 and <= `kernel_size`.
        dilation: the distance from one hop to the next, in tokens, >= 1;
            ``kernel_size * dilation <= shape``.
        is_causal: whether a token sees no tokens ahead of it along that axis.

    Raises:
        ValueError: if a value is outside its range. The ranges are those of NATTEN.

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
    for axis, (size, window, step, spacing) in enumerate(
        zip(sizes, kernel, strides, dilations, strict=True)
    ):
        if window * spacing > size:
            raise ValueError(
                f"kernel_size * dilation must be <= shape = {size} along axis {axis}, got "
                f"{window} * {spacing}"
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
    """Check the arguments and return the structure of the windows."""
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
    for axis, (size, reach, spacing) in enumerate(zip(shape, radii, dilations, strict=True)):
        if shift[axis] and (2 * reach + 1) * spacing > size:
            raise ValueError(
                f"radius must be so small that the window fits into the grid with border='shift': "
                f"(2 * radius + 1) * dilation must be <= {size} along axis {axis}, got radius "
                f"{reach} and dilation {spacing}"
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
    """Return the sizes of a grid, one per axis, after checking them."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        return (as_int("shape", shape, 1),)
    if not shape:
        raise ValueError(f"shape must hold a size >= 1 for each axis, got {shape!r}")
    return tuple(as_int(f"shape[{axis}]", size, 1) for axis, size in enumerate(shape))


def _per_axis(name: str, value: Any, axes: int, least: int, least_of_one: int) -> tuple[int, ...]:
    """Return one integer per axis, from one for all axes or one for each.

    One for all, and at least one of several, must be >= `least`; all must be >= `least_of_one`.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (as_int(name, value, least),) * axes
    if len(value) != axes:
        raise ValueError(
            f"{name} must be an integer >= {least}, or {axes} integers >= {least_of_one}, one for "
            f"each axis, got {value!r}"
        )
    per_axis = tuple(as_int(f"{name}[{a}]", entry, least_of_one) for a, entry in enumerate(value))
    if max(per_axis) < least:
        raise ValueError(f"{name} must be >= {least} along at least one axis, got {value!r}")
    return per_axis


def _switches(name: str, value: Any, axes: int) -> tuple[bool, ...]:
    """Return one bool per axis, from one for all axes or one for each."""
    each = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * axes
    if len(each) != axes or any(switch not in (False, True) for switch in each):
        raise ValueError(
            f"{name} must be a bool, or {axes} bools, one for each axis, got {value!r}"
        )
    return tuple(bool(switch) for switch in each)
