"""How long a launch takes on an H200, predicted from counted work and compiled code.

The model, in sentences:

- Every unit (device memory, cache, matrix products, issue slots, special functions) needs at least
  the time of its work, if all multiprocessors share the work equally. No launch is faster than the
  unit with the longest time.
- What programs read again and again comes from the cache at best: rows of neighbours and, in
  attention over bands, the tiles of the other side, which every program of a head reads by itself.
  Programs of fewer rows read more of them.
- A program waits for the products that it has started before it computes with them: Triton emits
  waits for wgmma that leave none in flight. So within one program the times of products, of issue
  slots and of special functions add up. If some waits let products go on (`Compiled.open_waits`),
  this share of the products overlaps with the rest.
- The time of memory adds to this sum, too, unless loads are in flight while the program computes:
  asynchronous copies in a loop (`Compiled.copies`), which Triton emits for more than one stage.
- A program of fewer than four warps leaves schedulers of its multiprocessor idle. Its sum is
  divided by the share of those that it uses.
- Several programs share a multiprocessor if registers, shared memory and warps suffice and the
  launch has enough programs. While one of them waits, others compute. So the sum is divided by
  their number.
- The prediction is the larger of this quotient and of the longest time of a unit.

Where products are formed by multiply-adds instead of matrix instructions, they take issue slots,
where they are counted already; they do not add to the sum.

Latencies, the start of a launch, the last wave of programs and cache misses are not included. How
much they add, only a measurement can say.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from graphattn.kernels.check.compile import KIB, Compiled

if TYPE_CHECKING:
    from graphattn.kernels.shared.configuration import Configuration

# NVIDIA H200 data sheet and Hopper architecture white paper, unless measured.
MULTIPROCESSORS = 132
SCHEDULERS = 4  # per multiprocessor; each issues one instruction of one warp per clock
CLOCK = 1.98e9  # Hz, boost
WARP = 32  # threads
SPECIAL_LANES = 16  # special-function results per clock and multiprocessor
FP32_LANES = 128  # fused multiply-adds per clock and multiprocessor
BYTES_PER_SECOND = 4.3e12  # measured: a copy in device memory, reads and writes counted
CACHE_PER_SECOND = 5.5e12  # an estimate: published measurements of the L2 cache of an H100
HALF_PER_SECOND = 790e12  # measured: a large bfloat16 product (dense data sheet value 989e12)
TF32_PER_SECOND = 494e12  # dense data sheet value
# What the programs on one multiprocessor share: CUDA C++ programming guide, compute capability 9.0.
REGISTERS = 65536
REGISTERS_AT_ONCE = 256  # are given to a warp
SHARED = 228 * KIB
SHARED_OF_DRIVER = KIB  # per program
MOST_WARPS = 64
MOST_PROGRAMS = 32
FP32_PER_SECOND = 2 * FP32_LANES * MULTIPROCESSORS * CLOCK


class Prediction(NamedTuple):
    """Predicted seconds of one launch on an H200, for each unit and for what does not overlap.

    >>> prediction = Prediction(2e-6, 1e-6, matrix_s=3e-6, issue_s=5e-6, special_s=1e-6)
    >>> prediction.seconds, prediction.limit
    (5e-06, 'issue slots')
    >>> prediction = prediction._replace(in_turn_s=9e-6)
    >>> prediction.seconds, prediction.limit
    (9e-06, 'one after the other')
    >>> prediction._replace(programs=2).seconds
    5e-06
    """

    bytes_s: float  # device memory
    cache_s: float  # rows of features that are read again and again, at best from the L2 cache
    matrix_s: float  # matrix products
    issue_s: float  # issue slots: instructions of all warps
    special_s: float  # exp2, log2, 1 / x, ...
    in_turn_s: float = 0.0  # the sum of what does not overlap, with one program per multiprocessor
    programs: int = 1  # on a multiprocessor at a time

    @property
    def units(self) -> tuple[float, ...]:
        """The seconds of every unit."""
        return self[:5]

    @property
    def seconds(self) -> float:
        """The prediction: the longest time of a unit, or that of one thing after the other."""
        return max(*self.units, self.in_turn_s / self.programs)

    @property
    def limit(self) -> str:
        """Name of the limit that takes the longest time."""
        longest = max(self.units)
        if self.in_turn_s / self.programs > longest:
            return "one after the other"
        names = ("bytes", "gathers", "matrix", "issue slots", "special functions")
        return names[self.units.index(longest)]


def predict(configuration: Configuration, compiled: Compiled) -> Prediction:
    """The predicted time of one launch on an H200, from its counted work.

    The model is described at the top of this module.

    Args:
        configuration: operations, bytes and passes through the main loop of the whole launch.
        compiled: its kernel compiled for sm_90.

    Raises:
        ValueError: `compiled` is for another architecture.
    """
    if compiled.arch != "sm_90":
        raise ValueError(f"compiled must be for sm_90 (an H200), got {compiled.arch}")
    instructions, special = _issued(configuration, compiled)
    found = Prediction(
        bytes_s=configuration.bytes / BYTES_PER_SECOND,
        cache_s=configuration.gathered / CACHE_PER_SECOND,
        matrix_s=configuration.flops / products_per_second(configuration, compiled),
        issue_s=instructions / (MULTIPROCESSORS * SCHEDULERS * CLOCK),
        special_s=special * WARP / (SPECIAL_LANES * MULTIPROCESSORS * CLOCK),
        programs=programs_at_once(configuration, compiled),
    )
    return found._replace(in_turn_s=_in_turn(found, configuration.launch.num_warps, compiled))


def programs_at_once(configuration: Configuration, compiled: Compiled) -> int:
    """How many programs of a launch are on one multiprocessor at a time."""
    launch = configuration.launch
    per_warp = math.ceil(compiled.registers * WARP / REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    # Every scheduler has a quarter of the registers, for its own warps.
    warps = SCHEDULERS * (REGISTERS // SCHEDULERS // max(per_warp, REGISTERS_AT_ONCE))
    fitting = (
        min(warps, MOST_WARPS) // launch.num_warps,
        SHARED // (compiled.shared + SHARED_OF_DRIVER),
        MOST_PROGRAMS,
        math.ceil(math.prod(launch.grid) / MULTIPROCESSORS),
    )
    return max(1, min(fitting))


def _in_turn(found: Prediction, warps: int, compiled: Compiled) -> float:
    """Seconds of a launch with one program per multiprocessor, of what does not overlap."""
    products = found.matrix_s if compiled.matrix else 0.0
    awaited = products * (1 - compiled.open_waits / max(compiled.waits, 1))
    computing = max(products, awaited + found.issue_s + found.special_s)
    computing *= max(1.0, SCHEDULERS / warps)
    memory = max(found.bytes_s, found.cache_s)
    return max(memory, computing) if compiled.copies else memory + computing


def _issued(configuration: Configuration, compiled: Compiled) -> tuple[float, float]:
    """Numbers of instructions and special functions of all warps; each warp does every pass."""
    warps = configuration.launch.num_warps
    if not configuration.passes:
        passes = configuration.iterations * warps
        return compiled.loop_instructions * passes, compiled.loop_special * passes
    if len(configuration.passes) != len(compiled.loops):
        raise ValueError(
            f"passes must be one number for each of {len(compiled.loops)} loops with products, "
            f"got {configuration.passes}"
        )
    times = (*configuration.passes, configuration.programs)
    instructions, special = (
        warps
        * sum(
            n * loop[i] for n, loop in zip(times, (*compiled.loops, compiled.outside), strict=True)
        )
        for i in (0, 1)
    )
    return instructions, special


def products_per_second(configuration: Configuration, compiled: Compiled) -> float:
    """Operations per second of the unit that forms the products, read from the machine code."""
    if not compiled.matrix:
        return FP32_PER_SECOND
    if not any("TF32" in name for name in compiled.matrix):
        return HALF_PER_SECOND
    constants = configuration.launch.arguments.values()
    thrice = any(isinstance(value, str) and value == "tf32x3" for value in constants)
    return TF32_PER_SECOND / 3 if thrice else TF32_PER_SECOND
