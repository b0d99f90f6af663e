"""`graphattn bench` times what is right, says what it did not time, and judges by its targets."""

from __future__ import annotations

import copy
import math
import re
import types
from dataclasses import replace
from itertools import groupby

import numpy
import pytest
import torch
from bench_helpers import CPU, error_of, measured, quick_runs, run
from torch.nn.attention import SDPBackend

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import inputs
from graphattn.bench.cases import least_work as work
from graphattn.bench.cases import mixers as mixer_cases
from graphattn.bench.cases import whole as whole_cases
from graphattn.bench.cases.case import BOTH, FORWARD, BenchmarkCase, Target
from graphattn.bench.contenders import fused_attention
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.measuring import gpu_clock, memory, runner
from graphattn.bench.measuring import passes as measure
from graphattn.bench.models import training, vision
from graphattn.bench.reporting import record, tables
from graphattn.cli import bench

TINY = {
    "complete": {"tokens": 24},
    "gka": {"tokens": 24},
    "gka-tiny": {"pixels": 32, "dim": 12},
    "gka-small": {"pixels": 32, "dim": 12},
    "gka-base": {"pixels": 32, "dim": 12},
    "causal-window": {"tokens": 40, "window": 8},
    "window": {"tokens": 40, "window": 5},
    "krause": {"tokens": 40, "window": 8, "top_k": 3},
    "knn-graph": {"tokens": 40, "k": 4},
    "bipartite": {"tokens": 24, "sources": 36, "degree": 4},
    "grid": {"tokens": 26, "radius": 1},
    "longformer": {"tokens": 40, "window": 3, "global_tokens": 2},
    "crossover": {"tokens": 48, "features": 4},
    "consensus": {"tokens": 20, "dim": 24, "edge_hidden": 8},
    "consensus-layer": {"tokens": 20, "dim": 24, "edge_hidden": 8},
    "knn": {"tokens": 60, "k": 4},
    "edges": {"tokens": 50, "window": 3},
    "knn-graph-reordered": {"tokens": 40, "k": 4},
    "radius-graph": {"tokens": 40, "degree": 4},
    "krause-dense": {"tokens": 40, "window": 7, "top_k": 3},
    "million": {"tokens": 60, "window": 7},
    "fiedler": {"tokens": 80, "window": 3},
    "streaming": {"window": 6, "dim": 16, "heads": 2, "early": 3, "late": 40},
    "streaming-krause": {
        "batch": 2, "window": 6, "top_k": 4, "dim": 16, "heads": 2, "early": 3, "late": 40,
    },
    "small": {"tokens": 10, "dim": 16},
    "llama": {"tokens": 24, "window": 4, "top_k": 2, "dim": 16, "layers": 2},
    "mixer": {"tokens": 24, "dim": 12, "window": 4, "top_k": 2},
    "encoder": {"tokens": 24, "dim": 16, "window": 4, "top_k": 2},
    "causal": {"tokens": 24, "dim": 16, "window": 4, "top_k": 2},
    "generation": {"prompt": 5, "new_tokens": 6, "dim": 16, "window": 4},
    "scaling-window": {"window": 4, "features": 4},
    "scaling-consensus": {"dim": 8, "edge_hidden": 4},
}  # fmt: skip
MISSING = contenders.MissingError


def not_compiled(runs: dict[str, contenders.Run]) -> dict[str, contenders.Run]:
    """Compiling takes a minute, and has tests of its own."""
    return {
        name: run
        for name, run in runs.items()
        if name not in ("compiled", "compiled slices") and not name.startswith("FlexAttention")
    }


def tiny(case: BenchmarkCase) -> BenchmarkCase:
    size = TINY[case.name if case.name in TINY else case.name.split("-")[0]]
    return replace(
        case,
        sizes={"small": {**case.sizes["small"], **size}},
        contenders=not_compiled(case.contenders),
        dot_products=not_compiled(case.dot_products),
        lengths={"small": (16, 32, 64)} if case.lengths else {},
        degrees={"small": (2, 12, 48)} if case.degrees else {},
    )


CASES = {case.name: tiny(case) for case in cases.CASES}
LANGUAGE = [name for name in CASES if name.startswith("llama-")]
MODELS = ["gka-tiny", "gka-small", "gka-base"]
MIXERS = [case.name for case in mixer_cases.WHOLE_MODELS]
WHOLE = [case.name for case in whole_cases.WHOLE]
OPERATIONS = [
    name
    for name, case in CASES.items()
    if case.backward
    and not case.lengths
    and name not in (*MODELS, *LANGUAGE, *MIXERS, *WHOLE, "consensus-layer")
    and not name.startswith("small-")
]


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    quick_runs(monkeypatch, *CASES.values())


def targets_on(case: BenchmarkCase, device: str) -> list[Target]:
    return [target for target in case.targets if target.device == device]


def inputs_of(name: str):
    entry = next(iter(CASES[name].entries("small").values()))
    return CASES[name].make(entry.size, CPU, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_every_contender_of_a_case_is_right(name):
    """Every contender of a case that is installed is right to 1e-5.

    KeOps and others may be missing.
    """
    case = CASES[name]
    x = inputs_of(name)
    checked = 0
    for contenders_of_a_kind, is_dot in ((case.contenders, False), (case.dot_products, True)):
        if not contenders_of_a_kind:
            continue
        truth = gate.truth_of(x, backward=case.backward, dot_product=is_dot)
        for contender in contenders_of_a_kind.values():
            try:
                errors = truth.errors_of(contender)
            except MISSING:
                continue
            assert max(errors) < 1e-5
            checked += 1
    assert checked >= (1 if case.lengths or name in MIXERS else 2)


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_every_number(name, tmp_path):
    results, output = measured(tmp_path, name)
    assert {"device", "hardware", "commit", "torch", "date", "size"} <= set(results.provenance)
    case = CASES[name]
    both = {"forward", "forward + backward"}
    assert {row.passes for row in results.rows} == (both if case.backward else {"forward"})
    for row in results.rows:
        assert row.case == name
        assert row.median > 0
        assert row.rounds >= 3
        assert row.peak == (2.0**20 if case.memory else None)
        entry = case.entries("small")[row.contender]
        assert row.size == entry.size
        assert (row.error is None) == (row.contender in case.yardsticks)
        assert (row.ratio is None) == (entry.beside is None)
        assert entry.beside is not None or case.lengths or case.degrees
    for target in targets_on(case, "cpu"):
        assert any(
            (verdict.passes, verdict.quantity, verdict.at_most, verdict.at_least)
            == (target.passes, target.quantity, target.at_most, target.at_least)
            for verdict in results.targets
        )
    assert output.splitlines()[-1] == str(tmp_path / "rows.json")


def replace_index_add(monkeypatch, how):
    contenders = {**CASES["window"].contenders, "index_add": how}
    monkeypatch.setattr(bench, "CASES", [replace(CASES["window"], contenders=contenders)])


@pytest.mark.parametrize(
    "how",
    [
        lambda x: contenders.index_add(x) * 1.001,
        lambda x: contenders.index_add(replace(x, sigma=x.sigma * 1.01)),
        lambda x: contenders.index_add(x).detach() + 0 * x.query + 0 * x.key + 0 * x.value,
        lambda x: contenders.index_add(x) + (0 * x.value).sqrt(),  # the gradient alone is NaN
    ],
    ids=["value", "sigma", "gradient", "NaN"],
)
def test_no_time_for_a_wrong_result(monkeypatch, how):
    replace_index_add(monkeypatch, how)
    result = run("window")
    assert result.exit_code == 0, result.output
    assert re.search(r"window, index_add: not timed: wrong result \(errors ", result.output)
    rows = result.output.split("missing:")[0].split("forward")[1:]
    assert not any("index_add" in part for part in rows)


@pytest.mark.long
def test_a_result_is_checked_once_per_case(monkeypatch):
    calls: list[str] = []

    def counted(x):
        calls.append("forward" if torch.is_grad_enabled() is False else "gradient")
        return contenders.index_add(x)

    truths: list[object] = []
    make = runner.truth_of
    monkeypatch.setattr(runner, "truth_of", lambda *a, **k: truths.append(0) or make(*a, **k))
    replace_index_add(monkeypatch, counted)
    assert run("window").exit_code == 0
    assert len(truths) == 2  # by distance, and by the dot product
    # The check; then rounds, however many passes they take, forward and with the backward pass.
    assert calls[:2] == ["gradient", "forward"]
    assert [kind for kind, _ in groupby(calls)] == ["gradient", "forward", "gradient"]


def test_neighbours_with_right_distances_and_wrong_indices_are_wrong():
    truth = gate.truth_of(inputs_of("knn"), backward=False)

    def shifted(x):
        distances, indices = contenders.cdist_topk(x)
        return distances, (indices + 1) % len(x.points)

    assert max(truth.errors_of(contenders.cdist_topk)) < 1e-5
    assert max(truth.errors_of(shifted)) > 0.1


def test_edges_that_are_missing_or_wrong_are_wrong():
    truth = gate.truth_of(inputs.WindowSize(50, 3), backward=False)
    assert truth.errors_of(contenders.offsets_and_mask) == (0.0, 0.0)
    assert truth.errors_of(lambda x: contenders.offsets_and_mask(x)[:, 1:])[0] > 0
    shift = torch.tensor([[1], [0]])
    assert truth.errors_of(lambda x: contenders.offsets_and_mask(x) + shift)[0] > 0
    assert truth.errors_of(lambda x: ga.window_cycle_graph(50, 3))[0] > 0


def test_the_certified_fiedler_value_is_that_of_the_dense_laplacian():
    x = inputs.spectral_inputs(60, 3)
    truth = gate.SpectralTruth(x)
    dense = numpy.zeros((60, 60))
    for weight, j, i in zip(x.edge_weight.tolist(), *x.graph.edge_index.tolist(), strict=True):
        dense[i, j] += weight / 2
        dense[j, i] += weight / 2
    spectrum = numpy.linalg.eigvalsh(numpy.diag(dense.sum(1)) - dense)
    assert truth.value == pytest.approx(spectrum[1], rel=1e-10)
    assert 0 <= truth.slack < 1e-10
    assert truth.errors_of(lambda _: spectrum[2])[0] > 0.1


def test_a_stream_that_forgets_a_token_is_wrong():
    x = inputs_of("streaming")
    truth = gate.truth_of(x, backward=False)
    assert truth.errors_of(lambda x: x.late.step())[0] < 1e-5
    assert truth.errors_of(lambda x: x.early.step())[0] < 1e-5

    def skips(x):
        x.late.step()
        return x.late.step()

    assert truth.errors_of(skips)[0] > 1e-2


def test_zero_is_no_right_answer_and_a_true_zero_hides_no_error():
    truth = gate.truth_of(inputs_of("window"), backward=True)
    nothing = max(truth.errors_of(lambda x: 0 * contenders.index_add(x)))
    assert nothing == pytest.approx(1.0)
    assert gate.relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2).double()) == 5.0
    assert math.isnan(gate.worst([0.0, math.nan, 1.0]))


@pytest.mark.long
def test_what_fails_and_what_is_not_installed_is_listed(monkeypatch, tmp_path):
    def fails(_):
        raise RuntimeError("out of everything\nand more")

    replace_index_add(monkeypatch, fails)
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    results, output = measured(tmp_path, "window")
    assert "missing: window, index_add: out of everything" in output
    assert "missing: window, torch-scatter: torch_scatter is not installed" in output
    assert output.index("missing:") < output.index("Targets")
    timed = {row.contender for row in results.rows}
    rivals = [set(target.over) for target in targets_on(CASES["window"], "cpu") if target.over]
    assert output.count("not measured") == sum(not over & timed for over in rivals) > 0


def test_what_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(contenders, "free_memory", lambda device: 1e4)
    output = run("complete", "consensus").output
    assert "missing: complete, masked dense: all pairs would need" in output
    assert "missing: consensus, gather/scatter: its edge networks would need" in output
    assert "SDPA flash (dot product)" in output
    assert "0.00x" not in output  # a ratio to what was not timed is none


def test_a_case_that_a_layer_cannot_run_yet_is_one_line(monkeypatch):
    def make(*_):
        raise MISSING("not available yet: no step()")

    case = replace(CASES["streaming"], make=make)
    monkeypatch.setattr(bench, "CASES", [case])
    output = run("streaming").output
    assert output.count("missing: streaming: not available yet: no step()") == 1
    assert output.count("not measured") == len(targets_on(case, "cpu"))


def test_an_older_record_stands_beside_the_new_numbers(tmp_path):
    results, _ = measured(tmp_path, "knn")
    rows = [replace(row, ratio=77.0) for row in results.rows]
    replace(results, rows=rows).write(tmp_path / "rows.json")
    table = run("knn", "--compare", tmp_path / "rows.json").output.split("Ratios, compared with")[1]
    assert table.count("77.00x") == len(rows)
    assert "1.00x" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["soft"], "CASE must be one of complete, gka, causal-window"),
        (["--size", "huge"], "size must be one of 'small'"),
        (["--device", "tpu"], "device must be one of 'cpu', 'cuda'"),
        (["--json", "no/such/folder/rows.json"], "no folder no/such/folder"),
        (["--plot", "no/such/folder/rows.png"], "no folder no/such/folder"),
        (["--plot", "rows.xls"], "the ending must be one of '.png'"),
        (["--device", "cuda"], "--device must be cpu, because there is no CUDA device"),
        (["--resume"], "--resume needs --json"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert says in result.stderr


def test_a_file_that_is_no_record_is_refused(tmp_path):
    for content in ("not json", "{}", '{"provenance": {}, "rows": [{"case": 1}]}'):
        (tmp_path / "old.json").write_text(content)
        result = run("knn", "--compare", tmp_path / "old.json")
        assert result.exit_code == 2
        assert "must be a record that `graphattn bench --json` wrote" in result.stderr


def test_help_names_every_case():
    text = run("--help").output
    for case in CASES.values():
        groups = {"scaling": "scaling", "llama": "transformers", "mixer": "mixers"}
        assert groups.get(case.name.split("-")[0], case.name) in text


# Targets.


def rows_of(**times: float) -> tuple[dict[str, record.Row], dict[str, measure.Timing]]:
    """Rows and timings of contenders; memory is ten times the time."""
    timings = {name: measure.Timing([t, t, t]) for name, t in times.items()}
    rows = {
        name: record.Row("case", "forward", name, {}, t, 0.0, 3, None, 10 * t, None, None)
        for name, t in times.items()
    }
    return rows, timings


@pytest.mark.parametrize(
    ("target", "of", "measured", "met"),
    [
        (Target("time", ("a",), at_least=3), "a / graphattn", 3.0, True),
        (Target("time", ("a",), at_least=3.1), "a / graphattn", 3.0, False),
        (Target("time", ("a",), at_most=0.4), "graphattn / a", 1 / 3, True),
        (Target("memory", ("a",), at_most=0.3), "graphattn / a", 1 / 3, False),
        (Target("time", ("a", "b"), at_least=2), "b / graphattn", 2.0, True),
        (Target("memory", ("a", "gone", "b"), at_least=2), "b / graphattn", 2.0, True),
        (Target("time", at_most=1.5), "graphattn", 2.0, False),
        (Target("memory", at_most=20.0), "graphattn", 20.0, True),
        (Target("time", ("a",), at_most=1, of="b"), "b / a", 2 / 3, True),
        (Target("time", ("gone",), at_most=1), "graphattn / gone", None, None),
        (Target("error", at_most=1e-9), "graphattn", None, None),
    ],
)
def test_a_target_is_judged_by_what_it_says(target, of, measured, met):
    """graphattn takes 2, a takes 6 and b, the fastest other, takes 4."""
    verdict = target.judge("case", *rows_of(graphattn=2.0, a=6.0, b=4.0))
    assert (verdict.of, verdict.met) == (of, met)
    assert verdict.measured == (None if measured is None else pytest.approx(measured))


def test_a_ratio_is_the_median_of_the_rounds():
    """A ratio of two contenders is the median of the ratios of single rounds.

    Both sides of a ratio are slow while the machine is busy: medians of times would give 2.8.
    """
    top, bottom = measure.Timing([2.0, 30.0, 6.0, 8.0]), measure.Timing([1.0, 15.0, 3.0, 2.0])
    median, spread = measure.ratio_of_rounds(top, bottom)
    assert median == 2.0
    assert spread == pytest.approx((3.5 - 2.0) / 2 / 2.0)


def test_every_row_of_the_page_of_targets_has_one():
    scaling = ("scaling-window", "scaling-consensus")
    without = {*scaling, "crossover", "generation", *LANGUAGE, *MIXERS, *WHOLE}
    assert {case.name for case in cases.CASES if case.targets} == set(CASES) - without
    for case in cases.CASES:
        for target in case.targets:
            assert target.device in case.devices
            entries = case.entries("paper", target.device)
            assert {target.of, *target.over} <= set(entries), case.name
            assert (target.at_most is None) != (target.at_least is None)


def test_targets_of_another_device_are_not_judged(monkeypatch, tmp_path):
    case = CASES["gka"]
    on_cpu = Target("time", ("masked dense",), at_most=1e9)
    on_gpu = replace(on_cpu, device="cuda")
    monkeypatch.setattr(bench, "CASES", [replace(case, targets=(on_cpu, on_gpu))])
    results, _ = measured(tmp_path, "gka")
    assert [verdict.met for verdict in results.targets] == [True]


def test_the_targets_of_a_gpu_are_those_of_the_design():
    """(case, quantity, rivals, bound) of the rows of its table, and of a token of a stream."""
    targets = {
        (case.name, target.quantity, " or ".join(target.over), target.at_least or target.at_most)
        for case in cases.CASES
        for target in targets_on(case, "cuda")
    }
    flash, cudnn = "SDPA flash (dot product)", "SDPA cuDNN (dot product)"
    deit = "DeiT (SDPA flash) or DeiT (SDPA cuDNN)"
    eager = "index_add or torch-scatter"
    by_edges = "gather/scatter"
    assert targets == {
        ("gka", "time", f"{flash} or {cudnn}", 1.0),
        *((name, "share of bound", "", 0.6) for name in ("gka", "causal-window", "window")),
        *(
            (name, "time", f"FlexAttention{score}", times)
            for name, times in (("causal-window", 1.3), ("window", 2.5))
            for score in ("", " (dot product)")
        ),
        ("causal-window", "time", "flash-attention (dot product)", 0.9),
        *(("knn-graph", "time", rivals, n) for rivals, n in ((eager, 10), ("compiled", 4))),
        *(("knn-graph", "memory", rivals, 1 / 10) for rivals in (eager, "compiled")),
        *((case, "memory", by_edges, 1 / 10) for case in ("consensus", "consensus-layer")),
        ("consensus", "time", by_edges, 5),
        ("krause", "time", "masked dense", 5),
        ("krause", "time", "FlexAttention, chosen before", 1.5),
        *((case, "time", rival, n) for case in ("streaming", "streaming-krause")
          for rival, n in (("early in a stream", 1.1), ("its projections alone", 2))),
        ("knn", "time", "cdist + topk", 1.5),
        ("knn", "memory", "", 2.0**26),  # 65,536 tokens, 16 indices and distances of each
        *((name, "time", deit, 1.15) for name in MODELS),
        *((name, "memory", deit, 0.9) for name in MODELS),
    }  # fmt: skip
    assert all(
        {target.passes for target in targets_on(case, "cuda")} == {FORWARD, BOTH}
        for case in cases.CASES
        if case.backward and targets_on(case, "cuda")
    )


def test_a_gpu_has_sizes_of_its_own_or_those_of_a_cpu():
    gka, window = (next(c for c in cases.CASES if c.name == name) for name in ("gka", "window"))
    assert gka.size("paper", "cuda") == {"batch": 16, "tokens": 4096, "heads": 16, "features": 64}
    assert gka.size("paper", "cuda") != gka.size("paper", "cpu")
    assert window.size("paper", "cuda") == window.size("paper", "cpu")


def test_a_share_of_the_bound_is_judged_and_shown_in_percent():
    rows, timings = rows_of(graphattn=2.0)
    rows["graphattn"] = replace(rows["graphattn"], share_of_bound=0.62)
    verdict = Target("share of bound", at_least=0.6).judge("case", rows, timings)
    assert (verdict.measured, verdict.met) == (0.62, True)
    assert tables.target_text(verdict) == "share of bound: graphattn"
    assert tables.target_cells(verdict) == ["62%", "", "≥ 60%", "met"]


# Growth with the number of tokens.


def test_scaling_stands_for_the_cases_of_many_lengths_and_fits_their_slopes(tmp_path):
    results, output = measured(tmp_path, "scaling")
    assert {row.case for row in results.rows} == {"scaling-window", "scaling-consensus"}
    lengths = [row.size["tokens"] for row in results.rows if row.passes == "forward"]
    assert lengths == [16, 32, 64] * 2
    assert {slope.quantity for slope in results.slopes} == {"time", "memory"}
    flat = [slope.exponent for slope in results.slopes if slope.quantity == "memory"]
    assert flat == pytest.approx([0.0] * 4, abs=1e-9)  # the peak is 1 MiB at every length here
    assert re.search(r"forward: time ~ tokens\^-?\d", output)


def test_a_slope_is_the_exponent():
    (row,) = rows_of(graphattn=1.0)[0].values()
    rows = [
        replace(row, size={"tokens": n}, median=3e-6 * n**1.5, peak=n) for n in (1000, 2000, 8000)
    ]
    assert runner.slopes(rows[:2]) == []
    exponents = {slope.quantity: slope.exponent for slope in runner.slopes(rows)}
    assert exponents == {"time": pytest.approx(1.5), "memory": pytest.approx(1.0)}


# A run that does not go well.


class StoppedError(KeyboardInterrupt):
    """Control-C, not taken by pytest for its own."""


@pytest.fixture
def measured_cases(monkeypatch) -> list[str]:
    """Names of the cases that were begun; "gka" breaks, and "edges" is stopped the first time."""
    begun: list[str] = []
    measure_case = runner.Runner.measure

    def measure(self, case):
        begun.append(case.name)
        if case.name == "gka":
            raise ZeroDivisionError("nobody thought of this")
        if case.name == "edges" and begun.count("edges") == 1:
            raise StoppedError
        return measure_case(self, case)

    monkeypatch.setattr(runner.Runner, "measure", measure)
    return begun


def test_a_case_that_breaks_is_noted_and_the_next_one_runs(measured_cases, tmp_path):
    results, _ = measured(tmp_path, "gka", "knn")
    assert "gka: nobody thought of this" in results.missing
    assert {row.case for row in results.rows} == {"knn"}


def test_an_interrupted_run_is_written_and_goes_on_with_its_file(measured_cases, tmp_path):
    first, output = measured(tmp_path, "knn", "edges", "million")
    assert measured_cases == ["knn", "edges"]
    assert first.measured == ["knn"]
    assert {row.case for row in first.rows} == {"knn"}
    assert "edges and all later cases: interrupted" in first.missing
    assert "Targets" in output
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]
    results, _ = measured(tmp_path, "knn", "edges", "--resume")
    assert measured_cases == ["knn", "edges", "edges"]
    assert results.measured == ["knn", "edges"]
    assert results.rows[: len(first.rows)] == first.rows
    assert {row.case for row in results.rows} == {"knn", "edges"}
    assert not [line for line in results.missing if "interrupted" in line]


@pytest.mark.long
def test_a_contender_that_breaks_while_it_is_warmed_up_is_noted(monkeypatch):
    make_clock = runner.clock

    def breaks(run, x, **options):
        if run is contenders.index_add and options["backward"]:
            raise MemoryError("no more")
        return make_clock(run, x, **options)

    monkeypatch.setattr(runner, "clock", breaks)
    result = run("window")
    output = result.stdout
    for doing in ("checking", "forward: compiling and weighing"):
        assert re.search(rf"^window(:|,) {doing} graphattn$", result.stderr, re.MULTILINE)
    assert "window, forward: timing\n" in result.stderr
    assert "missing: window, index_add, forward + backward: no more" in output
    forward, both = output.split("missing:")[0].split("forward + backward", maxsplit=1)
    assert "index_add" in forward
    assert "index_add" not in both
    assert "graphattn" in both


def test_a_run_of_another_machine_or_size_is_not_continued(tmp_path):
    path = tmp_path / "rows.json"
    now = record.provenance(torch.device("cpu"), "small")
    record.Record(now | {"size": "paper"}).write(path)
    with pytest.raises(ValueError, match=r"rows\.json cannot be continued: its size is paper"):
        record.resumed(path, now)
    assert record.resumed(tmp_path / "new.json", now).rows == []


# The figure.


@pytest.mark.long
def test_a_run_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
    result = run("knn", "scaling", "--plot", tmp_path / "run.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert result.output.splitlines()[-1] == str(tmp_path / "run.png")


# The measurements themselves.


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_truth_of_a_few_rows_is_that_of_all(name):
    """A graph of the edges at the sampled rows gives their outputs and gradients exactly."""
    x = inputs_of(name)
    truth = gate.OperationTruth(x, backward=True)
    learned = [t.detach()[truth.last].double().requires_grad_() for t in x.learned()]
    out = gate.in_float64(x.like(learned, x.graph))[..., truth.rows, :, :]
    torch.testing.assert_close(truth.out, out, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((out * truth.loss).sum(), learned)
    torch.testing.assert_close(truth.gradients, list(gradients), rtol=0, atol=1e-10)


def test_the_edges_of_a_huge_graph_are_listed_for_the_sampled_rows_only(monkeypatch):
    x = replace(inputs_of("causal-window"), graph=ga.causal_window_graph(40, 8))
    expected = gate.OperationTruth(x, backward=False)
    listed = expected.edges_at_rows()
    monkeypatch.setattr(ga.TokenGraph, "num_edges", 10**8)
    graph = expected.edges_at_rows()
    monkeypatch.undo()
    assert graph == listed


def test_a_backward_pass_reaches_all_that_was_read_and_nothing_else():
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    leaves = measure.leaves((a * b).sum() + a.sum())
    assert {id(leaf) for leaf in leaves} == {id(a), id(b)}
    assert id(c) not in {id(leaf) for leaf in leaves}


def test_the_median_and_the_quartiles():
    timing = measure.Timing([1.0, 2.0, 3.0, 4.0, 5.0])
    assert timing.median == 3.0
    assert timing.spread == pytest.approx(0.5)


def test_the_bound_is_the_larger_of_products_and_copies():
    machine = measure.Machine(flops=10.0, bytes=4.0)
    assert machine.seconds((100.0, 4.0)) == 10.0
    assert machine.seconds((10.0, 40.0)) == 10.0


@pytest.mark.long
def test_peak_memory_is_that_of_the_pass_alone(monkeypatch):
    """Masked dense holds [8, N, N] logits; SDPA its output and little more."""
    monkeypatch.undo()
    big = {**CASES["complete"].sizes["small"], "tokens": 1500}
    peak = memory.Peak()
    masked = peak.of("complete", "masked dense", big, backward=False)
    fused = peak.of("complete", "SDPA flash (dot product)", big, backward=False)
    assert masked is not None
    assert fused is not None
    output, logits = 1500 * 8 * 64 * 4, 8 * 1500**2 * 4
    assert 0.9 * output <= fused < 10 * output
    assert 2 * logits <= masked < 5 * logits


# Fused attention of others.


def test_peers_that_need_a_gpu_or_a_package_say_so():
    x = inputs_of("causal-window")
    for peer, reason in (
        (fused_attention.sdpa(SDPBackend.CUDNN_ATTENTION), "cuDNN needs a GPU"),
        (fused_attention.flash_window, "flash_attn is not installed"),
    ):
        with pytest.raises(MISSING, match=reason):
            peer(x)


@pytest.mark.parametrize("name", ["gka", "causal-window", "window"])
def test_flash_attention_is_asked_for_the_window_of_the_graph(name, monkeypatch):
    """A stand-in with the signature and layout of flash_attn, by a mask written down here."""

    def flash_attn_func(q, k, v, *, window_size):
        assert q.dim() == 4
        left, right = (10**6 if n < 0 else n for n in window_size)
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        mask = (j >= i - left) & (j <= i + right)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2)

    module = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(fused_attention, "installed", lambda _: module)
    assert error_of(fused_attention.flash_window, inputs_of(name), is_dot=True) < 1e-5


def test_a_dot_product_is_judged_by_the_dot_product():
    x, case = inputs_of("window"), CASES["window"]
    assert error_of(case.dot_products["graphattn (dot product)"], x, is_dot=True) < 1e-5
    assert error_of(case.contenders["graphattn"], x, is_dot=True) > 1e-2


def test_a_batch_is_judged_by_its_last_sequence_too():
    x = inputs_of("gka")
    assert len(x.learned()) == 1
    assert x.query is x.key is x.value
    truth = gate.truth_of(x, backward=True)
    right = CASES["gka"].contenders["graphattn"]

    def first_sequence_everywhere(x):
        return right(x)[:1].expand_as(x.query)

    assert max(truth.errors_of(right)) < 1e-5
    assert truth.errors_of(first_sequence_everywhere)[0] > 0.1


# Whole models.


@pytest.mark.parametrize(
    ("dim", "heads", "dot", "gka"),
    [(192, 3, 5.72, 4.38), (384, 6, 22.05, 16.73), (768, 12, 86.57, 65.31)],
    ids=MODELS,
)
def test_the_models_have_as_many_parameters_as_the_papers_say(dim, heads, dot, gka):
    """Models have as many million parameters as Projection-Free Transformers prints, rounded."""
    with torch.device("meta"):
        models = [vision.vision_model(mixer, dim, heads, 12) for mixer in ("dot", "gka")]
    counts = [sum(p.numel() for p in model.parameters()) for model in models]
    assert [round(count / 1e6, 2) for count in counts] == [dot, gka]


def test_the_fused_mixer_is_multi_head_attention():
    """torch's own, with the same weights."""
    torch.manual_seed(0)
    mixer, x = vision.FusedAttention(24, heads=3), torch.randn(2, 10, 24)
    theirs = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    theirs.in_proj_weight, theirs.in_proj_bias = mixer.qkv.weight, mixer.qkv.bias
    theirs.out_proj = mixer.output_proj
    torch.testing.assert_close(mixer(x), theirs(x, x, x, need_weights=False)[0])


def test_a_step_of_training_is_that_of_adamw_and_leaves_no_gradients():
    x = inputs_of("gka-tiny")
    run = vision.VisionRun("gka")
    model = x.trained["gka"].model
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=training.LEARNING_RATE)
    torch.nn.functional.cross_entropy(twin(x.images), x.labels).backward()
    optimizer.step()
    weights = sum(4.0 * p.numel() for p in model.parameters())
    assert run.held(x) == weights
    measure.one_pass(run, x, backward=True)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is None
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)
    assert run.held(x) == pytest.approx(3 * weights, rel=1e-2)  # and two moments per weight


def test_a_model_with_a_wrong_mixer_is_wrong(monkeypatch):
    x = inputs_of("gka-tiny")
    truth = gate.truth_of(x, backward=True)
    right = torch.nn.functional.scaled_dot_product_attention
    run = vision.VisionRun("dot")
    assert max(truth.errors_of(run)) < 1e-5

    def wrong_in_float32(q, k, v):
        return right(q, k, v) * (1.05 if q.dtype == torch.float32 else 1)

    monkeypatch.setattr(
        vision, "functional", types.SimpleNamespace(
            scaled_dot_product_attention=wrong_in_float32,
            cross_entropy=torch.nn.functional.cross_entropy,
        ),
    )  # fmt: skip
    assert min(truth.errors_of(run)) > 1e-4


def test_images_per_second_stand_under_the_table_of_a_model():
    output = run("gka-tiny").output
    assert re.search(r"forward, images/s: graphattn [\d,]+, DeiT \(SDPA flash\) [\d,]+", output)
    assert re.search(r"forward \+ backward, images/s: graphattn [\d,]+", output)


def test_models_stand_for_all_of_them():
    assert [case.name for case in bench.chosen(["models"])] == MODELS


# Work.


def test_the_bound_counts_bytes_of_the_dtype_and_every_sequence_of_a_batch():
    size = {"batch": 3, "tokens": 100, "heads": 2, "features": 8}
    count = work.attention(lambda size: size["tokens"] ** 2)
    numbers = 3 * 100 * 2 * 8
    assert count(size, 2, False) == (4 * 100 * numbers, 4 * 2 * numbers)
    assert count(size, 4, False)[1] == 2 * count(size, 2, False)[1]
    one_tensor = work.attention(lambda size: size["tokens"] ** 2, tensors=2)
    assert one_tensor(size, 2, False)[1] == 2 * 2 * numbers
    # Seven products in place of two; q, k, v, o, do read and dq, dk, dv written besides.
    assert count(size, 2, True) == (14 * 100 * numbers, (4 + 5 + 3) * 2 * numbers)


# A GPU's clock, on a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_waits_for_the_gpu_is_launched_one_by_one_and_still_timed():
    x = torch.ones(1000, device="cuda")
    replayed = gpu_clock.GpuClock(lambda: x + 1)
    launched = gpu_clock.GpuClock(lambda: float(x.sum()))
    assert replayed.is_captured
    assert not launched.is_captured
    assert 0 < replayed.sample() < 1e-3
    assert 0 < launched.sample() < 1e-1
    assert gpu_clock.GpuClock(lambda: x + 1).is_captured  # also after a capture that failed


# Texts.


def test_written_texts_are_right_where_every_token_is_the_likeliest():
    x = inputs_of("generation")
    truth = gate.truth_of(x, backward=False)
    runs = CASES["generation"].runs()
    texts = {name: run(x) for name, run in runs.items()}
    assert all(truth.errors_of(run)[0] < 1e-4 for run in runs.values())
    assert torch.equal(texts["graphattn"], texts["SDPA with a cache"])

    def changed(place):
        def run(x):
            text = texts["graphattn"].clone()
            text[0, place] = (text[0, place] + 1) % 1000
            return text

        run.name = "dot"
        return run

    assert truth.errors_of(changed(7))[0] > 0.1
    assert math.isnan(truth.errors_of(changed(2))[0])  # of a prompt


@pytest.mark.long
def test_tables_say_how_many_tokens_are_written_in_a_second():
    result = run("generation", "--size", "small")
    assert result.exit_code == 0
    output = " ".join(result.output.split())
    assert re.search(r"tokens/s, the prompts' reading included: graphattn [\d,]+, SDPA", output)
