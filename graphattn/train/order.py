"""In which order a run sees its examples: batches without end, split among processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from graphattn.train.objective import Example


class Batches(Protocol):
    """Batches of an epoch, as lists of indices; the same ones for the same epoch."""

    def __iter__(self) -> Iterator[list[int]]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def start_at(self, batch: int) -> None: ...


def token_batches(
    lengths: Tensor, max_tokens: int, *, seed: int = 0, shuffle: bool = True
) -> Batches:
    """Batches of at most `max_tokens` tokens; :class:`graphattn.data.TokenBatches`."""
    import graphattn.data

    maker: Any = getattr(graphattn.data, "TokenBatches", PlainBatches)
    batches: Batches = maker(lengths, max_tokens, seed=seed, shuffle=shuffle)
    return batches


class PlainBatches(Sampler[list[int]]):
    """Examples in random order, as many per batch as fit when padded to the longest."""

    def __init__(self, lengths: Tensor, max_tokens: int, *, seed: int, shuffle: bool) -> None:
        self.lengths, self.max_tokens = lengths, max_tokens
        self.seed, self.shuffle = seed, shuffle
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def start_at(self, batch: int) -> None:
        self.start = batch

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        return itertools.islice(self._all(), start, None)

    def __len__(self) -> int:
        return sum(1 for _ in self._all())

    def _all(self) -> Iterator[list[int]]:
        order = torch.arange(len(self.lengths))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
            order = torch.randperm(len(self.lengths), generator=generator)
        batch: list[int] = []
        longest = 0
        for index in order.tolist():
            longest = max(longest, int(self.lengths[index]))
            if batch and longest * (len(batch) + 1) > self.max_tokens:
                yield batch
                batch, longest = [], int(self.lengths[index])
            batch.append(index)
        if batch:
            yield batch


class EndlessBatches(Sampler[list[int]]):
    """Epoch after epoch, as one sequence of batches, of which a process takes every n-th.

    Args:
        batches: of one epoch.
        start: how many batches, of all processes together, were seen before.
        rank, processes: the process takes batches `rank`, ``rank + processes``, ...
    """

    def __init__(self, batches: Batches, *, start: int = 0, rank: int = 0, processes: int = 1):
        self.batches, self.start, self.rank, self.processes = batches, start, rank, processes

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self._all(), self.rank, None, self.processes)

    def _all(self) -> Iterator[list[int]]:
        skipped = self.start
        for epoch in itertools.count():
            self.batches.set_epoch(epoch)
            if skipped and skipped >= (size := len(self.batches)):
                skipped -= size
                continue
            self.batches.start_at(skipped)
            yield from self.batches
            skipped = 0


class TrainingLoader(torch.utils.data.DataLoader):
    """A loader of batches without end that says how many of them a run takes."""

    def __init__(self, dataset: Any, *, batches: int, **options: Any) -> None:
        # A generator of its own: torch's is that of masks and dropout, whose numbers must be the
        # same whether a run is continued or not.
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), **options}
        super().__init__(dataset, **own)
        self._batches = batches

    def __len__(self) -> int:
        return self._batches


def lengths_of(dataset: Sequence[Example], model: nn.Module) -> Tensor:
    """How many tokens every example has; of images, what the model makes of them.

    Raises:
        ValueError: there is no example.
    """
    if len(dataset) == 0:
        raise ValueError("train must hold examples, got none")
    known = getattr(dataset, "lengths", None)
    if known is not None:
        return torch.as_tensor(known)
    return torch.tensor([_length(dataset[i], model) for i in range(len(dataset))])


def _length(example: Example, model: nn.Module) -> int:
    if "tokens" in example:
        return len(example["tokens"])
    if "image" not in example:
        raise ValueError(f"examples must hold tokens or an image, got {sorted(example)}")
    size = getattr(model, "patch_size", 1)
    sides = size if isinstance(size, tuple) else (size, size)
    height, width = example["image"].shape[-2:]
    return -(-height // int(sides[0])) * -(-width // int(sides[1]))
