"""Sizes of tiles: tables by architecture, precision and window, one line per kernel, by width of a
head. Edge kernels have a table of their own: :func:`choose_for_edges`.

Those for Hopper in half precision and those of edges are the fastest that were found on an H200
with Triton 3.6 (``make gpu STEP=tune``). All others were chosen by registers, shared memory and
instructions of kernels compiled ahead of time (docs/benchmarks/kernels.md), and have not been
measured. Another choice can be tried without editing::

    from graphattn.kernels.shared import tuning
    with tuning.override(forward=tuning.Choice(rows=64, columns=64, num_warps=4, num_stages=2)):
        ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch


class Choice(NamedTuple):
    """Targets and sources of a tile, warps of a program, and stages of its pipeline of loads.

    For edge kernels: segments of a program, and edges of each that it takes at a time.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


Table = dict[str, dict[int, Choice]]  # kernel -> widest head -> choice

# Half precision on Hopper, whose matrix instructions take 64 rows of the first factor at a time.
# In the forward of heads of 64 features three stages were the fastest, but half squares of keys now
# take shared memory, too: with two stages, two programs still share a multiprocessor.
HOPPER: Table = {
    "forward": {64: Choice(64, 128, 4, 2), 128: Choice(128, 64, 8, 3), 256: Choice(64, 32, 4, 2)},
    "d_query": {64: Choice(64, 64, 4, 3), 128: Choice(64, 64, 4, 2), 256: Choice(64, 16, 4, 2)},
    "d_source": {64: Choice(16, 128, 4, 3), 128: Choice(32, 128, 8, 3), 256: Choice(64, 32, 4, 2)},
    "shared_forward": {128: Choice(128, 32, 4, 3), 256: Choice(64, 32, 4, 2)},
    "shared_backward": {64: Choice(64, 32, 4, 3), 256: Choice(32, 32, 4, 1)},
    "d_table": {128: Choice(64, 64, 4, 2), 256: Choice(64, 32, 4, 1)},
    "band_select": {64: Choice(64, 64, 4, 2), 128: Choice(32, 64, 4, 2), 256: Choice(16, 64, 4, 2)},
    "consensus": {64: Choice(128, 64, 8, 1), 128: Choice(64, 32, 4, 3), 256: Choice(64, 32, 8, 3)},
    "consensus_backward": {
        64: Choice(64, 64, 8, 3), 128: Choice(64, 64, 4, 2), 256: Choice(64, 64, 8, 3),
    },
}  # fmt: skip
# Windows of at most SHORT sources: many tiles need a mask there, and smaller ones have fewer pairs
# that are no edges.
HOPPER_SHORT: Table = HOPPER | {
    "forward": {64: Choice(64, 64, 4, 2), 128: Choice(64, 64, 4, 1), 256: Choice(64, 32, 4, 2)},
    "d_query": {128: Choice(64, 32, 4, 2), 256: Choice(64, 16, 4, 2)},
    "d_source": {64: Choice(64, 64, 4, 1), 128: Choice(32, 64, 4, 2), 256: Choice(64, 32, 4, 2)},
    "shared_forward": {
        64: Choice(64, 32, 4, 3), 128: Choice(64, 32, 4, 1), 256: Choice(64, 32, 4, 2),
    },
    "shared_backward": {64: Choice(64, 32, 4, 1), 256: Choice(32, 32, 4, 1)},
}  # fmt: skip
# Windows narrower than NARROW: most pairs of a tile are near a border of the window.
HOPPER_NARROW: Table = HOPPER_SHORT | {
    "forward": {128: Choice(64, 16, 4, 3), 256: Choice(64, 32, 4, 2)},
    "d_query": {128: Choice(64, 16, 4, 3), 256: Choice(64, 16, 4, 2)},
    "d_source": {128: Choice(16, 64, 4, 3), 256: Choice(64, 32, 4, 2)},
    "shared_forward": {128: Choice(64, 16, 4, 4), 256: Choice(64, 32, 4, 2)},
    "shared_backward": {64: Choice(64, 16, 4, 3), 256: Choice(32, 32, 4, 1)},
}
# Half precision on Ampere, AMD's GPUs and others.
OTHERS: Table = {
    "forward": {64: Choice(64, 32, 4, 2), 128: Choice(64, 32, 8, 2), 256: Choice(32, 32, 8, 1)},
    "d_query": {128: Choice(64, 32, 8, 2), 256: Choice(32, 16, 8, 1)},
    "d_source": {64: Choice(16, 64, 8, 2), 128: Choice(16, 64, 8, 1), 256: Choice(16, 32, 8, 1)},
    "shared_forward": {64: Choice(64, 64, 4, 2), 256: Choice(32, 32, 8, 1)},
    "shared_backward": {64: Choice(32, 32, 4, 2), 256: Choice(32, 32, 8, 1)},
    "d_table": {256: Choice(32, 32, 4, 1)},
    "band_select": {256: Choice(16, 32, 2, 2)},
    "consensus": {64: Choice(128, 32, 8, 2), 256: Choice(64, 32, 8, 1)},
    "consensus_backward": {64: Choice(64, 32, 8, 2), 256: Choice(64, 32, 8, 1)},
}
BLACKWELL: Table = OTHERS | {
    "forward": {64: Choice(128, 32, 8, 2), 128: Choice(64, 64, 8, 2), 256: Choice(64, 32, 8, 2)},
    "d_query": {128: Choice(64, 64, 8, 2), 256: Choice(32, 16, 8, 1)},
    "shared_backward": {64: Choice(64, 64, 8, 1), 256: Choice(32, 32, 8, 1)},
    "d_table": {128: Choice(64, 64, 8, 1), 256: Choice(32, 32, 4, 1)},
    "band_select": {256: Choice(64, 32, 8, 2)},
    "consensus": {256: Choice(64, 32, 8, 1)},
    "consensus_backward": {64: Choice(64, 64, 8, 1), 256: Choice(64, 32, 8, 1)},
}
SINGLE: Table = {  # float32
    "forward": {64: Choice(64, 32, 4, 2), 256: Choice(16, 32, 4, 1)},
    "d_query": {64: Choice(32, 32, 4, 1), 256: Choice(16, 32, 4, 1)},
    "d_source": {64: Choice(32, 32, 4, 1), 256: Choice(32, 16, 4, 1)},
    "shared_forward": {64: Choice(32, 32, 4, 2), 256: Choice(16, 32, 4, 1)},
    "shared_backward": {256: Choice(16, 32, 4, 1)},
    "d_table": {256: Choice(16, 32, 4, 1)},
    "band_select": {256: Choice(16, 32, 4, 1)},
    "consensus": {256: Choice(64, 16, 4, 1)},
    "consensus_backward": {256: Choice(32, 16, 8, 1)},
}
SINGLE_ON_AMD: Table = SINGLE | {
    "d_query": {256: Choice(16, 32, 4, 1)},
    "d_source": {256: Choice(16, 32, 4, 1)},
    "consensus_backward": {256: Choice(16, 16, 4, 1)},
}
# Edge kernels: a program is one warp, whose threads share the features of a few edges of some rows.
# Rows and edges of each at a time, by width of a head; rows with fewer edges are taken by more. The
# emulator rules some out that are a little faster: threads that share a sum round it differently.
EDGE_TILES: dict[str, dict[int, tuple[int, int]]] = {
    "edges_forward": {16: (4, 4), 64: (4, 8), 128: (1, 8), 256: (1, 4)},
    "edges_d_query": {16: (4, 8), 32: (8, 8), 64: (4, 2), 128: (1, 4), 256: (1, 2)},
    "edges_d_source": {32: (8, 4), 64: (2, 16), 128: (1, 4), 256: (1, 2)},
    "edges_select": {16: (8, 16), 32: (4, 16), 64: (2, 16), 256: (1, 16)},
    "sum_messages": {32: (1, 4), 256: (2, 2)},
}
OF_EDGES = (*EDGE_TILES, "window_step")
TILE_ELEMENTS = 1024
HELD_ELEMENTS = 16384  # the most elements of the edges whose ranks are held for top-k
# A step of generation has one row a program, and few programs. So more loads are in flight.
STEP_ELEMENTS = 4096
STEP_STAGES = 4
HELD_BY_FOUR_WARPS = 4096  # the most tokens of a window whose ranks four warps hold
HELD_TOKENS = 8192  # the most tokens of a window with top-k; more spill
KERNELS = (*HOPPER, *OF_EDGES)
NARROW = 64  # sources
SHORT = 512
# In heads of at most so many features, programs go over at most so many tokens of the other side at
# a time. ptxas 12.8, which comes with Triton 3.6, computed a wrong address for a product of values
# of 24 features in tiles of 64: the one wrong result on an H200 (docs/log.md).
FEW_FEATURES = 32
OTHER_SIDE = {
    "forward": "columns", "d_query": "columns", "d_source": "rows", "d_table": "columns",
    "shared_forward": "columns", "shared_backward": "columns",
}  # fmt: skip
# Registers of a thread, at most, of programs that also sum up the gradient of the scale; by sizes,
# for heads of so many features. ptxas would take up to a third more, and one program in three or
# four would no longer fit on a multiprocessor beside the others. Other heads would spill: of 40
# features, 56 times in the loop. Chosen by predicted times; no GPU has run them.
SCALE_REGISTERS = {
    Choice(64, 16, 4, 3): (64, 128), Choice(64, 32, 4, 2): (64, 168), Choice(4, 8, 1, 1): (16, 96),
}  # fmt: skip

# Not context variables: on GPUs autograd runs backwards in a thread of its own.
_override: dict[str, Choice] = {}
_architecture: str | None = None


def choose(
    kernel: str, dtype: torch.dtype, width: int, window: int, narrowest: int | None = None
) -> Choice:
    """Choose sizes for heads of `width` features and at most `window` sources a target.

    `narrowest` is the fewest features of a factor of a product, if those are fewer than `width`.

    Example:
        >>> import torch
        >>> from graphattn.kernels.shared import tuning
        >>> with tuning.compiling_for("sm_90"):
        ...     tuning.choose("forward", torch.bfloat16, 64, 4096).columns
        128
        >>> with tuning.override(forward=tuning.Choice(32, 32, 2, 1)):
        ...     tuning.choose("forward", torch.bfloat16, 64, 4096).rows
        32
    """
    if kernel in _override:
        return _override[kernel]
    table = _table(dtype, window)[kernel]
    choice = next(choice for widest, choice in table.items() if width <= widest)
    few = min(width, width if narrowest is None else narrowest) <= FEW_FEATURES
    if few and kernel in OTHER_SIDE and architecture() == "sm_90":
        side = OTHER_SIDE[kernel]
        choice = choice._replace(**{side: min(getattr(choice, side), FEW_FEATURES)})
    return choice


def choose_for_edges(kernel: str, width: int, degree: float) -> Choice:
    """Choose sizes for heads of `width` features and rows of `degree` edges on average; columns are
    slots.

    Example:
        >>> from graphattn.kernels.shared import tuning
        >>> tuning.choose_for_edges("edges_forward", width=64, degree=16.0)
        Choice(rows=4, columns=8, num_warps=1, num_stages=1)
    """
    if kernel in _override:
        return _override[kernel]
    width, slots = power_of_2(width), power_of_2(math.ceil(degree))
    if kernel == "window_step":
        warps = 4 if slots <= HELD_BY_FOUR_WARPS else 8
        return Choice(1, max(1, min(slots, STEP_ELEMENTS // width)), warps, STEP_STAGES)
    table = EDGE_TILES[kernel]
    rows, most = table[min((widest for widest in table if width <= widest), default=max(table))]
    if kernel == "edges_select":  # slots for a whole row, except for rows much above average
        slots = max(1, min(max(slots, 16), 128, HELD_ELEMENTS // width))
        warps = min(8, max(1, slots * width // (2 * TILE_ELEMENTS)))
        return Choice(rows if slots <= most else 1, slots, warps, 1)
    slots = min(slots, most)
    return Choice(rows * most // slots, slots, 1, 1)


def most_registers(choice: Choice, *widths: int) -> int | None:
    """Bound the registers of a thread in d_query with the gradient of the scale; None: no bound.

    `widths` are features of queries and values.

    Example:
        >>> from graphattn.kernels.shared import tuning
        >>> with tuning.compiling_for("sm_90"):
        ...     tuning.most_registers(tuning.Choice(64, 32, 4, 2), 64, 64)
        168
    """
    width, registers = SCALE_REGISTERS.get(choice, (0, None))
    return registers if architecture() == "sm_90" and set(widths) == {width} else None


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is `number` or more."""
    return 1 << max(number - 1, 0).bit_length()


def _table(dtype: torch.dtype, window: int) -> Table:
    if dtype == torch.float32:
        return SINGLE_ON_AMD if is_amd() else SINGLE
    if architecture() == "sm_90":
        return HOPPER_NARROW if window < NARROW else HOPPER_SHORT if window <= SHORT else HOPPER
    return BLACKWELL if architecture() in ("sm_100", "sm_103") else OTHERS


def architecture() -> str:
    """Return the architecture that kernels are compiled for, by its maker's name, as "sm_90".

    It is that of the current CUDA device. Operations run with the device of their tensors as the
    current one (:func:`graphattn.kernels.shared.launch.on_its_device`).
    """
    if _architecture is not None:
        return _architecture
    return _of_device(torch.cuda.current_device()) if _has_devices() else "none"


def reads_weights_on_chip() -> bool:
    """Whether matrix instructions read their second factor from shared memory directly."""
    return architecture() in ("sm_90", "sm_100", "sm_103")


def most_columns(dtype: torch.dtype) -> int:
    """Bound the columns of a product of edges with weights, whose sums stay in registers."""
    if dtype == torch.float32:
        return 64
    return 256 if reads_weights_on_chip() else 128


def is_amd() -> bool:
    """Whether kernels are compiled for a GPU by AMD."""
    return architecture().startswith("gfx")


@cache
def _has_devices() -> bool:
    return torch.cuda.is_available()


@cache
def _of_device(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@contextmanager
def compiling_for(architecture: str) -> Iterator[None]:
    """Launch as on another architecture within the block: for compiling ahead of time."""
    global _architecture
    before, _architecture = _architecture, architecture
    try:
        yield
    finally:
        _architecture = before


@contextmanager
def override(**choices: Choice) -> Iterator[None]:
    """Let the named kernels take these sizes within the block.

    Raises:
        ValueError: for a kernel that does not exist, or sizes that are no powers of two, from 16
            on (of edge kernels from 1 on).
    """
    for kernel, choice in choices.items():
        if kernel not in KERNELS:
            raise ValueError(f"kernels are {', '.join(KERNELS)}; got {kernel!r}")
        for size in choice[:2]:
            least = 1 if kernel in OF_EDGES else 16
            if size < least or size & (size - 1):
                raise ValueError(
                    f"rows and columns of {kernel} must be powers of 2 >= {least}: {size}"
                )
    global _override
    before, _override = _override, {**_override, **choices}
    try:
        yield
    finally:
        _override = before
