"""Reading files, with errors of one line that say what is wrong with a file."""

import gzip
import io
import os
import re
import stat
import zlib
from typing import BinaryIO, Literal

FileFormat = Literal["text", "fasta", "pdb", "mmcif", "bcif"]
STRUCTURE_FORMATS = ("pdb", "mmcif", "bcif")

# 256 MiB: enough for any human chromosome. A limit is needed, because a gzip file of 1 MB can
# decompress to 1 GB.
MAX_BYTES = 2**28
_PIECE = 2**20  # bytes that are read at a time, so that reading can stop before the memory is full

_GZIP_MAGIC = b"\x1f\x8b"  # UTF-8 text never begins with these bytes, so they identify a gzip file

FORMAT_OF_EXTENSION: dict[str, FileFormat] = {
    **dict.fromkeys((".fa", ".fasta", ".faa", ".fna"), "fasta"),
    **dict.fromkeys((".pdb", ".ent"), "pdb"),
    **dict.fromkeys((".cif", ".mmcif"), "mmcif"),
    ".bcif": "bcif",
}

# These match the first line that is neither blank nor a comment.
_FASTA_OPENING = re.compile(r"(?:[^\S\n]*(?:;.*)?\n)*[^\S\n]*>")
_MMCIF_OPENING = re.compile(r"(?:[^\S\n]*(?:#.*)?\n)*data_", re.IGNORECASE)

# Records with which a PDB file may begin, padded to six columns, because text rarely has "TITLE ".
_PDB_OPENING = (
    *("HEADER", "OBSLTE", "TITLE ", "SPLIT ", "CAVEAT", "COMPND", "SOURCE", "KEYWDS", "EXPDTA"),
    *("AUTHOR", "REVDAT", "REMARK", "DBREF ", "SEQRES", "HELIX ", "SHEET ", "CRYST1", "ORIGX1"),
    *("MODEL ", "ATOM  ", "HETATM"),
)
_PDB_ATOM = re.compile(r"^(?:ATOM  |HETATM)", re.MULTILINE)


class FileFormatError(ValueError):
    """A file cannot be read, or has the wrong format. The message is always a single line.

    Args:
        path: the file.
        reason: what is wrong with it.
        line: the number of the wrong line, counted from 1; None if it is not one line.

    Example:
        >>> import graphattn as ga
        >>> print(ga.data.FileFormatError("genes.fasta", "no sequence after this header", line=7))
        genes.fasta: line 7: no sequence after this header
        >>> print(ga.data.FileFormatError("genes.fasta", "no such file"))
        genes.fasta: no such file
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, line: int | None = None) -> None:
        super().__init__(path, reason, line)  # An exception is unpickled from these arguments.
        self.path = os.fspath(path)
        self.reason = reason
        self.line = line

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return _one_line(f"{self.path or repr('')}: {where}{self.reason}")


def _one_line(text: str) -> str:
    """Escape line breaks, control characters and lone surrogates in a text."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES) -> bytes:
    """Read the bytes of a file; a gzipped file (by its name or its content) is decompressed.

    Args:
        path: the file.
        max_bytes: the largest size of the file, before and after decompression; None for no limit.
            Decompression stops at this size.

    Raises:
        FileFormatError: if the file does not exist, is a directory or a device, cannot be read, is
            empty (or contains only whitespace), is a damaged gzip file, or is larger than
            `max_bytes`.
        ValueError: if `max_bytes` is not a positive integer or None.

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
            # Devices are refused because /dev/zero never ends. A pipe, as in `<(zcat genes.fa.gz)`,
            # ends.
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
    except ValueError as error:  # The name has a NUL or a lone surrogate, so no file can have it.
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
    """Read an open file; raise as soon as it is larger than `max_bytes`."""
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(_PIECE):
        size += len(piece)
        if max_bytes is not None and size > max_bytes:
            raise _too_large(name, f"{holds} more than {max_bytes:,} bytes", max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(name: str, what: str, max_bytes: int) -> FileFormatError:
    limit = f"max_bytes = {max_bytes:,} is the limit (pass a larger one, or None)"
    return FileFormatError(name, f"{what}, and {limit}")


def read_text(path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES) -> str:
    r"""Read the text of a UTF-8 file, gzipped or not; all line ends become ``"\n"``.

    Args:
        path: the file.
        max_bytes: the largest size that is read, as in :func:`read_bytes`.

    Raises:
        FileFormatError: in the same cases as :func:`read_bytes`, and for binary files (which have a
            NUL byte, or are not UTF-8).

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
        text = data.decode("utf-8-sig")  # This skips a byte-order mark, which is not text.
    except UnicodeDecodeError as error:
        before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        reason = f"byte 0x{data[error.start]:02x} is not UTF-8 text (a binary file?)"
        raise FileFormatError(path, reason, line=before.count(b"\n") + 1) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise FileFormatError(path, "is empty")
    return text


def sniff_format(path: str | os.PathLike[str], text: str) -> FileFormat:
    """Find the format of a file from its extension (with or without ``.gz``), or from its content.

    Args:
        path: the file's name; the file need not exist.
        text: its content, as from :func:`read_text`.

    Returns:
        ``"fasta"`` (.fa .fasta .faa .fna, or the first line starts with ``>``), ``"pdb"`` (.pdb
        .ent, or PDB records), ``"mmcif"`` (.cif .mmcif, or a ``data_`` block with ``_atom_site``),
        ``"bcif"`` (.bcif, which is binary: :func:`read_text` refuses it), or else ``"text"``.

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
    by_extension = FORMAT_OF_EXTENSION.get(os.path.splitext(name)[1])
    if by_extension is not None:
        return by_extension

    if _FASTA_OPENING.match(text):
        return "fasta"
    if _MMCIF_OPENING.match(text) and "_atom_site." in text.lower():
        return "mmcif"
    if text.lstrip("\n").startswith(_PDB_OPENING) and _PDB_ATOM.search(text):
        return "pdb"
    return "text"
