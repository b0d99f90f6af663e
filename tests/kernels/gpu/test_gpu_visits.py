"""Visits: what is planned for one, what it records, and how it compares with earlier ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from gpu import candidates, plan, report, times, tune, visits
from gpu.__main__ import main
from gpu.session import Machine
from graphattn.bench.reporting import record
from graphattn.kernels.check.measured import read_measured

FACTS = {"hardware": "NVIDIA H200, CUDA 13.0", "driver": "1", "torch": "2", "triton": "3",
         "date": "2027-01-02", "commit": "abc"}  # fmt: skip
FIRST = visits.FOLDER / "2026-11-26-h200.json"


def written(
    folder: Path, launches: list[tuple[str, float]], facts: dict = FACTS, **others: object
) -> visits.Visit:
    path = folder / visits.name_of(facts, folder)
    others = {"benchmark": asdict(record.Record(facts)), **others}
    path.write_text(visits.as_text(facts, launches, others), encoding="utf-8")
    return visits.read(path)


def test_the_first_visit_is_read_by_all_who_read_its_parts() -> None:
    visit = visits.read(FIRST)
    launches = read_measured(FIRST).launches
    rows = record.read(FIRST).rows
    assert len(visit.times) == len(launches) + len(rows)
    of_window = {
        row.contender: row.median
        for row in rows
        if (row.case, row.passes) == ("causal-window", "forward")
    }
    begin = "causal-window, forward, FlexAttention (dot product) ("
    (named,) = (name for name in visit.times if name.startswith(begin))
    assert visit.times[named] == of_window["FlexAttention (dot product)"]
    assert visit.times["causal window 256, RBF, bf16: band forward"] == launches[11][1]
    assert len(visit.cases) == 5


def test_no_visit_overwrites_another(tmp_path) -> None:
    assert written(tmp_path, []).name == "2027-01-02-h200"
    assert written(tmp_path, []).name == "2027-01-02-h200_2"
    assert written(tmp_path, []).name == "2027-01-02-h200_3"


def test_what_is_slower_than_at_the_last_visit_is_named(tmp_path) -> None:
    older = written(tmp_path, [("a", 1e-6), ("a", 7e-6), ("b", 2e-6)])
    newer = written(tmp_path, [("a", 2e-6), ("c", 1e-6)], seconds={"parity": {"x": 3.0}})
    written(tmp_path, [("a", 1.0)], FACTS | {"hardware": "NVIDIA A100, CUDA 13.0"})
    assert visits.earlier("NVIDIA H200", tmp_path) == [newer, older]
    assert newer.seconds == {"parity": {"x": 3.0}}
    now = visits.times_of([("a", 2.1e-6), ("a", 9e-6), ("b", 2e-6), ("new", 1.0)], [])
    found = {change.name: change for change in visits.changes(now, [newer, older])}
    assert list(found) == ["a", "a (2)", "b"]
    assert found["a"].earlier == [2e-6, 1e-6]
    assert found["a"].ratio == pytest.approx(1.05)
    text = "\n".join(visits.lines(now, [newer, older]))
    assert [line for line in text.splitlines() if "SLOWER" in line] == [
        "- SLOWER: a (2): 1.29 times as long"
    ]
    assert "No earlier visit" in "\n".join(visits.lines({"new": 1.0}, [newer, older]))


def test_what_is_missing_takes_less_than_25_minutes() -> None:
    planned = list(plan.jobs(visits.earlier()))
    assert {job.step for job in planned} == set(report.STEPS)
    of_benchmark = [job.job for job in planned if job.again and job.step == "benchmark"]
    assert of_benchmark == ["gka", "causal-window", "window", "consensus", "knn-graph"]
    missing = [job for job in planned if not job.again]
    divided = plan.commands(missing, 540)
    assert [job for command in divided for job in command if job.job != plan.COMPILED] == [
        job for job in missing if job.job != plan.COMPILED
    ]
    assert all(plan.total(command) <= 540 < plan.COMMAND for command in divided)
    everything = [job for command in divided for job in command]
    minutes = (plan.START + plan.total(everything) + plan.BETWEEN * (len(divided) - 1)) / 60
    assert 15 < minutes < 25


def test_what_no_visit_has_tuned_is_tuned_first() -> None:
    (first,) = visits.earlier()
    names = tune.jobs("full", [first])
    left = [name for name in names if name not in first.tuned]
    assert names[: len(left)] == left
    assert {"window_step, bf16, 64", "forward, fp32, 128"} <= set(left)
    assert "forward, bf16, 64, narrow" in first.tuned
    assert sorted(names) == sorted(tune.jobs("full", []))


def test_a_plan_takes_the_seconds_of_the_last_visit() -> None:
    known = visits.Visit("x", "NVIDIA H200", {}, [], [], {"benchmark": {"krause": 99.0}})
    by_job = {job.job: job for job in plan.jobs([known]) if job.step == "benchmark"}
    assert (by_job["krause"].seconds, by_job["krause"].measured) == (99.0, True)
    assert not by_job["gka"].measured


def test_a_plan_is_printed_without_a_gpu(capsys, tmp_path) -> None:
    assert main(["--plan", "--limit", "300", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("15 minutes are over in") == 1
    assert [said.count(f" s: {step}: ") > 0 for step in report.STEPS] == [True] * len(report.STEPS)
    assert list(tmp_path.iterdir()) == []


class Other:
    """A second kernel, as a setting of the environment would choose it."""

    def another_kernel(self) -> None: ...

    fn = another_kernel


def test_launches_that_take_another_kernel_are_paired(monkeypatch) -> None:
    real = times.cases()["bands 0"]

    def make(device: str) -> list:
        made = real("meta")
        if "GRAPHATTN_OTHER" not in candidates.os.environ:
            return made
        one = made[1]
        return [made[0], one._replace(launch=one.launch._replace(kernel=Other)), *made[2:]]

    monkeypatch.setattr(times, "cases", lambda: {"bands 0": make})
    monkeypatch.setattr(times, "seconds_of", lambda one: 1e-6 if one.kernel is Other else 3e-6)
    setting = candidates.Candidate("GRAPHATTN_OTHER", "1", ("bands",))
    monkeypatch.setattr(candidates, "CANDIDATES", {"other": setting})
    (row,) = candidates.work("other; times of bands 0", [], Machine("emulator"), "full")
    assert row == {"name": real("meta")[1].name, "kernel": "another_kernel", "plain": 3e-6,
                   "candidate": 1e-6}  # fmt: skip
    assert (
        list(candidates.work("other; times of bands 0", [row], Machine("emulator"), "full")) == []
    )
    assert "GRAPHATTN_OTHER" not in candidates.os.environ


def test_candidates_are_compared_under_their_setting(monkeypatch) -> None:
    asked = []

    def work(job: str, known: list, machine: Machine, size: str):
        asked.append((job, candidates.os.environ.get("GRAPHATTN_GLUON")))
        yield {"job": job, "kernels": ["new_kernel"], "errors": {}, "launches": 1, "findings": []}

    monkeypatch.setattr(candidates.parity, "work", work)
    monkeypatch.delenv("GRAPHATTN_GLUON", raising=False)
    names = candidates.jobs(Machine("emulator"), "tiny")
    assert names == ["gluon; bands: heads of 7, bf16"]
    (row,) = candidates.work(names[0], [], Machine("emulator"), "tiny")
    assert asked == [("bands: heads of 7, bf16", "1")]
    problem = "bands: heads of 7, bf16"
    usual = [{"job": problem, "kernels": ["old_kernel"]}, {"job": problem, "end": True}]
    assert candidates.is_new({**row, "job": names[0]}, usual)
    assert not candidates.is_new({**row, "job": names[0], "kernels": ["old_kernel"]}, usual)
    assert len(candidates.jobs(Machine("cuda"), "full")) > 20
