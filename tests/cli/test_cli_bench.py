"""`graphattn bench` times what is right, and says what it did not time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import graphattn as ga
from graphattn.cli import bench
from graphattn.cli.app import app
from graphattn.cli.bench import cases, contenders, gate, measure, record

TINY = {
    "complete": {"tokens": 24},
    "causal-window": {"tokens": 40, "window": 8},
    "window": {"tokens": 40, "window": 5},
    "krause": {"tokens": 40, "window": 8, "top_k": 3},
    "consensus": {"tokens": 20, "dim": 24, "edge_hidden": 8},
    "knn": {"tokens": 60, "k": 4},
}
CPU = torch.device("cpu")


def tiny(case: cases.Case) -> cases.Case:
    size = {**case.sizes["small"], **TINY[case.name]}
    slow = {"compiled"}  # a minute of compiling
    few = {name: run for name, run in case.contenders.items() if name not in slow}
    return replace(case, sizes={"small": size}, contenders=few)


CASES = {case.name: tiny(case) for case in cases.CASES}


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(bench, "CASES", list(CASES.values()))
    monkeypatch.setitem(bench.SECONDS, "small", 0.0)
    monkeypatch.setattr(bench, "measure_machine", lambda *_: measure.Machine(1e11, 1e10))
    monkeypatch.setattr(measure.Peak, "of", lambda *_, **__: 2.0**20)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def inputs_of(name: str):
    case = CASES[name]
    return case.make(case.sizes["small"], CPU, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_every_contender_of_a_case_is_right(name):
    """Those that are installed; KeOps and others may be missing."""
    case = CASES[name]
    truth = gate.Truth(inputs_of(name), backward=case.backward)
    checked = 0
    for contender in case.contenders.values():
        try:
            error = max(truth.error_of(contender))
        except contenders.MissingError:
            continue
        assert error < 1e-5
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_every_number(name, tmp_path):
    result = run(name, "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.output
    facts, rows = record.read(tmp_path / "rows.json")
    assert {"device", "hardware", "commit", "torch", "date"} <= set(facts)
    passes = {row.passes for row in rows}
    assert passes == ({"forward", "forward + backward"} if CASES[name].backward else {"forward"})
    for row in rows:
        assert row.case == name
        assert row.median > 0
        assert row.rounds >= 3
        assert row.peak == 2.0**20
        assert row.size == CASES[name].sizes["small"]
        assert (row.error is None) == (row.contender in CASES[name].yardsticks)
    ours = {row.passes: row.median for row in rows if row.contender == cases.OURS}
    for row in rows:
        assert row.ratio == pytest.approx(row.median / ours[row.passes])
    assert result.output.splitlines()[-1] == str(tmp_path / "rows.json")


def break_ours(monkeypatch, how):
    case = CASES["window"]
    broken = {**case.contenders, "index_add": how}
    monkeypatch.setattr(bench, "CASES", [replace(case, contenders=broken)])


@pytest.mark.parametrize(
    "how",
    [
        lambda x: contenders.index_add(x) * 1.001,
        lambda x: contenders.index_add(replace(x, sigma=x.sigma * 1.01)),
        lambda x: contenders.index_add(x).detach() + 0 * x.query + 0 * x.key + 0 * x.value,
    ],
    ids=["value", "sigma", "gradient"],
)
def test_no_time_for_a_wrong_result(monkeypatch, how):
    break_ours(monkeypatch, how)
    result = run("window")
    assert result.exit_code == 0, result.output
    assert re.search(r"window, index_add: no time for a wrong result \(error \d", result.output)
    rows = result.output.split("missing:")[0].split("forward + backward")[1]
    assert "index_add" not in rows


def test_neighbours_with_right_distances_and_wrong_indices_are_wrong():
    truth = gate.Truth(inputs_of("knn"), backward=False)

    def shifted(x):
        distances, indices = contenders.cdist_topk(x)
        return distances, (indices + 1) % len(x.points)

    assert max(truth.error_of(contenders.cdist_topk)) < 1e-5
    assert max(truth.error_of(shifted)) > 0.1


def test_zero_is_no_right_answer_and_a_true_zero_hides_no_error():
    truth = gate.Truth(inputs_of("window"), backward=True)
    nothing = max(truth.error_of(lambda x: 0 * contenders.index_add(x)))
    assert nothing == pytest.approx(1.0)
    assert gate.relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2).double()) == 5.0


def test_what_fails_and_what_is_not_installed_is_listed(monkeypatch):
    def fails(_):
        raise RuntimeError("out of everything\nand more")

    break_ours(monkeypatch, fails)
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    output = run("window").output
    assert "missing: window, index_add: out of everything" in output
    assert "missing: window, torch-scatter: torch_scatter is not installed" in output


def test_what_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(contenders, "free_memory", lambda: 1e4)
    output = run("complete").output
    assert "missing: complete, graphattn: its messages would need about 0 GB" in output
    assert "missing: complete, masked dense: all pairs would need" in output
    assert "SDPA (dot product)" in output
    assert "0.00x" not in output  # a ratio to what was not timed is none


def test_an_older_record_stands_beside_the_new_numbers(tmp_path):
    file = tmp_path / "old.json"
    assert run("knn", "--json", file).exit_code == 0
    rows = json.loads(file.read_text())
    for row in rows["rows"]:
        row["ratio"] = 77.0
    file.write_text(json.dumps(rows))
    output = run("knn", "--compare", file).output
    table = output.split("Ratios, compared with")[1]
    assert table.count("77.00x") == len(rows["rows"])
    assert "1.00x" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["soft"], "case must be one of complete, causal-window"),
        (["--size", "huge"], "size must be one of 'small'"),
        (["--device", "tpu"], "device must be one of 'cpu', 'cuda'"),
        (["--json", "no/such/folder/rows.json"], "no folder no/such/folder"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert says in result.stderr


def test_a_file_that_is_no_record_is_refused(tmp_path):
    for content in ("not json", "{}", '{"provenance": {}, "rows": [{"case": 1}]}'):
        (tmp_path / "old.json").write_text(content)
        result = run("knn", "--compare", tmp_path / "old.json")
        assert result.exit_code == 2
        assert "is no record of `graphattn bench`" in result.stderr


# The measurements themselves.


def test_the_truth_of_a_few_rows_is_that_of_all():
    """A graph of the edges at the sampled rows gives their outputs and gradients exactly."""
    for name in ("causal-window", "krause", "consensus"):
        inputs = inputs_of(name)
        truth = gate.Truth(inputs, backward=True)
        learned = [t.detach().double().requires_grad_() for t in inputs.learned()]
        whole = cases.consensus if name == "consensus" else cases.rbf_reference
        out = whole(inputs.like(learned, inputs.graph))[..., truth.rows, :, :]
        torch.testing.assert_close(truth.out, out, rtol=0, atol=1e-12)
        gradients = torch.autograd.grad((out * truth.loss).sum(), learned)
        for mine, all_rows in zip(truth.gradients, gradients, strict=True):
            torch.testing.assert_close(mine, all_rows, rtol=0, atol=1e-10)


def test_the_edges_of_a_huge_graph_are_listed_for_the_sampled_rows_only(monkeypatch):
    inputs = replace(inputs_of("causal-window"), graph=ga.causal_window_graph(40, 8))
    expected = gate.Truth(inputs, backward=False)
    monkeypatch.setattr(ga.TokenGraph, "num_edges", 10**8)
    graph = gate.Truth._edges_at_rows(expected, inputs)
    monkeypatch.undo()
    assert graph == expected._edges_at_rows(inputs)


def test_contenders_take_turns():
    order: list[str] = []

    def contender(name):
        return lambda x: order.append(name) or x.query

    runs = {"a": contender("a"), "b": contender("b")}
    timings = measure.time_interleaved(
        runs, inputs_of("window"), backward=False, seconds=0.0, device=CPU
    )
    assert order == ["a", "b"] * 4  # one round to warm up
    assert {timing.rounds for timing in timings.values()} == {3}


def test_the_median_and_the_quartiles():
    timing = measure._timing([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.median, timing.rounds) == (3.0, 5)
    assert timing.spread == pytest.approx(0.5)


def test_the_bound_is_the_larger_of_products_and_copies():
    machine = measure.Machine(flops=10.0, bytes=4.0)
    assert machine.seconds((100.0, 4.0)) == 10.0
    assert machine.seconds((10.0, 40.0)) == 10.0


def test_peak_memory_is_that_of_the_pass_alone(monkeypatch):
    monkeypatch.undo()
    big = {**CASES["complete"].sizes["small"], "tokens": 400}
    peak = measure.Peak()
    reference = peak.of("complete", cases.OURS, big, backward=False)
    dense = peak.of("complete", "SDPA (dot product)", big, backward=False)
    assert reference is not None
    assert dense is not None
    output = 400 * 8 * 64 * 4
    assert output <= dense < 100 * output
