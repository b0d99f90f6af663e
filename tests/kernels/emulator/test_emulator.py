"""The emulator itself: small programs with known results, and mistakes that it must notice."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from emulator.arithmetic import from_bfloat16, to_bfloat16
from emulator.device import INSTRUCTIONS, Device
from emulator.global_memory import GlobalMemory
from emulator.machine import Machine, UnknownInstruction
from emulator.matrices import places
from emulator.ptx import parse

THREADS = 64
# Every program begins with its thread (%r1), its place in the tensors (%r2), and both pointers.
PROGRAM = """
.visible .entry program(
    .param .u64 program_param_0,
    .param .u64 program_param_1
)
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<60>;
    .reg .b64 %rd<20>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.s32 %r2, %r3, {threads}, %r1;
    ld.param.u64 %rd1, [program_param_0];
    ld.param.u64 %rd2, [program_param_1];
    mul.wide.s32 %rd3, %r2, 4;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    shl.b32 %r4, %r1, 2;
    ld.global.b32 %r5, [%rd1];
{body}
    ret;
}}
"""
STORE = "st.global.b32 [%rd2], %r6;"


def execute(body: str, x: Tensor, blocks: int = 1, shared_bytes: int = 1024) -> tuple[Tensor, str]:
    """Run a program: %r5 is this thread's number of `x`; returns what is stored, and findings."""
    machine, out = executed(body, x, blocks, shared_bytes)
    return out, str(machine.findings)


def executed(
    body: str, x: Tensor, blocks: int = 1, shared_bytes: int = 1024, order: int = 0
) -> tuple[Machine, Tensor]:
    """Run a program, and return the machine as it is then, and what is stored."""
    ptx = PROGRAM.format(threads=THREADS, body=body)
    machine = Machine(parse(ptx), THREADS // 32, shared_bytes, INSTRUCTIONS)
    machine.order = order
    out = torch.zeros_like(x)
    memory = GlobalMemory([x, out], machine.findings)
    machine.run((blocks,), [x.data_ptr(), out.data_ptr()], memory, range(blocks))
    return machine, out


def floats(count: int = THREADS, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def whole(count: int = THREADS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int32)


def bits(x: Tensor) -> np.ndarray:
    return x.numpy().view(np.uint32)


# Thread 0 makes an mbarrier for so many threads, behind 512 bytes of shared memory.
MAKE_BARRIER = (
    "mov.b32 %r20, 512; setp.eq.s32 %p2, %r1, 0; "
    "@%p2 mbarrier.init.shared::cta.b64 [%r20], {}; bar.sync 0;"
)
WAIT_FOR_PHASE = "\n$W:\n mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20], {}; @!%p3 bra $W;\n"
FLOAT_PROGRAMS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "add": ("add.f32 %r6, %r5, 0f3F800000;", lambda x: x + 1),
    "fma": ("fma.rn.f32 %r6, %r5, %r5, %r5;", lambda x: (x.double() * x.double() + x).float()),
    "max beside NaN": ("mov.b32 %r7, 0f7FC00000; max.f32 %r6, %r5, %r7;", lambda x: x),
    "max that keeps NaN": (
        "mov.b32 %r7, 0f7FC00000; max.NaN.f32 %r6, %r5, %r7;",
        lambda x: x * math.nan,
    ),
    "ex2": ("ex2.approx.f32 %r6, %r5;", torch.exp2),
    "compare and select": (
        "setp.lt.f32 %p1, %r5, 0f00000000; neg.f32 %r7, %r5; selp.f32 %r6, %r7, %r5, %p1;",
        torch.abs,
    ),
    "round to bfloat16": (
        "cvt.rn.bf16.f32 %rs1, %r5; cvt.f32.bf16 %r6, %rs1;",
        lambda x: x.bfloat16().float(),
    ),
    "two halves in one register": (
        "cvt.rn.f16x2.f32 %r7, 0f00000000, %r5; mov.b32 {%rs1, %rs2}, %r7; cvt.f32.f16 %r6, %rs1;",
        lambda x: x.half().float(),
    ),
    "a sum over the warp": (
        "mov.b32 %r6, %r5;"
        + "".join(
            f"shfl.sync.bfly.b32 %r7, %r6, {n}, 31, -1; add.f32 %r6, %r6, %r7;"
            for n in (16, 8, 4, 2, 1)
        ),
        lambda x: x.view(-1, 32).sum(1).repeat_interleave(32),
    ),
    "a branch that half of the warp takes": (
        "mov.b32 %r6, %r5; setp.lt.f32 %p1, %r5, 0f00000000; @%p1 bra $L1; bra.uni $L2;\n"
        "$L1:\n neg.f32 %r6, %r5;\n$L2:\n add.f32 %r6, %r6, %r6;",
        lambda x: 2 * x.abs(),
    ),
    "a loop with another number of rounds in every thread": (
        "mov.b32 %r6, 0f00000000; and.b32 %r8, %r1, 7;\n"
        "$L1:\n add.f32 %r6, %r6, %r5; sub.s32 %r8, %r8, 1; setp.ge.s32 %p1, %r8, 0; @%p1 bra $L1;",
        lambda x: sum_of(x, torch.arange(THREADS) % 8 + 1),
    ),
    "shared memory behind a barrier": (
        "st.shared.b32 [%r4], %r5; bar.sync 0; xor.b32 %r7, %r4, 252; ld.shared.b32 %r6, [%r7];",
        lambda x: x.flip(0),
    ),
    "shared memory behind a named barrier": (
        "st.shared.b32 [%r4], %r5; bar.sync 3, 64; xor.b32 %r7, %r4, 252; "
        "ld.shared.b32 %r6, [%r7];",
        lambda x: x.flip(0),
    ),
    "shared memory behind an mbarrier": (
        MAKE_BARRIER.format(64)
        + "st.shared.b32 [%r4], %r5; mbarrier.arrive.shared::cta.b64 _, [%r20];"
        + WAIT_FOR_PHASE.format(0)
        + "xor.b32 %r7, %r4, 252; ld.shared.b32 %r6, [%r7];",
        lambda x: x.flip(0),
    ),
    "warps that meet at one barrier from two places": (
        "st.shared.b32 [%r4], %r5; setp.lt.s32 %p1, %r1, 32; @%p1 bra $L1; bar.sync 3, 64; "
        "bra.uni $L2;\n$L1:\n bar.sync 3, 64;\n"
        "$L2:\n xor.b32 %r7, %r4, 252; ld.shared.b32 %r6, [%r7];",
        lambda x: x.flip(0),
    ),
    "a jump by a table": (
        "$T: .branchtargets $A, $B; and.b32 %r8, %r1, 1; brx.idx %r8, $T;\n"
        "$A:\n neg.f32 %r6, %r5; bra.uni $C;\n$B:\n mov.b32 %r6, %r5;\n$C:\n",
        lambda x: torch.where(torch.arange(THREADS) % 2 == 0, -x, x),
    ),
    "one thread of every warp": (
        "mov.b32 %r6, %r5; elect.sync %r8|%p1, -1; @%p1 neg.f32 %r6, %r5;",
        lambda x: torch.where(torch.arange(THREADS) % 32 == 0, -x, x),
    ),
    "a copy that is waited for": (
        "cp.async.ca.shared.global [%r4], [%rd1], 4; cp.async.commit_group; "
        "cp.async.wait_group 0; bar.sync 0; xor.b32 %r7, %r4, 252; ld.shared.b32 %r6, [%r7];",
        lambda x: x.flip(0),
    ),
    "a store that only some threads make": (
        "setp.lt.s32 %p1, %r1, 3; @%p1 st.global.b32 [%rd2], %r5; mov.b32 %r6, %r5; "
        "@!%p1 st.global.b32 [%rd2], 0;",
        lambda x: x,
    ),
}


def sum_of(x: Tensor, times: Tensor) -> Tensor:
    """x added to 0 so many times, rounded each time."""
    total = torch.zeros_like(x)
    for i in range(int(times.max())):
        total = torch.where(i < times, total + x, total)
    return total


@pytest.mark.parametrize("name", FLOAT_PROGRAMS)
@pytest.mark.every_case
def test_programs_on_floats_give_what_torch_gives(name: str) -> None:
    body, expected = FLOAT_PROGRAMS[name]
    x = floats()
    out, findings = execute(body + STORE, x)
    torch.testing.assert_close(out, expected(x), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert findings == "none"


WHOLE_PROGRAMS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "shift right of a negative number": ("shr.s32 %r6, %r5, 3;", lambda x: x >> 3),
    "shift by more than there are bits": ("shl.b32 %r6, %r5, 40;", lambda x: x * 0),
    "quotient towards zero": (
        "div.s32 %r6, %r5, -7;",
        lambda x: np.trunc(x.astype(np.float64) / -7).astype(np.int32),
    ),
    "remainder": ("rem.s32 %r6, %r5, 7;", lambda x: np.fmod(x, 7)),
    "some bits": ("bfe.s32 %r6, %r5, 4, 8;", lambda x: (x << 20) >> 24),
    "some bits, replaced": (
        "bfi.b32 %r6, %r5, 0, 8, 4;",
        lambda x: (x & 15) << 8,
    ),
    "three inputs by a table": (
        "mov.b32 %r7, 0x0F0F0F0F; not.b32 %r8, %r5; lop3.b32 %r6, %r5, %r7, %r8, 0xCA;",
        lambda x: (x & 0x0F0F0F0F) | (~x & ~x),
    ),
    "bytes in another order": (
        "prmt.b32 %r6, %r5, 0, 0x0123;",
        lambda x: x.view(np.uint32).byteswap().view(np.int32),
    ),
    "how many bits are set": (
        "popc.b32 %r6, %r5;",
        lambda x: np.array([bin(int(n) & 0xFFFFFFFF).count("1") for n in x], np.int32),
    ),
    "upper half of a product": (
        "mul.hi.s32 %r6, %r5, %r5;",
        lambda x: (x.astype(np.int64) ** 2 >> 32).astype(np.int32),
    ),
    "the largest of the warp": (
        "redux.sync.max.s32 %r6, %r5, -1;",
        lambda x: np.repeat(x.reshape(-1, 32).max(1), 32),
    ),
    "who says yes": (
        "setp.lt.s32 %p1, %r5, 0; vote.sync.ballot.b32 %r6, %p1, -1;",
        lambda x: np.repeat(
            ((x.reshape(-1, 32) < 0) * 2 ** np.arange(32, dtype=np.uint64)).sum(1), 32
        ).astype(np.uint32).view(np.int32),
    ),
    "the thread before": (
        "shfl.sync.up.b32 %r6, %r5, 1, 0, -1;",
        lambda x: np.concatenate([np.r_[w[0], w[:-1]] for w in x.reshape(-1, 32)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_PROGRAMS)
@pytest.mark.every_case
def test_programs_on_whole_numbers_give_what_numpy_gives(name: str) -> None:
    body, expected = WHOLE_PROGRAMS[name]
    x = whole()
    out, findings = execute(body + STORE, x)
    assert np.array_equal(out.numpy(), expected(x.numpy()))
    assert findings == "none"


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    x = torch.cat([floats(10_000), torch.tensor([math.inf, -math.inf, 0.0, 3.3895314e38])])
    assert np.array_equal(from_bfloat16(to_bfloat16(x.numpy())), x.bfloat16().float().numpy())


MISTAKES = {
    "shared memory: read of what another warp wrote, without a barrier": (
        "st.shared.b32 [%r4], %r5; xor.b32 %r7, %r4, 128; ld.shared.b32 %r6, [%r7];"
    ),
    "shared memory: read of what another thread of the warp wrote": (
        "st.shared.b32 [%r4], %r5; xor.b32 %r7, %r4, 4; ld.shared.b32 %r6, [%r7];"
    ),
    "shared memory: write of what another warp read, without a barrier": (
        "st.shared.b32 [%r4], %r5; bar.sync 0; xor.b32 %r7, %r4, 128; ld.shared.b32 %r6, [%r7]; "
        "st.shared.b32 [%r4], %r6;"
    ),
    "shared memory: write of what another thread of the warp read": (
        "st.shared.b32 [%r4], %r5; bar.sync 0; xor.b32 %r7, %r4, 4; ld.shared.b32 %r6, [%r7]; "
        "st.shared.b32 [%r4], %r6;"
    ),
    "shared memory: two warps write at one place, without a barrier": (
        "st.shared.b32 [%r4], %r5; xor.b32 %r7, %r4, 128; st.shared.b32 [%r7], %r5;"
    ),
    "shared memory: two threads write different values at one place": (
        "and.b32 %r7, %r4, 124; st.shared.b32 [%r7], %r5;"
    ),
    "shared memory: out of bounds": "st.shared.b32 [%r4+1000], %r5;",
    "shared memory: 4 bytes at no multiple of 4": "st.shared.b32 [%r4+1], %r5;",
    "shared memory: read of what cp.async has not yet written": (
        "cp.async.ca.shared.global [%r4], [%rd1], 4; cp.async.commit_group; "
        "ld.shared.b32 %r6, [%r4]; cp.async.wait_group 0;"
    ),
    "shared memory: write of what cp.async will write": (
        "cp.async.ca.shared.global [%r4], [%rd1], 4; cp.async.commit_group; "
        "st.shared.b32 [%r4], %r5; cp.async.wait_group 0;"
    ),
    "shared memory: the kernel ends before a copy into it": (
        "cp.async.ca.shared.global [%r4], [%rd1], 4; cp.async.commit_group;"
    ),
    "global memory: read out of bounds": "ld.global.b32 %r6, [%rd1+4];",
    "global memory: write out of bounds": "st.global.b32 [%rd2+256], %r5;",
    "global memory: write of 4 bytes at no multiple of 4": "st.global.b32 [%rd2+2], %r5;",
    "global memory: two threads write different values at one place": (
        "ld.param.u64 %rd5, [program_param_1]; st.global.b32 [%rd5], %r5;"
    ),
    "global memory: read of what another warp wrote, without a barrier": (
        "st.global.b32 [%rd2], %r5; ld.param.u64 %rd5, [program_param_1]; "
        "xor.b32 %r7, %r4, 128; cvt.u64.u32 %rd6, %r7; add.s64 %rd5, %rd5, %rd6; "
        "ld.global.b32 %r6, [%rd5];"
    ),
    "global memory: write of what another warp read, without a barrier": (
        "ld.param.u64 %rd5, [program_param_1]; xor.b32 %r7, %r4, 128; cvt.u64.u32 %rd6, %r7; "
        "add.s64 %rd5, %rd5, %rd6; ld.global.b32 %r6, [%rd5]; st.global.b32 [%rd2], %r5;"
    ),
    "threads wait for a phase of an mbarrier that nobody completes": (
        MAKE_BARRIER.format(65)
        + "mbarrier.arrive.shared::cta.b64 _, [%r20];"
        + WAIT_FOR_PHASE.format(0)
        + "mov.b32 %r6, %r5;"
    ),
    "mbarrier: more threads arrive than it was made for": (
        MAKE_BARRIER.format(1)
        + "@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16; bar.sync 0; "
        "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r20]; mov.b32 %r6, %r5;"
    ),
    "mbarrier: used before it is made": (
        "mov.b32 %r20, 512; mbarrier.arrive.shared::cta.b64 _, [%r20]; mov.b32 %r6, %r5;"
    ),
    "threads wait for each other at different places": (
        "setp.lt.s32 %p1, %r1, 32; @%p1 bra $L1; bar.sync 0; bra.uni $L2;\n"
        "$L1:\n bar.sync 0; bar.sync 0;\n$L2:\n mov.b32 %r6, %r5;"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.every_case
def test_a_mistake_is_noticed(mistake: str) -> None:
    _, findings = execute(MISTAKES[mistake], floats(), shared_bytes=1024)
    assert mistake in findings


def test_two_warps_may_write_what_is_there_already() -> None:
    """One number, written by all warps as one, or by one after the other."""
    for order in (0, 1):
        body = "st.shared.b32 [0], 7; bar.sync 0; mov.b32 %r6, %r5;"
        machine, _ = executed(body, floats(), order=order)
        assert not machine.findings.counts


def test_roundings_of_one_warp_are_a_remark_and_of_two_warps_a_race() -> None:
    """Every thread writes its own rounding of a number at one place of its warp, or of all."""
    x = 1 + torch.arange(THREADS) * 2.0**-23
    of_warp, shared = "and.b32 %r7, %r4, 128; ", "mov.b32 %r7, 0; "
    for place, is_race in ((of_warp, False), (shared, True)):
        machine, _ = executed(place + "st.shared.b32 [%r7], %r5;", x)
        assert bool(machine.findings.counts) is is_race
        assert bool(machine.findings.remarks) is not is_race


@pytest.mark.parametrize(
    ("body", "parity", "finding"),
    [
        ("st.shared.b32 [%r4], %r5; mbarrier.arrive.shared::cta.b64 _, [%r20];", 0, "none"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r20]; st.shared.b32 [%r4], %r5;", 0, "read of what"),
        ("st.shared.b32 [%r4], %r5;", 1, "read of what another warp wrote"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r20];", 1, "threads wait for a phase"),
    ],
)
@pytest.mark.every_case
def test_only_an_arrival_after_the_store_and_a_wait_for_its_phase_make_it_visible(
    body: str, parity: int, finding: str
) -> None:
    """A phase of parity 1 seems to be complete before the first one, and never is after it."""
    body = MAKE_BARRIER.format(64) + body + WAIT_FOR_PHASE.format(parity)
    body += "xor.b32 %r7, %r4, 252; ld.shared.b32 %r6, [%r7];"
    _, findings = execute(body, floats())
    assert finding in findings


BETWEEN_BLOCKS = {
    "global memory: two blocks write at one place": "st.global.b32 [%rd5], %r5;",
    "global memory: read of what another block writes": (
        "st.global.b32 [%rd2], %r5; bar.sync 0; ld.global.b32 %r6, [%rd5];"
    ),
    "global memory: write of what another block reads": (
        "ld.global.b32 %r6, [%rd5]; bar.sync 0; st.global.b32 [%rd2], %r5;"
    ),
}


@pytest.mark.parametrize("mistake", BETWEEN_BLOCKS)
@pytest.mark.every_case
def test_a_mistake_between_blocks_is_noticed(mistake: str) -> None:
    beginning = (
        "ld.param.u64 %rd5, [program_param_1]; mul.wide.u32 %rd6, %r1, 4; add.s64 %rd5, %rd5, %rd6;"
    )
    _, findings = execute(beginning + BETWEEN_BLOCKS[mistake], floats(3 * THREADS), blocks=3)
    assert mistake in findings
    _, findings = execute(beginning + BETWEEN_BLOCKS[mistake], floats(), blocks=1)
    assert findings == "none"


def test_barriers_of_different_blocks_have_nothing_to_do_with_each_other() -> None:
    body = (
        "add.s32 %r8, %r3, 1; mov.b32 %r6, 0f00000000;\n"
        "$L1:\n bar.sync 0; st.shared.b32 [%r4], %r5; bar.sync 0; xor.b32 %r7, %r4, 128; "
        "ld.shared.b32 %r7, [%r7]; add.f32 %r6, %r6, %r7; sub.s32 %r8, %r8, 1; "
        "setp.gt.s32 %p1, %r8, 0; @%p1 bra $L1;"
    )
    x = floats(5 * THREADS)
    out, findings = execute(body + STORE, x, blocks=5)
    swapped = x.view(5, 2, 32).flip(1).reshape(-1)
    assert findings == "none"
    torch.testing.assert_close(out, sum_of(swapped, torch.arange(5).repeat_interleave(THREADS) + 1))


def test_an_unknown_instruction_is_refused_by_its_text() -> None:
    with pytest.raises(UnknownInstruction, match=r"atom\.global\.add\.f32"):
        execute("atom.global.add.f32 %r6, [%rd1], %r5;", floats())


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sm_80, sm_90, got 'sm_70'"):
        Device("sm_70")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swizzle", [1, 2, 3])
def test_a_descriptor_of_a_product_names_every_element_once(swizzle: int, transposed: bool) -> None:
    """A factor of 64 x 16 numbers in rows of 128, 64 or 32 bytes, as Triton lays them out."""
    width = {1: 128, 2: 64, 3: 32}[swizzle]
    along = width // 2 if transposed else 8
    descriptor = swizzle << 62 | (1024 >> 4) << 32 | (2048 >> 4) << 16
    elements = places(descriptor, along, 16, 2, transposed)
    assert len(np.unique(elements)) == elements.size
    assert np.array_equal(elements % 2, np.zeros_like(elements))
    # Undoing the exchange of chunks leaves rows of `width` bytes.
    plain = elements ^ (elements >> 7 & width // 16 - 1) << 4
    row, column = np.indices(elements.shape)
    expected = (
        row * 2 + column % 8 * width + column // 8 * 1024
        if transposed
        else row * width + column * 2
    )
    assert np.array_equal(plain, expected)
