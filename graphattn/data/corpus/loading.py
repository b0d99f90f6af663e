"""Loading a corpus from files, or from the cache if the files were read before."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from graphattn.data.corpus import readers
from graphattn.data.corpus.corpus import Corpus, read_facts
from graphattn.data.corpus.encoding import token_dtype
from graphattn.data.corpus.sources import KINDS, Source, find_source
from graphattn.data.corpus.tables import (
    characters_of_rows,
    columns_of,
    read_csvs,
    tokenizer_of_table,
)
from graphattn.data.corpus.writer import FORMAT, CorpusWriter
from graphattn.data.fasta import NucleotideTokenizer, ProteinTokenizer
from graphattn.data.files import FileFormatError
from graphattn.data.tables.tokenizer import TableTokenizer
from graphattn.data.text import CharacterTokenizer
from graphattn.data.tokenizers import ByteTokenizer, Tokenizer, read_tokenizer, tokenizer_as_dict
from graphattn.graphs.arguments import as_choice
from graphattn.warn import warn_caller


def load_corpus(
    path: str | os.PathLike[str],
    *,
    kind: str = "auto",
    tokenizer: str | os.PathLike[str] | Tokenizer = "auto",
    cache: str | os.PathLike[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Corpus:
    """Load files as a corpus: records of tokens or images in memory-mapped Arrow files.

    Text and FASTA files (gzipped or not) are read piece by piece, so they may be of any size.
    GenBank and structures are read file by file. Tokens are stored as the smallest integers that
    are large enough.

    Args:
        path: a file, a folder (all files in it and in its subfolders), or a pattern such as
            ``"*.fasta"``.

            * Text: every file is a record. If all files are in folders, of which there are at
              least two, the folders are the classes.
            * CSV or TSV (``.csv``, ``.tsv``): every row is a record. The column "label", or else
              the last one, has the class. If there is a column "text", or only one column beside
              the label, the records are texts; otherwise it is a table, with one token per column
              (:class:`TableTokenizer`), and the names of the records are their cells. The first
              row has the names of the columns, unless one of its cells is a number and none is
              "label". TSV has no quotes.
            * FASTA: every sequence is a record. Its group is the organism, which is in [brackets]
              at the end of the header, or after ``OS=``. If a header has no organism and there are
              several files, the group is the name of the file.
            * GenBank: every entry is a record, with ``labels``, which are 1 for bases in a CDS and
              0 for others, and the organism as its group.
            * PDB, mmCIF or BinaryCIF: every file is a record, with the
              :class:`~graphattn.data.Structure` of :func:`~graphattn.data.read_structure`.
            * idx images (MNIST): every image is a record. Labels are read from the file
              ``...labels-idx1...``, if there is one for ``...images-idx3...`` in the same folder.
            * PNG or JPEG images: every file is a record, and the folders are the classes.
        kind: "text", "protein", "nucleotide", "structures", "images" or "table". With "auto", it is
            found from the names and beginnings of the files. It must be given for a folder with
            files of several kinds; a warning names the files that are left out.
        tokenizer: a tokenizer; "bytes"; "characters", for the characters that occur in the files;
            "iupac", for nucleotides with all their codes; or the path of a file of the `tokenizers`
            library. "auto" takes bytes for text, and for sequences the tokenizer that fits their
            letters. For a table, it takes a :class:`TableTokenizer` that is fitted to all rows.
        cache: a folder in which the corpus is stored. It is used again as long as the files of
            `path` have the same sizes and modification times. With None, it is a temporary folder,
            which is deleted when the corpus is no longer used.
        classes: names of the classes, in the order of their numbers, such as those of an earlier
            corpus. If None, they are the names that occur, in alphabetical or numerical order.

    Raises:
        FileFormatError: if a file cannot be read; the message has the name of the file, and the
            line if one line is wrong.
        ValueError: if an argument has a value that is not allowed.
        ImportError: if `datasets`, or a library that reads a format, is not installed.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "play.txt")
        ...     _ = path.write_text("to be or not to be")
        ...     corpus = ga.data.load_corpus(path, tokenizer="characters")
        >>> corpus, corpus.tokenizer.decode(corpus.tokens(0, 6, 12))
        (Corpus(kind='text', records=1, tokens=18), 'or not')
    """
    as_choice("kind", kind, KINDS)
    _check_paths(path, cache)
    try:
        import datasets.arrow_writer  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "load_corpus needs datasets: install it with pip install 'graphattn[train]'"
        ) from error
    source = dataclasses.replace(find_source(path, kind), classes=_class_names(classes))
    if source.left_out:
        warn_caller(
            f"{os.fspath(path)}: files are left out, because kind={kind!r} reads only files of the "
            f"format {source.format!r} here: {', '.join(source.left_out)}"
        )
    asked = _asked_for(tokenizer)
    if cache is None:
        folder = Path(tempfile.mkdtemp(prefix="graphattn-corpus-"))
        try:
            _write(folder, source, kind, asked)
            corpus = Corpus(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        corpus.remove_at_end()
        return corpus
    return Corpus(_cached(Path(cache), source, kind, asked))


def _check_paths(path: Any, cache: Any) -> None:
    # Path("") would be the working directory, so an empty path is not allowed.
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f"path must be the path of a file or folder, or a pattern, got {path!r}")
    if cache is None:
        return
    if not isinstance(cache, str | os.PathLike) or not os.fspath(cache):
        raise ValueError(f"cache must be a folder or None, got {cache!r}")
    if os.path.lexists(cache) and not os.path.isdir(cache):
        raise ValueError(
            f"cache must be a folder, got {os.fspath(cache)!r}, which exists but is not a folder"
        )


def _class_names(classes: Any) -> tuple[str, ...] | None:
    if classes is None:
        return None
    names = [classes] if isinstance(classes, str) else list(classes)
    if len(names) < 2 or len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"classes must be at least two different texts, got {classes!r}")
    return tuple(names)


def _asked_for(tokenizer: Any) -> str | Tokenizer:
    """Return a tokenizer from an object, a name or a file; "auto" and "characters" unchanged."""
    if isinstance(tokenizer, str) and tokenizer in ("auto", "characters"):
        return tokenizer
    if isinstance(tokenizer, str) and tokenizer == "bytes":
        return ByteTokenizer()
    if isinstance(tokenizer, str) and tokenizer == "iupac":
        return NucleotideTokenizer(iupac=True)
    if isinstance(tokenizer, str | os.PathLike):  # of an earlier run, or of the library
        if not os.path.exists(tokenizer):
            raise ValueError(
                "tokenizer must be 'auto', 'bytes', 'characters', 'iupac' or a file of the "
                f"tokenizers library, got {os.fspath(tokenizer)!r}, which does not exist"
            )
        return read_tokenizer(tokenizer)
    tokenizer_as_dict(tokenizer)  # raises ValueError if it is not a known tokenizer
    return tokenizer


def _cached(cache: Path, source: Source, kind: str, asked: str | Tokenizer) -> Path:
    """Return the folder of the corpus in the cache; write the corpus if it is not there."""
    from filelock import FileLock

    named = asked if isinstance(asked, str) else tokenizer_as_dict(asked)
    options = [FORMAT, kind, named, *([] if source.classes is None else source.classes)]
    key = json.dumps([source.state(), source.format, [name for _, name in source.files], options])
    name = f"{source.root.name[:40]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    name = name.translate(dict.fromkeys(map(ord, '*?[]"<>|:'), "_"))
    folder = cache / name
    if read_facts(folder) is not None:
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # If several processes load the same files, one writes and the others wait. The lock is
    # released when its process ends.
    with FileLock(cache / f"{name}.lock"):
        if read_facts(folder) is not None:
            return folder
        partial = cache / f"{name}.part"
        # A folder may be left over from a process that was stopped, or may be damaged.
        for left_over in (partial, folder):
            if left_over.exists():
                shutil.rmtree(left_over)
        partial.mkdir()
        try:
            _write(partial, source, kind, asked)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(folder: Path, source: Source, kind: str, asked: str | Tokenizer) -> None:
    """Read the source's files and write the corpus."""
    before = source.state()
    if source.format == "csv":
        kind = "table" if columns_of(source, kind).text is None else "text"
    tokenizer = _tokenizer_for(source, kind, asked)
    if kind == "auto":
        of_letters = "nucleotide" if isinstance(tokenizer, NucleotideTokenizer) else "protein"
        by_format = {"text": "text", "genbank": "nucleotide", "structure": "structures"}
        kind = "images" if tokenizer is None else by_format.get(source.format, of_letters)
    facts: dict[str, Any] = {"kind": kind, "image_shape": None, "classes": []}
    facts["tokenizer"] = None if tokenizer is None else tokenizer_as_dict(tokenizer)
    writer = CorpusWriter(
        folder,
        dtype=numpy.uint8 if tokenizer is None else token_dtype(tokenizer.vocab_size),
        has_labels=source.format == "genbank",
        has_structures=source.format == "structure",
    )
    try:
        read = read_csvs if source.format == "csv" else readers.READERS[source.format]
        facts |= read(source, writer, tokenizer)
        if source.state() != before:
            raise FileFormatError(source.root, "was changed while it was read; read it again")
        writer.finish(facts)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror or error}, while a corpus was written", str(folder)
        ) from error
    finally:
        writer.close()


def _tokenizer_for(source: Source, kind: str, asked: str | Tokenizer) -> Tokenizer | None:
    """Return the tokenizer for the source; None for images."""
    if source.format in ("image", "idx"):
        if asked != "auto":
            raise ValueError(
                f"tokenizer must be 'auto' for images, which have no tokenizer, got {asked!r}"
            )
        return None
    if kind == "table":
        if asked == "auto":
            return tokenizer_of_table(source, columns_of(source, kind))
        if isinstance(asked, TableTokenizer):
            return asked
        raise ValueError(
            "tokenizer must be 'auto' or a TableTokenizer for a table, whose tokens are cells, got "
            f"{asked!r}"
        )
    if source.format in ("text", "csv"):
        if isinstance(asked, TableTokenizer):
            raise ValueError(f"tokenizer must be one of text, but data is text, got {asked!r}")
        if asked == "auto":
            return ByteTokenizer()
        if not isinstance(asked, str):
            return asked
        if source.format == "csv":
            return characters_of_rows(source, columns_of(source, kind))
        return readers.characters_of(source)
    if asked == "auto":
        if kind == "nucleotide" or source.format == "genbank":
            return NucleotideTokenizer()
        if kind == "protein" or source.format == "structure":
            return ProteinTokenizer()
        return readers.tokenizer_of_fasta(source)
    if not isinstance(asked, ProteinTokenizer | NucleotideTokenizer | CharacterTokenizer):
        raise ValueError(
            "tokenizer must be 'auto', or a tokenizer with one token per letter (ProteinTokenizer, "
            f"NucleotideTokenizer, CharacterTokenizer) for sequences, got {asked!r}"
        )
    return asked
