"""The files a command is asked to write: refused before the work, not after it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from graphattn.graphs.arguments import as_choice


def check_output(option: str, path: Path | None, endings: tuple[str, ...] = ()) -> None:
    """ValueError where there is no folder for `path`, or its ending is none of `endings`."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent}")
    if endings:
        as_choice(f"{option}: the ending", path.suffix, endings)


def check_figures_can_be_drawn() -> None:
    """ImportError that names the extra, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'graphattn[plots]'") from None


def write_json(path: Path, record: dict[str, Any]) -> None:
    """`record` as indented JSON; what JSON has no number for (infinity, NaN) becomes null."""
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
