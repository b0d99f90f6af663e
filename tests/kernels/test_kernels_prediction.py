"""Predicted times against arithmetic by hand and the data sheet."""

from pathlib import Path
from typing import Any

import pytest

from graphattn.kernels.check.__main__ import main
from graphattn.kernels.check.compile import Compiled
from graphattn.kernels.check.machine_code import counts, read_sass
from graphattn.kernels.check.measured import as_file, read_measured
from graphattn.kernels.check.prediction import (
    LATENCY,
    START,
    WAITS,
    WARP_CLOCKS,
    Prediction,
    predict,
    programs_at_once,
)
from graphattn.kernels.check.report import ReportRow, markdown
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.configuration import Configuration
from graphattn.kernels.shared.launch import Launch

BF16 = {"HGMMA.64x64x16.F32.BF16": 8}
TF32 = {"HGMMA.64x64x8.F32.TF32": 16}


def configuration(**changed: Any) -> Configuration:
    grid, warps = (changed.pop("programs_in_all", 132),), changed.pop("warps", 4)
    launch = Launch(None, grid, {"PRECISION": changed.pop("precision", "tf32")}, warps, 3)
    work = {"flops": 0.0, "bytes": 0.0, "iterations": 0.0}
    return Configuration(name="", launch=launch, main=True, target="", **(work | changed))


STARTED = WAITS * LATENCY  # of a program before it computes


def compiled(matrix: dict[str, int], *, instructions: int = 0, special: int = 0) -> Compiled:
    return Compiled("sm_90", 128, 0, 0, 0, 0, matrix, instructions, 8, 0, special)


def test_a_scheduler_issues_one_instruction_per_clock() -> None:
    # One program of four warps on each of 132 multiprocessors: a scheduler holds one warp, so
    # ten passes of 198 instructions are 1980 clocks of 1.98 GHz: a microsecond.
    prediction = predict(configuration(iterations=1320), compiled(BF16, instructions=198))
    assert prediction.issue_s == pytest.approx(1e-6)


def test_a_warp_issues_an_instruction_only_when_the_one_before_it_is_done() -> None:
    # One warp per scheduler fills one slot of 4.6, and eight fill all.
    work = compiled(BF16, instructions=198)
    for warps, slots in ((4, WARP_CLOCKS), (8, WARP_CLOCKS / 2), (16, WARP_CLOCKS / 4)):
        prediction = predict(configuration(iterations=5280 / warps, warps=warps), work)
        assert prediction.issue_s == pytest.approx(1e-6)
        assert prediction.in_turn_s == pytest.approx(slots * 1e-6 + STARTED)
    many = configuration(iterations=13200, programs_in_all=8 * 132)
    prediction = predict(many, work._replace(registers=64))
    assert prediction.programs == 8
    assert prediction.in_turn_s / 8 == pytest.approx(WARP_CLOCKS * 10e-6 / 8 + STARTED)
    assert prediction.seconds == START + prediction.issue_s
    assert prediction.limit == "issue slots"


def test_groups_of_warps_that_are_not_in_step_count_as_programs() -> None:
    """Three groups of four warps in one program, or three programs of four warps."""
    work = compiled(BF16, instructions=198)._replace(registers=128)
    one = predict(configuration(iterations=1320, programs_in_all=132, groups=3), work)
    three = predict(configuration(iterations=1320, programs_in_all=3 * 132), work)
    assert one.programs == three.programs == 3
    issued = WARP_CLOCKS * 1e-6
    assert one.in_turn_s == pytest.approx(issued + STARTED)
    assert three.in_turn_s == pytest.approx(issued + 3 * STARTED)


def test_a_multiprocessor_takes_two_clocks_for_a_warps_special_function() -> None:
    # 32 threads, 16 results per clock: four warps with 99 each take 792 clocks, 10 passes 4 us.
    prediction = predict(configuration(iterations=1320), compiled(BF16, special=99))
    assert prediction.special_s == pytest.approx(4e-6)


def test_loops_one_after_the_other_and_what_is_around_them_are_counted_each() -> None:
    twice = compiled(BF16, instructions=999)._replace(loops=((100, 4), (50, 0)), outside=(30, 1))
    # 2 passes of the first, 4 of the second, and 3 programs, of four warps each.
    prediction = predict(configuration(passes=(2.0, 4.0), programs=3.0), twice)
    once = predict(configuration(iterations=1.0), compiled(BF16, instructions=490, special=11))
    assert (prediction.issue_s, prediction.special_s) == pytest.approx(
        (once.issue_s, once.special_s)
    )
    with pytest.raises(ValueError, match=r"passes must be at most one number for each of 2 loops"):
        predict(configuration(passes=(2.0, 4.0, 1.0), programs=3.0), twice)


def test_code_outside_of_loops_is_run_once_by_every_program() -> None:
    code = compiled(BF16, instructions=198)._replace(loops=((198, 0),), outside=(99, 0))
    prediction = predict(configuration(iterations=1320, programs_in_all=264), code)
    assert prediction.issue_s == pytest.approx(1.1e-6)
    # Code without a loop is one pass.
    prediction = predict(configuration(programs_in_all=1320), compiled(BF16, instructions=198))
    assert prediction.issue_s == pytest.approx(1e-6)


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
    before = predict(configuration(**work), compiled({"HMMA.16816.F32.BF16": 8})).matrix_s
    assert before == pytest.approx(half / 0.62)


def test_moved_bytes_take_the_time_of_a_copy() -> None:
    # Copies go on while a program computes, and programs that share a multiprocessor wait at once.
    launch = configuration(bytes=4.3e9, programs_in_all=264)
    prediction = predict(launch, compiled(BF16)._replace(copies=1))
    assert prediction.bytes_s == pytest.approx(1e-3)
    assert prediction.seconds == pytest.approx(1e-3 + START)
    assert prediction.limit == "bytes"


def test_what_is_gathered_takes_the_time_of_the_cache() -> None:
    launch = configuration(bytes=4.3e9, gathered=11e9, programs_in_all=264)
    prediction = predict(launch, compiled(BF16))
    assert (prediction.bytes_s, prediction.cache_s) == pytest.approx((1e-3, 2e-3))
    assert prediction.limit == "gathers"


def test_rows_of_a_table_that_does_not_fit_in_the_cache_come_from_memory() -> None:
    def seconds(table: float) -> float:
        return predict(configuration(gathered=11e9, table=table), compiled(BF16)).cache_s

    assert seconds(0.0) == seconds(50e6) == pytest.approx(2e-3)
    # Three of four bytes are not in the cache.
    assert seconds(200e6) == pytest.approx(0.25 * 11e9 / 5.5e12 + 0.75 * 11e9 / 4.3e12)


def test_programs_wait_for_memory_when_they_start_and_when_they_look_rows_up() -> None:
    prediction = predict(configuration(programs_in_all=1320, lookups=2640.0), compiled(BF16))
    assert prediction.in_turn_s == pytest.approx(LATENCY * (10 * WAITS + 20))


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
        gathered = {one.name.rpartition(": ")[2]: one.gathered for one in configurations_of(case)}
    tensors = 2.0 * 4 * 16 * 4096 * 64 * 2
    tiles = {"band forward": 32, "row dots": 0, "d query": 32, "d source": 64}
    assert gathered == {part: number * tensors for part, number in tiles.items()}


def test_kernels_of_windows_go_over_masked_tiles_before_and_after_the_others() -> None:
    pytest.importorskip("triton")
    from graphattn.kernels.bands.configurations import BandCase, configurations_of, window

    # Causal, 4 x 16 heads: 64 targets see 64 sources in part, up to 128 in full, and 64 in part.
    case = BandCase("", "", window(4096, 191, 0), 4, 16, 64)
    sizes = {
        "forward": tuning.Choice(64, 64, 4, 2),
        "d_query": tuning.Choice(64, 64, 4, 2),
        "d_source": tuning.Choice(64, 64, 4, 2),
    }
    with tuning.compiling_for("sm_90"), tuning.override(**sizes):
        by_part = {one.name.rpartition(": ")[2]: one for one in configurations_of(case)}
    tiles = 4096 // 64
    # The first tile sees only itself, the second one tile and itself, the third two, ...
    of_targets = (64.0 * (tiles - 3), 64.0 * (1 + 2 * (tiles - 2)), 64.0 * tiles)
    for part in ("band forward", "d query"):
        assert by_part[part].passes == of_targets
    assert by_part["d source"].passes == of_targets[::-1]
    assert by_part["row dots"].passes == ()
    for one in by_part.values():
        assert sum(one.passes) == one.iterations


# What does not overlap: 132 programs of four warps, one on each multiprocessor. A hundred passes of
# 198 instructions are 10 us of issue slots if all are filled, of which a warp fills one of 4.6.
# 7900e6 operations of products are 10 us.
BUSY = {"iterations": 13200, "flops": 7900e6}
ISSUED = WARP_CLOCKS * 10e-6


def busy(**changed: Any) -> Compiled:
    return compiled(BF16, instructions=198)._replace(**changed)


def test_a_program_waits_for_its_products_before_it_computes_with_them() -> None:
    prediction = predict(configuration(**BUSY), busy(waits=2))
    assert prediction.in_turn_s == pytest.approx(10e-6 + ISSUED + STARTED)
    assert prediction.seconds == START + prediction.in_turn_s
    assert prediction.limit == "one after the other"


def test_products_that_go_on_overlap_with_the_rest() -> None:
    all_open = predict(configuration(**BUSY), busy(waits=2, open_waits=2))
    half_open = predict(configuration(**BUSY), busy(waits=2, open_waits=1))
    assert all_open.in_turn_s == pytest.approx(ISSUED + STARTED)
    assert half_open.in_turn_s == pytest.approx(5e-6 + ISSUED + STARTED)
    many = predict(configuration(**BUSY | {"flops": 79e9}), busy(waits=1, open_waits=1))
    assert many.in_turn_s == pytest.approx(100e-6 + STARTED)  # the rest is done meanwhile


def test_memory_adds_to_the_sum_unless_copies_are_in_flight() -> None:
    work, computing = BUSY | {"bytes": 4.3e7}, 10e-6 + ISSUED + STARTED  # 10 us more
    assert predict(configuration(**work), busy()).in_turn_s == pytest.approx(10e-6 + computing)
    assert predict(configuration(**work), busy(copies=4)).in_turn_s == pytest.approx(computing)
    slow = BUSY | {"bytes": 4.3e8}
    prediction = predict(configuration(**slow), busy(copies=4))
    assert prediction.in_turn_s == pytest.approx(100e-6 + STARTED)


def test_programs_that_share_a_multiprocessor_fill_each_others_waits() -> None:
    prediction = predict(configuration(**BUSY, programs_in_all=2 * 132), busy())
    assert prediction.programs == 2
    assert prediction.in_turn_s == pytest.approx(10e-6 + ISSUED + 2 * STARTED)
    assert prediction.seconds == pytest.approx(START + prediction.in_turn_s / 2)
    # Half the sum is 30 us, but special functions alone are 40.
    special = predict(configuration(**BUSY, programs_in_all=2 * 132), busy(loop_special=99))
    assert special.special_s == pytest.approx(40e-6)
    assert (special.seconds, special.limit) == (START + special.special_s, "special functions")


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
    resources = compiled(BF16)._replace(registers=registers, shared=shared)
    assert programs_at_once(launch, resources) == programs


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
    numbers = counts(read_sass(text))
    assert (numbers["copies"], numbers["waits"], numbers["open_waits"]) == (1, 2, 1)


def test_only_sm_90_is_predicted() -> None:
    with pytest.raises(ValueError, match="sm_90"):
        predict(configuration(), compiled(BF16)._replace(arch="sm_80"))


FACTS_OF_TEST = {"hardware": "NVIDIA H200, CUDA 13.0", "driver": "580", "torch": "2.11.0",
                 "triton": "3.6.0", "date": "2026-11-26", "commit": "cdef0c3"}  # fmt: skip


def rows_of(**seconds: float) -> list[ReportRow]:
    """Rows as if launches took so long, some of one name."""
    return [
        ReportRow(
            name.rstrip("_"), "sm_90", "a target", compiled({}), Prediction(s, 0, 0, 0, 0), []
        )
        for name, s in seconds.items()
    ]


def test_measured_times_stand_beside_the_predictions_of_the_same_launches(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "kernels.json"
    path.write_text(as_file(FACTS_OF_TEST | {"size": "full"}, [("dots", 2e-6), ("dots", 9e-6)]))
    rows = rows_of(dots=1e-6, forward=2e-6, dots_=3e-6)
    text = markdown(rows, read_measured(path)).split("## Predicted time")[1]
    for fact in FACTS_OF_TEST.values():
        assert fact in text
    assert "may have changed since" in text
    header, _, *lines = (line for line in text.splitlines() if line.startswith("|"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *lines)]
    assert [line[0] for line in cells] == ["configuration", "dots", "forward", "dots"]
    assert [line[-4:] for line in cells] == [
        ["predicted", "measured", "measured / predicted", "target"],
        ["1 (bytes)", "2", "2.00", "a target"],
        ["2 (bytes)", "", "", "a target"],
        ["3 (bytes)", "9", "3.00", "a target"],
    ]
    assert "Not measured." not in text
    assert "Not measured." in markdown(rows)


@pytest.mark.parametrize("text", ["", "[]", '{"launches": []}', None])
def test_a_file_that_holds_no_measured_times_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="measured must be a JSON object with hardware"):
        read_measured(path)
    with pytest.raises(SystemExit):
        main(["--measured", str(path)])
    assert "measured must be" in capsys.readouterr().err
