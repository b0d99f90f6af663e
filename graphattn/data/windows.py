"""Windows of a part of a corpus: the examples that a model sees."""

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
    """Stretches of at most `length` tokens, none across the border of a record or of a part.

    A dataset for ``torch.utils.data.DataLoader``: ``windows[i]`` is the example that
    ``corpus.example(record, start, stop)`` gives, whose tokens, labels and structure are cut alike.
    Every token of the part is in a window: the last one of a stretch is as short as what is left.
    An image is one window.

    Nothing is read before it is asked for, and nothing is kept but a few numbers per stretch.

    Args:
        part: from :func:`split_corpus`.
        length: the most tokens of a window, >= 1.
        stride: from the start of a window to the next, 1 .. `length`; `length` if None, so that no
            token is in two windows.

    Attributes:
        lengths: LongTensor [windows], what :class:`TokenBatches` needs. Of images 1 each: times the
            tokens that a model makes of one, they are its lengths.

    Raises:
        ValueError: names the argument, its value and what is allowed.

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
                f"part must be a Part, as split_corpus makes it, got {type(part).__name__}"
            )
        self.part, self.length = part, as_int("length", length, 1)
        self.stride = self.length if stride is None else as_int("stride", stride, 1)
        if self.stride > self.length:
            raise ValueError(
                f"stride must be at most length={self.length}, or tokens between two windows "
                f"would be lost, got {stride}"
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
        """Return where windows lie: the record, the first token and the one after the last.

        Args:
            indices: numbers of windows; negative ones count from the end.

        Returns:
            LongTensor [n, 3].

        Raises:
            IndexError: there is no such window.
        """
        given = numpy.asarray(indices)
        if given.size and given.dtype.kind not in "iu":
            raise IndexError(f"window must be an integer, got {indices!r:.80}")
        index = given.astype(numpy.int64).reshape(-1)
        outside = index[(index < -self._size) | (index >= self._size)]
        if len(outside):
            raise IndexError(f"window must be from 0 to {self._size - 1}, got {outside[0]}")
        index = index % max(self._size, 1)
        place = numpy.searchsorted(self._firsts, index, side="right") - 1
        found = self.part.spans.numpy()[place]  # a copy
        found[:, 1] += (index - self._firsts[place]) * self.stride
        found[:, 2] = numpy.minimum(found[:, 2], found[:, 1] + self.length)
        return torch.from_numpy(found)

    @property
    def lengths(self) -> Tensor:
        spans = self.spans_of(torch.arange(self._size))
        return spans[:, 2] - spans[:, 1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The examples of a batch, as a DataLoader asks for them."""
        example = self.part.corpus.example
        return [example(*span) for span in self.spans_of(indices).tolist()]
