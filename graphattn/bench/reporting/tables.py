"""Tables of a run: the rows of a case, the targets, and a comparison with an older record."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.table import Table

from graphattn.bench.cases.case import FORWARD, BenchmarkCase, degree_label
from graphattn.bench.cases.mixers import parts_notes
from graphattn.bench.reporting.record import Quantity, Record, Row, Slope, Verdict
from graphattn.plain_tables import number_columns, plain_table, short

MEGABYTE = 1e6
BUSY = 0.8  # share of the best speed of the machine; a note appears if it is lower
ROW_HEADER = ("time", "spread", "ratio", "memory", "of bound", "error")
TARGET_HEADER = ("measured", "spread", "target", "")


def case_table(
    case: BenchmarkCase, rows: list[Row], slopes: list[Slope], size_name: str, device: str
) -> Table:
    """Build the table of one case: all contenders, first of one pass, then of the next."""
    size = ", ".join(f"{name} {value:,}" for name, value in case.size(size_name, device).items())
    table = plain_table(f"{case.title} ({size})")
    table.add_column("", min_width=20)
    number_columns(table, *ROW_HEADER)
    passes = ""
    for row in rows:
        if row.passes != passes and case.backward:
            passes = row.passes
            table.add_row(f"[bold]{passes}[/bold]")
        table.add_row(row.contender, *row_cells(row))
    lines = [slope_text(slope) for slope in slopes if slope.case == case.name]
    table.caption = "\n".join(lines + list(notes(rows)))
    return table


def notes(rows: list[Row]) -> Iterable[str]:
    """Yield what stands under a table: speeds, shares of parts, crossings, threads, launches."""
    for passes in dict.fromkeys(row.passes for row in rows if "images" in row.size):
        of_pass = [row for row in rows if row.passes == passes]
        yield f"{passes}, images/s: {_speeds(of_pass, 'images')}"
    if written := [row for row in rows if "new_tokens" in row.size]:
        yield f"tokens/s, the prompts' reading included: {_speeds(written, 'texts', 'new_tokens')}"
    yield from parts_notes(rows)
    yield from crossings(rows)
    yield from threads_and_speed(rows)
    if slow := dict.fromkeys(row.contender for row in rows if row.captured is False):
        yield f"Launched one by one, so with the time of the host: {', '.join(slow)}"


def _speeds(rows: list[Row], *sizes: str) -> str:
    """Name the contenders, each with how much of the product of these sizes it does in a second."""
    return ", ".join(
        f"{row.contender} {math.prod(row.size[name] for name in sizes) / row.median:,.0f}"
        for row in rows
    )


def threads_and_speed(rows: list[Row]) -> Iterable[str]:
    """Yield who is fastest with one thread, and when the CPU was busy."""
    has_more = any((row.threads or 1) > 1 for row in rows)
    for passes in dict.fromkeys(row.passes for row in rows):
        of_pass = [row for row in rows if row.passes == passes]
        if has_more and (alone := [row.contender for row in of_pass if row.threads == 1]):
            yield f"{passes}: fastest with one thread: {', '.join(alone)}"
        speed = min((row.speed for row in of_pass if row.speed is not None), default=1.0)
        if speed < BUSY:
            yield (
                f"{passes}: the machine was busy (a product of matrices at {speed:.0%} of its "
                "best speed): read ratios, not times"
            )


def crossings(rows: list[Row]) -> Iterable[str]:
    """Yield the degree above which a contender is faster, between the measured ones.

    There the ratio of times falls below 1; it is interpolated as a power of the degree.
    """
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        degree = row.size.get("degree")
        if degree is not None and row.ratio is not None:
            name = row.contender.removesuffix(degree_label("", degree))
            curves.setdefault((row.passes, name), []).append((degree, row.ratio))
    for (passes, name), curve in curves.items():
        if len(curve) == 1:
            continue
        slower = [k for k, (_, ratio) in enumerate(curve) if ratio > 1]
        if not slower:
            yield f"{passes}: {name} is faster at every degree"
        elif slower[-1] == len(curve) - 1:
            yield f"{passes}: {name} is slower even at degree {curve[-1][0]:,}"
        else:
            (d0, r0), (d1, r1) = curve[slower[-1] : slower[-1] + 2]
            degree = d0 * (d1 / d0) ** (math.log(r0) / math.log(r0 / r1))
            share = degree / rows[0].size["tokens"]
            yield f"{passes}: {name} is faster from degree {degree:,.0f} on ({share:.1%} of all)"


def row_cells(row: Row) -> list[str]:
    return [
        f"{1000 * row.median:,.4g} ms",
        f"±{row.spread:.0%}",
        times(row.ratio),
        "" if row.peak is None else f"{row.peak / MEGABYTE:,.0f} MB",
        "" if row.share_of_bound is None else f"{row.share_of_bound:.1%}",
        "" if row.error is None else f"{row.error:.0e}",
    ]


def slope_text(slope: Slope) -> str:
    """Format an exponent, for example ``forward: time ~ tokens^1.02``."""
    return f"{slope.passes}: {slope.quantity} ~ tokens^{slope.exponent:.2f}"


def times(ratio: float | None) -> str:
    """Format a ratio; the text is empty if one of the two times is missing."""
    return "" if ratio is None else f"{short(ratio)}x" if ratio < 0.01 else f"{ratio:.2f}x"


def target_table(targets: list[Verdict], size_name: str) -> Table:
    table = plain_table("Targets")
    table.add_column("", min_width=30)
    number_columns(table, *TARGET_HEADER)
    case = ""
    for target in targets:
        if target.case != case:
            case = target.case
            table.add_row(f"[bold]{case}[/bold]")
        table.add_row(target_text(target), *target_cells(target))
    if size_name != "paper":
        table.caption = f"They are meant for --size paper; these are the numbers at {size_name}."
    return table


def target_text(target: Verdict) -> str:
    """Format the subject of a target, for example ``time: graphattn / SDPA``."""
    text = f"{target.quantity}: {target.of}"
    return text if target.passes == FORWARD else f"{target.passes}, {text}"


def target_cells(target: Verdict) -> list[str]:
    bound = target.at_most if target.at_most is not None else target.at_least
    sign = "≤" if target.at_most is not None else "≥"
    measured = "not measured"
    if target.measured is not None:
        measured = amount(target.measured, target.quantity, target.is_ratio)
    return [
        measured,
        "" if target.spread is None else f"±{target.spread:.0%}",
        f"{sign} {amount(bound or 0.0, target.quantity, target.is_ratio)}",
        {None: "", True: "met", False: "missed"}[target.met],
    ]


def amount(value: float, quantity: Quantity, is_ratio: bool) -> str:
    if is_ratio:
        return f"{short(value)}x"
    if quantity == "time":
        return f"{short(1000 * value)} ms"
    if quantity == "share of bound":
        return f"{value:.0%}"
    return f"{short(value / MEGABYTE)} MB" if quantity == "memory" else f"{value:.0e}"


def comparison(older: Record, rows: list[Row]) -> Table:
    """Build a table of ratios (valid on a busy machine) and times, then and now."""
    facts = older.provenance
    before = {key_of(row): row for row in older.rows}
    table = plain_table(f"Ratios, compared with {facts['date']} ({facts['commit']})")
    table.add_column("case", min_width=20)
    number_columns(table, "then", "now", "time then", "time now")
    for row in rows:
        old = before.get(key_of(row))
        if old is not None:
            table.add_row(
                f"{row.case}, {row.passes}: {row.contender}",
                times(old.ratio),
                times(row.ratio),
                f"{1000 * old.median:,.4g} ms",
                f"{1000 * row.median:,.4g} ms",
            )
    return table


def key_of(row: Row) -> tuple[object, ...]:
    return row.case, row.passes, row.contender, tuple(row.size.items())
