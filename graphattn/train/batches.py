"""Batches of training examples: their order, joining examples, and calls of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from graphattn.data import TokenBatches
from graphattn.graphs import TokenGraph
from graphattn.graphs import batch as side_by_side
from graphattn.models.proteins.source_tracks import LETTERS
from graphattn.train.checks import described, is_integer
from graphattn.train.objectives.objective import Batch, Example

MISSING_LABEL = -100  # of integers, as in torch's cross_entropy; floats use NaN
_OF_CALLS = ("graph", "edge_bias", "edge_features", "noise_level", "valid")


# Order.


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
    inner: Any = unwrapped(model)
    made_with = getattr(inner, "config", None)  # of models of graphattn
    known = made_with if isinstance(made_with, Mapping) else vars(inner)
    size = known.get("patch_size", 1)
    sides = size if isinstance(size, tuple | list) else (size, size)
    height, width = example["image"].shape[-2:]
    return -(-height // int(sides[0])) * -(-width // int(sides[1]))


# Joining examples, padded on the right if they differ in length.


def collate_tokens(examples: Sequence[Example], labels: str | None = None) -> Batch:
    """Join sequences into one batch, with their structures, positions, context and labels.

    Args:
        examples: dicts with "tokens", a LongTensor [N]. All of them, or none, may have "positions"
            [N] and a "structure"; any may have a "context" and "tracks", dicts as in
            :class:`~graphattn.models.ProteinModel`. Names and groups are ignored.
        labels: key of the labels [N] or [N, targets], one per token.

    Returns:
        A dict with "tokens" [B, N]; "valid", bool [B, N], if lengths differ; and, if the examples
        have them, "structure" (a list), "positions", "context", "tracks" and `labels`. Padding has
        position 0, unknown rows of context (-1 or NaN), unknown codes of tracks (-1), and missing
        labels (:data:`MISSING_LABEL` or NaN).
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
    if tracks := _tracks(examples):
        batch["tracks"] = tracks
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


def _tracks(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Join source tracks; the codes of a sequence without a track are unknown."""
    names = dict.fromkeys(name for example in examples for name in example.get("tracks") or ())
    joined = {}
    for name in names:
        rows = []
        for example in examples:
            size = len(example["tokens"])
            codes = (example.get("tracks") or {}).get(name, torch.full((size,), -1))
            if not is_integer(codes) or codes.shape != (size,):
                raise ValueError(
                    f"tracks[{name!r}] must be integers [N], one code per token ({size}), got "
                    f"{described(codes)}{_of(example)}"
                )
            rows.append(codes.long())
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


# Calls of a model: padded, or with the sequences of a batch packed into one row.


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers such as torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def device_of(model: Any, *others: Any) -> torch.device:
    """Return the device of a model's parameters, or of the first of `others` that has one."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return next((other.device for other in others if other is not None), torch.device("cpu"))


def guessed_here(model: Any, where: Tensor, batch: Batch) -> Tensor:
    """Return the tokens of `where` at which this process guesses.

    They are all of them, unless ranks divide the sequences (``context_parallel``): then an
    objective whose outputs are one per token guesses at the tokens of its own rank.
    """
    if _keeps_rows(model, batch):
        where = where & model.own_tokens(where.shape[-1]).to(where.device)
    return where


def _keeps_rows(model: Any, batch: Batch) -> bool:
    """Whether outputs stay on the ranks that own the tokens; those of structures are gathered."""
    reads = getattr(unwrapped(model), "structure", False) is True
    in_space = reads and batch.get("structure") is not None
    return hasattr(model, "own_tokens") and bool(model.training) and not in_space


def outputs_at(
    model: nn.Module, tokens: Tensor, batch: Batch, where: Tensor, *, packed: bool = False
) -> Tensor:
    """Return a model's outputs for the n tokens of a batch that are True in `where`, [n, K].

    If `packed`, sequences of unequal lengths are packed for the call. For a model with source
    tracks, the outputs are those of the letters.
    """
    return outputs_of_tracks(model, tokens, batch, {LETTERS: where}, packed=packed)[LETTERS]


def outputs_of_tracks(
    model: nn.Module,
    tokens: Tensor,
    batch: Batch,
    where: Mapping[str, Tensor],
    *,
    packed: bool = False,
) -> dict[str, Tensor]:
    """Return a model's outputs for the n tokens of each source track that are True, [n, K]."""
    stays = _keeps_rows(model, batch)
    outputs, is_packed = _call(model, tokens, batch, packed, **{"gathers": False} if stays else {})
    if missing := [name for name in where if name not in outputs]:
        raise ValueError(
            f"model must have the source track {missing[0]!r}, as ProteinModel(..., tracks=...) "
            f"has, got outputs for {', '.join(outputs)}"
        )
    rows: Any = model.own_rows if stays else lambda where: where
    return {
        name: _at(rows(places), outputs[name], batch, is_packed) for name, places in where.items()
    }


def _at(where: Tensor, outputs: Tensor, batch: Batch, is_packed: bool) -> Tensor:
    if outputs.dim() != (2 if is_packed else 3):
        raise ValueError(
            "model must return a tensor [B, N, K] for tokens [B, N], with K numbers per token, "
            f"got {list(outputs.shape)} for tokens {list(where.shape)}"
        )
    return outputs[where[batch["valid"]] if is_packed else where]


def pooled_outputs(model: nn.Module, batch: Batch, *, packed: bool = False) -> Tensor:
    """Return a model's output for every sequence, [B, K], or the mean of its output per token.

    The head of a model is linear, so the mean of the outputs is the head applied to the mean of the
    features.
    """
    outputs, is_packed = call(model, batch["tokens"], batch, packed=packed)
    if outputs.dim() == 2 and not is_packed:
        return outputs
    valid = batch.get("valid")
    if valid is None:
        return outputs.mean(1)
    if is_packed:
        nothing = outputs.new_zeros(len(valid), outputs.shape[-1])
        total = nothing.index_add(0, valid.nonzero()[:, 0], outputs)
    else:
        total = outputs.masked_fill(~valid[..., None], 0).sum(1)
    return total / valid.sum(1, keepdim=True)


def call(
    model: nn.Module, tokens: Tensor, batch: Batch, *, packed: bool = False
) -> tuple[Tensor, bool]:
    """Return a model's output, and whether its tokens are packed.

    A structure is passed to models that read structures; other models get only the sequence. For a
    model with source tracks, the output is that of the letters.
    """
    outputs, is_packed = _call(model, tokens, batch, packed)
    return outputs[LETTERS], is_packed


def _call(
    model: nn.Module, tokens: Tensor, batch: Batch, packed: bool, **options: Any
) -> tuple[dict[str, Tensor], bool]:
    """Return a model's output for every source track, and whether its tokens are packed."""
    inside, valid = unwrapped(model), batch.get("valid")
    given = {name: batch.get(name) for name in ("positions", "context", "structure", "tracks")}
    if getattr(inside, "structure", False) is not True:
        given["structure"] = None
    if given["structure"] is not None:
        given["positions"] = None  # the structure has its own positions
    is_packed = packed and valid is not None
    if not packed or valid is None:
        given["valid"] = valid
    else:
        tokens = tokens[valid]
        if given["positions"] is not None:
            given["positions"] = given["positions"][valid]
        if given["tracks"] is not None:
            given["tracks"] = {name: codes[valid] for name, codes in given["tracks"].items()}
        given["context"] = _packed_context(inside, given["context"], valid)
        if given["structure"] is None:
            given["graph"] = packed_graphs(inside, valid.sum(-1).tolist())
    outputs = model(tokens, **{k: v for k, v in given.items() if v is not None}, **options)
    by_track = outputs if isinstance(outputs, dict) and LETTERS in outputs else {LETTERS: outputs}
    for output in by_track.values():
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise ValueError(f"model must return a floating-point tensor, got {described(output)}")
    return by_track, is_packed


def packed_graphs(model: Any, lengths: Sequence[int]) -> list[TokenGraph]:
    """Return the graph of every block for packed sequences, without edges between them."""
    if not hasattr(model, "graphs"):
        raise ValueError(
            "packed must be False for a model without a method graphs(num_tokens), got True for a "
            f"{type(model).__name__}"
        )
    graphs_of = {length: model.graphs(length) for length in set(lengths)}
    made: dict[tuple[int, ...], TokenGraph] = {}
    joined = []
    for graphs in zip(*(graphs_of[length] for length in lengths), strict=True):
        key = tuple(map(id, graphs))
        if key not in made:
            made[key] = side_by_side(graphs)
        joined.append(made[key])
    return joined


def _packed_context(model: Any, context: Any, valid: Tensor) -> dict[str, Tensor] | None:
    if context is None:
        return None
    known = getattr(model, "context", {})
    packed = {}
    for name, track in context.items():
        if isinstance(known, Mapping) and known.get(name) == "sequence":
            raise ValueError(
                f"packed must be False with context[{name!r}], because it is another chain, which "
                "needs padded rows, got True"
            )
        packed[name] = track[valid]
    return packed
