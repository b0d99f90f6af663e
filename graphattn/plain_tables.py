"""Tables for the terminal, and their cells for the report."""

from __future__ import annotations

from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text


def plain_table(title: str) -> Table:
    """An empty table that leaves most of 80 columns to its cells."""
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,  # one blank between columns comes with the box; it all fits 80 columns
    )


def number_columns(table: Table, *names: str) -> None:
    """Add columns of numbers, which stand at the right edge and are never broken into lines."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def short(number: float) -> str:
    """Three digits, and no exponent where commas are shorter."""
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """``1 step``, ``1,000 steps``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


class Cells(NamedTuple):
    """Cells of a table, without markup: the report lays it out anew."""

    title: str
    caption: str
    header: list[str]
    rows: list[list[str]]
    is_number: list[bool]  # per column: set flush right


def cells_of(table: Table) -> Cells:
    """The text of every cell of a rich table."""

    def text(markup: object) -> str:
        return Text.from_markup(str(markup)).plain

    columns = [[text(cell) for cell in column.cells] for column in table.columns]
    return Cells(
        title=text(table.title),
        caption=text(table.caption or ""),
        header=[" ".join(text(column.header).split()) for column in table.columns],
        rows=[list(row) for row in zip(*columns, strict=True)],
        is_number=[column.justify == "right" for column in table.columns],
    )
