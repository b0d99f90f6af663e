"""Read tables from CSV files, and find the columns that options name."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from graphattn.cli.demo.sample import printable
from graphattn.data import FileFormatError, read_text

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


def read_csv(file: Path) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns (numbers from 1, if the file has no names), and the rows."""
    try:
        rows = [row for row in csv.reader(io.StringIO(read_text(file))) if any(map(str.strip, row))]
    except csv.Error as error:
        raise FileFormatError(file, f"cannot be read as CSV: {error}") from error
    if len(rows) < 2:
        raise FileFormatError(file, "must have at least two rows to be a table")
    head, body = rows[0], rows[1:]
    width = len(body[0])
    for place, row in enumerate(body, start=2):
        if len(row) != width:
            raise FileFormatError(
                file, f"row {place} has {len(row)} columns, but the rows before it have {width}"
            )
    numbers = [str(c + 1) for c in range(width)]
    if len(head) != width:  # an extra first line, such as the counts in files of scikit-learn
        return numbers, body
    if all(is_missing(cell) or number(cell) is not None for cell in head):
        return numbers, rows
    if any(number(cell) is not None for cell in head):
        return numbers, rows  # the first line is a row of data that contains text
    return [cell.strip() for cell in head], body


def number(cell: str) -> float | None:
    """Return the finite number in a cell, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def is_missing(cell: str) -> bool:
    """Return whether a cell is empty or says that the value is missing."""
    return cell.strip().lower() in MISSING


def one_column(option: str, wanted: str, names: list[str]) -> int:
    """Find a column by name, or by number: 1 is the first, -1 the last."""
    if wanted in names:
        return names.index(wanted)
    try:
        place = int(wanted)
    except ValueError:
        place = 0
    if 1 <= abs(place) <= len(names):
        return place - 1 if place > 0 else len(names) + place
    known = ", ".join(map(printable, names[:8])) + (", ..." if len(names) > 8 else "")
    raise ValueError(
        f"{option} must be the name of a column ({known}) or its number, 1 to {len(names)} or -1 "
        f"for the last, got {printable(wanted)!r}"
    )


def some_columns(option: str, wanted: str, names: list[str]) -> list[int]:
    """Find several columns, separated by commas; a name with a comma must be in double quotes."""
    if wanted in names:
        return [names.index(wanted)]
    parts = next(csv.reader([wanted], skipinitialspace=True), [])
    columns = [one_column(option, part.strip(), names) for part in parts]
    if not columns:
        raise ValueError(f"{option} must name at least one column, got {printable(wanted)!r}")
    for place, column in enumerate(columns):
        if column in columns[:place]:
            raise ValueError(
                f"{option} must name each column only once, got {printable(parts[place])!r} twice"
            )
    return columns
