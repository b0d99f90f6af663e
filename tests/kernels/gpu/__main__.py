"""`python -m gpu`: every step that is left, or one of them.

The exit code is 0 if everything is done and right, 1 if something is wrong, 2 if nothing can run
here, and 3 if something is left to do: run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from . import plan, report, visits
from .session import ROOT, Machine, Progress, Session, facts, why_not_here

WRONG, CANNOT, LEFT = 1, 2, 3
LIMIT = 540.0  # seconds of a command


def main(arguments: list[str] | None = None) -> int:
    """Run steps, write the report, and return the exit code."""
    options = parser().parse_args(arguments)
    machine = Machine(options.device, options.arch)
    size = options.size or ("tiny" if machine.is_emulated else "full")
    out = Path(options.out or ROOT / "build" / ("gpu-emulated" if machine.is_emulated else "gpu"))
    known = out / "session.json"
    steps = list(report.STEPS) if options.step == "all" else [options.step]
    if options.plan:
        print("\n".join(plan.lines(visits.earlier(), options.limit)))
        return 0
    deadline = time.monotonic() + options.limit
    if options.step == "report":
        if not known.exists():
            return refuse(f"there is nothing to report in {out}")
    else:
        if not machine.is_emulated and not torch.cuda.is_available():
            return refuse(
                "there is no CUDA device. To rehearse without one: make gpu DEVICE=emulator "
                "(python -m gpu --device emulator)"
            )
        now = facts(machine, size)
        if (reason := why_not_here(out, now)) is not None:
            return refuse(reason)
        out.mkdir(parents=True, exist_ok=True)
        if not known.exists():
            known.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        processes = options.processes or default_processes(machine)
        for name in steps:
            session = Session(out, machine, size, processes, deadline)
            if options.retry:
                session.rows(name).forget_failures()
            run_step(name, session)
    stored = json.loads(known.read_text(encoding="utf-8"))
    machine = machine._replace(device=stored["device"])
    size = stored["size"] if stored["size"] in ("tiny", "full") else size
    session = Session(out, machine, size, 1)
    report.write(session)
    states = report.states(session)
    for name, progress in states.items():
        print(f"{name}: {progress}")
    print(out / "report.md")
    return exit_code(list(states.values()) if options.step in ("all", "report")
                     else [states[options.step]])  # fmt: skip


def run_step(name: str, session: Session) -> None:
    """Run a step, if something of it is left, and say how long it took."""
    before = report.STEPS[name].progress(session)
    if before.done == before.of:
        return
    begin = time.monotonic()
    print(f"{name} ...", flush=True)
    try:
        report.STEPS[name].run(session)
    finally:
        after = report.STEPS[name].progress(session)
        print(f"{name}: {after} ({time.monotonic() - begin:.0f} s)", flush=True)


def exit_code(states: list[Progress]) -> int:
    """The exit code for some steps; a step that was skipped is neither wrong nor left."""
    if any(progress.wrong for progress in states):
        return WRONG
    return LEFT if any(progress.is_left for progress in states) else 0


def refuse(reason: str) -> int:
    """Say why nothing runs."""
    print(f"gpu: {reason}", file=sys.stderr)
    return CANNOT


def default_processes(machine: Machine) -> int:
    """Compiling takes most of the time, on the CPU."""
    count = os.cpu_count() or 1
    return min(2, count) if machine.is_emulated else max(1, min(14, count - 2))


def parser() -> argparse.ArgumentParser:
    """Options, those of `make gpu`."""
    options = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    options.add_argument("--step", default="all", choices=["all", *report.STEPS, "report"])
    options.add_argument("--device", default="cuda", choices=["cuda", "emulator"])
    options.add_argument("--arch", default="sm_80", choices=["sm_80", "sm_90"],
                       help="what the emulator emulates")  # fmt: skip
    options.add_argument("--size", choices=["tiny", "full"],
                       help="full on a GPU, tiny on the emulator, if not given")  # fmt: skip
    options.add_argument("--out", help="build/gpu, or build/gpu-emulated, if not given")
    options.add_argument("--limit", type=float, default=LIMIT, help="seconds of all steps together")
    options.add_argument("--processes", type=int)
    options.add_argument("--plan", action="store_true",
                       help="print the jobs with their expected seconds; run nothing")  # fmt: skip
    options.add_argument("--retry", action="store_true", help="run jobs again that have failed")
    return options


if __name__ == "__main__":
    sys.exit(main())
