"""The log of a run, `log.jsonl`: a JSON object per line, in the order of the steps."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # "step", "split", and numbers by name


def append_row(path: Path, row: Row) -> None:
    """Append a line; after :func:`sync` it is on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))


def read_rows(path: Path) -> list[Row]:
    """Read all rows, without an unfinished last line of a killed process."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, _, _ = text.rpartition("\n")
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: must be a JSON object with a step")
        rows.append(row)
    return rows


def keep_rows(path: Path, step: int) -> None:
    """Remove rows after a step, because training will repeat those steps."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    replace_text(path, "".join(map(_line, rows)))


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file completely or not at all, also if the process is killed."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Replace a file as :func:`replace_text` does, with a function that writes it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        sync(aside)
        mask = os.umask(0)
        os.umask(mask)
        aside.chmod(0o666 & ~mask)  # the mode that open() would have given it
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(*paths: Path) -> None:
    """Flush files and folders to the disk, so that they are complete before a later rename."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def finite(numbers: Iterable[tuple[str, Any]]) -> Row:
    """Convert numbers for JSON: NaN and infinity become None."""
    return {name: _finite(value) for name, value in numbers}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return finite(value.items())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: Row) -> str:
    return json.dumps(finite(row.items()), allow_nan=False) + "\n"
