"""Kernels compiled without a device, and facts about them from their machine code.

Triton compiles for any architecture on any machine; registers, spills, shared memory, matrix
instructions and the length of the main loop can be read from the result. What this never shows:
races, wrong numbers, and the time a launch really takes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphattn.kernels.check.machine_code import LOCAL, counts, read_amdgcn, read_sass
from graphattn.kernels.shared.launch import Launch

KIB = 1024


class Architecture(NamedTuple):
    """Triton's name of a device, the limits of one program on it, and its matrix instruction."""

    backend: str
    name: int | str
    warp_size: int
    shared_limit: int  # bytes one program may be launched with
    matrix: str  # regular expression: the matrix instruction that reaches the device's rate
    matrix_name: str


# Shared memory: CUDA C++ programming guide, "maximum amount of shared memory per thread block"
# (the driver keeps 1 KiB of every block); CDNA 3 instruction set architecture, LDS per workgroup.
ARCHITECTURES = {
    "sm_80": Architecture("cuda", 80, 32, 163 * KIB, r"HMMA", "mma (HMMA)"),
    "sm_90": Architecture("cuda", 90, 32, 227 * KIB, r"HGMMA", "wgmma (HGMMA)"),
    "sm_100": Architecture("cuda", 100, 32, 227 * KIB, r"UTC\w*MMA", "tcgen05 (UTCHMMA)"),
    "gfx942": Architecture("hip", "gfx942", 64, 64 * KIB, r"v_mfma", "mfma (v_mfma)"),
}
# A spill in the main loop is not noticed if that has so many instructions for each: on an H200 the
# fastest sizes of tiles were often some that spill so much, or more outside of their loops.
UNNOTICED = 10
TENSOR_MEMORY_LIMIT = 512  # columns of tensor memory on sm_100

_DTYPES = {
    torch.bool: "u1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Compiled(NamedTuple):
    """Resources of one kernel on one architecture.

    `matrix` counts the matrix instructions of the whole kernel by their full name. `loop_*`
    counts, per warp, the instructions of one pass through the main loop: the innermost loop with
    most matrix instructions, the shorter of equals (the interior tiles, which need no mask). A
    kernel whose matrix instructions are in no loop is itself one pass.

    `loops` has the numbers of instructions and special functions of every innermost loop with
    matrix instructions, in the order of the code. `outside` has those of the code in none of these
    loops, which matters in kernels that do much before, between or after them.

    `copies` counts the asynchronous copies to shared memory in these loops, and bulk copies
    anywhere, which go on while the program computes. `waits` counts the waits for products of
    wgmma, and `open_waits` those of them that let the last products go on. Where there are none of
    these, a program computes nothing else while its products are formed.
    """

    arch: str
    registers: int  # per thread; vector registers on AMD
    stack: int  # bytes per thread
    spills: int  # instructions that store or load spilled registers; on AMD spilled registers
    shared: int  # bytes per program
    tensor_memory: int  # columns, sm_100 only
    matrix: dict[str, int]
    loop_instructions: int
    loop_matrix: int
    loop_spills: int  # loads and stores of spilled registers
    loop_special: int  # exp2, log2, 1 / x, ...: they have their own, slower unit
    loops: tuple[tuple[int, int], ...] = ()
    outside: tuple[int, int] = (0, 0)
    copies: int = 0
    waits: int = 0
    open_waits: int = 0


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compiles the kernel of a launch as that launch would, for a device that need not be there.

    Args:
        launch: the kernel and its arguments, from
            :func:`graphattn.kernels.shared.launch.recording`. Tensors may be on "meta". As PyTorch
            allocates memory, they are taken to start at a multiple of 16 bytes plus their storage
            offset.
        arch: "sm_80", "sm_90", "sm_100" or "gfx942".

    Raises:
        ValueError: unknown `arch`, or arguments that no kernel takes.
        RuntimeError: the kernel is interpreted (``TRITON_INTERPRET=1``), or a tool is missing.

    Example::

        with recording() as launches:
            forward(torch.empty(4096, 64, dtype=torch.bfloat16, device="meta"), ...)
        print(compile_launch(launches[0], "sm_90").registers)
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    import triton
    from triton.backends.compiler import GPUTarget

    if not isinstance(launch.kernel, triton.runtime.JITFunction):
        raise RuntimeError(
            f"{launch.kernel!r} is no compiled kernel: it must be a @triton.jit function, "
            "defined while TRITON_INTERPRET is not set"
        )
    device = ARCHITECTURES[arch]
    kernel = triton.compile(
        source(launch, *specialize(launch, device.backend)),
        target=GPUTarget(device.backend, device.name, device.warp_size),
        options=launch.options,
    )
    if device.backend == "hip":
        return _read_amd(arch, kernel)
    return _read_nvidia(arch, kernel)


def source(launch: Launch, *specialized: Any) -> Any:
    """The source that ``triton.compile`` takes for a launch, specialized for its arguments."""
    if getattr(launch.kernel, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(launch.kernel, *specialized)
    from triton.compiler import ASTSource

    return ASTSource(launch.kernel, *specialized)


# The place of an argument: its position, and the positions within tuples that it is a part of.
Place = tuple[int, ...]


def specialize(
    launch: Launch, backend: str
) -> tuple[dict[str, Any], dict[Place, Any], dict[Place, list[list[Any]]]]:
    """The types, constants and known facts of a launch's arguments, as Triton's own launcher
    derives them (triton/runtime/jit.py; written out here because its form changes between
    versions, while what ``ASTSource`` takes has not from 3.4 to 3.9).

    Returns:
        ``(signature, constants, attributes)``: type by parameter name, a tuple of types for an
        argument that is a tuple; value of every constant, and attributes of every other argument,
        by ``(position,)``, or ``(position, position in the tuple)``.

    Raises:
        ValueError: an argument is missing, unknown, or of a type no kernel takes.
    """
    import triton.language as tl

    parameters = launch.kernel.params
    unknown = sorted(set(launch.arguments) - {parameter.name for parameter in parameters})
    if unknown:
        raise ValueError(f"arguments must be parameters of {launch.kernel.__name__}, got {unknown}")
    signature: dict[str, Any] = {}
    constants: dict[Place, Any] = {}
    attributes: dict[Place, list[list[Any]]] = {}

    def type_of(value: Any, place: Place, name: str, parameter: Any) -> Any:
        within = len(place) > 1  # Triton specializes what is in a tuple, whatever is declared
        if isinstance(value, tuple) and not parameter.is_constexpr:
            types = [type_of(x, (*place, i), name, parameter) for i, x in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        special = within or not parameter.do_not_specialize
        declared = None if within else parameter.annotation_type
        one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        constant = parameter.is_constexpr or value is None or isinstance(value, tl.constexpr)
        if constant or (one and special and not declared):
            constants[place] = value
            return "constexpr"
        known: list[list[Any]] = []
        aligned = within or not parameter.do_not_specialize_on_alignment
        if special and aligned and _is_divisible(value):
            known.append(["tt.divisibility", 16])
        if special and backend == "hip" and _fits_buffer_instructions(value):
            known.append(["tt.pointer_range", 32])
        if known:
            attributes[place] = known
        return declared or _type_name(name, value)

    for position, parameter in enumerate(parameters):
        name = parameter.name
        if name not in launch.arguments and not parameter.has_default:
            raise ValueError(f"arguments must hold {name!r}, got {sorted(launch.arguments)}")
        value = launch.arguments.get(name, parameter.default)
        signature[name] = type_of(value, (position,), name, parameter)
    return signature, constants, attributes


def _type_name(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.dtype in _DTYPES:
        return "*" + _DTYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape") and value.base.dtype in _DTYPES:  # a TensorDescriptor
        box = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_DTYPES[value.base.dtype]}[{box}],{value.layout!r}>"
    got = value.dtype if isinstance(value, torch.Tensor) else value
    raise ValueError(f"{name} must be a tensor, a number, a bool or None, got {got!r}")


def _is_divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def _fits_buffer_instructions(value: Any) -> bool:
    """AMD's buffer instructions address 2 GiB: Triton uses them for storage known to fit.

    They are off by default in Triton 3.4.
    """
    from triton import knobs

    fits = isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() < 2**31
    return fits and bool(knobs.amd.use_buffer_ops)


def problems(compiled: Compiled, *, main: bool = True) -> list[str]:
    """List the reasons why a kernel does not run as intended, one sentence each; empty if there are
    none.

    Args:
        compiled: from :func:`compile_launch`.
        main: whether the kernel must use the matrix instruction of its architecture.

    A kernel may spill outside of its main loop, and a little within.

    >>> compiled = Compiled("sm_90", 255, 8, 12, 240 * 1024, 0, {"HMMA.16816.F32": 4}, 90, 4, 10, 8)
    >>> for problem in problems(compiled):
    ...     print(problem)
    spills 12 times, 10 times in the main loop, 8 bytes of stack per thread
    needs 240.0 KiB of shared memory, sm_90 has 227 KiB
    has no wgmma (HGMMA), but HMMA
    """
    device = ARCHITECTURES[compiled.arch]
    reasons = []
    if compiled.loop_spills * UNNOTICED > compiled.loop_instructions:
        what = "registers" if device.backend == "hip" else "times"
        reasons.append(
            f"spills {compiled.spills} {what}, {compiled.loop_spills} times in the main loop, "
            f"{compiled.stack} bytes of stack per thread"
        )
    if compiled.shared > device.shared_limit:
        reasons.append(
            f"needs {compiled.shared / KIB:.1f} KiB of shared memory, "
            f"{compiled.arch} has {device.shared_limit // KIB} KiB"
        )
    if compiled.tensor_memory > TENSOR_MEMORY_LIMIT:
        reasons.append(
            f"needs {compiled.tensor_memory} columns of tensor memory, "
            f"{compiled.arch} has {TENSOR_MEMORY_LIMIT}"
        )
    if main and not any(re.match(device.matrix, name) for name in compiled.matrix):
        others = ", ".join(sorted(matrix_families(compiled))) or "no other"
        reasons.append(f"has no {device.matrix_name}, but {others}")
    return reasons


def matrix_families(compiled: Compiled) -> dict[str, int]:
    """Matrix instructions counted without their shapes: ``{"HGMMA": 16}``."""
    families: Counter[str] = Counter()
    for name, count in compiled.matrix.items():
        families[re.split(r"[._]\d|\.", name)[0]] += count
    return dict(families)


def _read_nvidia(arch: str, kernel: Any) -> Compiled:
    # metadata.n_regs and n_spills are set by the driver when it loads a kernel, which is not done.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("--dump-resource-usage", cubin.name)
        code = read_sass(_cuobjdump("-sass", cubin.name))
    resources = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    return Compiled(
        arch,
        registers=resources["REG"],
        stack=resources["STACK"] + resources["LOCAL"],
        # Triton kernels use their stack only for spilled registers, so these are spills.
        spills=sum(1 for instruction in code if LOCAL.match(instruction.name)),
        shared=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        **counts(code),
    )


def _cuobjdump(option: str, path: str) -> str:
    from triton import knobs

    try:
        tool = Path(knobs.nvidia.cuobjdump.path)
    except RuntimeError as error:
        raise RuntimeError(
            "cuobjdump is missing: it comes with Triton's Linux wheels (triton/backends/nvidia/bin)"
            " and with the CUDA toolkit; TRITON_CUOBJDUMP_PATH may name one"
        ) from error
    # cuobjdump starts nvdisasm, which is in the same folder.
    run = subprocess.run(
        [tool, option, path],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tool.parent)},
    )
    if run.returncode:
        raise RuntimeError(f"{tool} {option} failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


def _read_amd(arch: str, kernel: Any) -> Compiled:
    text = kernel.asm["amdgcn"]
    resources = {
        name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)$", text, re.M)
    }
    return Compiled(
        arch,
        registers=resources["vgpr_count"],
        stack=resources["private_segment_fixed_size"],
        # Scalar registers are spilled to lanes of vector registers, which is cheap. If they are
        # spilled to memory, the stack shows it.
        spills=resources["vgpr_spill_count"],
        # Triton's shared memory is passed at launch; the kernel may have a fixed amount besides.
        shared=kernel.metadata.shared + resources["group_segment_fixed_size"],
        tensor_memory=0,
        **counts(read_amdgcn(text)),
    )
