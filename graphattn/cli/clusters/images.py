"""Read images and masks from files with Pillow (which matplotlib installs)."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphattn.cli.demo.sample import printable
from graphattn.data import FileFormatError
from graphattn.data.files import read_bytes

# The first bytes of a file, and the name of its format in Pillow.
SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
MOST_PIXELS = 50_000_000  # a phone's largest photo; decoded, 150 MB
BOUNDARY = 255  # class of a trimap, in addition to 0 (background) and 1 (foreground)
PET = {1: 1, 2: 0, 3: BOUNDARY}  # Oxford-IIIT Pet's trimaps: foreground, background, boundary


def image_format(data: bytes) -> str | None:
    """Return the format of an image file, from its first bytes; None if it is not an image."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for start, name in SIGNATURES.items() if data.startswith(start)), None)


def read_image(
    file: Path, data: bytes, longest_side: int, most_pixels: int
) -> tuple[NDArray[np.float64], tuple[int, int], int, list[str]]:
    """Read an image in 0 .. 1, averaged over blocks of pixels until it is small enough.

    Returns:
        The image [height, width, 1 or 3]; height and width in the file; the side length of a block;
        and notes about omitted data.
    """
    picture, frames = _decoded(file, data, most_pixels)
    notes = ["Only the first frame is used."] if frames > 1 else []
    deep = picture.mode in ("I", "F") or picture.mode.startswith("I;16")
    if picture.has_transparency_data and not _is_opaque(picture):
        notes.append("The alpha channel is left out.")
    if deep:
        values = np.asarray(picture, dtype=np.float64)[..., None]
        if not np.isfinite(values).all():
            raise FileFormatError(file, "contains NaN or infinity")
        values = values / max(1.0 if picture.mode == "F" else 65535.0, values.max(initial=0))
    else:
        gray = picture.mode in ("1", "L", "LA", "La")
        values = np.asarray(picture.convert("L" if gray else "RGB"))
        values = values.reshape(*values.shape[:2], -1)
    full = values.shape[:2]
    block = max(1, -(-max(full) // longest_side))
    image = _shrunk(values, block)
    return (image if deep else image / 255), (full[0], full[1]), block, notes


def read_mask(
    file: Path, size: tuple[int, int], block: int, most_pixels: int
) -> tuple[NDArray[np.int64], bool, str | None]:
    """Read a mask of 0 and 1, or a trimap of 0, 1 and 255 (the boundary), one value per block.

    It is the value of the middle pixel, because classes cannot be averaged. If a PNG has a palette,
    its indices are the classes, whatever their colours are. A palette with only black and white is
    read as a picture of a mask.

    Returns:
        The classes [height, width]; whether they have a boundary; and a note about them.
    """
    data = read_bytes(file)
    if image_format(data) is None:
        raise FileFormatError(file, "is not an image (PNG, JPEG, ...)")
    picture, _ = _decoded(file, data, most_pixels)
    if picture.size != (size[1], size[0]):
        raise FileFormatError(
            file,
            f"must have the size of the image, {size[1]} x {size[0]}, "
            f"got {picture.size[0]} x {picture.size[1]}",
        )
    indexed = picture.mode in ("P", "PA") and not _is_black_and_white(picture)
    if indexed:
        values = np.asarray(picture if picture.mode == "P" else picture.getchannel("P"))
    elif picture.mode in ("P", "PA", "1"):
        values = np.asarray(picture.convert("RGB"))[..., 0]
    else:
        values = np.asarray(picture)
        values = values if values.ndim == 2 else values[..., 0]
        if picture.mode.startswith("I") and values.max(initial=0) > 255:
            values = values // 257  # 16 bits
    height, width = (max(1, side // block) for side in size)
    # If the image is narrower than a block, take its middle.
    rows, columns = (min(block, side) for side in size)
    centre = values[rows // 2 :: block, columns // 2 :: block][:height, :width].astype(np.int64)
    return _classes(file, centre, set(np.unique(values).tolist()), indexed)


def _classes(
    file: Path, centre: NDArray[np.int64], values: set[int], indexed: bool
) -> tuple[NDArray[np.int64], bool, str | None]:
    """Return the classes of the pixels of a mask, and a note about how they were read."""
    note, others = None, sorted(values - {0, BOUNDARY})
    if {1, 2} <= values <= set(PET):
        classes = np.select([centre == value for value in PET], list(PET.values()))
        note = "The mask is read as in Oxford-IIIT Pet: 1 foreground, 2 background, 3 boundary."
    elif values == {0, 1, BOUNDARY}:
        classes = centre
    elif indexed and others:
        classes = np.where(centre == BOUNDARY, BOUNDARY, (centre != 0).astype(np.int64))
        rest = ", 255 boundary" if BOUNDARY in values else ""
        named = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        note = f"The mask is read by its palette's indices: 0 background, {named} foreground{rest}."
    else:
        classes = (centre >= (128 if max(values) > 1 else 1)).astype(np.int64)
    if not (classes != 0).any():
        got = ", ".join(str(value) for value in sorted(values)[:8])
        raise FileFormatError(
            file, f"has no foreground: a mask must contain values >= 128, or 0 and 1, got {got}"
        )
    return classes, bool((classes == BOUNDARY).any()), note


def _decoded(file: Path, data: bytes, most_pixels: int) -> tuple[Any, int]:
    """Decode an image, upright, and count its frames; a small file can unpack to gigabytes."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError(
            "images need Pillow: install it with pip install 'graphattn[clusters]'"
        ) from None
    form = image_format(data)
    # Switch off Pillow's own limit; the check below replaces it.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata
            picture = Image.open(io.BytesIO(data), formats=[form] if form else None)
            width, height = picture.size
            if width * height > most_pixels:
                raise FileFormatError(
                    file,
                    f"has {width:,} x {height:,} = {width * height:,} pixels, more than "
                    f"--max-pixels {most_pixels}: give a larger number if you have enough memory",
                )
            frames = getattr(picture, "n_frames", 1)
            picture.load()
            return ImageOps.exif_transpose(picture), frames
    except FileFormatError:
        raise
    except Exception as error:  # a damaged file can raise any exception
        raise FileFormatError(file, f"cannot be read as {form}: {printable(str(error))}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _is_opaque(picture: Any) -> bool:
    """Return whether alpha is 1 everywhere; matplotlib writes such a channel into every PNG."""
    return bool(picture.convert("RGBA").getchannel("A").getextrema()[0] == 255)


def _is_black_and_white(picture: Any) -> bool:
    colours = picture.convert("RGB").getcolors(3) or []
    return {colour for _, colour in colours} == {(0, 0, 0), (255, 255, 255)}


def _shrunk(values: NDArray[Any], block: int) -> NDArray[np.float64]:
    """Average over blocks of pixels; incomplete blocks at the right and the bottom are cut off."""
    height, width = (max(1, side // block) for side in values.shape[:2])
    rows, columns = min(block, values.shape[0]), min(block, values.shape[1])
    image = np.empty((height, width, values.shape[2]))
    for row in range(height):  # one row of blocks at a time, which saves memory in float64
        lines = values[row * rows : (row + 1) * rows, : width * columns].astype(np.float64)
        image[row] = lines.reshape(rows, width, columns, -1).mean(axis=(0, 2))
    return image
