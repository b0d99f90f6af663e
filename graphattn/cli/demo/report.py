"""Write the report of the demo, one HTML page that needs no other file."""

from __future__ import annotations

from pathlib import Path

from graphattn.cli import report
from graphattn.cli.demo.figures import draw_figures
from graphattn.cli.demo.sample import Sample
from graphattn.cli.demo.training import Training
from graphattn.plain_tables import Cells

try:
    import matplotlib  # noqa: F401
except ImportError:
    raise ImportError(
        "figures need matplotlib: install it with pip install 'graphattn[plots]'"
    ) from None


def write_report(
    sample: Sample, tables: list[Cells], training: Training | None, folder: Path, seed: int
) -> Path:
    """Draw the figures, and write report.html into `folder`."""
    return report.write_report(
        folder / "report.html",
        sample.title,
        intro="Tokens are nodes, and every mechanism is message passing along explicit edges: "
        "build a token graph, apply a layer to it.",
        figures=draw_figures(sample, training, seed),
        tables=tables,
        facts={"seed": seed},
    )
