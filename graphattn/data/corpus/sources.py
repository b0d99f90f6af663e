"""Sources of a corpus: the files of a path, and their format."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphattn.data.corpus.streams import open_bytes
from graphattn.data.files import (
    FORMAT_OF_EXTENSION,
    STRUCTURE_FORMATS,
    FileFormatError,
    sniff_format,
)
from graphattn.data.images import IDX_TYPES, labels_beside

KINDS = ("auto", "text", "protein", "nucleotide", "structures", "images", "table")

_FORMATS = {  # formats of every kind; the first one is assumed for a file that looks like text
    "text": ("text", "csv"),
    "protein": ("fasta",),
    "nucleotide": ("fasta", "genbank"),
    "structures": ("structure",),
    "images": ("image", "idx"),
    "table": ("csv",),
}
_BY_EXTENSION = {
    **dict.fromkeys((".gb", ".gbk", ".gbff", ".genbank"), "genbank"),
    **dict.fromkeys((".png", ".jpg", ".jpeg"), "image"),
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".idx": "idx",
}
_HEAD = 2**16  # bytes that are read to find the format, if the name does not give it


@dataclass(frozen=True)
class Source:
    """Files of one format.

    Attributes:
        files: the files with their names in the corpus, in the order in which they are read.
        format: "text", "csv", "fasta", "genbank", "structure", "image" or "idx".
        root: the path that the user gave.
        beside: other files that are read, such as labels.
        left_out: the names of files of other formats, which are not read.
        classes: names of the classes in the order of their numbers; None if the files give them.
    """

    files: tuple[tuple[Path, str], ...]
    format: str
    root: Path
    beside: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None

    def state(self) -> list[Any]:
        """Return the paths, sizes and modification times of the files."""
        states = []
        for path in [*(path for path, _ in self.files), *self.beside]:
            try:
                status = path.stat()
            except OSError as error:
                raise FileFormatError(path, f"cannot be read: {error.strerror}") from error
            states.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
        return states


def find_source(path: str | os.PathLike[str], kind: str) -> Source:
    """Find the files of a path, which is a file, a folder or a pattern."""
    root = Path(path)
    try:
        root.is_dir()
    except OSError as error:  # for example, the name is too long, or links form a loop
        raise FileFormatError(path, f"cannot be read: {error.strerror}") from error
    if root.is_dir():
        paths = [file for file in sorted(root.rglob("*")) if file.is_file()]
        files = [
            (file, file.relative_to(root).as_posix()) for file in paths if not is_hidden(file, root)
        ]
    elif root.exists():
        files = [(root, root.name)]
    else:
        matches = (Path(file) for file in sorted(glob.glob(os.fspath(path), recursive=True)))
        files = [(file, file.name) for file in matches if file.is_file()]
        if not files:
            raise FileFormatError(path, "no such file")
    if not files:
        raise FileFormatError(path, "is an empty folder")

    # Arrow needs UTF-8: other bytes of a file's name are written as in "\\xe9".
    files = [
        (file, os.fsencode(name).decode("utf-8", errors="backslashreplace")) for file, name in files
    ]
    formats = {file: format_of(file) for file, _ in files}
    labels = {labels_beside(file) for file, _ in files if formats[file] == "idx"}
    files = [(file, name) for file, name in files if file not in labels]
    single = len(files) == 1
    wanted = _wanted(path, kind, [formats[file] for file, _ in files], single)
    chosen = tuple((file, name) for file, name in files if single or formats[file] == wanted)
    beside = (labels_beside(file) for file, _ in chosen if wanted == "idx")
    left_out = tuple(name for file, name in files if not single and formats[file] != wanted)
    return Source(chosen, wanted, root, tuple(filter(None, beside)), left_out)


def is_hidden(path: Path, root: Path) -> bool:
    """Return whether a part of the path below `root` begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _wanted(path: str | os.PathLike[str], kind: str, formats: Iterable[str], single: bool) -> str:
    """Choose the format that is read, among the formats of the files."""
    there = list(dict.fromkeys(formats))
    if kind != "auto":
        allowed = _FORMATS[kind]
        if single and there[0] == "text":
            return allowed[0]  # Its reader will raise an error with the line that is wrong.
        if single and kind == "text":
            return "csv" if there[0] == "csv" else "text"
        there = [file for file in there if file in allowed]
        if kind == "text" and "text" in there:
            there = ["text"]  # tables beside the texts are left out
        if not there:
            raise FileFormatError(
                path, f"holds no {' or '.join(allowed)} files, which kind={kind!r} needs"
            )
    if len(there) > 1:
        raise FileFormatError(
            path,
            f"holds files of several formats ({', '.join(there)}): choose one by the argument kind",
        )
    return there[0]


def format_of(path: Path) -> str:
    """Find the format of a file from its name (with or without ``.gz``), or from its beginning."""
    extension = os.path.splitext(path.name.lower().removesuffix(".gz"))[1]
    if extension in _BY_EXTENSION:
        return _BY_EXTENSION[extension]
    head = b""
    if extension not in FORMAT_OF_EXTENSION:
        with open_bytes(path) as file:
            head = file.read(_HEAD)
    if head[:2] == b"\0\0" and len(head) > 2 and head[2] in IDX_TYPES:
        return "idx"
    if head.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")):
        return "image"
    text = head.decode("utf-8", errors="replace")
    if text.startswith("LOCUS  "):
        return "genbank"
    sniffed = sniff_format(path, text)
    return "structure" if sniffed in STRUCTURE_FORMATS else sniffed
