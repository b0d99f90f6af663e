"""Kernels compiled without a device, and what the machine code says about them.

Triton compiles for any architecture on any machine; registers, spills, shared memory, matrix
instructions and the length of the main loop can be read from the result. What this never shows:
races, wrong numbers, and the time a launch really takes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphattn.kernels.shared.launch import Launch

KIB = 1024


class Architecture(NamedTuple):
    """What Triton calls a device, what one program may use on it, and its matrix instruction."""

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
UNNOTICED = 100  # instructions of the main loop for each spill that does not matter
TENSOR_MEMORY_LIMIT = 512  # columns of tensor memory on sm_100

# Any matrix instruction, also one that falls short of the device's rate (HMMA on sm_90).
_MATRIX = re.compile(r"[HIDQ]?G?MMA\b|[HIDQB]MMA|UTC\w*MMA|v_mfma|v_smfmac")
_FUSED = re.compile(r"FFMA|v_fma|v_fmac|v_pk_fma")
_SPECIAL = re.compile(r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_LOCAL = re.compile(r"(STL|LDL)\b|scratch_(load|store)")

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
    """What one kernel needs on one architecture.

    `matrix` counts the matrix instructions of the whole kernel by their full name. `loop_*`
    counts, per warp, the instructions of one pass through the main loop: the innermost loop with
    most matrix instructions, the shorter of equals (the interior tiles, which need no mask). A
    kernel whose matrix instructions are in no loop is itself one pass.

    `loops` are the instructions and special functions of every innermost loop with matrix
    instructions, in the order of the code, and `outside` those in none of them: for kernels that
    have much to do before, between or after.
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


class Instruction(NamedTuple):
    """One machine instruction: its name, where it may jump to, and whether the next one follows."""

    name: str
    jump: int | None  # index of another instruction
    continues: bool


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compiles the kernel of a launch as that launch would, for a device that is not there.

    Args:
        launch: the kernel and its arguments, from
            :func:`graphattn.kernels.shared.launch.recording`. Tensors may lie on "meta"; they are
            taken to start at a multiple of 16 bytes plus their storage offset, as PyTorch allocates
            them.
        arch: "sm_80", "sm_90", "sm_100" or "gfx942".

    Raises:
        ValueError: unknown `arch`, or arguments no kernel can be started with.
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
    from triton.compiler import ASTSource

    if not isinstance(launch.kernel, triton.runtime.JITFunction):
        raise RuntimeError(
            f"{launch.kernel!r} is no compiled kernel: it must be a @triton.jit function, "
            "defined while TRITON_INTERPRET is not set"
        )
    device = ARCHITECTURES[arch]
    kernel = triton.compile(
        ASTSource(launch.kernel, *specialize(launch, device.backend)),
        target=GPUTarget(device.backend, device.name, device.warp_size),
        options={
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": launch.fp_fusion,
        },
    )
    if device.backend == "hip":
        return _read_amd(arch, kernel)
    return _read_nvidia(arch, kernel)


def specialize(
    launch: Launch, backend: str
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
    """The types, constants and known facts of a launch's arguments, as Triton's own launcher
    derives them (triton/runtime/jit.py; written out here because its form changes between
    versions, while what ``ASTSource`` takes has not from 3.4 to 3.9).

    Returns:
        ``(signature, constants, attributes)``: type by parameter name; value of every constant
        and attributes of every other argument by ``(position,)``.

    Raises:
        ValueError: an argument is missing, unknown, or of a type no kernel takes.
    """
    parameters = launch.kernel.params
    unknown = sorted(set(launch.arguments) - {parameter.name for parameter in parameters})
    if unknown:
        raise ValueError(f"arguments must be parameters of {launch.kernel.__name__}, got {unknown}")
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, parameter in enumerate(parameters):
        name = parameter.name
        if name not in launch.arguments and not parameter.has_default:
            raise ValueError(f"arguments must hold {name!r}, got {sorted(launch.arguments)}")
        value = launch.arguments.get(name, parameter.default)
        special = not parameter.do_not_specialize
        declared = parameter.annotation_type
        one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or value is None or (one and special and not declared):
            signature[name] = "constexpr"
            constants[position,] = value
            continue
        signature[name] = declared or _type_name(name, value)
        known: list[list[Any]] = []
        if special and not parameter.do_not_specialize_on_alignment and _divisible(value):
            known.append(["tt.divisibility", 16])
        if special and backend == "hip" and _fits_buffer_instructions(value):
            known.append(["tt.pointer_range", 32])
        if known:
            attributes[position,] = known
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
    got = value.dtype if isinstance(value, torch.Tensor) else value
    raise ValueError(f"{name} must be a tensor, a number, a bool or None, got {got!r}")


def _divisible(value: Any) -> bool:
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
    """What keeps a kernel from running as meant, one sentence each; nothing if all is well.

    Args:
        compiled: from :func:`compile_launch`.
        main: whether the kernel must use the matrix instruction of its architecture and spill
            nothing; other kernels may spill a little outside their main loop. In a loop of
            thousands of instructions one in a hundred may be a spill: nobody can tell.

    >>> compiled = Compiled("sm_90", 255, 8, 2, 240 * 1024, 0, {"HMMA.16816.F32": 4}, 90, 4, 1, 8)
    >>> for problem in problems(compiled):
    ...     print(problem)
    spills 2 times, 1 times in the main loop, 8 bytes of stack per thread
    needs 240.0 KiB of shared memory, sm_90 has 227 KiB
    has no wgmma (HGMMA), but HMMA
    """
    device = ARCHITECTURES[compiled.arch]
    found = []
    spilled = compiled.loop_spills or (main and (compiled.spills or compiled.stack))
    if spilled and not 0 < compiled.spills * UNNOTICED <= compiled.loop_instructions:
        what = "registers" if device.backend == "hip" else "times"
        found.append(
            f"spills {compiled.spills} {what}, {compiled.loop_spills} times in the main loop, "
            f"{compiled.stack} bytes of stack per thread"
        )
    if compiled.shared > device.shared_limit:
        found.append(
            f"needs {compiled.shared / KIB:.1f} KiB of shared memory, "
            f"{compiled.arch} has {device.shared_limit // KIB} KiB"
        )
    if compiled.tensor_memory > TENSOR_MEMORY_LIMIT:
        found.append(
            f"needs {compiled.tensor_memory} columns of tensor memory, "
            f"{compiled.arch} has {TENSOR_MEMORY_LIMIT}"
        )
    if main and not any(re.match(device.matrix, name) for name in compiled.matrix):
        others = ", ".join(sorted(matrix_families(compiled))) or "no other"
        found.append(f"has no {device.matrix_name}, but {others}")
    return found


def matrix_families(compiled: Compiled) -> dict[str, int]:
    """Matrix instructions counted without their shapes: ``{"HGMMA": 16}``."""
    families: Counter[str] = Counter()
    for name, count in compiled.matrix.items():
        families[re.split(r"[._]\d|\.", name)[0]] += count
    return dict(families)


# --- NVIDIA ---------------------------------------------------------------------------------------


def _read_nvidia(arch: str, kernel: Any) -> Compiled:
    # metadata.n_regs and n_spills are filled by the driver when it loads a kernel: not here.
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
        # The stack of a Triton kernel is where registers are spilled; count how often.
        spills=sum(1 for instruction in code if _LOCAL.match(instruction.name)),
        shared=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        **_counts(code),
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
    # cuobjdump starts nvdisasm, which lies next to it.
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


_SASS_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


def read_sass(text: str) -> list[Instruction]:
    """The instructions of a listing by ``cuobjdump -sass`` of one kernel.

    >>> listing = '''
    ... /*0000*/           MOV R1, c[0x0][0x28] ;
    ... /*0010*/           HMMA.16816.F32 R4, R8, R12, R4 ;
    ... /*0020*/      @!P0 BRA 0x10 ;
    ... /*0030*/           EXIT ;
    ... '''
    >>> [(name, jump) for name, jump, _ in read_sass(listing)]
    [('MOV', None), ('HMMA.16816.F32', None), ('BRA', 1), ('EXIT', None)]
    """
    lines = _SASS_LINE.findall(text)
    index = {int(address, 16): i for i, (address, *_) in enumerate(lines)}
    code = []
    for _, predicate, name, operands in lines:
        jump, continues = None, True
        if name.startswith(("BRA", "CALL", "JMP")):
            # CALL is also how a far jump is written: it may come back, so both ways count.
            target = re.search(r"(0x[0-9a-f]+)\s*$", operands)
            jump = index.get(int(target[1], 16)) if target else None
            # A condition is a predicate before the name, or an operand before the address.
            continues = bool(predicate) or "," in operands or name.startswith("CALL")
        elif name.startswith(("EXIT", "RET", "BRX")):
            continues = bool(predicate)
        code.append(Instruction(name, jump, continues))
    return code


# --- AMD ------------------------------------------------------------------------------------------


def _read_amd(arch: str, kernel: Any) -> Compiled:
    text = kernel.asm["amdgcn"]
    resources = {
        name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)$", text, re.M)
    }
    return Compiled(
        arch,
        registers=resources["vgpr_count"],
        stack=resources["private_segment_fixed_size"],
        # Scalar registers are spilled to lanes of vector registers, which is cheap; where they
        # reach memory they show in the stack.
        spills=resources["vgpr_spill_count"],
        # Triton's shared memory is given at launch; what is fixed in the kernel comes on top.
        shared=kernel.metadata.shared + resources["group_segment_fixed_size"],
        tensor_memory=0,
        **_counts(read_amdgcn(text)),
    )


_AMD_LINE = re.compile(r"^(?:(\.L\w+):|\t([a-z]+_\w+)[ \t]*([^;\n]*))", re.M)


def read_amdgcn(text: str) -> list[Instruction]:
    """The instructions of AMD assembly of one kernel.

    >>> listing = ".LBB0_1:\\n\\tv_mov_b32 v1, v2\\n\\ts_cbranch_scc1 .LBB0_1\\n"
    >>> [(name, jump) for name, jump, _ in read_amdgcn(listing)]
    [('v_mov_b32', None), ('s_cbranch_scc1', 0)]
    """
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for label, name, operands in _AMD_LINE.findall(text):
        if label:
            labels[label] = len(lines)
        else:
            lines.append((name, operands.strip()))
    return [
        Instruction(
            name,
            labels.get(operands) if name.startswith(("s_branch", "s_cbranch")) else None,
            name not in ("s_branch", "s_endpgm", "s_setpc_b64"),
        )
        for name, operands in lines
    ]


# --- loops ----------------------------------------------------------------------------------------


def _counts(code: list[Instruction]) -> dict[str, Any]:
    """The fields of `Compiled` that are counted over instructions."""
    working = _working_loops(code)
    body = [code[i].name for i in _main_of(working, code)]
    matrix = Counter(i.name for i in code if _MATRIX.match(i.name))
    inside = set().union(*working)
    return {
        "matrix": dict(sorted(matrix.items())),
        "loop_instructions": len(body),
        "loop_matrix": sum(1 for name in body if _MATRIX.match(name)),
        "loop_spills": sum(1 for name in body if _LOCAL.match(name)),
        "loop_special": _specials(body),
        "loops": tuple((len(loop), _specials(code[i].name for i in loop)) for loop in working),
        "outside": (
            len(code) - len(inside),
            _specials(code[i].name for i in range(len(code)) if i not in inside),
        ),
    }


def _specials(names: Iterable[str]) -> int:
    return sum(1 for name in names if _SPECIAL.match(name))


def main_loop(code: list[Instruction]) -> set[int]:
    """The instructions of the innermost loop that holds most matrix instructions.

    Without any matrix instruction fused multiply-adds decide. Of equal loops the shortest is
    taken; code that is in no such loop is one pass as a whole.
    """
    return _main_of(_working_loops(code), code)


def _main_of(working: list[set[int]], code: list[Instruction]) -> set[int]:
    if not working:
        return set(range(len(code)))
    product = _product(code)
    return max(
        working, key=lambda body: (sum(1 for i in body if product.match(code[i].name)), -len(body))
    )


def _product(code: list[Instruction]) -> re.Pattern[str]:
    """The instructions that do the work: matrix instructions, or where there are none the fused."""
    return _MATRIX if any(_MATRIX.match(i.name) for i in code) else _FUSED


def _working_loops(code: list[Instruction]) -> list[set[int]]:
    """The innermost of the loops that hold such instructions, in the order of the code."""
    product = _product(code)
    working = [body for body in _loops(code) if any(product.match(code[i].name) for i in body)]
    innermost = [body for body in working if not any(inner < body for inner in working)]
    return sorted(innermost, key=min)


def _loops(code: list[Instruction]) -> list[set[int]]:
    """The natural loops: for a jump back to a header through which every way to the jump leads,
    all that reaches the jump without passing the header (Aho, Sethi and Ullman, section 10.4).

    Backward jumps alone are not loops: code moved out of line jumps back as well.
    """
    before: list[list[int]] = [[] for _ in code]
    for i, instruction in enumerate(code):
        if instruction.continues and i + 1 < len(code):
            before[i + 1].append(i)
        if instruction.jump is not None:
            before[instruction.jump].append(i)
    loops: dict[int, set[int]] = {}
    for i, instruction in enumerate(code):
        header = instruction.jump
        if header is None or header > i:
            continue
        body, open_ends = {header, i}, [i] if i != header else []
        while open_ends:
            for j in before[open_ends.pop()]:
                if j not in body:
                    body.add(j)
                    open_ends.append(j)
        if header == 0 or 0 not in body:
            loops.setdefault(header, set()).update(body)  # two ways back are one loop
    return list(loops.values())
