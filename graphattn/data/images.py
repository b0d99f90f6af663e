"""Reading images as tensors: idx files, such as MNIST, and PNG or JPEG files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from graphattn.data.files import MAX_BYTES, FileFormatError, read_bytes

IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PIECE = 2**20  # bytes that are read at a time


def read_idx(path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES) -> Tensor:
    """Read the array of an idx file (gzipped or not), such as MNIST's images [N, 28, 28].

    Args:
        path: the file.
        max_bytes: the largest size that is read, as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: if the file cannot be read, is not an idx file, or is longer or shorter
            than its header says.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "labels-idx1-ubyte")
        ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
        ...     ga.data.read_idx(path)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    data = read_bytes(path, max_bytes=max_bytes)
    dtype, shape, header = idx_header(path, data[: 4 + 4 * 255])
    wanted, got = math.prod(shape) * dtype.itemsize, len(data) - header
    if got != wanted:
        raise _wrong_size(path, shape, wanted, got)
    values = numpy.frombuffer(data, dtype, offset=header).reshape(shape)
    return torch.from_numpy(values.astype(dtype.newbyteorder("=")))


def idx_header(path: str | os.PathLike[str], head: bytes) -> tuple[Any, tuple[int, ...], int]:
    """Return the dtype and shape that an idx header gives, and the size of the header in bytes."""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_TYPES or head[3] == 0:
        raise FileFormatError(path, "is no idx file: it does not begin with idx's magic number")
    header = 4 + 4 * head[3]
    if len(head) < header:
        raise FileFormatError(
            path, f"is cut off: an idx header of {header} bytes is not complete, got {len(head)}"
        )
    shape = numpy.frombuffer(head[4:header], ">u4").tolist()
    return numpy.dtype(IDX_TYPES[head[2]]), tuple(shape), header


def idx_images(path: str | os.PathLike[str], stream: BinaryIO) -> Iterator[Any]:
    """Yield the images of an open idx file, uint8 [C, H, W]."""
    head = stream.read(4)
    head += stream.read(4 * head[3]) if len(head) == 4 else b""
    dtype, shape, _ = idx_header(path, head)
    if len(shape) not in (3, 4) or dtype.itemsize != 1 or dtype.kind != "u":
        raise FileFormatError(
            path,
            "holds no images: they must be unsigned bytes [N, H, W] or [N, H, W, C], but these are "
            f"{dtype.newbyteorder('=')} {list(shape)}",
        )
    size = math.prod(shape[1:])
    if 0 in shape:
        raise FileFormatError(path, f"is empty: its shape is {list(shape)}")
    for number in range(shape[0]):
        data = _read_at_most(stream, size)
        if len(data) != size:
            raise _wrong_size(path, shape, math.prod(shape), number * size + len(data))
        image = numpy.frombuffer(data, numpy.uint8).reshape(shape[1:])
        yield image[None] if len(shape) == 3 else image.transpose(2, 0, 1)
    if stream.read(1):
        raise FileFormatError(path, f"holds more than its header says: {list(shape)}")


def _read_at_most(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file.

    Reading in pieces avoids allocating the size that a header gives, which may be wrong.
    """
    pieces: list[bytes] = []
    while size and (piece := stream.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _wrong_size(
    path: str | os.PathLike[str], shape: tuple[int, ...], wanted: int, got: int
) -> FileFormatError:
    state = "is cut off" if got < wanted else "holds more than its header says"
    return FileFormatError(path, f"{state}: {list(shape)} are {wanted:,} bytes, got {got:,}")


def labels_beside(path: Path) -> Path | None:
    """Find the idx file ``...labels-idx1...`` beside one named ``...images-idx3...``, if any."""
    name = path.name.removesuffix(".gz")
    beside = name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
    if beside == name:
        return None
    candidates = (path.with_name(beside), path.with_name(beside + ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


# The Pillow mode to which an image of every supported mode is converted.
_MODES = {"1": "L", "L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA"}


def read_image(path: str | os.PathLike[str]) -> Any:
    """Read the pixels of an image file, uint8 [C, H, W]; palettes become RGB or RGBA."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            "reading images needs pillow: install it with pip install 'graphattn[train]'"
        ) from error

    try:
        with Image.open(path) as picture:
            mode = _MODES.get(picture.mode)
            if picture.mode in ("P", "PA"):
                mode = "RGBA" if picture.has_transparency_data else "RGB"
            if mode is None:
                reason = f"has pixels of mode {picture.mode}, but must have 8-bit gray or colour"
                raise FileFormatError(path, reason)
            pixels = numpy.asarray(picture.convert(mode), dtype=numpy.uint8)
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(path, "no such file") from error
    except UnidentifiedImageError as error:
        raise FileFormatError(path, "is not an image that Pillow can read") from error
    except Exception as error:  # For a broken file, a decoder may raise any exception.
        raise FileFormatError(path, f"is a damaged image: {error}") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
