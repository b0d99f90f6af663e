"""The report: what the steps found on a device, as one Markdown file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from graphattn.bench.cases.case import BOTH
from graphattn.bench.reporting.record import OURS, Record
from graphattn.bench.reporting.record import Row as Timed
from graphattn.kernels.check.report import microseconds, table

from . import benchmark, candidates, parity, sanitizer, times, tune, visits
from .session import Progress, Session

# In the order of what is missing: a visit may end at any time.
STEPS = {
    step.__name__.rpartition(".")[2]: step
    for step in (parity, candidates, benchmark, sanitizer, times, tune)
}
NO_TIME = "emulated, no time"
FACTS = ("hardware", "driver", "torch", "triton", "python", "commit", "sources", "size", "date")


class Peak(NamedTuple):
    """Data-sheet values of a GPU: operations per second in dense bfloat16, bytes per second."""

    flops: float
    bytes: float


# NVIDIA's data sheets, without sparsity. The first whose words are all in a device's name.
PEAKS = {
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100 NVL": Peak(835e12, 3.9e12),
    "H100": Peak(989e12, 3.35e12),
    "A100 PCIE 40GB": Peak(312e12, 1.555e12),
    "A100 SXM4 40GB": Peak(312e12, 1.555e12),
    "A100 80GB PCIe": Peak(312e12, 1.935e12),
    "A100": Peak(312e12, 2.039e12),
}


def peak_of(hardware: str) -> Peak | None:
    """Find a device by its name, such as "NVIDIA A100-SXM4-40GB"; None for one not known."""
    words = set(re.split(r"[ ,-]", hardware.lower()))
    for name, peak in PEAKS.items():
        if set(name.lower().split()) <= words:
            return peak
    return None


def write(session: Session) -> str:
    """Write the report into the folder of the session, and return it."""
    text = "\n".join(lines(session)) + "\n"
    (session.out / "report.md").write_text(text, encoding="utf-8")
    return text


def states(session: Session) -> dict[str, Progress]:
    """How far every step has come."""
    return {name: step.progress(session) for name, step in STEPS.items()}


def lines(session: Session) -> Iterator[str]:
    """Yield the lines of the report."""
    path = session.out / "session.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    emulated = session.machine.is_emulated
    yield "# Kernels on a GPU" if not emulated else "# Rehearsal: no GPU has run anything of this"
    yield ""
    yield from table(("fact", "value"), [(name, str(facts.get(name))) for name in FACTS])
    yield ""
    yield from table(("step", "state"), [(n, str(p)) for n, p in states(session).items()])
    yield from ("", "## Parity with float64", "")
    yield from parity_lines(session)
    yield from ("", "## Beside earlier visits", "")
    yield from visits_lines(session, facts)
    yield from ("", "## Candidates", "")
    yield from candidates_lines(session)
    yield from ("", "## Benchmark", "")
    yield from benchmark_lines(session, facts)
    yield from ("", "## Sanitizer", "")
    yield from sanitizer_lines(session)
    yield from ("", "## Times of launches", "")
    yield from times_lines(session)
    yield from ("", "## Sizes of tiles", "")
    yield from tune_lines(session, facts)
    yield from ("", "## What can be said now", "")
    yield from documentation_lines(session)


def parity_lines(session: Session) -> Iterator[str]:
    """The largest errors by family, precision and result, and every problem that is wrong."""
    rows = [row for row in session.rows("parity").all() if "errors" in row]
    cells = []
    groups = dict.fromkeys((row["family"], row["dtype"]) for row in rows)
    for family, dtype in groups:
        of_group = [row for row in rows if (row["family"], row["dtype"]) == (family, dtype)]
        errors = [(e, a, name) for row in of_group for name, (e, a) in row["errors"].items()]
        largest, _, name = max(errors, key=lambda error: (error[0] != error[0], error[0]))
        nearest = max(e / a if a else float(e > 0) for e, a, _ in errors)
        kernels = sorted({kernel for row in of_group for kernel in row["kernels"]})
        right = sum(map(parity.is_right, of_group))
        cells.append((
            family, dtype, f"{right} of {len(of_group)}", f"{largest:.1e} ({name})",
            f"{100 * nearest:.0f} %", ", ".join(kernels),
        ))  # fmt: skip
    header = ("family", "precision", "right", "largest error", "of what is allowed", "kernels")
    yield from table(header, cells) if cells else ["Not run."]
    yield ""
    for row in rows:
        if not parity.is_right(row):
            yield f"- WRONG: {row['job']}: {one_line(str(row['errors']))}"
        for finding in row["findings"]:
            yield f"- {row['job']}: {one_line(finding)}"
    yield from failures(session, "parity")


def visits_lines(session: Session, facts: dict[str, Any]) -> Iterator[str]:
    """Times beside those of earlier visits; the record of this one is written, too."""
    if session.machine.is_emulated:
        yield f"Skipped: {NO_TIME}."
        return
    launches = times.launches(session.rows("times").all())
    record = benchmark.read(session.out) or Record(facts)
    times_now = visits.times_of(launches, record.rows)
    yield from visits.lines(times_now, visits.earlier(facts["hardware"]))
    others = {
        "sources": facts.get("sources"),
        "states": {name: str(progress) for name, progress in states(session).items()},
        "seconds": {
            name: {job: row["seconds"] for job, row in session.rows(name).ended().items()
                   if "seconds" in row and "error" not in row}
            for name in STEPS
        },
        "tuned": list(session.rows("tune").ended()),
        "candidates": [row for row in session.rows("candidates").all() if "plain" in row],
        "benchmark": asdict(record),
    }  # fmt: skip
    (session.out / "visit.json").write_text(
        visits.as_text(facts, launches, others), encoding="utf-8"
    )
    yield ""
    yield f"Copy `visit.json` to `docs/benchmarks/visits/{visits.name_of(facts)}`."


def candidates_lines(session: Session) -> Iterator[str]:
    """Kernels that must be asked for: whether they are right, and their times."""
    rows = session.rows("candidates").all()
    compared = [row for row in rows if "errors" in row]
    usual = session.rows("parity").all()
    new = [row for row in compared if candidates.is_new(row, usual)]
    yield f"{len(compared)} problems compared, {len(new)} of them by other kernels than usual."
    yield ""
    for row in compared:
        if not parity.is_right(row):
            yield f"- WRONG: {row['job']}: {one_line(str(row['errors']))}"
    timed = [row for row in rows if "plain" in row]
    if timed:
        yield from table(
            ("launch", "kernel", "microseconds without", "with", "times as fast"),
            [
                (row["name"], row["kernel"], microseconds(row["plain"]),
                 microseconds(row["candidate"]), f"{row['plain'] / row['candidate']:.2f}")
                for row in timed
            ],
        )  # fmt: skip
    yield from failures(session, "candidates")


def times_lines(session: Session) -> Iterator[str]:
    """Times of the launches that are predicted."""
    rows = session.rows("times")
    if skipped := times.progress(session).skipped:
        yield f"Skipped: {skipped}."
        return
    launches = times.launches(rows.all())
    cells = [(name, microseconds(seconds)) for name, seconds in launches]
    yield from table(("launch", "microseconds"), cells) if cells else ["Not run."]
    yield ""
    if launches:
        yield "`python -m graphattn.kernels.check --measured visit.json` adds predictions."
    yield from failures(session, "times")


def sanitizer_lines(session: Session) -> Iterator[str]:
    """Findings of every tool."""
    rows = session.rows("sanitizer")
    progress = sanitizer.progress(session)
    if progress.skipped:
        yield f"Skipped: {progress.skipped}. Nothing here has been checked."
        return
    checks = [row for row in rows.all() if "found" in row]
    cells = [(row["tool"], row["problem"], str(row["found"]) if row["found"] else "clean")
             for row in checks]  # fmt: skip
    yield from table(("tool", "problem", "found"), cells) if cells else ["Not run."]
    yield ""
    for row in checks:
        if row["found"]:
            yield f"- {row['job']}: {one_line(row['log'])}"
    yield from failures(session, "sanitizer", "NO VERDICT")


def benchmark_lines(session: Session, facts: dict[str, Any]) -> Iterator[str]:
    """Times, ratios and shares of bounds."""
    record = benchmark.read(session.out)
    if record is None or not record.rows:
        yield "Not run."
        return
    emulated = session.machine.is_emulated
    peak = None if emulated else peak_of(facts["hardware"])
    header = ("case", "pass", "contender", "time", "ratio", "of measured bound",
              "of data sheet", "memory", "error")  # fmt: skip
    yield from table(header, [cells_of(row, peak, emulated=emulated) for row in record.rows])
    if peak is not None:
        yield ""
        yield (
            f"Data sheet: {peak.flops / 1e12:,.0f} TFLOP/s in bfloat16, "
            f"{peak.bytes / 1e12:.2f} TB/s. Measured: products of matrices "
            f"{record.provenance.get('products of matrices')}, copies "
            f"{record.provenance.get('copies')}."
        )
    if record.targets and not emulated:
        words = {True: "met", False: "MISSED", None: "not measured"}
        yield ""
        yield from table(
            ("case", "pass", "quantity", "of", "measured", "at least", "at most", ""),
            [
                (t.case, t.passes, t.quantity, t.of, number(t.measured), number(t.at_least),
                 number(t.at_most), words[t.met])
                for t in record.targets
            ],
        )  # fmt: skip
    yield ""
    yield from (f"- missing: {line}" for line in record.missing)


def cells_of(row: Timed, peak: Peak | None, *, emulated: bool) -> tuple[str, ...]:
    """A row of the table of times."""
    share = share_of(row, peak)
    time = NO_TIME if emulated else f"{1e3 * row.median:.4g} ms"
    ratio = "" if row.ratio is None or emulated else f"{row.ratio:.2f}"
    bound = "" if row.share_of_bound is None or emulated else f"{100 * row.share_of_bound:.0f} %"
    memory = "" if row.peak is None else f"{row.peak / 1e6:,.0f} MB"
    error = "" if row.error is None else f"{row.error:.1e}"
    of_peak = "" if share is None else f"{100 * share:.0f} %"
    return (row.case, row.passes, row.contender, time, ratio, bound, of_peak, memory, error)


def share_of(row: Timed, peak: Peak | None) -> float | None:
    """The larger of bytes / bandwidth and operations / peak, divided by the time of our row."""
    case = next((case for case in benchmark.CASES if case.name == row.case), None)
    if peak is None or case is None or row.contender != OURS:
        return None
    flops, moved = case.work(row.size, 2, row.passes == BOTH)  # bytes of bfloat16
    least = max(flops / peak.flops, moved / peak.bytes)
    return least / row.median if least > 0 else None


def tune_lines(session: Session, facts: dict[str, Any]) -> Iterator[str]:
    """Tables of the best sizes, ready to be pasted, and what was refused."""
    rows = session.rows("tune").all()
    proposals = tune.proposals(rows)
    if not proposals:
        yield "Not run."
        return
    emulated = session.machine.is_emulated
    if emulated:
        yield "Ranked by executed instructions, which rehearses the search: paste nothing of it."
    else:
        yield "For `kernels/shared/tuning.py`; edge kernels follow a rule there, to be adapted."
    text = tune.source(proposals, facts["hardware"])
    (session.out / "tuning.py.txt").write_text(text + "\n", encoding="utf-8")
    yield from ("", "```python", *text.splitlines(), "```", "")
    unit = "instructions" if emulated else "time"
    yield from table(
        ("setting", "present", "best", f"{unit} of the present / of the best"),
        [
            (str(p.setting), str(tuple(p.present)), str(tuple(p.best)), f"{p.gain:.2f}")
            for p in proposals
        ],
    )
    yield ""
    yield from failures(session, "tune")


def documentation_lines(session: Session) -> Iterator[str]:
    """Kernels that have run, and what the documentation is to be given."""
    rows = [row for row in session.rows("parity").all() if "errors" in row]
    right = sorted({k for row in rows if parity.is_right(row) for k in row["kernels"]})
    wrong = sorted({k for row in rows if not parity.is_right(row) for k in row["kernels"]})
    where = "the emulator" if session.machine.is_emulated else "this GPU"
    yield f"- Kernels that agree with float64 on {where}: {', '.join(right) or 'none'}."
    yield f"- Kernels in a problem that is wrong: {', '.join(wrong) or 'none'}."
    if session.machine.is_emulated:
        yield "- This is a rehearsal: the documentation stays as it is."


def failures(session: Session, step: str, word: str = "FAILED") -> Iterator[str]:
    """The jobs of a step that ended with an error."""
    for job, row in session.rows(step).ended().items():
        if "error" in row:
            yield f"- {word}: {job}: {one_line(row['error'])}"


def number(value: float | None) -> str:
    """Three digits, or nothing."""
    return "" if value is None else f"{value:.3g}"


def one_line(text: str) -> str:
    """Text without line breaks, at most 300 characters."""
    return " ".join(text.split())[:300]
