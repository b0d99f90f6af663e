"""One HTML page with everything a demonstration showed, which needs no other file."""

from __future__ import annotations

import base64
import platform
from datetime import date
from importlib.resources import files
from pathlib import Path

import torch
from jinja2 import Environment, StrictUndefined

import graphattn
from graphattn.cli.demo.figures import draw_pictures
from graphattn.cli.demo.sample import Sample
from graphattn.cli.demo.training import Training
from graphattn.cli.tables import Cells

try:
    import matplotlib  # noqa: F401
except ImportError:
    raise ImportError("figures need matplotlib: pip install 'graphattn[plots]'") from None


def write_report(
    sample: Sample, tables: list[Cells], training: Training | None, folder: Path, seed: int
) -> Path:
    """Draw the pictures into `folder` and write report.html beside them."""
    pictures = [
        {
            "title": picture.title,
            "caption": picture.caption,
            "data": base64.b64encode(picture.path.read_bytes()).decode(),
        }
        for picture in draw_pictures(sample, training, folder, seed)
    ]
    facts = {
        "graphattn": graphattn.__version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "seed": seed,
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }
    # Names and headers come from the user's file: everything is escaped.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    html = page.from_string(source).render(
        title=sample.title, pictures=pictures, tables=tables, facts=facts
    )
    report = folder / "report.html"
    report.write_text(html, encoding="utf-8")
    return report
