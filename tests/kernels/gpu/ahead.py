"""Kernels compiled before there is a GPU, into a cache that goes along with the sources.

    export GRAPHATTN_AHEAD=/tmp/ahead         # on both machines
    python -m gpu.ahead sm_90 /tmp/ahead      # here: the GPU's Triton, and its 3.x of Python
    python -m gpu                             # there

Where time on a GPU is short, compiling takes most of it. Triton compiles for any device if its
driver names one, so here the driver only names it. Launches of `parity`, `candidates`, `benchmark`,
`times` and `tune` (the present sizes and their neighbours) go through Triton's own launcher up to
the point where a kernel would start. Triton's names of compiled kernels hold hashes of its own
files and of its assembler, which differ between builds of one version: within `GRAPHATTN_AHEAD`
(`gpu/__init__.py`) they do not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import graphattn as ga
from graphattn.bench.cases.attention import STRUCTURED
from graphattn.bench.cases.catalogue import CASES
from graphattn.bench.measuring.passes import one_pass
from graphattn.bench.reporting.record import OURS
from graphattn.kernels.check.families import cases
from graphattn.kernels.shared import launch, tuning

from . import AHEAD, benchmark, candidates, parity, tune
from .session import Machine, Started, compile_only

TEXTS = (".ttir", ".ttgir", ".llir", ".ptx", ".source")  # emptied: only people read them
STEPS = ("parity", "candidates", "benchmark", "times", "tune")
# What is compiled does not depend on these, so that cases of the benchmark can be small.
FEW = {"tokens": 512, "sources": 512, "batch": 2, "images": 2, "texts": 2, "depth": 1,
       "prompt": 64, "new_tokens": 2, "early": 64, "late": 320}  # fmt: skip


class Named:
    """A driver of a device that is not there."""

    def __init__(self, arch: str) -> None:
        self.number = int(arch.removeprefix("sm_"))

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.number, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiler(Machine):
    """A machine on whose launches nothing runs."""

    @contextmanager
    def launching(self) -> Iterator[list[Started]]:
        started: list[Started] = []

        def receive(one: launch.Launch) -> None:
            compile_only(one)
            started.append(Started(one))

        with launch.redirected(receive):
            yield started

    @property
    def tensors(self) -> str:
        return "cpu"


def of_parity(name: str) -> None:
    """Compile what a problem starts; its results are those of kernels that did not run."""
    parity.BY_NAME[name].errors("cpu")


def of_times(name: str) -> None:
    """Compile the launches of a case that is timed."""
    for configuration in cases()[name]("meta"):
        compile_only(configuration.launch)


def of_tune(name: str) -> None:
    """Compile a kernel in its present sizes, and in those that a search tries first."""
    setting, machine = tune.Setting.parse(name), Compiler("cuda")
    compute = tune.inputs(setting, machine, "full")
    present, _ = tune.present_choice(setting, compute, machine)
    for choice in [present, *tune.neighbours(present, tune.smallest(setting))]:
        with tuning.override(**{setting.kernel: choice}), launch.recording() as recorded:
            compute()
        for one in recorded:
            if one.kernel.fn.__name__ == tune.KERNELS[setting.kernel]:
                compile_only(one)


def of_candidates(name: str) -> None:
    """Compile what a candidate starts in place of other kernels."""
    setting, _, job = name.partition("; ")
    with candidates.asked_for(candidates.CANDIDATES[setting]):
        if job.startswith(candidates.TIMED):
            of_times(job.removeprefix(f"{candidates.TIMED} "))
        else:
            of_parity(job)


def of_benchmark(name: str) -> None:
    """Compile what graphattn's contenders of a case start, in a small case."""
    (case,) = (case for case in CASES if case.name == name)
    entries = {entry.contender: entry for entry in case.entries("paper", "cuda").values()}
    for contender, entry in entries.items():
        if contender.startswith(OURS) and contender != STRUCTURED:
            size = {key: min(n, FEW.get(key, n)) for key, n in entry.size.items()}
            inputs = case.make(size, torch.device("cpu"), torch.bfloat16)
            # Not all that runs on a GPU has a kernel: a step over a whole cache has none.
            with ga.use_backend("triton"), suppress(ValueError):
                one_pass(entry.run, inputs, backward=case.backward)


JOBS: dict[str, tuple[Callable[[str], None], Callable[[], list[str]]]] = {
    "parity": (of_parity, lambda: parity.jobs("full")),
    "candidates": (of_candidates, lambda: candidates.jobs(Machine("cuda"), "full")),
    "benchmark": (
        of_benchmark,
        lambda: [case.name for case in benchmark.cases("full", Machine("cuda"))],
    ),
    "times": (of_times, lambda: list(cases())),
    "tune": (of_tune, lambda: tune.jobs("full")),
}


def run(arch: str, steps: list[str], part: int = 0, parts: int = 1) -> None:
    """Compile every `parts`-th job of the steps. What one of them cannot compile, it leaves."""
    from triton.runtime.driver import driver

    driver.set_active(Named(arch))
    with tuning.compiling_for(arch), launch.redirected(compile_only):
        for step in steps:
            compile_job, names = JOBS[step]
            for name in islice(names(), part, None, parts):
                begin = time.perf_counter()
                try:
                    has_values = step != "times" and candidates.TIMED not in name
                    with zeros_for_new_tensors() if has_values else ExitStack():
                        compile_job(name)
                    state = "done"
                except Exception as error:  # zeros are no result, and some sizes do not compile
                    state = f"{type(error).__name__}: {str(error)[:80]}"
                print(f"{step}: {name}: {state} ({time.perf_counter() - begin:.0f} s)", flush=True)


@contextmanager
def zeros_for_new_tensors() -> Iterator[None]:
    """Fill new tensors with zeros: indices that no kernel has written must be valid ones."""
    with (
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
        mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    ):
        yield


def strip(folder: Path) -> None:
    """Empty the texts of a cache, which take most of its space."""
    for path in folder.rglob("*"):
        if path.suffix in TEXTS:
            path.write_bytes(b"")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m gpu.ahead", description=__doc__)
    parser.add_argument("arch", help="such as sm_90")
    parser.add_argument("folder", type=Path, help="the cache; the same path on the GPU's machine")
    parser.add_argument("--step", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--part", type=int, default=0, help="of --parts processes")
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args(arguments)
    if os.environ.get(AHEAD) != str(options.folder):
        print(f"set {AHEAD}={options.folder}, here and on the GPU's machine", file=sys.stderr)
        return 2
    run(options.arch, options.step, options.part, options.parts)
    strip(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
