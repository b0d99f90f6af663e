"""Text files read piece by piece, and the line that is to blame where one cannot be."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from graphattn.data.files import FileFormatError

PIECE = 2**20  # characters at a time

_BINARY = "is binary (it holds a NUL byte), not text"


@contextmanager
def open_bytes(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file for reading, decompressed where it is gzipped (by its name or its content).

    Whatever stops the reading becomes a :class:`FileFormatError`.
    """
    name = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise FileFormatError(name, "is not a regular file")
        with open(name, "rb") as file:
            packed = name.lower().endswith(".gz") or file.peek(2)[:2] == b"\x1f\x8b"
            if not packed:
                yield file
                return
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked)
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(name, "no such file") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(name, f"is not a whole gzip file: {error}") from error
    except PermissionError as error:
        raise FileFormatError(name, f"cannot be read: {error.strerror}") from error


@contextmanager
def open_text(path: str | os.PathLike[str]) -> Iterator[io.TextIOWrapper]:
    r"""A UTF-8 file for reading, gzipped or not; every line end becomes ``"\n"``."""
    try:
        with open_bytes(path) as file:
            # A byte-order mark is no part of the text.
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline=None)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None


def _not_utf8(path: str | os.PathLike[str]) -> FileFormatError:
    """Describe the fault of a file that is no UTF-8: it is read again, line by line."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    after_return = False
    with open_bytes(path) as file:
        while True:
            data = file.read(PIECE)
            before = len(decoder.getstate()[0])
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                good = data[: max(0, error.start - before)]
                line += _line_ends(good, after_return)
                byte = error.object[error.start]
                reason = f"byte 0x{byte:02x} is not UTF-8 text (a binary file?)"
                return FileFormatError(path, reason, line=line)
            if not data:  # it was changed in between
                return FileFormatError(path, "is not UTF-8 text (a binary file?)")
            line += _line_ends(data, after_return)
            after_return = data.endswith(b"\r")


def _line_ends(data: bytes, after_return: bool) -> int:
    r"""How many lines end in `data`; ``"\r\n"`` is one end, also where it was cut in two."""
    ends = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return ends - (after_return and data.startswith(b"\n"))


def text_pieces(path: str | os.PathLike[str], size: int = PIECE) -> Iterator[str]:
    """The text of a file in pieces of `size` characters.

    Raises:
        FileFormatError: as :func:`~graphattn.data.read_text`.
    """
    is_blank = True
    with open_text(path) as stream:
        line = 1
        while piece := stream.read(size):
            if "\0" in piece:
                line += piece[: piece.index("\0")].count("\n")
                raise FileFormatError(path, _BINARY, line=line)
            is_blank = is_blank and piece.isspace()
            line += piece.count("\n")
            yield piece
    if is_blank:
        raise FileFormatError(path, "is empty")


def line_pieces(path: str | os.PathLike[str]) -> Iterator[tuple[int, bool, str]]:
    """Lines without blanks around them, with their numbers; very long ones in pieces of 2^20.

    The second entry says whether a line begins there.
    """
    number, begins, is_blank = 1, True, True
    with open_text(path) as stream:
        while piece := stream.readline(PIECE):
            is_end = piece.endswith("\n")
            if "\0" in piece:
                raise FileFormatError(path, _BINARY, line=number)
            is_blank = is_blank and piece.isspace()
            line = piece.lstrip() if begins else piece
            yield number, begins, line.rstrip() if is_end or len(piece) < PIECE else line
            number, begins = number + is_end, is_end
    if is_blank:
        raise FileFormatError(path, "is empty")
