"""Steps on a GPU: they go on where they were cut off, and say what is wrong, left or missing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from problems import problems

from gpu import benchmark, jobs, parity, report, sanitizer, times, tune, visits
from gpu.__main__ import CANNOT, LEFT, WRONG, main
from gpu.session import Machine, Rows, Session, Started, facts, why_not_here
from graphattn.bench.reporting import record
from graphattn.kernels.check.measured import read_measured
from graphattn.kernels.shared import launch

EMULATOR = Machine("emulator")
RIGHT = {"family": "bands", "dtype": "bf16", "errors": {"out": [0.1, 1.0]},
         "kernels": ["band_forward_kernel"], "launches": 1, "findings": []}  # fmt: skip
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Imagined:
    """A worker that is right at once, and remembers what it was asked."""

    asked: list[str] = []  # noqa: RUF012
    row = RIGHT

    class process:  # noqa: N801
        @staticmethod
        def poll() -> None:
            return None

    def __init__(self, module: str, session: Session) -> None:
        self.session = session

    def rows_of(self, name: str, known: list, seconds: float, session: Session):
        self.asked.append(name)
        yield {"job": name, **self.row}
        yield {"job": name, "end": True}

    def stop(self) -> None:
        pass


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> type[Imagined]:
    Imagined.asked, Imagined.row = [], RIGHT
    monkeypatch.setattr(jobs, "Worker", Imagined)
    return Imagined


ROW = record.Row("window", "forward", "graphattn", {"tokens": 65536}, 3e-4, 0.1, 9,
                 ratio=1.0, peak=None, share_of_bound=None, error=1e-3)  # fmt: skip


def benchmark_rows(folder: Path) -> None:
    record.Record({"hardware": "NVIDIA H200"}, [ROW], measured=["window"]).write(
        folder / "benchmark.json"
    )


def session_in(folder: Path, **options: object) -> Session:
    return Session(folder, **{"machine": EMULATOR, "size": "tiny", "processes": 1, **options})


def emulated(out: Path, *options: str) -> int:
    return main(["--device", "emulator", "--out", str(out), "--processes", "1", *options])


def test_a_step_that_was_cut_off_goes_on_with_what_is_left(imagined, tmp_path) -> None:
    first, second, *others = parity.TINY
    rows = Rows(tmp_path / "parity.jsonl")
    rows.add({"job": first, **RIGHT})
    rows.add({"job": first, "end": True})
    rows.add({"job": second, **RIGHT})
    with rows.path.open("a") as file:
        file.write('{"job": "cut in the mid')
    session = session_in(tmp_path)
    assert str(parity.progress(session)) == "partly: 1 of 5"
    parity.run(session)
    assert imagined.asked == [second, *others]
    assert str(parity.progress(session)) == "done: 5 of 5"
    parity.run(session)
    assert len(imagined.asked) == 4


def test_no_job_begins_when_the_time_is_over(imagined, tmp_path) -> None:
    parity.run(session_in(tmp_path, deadline=time.monotonic() + jobs.GRACE - 1))
    assert imagined.asked == []
    assert emulated(tmp_path / "out", "--step", "parity", "--limit", "1") == LEFT
    assert emulated(tmp_path / "out", "--step", "parity") == 0


def test_what_is_wrong_is_counted_and_named(imagined, tmp_path) -> None:
    imagined.row = RIGHT | {"errors": {"out": [float("nan"), 1.0]}}
    assert emulated(tmp_path, "--step", "parity") == WRONG
    text = (tmp_path / "report.md").read_text()
    assert "done: 5 of 5, 5 WRONG" in text
    assert f"WRONG: {parity.TINY[0]}" in text
    assert "agree with float64 on the emulator: none." in text


def test_failed_jobs_run_again_only_when_asked_to(imagined, tmp_path) -> None:
    rows = Rows(tmp_path / "parity.jsonl")
    for name in parity.TINY:
        rows.add({"job": name, **RIGHT})
        rows.add({"job": name, "end": True, **({"error": "x"} if "rotated" in name else {})})
    assert emulated(tmp_path, "--step", "parity") == WRONG
    assert imagined.asked == []
    assert emulated(tmp_path, "--step", "parity", "--retry") == 0
    assert imagined.asked == ["consensus: rotated, bf16"]


WORK = """
import os

def work(name, known, machine, size):
    print("this is no row")
    yield {"known": len(known), "number": 1}
    if name == "raises":
        raise ValueError("no such tile")
    if name == "dies":
        os._exit(3)
    if name == "hangs":
        import time
        time.sleep(600)
"""


def test_one_job_that_dies_takes_no_other_with_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "imagined_step.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    session = session_in(tmp_path)
    session.rows("imagined_step").add({"job": "good", "number": 0})
    names = ("raises", "dies", "good")
    jobs.run_jobs("imagined_step", names, session, processes=1, seconds=100)
    ended = session.rows("imagined_step").ended()
    assert ended["raises"]["error"] == "ValueError: no such tile"
    assert ended["dies"]["error"] == "its process ended with code 3"
    assert "error" not in ended["good"]
    rows = [row for row in session.rows("imagined_step").all() if row.get("number") == 1]
    assert [row["known"] for row in rows] == [0, 0, 1]


@pytest.mark.long
def test_a_job_that_hangs_is_stopped_and_one_that_the_end_cuts_off_is_left(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "imagined_step.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    session = session_in(tmp_path, deadline=time.monotonic() + 20)
    jobs.run_jobs("imagined_step", ["hangs"], session, processes=1, seconds=100)
    assert session.rows("imagined_step").ended() == {}
    jobs.run_jobs("imagined_step", ["hangs"], session_in(tmp_path), processes=1, seconds=10)
    assert "no end within 10 s" in session.rows("imagined_step").ended()["hangs"]["error"]


@NO_GPU
def test_without_a_gpu_the_error_names_the_rehearsal(tmp_path, capsys) -> None:
    assert main(["--out", str(tmp_path)]) == CANNOT
    message = capsys.readouterr().err
    assert "no CUDA device" in message
    assert "DEVICE=emulator" in message
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_machine_are_not_continued(tmp_path, capsys, imagined) -> None:
    assert emulated(tmp_path, "--step", "parity") == 0
    stored = json.loads((tmp_path / "session.json").read_text())
    (tmp_path / "session.json").write_text(json.dumps(stored | {"sources": "others"}))
    assert emulated(tmp_path, "--step", "parity") == CANNOT
    assert "sources others" in capsys.readouterr().err
    assert why_not_here(tmp_path / "new", facts(EMULATOR, "tiny")) is None


def test_a_tool_that_is_not_there_is_never_said_to_have_found_nothing(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sanitizer, "tool", lambda: None)
    session = session_in(tmp_path, machine=Machine("cuda"))
    sanitizer.run(session)
    progress = sanitizer.progress(session)
    assert str(progress) == "skipped: compute-sanitizer is not there"
    assert not progress.is_left
    text = "\n".join(report.sanitizer_lines(session))
    assert "Nothing here has been checked" in text
    assert "clean" not in text


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors"
TWO = "========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors"
RACES = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("printed", "code", "count"),
    [(CLEAN, 0, 0), (TWO, 86, 2), (RACES, 86, 1), (RACES, 0, 1), ("killed", 0, None),
     (CLEAN, 1, None)],
)  # fmt: skip
def test_a_verdict_is_read_from_what_the_tool_says(tmp_path, printed, code, count) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n")
    fake.chmod(0o755)
    if count is None:
        with pytest.raises(RuntimeError, match="no verdict"):
            sanitizer.checked([str(fake), "--tool", "memcheck"], "any")
    else:
        assert sanitizer.checked([str(fake), "--tool", "memcheck"], "any")["found"] == count


def test_problems_of_the_sanitizer_and_of_rehearsals_exist() -> None:
    names = {problem.name for problem in problems()}
    assert {*sanitizer.PROBLEMS, *sanitizer.TINY, *parity.TINY} <= names
    families = {name.partition(":")[0] for name in names}
    for some in (sanitizer.PROBLEMS, parity.TINY):
        assert {name.partition(":")[0] for name in some} == families


def test_cases_that_no_visit_has_measured_come_first() -> None:
    known = visits.Visit("2026-01-01-h200", "NVIDIA H200", {}, ["gka", "krause"], [], {})
    names = [case.name for case in benchmark.cases("full", Machine("cuda"), [known])]
    on_gpu = {case.name for case in benchmark.CASES if "cuda" in case.devices}
    assert set(names) == on_gpu
    assert len(names) == len(on_gpu)
    whole = [case.name for case in benchmark.WHOLE]
    assert names[-8:] == [*whole, "gka", "krause"]
    first = [name for name in benchmark.FIRST if name not in known.cases]
    assert names[: len(first)] == first


class Recording(Machine):
    """A machine that runs nothing."""

    def launching(self):
        return recorded()


class recorded:  # noqa: N801
    def __enter__(self) -> list[Started]:
        self.started: list[Started] = []
        self.block = launch.redirected(lambda one: self.started.append(Started(one)))
        self.block.__enter__()
        return self.started

    def __exit__(self, *error: object) -> None:
        self.block.__exit__(*error)


@pytest.mark.every_case
@pytest.mark.parametrize("job", [job for job in tune.jobs("full") if "128" not in job])
def test_every_setting_starts_the_kernel_that_it_tunes(job: str) -> None:
    setting = tune.Setting.parse(job)
    machine = Recording("emulator")
    compute = tune.inputs(setting, machine, "tiny")
    choice, results = tune.present_choice(setting, compute, machine)
    assert isinstance(choice, tune.Choice)
    assert results
    for other in tune.neighbours(choice, tune.smallest(setting)):
        with tune.tuning.override(**{setting.kernel: other}), machine.launching() as started:
            compute()
        assert tune.KERNELS[setting.kernel] in {one.kernel for one in started}
        break


class Interpreted(Machine):
    """A machine that takes every way of a GPU, with kernels that are interpreted."""

    tensors = "cpu"


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Interpreted("cuda")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "job",
    [pytest.param("edges_forward, bf16, 32", marks=pytest.mark.long), "window_step, bf16, 32"],
)
def test_a_search_measures_every_choice_and_skips_what_is_known(
    job: str, interpreted, monkeypatch
) -> None:
    compiled = []

    class Kernel:
        def __init__(self, real: object) -> None:
            self.fn, self.real = real.fn, real

        def warmup(self, *, grid: tuple, **arguments: object) -> None:
            compiled.append(self.fn.__name__)

    monkeypatch.setattr(launch, "recording", _recording_with(Kernel))
    rows = list(tune.work(job, [], interpreted, "tiny"))
    assert [row["present"] for row in rows] == [True, False, False]
    assert all(row["cost"] > 0 and row["difference"] < 1e-2 for row in rows)
    assert set(compiled) == {tune.KERNELS[tune.Setting.parse(job).kernel]}
    assert len(compiled) == len(rows)
    known = [{"job": job, **row} for row in rows]
    left = list(tune.work(job, known[:2], interpreted, "tiny"))
    assert [row["choice"] for row in left] == [rows[2]["choice"]]
    assert list(tune.work(job, known, interpreted, "tiny")) == []
    (proposal,) = tune.proposals(known)
    assert proposal.gain >= 1


def _recording_with(kernel: type):
    real = launch.recording

    @contextmanager
    def recording():
        with real() as launches:
            yield launches
        launches[:] = [one._replace(kernel=kernel(one.kernel)) for one in launches]

    return recording


@pytest.mark.long
def test_a_problem_runs_on_the_device_and_tells_its_kernels(interpreted) -> None:
    small = {kernel: tune.Choice(16, 16, 4, 1) for kernel in tune.tuning.KERNELS}
    with tune.tuning.override(**small):
        (row,) = parity.work("edges: bias of every edge, bf16", [], interpreted, "full")
    assert parity.is_right(row)
    assert "edges_forward_kernel" in row["kernels"]
    assert row["findings"] == []


def test_the_best_choice_is_proposed_as_source() -> None:
    def row(job: str, choice: tuple[int, ...], cost: float | None, present: bool = False) -> dict:
        return {"job": job, "choice": list(choice), "cost": cost, "present": present}

    rows = [
        row("forward, bf16, 64", (64, 32, 4, 2), 3.0, present=True),
        row("forward, bf16, 64", (128, 64, 8, 3), 1.5),
        row("forward, bf16, 64", (256, 64, 8, 3), None),
        row("forward, bf16, 128", (64, 32, 4, 2), 1.0, present=True),
        row("d_query, bf16, 64", (64, 32, 4, 2), 1.0),  # the present one was not measured
    ]
    text = tune.source(tune.proposals(rows), "a GPU")
    code = compile(text, "proposal", "eval")
    table = eval(code, {"Choice": tune.Choice})
    assert table == {"forward": {64: tune.Choice(128, 64, 8, 3), 128: tune.Choice(64, 32, 4, 2)}}
    assert "# 2.00, 1.00" in text


def test_times_of_launches_become_a_file_that_stands_beside_predictions(tmp_path) -> None:
    rows = Rows(tmp_path / "times.jsonl")
    rows.add({"job": "bands 1", "name": "dots", "seconds": 3e-6})
    rows.add({"job": "bands 1", "end": True, "seconds": 0.5})
    rows.add({"job": "bands 0", "name": "dots", "seconds": 1e-6})  # later, as it was run again
    rows.add({"job": "bands 0", "name": "forward", "seconds": 2e-6})
    rows.add({"job": "bands 0", "end": True, "error": "out of memory", "seconds": 0.5})
    session = session_in(tmp_path, machine=Machine("cuda"), size="full")
    now = facts(EMULATOR, "tiny") | {"hardware": "NVIDIA H200"}
    lines = "\n".join(report.times_lines(session))
    assert "FAILED: bands 0: out of memory" in lines
    assert [line.split("|")[1].strip() for line in lines.splitlines()[2:5]] == [
        "dots", "forward", "dots",
    ]  # fmt: skip
    benchmark_rows(tmp_path)
    compared = "\n".join(report.visits_lines(session, now))
    assert f"Copy `visit.json` to `docs/benchmarks/visits/{now['date']}-h200.json`" in compared
    measured = read_measured(tmp_path / "visit.json")
    assert record.read(tmp_path / "visit.json").rows == [ROW]
    assert measured.launches == [("dots", 1e-6), ("forward", 2e-6), ("dots", 3e-6)]
    assert measured.facts["hardware"] == "NVIDIA H200"
    assert {name: now[name] for name in measured.facts} == measured.facts


def test_a_case_that_was_cut_off_goes_on_behind_the_launches_that_are_timed(monkeypatch) -> None:
    monkeypatch.setattr(times, "seconds_of", lambda _: 1e-6)
    make = times.cases()["bands 2"]
    monkeypatch.setattr(times, "cases", lambda: {"bands 2": lambda device: make("meta")})
    everything = [row["name"] for row in times.work("bands 2", [], EMULATOR, "full")]
    known = [{"job": "bands 2", "name": name, "seconds": 1e-6} for name in everything[:2]]
    known.append({"job": "bands 2", "end": True, "error": "stopped", "seconds": 1.0})
    assert [row["name"] for row in times.work("bands 2", known, EMULATOR, "full")] == everything[2:]
    assert len(everything) > 3


@pytest.mark.nightly
def test_what_was_compiled_ahead_is_found_again(tmp_path) -> None:
    """A second process compiles nothing: it finds all kernels in the folder."""
    folder = tmp_path / "ahead"
    script = (
        "import sys; from gpu import ahead, parity; "
        "ahead.JOBS['parity'] = ahead.of_parity, lambda: list(parity.TINY); "
        "ahead.JOBS['times'] = ahead.of_times, lambda: ['edges 0']; "
        "ahead.JOBS['tune'] = ahead.of_tune, lambda: ['edges_forward, bf16, 32']; "
        "ahead.JOBS['benchmark'] = ahead.of_benchmark, lambda: ['streaming']; "
        "ahead.JOBS['candidates'] = ahead.of_candidates, lambda: ['gluon; times of bands 2']; "
        f"sys.exit(ahead.main(['sm_90', {str(folder)!r}]))"
    )
    names = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=jobs.environment(GRAPHATTN_AHEAD=str(folder)),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert run.stdout.count(": done (") == 9, run.stdout
        names.append({path.name for path in folder.iterdir()})
    assert names[0] == names[1]
    assert len(names[0]) > 20
    assert all(path.stat().st_size == 0 for path in folder.rglob("*.ptx"))
    assert all(path.stat().st_size > 0 for path in folder.rglob("*.cubin"))
