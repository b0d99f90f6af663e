"""Predicted times against arithmetic by hand and the data sheet."""

from types import SimpleNamespace
from typing import Any

import pytest

from graphattn.kernels.check.compile import Compiled
from graphattn.kernels.check.prediction import Prediction, predict
from graphattn.kernels.shared.launch import Launch

BF16 = {"HGMMA.64x64x16.F32.BF16": 8}
TF32 = {"HGMMA.64x64x8.F32.TF32": 16}


def configuration(**changed: Any) -> Any:
    launch = Launch(None, (132,), {"PRECISION": changed.pop("precision", "tf32")}, 4, 3)
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


@pytest.mark.parametrize("i", range(5))
def test_the_largest_bound_is_the_prediction(i: int) -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 1.0]
    seconds[i] = 2.0
    prediction = Prediction(*seconds)
    assert prediction.seconds == 2.0
    limits = ("bytes", "gathers", "matrix", "issue slots", "special functions")
    assert prediction.limit == limits[i]


def test_only_sm_90_is_predicted() -> None:
    with pytest.raises(ValueError, match="sm_90"):
        predict(configuration(), compiled(BF16)._replace(arch="sm_80"))
