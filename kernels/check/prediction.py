"""How long a launch takes on an H200, predicted from counted work and compiled code.

The model, in sentences:

- Every unit (device memory, cache, matrix products, issue slots, special functions) needs at least
  the time of its work, if all multiprocessors share the work equally. No launch is faster than the
  unit with the longest time.
- What programs read again and again comes from the cache at best: rows of neighbours and, in
  attention over bands, the tiles of the other side, which every program of a head reads by itself.
  Programs of fewer rows read more of them. Of a table of neighbours that is larger than the cache,
  the share that does not fit comes from memory.
- A warp issues an instruction every `WARP_CLOCKS` clocks: most wait for the result of one before.
  A scheduler issues one per clock only if it has so many warps.
- A program waits for the products that it has started before it computes with them: Triton emits
  waits for wgmma that leave none in flight. So within one program the times of products and of
  instructions add up. If some waits let products go on (`Compiled.open_waits`), this share of the
  products overlaps with the rest.
- The time of memory adds to this sum, too, unless loads are in flight while the program computes:
  asynchronous copies in a loop (`Compiled.copies`), which Triton emits for more than one stage.
- A program waits for memory (`LATENCY`) when it starts: for its place in a schedule, and for its
  own rows. It waits again whenever it looks up rows of neighbours.
- A program of fewer than four warps leaves schedulers of its multiprocessor idle, and a launch of
  few programs leaves multiprocessors idle. The sum is divided by the share that is used.
- Several programs share a multiprocessor if registers, shared memory and warps suffice and the
  launch has enough programs. While one of them waits, others compute. So the sum is divided by
  their number.
- Groups of warps of one program that are not in step (kernels of `bands.hopper`) count as programs:
  while one waits for a product, others compute. Their copies are made by another warp, ahead.
- The prediction is the larger of this quotient and of the longest time of a unit, plus the time in
  which an empty launch starts and ends (`START`).

Where products are formed by multiply-adds instead of matrix instructions, they take issue slots,
where they are counted already; they do not add to the sum.

Four numbers are fitted to times on an NVIDIA H200 (Triton 3.6, 175 launches, commit cdef0c3):
`WARP_CLOCKS` to the three launches of complete attention in float16, `LATENCY` with two `WAITS` to
the windows of 8 and to the forward of the kNN graph (k 16, 64 features), and `START` to row dots.
Over all launches, measured / predicted has the median 1.03; a tenth is below 0.86 and a tenth above
1.37. With one instruction per clock, the shorter loop for masked tiles, and neither waits nor a
start, these were 2.13, 1.19 and 3.83.

The last wave of programs, conflicts in shared memory and loops whose length depends on the data are
not included. Where these matter, launches take longer: nearest neighbours (k 64: 1.95, k 256: 3.7),
consensus with 128 or more features (1.7 to 2.1), heads of 256 features (1.3 to 1.7).
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
CACHE = 50e6  # bytes, the L2 cache
# Of the rate of wgmma, what the instruction before it (mma.sync, HMMA) reaches on Hopper: Luo et
# al. 2024, "Benchmarking and dissecting the NVIDIA Hopper GPU architecture".
WITHOUT_WGMMA = 0.62
# Fitted to measured launches, as the top of this module says.
WARP_CLOCKS = 4.6  # from one instruction of a warp to the next
LATENCY = 0.8e-6  # seconds that a program waits for memory that others use, too
WAITS = 2  # of a program for memory before it computes
START = 9e-6  # seconds of an empty launch


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
    start_s: float = 0.0  # start and end of a launch

    @property
    def units(self) -> tuple[float, ...]:
        """The seconds of every unit."""
        return self[:5]

    @property
    def seconds(self) -> float:
        """The start, and the longest time of a unit, or that of one thing after the other."""
        return self.start_s + max(*self.units, self.in_turn_s / self.programs)

    @property
    def limit(self) -> str:
        """Name of the limit that takes the longest time."""
        longest = max(self.units)
        if self.start_s > max(longest, self.in_turn_s / self.programs):
            return "start"
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
    prediction = Prediction(
        bytes_s=configuration.bytes / BYTES_PER_SECOND,
        cache_s=_gathering(configuration),
        matrix_s=configuration.flops / products_per_second(configuration, compiled),
        issue_s=instructions / (MULTIPROCESSORS * SCHEDULERS * CLOCK),
        special_s=special * WARP / (SPECIAL_LANES * MULTIPROCESSORS * CLOCK),
        programs=programs_at_once(configuration, compiled) * configuration.groups,
        start_s=START,
    )
    return prediction._replace(in_turn_s=_in_turn(prediction, configuration, compiled))


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


def _gathering(configuration: Configuration) -> float:
    """Seconds in which the cache, and memory for what does not fit, give what is gathered."""
    missed = max(0.0, 1 - CACHE / configuration.table) if configuration.table else 0.0
    return configuration.gathered * (missed / BYTES_PER_SECOND + (1 - missed) / CACHE_PER_SECOND)


def _in_turn(prediction: Prediction, configuration: Configuration, compiled: Compiled) -> float:
    """Seconds of a launch with one program per multiprocessor, of what does not overlap."""
    warps, programs = configuration.launch.num_warps, math.prod(configuration.launch.grid)
    products = prediction.matrix_s * max(1.0, SCHEDULERS / warps) if compiled.matrix else 0.0
    awaited = products * (1 - compiled.open_waits / max(compiled.waits, 1))
    issued = prediction.issue_s * WARP_CLOCKS * SCHEDULERS / warps
    computing = max(products, awaited + issued)
    latency = LATENCY * (WAITS * programs + configuration.lookups) / MULTIPROCESSORS
    idle = max(1.0, MULTIPROCESSORS / programs)
    memory = max(prediction.bytes_s, prediction.cache_s)
    computing, latency = computing * idle, latency * idle
    return latency + (max(memory, computing) if compiled.copies else memory + computing)


def _issued(configuration: Configuration, compiled: Compiled) -> tuple[float, float]:
    """Numbers of instructions and special functions of all warps; each warp does every pass."""
    programs = configuration.programs or math.prod(configuration.launch.grid)
    loops, passes = compiled.loops, configuration.passes
    if len(passes) > len(loops):
        raise ValueError(
            f"passes must be at most one number for each of {len(loops)} loops with products, "
            f"got {passes}"
        )
    main = (compiled.loop_instructions, compiled.loop_special)
    if passes:
        runs = [*zip(passes, loops, strict=False), (programs, compiled.outside)]
    elif loops:
        runs = [(configuration.iterations, main), (programs, compiled.outside)]
    else:  # code that is in no such loop is one pass as a whole
        runs = [(configuration.iterations or programs, main)]
    warps = configuration.launch.num_warps
    instructions, special = (warps * sum(n * code[i] for n, code in runs) for i in (0, 1))
    return instructions, special


def products_per_second(configuration: Configuration, compiled: Compiled) -> float:
    """Operations per second of the unit that forms the products, read from the machine code."""
    if not compiled.matrix:
        return FP32_PER_SECOND
    share = 1.0 if any("HGMMA" in name for name in compiled.matrix) else WITHOUT_WGMMA
    if not any("TF32" in name for name in compiled.matrix):
        return share * HALF_PER_SECOND
    constants = configuration.launch.arguments.values()
    thrice = any(isinstance(value, str) and value == "tf32x3" for value in constants)
    return share * (TF32_PER_SECOND / 3 if thrice else TF32_PER_SECOND)
