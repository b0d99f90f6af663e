"""Figures of the checks."""

from __future__ import annotations

from matplotlib.figure import Figure

import graphattn as ga
from graphattn.cli import report
from graphattn.cli.verify.claims import Outcome
from graphattn.plot.drawing.style import page_figure


def draw(outcomes: list[Outcome]) -> list[report.Figure]:
    return [
        report.Figure(
            "Window paths mix as w³ / N²",
            "The Fiedler value between the bounds of Remark 4.2. The upper bound is the better "
            "estimate, and at w = 1 it is the value itself.",
            fiedler_figures(),
        ),
        report.Figure(
            "Margins of all cases",
            "Every case of every claim is a mark. Blue: distance from the bound of an inequality, "
            "relative to the quantity. Green: relative error of an equation; the black mark is "
            "the allowed error. Exact agreement is at the left edge.",
            margin_figure(outcomes),
        ),
    ]


def fiedler_figures() -> dict[str, Figure]:
    """Draw the Fiedler value against the window, and against the number of tokens."""
    windows = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 199]
    over_windows, over_tokens = page_figure(2.8), page_figure(2.8)
    ga.plot.path_fiedler_values(400, windows, ax=over_windows.add_subplot())
    ga.plot.path_fiedler_values([2**k for k in range(4, 15)], 2, ax=over_tokens.add_subplot())
    return {"400 tokens": over_windows, "window 2": over_tokens}


def margin_figure(outcomes: list[Outcome]) -> Figure:
    with_cases = [outcome for outcome in outcomes if outcome.cases]
    inequalities = {
        # An error within the rounding error is not a violation.
        o.claim.name: [max(case.margin, 0.0) if case.holds else case.margin for case in o.cases]
        for o in with_cases
        if o.claim.kind == "inequality"
    }
    equations = {
        o.claim.name: ([abs(case.margin) for case in o.cases], max(case.slack for case in o.cases))
        for o in with_cases
        if o.claim.kind == "equation"
    }
    figure = page_figure(0.8 + 0.22 * len(with_cases))
    ga.plot.theorem_margins(inequalities, equations, ax=figure.add_subplot())
    return figure
