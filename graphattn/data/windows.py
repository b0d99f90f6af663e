"""Windows of a part of a corpus, which are the examples for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from graphattn.data.splits import Part
from graphattn.graphs.arguments import as_int


class Windows(Dataset[dict[str, Any]]):
    """A dataset of windows of at most `length` tokens of a corpus, for a ``DataLoader``.

    No window crosses the border of a record or of a part. ``windows[i]`` is
    ``corpus.example(record, start, stop)``, in which tokens, labels and structure are cut to the
    window. Every token of the part is in a window; the last window of a span may be shorter. An
    image is one window. A window is read from the corpus when it is accessed, and only a few
    numbers per span are in memory.

    Args:
        part: from :func:`split_corpus`.
        length: the largest number of tokens of a window, >= 1.
        stride: the distance from the start of a window to the next, 1 .. `length`; with None it is
            `length`, so that no token is in two windows.

    Attributes:
        lengths: LongTensor [windows], which :class:`TokenBatches` needs. For images they are 1, and
            must be multiplied by the number of tokens that a model makes of an image.

    Raises:
        ValueError: if an argument is outside its range.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "text.txt")
        ...     _ = path.write_text("to be or not to be")
        ...     corpus = ga.data.load_corpus(path, tokenizer="bytes")
        >>> parts = ga.data.split_corpus(corpus, validation=0.0, test=0.25)
        >>> windows = ga.data.Windows(parts["train"], length=8)
        >>> [corpus.tokenizer.decode(window["tokens"]) for window in windows]
        ['to be or', ' not t']
        >>> windows.lengths
        tensor([8, 6])
    """

    def __init__(self, part: Part, length: int, *, stride: int | None = None) -> None:
        if not isinstance(part, Part):
            raise ValueError(
                f"part must be a Part, which split_corpus makes, got {type(part).__name__}"
            )
        self.part, self.length = part, as_int("length", length, 1)
        self.stride = self.length if stride is None else as_int("stride", stride, 1)
        if self.stride > self.length:
            raise ValueError(
                f"stride must be at most length={self.length}, because tokens between two windows "
                f"would be lost otherwise, got {stride}"
            )
        sizes = part.spans[:, 2] - part.spans[:, 1]
        self._counts = 1 + ((sizes - self.length).clamp(min=0) + self.stride - 1) // self.stride
        self._firsts = (self._counts.cumsum(0) - self._counts).numpy()  # windows of earlier spans
        self._size = int(self._counts.sum())

    def __len__(self) -> int:
        """The number of windows."""
        return self._size

    def __repr__(self) -> str:
        return f"Windows({len(self)}, length={self.length}, stride={self.stride})"

    def spans_of(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return the spans of windows.

        Args:
            indices: numbers of windows; negative numbers count from the end.

        Returns:
            LongTensor [n, 3]: the number of the record, the first token, and the one after the
            last.

        Raises:
            IndexError: if there is no such window.
        """
        given = numpy.asarray(indices)
        if given.size and given.dtype.kind not in "iu":
            raise IndexError(f"the number of a window must be an integer, got {indices!r:.80}")
        index = given.astype(numpy.int64).reshape(-1)
        outside = index[(index < -self._size) | (index >= self._size)]
        if len(outside):
            raise IndexError(
                f"the number of a window must be from {-self._size} to {self._size - 1}, got "
                f"{outside[0]}"
            )
        index = index % max(self._size, 1)
        place = numpy.searchsorted(self._firsts, index, side="right") - 1
        spans = self.part.spans.numpy()[place]  # Indexing copies, so the part does not change.
        spans[:, 1] += (index - self._firsts[place]) * self.stride
        spans[:, 2] = numpy.minimum(spans[:, 2], spans[:, 1] + self.length)
        return torch.from_numpy(spans)

    @property
    def lengths(self) -> Tensor:
        spans = self.spans_of(torch.arange(self._size))
        return spans[:, 2] - spans[:, 1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Read the examples of a batch; a DataLoader calls this method."""
        example = self.part.corpus.example
        return [example(*span) for span in self.spans_of(indices).tolist()]
