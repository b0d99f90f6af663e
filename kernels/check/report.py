"""Compiles and judges all configurations, and makes the tables."""

from __future__ import annotations

import importlib
import json
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from graphattn.kernels.check.compile import KIB, Compiled, compile_launch, matrix_families, problems
from graphattn.kernels.check.measured import Measured
from graphattn.kernels.check.prediction import Prediction, predict
from graphattn.kernels.shared import tuning

CONFIGURATIONS = "graphattn.kernels.check.families"
PROCESSES = 2


class ReportRow(NamedTuple):
    """One configuration on one architecture."""

    name: str
    arch: str
    target: str
    compiled: Compiled | None  # None: it did not compile
    prediction: Prediction | None  # sm_90 only
    problems: list[str]


def check(archs: Sequence[str], configurations: str = CONFIGURATIONS) -> list[ReportRow]:
    """Compiles every configuration for every architecture, in two processes."""
    module, jobs = importlib.import_module(configurations), []
    for arch in archs:
        with tuning.compiling_for(arch):  # how many launches there are depends on sizes of tiles
            count = len(module.all_configurations())
        jobs += [(configurations, i, arch) for i in range(count)]
    # Kernels cannot be pickled, so a job names its configuration. A new interpreter for each
    # process, because PyTorch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(PROCESSES, len(jobs)) or 1, mp_context=context) as processes:
        return list(processes.map(check_one, jobs))


def check_one(job: tuple[str, int, str]) -> ReportRow:
    """Check one configuration on one architecture; a compiler error is a problem, too."""
    module, i, arch = job
    with tuning.compiling_for(arch):
        configuration = importlib.import_module(module).all_configurations()[i]
    name, target = configuration.name, configuration.target
    try:
        compiled = compile_launch(configuration.launch, arch)
    except Exception as error:  # compiler, assembler, linker: any error is a finding
        refused = f"does not compile: {last_words(error)}"
        return ReportRow(name, arch, target, None, None, [refused])
    prediction = predict(configuration, compiled) if arch == "sm_90" else None
    return ReportRow(
        name, arch, target, compiled, prediction, problems(compiled, main=configuration.main)
    )


def last_words(error: BaseException) -> str:
    """The line that says why: Triton shows the source first, and wraps errors of its parts."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


COMPILED = ("configuration", "registers", "spills", "shared KiB", "matrix instructions", "loop")
PREDICTED = (
    "configuration",
    "bytes",
    "gathers",
    "matrix",
    "issue slots",
    "special",
    "in turn",
    "programs",
    "predicted",
    "target",
)


MEASURED = ("measured", "measured / predicted")


def markdown(rows: Sequence[ReportRow], measured: Measured | None = None) -> str:
    """The tables as text that depends on the kernels and on Triton's version, and on `measured`."""
    import triton

    text = [
        "# Kernels, compiled ahead of time",
        "",
        f"Triton {triton.__version__}; compiled without a device. Registers per thread; "
        "loop: instructions of one warp in one pass through the main loop; spills: loads and "
        "stores of spilled registers (in the main loop). "
        "`python -m graphattn.kernels.check --all --markdown FILE` writes this.",
    ]
    for arch in dict.fromkeys(row.arch for row in rows):
        text += ["", f"## {arch}", ""]
        text += table(COMPILED, [compiled_cells(row) for row in rows if row.arch == arch])
    predicted = [row for row in rows if row.prediction is not None]
    if predicted:
        text += [
            "",
            "## Predicted time on an H200",
            "",
            "Microseconds each unit would need if it were the only limit: no launch is faster than "
            "the slowest of them. In turn: the sum of what does not overlap within a program, "
            "which waits for its products before it computes with them, and for memory. The "
            "programs that share a multiprocessor divide this sum, because one computes while "
            "another waits. Predicted is the larger of both, and the start of a launch. "
            "kernels/check/prediction.py states the model. "
            + (measured.provenance if measured else "Not measured."),
            "",
        ]
        cells = [predicted_cells(row) for row in predicted]
        if measured:
            cells = [
                (*row[:-1], *times, row[-1])
                for row, times in zip(cells, measured_cells(predicted, measured), strict=True)
            ]
        header = (*PREDICTED[:-1], *(MEASURED if measured else ()), PREDICTED[-1])
        text += table(header, cells)
    lines = [f"- {row.name} on {row.arch} {problem}" for row in rows for problem in row.problems]
    text += ["", "## Problems", "", *(lines or ["None."]), ""]
    return "\n".join(text)


def compiled_cells(row: ReportRow) -> tuple[str, ...]:
    """The cells of a row of the table whose header is `COMPILED`."""
    if row.compiled is None:
        return (row.name, "does not compile", "", "", "", "")
    compiled = row.compiled
    families = [f"{count} {name}" for name, count in matrix_families(compiled).items()]
    return (
        row.name,
        str(compiled.registers),
        f"{compiled.spills} ({compiled.loop_spills})" if compiled.spills else "0",
        f"{compiled.shared / KIB:.1f}",
        ", ".join(families),
        str(compiled.loop_instructions),
    )


def predicted_cells(row: ReportRow) -> tuple[str, ...]:
    """The cells of a row of the table whose header is `PREDICTED`."""
    prediction = row.prediction
    assert prediction is not None
    parts = [microseconds(seconds) for seconds in (*prediction.units, prediction.in_turn_s)]
    total = f"{microseconds(prediction.seconds)} ({prediction.limit})"
    return (row.name, *parts, str(prediction.programs), total, row.target)


def measured_cells(rows: Sequence[ReportRow], measured: Measured) -> Iterator[tuple[str, str]]:
    """Yield the cells of every row in the columns `MEASURED`, empty where nothing was measured."""
    for row, seconds in zip(rows, measured.seconds_of(row.name for row in rows), strict=True):
        assert row.prediction is not None
        if seconds is None:
            yield "", ""
        else:
            yield microseconds(seconds), f"{seconds / row.prediction.seconds:.2f}"


def microseconds(seconds: float) -> str:
    """Three significant digits, never in scientific notation: 1,230 or 4.56 or 0.0078."""
    value = float(f"{1e6 * seconds:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; columns are aligned, so that it can be read as plain text, too."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def as_json(rows: Iterable[ReportRow]) -> str:
    """JSON text with every number of every row."""
    records = []
    for row in rows:
        record = row._asdict()
        record["compiled"] = row.compiled and row.compiled._asdict()
        prediction = row.prediction
        record["prediction"] = prediction and {
            **prediction._asdict(),
            "seconds": prediction.seconds,
            "limit": prediction.limit,
        }
        records.append(record)
    return json.dumps(records, indent=1) + "\n"
