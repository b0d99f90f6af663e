"""Reading CSV and TSV files as records: texts with a class, or the rows of a table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphattn.data.corpus.encoding import text_tokens
from graphattn.data.corpus.sources import Source
from graphattn.data.corpus.streams import text_lines
from graphattn.data.corpus.writer import CorpusWriter
from graphattn.data.files import FileFormatError
from graphattn.data.tables.rows import number, read_rows
from graphattn.data.tables.tokenizer import TableTokenizer, line_of
from graphattn.data.text import CharacterTokenizer

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ColumnRoles:
    """Roles of the columns of a file: one has the label, and one the text, or all have features.

    Attributes:
        names: of all columns.
        label: the place of the label; None if there is only a text.
        text: the place of the text; None for a table.
    """

    names: tuple[str, ...]
    label: int | None
    text: int | None

    @property
    def features(self) -> list[int]:
        """The places of all columns but the label."""
        return [place for place in range(len(self.names)) if place != self.label]


def columns_of(source: Source, kind: str) -> ColumnRoles:
    """Find out what the columns are: of texts or of a table, if `kind` is "auto"."""
    path = source.files[0][0]
    names, _ = _rows(path)
    lower = [name.lower() for name in names]
    for name in ("label", "text"):
        if lower.count(name) > 1:
            raise FileFormatError(
                path, f"must have one column {name!r}, but it has {lower.count(name)}"
            )
    _check_separator(path, names)
    label = lower.index("label") if "label" in lower else len(names) - 1
    others = [place for place in range(len(names)) if place != label]
    text = lower.index("text") if "text" in lower and lower.index("text") != label else None
    if len(names) == 1:
        if kind == "table":
            raise FileFormatError(
                path,
                "has one column, but a table has features and a label: cells must be separated by "
                "commas (.csv) or by tabs (.tsv)",
            )
        return ColumnRoles(tuple(names), None, 0)
    if kind == "table":
        return ColumnRoles(tuple(names), label, None)
    if text is None and len(others) == 1:
        text = others[0]
    if text is None and kind == "text":
        raise FileFormatError(
            path,
            "must have a column 'text', or only two columns, to be read as texts, but it has "
            f"{', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}",
        )
    return ColumnRoles(tuple(names), label, text)


def _check_separator(path: Path, names: list[str]) -> None:
    """Raise an error if the cells of a file of one column are separated by something else."""
    if len(names) > 1:
        return
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
        parts = [part.strip().strip('"').lower() for part in names[0].split(separator)]
        are_names = separator != "," and all(map(_NAME.fullmatch, parts))
        if len(parts) > 1 and (are_names or {"label", "text"} & {*parts}):
            raise FileFormatError(
                path,
                f"has one column, {names[0]!r}, whose cells seem to be separated by {name}: they "
                "must be separated by commas (.csv) or by tabs (.tsv)",
            )


def characters_of_rows(source: Source, columns: ColumnRoles) -> CharacterTokenizer:
    """Make a tokenizer of all characters in the texts, which are read once for this."""
    assert columns.text is not None
    letters: set[str] = set()
    for _, row in _all_rows(source, columns):
        letters.update(row[columns.text])
    return CharacterTokenizer("".join(sorted(letters)))


def tokenizer_of_table(source: Source, columns: ColumnRoles) -> TableTokenizer:
    """Fit a tokenizer to all rows."""
    rows = ([row[c] for c in columns.features] for _, row in _all_rows(source, columns))
    return TableTokenizer.fit([columns.names[c] for c in columns.features], rows)


def read_csvs(source: Source, writer: CorpusWriter, tokenizer: Any) -> dict[str, Any]:
    """Write every row as a record, with the number of its class.

    A row of a table is named by its cells, so that equal rows stay together in a split.
    """
    columns = columns_of(source, "table" if isinstance(tokenizer, TableTokenizer) else "text")
    features = [columns.names[c] for c in columns.features]
    if isinstance(tokenizer, TableTokenizer) and list(tokenizer.names) != features:
        raise FileFormatError(
            source.files[0][0],
            f"must have the columns of the tokenizer ({', '.join(tokenizer.names)}) and a label, "
            f"but it has {', '.join(columns.names)}",
        )
    place, classes, num_bytes = columns.label, [], 0
    if place is not None:
        seen = {row[place].strip() for _, row in _all_rows(source, columns)}
        classes = list(source.classes or _in_order(seen))
        name = columns.names[place]
        if name in classes and number(name) is None:  # not a number for want of a name
            raise FileFormatError(
                source.files[0][0],
                f"has {name!r} as a label and in its first row, which is read as the names of the "
                "columns: begin with a row of names, such as text,label",
            )
    numbers = {name: index for index, name in enumerate(classes)}
    for count, (path, row) in enumerate(_all_rows(source, columns)):
        label = None
        if place is not None:
            cell = row[place].strip()
            if cell in ("", "?") or cell not in numbers:
                known = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
                reason = f"row with the label {cell!r}, which is none of the classes {known}"
                if cell in ("", "?"):
                    reason = f"row without a label in column {columns.names[place]!r}"
                raise FileFormatError(path, f"{reason}: {_shown(row)}")
            label = numbers[cell]
        if columns.text is None:
            cells = [row[c] for c in columns.features]
            writer.extend(tokenizer.encode_cells(cells))
            name = line_of(cells)
            num_bytes += len(name.encode())
        else:
            text, name = row[columns.text], f"{path.name}[{count}]"
            if not text:
                raise FileFormatError(path, f"row without a text: {_shown(row)}")
            for tokens in text_tokens(path, [text], tokenizer):
                writer.extend(tokens)
            num_bytes += len(text.encode())
        writer.end(name, label=label)
    return {"num_bytes": num_bytes, "classes": classes}


def _in_order(names: set[str]) -> list[str]:
    """Sort the names of classes, as numbers if all of them are numbers."""
    are_numbers = all(number(name) is not None for name in names)
    return sorted(names, key=lambda name: ((number(name) or 0.0) if are_numbers else 0.0, name))


def _rows(path: Path) -> tuple[list[str], Iterator[list[str]]]:
    is_tabs = path.name.lower().removesuffix(".gz").endswith(".tsv")
    return read_rows(path, text_lines(path), tabs=is_tabs)


def _all_rows(source: Source, columns: ColumnRoles) -> Iterator[tuple[Path, list[str]]]:
    """Yield the rows of all files, which must have the same columns."""
    for path, _ in source.files:
        names, rows = _rows(path)
        if tuple(names) != columns.names:
            raise FileFormatError(
                path,
                f"has the columns {', '.join(names)}, but {source.files[0][0]} has "
                f"{', '.join(columns.names)}: all files must have the same columns",
            )
        yield from zip(itertools.repeat(path), rows, strict=False)


def _shown(row: list[str]) -> str:
    line = line_of(row)
    return line if len(line) <= 60 else f"{line[:60]}..."
