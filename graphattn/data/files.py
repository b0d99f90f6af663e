"""Read a file, or say in one line what is wrong with it."""

import gzip
import io
import os
import re
import stat
import zlib
from typing import BinaryIO, Literal

FileFormat = Literal["text", "fasta", "pdb", "mmcif"]

MAX_BYTES = 2**28  # 256 MiB: any chromosome of man; a gzip file of 1 MB can unpack to 1 GB
_PIECE = 2**20  # read at a time, so that too much is met before it fills the memory

_GZIP_MAGIC = (
    b"\x1f\x8b"  # never the start of UTF-8 text, so content may decide as well as the name
)

_FORMAT_OF_EXTENSION: dict[str, FileFormat] = {
    ".fa": "fasta",
    ".fasta": "fasta",
    ".faa": "fasta",
    ".fna": "fasta",
    ".pdb": "pdb",
    ".ent": "pdb",
    ".cif": "mmcif",
    ".mmcif": "mmcif",
}

# The first line that is neither blank nor a comment.
_FASTA_OPENING = re.compile(r"(?:[^\S\n]*(?:;.*)?\n)*[^\S\n]*>")
_MMCIF_OPENING = re.compile(r"(?:[^\S\n]*(?:#.*)?\n)*data_")

# Records a PDB file may open with, padded to their six columns: prose seldom has "TITLE ".
_PDB_OPENING = (
    *("HEADER", "OBSLTE", "TITLE ", "SPLIT ", "CAVEAT", "COMPND", "SOURCE", "KEYWDS", "EXPDTA"),
    *("AUTHOR", "REVDAT", "REMARK", "DBREF ", "SEQRES", "HELIX ", "SHEET ", "CRYST1", "ORIGX1"),
    *("MODEL ", "ATOM  ", "HETATM"),
)
_PDB_ATOM = re.compile(r"^(?:ATOM  |HETATM)", re.MULTILINE)


class FileFormatError(ValueError):
    """A file cannot be read as what it should be. Its text is one line, whatever the file holds.

    Args:
        path: the file.
        reason: what is wrong with it.
        line: the number of the faulty line, counted from 1, where one line is to blame.

    Example:
        >>> import graphattn as ga
        >>> print(ga.data.FileFormatError("genes.fasta", "no sequence after this header", line=7))
        genes.fasta: line 7: no sequence after this header
        >>> print(ga.data.FileFormatError("genes.fasta", "no such file"))
        genes.fasta: no such file
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, line: int | None = None) -> None:
        super().__init__(path, reason, line)  # all three: an exception is unpickled from its args
        self.path = os.fspath(path)
        self.reason = reason
        self.line = line

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return _one_line(f"{self.path or repr('')}: {where}{self.reason}")


def _one_line(text: str) -> str:
    """`text` with line breaks, control characters and lone surrogates spelled as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES) -> bytes:
    """The bytes of a file, decompressed when it is gzipped (by its name or by its content).

    Args:
        path: the file.
        max_bytes: refuse a file that holds more, counted after decompression; None reads any. It
            is unpacked piece by piece, and no further than this.

    Raises:
        FileFormatError: the file is missing, a directory or a device, cannot be read, is empty
            (or holds only whitespace), is a damaged gzip file, or is larger than `max_bytes`.
        ValueError: `max_bytes` is not a positive integer or None.

    Example:
        >>> import graphattn as ga
        >>> ga.data.read_bytes("no/such/file.txt")
        Traceback (most recent call last):
        ...
        graphattn.data.files.FileFormatError: no/such/file.txt: no such file
    """
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
        raise ValueError(f"max_bytes must be an integer >= 1 or None, got {max_bytes!r}")
    name = os.fspath(path)
    try:
        status = os.stat(name)
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            raise FileFormatError(name, "is a directory, not a file")
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            # /dev/zero never ends; a pipe, as in `<(zcat genes.fa.gz)`, does.
            raise FileFormatError(name, "is a device, not a file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise _too_large(name, f"holds {status.st_size:,} bytes", max_bytes)
        with open(name, "rb") as file:
            data = _read(file, name, "holds", max_bytes)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileFormatError(name, "no such file") from error
    except OSError as error:
        raise FileFormatError(name, f"cannot be read: {error.strerror or error}") from error
    except FileFormatError:
        raise
    except ValueError as error:  # a NUL or a lone surrogate: no file can have such a name
        raise FileFormatError(name, "no such file") from error

    if data and (name.lower().endswith(".gz") or data.startswith(_GZIP_MAGIC)):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = _read(packed, name, "unpacks to", max_bytes)
        except (OSError, EOFError, zlib.error) as error:
            raise FileFormatError(name, f"is not a whole gzip file: {error}") from error
    if not data or data.isspace():
        raise FileFormatError(name, "is empty")
    return data


def _read(file: BinaryIO | gzip.GzipFile, name: str, holds: str, max_bytes: int | None) -> bytes:
    """All of an open file, or an error as soon as it turns out to be too much."""
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(_PIECE):
        size += len(piece)
        if max_bytes is not None and size > max_bytes:
            raise _too_large(name, f"{holds} more than {max_bytes:,} bytes", max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(name: str, what: str, max_bytes: int) -> FileFormatError:
    return FileFormatError(
        name, f"{what}, and max_bytes = {max_bytes:,} is the limit (a larger one or None lifts it)"
    )


def read_text(path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES) -> str:
    r"""The text of a UTF-8 file, gzipped or not. Every line end becomes ``"\n"``.

    Args:
        path: the file.
        max_bytes: as in :func:`read_bytes`.

    Raises:
        FileFormatError: as :func:`read_bytes`, and for binary files (a NUL byte, not UTF-8).

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "poem.txt")
        ...     _ = path.write_bytes(b"to be,\r\nor not\r\n")
        ...     ga.data.read_text(path)
        'to be,\nor not\n'
    """
    data = read_bytes(path, max_bytes=max_bytes)
    if b"\0" in data:
        raise FileFormatError(path, "is binary (it holds a NUL byte), not text")
    try:
        text = data.decode("utf-8-sig")  # a byte-order mark is no part of the text
    except UnicodeDecodeError as error:
        before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        reason = f"byte 0x{data[error.start]:02x} is not UTF-8 text (a binary file?)"
        raise FileFormatError(path, reason, line=before.count(b"\n") + 1) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise FileFormatError(path, "is empty")
    return text


def sniff_format(path: str | os.PathLike[str], text: str) -> FileFormat:
    """Return the format of a file: by its extension (with or without ``.gz``), else by its content.

    Args:
        path: the file's name; it need not exist.
        text: its content, as :func:`read_text` gives it.

    Returns:
        ``"fasta"`` (.fa .fasta .faa .fna, or the first line starts with ``>``), ``"pdb"`` (.pdb
        .ent, or PDB records), ``"mmcif"`` (.cif .mmcif, or a ``data_`` block with ``_atom_site``),
        else ``"text"``.

    Example:
        >>> import graphattn as ga
        >>> ga.data.sniff_format("genome.fna.gz", "")
        'fasta'
        >>> ga.data.sniff_format("unnamed", ">seq1\\nMKV")
        'fasta'
        >>> ga.data.sniff_format("play.txt", "To be, or not to be")
        'text'
    """
    name = os.fspath(path).lower().removesuffix(".gz")
    by_extension = _FORMAT_OF_EXTENSION.get(os.path.splitext(name)[1])
    if by_extension is not None:
        return by_extension

    if _FASTA_OPENING.match(text):
        return "fasta"
    if _MMCIF_OPENING.match(text) and "_atom_site." in text:
        return "mmcif"
    if text.lstrip("\n").startswith(_PDB_OPENING) and _PDB_ATOM.search(text):
        return "pdb"
    return "text"
