"""Records of tokens or images on disk, read by memory-mapping."""

from __future__ import annotations

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
    """Corpus that models learn from: records of tokens, or images.

    :func:`load_corpus` makes one of files.

    The records lie in Arrow files that are mapped into memory, so that a corpus may be larger than
    the memory, and what is read of a record is no more than what is asked for. ``corpus[i]`` is a
    dictionary:

    ===============  =============================================================================
    ``"tokens"``     LongTensor [N]; of images instead ``"image"``, float [C, H, W] from 0 to 1
    ``"name"``       what the record is called: the whole header of a FASTA record, or a file's name
    ``"group"``      where there is one: an organism
    ``"labels"``     where there are any: LongTensor [N] (GenBank: whether a base is coding)
    ``"label"``      where there is one: the image's class
    ``"structure"``  of structures: a :class:`Structure <graphattn.data.Structure>`
    ===============  =============================================================================

    Args:
        folder: where :func:`load_corpus` wrote one, below its `cache`.

    Attributes:
        kind: "text", "protein", "nucleotide", "structures" or "images".
        tokenizer: what makes tokens of text; None of images.
        fingerprint: equal where all records and the tokenizer are.
        lengths: LongTensor [records]: tokens of every record. An image counts as 1.
        num_tokens: their sum.
        num_bytes: what the tokens were made of, as bytes of UTF-8 text (of images: of pixels).
        classes: names of the images' classes; ``label`` is an index of them.
        image_shape: (C, H, W) of images, else None.

    Raises:
        ValueError: `folder` holds no corpus, or none that is whole.

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

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._open(Path(folder))

    def _open(self, folder: Path) -> None:
        from datasets import Dataset

        facts = read_facts(folder)
        if facts is None:
            raise ValueError(f"folder must be one that load_corpus wrote, got {str(folder)!r}")
        self._folder = folder
        self._values = Dataset.from_file(str(folder / VALUES)).data
        self._records = Dataset.from_file(str(folder / RECORDS)).data
        self.kind, self.fingerprint = facts["kind"], facts["fingerprint"]
        found = facts["tokenizer"]
        self.tokenizer = None if found is None else tokenizer_from_dict(found, folder / FACTS)
        self._starts = self._column("start").astype(numpy.int64)
        self._sizes = self._column("size").astype(numpy.int64)
        self.image_shape = tuple(facts["image_shape"]) if facts["image_shape"] else None
        sizes = torch.from_numpy(self._sizes.copy())
        self.lengths = torch.ones_like(sizes) if self.image_shape else sizes
        self.num_tokens, self.num_bytes = int(self.lengths.sum()), facts["num_bytes"]
        self.classes = tuple(facts["classes"])

    def _column(self, name: str) -> Any:
        return self._records.column(name).to_numpy()

    def __len__(self) -> int:
        """The number of records."""
        return len(self._sizes)

    def __repr__(self) -> str:
        what = "images" if self.image_shape else f"tokens={self.num_tokens}"
        if self.image_shape:
            return f"Corpus(kind='images', records={len(self)}, shape={self.image_shape})"
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
        """The records' groups, ``""`` where one has none."""
        return self._records.column("group").to_pylist()

    def example(self, i: int, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """A record, or a part of it: tokens, labels and structure are cut alike.

        Args:
            i: the record; negative ones count from the end.
            start, stop: the first token, and the one after the last (None: all).

        Raises:
            IndexError: there is no such record.
            ValueError: the part is not inside the record, or of an image.
        """
        i, start, stop = self._part(i, start, stop)
        row = self._records.fast_slice(i, 1).to_pylist()[0]
        found: dict[str, Any] = {}
        if self.image_shape is not None:
            pixels = self._read("value", self._starts[i], self._starts[i] + self._sizes[i])
            found["image"] = torch.from_numpy(
                pixels.astype(numpy.float32).reshape(self.image_shape) / numpy.float32(255)
            )
        else:
            found["tokens"] = self._long("value", i, start, stop)
        found["name"] = row["name"]
        if row["group"]:
            found["group"] = row["group"]
        if row["has_labels"]:
            found["labels"] = self._long("label", i, start, stop)
        if row["label"] is not None:
            found["label"] = row["label"]
        if row.get("structure") is not None:
            whole = structure_from_bytes(row["structure"])
            found["structure"] = part_of_structure(whole, start, stop)
        return found

    def tokens(self, i: int, start: int = 0, stop: int | None = None) -> Tensor:
        """The tokens of a record from `start` to before `stop`: a LongTensor.

        Args:
            i: the record; negative ones count from the end.
            start, stop: the first token, and the one after the last (None: all).

        Raises:
            IndexError: there is no such record.
            ValueError: the part is not inside the record, or the corpus is of images.
        """
        if self.image_shape is not None:
            raise ValueError("tokens are of text and sequences; this corpus holds images")
        i, start, stop = self._part(i, start, stop)
        return self._long("value", i, start, stop)

    def _part(self, i: int, start: int, stop: int | None) -> tuple[int, int, int]:
        i, records = operator.index(i), len(self)
        if not -records <= i < records:
            raise IndexError(f"record must be from 0 to {records - 1}, got {i}")
        i %= records
        length = int(self.lengths[i])
        stop = length if stop is None else as_int("stop", stop, 0)
        start = as_int("start", start, 0)
        if not start <= stop <= length:
            raise ValueError(
                f"start and stop must lie in order in 0..{length}, the length of record {i}, got "
                f"{start} and {stop}"
            )
        if self.image_shape is not None and stop - start != 1:
            raise ValueError(f"an image has no parts: start and stop must be 0 and 1, got {stop}")
        return i, start, stop

    def _long(self, column: str, i: int, start: int, stop: int) -> Tensor:
        first = int(self._starts[i])
        return torch.from_numpy(self._read(column, first + start, first + stop).astype(numpy.int64))

    def _read(self, column: str, first: int, last: int) -> Any:
        # `fast_slice` looks at none of the blocks but those that are asked for.
        return self._values.fast_slice(int(first), int(last - first)).column(column).to_numpy()

    # A corpus in another process maps the same files.

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(state["folder"])

    def remove_at_end(self) -> None:
        """Remove the files when this object, of this process, is no longer used."""
        weakref.finalize(self, _remove, self._folder, os.getpid())


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a worker that was forked
        shutil.rmtree(folder, ignore_errors=True)


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Read ``corpus.json``; None where the files are not there as it says."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in (VALUES, RECORDS)}
    except (OSError, ValueError):
        return None
    return facts if facts.get("format") == FORMAT and facts["bytes"] == sizes else None
