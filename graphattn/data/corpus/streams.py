"""Reading text files piece by piece, with errors that give the wrong line."""

from __future__ import annotations

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


@contextmanager
def open_bytes(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for reading; a gzipped one (by its name or its content) is decompressed.

    Errors of reading become a :class:`FileFormatError`.
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
    r"""Open a file, gzipped or not, as UTF-8; all line ends become ``"\n"``.

    Bytes that are not UTF-8 become lone surrogates, for which :func:`_check` raises.
    """
    with open_bytes(path) as file:
        # utf-8-sig skips a byte-order mark, which is no part of the text.
        yield io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=None)


def _check(path: str | os.PathLike[str], piece: str, line: int) -> None:
    """Raise for the first byte that is not text, in a piece that begins in this line."""
    try:
        piece.encode("utf-8")
        place, reason = piece.find("\0"), "is binary (it holds a NUL byte), not text"
    except UnicodeEncodeError as error:
        place, byte = error.start, ord(piece[error.start]) - 0xDC00
        reason = f"byte 0x{byte:02x} is not UTF-8 text (a binary file?)"
    if place >= 0:
        raise FileFormatError(path, reason, line=line + piece.count("\n", 0, place))


def text_pieces(path: str | os.PathLike[str], size: int = PIECE) -> Iterator[str]:
    """Yield the text of a file in pieces of `size` characters."""
    line, is_blank = 1, True
    with open_text(path) as stream:
        while piece := stream.read(size):
            _check(path, piece, line)
            is_blank = is_blank and piece.isspace()
            line += piece.count("\n")
            yield piece
    if is_blank:
        raise FileFormatError(path, "is empty")


def text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield whole lines of a file, with their ends."""
    with open_text(path) as stream:
        for number, line in enumerate(stream, 1):
            _check(path, line, number)
            yield line


def line_pieces(path: str | os.PathLike[str]) -> Iterator[tuple[int, bool, str]]:
    """Yield the lines of a file, stripped of blanks, in pieces of at most 2^20 characters.

    Every piece is a tuple of the number of the line, whether the piece begins a line, and the text.
    """
    number, begins, is_blank = 1, True, True
    with open_text(path) as stream:
        while piece := stream.readline(PIECE):
            _check(path, piece, number)
            is_end = piece.endswith("\n")
            is_blank = is_blank and piece.isspace()
            line = piece.lstrip() if begins else piece
            yield number, begins, line.rstrip() if is_end or len(piece) < PIECE else line
            number, begins = number + is_end, is_end
    if is_blank:
        raise FileFormatError(path, "is empty")
