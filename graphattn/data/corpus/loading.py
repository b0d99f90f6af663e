"""Files as a corpus, read once: the second time, the cache is what is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy

from graphattn.data.corpus import readers
from graphattn.data.corpus.corpus import Corpus, read_facts
from graphattn.data.corpus.encoding import token_dtype
from graphattn.data.corpus.sources import KINDS, Source, find_source
from graphattn.data.corpus.writer import FORMAT, CorpusWriter
from graphattn.data.fasta import NucleotideTokenizer, ProteinTokenizer
from graphattn.data.files import FileFormatError
from graphattn.data.text import CharacterTokenizer
from graphattn.data.tokenizers import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    tokenizer_as_dict,
)
from graphattn.graphs.arguments import as_choice


def load_corpus(
    path: str | os.PathLike[str],
    *,
    kind: str = "auto",
    tokenizer: str | os.PathLike[str] | Tokenizer = "auto",
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Files as records of tokens or images, written as Arrow and mapped into memory.

    Text and FASTA (gzipped or not) are read piece by piece, whatever their size; GenBank and
    structures file by file. Letters become the smallest integers that hold them.

    Args:
        path: a file, a folder (all files in it and below), or a pattern such as ``"*.fasta"``.

            * Text: a file is a record.
            * FASTA: a record each. Its group is the organism, in [brackets] at the header's end or
              after ``OS=``; where headers name none and there are several files, the file's name.
            * GenBank: with ``labels``, 1 where a base lies in a CDS and 0 elsewhere, and the
              organism as group.
            * PDB or mmCIF: a file is a record, with the
              :class:`~graphattn.data.Structure` that :func:`~graphattn.data.read_structure` gives.
            * idx images (MNIST), with labels where ``...labels-idx1...`` lies beside
              ``...images-idx3...``; PNG or JPEG images, whose folders are classes.
        kind: "text", "protein", "nucleotide", "structures" or "images"; "auto" looks at names and
            at what files begin with. In a folder with files of several kinds it must be named.
        tokenizer: an object; "bytes"; "characters", those of the files; or the file of a
            `tokenizers` tokenizer. "auto" is bytes for text, and of sequences what their letters
            are.
        cache: a folder for what was read. It is used again while the source's files have the same
            sizes and times of change. None: a temporary folder, that is there as long as the
            corpus is used.

    Raises:
        FileFormatError: a file cannot be read as what it should be; it names the file and, where
            one is to blame, the line.
        ValueError: an argument is none of what is allowed.
        ImportError: `datasets`, or what reads a format, is not installed.

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
        raise ImportError("load_corpus needs datasets: pip install 'graphattn[train]'") from error
    source = find_source(path, kind)
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
    # An empty path would be the working directory.
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ValueError(f"path must be a file, a folder or a pattern, got {path!r}")
    if cache is None:
        return
    if not isinstance(cache, str | os.PathLike) or not os.fspath(cache):
        raise ValueError(f"cache must be a folder or None, got {cache!r}")
    if os.path.lexists(cache) and not os.path.isdir(cache):
        raise ValueError(f"cache must be a folder, got {os.fspath(cache)!r}, which is none")


def _asked_for(tokenizer: Any) -> str | Tokenizer:
    """ "auto", "bytes" and "characters" as they are; an object; or the tokenizer of a file."""
    if isinstance(tokenizer, str) and tokenizer in ("auto", "characters"):
        return tokenizer
    if isinstance(tokenizer, str) and tokenizer == "bytes":
        return ByteTokenizer()
    if isinstance(tokenizer, str | os.PathLike):
        if not os.path.exists(tokenizer):
            raise ValueError(
                "tokenizer must be 'auto', 'bytes', 'characters' or a file of the tokenizers "
                f"library, got {os.fspath(tokenizer)!r}, which does not exist"
            )
        return FileTokenizer(tokenizer)
    tokenizer_as_dict(tokenizer)  # ValueError for another object
    return tokenizer


def _cached(cache: Path, source: Source, kind: str, asked: str | Tokenizer) -> Path:
    """The folder of the corpus in the cache; it is written where it is not there."""
    from filelock import FileLock

    options = [FORMAT, kind, asked if isinstance(asked, str) else tokenizer_as_dict(asked)]
    key = json.dumps([source.state(), source.format, [name for _, name in source.files], options])
    name = f"{source.root.name[:40]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    name = name.translate(dict.fromkeys(map(ord, '*?[]"<>|:'), "_"))
    folder = cache / name
    if read_facts(folder) is not None:
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Of several processes one writes and the others wait; the lock falls with its process.
    with FileLock(cache / f"{name}.lock"):
        if read_facts(folder) is not None:
            return folder
        aside = cache / f"{name}.part"
        for left_over in (aside, folder):  # of a process that was stopped, or damaged since
            if left_over.exists():
                shutil.rmtree(left_over)
        aside.mkdir()
        try:
            _write(aside, source, kind, asked)
            os.rename(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(folder: Path, source: Source, kind: str, asked: str | Tokenizer) -> None:
    """Read the source's files and write the corpus."""
    before = source.state()
    tokenizer = _tokenizer_for(source, kind, asked)
    if kind == "auto":
        by_format = {"text": "text", "genbank": "nucleotide", "structure": "structures"}
        by_format |= {"image": "images", "idx": "images"}
        kind = by_format.get(source.format, "protein")
        if source.format == "fasta" and isinstance(tokenizer, NucleotideTokenizer):
            kind = "nucleotide"
    facts: dict[str, Any] = {"kind": kind, "image_shape": None, "classes": []}
    facts["tokenizer"] = None if tokenizer is None else tokenizer_as_dict(tokenizer)
    writer = CorpusWriter(
        folder,
        dtype=numpy.uint8 if tokenizer is None else token_dtype(tokenizer.vocab_size),
        has_labels=source.format == "genbank",
        has_structures=source.format == "structure",
    )
    try:
        if tokenizer is None:
            of_images = {"image": readers.read_images, "idx": readers.read_idxs}
            facts |= of_images[source.format](source, writer)
        else:
            of_tokens = {
                "text": readers.read_texts,
                "fasta": readers.read_fastas,
                "genbank": readers.read_genbanks,
                "structure": readers.read_structures,
            }
            facts |= of_tokens[source.format](source, writer, tokenizer)
        if source.state() != before:
            raise FileFormatError(source.root, "was changed while it was read")
        writer.finish(facts)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror or error}, while a corpus was written", str(folder)
        ) from error
    finally:
        writer.close()


def _tokenizer_for(source: Source, kind: str, asked: str | Tokenizer) -> Tokenizer | None:
    """Return the tokenizer of the source; None of images."""
    by_letter = (ProteinTokenizer, NucleotideTokenizer, CharacterTokenizer)
    if source.format in ("image", "idx"):
        if asked != "auto":
            raise ValueError(f"tokenizer must be 'auto' for images, got {asked!r}")
        return None
    if source.format == "text":
        if asked == "auto":
            return ByteTokenizer()
        return readers.characters_of(source) if isinstance(asked, str) else asked
    if asked == "auto":
        if kind == "nucleotide" or source.format == "genbank":
            return NucleotideTokenizer()
        if kind == "protein" or source.format == "structure":
            return ProteinTokenizer()
        return readers.tokenizer_of_fasta(source)
    if not isinstance(asked, by_letter):
        raise ValueError(
            "tokenizer must be 'auto', or one that has a token per letter (ProteinTokenizer, "
            f"NucleotideTokenizer, CharacterTokenizer) for sequences, got {asked!r}"
        )
    return asked
