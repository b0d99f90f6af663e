"""Tokens of an image or a table, with their classes if they are known."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.cli.clusters.images import MOST_PIXELS, image_format, read_image, read_mask
from graphattn.cli.demo.sample import printable
from graphattn.data import FileFormatError, read_text
from graphattn.data.files import read_bytes
from graphattn.data.tables.rows import is_missing, number, read_rows
from graphattn.dynamics import standardize
from graphattn.graphs.arguments import as_int
from graphattn.plain_tables import counted

LONGEST_SIDE = 64  # of an image, as in the paper; larger ones are averaged over blocks of pixels
MOST_TOKENS = 20_000
MOST_CLASSES = 50


@dataclass(frozen=True)
class Tokens:
    """The tokens of a simulation."""

    title: str
    x: Tensor  # [N, C], standardised, float64
    features: list[str]
    notes: list[str]  # notes about omitted or changed data
    image: NDArray[np.float64] | None = None  # [height, width, 1 or 3], as read
    mask: Tensor | None = None  # [N], foreground where not 0
    has_boundary: bool = False  # the mask is a trimap: 255 is the boundary
    truth: Tensor | None = None  # [N], class of every row
    classes: int | None = None  # number of classes in `truth` or `mask`


def load_tokens(
    file: Path,
    mask: Path | None = None,
    labels: str | None = None,
    columns: str | None = None,
    per_class: int | None = None,
    seed: int = 0,
    size: int | None = None,
    max_pixels: int = MOST_PIXELS,
) -> Tokens:
    """Load the pixels of an image, or the rows of a CSV file, as the options of the command say.

    Raises:
        FileFormatError: if a file cannot be read.
        ValueError: if an option does not fit the file.
    """
    seed = as_int("--seed", seed, 0)
    data, name = read_bytes(file), printable(file.name)
    if image_format(data) is not None:
        for option, given in (("labels", labels), ("columns", columns), ("per-class", per_class)):
            if given is not None:
                raise ValueError(f"--{option} can only be used with a table, got the image {name}")
        size = LONGEST_SIDE if size is None else as_int("--size", size, 2)
        return _image_tokens(file, data, mask, size, as_int("--max-pixels", max_pixels, 1))
    for option, value in (("mask", mask), ("size", size)):
        if value is not None:
            raise ValueError(
                f"--{option} can only be used with an image (PNG, JPEG, ...), got {name}"
            )
    if per_class is not None:
        per_class = as_int("--per-class", per_class, 1)
        if labels is None:
            raise ValueError("--per-class needs --labels, the column of the classes: give both")
    return _table_tokens(file, labels, columns, per_class, seed)


def _image_tokens(
    file: Path, data: bytes, mask: Path | None, longest_side: int, most_pixels: int
) -> Tokens:
    image, full, block, notes = read_image(file, data, longest_side, most_pixels)
    height, width, channels = image.shape
    if height * width > MOST_TOKENS:
        raise ValueError(
            f"--size must give at most {MOST_TOKENS:,} tokens, got {longest_side}, which gives "
            f"{width} x {height} = {height * width:,}"
        )
    if block > 1:
        notes.append(
            f"{full[1]} x {full[0]} pixels, averaged over blocks of {block} x {block} "
            f"to {width} x {height}."
        )
    trimap, has_boundary = None, False
    if mask is not None:
        trimap, has_boundary, note = read_mask(mask, full, block, most_pixels)
        notes += [note] if note else []
    return Tokens(
        title=f"{printable(file.name)}: {height} x {width} pixels, "
        f"{counted(height * width, 'token')}",
        x=standardize(torch.from_numpy(image.reshape(-1, channels))),
        features=["gray"] if channels == 1 else ["red", "green", "blue"],
        notes=notes,
        image=image,
        mask=None if trimap is None else torch.from_numpy(trimap.reshape(-1)),
        has_boundary=has_boundary,
        classes=None if trimap is None else 2,
    )


def _table_tokens(
    file: Path, labels: str | None, columns: str | None, per_class: int | None, seed: int
) -> Tokens:
    names, rows = read_csv(file)
    notes = []
    label = None if labels is None else one_column("--labels", labels, names)
    numeric = [
        c
        for c in range(len(names))
        if c != label
        and all(is_missing(row[c]) or number(row[c]) is not None for row in rows)
        and not all(is_missing(row[c]) for row in rows)
    ]
    if not numeric:
        raise FileFormatError(file, "has no column of numbers")
    if columns is not None:
        chosen = some_columns("--columns", columns, names)
        for c in chosen:
            got = f"got {printable(names[c])!r}"
            if c == label:
                raise ValueError(f"--columns must not contain the column of --labels, {got}")
            if c not in numeric:
                raise ValueError(f"--columns must be columns of numbers, {got}")
        numeric = chosen
    else:
        left_out = [printable(names[c]) for c in range(len(names)) if c not in (*numeric, label)]
        if left_out:
            notes.append(f"Columns without numbers are omitted: {', '.join(left_out)}.")
    needed = numeric if label is None else [*numeric, label]
    whole = [row for row in rows if not any(is_missing(row[c]) for c in needed)]
    if len(whole) < len(rows):
        missing = len(rows) - len(whole)
        are = "is" if missing == 1 else "are"
        notes.append(f"{counted(missing, 'row')} with missing values {are} omitted.")
    truth, classes = None, None
    if label is not None:
        kinds, index = np.unique([row[label].strip() for row in whole], return_inverse=True)
        if not 2 <= len(kinds) <= MOST_CLASSES:
            raise ValueError(
                f"--labels must name a column of 2 to {MOST_CLASSES} classes, got "
                f"{printable(names[label])} with {len(kinds)}"
            )
        if per_class is not None:
            kept = _balanced(index, kinds, per_class, seed)
            notes.append(
                f"{counted(per_class, 'row')} of each of {len(kinds)} classes, drawn at random "
                f"(seed {seed}), in the order of the file."
            )
            whole, index = [whole[row] for row in kept], index[kept]
        truth, classes = torch.from_numpy(index), len(kinds)
    if len(whole) > MOST_TOKENS:
        notes.append(f"Only the first {MOST_TOKENS:,} of {len(whole):,} rows are used.")
        whole, truth = whole[:MOST_TOKENS], None if truth is None else truth[:MOST_TOKENS]
    if len(whole) < 3:
        raise FileFormatError(
            file, f"must have at least 3 rows without missing values, got {len(whole)}"
        )
    values = torch.tensor([[float(row[c]) for c in numeric] for row in whole], dtype=torch.float64)
    return Tokens(
        title=f"{printable(file.name)}: {counted(len(whole), 'row')}, "
        f"{counted(len(numeric), 'feature')}",
        x=standardize(values),
        features=[
            f"column {names[c]}" if names[c].isdigit() else printable(names[c]) for c in numeric
        ],
        notes=notes,
        truth=truth,
        classes=classes,
    )


def _balanced(
    index: NDArray[np.int64], kinds: NDArray[np.str_], per_class: int, seed: int
) -> NDArray[np.int64]:
    """Draw rows of every class, keeping their order (Attention Clusters, Section 2.2)."""
    counts = np.bincount(index, minlength=len(kinds))
    fewest = int(counts.argmin())
    if per_class > counts[fewest]:
        raise ValueError(
            f"--per-class must be at most {counts[fewest]}, the number of rows of class "
            f"{printable(str(kinds[fewest]))!r}, got {per_class}"
        )
    generator = np.random.default_rng(seed)
    drawn = [
        generator.choice(np.flatnonzero(index == kind), per_class, replace=False)
        for kind in range(len(kinds))
    ]
    return np.sort(np.concatenate(drawn))


# Tables from CSV files, and the columns that options name.


def read_csv(file: Path) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns (numbers from 1, if the file has no names), and the rows."""
    names, rows = read_rows(file, io.StringIO(read_text(file)))
    return names, list(rows)


def one_column(option: str, wanted: str, names: list[str]) -> int:
    """Find a column by name, or by number: 1 is the first, -1 the last."""
    if wanted in names:
        return names.index(wanted)
    try:
        place = int(wanted)
    except ValueError:
        place = 0
    if 1 <= abs(place) <= len(names):
        return place - 1 if place > 0 else len(names) + place
    known = ", ".join(map(printable, names[:8])) + (", ..." if len(names) > 8 else "")
    raise ValueError(
        f"{option} must be the name of a column ({known}) or its number, 1 to {len(names)} or -1 "
        f"for the last, got {printable(wanted)!r}"
    )


def some_columns(option: str, wanted: str, names: list[str]) -> list[int]:
    """Find several columns, separated by commas; a name with a comma must be in double quotes."""
    if wanted in names:
        return [names.index(wanted)]
    parts = next(csv.reader([wanted], skipinitialspace=True), [])
    columns = [one_column(option, part.strip(), names) for part in parts]
    if not columns:
        raise ValueError(f"{option} must name at least one column, got {printable(wanted)!r}")
    for place, column in enumerate(columns):
        if column in columns[:place]:
            raise ValueError(
                f"{option} must name each column only once, got {printable(parts[place])!r} twice"
            )
    return columns
