"""Join examples into one batch, padded on the right if they differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from graphattn.train.checks import described, is_integer
from graphattn.train.objectives.objective import Batch, Example

MISSING_LABEL = -100  # of integers, as in torch's cross_entropy; floats use NaN
_OF_CALLS = ("graph", "edge_bias", "edge_features", "noise_level", "valid")


def collate_tokens(examples: Sequence[Example], labels: str | None = None) -> Batch:
    """Join sequences into one batch, with their structures, positions, context and labels.

    Args:
        examples: dicts with "tokens", a LongTensor [N]. All of them, or none, may have "positions"
            [N] and a "structure"; any may have a "context", a dict of tracks, as in
            :class:`~graphattn.models.ProteinModel`. Names and groups are ignored.
        labels: key of the labels [N] or [N, targets], one per token.

    Returns:
        A dict with "tokens" [B, N]; "valid", bool [B, N], if lengths differ; and, if the examples
        have them, "structure" (a list), "positions", "context" and `labels`. Padding has position
        0, unknown rows of tracks (-1 or NaN) and missing labels (:data:`MISSING_LABEL` or NaN).
    """
    tokens = [_tokens(example) for example in checked(examples)]
    lengths = torch.tensor([len(row) for row in tokens])
    batch: Batch = {"tokens": _padded(tokens, 0)}
    if bool((lengths != lengths[0]).any()):
        batch["valid"] = torch.arange(int(lengths.max())) < lengths[:, None]
    if all_have(examples, "structure"):
        batch["structure"] = [example["structure"] for example in examples]
    if all_have(examples, "positions"):
        batch["positions"] = _padded([_per_token(row, "positions") for row in examples], 0)
    if labels is not None:
        if not all_have(examples, labels):
            raise ValueError(f"examples must contain {labels!r}, got {sorted(examples[0])}")
        rows = [_per_token(example, labels) for example in examples]
        batch[labels] = _padded(rows, MISSING_LABEL)
    if context := _context(examples):
        batch["context"] = context
    return batch


def collate_images(examples: Sequence[Example]) -> Batch:
    """Join images of one size into a batch: "image" [B, C, H, W]."""
    images: list[Any] = [example.get("image") for example in checked(examples)]
    for image in images:
        if not isinstance(image, Tensor) or image.dim() != 3 or not image.is_floating_point():
            raise ValueError(
                "examples must contain an 'image', a floating-point tensor [C, H, W], got "
                f"{described(image)}"
            )
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"examples must contain images of one size, got the shapes {sorted(shapes)}"
        )
    return {"image": torch.stack(images)}


def checked(examples: Sequence[Example]) -> Sequence[Example]:
    """Check that the examples are a non-empty list of dicts."""
    if not len(examples):
        raise ValueError("examples must contain at least one example, got none")
    for example in examples:
        if not isinstance(example, dict):
            raise ValueError(f"examples must be dicts, got {type(example).__name__}")
        if unread := [key for key in _OF_CALLS if key in example]:
            raise ValueError(
                f"examples must not contain {unread[0]!r}, because no objective passes it to the "
                "model: remove it"
            )
    return examples


def all_have(examples: Sequence[Example], key: str) -> bool:
    """Return whether all examples have `key`; raise a ValueError if only some do."""
    have = sum(example.get(key) is not None for example in examples)
    if have not in (0, len(examples)):
        raise ValueError(
            f"either all examples or none must contain {key!r}, got {have} of {len(examples)}"
        )
    return have > 0


def _tokens(example: Example) -> Tensor:
    tokens: Any = example.get("tokens")
    if not is_integer(tokens) or tokens.dim() != 1 or not len(tokens):
        raise ValueError(
            "examples must contain 'tokens', an integer tensor [N] with N >= 1, got "
            f"{described(tokens)}{_of(example)}"
        )
    return tokens.long()


def _per_token(example: Example, key: str) -> Tensor:
    value, N = example[key], len(example["tokens"])
    if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != N:
        raise ValueError(
            f"examples must contain one row of {key!r} per token ({N}), got "
            f"{described(value)}{_of(example)}"
        )
    return value


def _context(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Join tracks; the rows of a sequence without a track are unknown."""
    tracks: dict[str, dict[int, Tensor]] = {}
    for place, example in enumerate(examples):
        for name, track in (example.get("context") or {}).items():
            if not isinstance(track, Tensor) or track.dim() not in (1, 2):
                raise ValueError(
                    f"context[{name!r}] must be a tensor [N] or [N, width], got {described(track)}"
                    f"{_of(example)}"
                )
            tracks.setdefault(name, {})[place] = track
    joined = {}
    for name, track in tracks.items():
        first = next(iter(track.values()))
        unknown = torch.nan if first.is_floating_point() else -1
        rows = []
        for place, example in enumerate(examples):
            row = track.get(place)
            if row is None:
                row = first.new_full((len(example["tokens"]), *first.shape[1:]), unknown)
            if row.shape[1:] != first.shape[1:] or row.dtype != first.dtype:
                raise ValueError(
                    f"context[{name!r}] must have the same width and dtype in all examples, got "
                    f"{described(first)} and {described(row)}"
                )
            rows.append(row)
        joined[name] = _padded(rows, -1)
    return joined


def _padded(rows: Sequence[Tensor], fill: int) -> Tensor:
    """Join rows [N, *] into [B, N, *]; a `fill` other than 0 becomes NaN for floating point."""
    shapes = {(tuple(row.shape[1:]), row.dtype) for row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"examples must have the same shape per token and dtype, got {sorted(map(str, shapes))}"
        )
    value = torch.nan if fill and rows[0].is_floating_point() else fill
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def _of(example: Example) -> str:
    return f" in {example['name']!r}" if example.get("name") else ""
