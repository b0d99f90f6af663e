"""Corpus: records of tokens or images in memory-mapped files."""

from __future__ import annotations

import copy
import json
import operator
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from graphattn.data.corpus.structures import part_of_structure, structure_from_bytes
from graphattn.data.corpus.writer import FACTS, FORMAT, RECORDS, VALUES
from graphattn.data.tokenizers import Tokenizer, tokenizer_from_dict
from graphattn.graphs.arguments import as_int


class Corpus:
    """Records of tokens, or images, to train and test models with.

    :func:`load_corpus` makes a corpus from files. The records are in Arrow files that are mapped
    into memory. So a corpus may be larger than the memory, and only the requested part of a record
    is read. ``corpus[i]`` is a dictionary:

    ===============  =============================================================================
    ``"tokens"``     LongTensor [N]; for images instead ``"image"``, float [C, H, W] from 0 to 1
    ``"name"``       the name of the record: a whole FASTA header, or the name of a file
    ``"group"``      the organism, if there is one
    ``"labels"``     LongTensor [N], if there are labels (GenBank: whether a base is coding)
    ``"label"``      the number of the class of a text, a row or an image, if there are classes
    ``"structure"``  a :class:`Structure <graphattn.data.Structure>`, if there are structures
    ===============  =============================================================================

    Args:
        folder: a folder that :func:`load_corpus` wrote; it is inside its `cache`.

    Attributes:
        kind: "text", "protein", "nucleotide", "structures", "images" or "table".
        tokenizer: the tokenizer of the tokens; None for images.
        fingerprint: a string that is equal if all records and the tokenizer are equal.
        lengths: LongTensor [records], the number of tokens of every record. An image counts as 1.
        num_tokens: the sum of `lengths`.
        num_bytes: the size of the text of all tokens as UTF-8, in bytes (for images: of the
            pixels).
        classes: names of the classes; ``label`` is an index into them.
        image_shape: (C, H, W) of images, else None.

    Raises:
        ValueError: if `folder` has no complete corpus.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "two.fasta")
        ...     _ = path.write_text(">one [Homo sapiens]\\nMKV\\n>two [Mus musculus]\\nLTAG\\n")
        ...     corpus = ga.data.load_corpus(path)
        >>> corpus
        Corpus(kind='protein', records=2, tokens=7)
        >>> corpus[0]
        {'tokens': tensor([10,  8, 17]), 'name': 'one [Homo sapiens]', 'group': 'Homo sapiens'}
        >>> corpus.tokens(1, 1, 3), corpus.lengths
        (tensor([16,  0]), tensor([3, 4]))
    """

    kind: str
    tokenizer: Tokenizer | None
    fingerprint: str
    lengths: Tensor
    num_tokens: int
    num_bytes: int
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int] | None
    _source: Corpus

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._open(Path(folder))

    def _open(self, folder: Path) -> None:
        from datasets import Dataset

        facts = read_facts(folder)
        if facts is None:
            raise ValueError(
                f"folder must contain a corpus that load_corpus wrote, got {str(folder)!r}"
            )
        self._folder = folder
        self._values = Dataset.from_file(str(folder / VALUES)).data
        self._records = Dataset.from_file(str(folder / RECORDS)).data
        self.kind, self.fingerprint = facts["kind"], facts["fingerprint"]
        saved = facts["tokenizer"]
        self.tokenizer = None if saved is None else tokenizer_from_dict(saved, folder / FACTS)
        columns = (self._records.column(name).to_numpy() for name in ("start", "size"))
        self._starts, self._sizes = (column.astype(numpy.int64) for column in columns)
        self.image_shape = tuple(facts["image_shape"]) if facts["image_shape"] else None
        sizes = torch.from_numpy(self._sizes.copy())
        self.lengths = torch.ones_like(sizes) if self.image_shape else sizes
        self.num_tokens, self.num_bytes = int(self.lengths.sum()), facts["num_bytes"]
        self.classes = tuple(facts["classes"])

    def pixels(self) -> Corpus:
        """Return the same images as sequences: one token, 0 to 255, per value of a pixel.

        The order is that of memory, [C, H, W]. The sequences have no start token.

        Raises:
            ValueError: if the corpus has no images.

        Example:
            >>> import pathlib, tempfile, graphattn as ga
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "images-idx3-ubyte")
            ...     _ = path.write_bytes(bytes([0, 0, 8, 3, *(0, 0, 0, 1) * 2, 0, 0, 0, 2, 7, 255]))
            ...     corpus = ga.data.load_corpus(path).pixels()
            >>> corpus.tokens(0), corpus.image_shape
            (tensor([  7, 255]), None)
        """
        if self.image_shape is None:
            raise ValueError(f"pixels() needs a corpus of images, got one of kind {self.kind!r}")
        corpus = copy.copy(self)
        corpus._source = self  # its files may be removed with it
        corpus._show_pixels()
        return corpus

    def _show_pixels(self) -> None:
        self.image_shape = None
        self.lengths = torch.from_numpy(self._sizes.copy())
        self.num_tokens = int(self.lengths.sum())

    def __len__(self) -> int:
        """The number of records."""
        return len(self._sizes)

    def __repr__(self) -> str:
        what = f"shape={self.image_shape}" if self.image_shape else f"tokens={self.num_tokens}"
        return f"Corpus(kind={self.kind!r}, records={len(self)}, {what})"

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.example(i)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.example(i) for i in range(len(self)))

    @property
    def names(self) -> list[str]:
        """Names of the records."""
        return self._records.column("name").to_pylist()

    @property
    def groups(self) -> list[str]:
        """Groups of the records; ``""`` for a record without a group."""
        return self._records.column("group").to_pylist()

    def example(self, i: int, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Read a record or a part of it; tokens, labels and structure are cut to the same part.

        Args:
            i: the number of the record; negative numbers count from the end.
            start, stop: the first token, and the one after the last (None: the end of the record).

        Raises:
            IndexError: if there is no such record.
            ValueError: if the part is not inside the record, or is a part of an image.
        """
        i, start, stop = self._part(i, start, stop)
        row = self._records.fast_slice(i, 1).to_pylist()[0]
        example: dict[str, Any] = {}
        if self.image_shape is not None:
            pixels = self._read("value", self._starts[i], self._starts[i] + self._sizes[i])
            example["image"] = torch.from_numpy(
                pixels.astype(numpy.float32).reshape(self.image_shape) / numpy.float32(255)
            )
        else:
            example["tokens"] = self._long("value", i, start, stop)
        example["name"] = row["name"]
        if row["group"]:
            example["group"] = row["group"]
        if row["has_labels"]:
            example["labels"] = self._long("label", i, start, stop)
        if row["label"] is not None:
            example["label"] = row["label"]
        if row.get("structure") is not None:
            whole = structure_from_bytes(row["structure"])
            example["structure"] = part_of_structure(whole, start, stop)
        return example

    def tokens(self, i: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the tokens of a record from `start` to `stop - 1`, as a LongTensor.

        Args:
            i: the number of the record; negative numbers count from the end.
            start, stop: the first token, and the one after the last (None: the end of the record).

        Raises:
            IndexError: if there is no such record.
            ValueError: if the part is not inside the record, or the corpus has images.
        """
        if self.image_shape is not None:
            raise ValueError(
                "tokens() needs a corpus of text or sequences, but this corpus has images: use "
                "corpus[i]['image']"
            )
        i, start, stop = self._part(i, start, stop)
        return self._long("value", i, start, stop)

    def _part(self, i: int, start: int, stop: int | None) -> tuple[int, int, int]:
        i, records = operator.index(i), len(self)
        if not -records <= i < records:
            raise IndexError(
                f"the number of a record must be from {-records} to {records - 1}, got {i}"
            )
        i %= records
        length = int(self.lengths[i])
        stop = length if stop is None else as_int("stop", stop, 0)
        start = as_int("start", start, 0)
        if not start <= stop <= length:
            raise ValueError(
                f"start and stop must satisfy 0 <= start <= stop <= {length}, the length of record "
                f"{i}, got {start} and {stop}"
            )
        if self.image_shape is not None and stop - start != 1:
            raise ValueError(
                "start and stop must be 0 and 1 for an image, which has no parts, got "
                f"{start} and {stop}"
            )
        return i, start, stop

    def _long(self, column: str, i: int, start: int, stop: int) -> Tensor:
        first = int(self._starts[i])
        return torch.from_numpy(self._read(column, first + start, first + stop).astype(numpy.int64))

    def _read(self, column: str, first: int, last: int) -> Any:
        # `fast_slice` reads only the blocks that contain the slice.
        return self._values.fast_slice(int(first), int(last - first)).column(column).to_numpy()

    # A corpus in another process maps the same files.

    def __getstate__(self) -> dict[str, Any]:
        shows_pixels = self.kind == "images" and self.image_shape is None
        return {"folder": self._folder, "pixels": shows_pixels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(state["folder"])
        if state["pixels"]:
            self._show_pixels()

    def remove_at_end(self) -> None:
        """Delete the files when this object is garbage-collected in this process."""
        weakref.finalize(self, _remove, self._folder, os.getpid())


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # A forked worker process must not delete the files.
        shutil.rmtree(folder, ignore_errors=True)


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Read ``corpus.json``; None if the other files do not exist with the sizes it gives."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in (VALUES, RECORDS)}
    except (OSError, ValueError):
        return None
    return facts if facts.get("format") == FORMAT and facts["bytes"] == sizes else None
