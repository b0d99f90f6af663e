"""The benchmark: what `graphattn bench --device cuda` measures, case by case, without its tables.

It runs in a process of its own, which is interrupted when the time is over; the record has the
cases before. Compiling takes longer than measuring, most of all FlexAttention. So processes, one
for each case, first run everything once side by side, which fills the compilers' caches. On the
emulator tiny cases stand in, and their times mean nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import graphattn as ga
from graphattn.bench.cases.case import BenchmarkCase
from graphattn.bench.cases.catalogue import CASES
from graphattn.bench.cases.whole import WHOLE
from graphattn.bench.measuring.runner import Runner, measure_all
from graphattn.bench.reporting import record
from graphattn.bench.reporting.record import OURS, Record

from .jobs import environment
from .session import Machine, Progress, Rows, Session
from .visits import Visit, earlier

# What the targets are about comes first: later cases may have to wait for another day.
FIRST = ("gka", "causal-window", "window", "krause", "consensus", "knn-graph", "knn",
         "streaming-krause")  # fmt: skip
TINY_ON_GPU = ("window", "consensus", "streaming")
TINY = {  # on the emulator
    "window": {"tokens": 40, "window": 16, "heads": 1, "features": 16},
    "consensus": {"batch": 1, "tokens": 24, "dim": 32, "heads": 2, "rank": 2, "edge_hidden": 16,
                  "window": 2},
}  # fmt: skip
WARMING = 100.0  # seconds, at most
STOP = 20.0  # seconds before the end; then the case that is running is interrupted
PATIENCE = 10.0  # seconds until it is killed
MOST_ATTEMPTS = 2  # a case that was cut off so often is left out, so that later ones get a turn


def cases(size: str, machine: Machine, visits: list[Visit] | None = None) -> list[BenchmarkCase]:
    """The cases that a GPU can run: first those that no visit has measured, with targets first.

    Whole models, which take longest, are the last of those.
    """
    by_name = {case.name: case for case in CASES}
    if machine.is_emulated:
        return [
            replace(
                by_name[name],
                sizes={"small": numbers}, contenders={OURS: by_name[name].contenders[OURS]},
                dot_products={}, yardsticks={}, targets=(), memory=False, twice=False,
            )
            for name, numbers in TINY.items()
        ]  # fmt: skip
    if size == "tiny":
        return [by_name[name] for name in TINY_ON_GPU]
    known = {name for visit in (earlier() if visits is None else visits) for name in visit.cases}
    return sorted(
        (case for case in CASES if "cuda" in case.devices),
        key=lambda case: (case.name in known, case in WHOLE, (*FIRST, case.name).index(case.name)),
    )


def run(session: Session) -> None:
    """Measure the cases that are left, until the time is over."""
    if not session.machine.is_emulated:
        warm(session)
    threads = str(max(1, (os.cpu_count() or 2) - 1))  # right results come from the CPU, too
    process = subprocess.Popen(
        [*command(session), str(session.out)],
        env=environment(OMP_NUM_THREADS=threads),
        start_new_session=True,
    )
    try:
        process.wait(timeout=max(session.seconds_left - STOP, 1.0))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as cut:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started, too
            process.wait()
        if isinstance(cut, KeyboardInterrupt):
            raise


def command(session: Session) -> list[str]:
    """The command of a process of this step; what follows it says what it does."""
    return [sys.executable, "-m", "gpu.benchmark", *session.machine, session.size]


def warm(session: Session) -> None:
    """Run every case that is left once, side by side, so that compilers' caches are full.

    What fails here, for example because others hold the memory, is compiled again later.
    """
    known = read(session.out)
    measured = [] if known is None else known.measured
    end = time.monotonic() + min(WARMING, session.seconds_left / 3)

    def compile_one(name: str) -> None:
        if end - time.monotonic() < 1:
            return
        process = subprocess.Popen(
            [*command(session), folder, name],
            env=environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(end - time.monotonic(), 0.1))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    left = [c.name for c in cases(session.size, session.machine) if c.name not in measured]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(session.processes) as pool:
        list(pool.map(compile_one, left))


def run_once(name: str, folder: Path, machine: Machine, size: str) -> None:
    """Measure a case in as few rounds as possible, and forget the times."""
    device, size_name = torch.device(machine.tensors), "small" if size == "tiny" else "paper"
    runner = Runner(device, size_name, Record(record.provenance(device, size_name)), Quiet())
    runner.seconds = 0.0
    (case,) = (case for case in cases(size, machine) if case.name == name)
    measure_all([case], runner, folder / f"{name}.json")


def measure(out: Path, machine: Machine, size: str) -> None:
    """Measure in this process, and write the record after every case."""
    device = torch.device(machine.tensors)
    size_name = "small" if size == "tiny" or machine.is_emulated else "paper"
    json, attempts = out / "benchmark.json", Rows(out / "benchmark.jsonl")
    now = record.provenance(device, size_name)
    known = record.resumed(json, now) if json.exists() else Record(now)
    runner = Runner(device, size_name, known, Quiet())
    known.provenance["products of matrices"] = f"{runner.machine.flops / 1e9:,.0f} GFLOP/s"
    known.provenance["copies"] = f"{runner.machine.bytes / 1e9:,.0f} GB/s"
    with ExitStack() as stack:
        if machine.is_emulated:
            runner.seconds = 0.0  # three rounds, with nothing to learn from more
            stack.enter_context(ga.use_backend("triton"))
            stack.enter_context(machine.launching())
        for case in cases(size, machine):
            if case.name in known.measured:
                continue
            if [row["job"] for row in attempts.all()].count(case.name) >= MOST_ATTEMPTS:
                runner.note(f"{case.name}: cut off {MOST_ATTEMPTS} times")
                known.measured.append(case.name)
                known.write(json)
                continue
            attempts.add({"job": case.name})
            begin = time.monotonic()
            measure_all([case], runner, json)
            if case.name not in known.measured:  # interrupted
                return
            seconds = round(time.monotonic() - begin, 2)
            attempts.add({"job": case.name, "end": True, "seconds": seconds})


class Quiet:
    """Console of a run whose tables nobody reads: progress alone is printed, to standard error."""

    is_terminal = False

    def status(self, title: str) -> Any:
        return nullcontext(None)


def read(out: Path) -> Record | None:
    """The record of a folder; None where there is none yet."""
    path = out / "benchmark.json"
    return record.read(path) if path.exists() else None


def progress(session: Session) -> Progress:
    """How many cases were measured, and of how many a result was wrong."""
    known = read(session.out)
    names = [case.name for case in cases(session.size, session.machine)]
    if known is None:
        return Progress(0, len(names))
    wrong = [line for line in known.missing if f", {OURS}" in line and "wrong result" in line]
    return Progress(sum(name in known.measured for name in names), len(names), len(wrong))


if __name__ == "__main__":
    device, arch, size, out, *names = sys.argv[1:]
    if names:
        run_once(*names, Path(out), Machine(device, arch), size)
    else:
        measure(Path(out), Machine(device, arch), size)
