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
    """Add a line; it is on its way to the disk when this returns, and there after :func:`sync`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))


def read_rows(path: Path) -> list[Row]:
    """All rows; a last line that a killed process left unfinished is not one of them.

    Raises:
        ValueError: a line that is no JSON object with a step; the message has its number.
    """
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
    """Cut off what was logged after a step: training will come by there again."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    replace_text(path, "".join(map(_line, rows)))


def replace_text(path: Path, text: str) -> None:
    """Write a file aside, bring it to the disk and move it into place: whole, or as it was."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """:func:`replace_text` for what writes a file itself."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        sync(aside)
        mask = os.umask(0)
        os.umask(mask)
        aside.chmod(0o666 & ~mask)  # as open() would have made it
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(*paths: Path) -> None:
    """Bring files and folders to the disk: what is renamed afterwards is there in full."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def finite(numbers: Iterable[tuple[str, Any]]) -> Row:
    """Numbers as JSON knows them: one that is not finite is None."""
    return {name: _finite(value) for name, value in numbers}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return finite(value.items())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: Row) -> str:
    return json.dumps(finite(row.items()), allow_nan=False) + "\n"
