"""Losses of guessing without a model: by the frequency of tokens, and by pairs of tokens.

:func:`guesses_of` computes those that an evaluation reports beside the loss of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.data import Part
from graphattn.graphs.arguments import as_float, as_int
from graphattn.train.checks import described
from graphattn.train.objectives.objective import Example, Objective

CHUNK = 1 << 20  # tokens that are counted together
DENSE = 1 << 24  # up to this number of possible pairs, counts are in a dense table
PIECE = 2**16  # tokens of a part that are read together

Sequences = Tensor | Iterable[Any]


def frequency_loss(
    train: Sequences, held_out: Sequences, vocab_size: int, *, smoothing: float = 1.0
) -> float:
    r"""Return the loss of guessing tokens by their frequency in training, in nats per token.

    .. math::
        p(a) = \frac{c(a) + s}{n + s V}

    with the counts c of n tokens and the smoothing s (1 is Laplace's rule). Classes can be given as
    tokens, too.

    Args:
        train, held_out: an iterable of LongTensors [N] or of dicts with "tokens"; or one
            LongTensor. It is iterated once, without storing it.
        vocab_size: V; tokens are 0 .. V - 1.
        smoothing: s.

    Raises:
        ValueError: if a token is out of range, or there is no token.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens = torch.tensor([0, 0, 0, 1])
        >>> round(ga.train.frequency_loss(tokens, tokens, 2, smoothing=0), 4)  # their entropy
        0.5623
    """
    return frequency_nats(train, held_out, vocab_size, smoothing)[0]


def frequency_nats(
    train: Sequences, held_out: Sequences, vocab_size: int, smoothing: float = 1.0
) -> tuple[float, float]:
    """Return :func:`frequency_loss` and its standard error."""
    vocab_size = as_int("vocab_size", vocab_size, 1)
    smoothing = as_float("smoothing", smoothing, positive=False)
    seen = _count_tokens("train", train, vocab_size)
    asked = _count_tokens("held_out", held_out, vocab_size)
    share = (seen + smoothing) / (seen.sum() + smoothing * vocab_size)
    return _mean_nats(asked, share)


def bigram_loss(
    train: Sequences, held_out: Sequences, vocab_size: int, *, smoothing: float | None = None
) -> float:
    r"""Return the loss of guessing every held-out token from the one before it, in nats per token.

    Pairs are counted within sequences, so the first token of each is not guessed, as in
    :class:`NextToken`. Without `smoothing`, counts of pairs are mixed with counts of tokens. The
    weight of the latter grows with T(a), the number of different tokens that follow a (Witten and
    Bell, 1991; Chen and Goodman, 1998):

    .. math::
        p(b \mid a) = \frac{c(a, b) + T(a) \, p(b)}{c(a) + T(a)}, \qquad
        p(b) = \frac{c(b) + 1}{n + V}

    If no token followed a, the result is p(b). With `smoothing`, s is added to every count:

    .. math::
        p(b \mid a) = \frac{c(a, b) + s}{c(a) + s V}

    Memory depends on the number of different pairs, not on the length of the text.

    Args:
        train, held_out, vocab_size: as in :func:`frequency_loss`.
        smoothing: s > 0; None for the rule of Witten and Bell.

    Raises:
        ValueError: if a token is out of range, or no sequence has two tokens.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens = torch.tensor([0, 1] * 50)  # what follows is certain
        >>> ga.train.bigram_loss(tokens, tokens, 2) < 0.02 < ga.train.frequency_loss(
        ...     tokens, tokens, 2)
        True
    """
    return bigram_nats(train, held_out, vocab_size, smoothing)[0]


def bigram_nats(
    train: Sequences, held_out: Sequences, vocab_size: int, smoothing: float | None = None
) -> tuple[float, float]:
    """Return :func:`bigram_loss` and its standard error."""
    vocab_size = as_int("vocab_size", vocab_size, 1)
    tokens = torch.zeros(vocab_size, dtype=torch.int64)
    codes, counts = _count_pairs("train", train, vocab_size, tokens)
    asked, times = _count_pairs("held_out", held_out, vocab_size)
    # The training count of every held-out pair; 0 if it never occurred.
    place = torch.searchsorted(codes, asked).clamp(max=max(len(codes) - 1, 0))
    seen = torch.zeros(len(asked), dtype=torch.float64)
    if len(codes):
        seen = torch.where(codes[place] == asked, counts[place], 0).double()
    before, after = asked // vocab_size, asked % vocab_size
    total = torch.zeros(vocab_size, dtype=torch.float64)
    total.index_add_(0, codes // vocab_size, counts.double())
    if smoothing is not None:
        added = as_float("smoothing", smoothing, positive=True)
        share = (seen + added) / (total[before] + added * vocab_size)
        return _mean_nats(times, share)
    frequency = (tokens + 1) / (tokens.sum() + vocab_size).double()
    kinds = (codes // vocab_size).bincount(minlength=vocab_size).double()
    mixed = (seen + kinds[before] * frequency[after]) / (total + kinds)[before]
    share = torch.where(total[before] > 0, mixed, frequency[after])
    return _mean_nats(times, share)


def _mean_nats(times: Tensor, share: Tensor) -> tuple[float, float]:
    """Return the mean of -log(share), and its standard error, if each occurs `times` times.

    The mean is infinite if a share is 0.
    """
    occurs = times > 0
    times, nats = times[occurs].double(), -share[occurs].double().log()
    total, squares = float((times * nats).sum()), float((times * nats.square()).sum())
    count = float(times.sum())
    return total / count, standard_error(total, squares, count)


def standard_error(total: float, squares: float, count: float) -> float:
    """Return the standard error of the mean of `count` numbers with these sums; NaN for one."""
    if count < 2 or not math.isfinite(total):
        return math.nan
    variance = max(squares - total * total / count, 0.0) / (count - 1)
    return math.sqrt(variance / count)


def _chunks(name: str, sequences: Sequences, vocab_size: int) -> Iterator[Tensor]:
    """Yield checked chunks of every sequence, each starting with the last token of the one before.

    A chunk has a single token only if its sequence has no more.
    """
    several: Iterable[Any] = [sequences] if isinstance(sequences, Tensor) else sequences
    for sequence in several:
        tokens = sequence.get("tokens") if isinstance(sequence, dict) else sequence
        if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(f"{name} must contain integer tensors [N], got {described(tokens)}")
        for start in range(0, len(tokens), CHUNK):
            piece = tokens[max(start - 1, 0) : start + CHUNK].long().cpu()
            least, most = (int(x) for x in piece.aminmax())
            if least < 0 or most >= vocab_size:
                raise ValueError(
                    f"{name} must contain tokens 0 .. {vocab_size - 1}, got "
                    f"{least if least < 0 else most}"
                )
            yield piece if start else torch.cat([piece.new_full((1,), -1), piece])


def _count_tokens(name: str, sequences: Sequences, vocab_size: int) -> Tensor:
    """Count every token, float64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for piece in _chunks(name, sequences, vocab_size):
        counts += piece[1:].bincount(minlength=vocab_size)
    if not counts.any():
        raise ValueError(f"{name} must contain at least one token, got none")
    return counts.double()


def _count_pairs(
    name: str, sequences: Sequences, vocab_size: int, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the pairs that occur, as sorted ``before * vocab_size + after``, and their counts.

    The counts of single tokens are added to `tokens`.
    """
    dense = torch.zeros(vocab_size**2 if vocab_size**2 <= DENSE else 0, dtype=torch.int64)
    codes, counts = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    pieces: list[Tensor] = []
    size = 0
    for piece in _chunks(name, sequences, vocab_size):
        if tokens is not None:
            tokens += piece[1:].bincount(minlength=vocab_size)
        pairs = piece[:-1] * vocab_size + piece[1:]
        pieces.append(pairs if piece[0] >= 0 else pairs[1:])
        size += len(pieces[-1])
        if size >= CHUNK:
            codes, counts = _added(codes, counts, dense, pieces)
            pieces, size = [], 0
    codes, counts = _added(codes, counts, dense, pieces)
    if len(dense):
        codes = dense.nonzero()[:, 0]
        counts = dense[codes]
    if not len(codes):
        raise ValueError(f"{name} must contain a sequence of at least two tokens, got none")
    return codes, counts


def _added(
    codes: Tensor, counts: Tensor, dense: Tensor, pieces: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add the counts of more pairs, to the table or to the sorted list."""
    pairs = torch.cat([codes[:0], *pieces])
    if len(dense):
        dense += pairs.bincount(minlength=len(dense))
        return codes, counts
    new, times = pairs.unique(return_counts=True)
    merged, place = torch.cat([codes, new]).unique(return_inverse=True)
    total = torch.zeros_like(merged).index_add_(0, place, torch.cat([counts, times]))
    return merged, total


# The guesses of an evaluation.


def guesses_of(
    objective: Objective, train: Part, examples: Sequence[Example], model: nn.Module
) -> dict[str, tuple[float, float]]:
    """Return losses of guessing `examples` by counts of the training part, and their errors.

    They are in nats per guess, over the same tokens or classes that the model guesses: "frequency",
    and for causal models "bigram". The result is empty for an objective that guesses neither.
    """

    def each() -> Iterator[Example]:
        return (examples[place] for place in range(len(examples)))

    if objective.name == "classification":
        classes = int(objective.num_classes)  # type: ignore[attr-defined]
        per_token = bool(getattr(objective, "per_token", False))
        # A class belongs to a whole record, of which one token is read.
        read = train.corpus.example
        pieces = (read(record, first, first + 1) for record, first, _ in train.spans.tolist())
        seen = _labels(_pieces(train, read) if per_token else pieces, per_token)
        return {"frequency": frequency_nats(seen, _labels(each(), per_token), classes)}
    vocab_size = int(getattr(model, "vocab_size", 0))
    mask = getattr(objective, "mask_token", None)
    if mask is not None and mask >= vocab_size - 1:
        vocab_size = int(mask)  # a mask at the end of the vocabulary is never guessed
    if objective.name not in ("causal", "masked", "diffusion") or not vocab_size:
        return {}
    if getattr(objective, "tracks", None):  # a corpus has no codes of these
        return {}
    tokens = train.corpus.tokens
    if objective.name != "causal":
        return {"frequency": frequency_nats(_pieces(train, tokens), each(), vocab_size)}
    after_the_first = (one["tokens"][1:] for one in each() if len(one["tokens"]) > 1)
    return {
        "frequency": frequency_nats(_pieces(train, tokens), after_the_first, vocab_size),
        "bigram": bigram_nats(_pieces(train, tokens), each(), vocab_size),
    }


def _pieces(part: Part, read: Callable[[int, int, int], Any]) -> Iterator[Any]:
    """Read a part by a method of its corpus, in pieces that fit into memory."""
    for record, first, last in part.spans.tolist():
        for start in range(first, last, PIECE):
            yield read(record, start, min(start + PIECE, last))


def _labels(examples: Iterable[Example], per_token: bool) -> Iterator[Tensor]:
    """Yield the classes of the tokens of every example, or those of all examples at once."""
    if per_token:
        yield from (example["labels"][example["labels"] >= 0] for example in examples)
    elif labels := [example["label"] for example in examples]:
        yield torch.tensor(labels)
