"""How long a launch would take on an H200 if one unit were the only limit: predictions.

No launch is faster than the largest of these. How much slower it is, only a measurement can say:
latencies, the start of a launch, the last wave of programs and cache misses are not included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphattn.kernels.check.compile import Compiled

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
FP32_PER_SECOND = 2 * FP32_LANES * MULTIPROCESSORS * CLOCK


class Prediction(NamedTuple):
    """Predicted seconds of one launch on an H200, for each unit that may limit it.

    >>> prediction = Prediction(2e-6, 1e-6, matrix_s=3e-6, issue_s=5e-6, special_s=1e-6)
    >>> prediction.seconds, prediction.limit
    (5e-06, 'issue slots')
    """

    bytes_s: float  # device memory
    cache_s: float  # gathered rows of features, at best from the L2 cache
    matrix_s: float  # matrix products
    issue_s: float  # issue slots: instructions of all warps
    special_s: float  # exp2, log2, 1 / x, ...

    @property
    def seconds(self) -> float:
        """The largest of them, which is the prediction."""
        return max(self)

    @property
    def limit(self) -> str:
        """Name of the limit that takes the longest time."""
        names = ("bytes", "gathers", "matrix", "issue slots", "special functions")
        return names[self.index(max(self))]


def predict(configuration: Configuration, compiled: Compiled) -> Prediction:
    """The predicted time of one launch on an H200, from its counted work.

    Args:
        configuration: operations, bytes and passes through the main loop of the whole launch.
        compiled: its kernel compiled for sm_90.

    Raises:
        ValueError: `compiled` is for another architecture.
    """
    if compiled.arch != "sm_90":
        raise ValueError(f"compiled must be for sm_90 (an H200), got {compiled.arch}")
    instructions, special = _issued(configuration, compiled)
    return Prediction(
        bytes_s=configuration.bytes / BYTES_PER_SECOND,
        cache_s=configuration.gathered / CACHE_PER_SECOND,
        matrix_s=configuration.flops / products_per_second(configuration, compiled),
        issue_s=instructions / (MULTIPROCESSORS * SCHEDULERS * CLOCK),
        special_s=special * WARP / (SPECIAL_LANES * MULTIPROCESSORS * CLOCK),
    )


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
