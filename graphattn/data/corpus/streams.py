"""Reading text files piece by piece, with errors that give the wrong line."""

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
    r"""Open a UTF-8 file, gzipped or not, for reading; all line ends become ``"\n"``."""
    try:
        with open_bytes(path) as file:
            # utf-8-sig skips a byte-order mark, which is no part of the text.
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline=None)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None


def _not_utf8(path: str | os.PathLike[str]) -> FileFormatError:
    """Make the error for a file that is not UTF-8; the file is read again to find the line."""
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
            if not data:  # The file was changed after the first error.
                return FileFormatError(path, "is not UTF-8 text (a binary file?)")
            line += _line_ends(data, after_return)
            after_return = data.endswith(b"\r")


def _line_ends(data: bytes, after_return: bool) -> int:
    r"""Count the line ends in `data`; ``"\r\n"`` counts once, even if it was cut in two."""
    ends = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return ends - (after_return and data.startswith(b"\n"))


def text_pieces(path: str | os.PathLike[str], size: int = PIECE) -> Iterator[str]:
    """Yield the text of a file in pieces of `size` characters.

    Raises:
        FileFormatError: in the same cases as :func:`~graphattn.data.read_text`.
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
    """Yield the lines of a file, stripped of blanks, in pieces of at most 2^20 characters.

    Every piece is a tuple of the number of the line, whether the piece begins a line, and the text.
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
