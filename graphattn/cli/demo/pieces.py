"""Pieces of sequences and structures, their batches, and the masked tokens of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import graphattn as ga
from graphattn.data import Structure
from graphattn.data.structures.structure import residues_of

# Tokens per piece of a sequence, residues per part of a structure. In the same seconds, a model
# learns more from many steps with short pieces than from few steps with long ones.
LONGEST_PIECE, LONGEST_PART = 32, 512
BATCH, BATCH_TOKENS, BATCH_RESIDUES = 16, 2048, 512  # fewer residues, because their edges cost more
MASK_RATIO = 0.15
NEAREST = 16  # C-alpha atoms that a residue sees
MOST_MASKINGS = 16  # maximal number of maskings of one piece in an evaluation


@dataclass(frozen=True)
class DemoPiece:
    """A part of a sequence, or of a structure."""

    tokens: Tensor  # [L]
    first: int  # position of its first token among all tokens
    structure: Structure | None = None


@dataclass(frozen=True)
class Batch:
    """Pieces padded to the longest [B, L], or structures one after another [N]."""

    tokens: Tensor
    valid: Tensor
    place: Tensor  # index of every token among all tokens of the file
    piece: Tensor  # index of the first token of its piece
    structures: list[Structure]  # empty for sequences


@dataclass(frozen=True)
class MaskedBatch:
    """A batch with masked tokens: the input of a model, and the tokens to guess."""

    batch: Batch
    inputs: Tensor
    masked: Tensor

    @property
    def hidden(self) -> Tensor:
        """Return the tokens to guess, [guesses]."""
        return self.batch.tokens[self.masked]


def cut(
    sequences: Sequence[Tensor], structures: Sequence[Structure] | None = None
) -> list[list[DemoPiece]]:
    """Cut every sequence into pieces of about equal length."""
    if structures is None:
        longest = max(1, min(LONGEST_PIECE, sum(map(len, sequences)) // 8))
    else:
        longest = LONGEST_PART
    found: list[list[DemoPiece]] = []
    first = 0
    for n, sequence in enumerate(sequences):
        parts = -(-len(sequence) // longest)
        found.append([])
        begin = 0
        for tokens in sequence.tensor_split(parts) if parts else ():
            end = begin + len(tokens)
            own = None if structures is None else structures[n]
            if own is not None and parts > 1:
                chains = own.chain_index[begin:end]
                own = residues_of(own, torch.arange(begin, end), chains, own.chain_ids)
            found[-1].append(DemoPiece(tokens, first + begin, own))
            begin = end
        first += len(sequence)
    return found


def batch_of(pieces: Sequence[DemoPiece]) -> Batch:
    """Join pieces into one batch."""
    tokens = [piece.tokens for piece in pieces]
    valid = [torch.ones(len(own), dtype=torch.bool) for own in tokens]
    place = [piece.first + torch.arange(len(piece.tokens)) for piece in pieces]
    first = [torch.full((len(piece.tokens),), piece.first) for piece in pieces]
    structures = [piece.structure for piece in pieces if piece.structure is not None]

    def joined(column: list[Tensor]) -> Tensor:
        if structures:
            return torch.cat(column)
        return nn.utils.rnn.pad_sequence(column, batch_first=True)

    return Batch(joined(tokens), joined(valid), joined(place), joined(first), structures)


def drawn(pieces: Sequence[DemoPiece], generator: torch.Generator) -> Batch:
    """Draw random pieces for training: 16, or a few structures."""
    index = torch.randint(len(pieces), (BATCH,), generator=generator).tolist()
    return next(batches([pieces[n] for n in index]))


def batches(pieces: Sequence[DemoPiece]) -> Iterator[Batch]:
    """Yield all pieces, in batches of limited size."""
    some: list[DemoPiece] = []
    for piece in pieces:
        room = BATCH_TOKENS if piece.structure is None else BATCH_RESIDUES
        too_much = sum(len(own.tokens) for own in (*some, piece)) > room
        if some and too_much:
            yield batch_of(some)
            some = []
        some.append(piece)
    if some:
        yield batch_of(some)


def hide(batch: Batch, mask_token: int, generator: torch.Generator) -> MaskedBatch:
    """Mask a share of the tokens."""
    inputs, masked = ga.train.mask_tokens(
        batch.tokens, mask_token, mask_ratio=MASK_RATIO, valid=batch.valid, generator=generator
    )
    return MaskedBatch(batch, inputs, masked)


def evaluation(pieces: Sequence[DemoPiece], mask_token: int, tokens: int) -> list[MaskedBatch]:
    """Return batches for the evaluation of all models: pieces evenly spread over all.

    They have about `tokens` tokens together, of which a share is masked. If there are few pieces,
    each comes several times with different masks.
    """
    total = sum(len(piece.tokens) for piece in pieces)
    count = max(1, min(len(pieces), round(len(pieces) * tokens / total)))
    spread = torch.linspace(0, len(pieces) - 1, count).round().long().tolist()
    maskings = max(1, min(MOST_MASKINGS, tokens // total))
    generator = torch.Generator().manual_seed(0)
    return [
        hide(batch, mask_token, generator)
        for batch in batches([pieces[n] for n in spread] * maskings)
    ]
