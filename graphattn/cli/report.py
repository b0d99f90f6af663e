"""Write the report of a command: one HTML page with figures and tables, and no other file."""

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

CSS_PIXELS = 96  # pixels per inch


class Figure(NamedTuple):
    """A picture of a report: one matplotlib figure, or small ones with a name each, side by side.

    The page shows figures at their own size, and smaller only where the screen is narrower.
    """

    title: str
    caption: str
    figure: figure.Figure | Mapping[str, figure.Figure]
    alt: str = ""  # description for readers who cannot see it; the title if this is empty


class ReportSample(NamedTuple):
    """Text that is shown unchanged, line by line."""

    title: str
    text: str
    caption: str = ""


class Notes(NamedTuple):
    """Lines that are highlighted."""

    lines: Sequence[str]


class ReportSection(NamedTuple):
    """Parts under a heading; strings are paragraphs, and a `folded` section can be opened."""

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

    Figures are part of the page; everything else is escaped text. The page follows the reader's
    light or dark mode, with figures on white. If there are several sections, there is a table of
    contents; figures are side by side where there is room. The footer contains versions, then
    `facts`, then the date.
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
    # Names of files and JSON can contain lone surrogates, which cannot be encoded.
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def _section(section: ReportSection) -> dict[str, Any]:
    return {
        "title": section.title,
        "parts": list(_parts(section.parts)),
        "folded": section.folded,
    }


def _parts(parts: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """Yield the template's variables for every part; successive figures stay together."""
    for kind, group in groupby(parts, type):
        if kind is Figure:
            yield "figures", [_picture(one) for one in group]
            continue
        for part in group:
            yield kind.__name__.lower(), _section(part) if kind is ReportSection else part


def _picture(drawn: Figure) -> dict[str, Any]:
    panels = drawn.figure if isinstance(drawn.figure, Mapping) else {"": drawn.figure}
    return {
        "title": drawn.title,
        "caption": drawn.caption,
        "panels": [
            {
                "name": name,
                "alt": name or drawn.alt or drawn.title,
                "width": round(panel.get_figwidth() * CSS_PIXELS),
                "height": round(panel.get_figheight() * CSS_PIXELS),
                "data": base64.b64encode(_png(panel)).decode(),
            }
            for name, panel in panels.items()
        ],
    }


def _png(drawn: figure.Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of names in any script
        drawn.savefig(buffer, format="png")
    return buffer.getvalue()
