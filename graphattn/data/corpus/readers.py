"""Readers of all formats, which write files as records of a corpus, piece by piece."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from graphattn.data.corpus.encoding import LetterTable, UnknownLetter, text_tokens
from graphattn.data.corpus.sources import Source, is_hidden
from graphattn.data.corpus.streams import PIECE, line_pieces, open_bytes, text_pieces
from graphattn.data.corpus.structures import structure_as_bytes
from graphattn.data.corpus.writer import CorpusWriter
from graphattn.data.fasta import NucleotideTokenizer, ProteinTokenizer, tokenizer_for_sequence
from graphattn.data.files import FileFormatError
from graphattn.data.genbank import read_genbank
from graphattn.data.images import idx_images, labels_beside, read_idx, read_image
from graphattn.data.structures import read_structure
from graphattn.data.text import CharacterTokenizer
from graphattn.data.tokenizers import FileTokenizer

Facts = dict[str, Any]

# NCBI writes "... [Mycoplasma agalactiae]" at the end, UniProt "OS=Homo sapiens OX=9606".
_ORGANISMS = (
    re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\s*$"),
    re.compile(r"(?:^|\s)OS=(.+?)(?=\s+[A-Z]{2}=|\s*$)"),
)


def organism(header: str) -> str:
    """Find the organism in a FASTA header; "" if there is none."""
    matches = (pattern.search(header) for pattern in _ORGANISMS)
    return next((match[1].strip() for match in matches if match), "")


# Text.


def characters_of(source: Source) -> CharacterTokenizer:
    """Make a tokenizer of all characters in the texts, which are read once for this."""
    letters: set[str] = set()
    for path, _ in source.files:
        for piece in text_pieces(path):
            letters.update(piece)
    return CharacterTokenizer("".join(sorted(letters)))


def read_texts(source: Source, writer: CorpusWriter, tokenizer: Any) -> Facts:
    """Write every text file as a record; if all are in folders, these are their classes."""
    size, num_bytes = PIECE, 0
    folders = _folders(source)
    classes = list(source.classes or sorted(set(folders))) if all(folders) else []
    if len(classes) < 2:
        classes = []
    if isinstance(tokenizer, FileTokenizer):
        size = PIECE // 4  # The library needs a few hundred bytes of memory per token.

    def counted(pieces: Iterator[str]) -> Iterator[str]:
        nonlocal num_bytes
        for piece in pieces:
            num_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8"))
            yield piece

    for (path, name), folder in zip(source.files, folders, strict=True):
        for tokens in text_tokens(path, counted(text_pieces(path, size)), tokenizer):
            writer.extend(tokens)
        writer.end(name, label=_class_of(path, folder, classes))
    return {"num_bytes": num_bytes, "classes": classes}


def _folders(source: Source) -> list[str]:
    """Return the folder of every file, which may be its class."""
    return [name.rpartition("/")[0] for _, name in source.files]


def _class_of(path: Path, folder: str, classes: list[str]) -> int | None:
    """Return the number of a class; None if there are no classes."""
    if not classes:
        return None
    if folder not in classes:
        raise FileFormatError(
            path, f"is in the folder {folder!r}, which is none of the classes {', '.join(classes)}"
        )
    return classes.index(folder)


# FASTA.

_LETTERS_TO_TELL = 10_000


def tokenizer_of_fasta(source: Source) -> ProteinTokenizer | NucleotideTokenizer:
    """Choose a tokenizer by the first letters of the first file."""
    letters: list[str] = []
    is_sequence = False
    for _, begins, line in line_pieces(source.files[0][0]):
        is_sequence = not line.startswith((">", ";")) if begins else is_sequence
        if is_sequence:
            letters.append(line)
        if sum(map(len, letters)) >= _LETTERS_TO_TELL:
            break
    try:
        return tokenizer_for_sequence("".join(letters))
    except ValueError:
        return ProteinTokenizer()  # The reader will raise an error with the line that is wrong.


def read_fastas(source: Source, writer: CorpusWriter, tokenizer: Any) -> Facts:
    """Write all FASTA records; if there are several files, a file's name can be the group."""
    table, letters = LetterTable(tokenizer), 0
    for path, name in source.files:
        stem = Path(name.removesuffix(".gz")).stem
        group = stem if len(source.files) > 1 else ""
        letters += _read_fasta(path, writer, table, group)
    return {"num_bytes": letters}


def _read_fasta(path: Path, writer: CorpusWriter, table: LetterTable, group: str) -> int:
    header, header_line, letters = "", 0, 0
    unwritten: list[tuple[int, str]] = []  # lines that are not encoded yet, with their numbers
    num_unwritten = 0

    def write() -> None:
        nonlocal num_unwritten
        try:
            writer.extend(table.encode("".join(line for _, line in unwritten)))
        except UnknownLetter as error:
            ends = itertools.accumulate(len(line) for _, line in unwritten)
            lines = zip(unwritten, ends, strict=True)
            number = next(number for (number, _), end in lines if end > error.place)
            raise FileFormatError(path, error.reason, line=number) from None
        unwritten.clear()
        num_unwritten = 0

    def end() -> None:
        write()
        if writer.size == 0:
            raise FileFormatError(path, "no sequence after this header", line=header_line)
        writer.end(header, group=organism(header) or group)

    what = ""  # the first character of the current line, which may be given in several pieces
    for number, begins, line in line_pieces(path):
        what = line[:1] if begins else what
        if not line or what == ";":
            continue
        if what == ">" and not begins:
            header += line
        elif what == ">":
            if header_line:
                end()
            header, header_line = line[1:].lstrip(), number
            if not header.strip():
                raise FileFormatError(path, "empty header: nothing after '>'", line=number)
        elif not header_line:
            raise FileFormatError(path, "not FASTA: text before the first '>'", line=number)
        else:
            unwritten.append((number, line))
            num_unwritten += len(line)
            letters += len(line)
            if num_unwritten >= PIECE:
                write()
    if not header_line:
        raise FileFormatError(path, "not FASTA: no line starts with '>'")
    end()
    return letters


# GenBank.


def read_genbanks(source: Source, writer: CorpusWriter, tokenizer: Any) -> Facts:
    """Write all GenBank records, with a label per base that says whether it is coding."""
    table, letters = LetterTable(tokenizer), 0
    for path, _ in source.files:
        for record in read_genbank(path, feature="CDS", max_bytes=None):
            try:
                tokens = table.encode(record.sequence)
            except UnknownLetter as error:
                line = _line_of(path, error.letter)
                reason = f"{error.reason} ({record.name})"
                raise FileFormatError(path, reason, line=line) from None
            writer.extend(tokens, None if record.labels is None else record.labels.numpy())
            writer.end(record.name, group=record.organism)
            letters += len(record.sequence)
    return {"num_bytes": letters}


def _line_of(path: Path, letter: str) -> int | None:
    """Find the first line of a sequence that contains a letter."""
    is_sequence = False
    for number, _, line in line_pieces(path):
        is_sequence = (is_sequence or line.startswith("ORIGIN")) and not line.startswith("//")
        if is_sequence and not line.startswith("ORIGIN") and letter in line.upper():
            return number
    return None


# Structures.


def read_structures(source: Source, writer: CorpusWriter, tokenizer: Any) -> Facts:
    """Write every structure file as a record, with all chains of its first model."""
    table, letters = LetterTable(tokenizer), 0
    for path, name in source.files:
        structure = read_structure(path, max_bytes=None)
        try:
            writer.extend(table.encode(structure.sequence))
        except UnknownLetter as error:
            raise FileFormatError(path, error.reason) from None
        writer.end(name, structure=structure_as_bytes(structure))
        letters += len(structure)
    return {"num_bytes": letters}


# Images.


def read_images(source: Source, writer: CorpusWriter, tokenizer: None) -> Facts:
    """Write every image file as a record; the folders of the files are their classes."""
    folders = _folders(source)
    classes = list(source.classes or sorted(set(folders))) if any(folders) else []
    if "" in folders and classes:
        stray = source.files[folders.index("")][0]
        raise FileFormatError(
            stray, "has no class, because it is not in a folder, but other images are in folders"
        )
    for path in sorted(source.root.rglob("*")) if classes and source.root.is_dir() else ():
        if path.is_dir() and not is_hidden(path, source.root) and not any(path.iterdir()):
            raise FileFormatError(path, "is a class without images: fill or remove the folder")
    shape: tuple[int, ...] = ()
    for (path, name), folder in zip(source.files, folders, strict=True):
        shape = _write_image(path, writer, read_image(path), shape, source.files[0][0])
        writer.end(name, label=_class_of(path, folder, classes))
    return {"num_bytes": writer.num_values, "image_shape": shape, "classes": classes}


def read_idxs(source: Source, writer: CorpusWriter, tokenizer: None) -> Facts:
    """Write the images of idx files, with their labels if there is a file with labels."""
    shape: tuple[int, ...] = ()
    largest = -1
    labelled: list[bool] = []
    for path, name in source.files:
        beside = labels_beside(path)
        labels = None if beside is None else _idx_labels(beside)
        labelled.append(labels is not None)
        count = 0
        with open_bytes(path) as stream:
            for count, image in enumerate(idx_images(path, stream), 1):
                shape = _write_image(path, writer, image, shape, source.files[0][0])
                label = None
                if labels is not None:
                    if count > len(labels):
                        break
                    label = int(labels[count - 1])
                    largest = max(largest, label)
                writer.end(f"{name}[{count - 1}]", label=label)
        if labels is not None and count != len(labels):
            raise FileFormatError(
                beside or path,
                f"holds {len(labels):,} labels, but {path} holds another number of images",
            )
    if len(set(labelled)) > 1:
        missing = source.files[labelled.index(False)][0]
        raise FileFormatError(
            missing, "has no file with labels in the same folder, but other files have"
        )
    classes = list(source.classes or map(str, range(largest + 1)))
    if largest >= len(classes):
        raise FileFormatError(
            source.files[0][0],
            f"has the label {largest}, but there are {len(classes)} classes: {', '.join(classes)}",
        )
    return {"num_bytes": writer.num_values, "image_shape": shape, "classes": classes}


def _idx_labels(path: Path) -> list[int]:
    labels = read_idx(path, max_bytes=None)
    if labels.dim() != 1 or labels.is_floating_point() or (len(labels) and int(labels.min()) < 0):
        reason = (
            "must hold labels, which are integers >= 0 of shape [N], but holds "
            f"{labels.dtype} of shape {list(labels.shape)}"
        )
        raise FileFormatError(path, reason)
    return labels.tolist()


def _write_image(
    path: Path, writer: CorpusWriter, image: Any, shape: tuple[int, ...], first: Path
) -> tuple[int, ...]:
    if shape and image.shape != shape:
        raise FileFormatError(
            path,
            f"is an image of (channels, height, width) = {image.shape}, but {first} is one of "
            f"{shape}: all images of a corpus must have the same size",
        )
    writer.extend(numpy.ascontiguousarray(image))
    return tuple(image.shape)


READERS = {  # of every format
    "text": read_texts,
    "fasta": read_fastas,
    "genbank": read_genbanks,
    "structure": read_structures,
    "image": read_images,
    "idx": read_idxs,
}
