"""Format results as tables and as a record."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from graphattn.cli.verify.claims import Outcome, Shown
from graphattn.plain_tables import number_columns, plain_table, short

HOLDS, FAILED = "[green]holds[/green]", "[red]FAILED[/red]"


def claim_table(outcomes: list[Outcome]) -> Table:
    table = plain_table("Claims, each with the case nearest to a violation")
    table.add_column("", min_width=24)
    number_columns(table, "cases", "room", "error", "allowed")
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            f"{escape(outcome.claim.name)} [dim]({escape(outcome.claim.source)})[/dim]",
            f"{len(outcome.cases):,}",
            *margin_cells(outcome),
            HOLDS if outcome.holds else FAILED,
        )
    table.caption = (
        "Room: distance from the bound of an inequality in its tightest case, relative to the "
        "quantity (allowed: rounding error below 0). Error: relative error of an equation in the "
        "case nearest to the allowed error."
    )
    return table


def margin_cells(outcome: Outcome) -> list[str]:
    """Return the cells of the tightest case: room, error and the allowed error."""
    tightest = outcome.tightest
    if tightest is None:
        return ["", "", ""]
    allowed = f"{tightest.slack:.0e}" if tightest.slack else ""
    if outcome.claim.kind == "inequality":
        return [f"{tightest.margin:.1e}", "", allowed and f"-{allowed}"]
    return ["", f"{abs(tightest.margin):.1e}", allowed or "0"]


def detail_lines(outcomes: list[Outcome], shown: list[Shown]) -> list[str]:
    lines = []
    for outcome in outcomes:
        if not outcome.holds:
            what = outcome.error or "no case"
            if outcome.failures and outcome.tightest is not None:
                tightest = outcome.tightest
                what = f"{len(outcome.failures):,} cases, {tightest.name}: {tightest.margin:.3g}"
            lines.append(f"{outcome.claim.name}: {what}")
    for item in shown:
        if not item.holds:
            lines.append(f"{item.erratum.source}: {item.error or item.exhibit}")
    return lines


def errata_table(shown: list[Shown]) -> Table:
    table = plain_table(
        "Errata of the papers, and plausible false statements, with counterexamples"
    )
    table.add_column("", no_wrap=True)
    table.add_column("printed or plausible; correct", min_width=24)
    table.add_column("measured", min_width=20)
    table.add_column("", no_wrap=True)
    for item in shown:
        numbers = {} if item.exhibit is None else item.exhibit.numbers
        table.add_row(
            escape(item.erratum.source),
            escape(f"{item.erratum.printed}; {item.erratum.right}"),
            escape("\n".join(f"{name}: {number(value)}" for name, value in numbers.items())),
            "[green]shown[/green]" if item.holds else FAILED,
        )
    return table


def number(value: float) -> str:
    """Format four digits; rounding errors next to 1 are shown as 0."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    return f"{value:.4g}" if abs(value) < 100 else short(value)


def record(outcomes: list[Outcome], shown: list[Shown]) -> dict[str, Any]:
    return {
        "claims": [
            {
                "name": outcome.claim.name,
                "source": outcome.claim.source,
                "statement": outcome.claim.statement,
                "kind": outcome.claim.kind,
                "cases": len(outcome.cases),
                "holds": outcome.holds,
                "tightest": None if outcome.tightest is None else outcome.tightest._asdict(),
                "failures": len(outcome.failures),
                "error": outcome.error,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ],
        "errata": [
            {
                "source": item.erratum.source,
                "printed": item.erratum.printed,
                "right": item.erratum.right,
                "shown": item.holds,
                "exhibit": None if item.exhibit is None else item.exhibit._asdict(),
                "error": item.error,
            }
            for item in shown
        ],
    }
