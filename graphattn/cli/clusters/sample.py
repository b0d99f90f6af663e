"""The tokens of an image or a table, and what is known of their classes."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.cli.demo.sample import printable
from graphattn.data import FileFormatError, read_text
from graphattn.data.files import read_bytes
from graphattn.dynamics import standardize

PNG = b"\x89PNG\r\n\x1a\n"
LONGEST_SIDE = 64  # of an image, as in the paper; larger ones are averaged over blocks of pixels
MOST_TOKENS = 20_000
MOST_CLASSES = 50
BOUNDARY = 255  # of a trimap, beside 0 (background) and 1 (foreground)
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


@dataclass(frozen=True)
class Tokens:
    """What the simulation runs on."""

    title: str
    x: Tensor  # [N, C], standardised, float64
    features: list[str]
    notes: list[str]  # what was left out or changed on the way
    image: NDArray[np.float64] | None = None  # [height, width, 1 or 3], as read
    mask: Tensor | None = None  # [N], foreground where not 0
    has_boundary: bool = False  # the mask is a trimap: 255 is the boundary
    truth: Tensor | None = None  # [N], class of every row
    classes: int | None = None  # how many classes truth or mask have


def load_tokens(file: Path, mask: Path | None, labels: str | None) -> Tokens:
    """The pixels of a PNG, or the rows of a CSV file."""
    data = read_bytes(file)
    if data.startswith(PNG):
        if labels is not None:
            raise ValueError(f"--labels names a column of a table; {printable(file.name)} is a PNG")
        return _image_tokens(file, data, mask)
    if mask is not None:
        raise ValueError(f"--mask goes with an image (PNG); {printable(file.name)} is none")
    return _table_tokens(file, labels)


def _image_tokens(file: Path, data: bytes, mask: Path | None) -> Tokens:
    image = _read_png(file, data)
    notes = []
    if image.shape[2] in (2, 4):
        image = image[..., :-1]
        notes.append("The alpha channel is left out.")
    full = image.shape[:2]
    block = max(1, -(-max(full) // LONGEST_SIDE))
    image = _shrink(image, block)
    height, width, channels = image.shape
    if block > 1:
        notes.append(
            f"{full[1]} x {full[0]} pixels, averaged over blocks of {block} x {block} "
            f"to {width} x {height}."
        )
    trimap, has_boundary = None, False
    if mask is not None:
        values = _read_png(mask, read_bytes(mask))[..., 0]
        if values.shape != full:
            raise FileFormatError(
                mask,
                f"must have the size of the image, {full[1]} x {full[0]}, "
                f"got {values.shape[1]} x {values.shape[0]}",
            )
        # One pixel per block, its centre: classes have no average.
        centre = values[block // 2 :: block, block // 2 :: block][:height, :width]
        trimap, has_boundary = _classes_of(np.rint(255 * centre).astype(np.int64))
        if not (trimap != 0).any():
            raise FileFormatError(mask, "has no foreground (everything is 0)")
    return Tokens(
        title=f"{printable(file.name)}: {height} x {width} pixels, {height * width:,} tokens",
        x=standardize(torch.from_numpy(image.reshape(-1, channels))),
        features=["gray"] if channels == 1 else ["red", "green", "blue"],
        notes=notes,
        image=image,
        mask=None if trimap is None else torch.from_numpy(trimap.reshape(-1)),
        has_boundary=has_boundary,
        classes=None if trimap is None else 2,
    )


def _read_png(file: Path, data: bytes) -> NDArray[np.float64]:
    """[height, width, channels], 0 to 1."""
    from matplotlib.image import imread

    try:
        pixels = np.asarray(imread(io.BytesIO(data), format="png"), dtype=np.float64)
    except Exception as error:  # whatever a damaged file makes the decoder raise
        raise FileFormatError(file, f"cannot be read as PNG: {error}") from error
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _shrink(image: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """Means over blocks of pixels; what is left over at the right and the bottom is cut."""
    height, width = (max(1, side // block) for side in image.shape[:2])
    rows, columns = min(block, image.shape[0]), min(block, image.shape[1])
    cut = image[: height * rows, : width * columns]
    return cut.reshape(height, rows, width, columns, -1).mean(axis=(1, 3))


def _classes_of(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
    """A mask of 0 and 1, or a trimap of 0, 1 and 255 (the boundary)."""
    if set(np.unique(values)) == {0, 1, BOUNDARY}:
        return values, True
    if values.max() > 1:
        values = (values >= 128).astype(np.int64)
    return values, False


def _table_tokens(file: Path, labels: str | None) -> Tokens:
    names, rows = _read_csv(file)
    notes = []
    label = None if labels is None else _column(labels, names)
    numeric = [
        c
        for c in range(len(names))
        if c != label
        and all(_is_missing(row[c]) or _number(row[c]) is not None for row in rows)
        and not all(_is_missing(row[c]) for row in rows)
    ]
    if not numeric:
        raise FileFormatError(file, "has no column of numbers")
    left_out = [printable(names[c]) for c in range(len(names)) if c not in (*numeric, label)]
    if left_out:
        notes.append(f"Not numbers, left out: {', '.join(left_out)}.")
    needed = numeric if label is None else [*numeric, label]
    whole = [row for row in rows if not any(_is_missing(row[c]) for c in needed)]
    if len(whole) < len(rows):
        notes.append(f"{len(rows) - len(whole):,} rows with missing values are left out.")
    if len(whole) > MOST_TOKENS:
        notes.append(f"Only the first {MOST_TOKENS:,} of {len(whole):,} rows are used.")
        whole = whole[:MOST_TOKENS]
    if len(whole) < 3:
        raise FileFormatError(file, f"must have at least 3 whole rows, got {len(whole)}")
    truth, classes = None, None
    if label is not None:
        kinds, index = np.unique([row[label].strip() for row in whole], return_inverse=True)
        if not 2 <= len(kinds) <= MOST_CLASSES:
            raise ValueError(
                f"--labels must name a column of 2 to {MOST_CLASSES} classes, "
                f"{printable(names[label])} has {len(kinds)}"
            )
        truth, classes = torch.from_numpy(index), len(kinds)
    values = torch.tensor([[float(row[c]) for c in numeric] for row in whole], dtype=torch.float64)
    return Tokens(
        title=f"{printable(file.name)}: {len(whole):,} rows, {len(numeric)} features",
        x=standardize(values),
        features=[
            f"column {names[c]}" if names[c].isdigit() else printable(names[c]) for c in numeric
        ],
        notes=notes,
        truth=truth,
        classes=classes,
    )


def _read_csv(file: Path) -> tuple[list[str], list[list[str]]]:
    """Names of the columns (their numbers, from 1, where the file has none), and the rows."""
    try:
        rows = [row for row in csv.reader(io.StringIO(read_text(file))) if any(map(str.strip, row))]
    except csv.Error as error:
        raise FileFormatError(file, f"cannot be read as CSV: {error}") from error
    if len(rows) < 2:
        raise FileFormatError(file, "must have at least two rows to be a table")
    head, body = rows[0], rows[1:]
    width = len(body[0])
    for place, row in enumerate(body, start=2):
        if len(row) != width:
            raise FileFormatError(
                file, f"row {place} has {len(row)} columns, the ones before it {width}"
            )
    numbers = [str(c + 1) for c in range(width)]
    if len(head) != width:  # a line of its own, such as scikit-learn's counts
        return numbers, body
    if all(_is_missing(cell) or _number(cell) is not None for cell in head):
        return numbers, rows
    if any(_number(cell) is not None for cell in head):
        return numbers, rows  # a row of data with some text in it
    return [cell.strip() for cell in head], body


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def _column(wanted: str, names: list[str]) -> int:
    """By name, or by number: 1 is the first, -1 the last."""
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
        f"--labels must be a column ({known}) or its number, 1 to {len(names)} or -1 for the last, "
        f"got {printable(wanted)!r}"
    )
