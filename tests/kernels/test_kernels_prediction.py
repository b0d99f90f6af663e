"""Predicted times against arithmetic by hand and the data sheet."""

from types import SimpleNamespace
from typing import Any

import pytest

from graphattn.kernels.check.compile import Compiled
from graphattn.kernels.check.machine_code import counts, read_sass
from graphattn.kernels.check.prediction import Prediction, predict, programs_at_once
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import Launch

BF16 = {"HGMMA.64x64x16.F32.BF16": 8}
TF32 = {"HGMMA.64x64x8.F32.TF32": 16}


def configuration(**changed: Any) -> Any:
    grid, warps = (changed.pop("programs_in_all", 132),), changed.pop("warps", 4)
    launch = Launch(None, grid, {"PRECISION": changed.pop("precision", "tf32")}, warps, 3)
    work = {"flops": 0.0, "bytes": 0.0, "gathered": 0.0, "iterations": 0.0, "passes": ()}
    return SimpleNamespace(name="", launch=launch, main=True, target="", **(work | changed))


def compiled(matrix: dict[str, int], *, instructions: int = 0, special: int = 0) -> Compiled:
    return Compiled("sm_90", 128, 0, 0, 0, 0, matrix, instructions, 8, 0, special)


def test_a_scheduler_issues_one_instruction_per_clock() -> None:
    # One program of four warps on each of 132 multiprocessors: a scheduler holds one warp, so
    # ten passes of 198 instructions are 1980 clocks of 1.98 GHz: a microsecond.
    prediction = predict(configuration(iterations=1320), compiled(BF16, instructions=198))
    assert prediction.issue_s == pytest.approx(1e-6)
    assert (prediction.seconds, prediction.limit) == (prediction.issue_s, "issue slots")


def test_a_multiprocessor_takes_two_clocks_for_a_warps_special_function() -> None:
    # 32 threads, 16 results per clock: four warps with 99 each take 792 clocks, 10 passes 4 us.
    prediction = predict(configuration(iterations=1320), compiled(BF16, special=99))
    assert prediction.special_s == pytest.approx(4e-6)
    assert prediction.limit == "special functions"


def test_the_work_is_all_that_counts_not_how_it_is_divided() -> None:
    few = predict(configuration(iterations=100), compiled(BF16, instructions=600, special=60))
    many = predict(configuration(iterations=600), compiled(BF16, instructions=100, special=10))
    assert few == pytest.approx(many)


def test_loops_one_after_the_other_and_what_is_around_them_are_counted_each() -> None:
    twice = compiled(BF16, instructions=999)._replace(loops=((100, 4), (50, 0)), outside=(30, 1))
    # 2 passes of the first, 4 of the second, and 3 programs, of four warps each.
    found = predict(configuration(passes=(2.0, 4.0), programs=3.0), twice)
    once = predict(configuration(iterations=1.0), compiled(BF16, instructions=490, special=11))
    assert (found.issue_s, found.special_s) == pytest.approx((once.issue_s, once.special_s))
    with pytest.raises(ValueError, match=r"passes must be one number for each of 2 loops"):
        predict(configuration(passes=(2.0,), programs=3.0), twice)


def test_matrix_time_follows_the_type_the_machine_code_multiplies() -> None:
    work = {"flops": 1e12}
    half = predict(configuration(**work), compiled(BF16)).matrix_s
    tf32 = predict(configuration(**work), compiled(TF32)).matrix_s
    thrice = predict(configuration(precision="tf32x3", **work), compiled(TF32)).matrix_s
    ieee = predict(configuration(precision="ieee", **work), compiled({})).matrix_s
    assert half == pytest.approx(1e12 / 790e12)
    assert tf32 == pytest.approx(1e12 / 494e12)
    assert thrice == pytest.approx(3 * tf32)
    assert ieee == pytest.approx(1e12 / 67e12, rel=0.01)  # data sheet: 67 TFLOPS in float32


def test_half_precision_beside_a_tf32x3_constant_stays_half_precision() -> None:
    work = {"flops": 1e12, "precision": "tf32x3"}
    assert predict(configuration(**work), compiled(BF16)).matrix_s == pytest.approx(1e12 / 790e12)


def test_moved_bytes_take_the_time_of_a_copy() -> None:
    prediction = predict(configuration(bytes=4.3e9), compiled(BF16))
    assert prediction.bytes_s == pytest.approx(1e-3)
    assert prediction.limit == "bytes"


def test_what_is_gathered_takes_the_time_of_the_cache() -> None:
    prediction = predict(configuration(bytes=4.3e9, gathered=11e9), compiled(BF16))
    assert (prediction.bytes_s, prediction.cache_s) == pytest.approx((1e-3, 2e-3))
    assert prediction.limit == "gathers"


def test_every_program_of_a_band_kernel_reads_all_tiles_that_it_sees() -> None:
    pytest.importorskip("triton")
    from graphattn.kernels.bands.configurations import BandCase, complete, configurations_of

    # 4 x 16 heads of 64 bfloat16 features, and 4,096 tokens that all see each other. Of 128 targets
    # or 64 sources a program goes over two tensors of all tokens at the other side.
    case = BandCase("", "", complete(4096), 4, 16, 64)
    sizes = {
        "forward": tuning.Choice(128, 32, 4, 2),
        "d_query": tuning.Choice(128, 64, 4, 2),
        "d_source": tuning.Choice(32, 64, 4, 2),
    }
    with tuning.compiling_for("sm_90"), tuning.override(**sizes):
        found = {one.name.rpartition(": ")[2]: one.gathered for one in configurations_of(case)}
    tensors = 2.0 * 4 * 16 * 4096 * 64 * 2
    tiles = {"band forward": 32, "row dots": 0, "d query": 32, "d source": 64}
    assert found == {part: number * tensors for part, number in tiles.items()}


@pytest.mark.parametrize("i", range(5))
def test_the_largest_bound_is_the_prediction(i: int) -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 1.0]
    seconds[i] = 2.0
    prediction = Prediction(*seconds)
    assert prediction.seconds == 2.0
    limits = ("bytes", "gathers", "matrix", "issue slots", "special functions")
    assert prediction.limit == limits[i]


# What does not overlap: 132 programs, one on each multiprocessor. Ten passes of 198 instructions of
# four warps are 1 us of issue slots, and 99 special functions 4 us more; 790e6 operations of
# products are 1 us.
BUSY = {"iterations": 1320, "flops": 790e6}


def busy(**changed: Any) -> Compiled:
    return compiled(BF16, instructions=198, special=99)._replace(**changed)


def test_a_program_waits_for_its_products_before_it_computes_with_them() -> None:
    prediction = predict(configuration(**BUSY), busy(waits=2))
    assert prediction.in_turn_s == pytest.approx(6e-6)
    assert (prediction.seconds, prediction.limit) == (prediction.in_turn_s, "one after the other")


def test_products_that_go_on_overlap_with_the_rest() -> None:
    all_open = predict(configuration(**BUSY), busy(waits=2, open_waits=2))
    half_open = predict(configuration(**BUSY), busy(waits=2, open_waits=1))
    assert all_open.in_turn_s == pytest.approx(5e-6)
    assert half_open.in_turn_s == pytest.approx(5.5e-6)
    many = predict(configuration(**BUSY | {"flops": 7900e6}), busy(waits=1, open_waits=1))
    assert many.in_turn_s == pytest.approx(10e-6)  # the rest is done meanwhile


def test_memory_adds_to_the_sum_unless_copies_are_in_flight() -> None:
    work = BUSY | {"bytes": 4.3e6}  # 1 us
    assert predict(configuration(**work), busy()).in_turn_s == pytest.approx(7e-6)
    assert predict(configuration(**work), busy(copies=4)).in_turn_s == pytest.approx(6e-6)
    slow = BUSY | {"bytes": 43e6}
    assert predict(configuration(**slow), busy(copies=4)).seconds == pytest.approx(10e-6)


def test_products_of_multiply_adds_are_instructions_and_count_once() -> None:
    # 523 TFLOPS in half precision, 67 in float32: 1 us of multiply-adds in 2 us of instructions.
    work = {"iterations": 2640, "flops": 66.9e6}
    prediction = predict(configuration(**work), compiled({}, instructions=198))
    assert prediction.matrix_s == pytest.approx(1e-6, rel=0.01)
    assert prediction.seconds == prediction.in_turn_s == pytest.approx(2e-6)


def test_programs_that_share_a_multiprocessor_fill_each_others_waits() -> None:
    prediction = predict(configuration(**BUSY, programs_in_all=2 * 132), busy())
    assert prediction.programs == 2
    assert prediction.in_turn_s == pytest.approx(6e-6)
    # Half the sum is 3 us, but special functions alone are 4.
    assert (prediction.seconds, prediction.limit) == (prediction.special_s, "special functions")
    assert prediction.special_s == pytest.approx(4e-6)


def test_a_single_warp_leaves_three_schedulers_idle() -> None:
    # The same work by one warp in place of four, alone on its multiprocessor.
    work = BUSY | {"iterations": 5280, "flops": 0.0}
    prediction = predict(configuration(**work, warps=1), busy())
    assert prediction.issue_s + prediction.special_s == pytest.approx(5e-6)
    assert prediction.in_turn_s == pytest.approx(20e-6)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("registers", "shared", "warps", "grid", "programs"),
    [
        (255, 0, 8, 8192, 1),  # 8192 registers a warp, two warps a scheduler
        (255, 0, 4, 8192, 2),
        (128, 0, 4, 8192, 4),  # 65536 / (128 * 128)
        (168, 0, 4, 8192, 3),  # 5376 registers a warp, three warps a scheduler
        (32, 0, 4, 8192, 16),  # 64 warps
        (16, 0, 1, 8192, 32),  # 32 programs
        (32, 227 * 1024, 4, 8192, 1),
        (32, 113 * 1024, 4, 8192, 2),  # 228 KiB, and each takes one more
        (32, 114 * 1024, 4, 8192, 1),
        (32, 0, 4, 132, 1),  # there are no more programs
        (32, 0, 4, 133, 2),
        (32, 0, 4, 1, 1),
    ],
)
def test_registers_shared_memory_and_warps_decide_how_many_programs_share(
    registers: int, shared: int, warps: int, grid: int, programs: int
) -> None:
    """Compare with what CUDA's occupancy calculator computes for compute capability 9.0."""
    launch = configuration(programs_in_all=grid, warps=warps)
    found = compiled(BF16)._replace(registers=registers, shared=shared)
    assert programs_at_once(launch, found) == programs


def test_waits_and_copies_are_read_from_the_machine_code() -> None:
    lines = (
        "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",  # before the loop
        "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "@P0 BRA 0x10",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",  # after it
        "EXIT",
    )
    text = "\n".join(f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))
    found = counts(read_sass(text))
    assert (found["copies"], found["waits"], found["open_waits"]) == (1, 2, 1)


def test_only_sm_90_is_predicted() -> None:
    with pytest.raises(ValueError, match="sm_90"):
        predict(configuration(), compiled(BF16)._replace(arch="sm_80"))
