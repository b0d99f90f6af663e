"""Launches of the library, executed by the emulator in place of a GPU."""

from __future__ import annotations

import math
import random
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from graphattn.kernels.check.compile import source, specialize
from graphattn.kernels.shared import launch, tuning

from . import arithmetic, matrices, memory_barriers, transfers, warps
from .bulk_copies import TensorMap
from .global_memory import GlobalMemory
from .machine import Machine
from .ptx import parse
from .shared_memory import WARP

INSTRUCTIONS = {
    **arithmetic.INSTRUCTIONS,
    **transfers.INSTRUCTIONS,
    **warps.INSTRUCTIONS,
    **matrices.INSTRUCTIONS,
    **memory_barriers.INSTRUCTIONS,
}
THREADS = 4096  # of the blocks that run in step: more of them cost less each, and more memory
CAPABILITIES = {"sm_80": 80, "sm_90": 90}


class Compiled(NamedTuple):
    """A kernel as the compiler made it."""

    ptx: str
    shared_bytes: int
    parameters: list[tuple[int, ...]]  # places of the arguments that are passed, in order
    maps: list[dict[str, Any]] = []  # how tensor maps are to be made, in order  # noqa: RUF012


class Emulated(NamedTuple):
    """A launch that was executed, and what was noticed."""

    kernel: str
    constants: dict[str, Any]  # the compiled version: constants, dtypes
    blocks: int
    warps: int
    instructions: int  # executed, each for a batch of blocks
    findings: str  # "none", or a line for each
    remarks: dict[str, int]  # what is odd and no mistake, and how often
    compile_seconds: float
    run_seconds: float


class Device:
    """An emulated GPU: runs launches, and keeps a record of them.

    Args:
        arch: "sm_80" or "sm_90".
        seed: of the order in which blocks run.

    Example::

        device = Device("sm_90")
        with device.emulating():
            out, lse, saved = forward(inputs)  # CPU tensors
        assert all(launch.findings == "none" for launch in device.launches)
    """

    def __init__(self, arch: str = "sm_80", seed: int = 0) -> None:
        if arch not in CAPABILITIES:
            raise ValueError(f"arch must be one of {', '.join(CAPABILITIES)}, got {arch!r}")
        self.arch = arch
        self.launches: list[Emulated] = []
        self._order = random.Random(seed)
        self._compiled: dict[str, Compiled] = {}
        self._machines: dict[str, Machine] = {}

    @contextmanager
    def emulating(self) -> Iterator[Device]:
        """Run launches of the library here, within the block."""
        with tuning.compiling_for(self.arch), launch.redirected(self.run):
            yield self

    def run(self, started: launch.Launch) -> None:
        """Execute a launch, and record it."""
        if 0 in started.grid:
            return
        begin = time.perf_counter()
        compiled = self.compile(started)
        compiled_at = time.perf_counter()
        machine = self.machine(compiled, started.num_warps)
        machine.findings.clear()
        machine.executed = 0
        self.execute(machine, compiled, started)
        self.launches.append(
            Emulated(
                started.kernel.fn.__name__,
                dict(_constants(started.arguments)),
                math.prod(started.grid),
                started.num_warps,
                machine.executed,
                str(machine.findings),
                dict(machine.findings.remarks),
                compiled_at - begin,
                time.perf_counter() - compiled_at,
            )
        )

    def compile(self, started: launch.Launch) -> Compiled:
        """The PTX of a launch's kernel, made once for every version of it."""
        from triton import compile
        from triton.backends.compiler import GPUTarget

        signature, constants, attributes = specialize(started, "cuda")
        options = started.options
        function = started.kernel.fn
        key = repr(
            (function.__module__, function.__name__, signature, constants, attributes, options)
        )
        if key not in self._compiled:
            kernel = compile(
                source(started, signature, constants, attributes),
                target=GPUTarget("cuda", CAPABILITIES[self.arch], 32),
                options=options,
            )
            places = [
                place
                for i, parameter in enumerate(started.kernel.params)
                for place in _passed((i,), signature[parameter.name])
            ]
            maps = list(getattr(kernel.metadata, "tensordesc_meta", None) or ())
            self._compiled[key] = Compiled(kernel.asm["ptx"], kernel.metadata.shared, places, maps)
        return self._compiled[key]

    def machine(self, compiled: Compiled, num_warps: int) -> Machine:
        """A kernel that is ready to run."""
        if compiled.ptx not in self._machines:
            self._machines[compiled.ptx] = self.new_machine(compiled, num_warps)
        return self._machines[compiled.ptx]

    def new_machine(self, compiled: Compiled, num_warps: int) -> Machine:
        """Translate a kernel."""
        program = parse(compiled.ptx)
        # Specialised kernels have warps besides those of the launch.
        num_warps = program.threads // WARP or num_warps
        return Machine(program, num_warps, compiled.shared_bytes, INSTRUCTIONS)

    def execute(self, machine: Machine, compiled: Compiled, started: launch.Launch) -> None:
        """Run all blocks of a launch, some at a time, in any order."""
        values = [started.arguments.get(p.name, p.default) for p in started.kernel.params]
        maps, bits = iter(compiled.maps), []
        for place in compiled.parameters:
            bits += _passed_as(_at(values, place), maps)
        bits += [0] * (len(machine.program.parameters) - len(bits))  # scratch memory, not used
        memory = GlobalMemory(launch.tensors_in(started.arguments.values()), machine.findings)
        blocks = list(range(math.prod(started.grid)))
        self._order.shuffle(blocks)
        at_once = max(1, THREADS // machine.block_threads)
        for begin in range(0, len(blocks), at_once):
            machine.run(started.grid, bits, memory, blocks[begin : begin + at_once])


def _passed(place: tuple[int, ...], kind: Any) -> Iterator[tuple[int, ...]]:
    """Places of what is passed to the kernel: constants are compiled into it."""
    if isinstance(kind, tuple):
        for i, part in enumerate(kind):
            yield from _passed((*place, i), part)
    elif kind != "constexpr":
        yield place


def _at(values: Any, place: tuple[int, ...]) -> Any:
    for i in place:
        values = values[i]
    return values


def _passed_as(value: Any, maps: Iterator[dict[str, Any]]) -> list[Any]:
    """An argument as the launcher passes it: a tensor map is followed by sizes and strides."""
    if hasattr(value, "block_shape"):
        return [TensorMap.of(value, next(maps)), *value.shape, *value.strides]
    return [_bits(value)]


def _bits(value: Any) -> int:
    """A parameter as the kernel finds it in memory."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return int(value)


def _constants(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Constants that distinguish versions of a kernel, the dtype of the features ("dtype"), and
    which tensors it has ("tensors")."""
    floats = [x.dtype for x in launch.tensors_in(arguments.values()) if x.is_floating_point()]
    narrowest = min(floats, key=lambda dtype: dtype.itemsize, default="")
    yield "dtype", str(narrowest).removeprefix("torch.")
    yield "tensors", list(_names_of_tensors(arguments.items()))
    for name, value in arguments.items():
        if name.isupper() and isinstance(value, bool | int | str):
            yield name, value


def _names_of_tensors(arguments: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for name, value in arguments:
        if isinstance(value, Tensor):
            yield name.removeprefix("p_")
        elif hasattr(value, "_fields"):
            named = zip(value._fields, value, strict=True)
            yield from (f"{name}.{part}" for part in _names_of_tensors(named))


@cache
def emulated_gpu(arch: str) -> Device:
    """The emulated GPU of an architecture that all tests of a process share."""
    return Device(arch)


@contextmanager
def watched(arch: str) -> Iterator[list[Emulated]]:
    """Run launches within the block on an emulated GPU, and fail if it finds a mistake.

    Yields a list, in which the launches are afterwards.

    Raises:
        AssertionError: with every finding.
    """
    gpu, launches = emulated_gpu(arch), []
    before = len(gpu.launches)
    with gpu.emulating():
        yield launches
    launches += gpu.launches[before:]
    mistaken = [started for started in launches if started.findings != "none"]
    assert not mistaken, "\n".join(f"{started.kernel}: {started.findings}" for started in mistaken)
