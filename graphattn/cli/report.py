"""One HTML page with figures and tables, which needs no other file: the report of a command."""

from __future__ import annotations

import base64
import io
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined

import graphattn
from graphattn.cli.tables import Cells

if TYPE_CHECKING:
    from matplotlib import figure


class Figure(NamedTuple):
    """A picture of a report: a matplotlib figure, or the PNG file it has been saved to."""

    title: str
    caption: str
    figure: figure.Figure | Path


def write_report(
    path: Path,
    title: str,
    *,
    intro: str = "",
    figures: Sequence[Figure] = (),
    tables: Sequence[Cells] = (),
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Write the page and return its path.

    Pictures are part of the page; everything else is text, whatever characters it holds. It follows
    the reader's light or dark mode, with the pictures on white. The footer says what made it:
    versions, then `facts`, then the date.
    """
    made_by = {
        "graphattn": graphattn.__version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        **(facts or {}),
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }
    pictures = [
        {"title": f.title, "caption": f.caption, "data": base64.b64encode(_png(f.figure)).decode()}
        for f in figures
    ]
    # Titles, captions and cells may come from a user's file: everything is escaped.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    html = page.from_string(source).render(
        title=title, intro=intro, figures=pictures, tables=tables, facts=made_by
    )
    path.write_text(html, encoding="utf-8")
    return path


def _png(drawn: figure.Figure | Path) -> bytes:
    if isinstance(drawn, Path):
        return drawn.read_bytes()
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return buffer.getvalue()
