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
SHARE = 0.1  # of all tokens: share that is held out, and share that chooses the weights
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
    pieces: list[list[DemoPiece]] = []
    first = 0
    for n, sequence in enumerate(sequences):
        parts = -(-len(sequence) // longest)
        pieces.append([])
        begin = 0
        for tokens in sequence.tensor_split(parts) if parts else ():
            end = begin + len(tokens)
            structure = None if structures is None else structures[n]
            if structure is not None and parts > 1:
                residues, chains = torch.arange(begin, end), structure.chain_index[begin:end]
                structure = residues_of(structure, residues, chains, structure.chain_ids)
            pieces[-1].append(DemoPiece(tokens, first + begin, structure))
            begin = end
        first += len(sequence)
    return pieces


def batch_of(pieces: Sequence[DemoPiece]) -> Batch:
    tokens = [piece.tokens for piece in pieces]
    valid = [torch.ones(len(piece.tokens), dtype=torch.bool) for piece in pieces]
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
        too_much = sum(len(each.tokens) for each in (*some, piece)) > room
        if some and too_much:
            yield batch_of(some)
            some = []
        some.append(piece)
    if some:
        yield batch_of(some)


def hide(batch: Batch, mask_token: int, generator: torch.Generator) -> MaskedBatch:
    inputs, masked = ga.train.mask_tokens(
        batch.tokens, mask_token, mask_ratio=MASK_RATIO, valid=batch.valid, generator=generator
    )
    return MaskedBatch(batch, inputs, masked)


def evaluation(pieces: Sequence[DemoPiece], mask_token: int, tokens: int) -> list[MaskedBatch]:
    """Return batches of about `tokens` tokens for the evaluation, evenly spread over all pieces.

    If there are few pieces, each comes several times with different masks.
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


# Training and held-out sequences, with relatives on the same side.


@dataclass(frozen=True)
class Split:
    """Numbers of the sequences for training, for choosing weights, and held out."""

    training: list[int]
    choosing: list[int]  # their loss chooses the weights; empty if there are only two families
    held_out: list[int]


def split(lengths: Sequence[int], groups: Sequence[list[int]], seed: int) -> Split | None:
    """Hold out random whole families, never the largest; return None if there is only one."""
    if len(groups) < 2:
        return None
    sizes = [sum(lengths[n] for n in group) for group in groups]
    room = SHARE * sum(sizes)
    largest = max(range(len(groups)), key=sizes.__getitem__)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    left = [g for g in order if g != largest]
    sides: list[list[int]] = []
    for _ in range(2):
        side: list[int] = []
        for g in left:
            taken = sum(sizes[other] for other in side)
            if taken < room and (not side or taken + sizes[g] <= 2 * room):
                side.append(g)
        left = [g for g in left if g not in side]
        sides.append(side)
    held_out, choosing, training = (
        sorted(n for g in part for n in groups[g]) for part in (*sides, [largest, *left])
    )
    return Split(training, choosing, held_out)
