"""Batches of examples with a limited number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch
from torch import Tensor
from torch.utils.data import Sampler

from graphattn.graphs.arguments import as_int

_EPOCH = 1_000_003  # a prime, so that different seeds and epochs rarely give the same sum
_SHORTEST = 0.9  # examples of one bin have at least this share of the longest one's length


class TokenBatches(Sampler[list[int]]):
    """Batches of at most `max_tokens` tokens, as lists of indices: a DataLoader's `batch_sampler`.

    A batch has at most `max_tokens` tokens after padding to its longest example. Examples of
    similar length are in the same batch. If there are enough examples, none is more than a tenth
    shorter than the longest one of its batch. The choice of examples for each batch and the order
    of batches are random, and depend only on `seed` and the epoch. Every epoch has each example
    once, and the same number of batches.

    Use ``packed=True`` if batches are joined without padding (:func:`graphattn.collate`). Then
    `max_tokens` limits the sum of the lengths, and examples of different lengths are in the same
    batch. The number of batches may differ a little from epoch to epoch.

    Args:
        lengths: integers >= 1, one per example, such as ``windows.lengths``; for images, the number
            of tokens that the model makes of one. None may be larger than `max_tokens`.
        max_tokens: the largest number of tokens of a batch.
        seed: seed of the random order, >= 0.
        shuffle: whether the order is random. Otherwise it is the same in all epochs: the longest
            examples come first, so that a lack of memory shows at once (with `packed`: examples in
            their order).
        packed: whether batches are joined without padding.

    Raises:
        ValueError: if an argument is outside its range, or an example is longer than `max_tokens`.

    Example:
        >>> import graphattn as ga
        >>> batches = ga.data.TokenBatches([4, 9, 10, 4, 5, 10], max_tokens=20, shuffle=False)
        >>> list(batches)
        [[2, 5], [1, 4], [0, 3]]
        >>> batches = ga.data.TokenBatches([4, 9, 10, 4, 5, 10], max_tokens=20, seed=1)
        >>> first = list(batches)
        >>> batches.start_at(2)
        >>> list(batches) == first[2:], len(batches)
        (True, 3)
        >>> batches.set_epoch(1)
        >>> list(batches) == first
        False
    """

    batch_size = None  # Batches have different sizes. (accelerate reads this attribute.)
    drop_last = False

    def __init__(
        self,
        lengths: Tensor | Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        packed: bool = False,
    ) -> None:
        self.max_tokens = as_int("max_tokens", max_tokens, 1)
        self.seed = as_int("seed", seed, 0)
        self.shuffle, self.packed = bool(shuffle), bool(packed)
        self.lengths = _checked(lengths, self.max_tokens)
        self.epoch = self._start = 0
        self._cached: tuple[int, Tensor, Tensor, Tensor] | None = None
        if not self.packed:  # The sizes of batches are the same in all epochs.
            longest_first = self.lengths.sort(descending=True).values
            self._cuts, self._bins = _cut_padded(longest_first, self.max_tokens)

    def __repr__(self) -> str:
        return (
            f"TokenBatches(examples={len(self.lengths)}, max_tokens={self.max_tokens}, "
            f"epoch={self.epoch})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order; a new epoch starts at its first batch."""
        epoch = as_int("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def start_at(self, batch: int) -> None:
        """Start the next iteration at a given batch; later iterations start at the first one.

        Args:
            batch: 0 .. ``len(self)``; at ``len(self)``, the next iteration is empty.

        Raises:
            ValueError: if the epoch has fewer batches.
        """
        batch = as_int("batch", batch, 0)
        if batch > len(self):
            raise ValueError(
                f"batch must be at most {len(self)}, the number of batches of an epoch, got {batch}"
            )
        self._start = batch

    def __len__(self) -> int:
        """The number of batches of a whole epoch, even if the next iteration starts later."""
        return len(self._epoch()[1])

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        order, firsts, lasts = self._epoch()
        bounds = zip(firsts[start:].tolist(), lasts[start:].tolist(), strict=True)
        return (order[first:last].tolist() for first, last in bounds)

    def _epoch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the examples in order, and the first and last place of every batch in it."""
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = (self.epoch, *self._draw())
        return self._cached[1:]

    def _draw(self) -> tuple[Tensor, Tensor, Tensor]:
        count = len(self.lengths)
        generator = torch.Generator().manual_seed((self.seed + _EPOCH * self.epoch) % 2**63)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=generator)
        if self.packed:
            cuts = _cut_packed(self.lengths[order], self.max_tokens)
            return order, cuts[:-1], cuts[1:]
        order = order[self.lengths[order].argsort(descending=True, stable=True)]
        if not self.shuffle:
            return order, self._cuts[:-1], self._cuts[1:]
        within = torch.randperm(count, generator=generator)
        within = within[self._bins[within].argsort(stable=True)]
        batches = torch.randperm(len(self._cuts) - 1, generator=generator)
        return order[within], self._cuts[:-1][batches], self._cuts[1:][batches]


def _checked(lengths: Tensor | Sequence[int], max_tokens: int) -> Tensor:
    try:
        values = torch.as_tensor(lengths)
        got = f"{values.dtype} {list(values.shape)}"
    except (TypeError, ValueError, RuntimeError):
        values, got = torch.zeros(()), type(lengths).__name__
    if values.shape == (0,):
        raise ValueError("lengths must hold the length of at least one example, got none")
    is_other = values.is_floating_point() or values.is_complex() or values.dtype == torch.bool
    if values.dim() != 1 or is_other:
        raise ValueError(
            f"lengths must be a list or tensor of integers, one per example, got {got}"
        )
    values = values.to(torch.int64)
    shortest, longest = int(values.argmin()), int(values.argmax())
    if values[shortest] < 1:
        raise ValueError(f"lengths must be >= 1, got {values[shortest]} for example {shortest}")
    if values[longest] > max_tokens:
        raise ValueError(
            "max_tokens must be at least the length of the longest example, "
            f"{values[longest]} for example {longest}, got {max_tokens}: use larger batches or "
            "shorter windows"
        )
    return values


def _cut_padded(longest_first: Tensor, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Divide examples in descending order of length into batches, and batches into bins.

    All batches of a bin have the size that its longest example allows, so examples of a bin can be
    exchanged. Only the last batch of all may be smaller.

    Returns:
        LongTensor [batches + 1], the first example of every batch, and the end of the last one;
        LongTensor [examples], the bin of every example.
    """
    lengths = longest_first.numpy()
    count, ascending = len(lengths), -lengths
    cuts, bins = [0], numpy.empty(count, dtype=numpy.int64)
    first = number = 0
    while first < count:
        longest = int(lengths[first])
        size = max_tokens // longest
        similar = int(numpy.searchsorted(ascending, -_SHORTEST * longest, side="right")) - first
        last = min(first + max(1, similar // size) * size, count)
        cuts += range(first + size, last, size)
        cuts.append(last)
        bins[first:last] = number
        first, number = last, number + 1
    return torch.tensor(cuts), torch.from_numpy(bins)


def _cut_packed(lengths: Tensor, max_tokens: int) -> Tensor:
    """Return the first example of every batch, if each has as many as fit; [batches + 1]."""
    ends = lengths.cumsum(0).numpy()
    cuts = [0]
    while cuts[-1] < len(ends):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(int(numpy.searchsorted(ends, before + max_tokens, side="right")))
    return torch.tensor(cuts)
