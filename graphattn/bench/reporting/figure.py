"""A run of the benchmark as one figure."""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.figure import Figure

from graphattn.bench.reporting.record import OURS, Record
from graphattn.plot import benchmark_ratios, benchmark_scaling
from graphattn.plot.drawing.style import INK


def draw(record: Record) -> Figure:
    """Draw ratios above, growth below; raise a ValueError if the record has neither."""
    ratios = [asdict(row) for row in record.rows if row.ratio is not None and row.contender != OURS]
    by_length = {slope.case for slope in record.slopes}
    lengths = [asdict(row) for row in record.rows if row.case in by_length]
    lines = len(
        {(row["case"], row["contender"]) for row in ratios} | {(r["case"], "") for r in ratios}
    )
    heights = [0.6 + 0.21 * lines] * bool(ratios) + [4.2] * bool(lengths)
    if not heights:
        raise ValueError(
            "--plot needs a case with a peer or with several lengths, but nothing of that kind "
            "was measured"
        )
    figure = Figure(figsize=(9, sum(heights) + 0.4), dpi=144)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    panels = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if ratios:
        benchmark_ratios(ratios, ax=panels[0].subplots())
    if lengths:
        left, right = panels[-1].subplots(1, 2)
        benchmark_scaling(lengths, quantity="time", ax=left)
        benchmark_scaling(lengths, quantity="memory", ax=right)
    facts = record.provenance
    figure.suptitle(
        f"graphattn {facts['graphattn']} ({facts['commit']}), {facts['hardware']}, "
        f"torch {facts['torch']}, {facts['date']}",
        fontsize=8,
        color=INK,
    )
    return figure
