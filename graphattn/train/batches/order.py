"""Order of the examples of a run: endless batches, split among processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from graphattn.data import TokenBatches
from graphattn.train.objectives.objective import Example


class EndlessBatches(Sampler[list[int]]):
    """Batches of all epochs as one endless sequence, of which a process takes every n-th.

    The sequence begins after `start` batches; process `rank` takes ``rank + k * processes``.
    """

    def __init__(self, batches: TokenBatches, start: int = 0, rank: int = 0, processes: int = 1):
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
    """A loader of endless batches whose length is the number that a run takes."""

    def __init__(self, dataset: Any, *, batches: int, **options: Any) -> None:
        # Use a separate generator: torch's own draws masks and dropout, whose numbers must be the
        # same for a continued run.
        settings: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), **options}
        super().__init__(dataset, **settings)
        self._batches = batches

    def __len__(self) -> int:
        return self._batches


def lengths_of(
    dataset: Sequence[Example],
    model: nn.Module,
    batch_tokens: int | None = None,
    name: str = "train",
) -> Tensor:
    """Return the number of tokens of every example; for images, of tokens in the model.

    Each may have at most `batch_tokens`; messages call the examples `name`.
    """
    if len(dataset) == 0:
        raise ValueError(f"{name} must contain at least one example, got none")
    known = getattr(dataset, "lengths", None)
    if known is None:
        known = [_length(dataset[i], model) for i in range(len(dataset))]
    lengths = torch.as_tensor(known)
    if batch_tokens is not None and int(lengths.max()) > batch_tokens:
        at = int(lengths.argmax())
        raise ValueError(
            f"batch_tokens must be at least the length of every example, {int(lengths[at])} for "
            f"example {at} of {name}, got {batch_tokens}"
        )
    return lengths


def _length(example: Example, model: nn.Module) -> int:
    if not isinstance(example, Mapping):
        raise ValueError(f"examples must be dicts, got {type(example).__name__}")
    if "tokens" in example:
        return len(example["tokens"])
    if "image" not in example:
        raise ValueError(
            f"examples must contain 'tokens' or an 'image', got the keys {sorted(example)}"
        )
    size = getattr(model, "patch_size", 1)
    sides = size if isinstance(size, tuple) else (size, size)
    height, width = example["image"].shape[-2:]
    return -(-height // int(sides[0])) * -(-width // int(sides[1]))
