"""The rows of a CSV or TSV file, and the names of its columns."""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Iterable, Iterator

from graphattn.data.files import FileFormatError

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
LONGEST_CELL = 2**31 - 1  # characters; a text may have more than the 2**17 of Python's csv


def read_rows(
    path: str | os.PathLike[str], lines: Iterable[str], *, tabs: bool = False
) -> tuple[list[str], Iterator[list[str]]]:
    r"""Return the names of the columns, and an iterator of the rows, which are read one by one.

    The first line has the names if none of its cells is a number and not all are missing, or if one
    of them is "label"; otherwise the names are numbers from 1. A first line with another number of
    cells than the second is left out if it has a number, as the counts in files of scikit-learn.

    Args:
        path: the file, for error messages.
        lines: its lines. Rows without any letter are skipped.
        tabs: whether cells are separated by tabs, without any quotes (TSV). Otherwise they are
            separated by commas, and a cell in double quotes may contain commas and line breaks.

    Raises:
        FileFormatError: if there are fewer than two rows, if a first line without numbers has
            another number of cells than the second, or, when it is read, a row has another number
            of cells.

    Example:
        >>> from graphattn.data.tables.rows import read_rows
        >>> names, rows = read_rows("some.csv", ["age,label\n", "63,1\n", "37,0\n"])
        >>> names, list(rows)
        (['age', 'label'], [['63', '1'], ['37', '0']])
    """
    rows = _parsed(path, lines, tabs)
    first, second = next(rows, None), next(rows, None)
    if first is None or second is None:
        raise FileFormatError(path, "must have at least two rows to be a table")
    width = len(second[1])
    names = [str(c + 1) for c in range(width)]
    body, cells = itertools.chain([second], rows), first[1]
    has_numbers = any(number(cell) is not None for cell in cells)
    if len(cells) == width:
        stripped = [cell.strip() for cell in cells]
        has_label = "label" in map(str.lower, stripped)
        if not has_label and (has_numbers or all(map(is_missing, cells))):
            body = itertools.chain([first], body)
        else:
            names = stripped
    elif not has_numbers:
        raise FileFormatError(
            path,
            f"row 1 has {len(cells)} columns ({', '.join(cells[:8])}), but row 2 has {width}: the "
            "first row must have the name of every column",
        )
    return names, _checked(path, body, width)


def _parsed(
    path: str | os.PathLike[str], lines: Iterable[str], tabs: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield rows that are not empty, with their numbers from 1."""
    if tabs:  # a sentence in a TSV file may begin with a quotation mark
        reader = csv.reader(iter(lines), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(iter(lines), strict=True)
    place = 0
    while True:
        # The limit of cells belongs to the whole process, so it is changed for this row alone.
        limit = csv.field_size_limit(LONGEST_CELL)
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"cannot be read as CSV: {error}"
            raise FileFormatError(path, reason, line=reader.line_num) from error
        finally:
            csv.field_size_limit(limit)
        if any(map(str.strip, row)):
            place += 1
            yield place, row


def _checked(
    path: str | os.PathLike[str], rows: Iterable[tuple[int, list[str]]], width: int
) -> Iterator[list[str]]:
    for place, row in rows:
        if len(row) != width:
            raise FileFormatError(
                path, f"row {place} has {len(row)} columns, but the rows before it have {width}"
            )
        yield row


def number(cell: str) -> float | None:
    """Return the finite number in a cell, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_missing(cell: str) -> bool:
    """Return whether a cell says that its value is not known."""
    return cell.strip().lower() in MISSING
