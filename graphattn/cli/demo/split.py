"""Split sequences into training and held-out ones, with relatives on the same side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SHARE = 0.1  # of all tokens: share that is held out, and share that chooses the weights


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
