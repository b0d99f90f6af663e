"""A tokenizer of the rows of a table, with one token per column."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from graphattn.data.tables.rows import is_missing, number
from graphattn.data.text import as_tokens
from graphattn.graphs.arguments import as_int

_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: of numbers in bins, or of values.

    Attributes:
        name: its name.
        edges: borders of the bins of numbers, ascending; None for a column of values. Bin k has
            the numbers x with ``edges[k - 1] <= x < edges[k]``.
        values: the values that were seen, if the column is not of numbers.

    Example:
        >>> import graphattn as ga
        >>> ga.data.TableColumn("age", edges=(40.0, 60.0)).num_tokens  # three bins, and missing
        4
    """

    name: str
    edges: tuple[float, ...] | None = None
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        edges, values = self.edges, tuple(self.values)
        if edges is not None:
            edges = tuple(float(edge) for edge in edges)
            if values:
                raise ValueError(f"values must be empty for a column with edges, got {values}")
            if not all(a < b for a, b in itertools.pairwise(edges)):
                raise ValueError(f"edges must be ascending, got {edges}")
        if len(set(values)) < len(values):
            raise ValueError(f"values must be different, got {values}")
        object.__setattr__(self, "edges", edges)  # as tuples, to be hashed and compared
        object.__setattr__(self, "values", values)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, one per bin or value and one for every other cell."""
        return 1 + (len(self.values) if self.edges is None else len(self.edges) + 1)

    def place(self, cell: str) -> int:
        """Return the number of the token of a cell within the column; 0 if it is unknown."""
        if is_missing(cell):
            return 0
        if self.edges is None:
            return self._places.get(_value(cell), 0)
        x = number(cell)
        return 0 if x is None else 1 + bisect_right(self.edges, x)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {value: place for place, value in enumerate(self.values, 1)}

    def describe(self, place: int) -> str:
        """Return what the cells of a token have in common."""
        if place == 0:
            return f"{self.name} unknown"
        if self.edges is None:
            return f"{self.name} = {self.values[place - 1]}"
        low = f"{self.edges[place - 2]:g} <= " if place > 1 else ""
        high = f" < {self.edges[place - 1]:g}" if place <= len(self.edges) else ""
        return f"{low}{self.name}{high}"


class TableTokenizer:
    """A tokenizer with one token per column of a row: every column has tokens of its own.

    As in FT-Transformer (Gorishniy et al., 2021, Section 3.3), every feature of a row becomes one
    token, so that attention mixes features. There, the embedding of a number is linear in it. Here
    a number falls into a bin, as in Section 3.2.1 of *On Embeddings for Numerical Features in
    Tabular Deep Learning* (Gorishniy et al., 2022), with one-hot bins. So every model of tokens
    reads tables, and masked cells can be guessed.

    A cell that is missing (empty, "?", "NA", ...), a value that was not seen by :meth:`fit`, and
    text or infinity in a column of numbers have the first token of their column.

    Args:
        columns: the columns, in the order of the table; :meth:`fit` makes them.

    Raises:
        ValueError: if there is no column.

    Source: Gorishniy et al., *Revisiting Deep Learning Models for Tabular Data* (2021), Section
    3.3; bins from quantiles: Gorishniy et al. (2022), Section 3.2.1.

    Example:
        >>> import graphattn as ga
        >>> tokenizer = ga.data.TableTokenizer.fit(["age", "sex"], [["63", "m"], ["37", "f"]])
        >>> tokenizer.encode("41,f"), tokenizer.encode("99,?"), tokenizer.vocab_size
        (tensor([1, 4]), tensor([2, 3]), 6)
        >>> tokenizer.decode([1, 4])
        'age < 50, sex = f'
    """

    def __init__(self, columns: Sequence[TableColumn]) -> None:
        self.columns = tuple(columns)
        if not self.columns:
            raise ValueError("columns must have at least one TableColumn, got none")
        for column in self.columns:
            if not isinstance(column, TableColumn):
                raise ValueError(
                    f"columns must contain TableColumns, got {column!r}: TableTokenizer.fit makes "
                    "them from rows"
                )
        ends = tuple(itertools.accumulate(column.num_tokens for column in self.columns))
        self._firsts, self.vocab_size = (0, *ends[:-1]), ends[-1]

    @classmethod
    def fit(
        cls, names: Sequence[str], rows: Iterable[Sequence[str]], *, bins: int = 16
    ) -> TableTokenizer:
        """Make a tokenizer from rows, which should be those of training only.

        A column is of numbers if all its cells are numbers or missing. With at most `bins`
        different numbers, every one has a bin, whose border is in the middle between two numbers.
        Otherwise the borders are quantiles, so the bins have about equally many numbers.

        Args:
            names: of the columns, C of them.
            rows: cells of every row, C texts each.
            bins: the largest number of bins of a column, >= 2.

        Raises:
            ValueError: if an argument is not allowed, or a row has another number of cells.
        """
        bins, cells = as_int("bins", bins, 2), list(rows)
        for place, row in enumerate(cells):
            if len(row) != len(names):
                raise ValueError(
                    f"rows must have {len(names)} cells each, like names, got {len(row)} in row "
                    f"{place}"
                )
            for cell in row:
                if not isinstance(cell, str):
                    raise ValueError(
                        f"rows must contain texts, as they are in a file, got {cell!r} in row "
                        f"{place}: use str(cell)"
                    )
        return cls([_column(name, [row[c] for row in cells], bins) for c, name in enumerate(names)])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a row, a LongTensor [C].

        Args:
            text: the row as a line of CSV, without the label.

        Raises:
            ValueError: if it does not have one cell per column.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a line of CSV, got {type(text).__name__}")
        return torch.tensor(self.encode_cells(cells_of(text)), dtype=torch.long)

    def encode_cells(self, cells: Sequence[str]) -> list[int]:
        """Return the tokens of the cells of a row; see :meth:`encode`."""
        if len(cells) != len(self.columns):
            raise ValueError(
                f"a row must have {len(self.columns)} cells ({', '.join(self.names)}), got "
                f"{len(cells)}"
            )
        places = (column.place(cell) for column, cell in zip(self.columns, cells, strict=True))
        return [first + place for first, place in zip(self._firsts, places, strict=True)]

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Describe the cells of tokens, integers [N] in ``0..vocab_size - 1``.

        Raises:
            ValueError: if `tokens` is not one-dimensional, or has other values.
        """
        texts = []
        for token in as_tokens(tokens, self.vocab_size):
            c = bisect_right(self._firsts, token) - 1
            texts.append(self.columns[c].describe(token - self._firsts[c]))
        return ", ".join(texts)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the columns as plain values, for JSON."""
        return [
            {"name": column.name, "values": list(column.values)}
            if column.edges is None
            else {"name": column.name, "edges": list(column.edges)}
            for column in self.columns
        ]

    @classmethod
    def from_list(cls, columns: Any) -> TableTokenizer:
        """Restore a tokenizer from :meth:`as_list`.

        Raises:
            ValueError: if the values are not those of columns.
        """
        made = []
        for saved in columns if isinstance(columns, list) else ():
            if not isinstance(saved, dict) or not ("edges" in saved) ^ ("values" in saved):
                raise ValueError(f"columns must have a name and edges or values, got {saved!r}")
            edges = None if "edges" not in saved else tuple(map(float, saved["edges"]))
            values = tuple(map(str, saved.get("values", ())))
            made.append(TableColumn(str(saved.get("name")), edges, values))
        return cls(made)

    def __repr__(self) -> str:
        return f"TableTokenizer(columns={len(self.columns)}, vocab_size={self.vocab_size})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableTokenizer) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.columns)


def cells_of(line: str) -> list[str]:
    """Return the cells of a row that is one line of CSV."""
    return next(csv.reader([line]), [])


def line_of(cells: Sequence[str]) -> str:
    """Return a row as one line of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(map(_value, cells))
    return text.getvalue()


def _value(cell: str) -> str:
    """Return a cell on one line, without blanks around it."""
    return " ".join(cell.split())


def _column(name: str, cells: list[str], bins: int) -> TableColumn:
    known = [_value(cell) for cell in cells if not is_missing(cell)]
    numbers = [number(cell) for cell in known if not _INFINITE.fullmatch(cell)]
    if not numbers or None in numbers:
        return TableColumn(name, values=tuple(sorted(set(known))))
    x = numpy.array(numbers, dtype=numpy.float64)
    distinct = numpy.unique(x)
    if len(distinct) <= bins:
        middle = distinct[:-1] / 2 + distinct[1:] / 2
        edges = numpy.where(middle > distinct[:-1], middle, distinct[1:])  # of adjacent floats
    else:
        edges = numpy.unique(numpy.quantile(x, numpy.arange(1, bins) / bins))
    return TableColumn(name, edges=tuple(edges[edges > distinct[0]].tolist()))
