"""Compilation without a device: what is read from machine code, checked against counts by hand.

Triton is only imported in other processes: whether kernels are compiled or interpreted is decided
once per process, where other tests may have chosen the interpreter.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphattn.kernels
from graphattn.kernels.check.compile import (
    ARCHITECTURES,
    Compiled,
    compile_launch,
    matrix_families,
    problems,
)
from graphattn.kernels.check.machine_code import main_loop, read_amdgcn, read_sass
from graphattn.kernels.shared.launch import Launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

KERNELS = """
from typing import Any

import torch
import triton
import triton.language as tl

from graphattn.kernels.shared.configuration import Configuration
from graphattn.kernels.shared.launch import Launch


@triton.jit(do_not_specialize=["offset"])
def product(p_a, p_b, p_c, p_bias, size, offset, stride, scale, causal,
            M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr = "tf32"):
    o_m = tl.program_id(0) * M + tl.arange(0, M)
    o_n = tl.arange(0, N)
    o_k = tl.arange(0, K)
    b_c = tl.zeros((M, N), tl.float32)  # [M, N]
    for k in range(0, size, K):
        b_a = tl.load(p_a + o_m[:, None] * size + (k + o_k)[None, :] * stride)  # [M, K]
        b_b = tl.load(p_b + (k + o_k)[:, None] * N + o_n[None, :])  # [K, N]
        b_c += tl.exp2(tl.dot(b_a, b_b, input_precision=PRECISION) * scale)
    tl.store(p_c + offset + o_m[:, None] * N + o_n[None, :], b_c)


def arguments(dtype=torch.bfloat16, device="meta", **changed) -> dict[str, Any]:
    a, b = torch.empty(2, 64, 64, dtype=dtype, device=device)
    c = torch.empty(64, 64, device=device)
    return dict(p_a=a, p_b=b, p_c=c, p_bias=None, size=4096, offset=16, stride=1, scale=0.5,
                causal=True, M=128, N=64, K=64) | changed


def case(name, *, main=True, num_warps=4, num_stages=3, **changed):
    launch = Launch(product, (32,), arguments(**changed), num_warps, num_stages)
    return Configuration(name, launch, main, 2e9, 1e6, 2048, "")


def sound():
    return [case("sound")]


def faulty():
    return [
        case("sound"),
        case("spilling", M=64, N=128, K=16, num_warps=1),
        case("large", M=64, K=256, num_stages=8),
        case("ieee", dtype=torch.float32, M=64, K=32, PRECISION="ieee"),
        case("refused", K=63),
        bounded(case("bounded"), 64),
    ]


def bounded(configuration, registers):
    launch = configuration.launch._replace(max_registers=registers)
    return configuration._replace(launch=launch)
"""

CHECK = """
import sys
from graphattn.kernels.check.__main__ import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], configurations=sys.argv[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules that hold small kernels with known properties."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "small_kernels.py").write_text(KERNELS)
    for name in ("sound", "faulty"):
        (folder / f"{name}.py").write_text(
            f"from small_kernels import {name} as all_configurations"
        )
    (folder / "command.py").write_text(CHECK)
    return folder


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, where kernels are compiled."""
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        env=variables | environment,
    )


def rows(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["arch"]): row for row in json.loads(file.read_text())}


@pytest.fixture(scope="module")
def sound(folder: Path) -> tuple[subprocess.CompletedProcess[str], Any]:
    files = ["--json", "sound.json", "--markdown", "sound.md"]
    run = python(folder, "command.py", "sound", "--all", *files)
    return run, rows(folder / "sound.json")


@pytest.fixture(scope="module")
def faulty(folder: Path) -> tuple[subprocess.CompletedProcess[str], Any]:
    run = python(folder, "command.py", "faulty", "--json", "faulty.json")
    return run, rows(folder / "faulty.json")


# A product [128, 64] @ [64, 64] in four warps, by the shape of each instruction: HMMA m16n8k16 is
# one warp's, HGMMA m64n64k16 four warps', UTCHMMA m128n64k16 the program's, mfma 32x32x8 one
# warp's. One exp2 per element: 64 for each of 128 threads, 32 for each of AMD's 256.
IN_THE_LOOP = {"sm_80": (64, 64), "sm_90": (8, 64), "sm_100": (4, 64), "gfx942": (16, 32)}


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sound_kernel_has_its_matrix_instruction_and_no_problem(sound: Any, arch: str) -> None:
    row = sound[1]["sound", arch]
    needs_rocm(row)
    assert row["problems"] == []
    assert row["compiled"]["spills"] == row["compiled"]["stack"] == 0
    assert 64 <= row["compiled"]["registers"] <= 512
    # At least two stages of [128, 64] and [64, 64] in bfloat16, at most the three asked for
    # and barriers.
    assert 2 * 24 * 1024 <= row["compiled"]["shared"] <= 3 * 24 * 1024 + 256


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_main_loop_holds_one_pass_by_the_shapes_of_its_instructions(
    sound: Any, arch: str
) -> None:
    row = sound[1]["sound", arch]
    needs_rocm(row)
    matrix, special = IN_THE_LOOP[arch]
    assert row["compiled"]["loop_matrix"] == matrix
    assert row["compiled"]["loop_special"] == special
    # Each result is also scaled and added, fused or not; loads and addresses are some more.
    elements = special
    assert 2 * elements + matrix < row["compiled"]["loop_instructions"] < 8 * elements + 2 * matrix


def needs_rocm(row: dict[str, Any]) -> None:
    if "ROCm linker" in " ".join(row["problems"]):
        pytest.skip("this Triton links for AMD with ROCm's own linker, which is not here")


@pytest.mark.nightly
def test_the_command_succeeds_and_states_versions_not_times(sound: Any, folder: Path) -> None:
    run, table = sound
    for row in table.values():
        needs_rocm(row)
    assert run.returncode == 0, run.stderr
    text = (folder / "sound.md").read_text()
    assert text == run.stdout.removesuffix("\n")
    assert text.startswith("# Kernels, compiled ahead of time\n\nTriton ")
    assert all(f"## {arch}\n" in text for arch in ARCHITECTURES)
    again = python(folder, "command.py", "sound", "--all")
    assert again.stdout == run.stdout


@pytest.mark.long
def test_every_fault_is_found_and_fails_the_command(faulty: Any) -> None:
    run, table = faulty
    assert run.returncode == 1
    for (name, arch), row in table.items():
        for problem in row["problems"]:
            assert f"- {name} on {arch} {problem}" in run.stdout.splitlines()
    assert table["sound", "sm_90"]["problems"] == []
    spilling = table["spilling", "sm_90"]
    # Accumulators of 64 x 128 in one warp are 256 registers a thread; there are 255.
    assert spilling["compiled"]["registers"] == 255
    assert spilling["compiled"]["stack"] >= 4
    assert spilling["compiled"]["spills"] >= spilling["compiled"]["loop_spills"] >= 2
    assert any(problem.startswith("spills ") for problem in spilling["problems"])
    # A warpgroup is four warps: one warp alone has no wgmma.
    assert "has no wgmma (HGMMA), but HMMA" in spilling["problems"]
    # Accumulators of 128 x 64 in four warps are 64 registers a thread.
    assert table["bounded", "sm_90"]["compiled"]["registers"] == 64
    assert table["sound", "sm_90"]["compiled"]["registers"] > 64
    (large,) = table["large", "sm_90"]["problems"]
    assert "of shared memory, sm_90 has 227 KiB" in large
    assert table["ieee", "sm_90"]["problems"] == ["has no wgmma (HGMMA), but no other"]
    (refused,) = table["refused", "sm_90"]["problems"]
    assert refused.startswith("does not compile: ")


@pytest.mark.long
def test_the_command_refuses_interpreted_kernels(folder: Path) -> None:
    run = python(folder, "-m", "graphattn.kernels.check", TRITON_INTERPRET="1")
    assert run.returncode == 2
    assert "TRITON_INTERPRET is set" in run.stderr


SPECIALISE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.language import constexpr
from triton.runtime.jit import create_function_from_signature
from graphattn.kernels.check.compile import specialize
from graphattn.kernels.shared.launch import Heads, Launch
from small_kernels import arguments, product

dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8,
          torch.int8, torch.int16, torch.int32, torch.int64)
cases = [{"dtype": dtype} for dtype in dtypes]
cases += [{"size": size} for size in (0, 1, 15, 16, -16, 2**31 - 1, 2**31, -(2**31) - 1, 2**35)]
cases += [{"offset": offset} for offset in (1, 16, 2**31)]
cases += [{"p_a": None}, {"causal": False}, {"scale": 1.0}, {"PRECISION": "ieee"}]
cases += [{"p_a": torch.empty(99, dtype=torch.bfloat16)[offset:]} for offset in (1, 7, 8, 9)]
for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    backend = make_backend(target)
    theirs = create_function_from_signature(product.signature, product.params, backend)
    for case in cases:
        launch = Launch(product, (1,), arguments(device="cpu", **case), 4, 3)
        values, facts, _ = theirs(**launch.arguments)
        signature, constants, attributes = specialize(launch, target.backend)
        kinds = [kind for kind, _ in facts]
        assert list(signature) == [parameter.name for parameter in product.params]
        assert list(signature.values()) == kinds, (case, signature, kinds)
        values = list(values.values())
        assert constants == {(i,): values[i] for i, kind in enumerate(kinds) if kind == "constexpr"}
        for i, (kind, fact) in enumerate(facts):
            known = kind != "constexpr" and isinstance(fact, str)
            parsed = backend.parse_attr(fact) if known else []
            assert attributes.get((i,), []) == parsed, (case, i, attributes, fact)
    for given in (Heads(torch.empty(9), 48, constexpr(64)), (None, 1, 7, torch.empty(9)[1:])):
        launch = Launch(product, (1,), arguments(device="cpu", p_bias=given), 4, 3)
        kinds, facts = theirs(**launch.arguments)[1][3]
        signature, constants, attributes = specialize(launch, target.backend)
        assert signature["p_bias"] == kinds, (given, signature, kinds)
        for i, (kind, fact) in enumerate(zip(kinds, facts)):
            known = kind != "constexpr" and isinstance(fact, str)
            assert attributes.get((3, i), []) == (backend.parse_attr(fact) if known else [])
            assert constants.get((3, i), "none") == (given[i] if kind == "constexpr" else "none")
"""


@pytest.mark.long
def test_arguments_are_specialised_as_tritons_own_launcher_does(folder: Path) -> None:
    run = python(folder, "-c", SPECIALISE)
    assert run.returncode == 0, run.stderr


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*got 'sm_42'"):
        compile_launch(Launch(None, (1,), {}, 4, 3), "sm_42")


def listing(*lines: str) -> str:
    """Instructions as cuobjdump writes them, 16 bytes each."""
    return "\n".join(
        f"        /*{16 * i:04x}*/   {line} ;  /* 0x0 */" for i, line in enumerate(lines)
    )


def test_the_innermost_loop_with_most_matrix_instructions_is_chosen() -> None:
    code = read_sass(
        listing(
            "MOV R1, R2",
            "IADD3 R1, R2",  # 1: an outer loop
            "HMMA.16816.F32 R1, R2, R3, R4",  # 2: a loop with one product
            "@P0 BRA 0x20",
            "HMMA.16816.F32 R1, R2, R3, R4",  # 4: a loop with two
            "HMMA.16816.F32 R1, R2, R3, R4",
            "@!P1 BRA 0x40",
            "@P2 BRA 0x10",
            "EXIT",
            "BRA 0x90",  # the trap behind every kernel
        )
    )
    assert main_loop(code) == {4, 5, 6}


def test_of_equal_loops_the_shorter_is_chosen() -> None:
    masked = ["ISETP R1", "HGMMA.64x64x16.F32 R1", "SEL R1", "@P0 BRA 0x0"]
    interior = ["HGMMA.64x64x16.F32 R1", "@P0 BRA 0x40", "EXIT"]
    assert main_loop(read_sass(listing(*masked, *interior))) == {4, 5}


def test_code_moved_out_of_line_is_no_loop_but_part_of_one() -> None:
    code = read_sass(
        listing(
            "UTCHMMA gdesc[UR4], gdesc[UR6]",  # 0: prologue
            "SYNCS.PHASECHK P4, R1",  # 1: header; waits below if too early
            "@!P4 BRA 0x70",
            "UTCHMMA gdesc[UR4], gdesc[UR6]",
            "BRA.U UP0, 0x10",
            "MOV R1, R2",
            "EXIT",
            "SYNCS.PHASECHK P4, R1",  # 7: waits
            "@!P4 BRA 0x70",
            "BRA 0x30",  # jumps back, and yet 3 is no header
        )
    )
    assert main_loop(code) == {1, 2, 3, 4, 7, 8, 9}


def test_a_kernel_without_a_loop_is_one_pass() -> None:
    assert main_loop(read_sass(listing("HMMA.16816.F32 R1", "MUFU.EX2 R1", "EXIT"))) == {0, 1, 2}


def test_amd_loops_are_read_from_labels() -> None:
    text = """
.LBB0_0:
\ts_mov_b32 s0, s1
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tv_mfma_f32_32x32x8_bf16 v[2:17], v[166:167], v[126:127], 0
\tv_exp_f32_e32 v1, v2                  ; a comment
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
\t.section .rodata
"""
    code = read_amdgcn(text)
    assert [instruction.jump for instruction in code] == [None, None, None, 1, None]
    assert main_loop(code) == {1, 2, 3}


def compiled(arch: str, **changed: Any) -> Compiled:
    matrix = {"sm_80": "HMMA.16816.F32", "sm_90": "HGMMA.64x64x16.F32.BF16"}
    matrix |= {"sm_100": "UTCHMMA", "gfx942": "v_mfma_f32_32x32x8_bf16"}
    good = Compiled(arch, 128, 0, 0, 0, 0, {matrix[arch]: 8}, 300, 8, 0, 64)
    return good._replace(**changed)


@pytest.mark.parametrize(
    ("arch", "limit"), [("sm_80", 166912), ("sm_90", 232448), ("sm_100", 232448), ("gfx942", 65536)]
)
def test_shared_memory_may_be_used_to_the_last_byte(arch: str, limit: int) -> None:
    # cudaDevAttrMaxSharedMemoryPerBlockOptin of A100, H100, B200; LDS of an MI300X workgroup.
    assert problems(compiled(arch, shared=limit)) == []
    (problem,) = problems(compiled(arch, shared=limit + 4096))
    assert "shared memory" in problem


def test_another_architectures_matrix_instruction_does_not_count() -> None:
    slow = compiled("sm_90", matrix={"HMMA.16816.F32.BF16": 64})
    assert problems(slow) == ["has no wgmma (HGMMA), but HMMA"]
    assert problems(slow, main=False) == []


def test_tensor_memory_is_limited() -> None:
    assert problems(compiled("sm_100", tensor_memory=512)) == []
    (problem,) = problems(compiled("sm_100", tensor_memory=1024))
    assert "tensor memory" in problem


def test_matrix_instructions_are_grouped_over_shapes() -> None:
    names = {"HGMMA.64x64x16.F32.BF16": 8, "HGMMA.64x128x16.F32.BF16": 4}
    assert matrix_families(compiled("sm_90", matrix=names)) == {"HGMMA": 12}
    shapes = {"v_mfma_f32_32x32x8_bf16": 3, "v_mfma_f32_16x16x16_bf16": 2}
    assert matrix_families(compiled("gfx942", matrix=shapes)) == {"v_mfma_f32": 5}


def test_what_is_not_specialised_is_a_parameter() -> None:
    """Triton says nothing of other names, and compiles anew for every length."""
    decorators = 0
    for file in Path(graphattn.kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for decorator in getattr(node, "decorator_list", []):
                for keyword in getattr(decorator, "keywords", []):
                    if keyword.arg == "do_not_specialize":
                        names = {name.value for name in keyword.value.elts}
                        assert names <= {x.arg for x in node.args.args}, (file.name, node.name)
                        decorators += 1
    assert decorators > 20
