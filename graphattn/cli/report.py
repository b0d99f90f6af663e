"""One HTML page with figures and tables, which needs no other file: the report of a command."""

from __future__ import annotations

import base64
import io
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined

import graphattn
from graphattn.plain_tables import Cells

if TYPE_CHECKING:
    from matplotlib import figure

CSS_PIXELS = 96  # of an inch


class Figure(NamedTuple):
    """A picture of a report: a matplotlib figure, or the PNG file it has been saved to."""

    title: str
    caption: str
    figure: figure.Figure | Path
    alt: str = ""  # what it shows, for who cannot see it; the title where this is empty


class ReportSample(NamedTuple):
    """Text as it came, line by line."""

    title: str
    text: str
    caption: str = ""


class Notes(NamedTuple):
    """Lines that must not be overlooked."""

    lines: Sequence[str]


class ReportSection(NamedTuple):
    """Parts under a heading of their own; strings are paragraphs, and what is folded opens."""

    title: str
    parts: Sequence[str | Notes | Figure | ReportSample | Cells | ReportSection]
    folded: bool = False


def write_report(
    path: Path,
    title: str,
    *,
    intro: str = "",
    figures: Sequence[Figure] = (),
    tables: Sequence[Cells] = (),
    sections: Sequence[ReportSection] = (),
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Write the page and return its path.

    Pictures are part of the page; everything else is text, whatever characters it holds. It follows
    the reader's light or dark mode, with the pictures on white. Sections come with a list of
    contents where there are several; small figures stand side by side in them. The footer says what
    made it: versions, then `facts`, then the date.
    """
    made_by = {
        "graphattn": graphattn.__version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        **(facts or {}),
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }
    # Titles, captions and cells may come from a user's file: everything is escaped.
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    html = page.from_string(source).render(
        title=title,
        intro=intro,
        figures=[_picture(figure) for figure in figures],
        tables=tables,
        sections=[_section(section) for section in sections],
        facts=made_by,
    )
    # Names of files, and JSON, may hold halves of characters, which no encoding has.
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def _section(section: ReportSection) -> dict[str, Any]:
    return {
        "title": section.title,
        "parts": list(_parts(section.parts)),
        "folded": section.folded,
    }


def _parts(parts: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """Return the template's variables for every part; successive figures stay together."""
    for kind, group in groupby(parts, type):
        if kind is Figure:
            yield "figures", [_picture(one) for one in group]
            continue
        for part in group:
            yield kind.__name__.lower(), _section(part) if kind is ReportSection else part


def _picture(drawn: Figure) -> dict[str, Any]:
    png = _png(drawn.figure)
    # The header of a PNG: its width and height stand at a fixed place.
    width, height = (int.from_bytes(png[k : k + 4], "big") for k in (16, 20))
    if not isinstance(drawn.figure, Path):
        ratio = height / width
        width = round(drawn.figure.get_figwidth() * CSS_PIXELS)
        height = round(width * ratio)
    return {
        "title": drawn.title,
        "caption": drawn.caption,
        "alt": drawn.alt or drawn.title,
        "width": width,
        "height": height,
        "data": base64.b64encode(png).decode(),
    }


def _png(drawn: figure.Figure | Path) -> bytes:
    if isinstance(drawn, Path):
        return drawn.read_bytes()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of names in any script
        drawn.savefig(buffer, format="png")
    return buffer.getvalue()
