"""Small inputs, quick runs, and the check of a contender, for the tests of the benchmark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import graphattn as ga
from graphattn.bench.cases.case import BenchmarkCase
from graphattn.bench.cases.inputs import AttentionInputs, attention_inputs
from graphattn.bench.measuring import correctness, memory, passes, runner
from graphattn.bench.reporting import record
from graphattn.cli import bench
from graphattn.cli.app import app

CPU = torch.device("cpu")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)


def inputs_over(graph: ga.TokenGraph, top_k: int | None = None, **options: Any) -> AttentionInputs:
    return attention_inputs(graph, 2, 8, CPU, torch.float32, top_k, **options)


def error_of(contender: Any, x: Any, *, is_dot: bool = False) -> float:
    """Return the largest error of a contender, in outputs and gradients."""
    return max(correctness.truth_of(x, backward=True, dot_product=is_dot).errors_of(contender))


def quick_runs(monkeypatch: pytest.MonkeyPatch, *cases: BenchmarkCase) -> None:
    """Let the command have these cases only, and measure neither the machine nor the memory."""
    monkeypatch.setattr(bench, "CASES", list(cases))
    monkeypatch.setitem(runner.SECONDS, "small", 0.0)
    monkeypatch.setattr(runner, "measure_machine", lambda *_: passes.Machine(1e11, 1e10))
    monkeypatch.setattr(memory.Peak, "of", lambda *_, **__: 2.0**20)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def measured(folder: Path, *arguments: str) -> tuple[record.Record, str]:
    """Run the command; return its record and what it prints."""
    result = run(*arguments, "--json", folder / "rows.json")
    assert result.exit_code == 0, result.output
    return record.read(folder / "rows.json"), result.output
