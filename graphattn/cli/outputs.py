"""Checks of the output files of a command, before the work starts, and JSON output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from graphattn.graphs.arguments import as_choice


def check_output(option: str, path: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Raise a ValueError if the folder of `path` does not exist, or its ending is not allowed."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} must be a file in an existing folder, but there is no folder {path.parent}"
        )
    if endings:
        as_choice(f"{option}: the ending", path.suffix, endings)


def check_figures_can_be_drawn() -> None:
    """Raise an ImportError that names the extra if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "figures need matplotlib: install it with pip install 'graphattn[plots]'"
        ) from None


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record` as indented JSON; infinity and NaN become null."""
    path.write_text(as_json(record), encoding="utf-8")


def as_json(record: dict[str, Any]) -> str:
    """Return the text that :func:`write_json` writes."""
    text = json.dumps(_without_infinities(record), indent=1, ensure_ascii=False, allow_nan=False)
    return text + "\n"


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
