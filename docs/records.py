"""Recorded runs of `graphattn bench`, docs/benchmarks/*.json, as Markdown; figures.py draws them.

Nothing is measured here: to record anew, `graphattn bench --size paper --json FILE` and commit it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from graphattn.bench.cases import mixers as mixer_cases
from graphattn.bench.reporting import tables
from graphattn.bench.reporting.record import Record, Row, read

FOLDER = Path(__file__).resolve().parent / "benchmarks"
FILES = [*sorted(FOLDER.glob("*.json")), *sorted(FOLDER.glob("visits/*.json"))]  # GPUs have visits


def recorded() -> dict[str, Record]:
    """Every run by its file name, newest first."""
    found = {path.name: read(path) for path in FILES}
    return dict(sorted(found.items(), key=lambda item: item[1].provenance["date"], reverse=True))


def newest_rows() -> list[Row]:
    """The rows of all runs; of those that several runs have, the newest.

    Ratios are those of the size that the targets are for; a line over lengths may be of any size.
    """
    rows = [
        row
        for run in recorded().values()
        for row in run.rows
        if run.provenance["size"] == "paper" or row.case.startswith("scaling")
    ]
    return list({tables.key_of(row): row for row in reversed(rows)}.values())[::-1]


def markdown() -> str:
    """One section per run: where it comes from, its targets, its rows, what was missing."""
    return "\n".join(line for name, record in recorded().items() for line in section(name, record))


def section(name: str, record: Record) -> Iterable[str]:
    """The lines of one run."""
    facts = record.provenance
    yield f"## {name.removesuffix('.json')}\n"
    yield ", ".join(f"{key} {value}" for key, value in facts.items()) + f" (`{name}`).\n"
    if record.targets:
        yield "Targets:\n"
        yield from table(
            ["case", "", *tables.TARGET_HEADER],
            [[t.case, tables.target_text(t), *tables.target_cells(t)] for t in record.targets],
        )
    for passes, lines in mixer_cases.by_pass(record.rows):
        yield f"Whole models, {passes}:\n"
        yield from table(["mixer", "tokens", *mixer_cases.HEADER], lines)
    for case, group in groupby(record.rows, key=lambda row: row.case):
        rows = list(group)
        yield f"**{case}**: {size_of(rows)}\n"
        yield from table(
            ["pass", "contender", *tables.ROW_HEADER],
            [[row.passes, row.contender, *tables.row_cells(row)] for row in rows],
        )
        yield from (f"{note}\n" for note in tables.notes(rows))
    if record.slopes:
        yield "Fitted over all lengths:\n"
        for slope in record.slopes:
            yield f"- {slope.case}, {tables.slope_text(slope)}"
        yield ""
    for line in record.missing:
        yield f"- missing: {line}"
    yield ""


def size_of(rows: list[Row]) -> str:
    """What all rows of a case have in common: the lengths of a scaling case differ."""
    same = set.intersection(*(set(row.size.items()) for row in rows))
    return ", ".join(f"{name} {n:,}" for name, n in rows[0].size.items() if (name, n) in same)


def table(header: list[str], rows: list[list[str]]) -> Iterable[str]:
    """A Markdown table; numbers, from the third column on, flush right."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join(["---"] * 2 + ["---:"] * (len(header) - 2)) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""
