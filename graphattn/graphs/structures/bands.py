"""Graphs made of bands, as one table that kernels read instead of a structure.

Windows, dilated windows, blocks, causal and complete graphs, and batches of these, all consist of
sequences of tokens in which target i sees the sources from i - before to i + after. A block is a
short complete sequence. A dilated window has one sequence for every remainder of the token's index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from graphattn.graphs.structures.composites import Parts, Section, Union, union_of
from graphattn.graphs.structures.structure import Band, Blocks, Complete, GraphStructure
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.shared.stored import stores_results

Run = tuple[int, int]  # the first token, and the one after the last


@dataclass(frozen=True, eq=False)
class Bands:
    """The sequences of a graph that is made of bands.

    Attributes:
        sequences: int64 [S, 8] on the CPU, a row per sequence. The columns are: first target,
            number of targets, first source, number of sources, the step from a token of the
            sequence to the next one, `before`, `after`, and a code. The code is 1 if a target sees
            all sources from i - before to i + after. Otherwise one hop is left out, and the code is
            -2 times this hop: 0 if tokens do not see themselves. In a section, targets and sources
            may be shifted against each other, and `before` or `after` may be negative.
        shifts: [S], how many steps the first target of a sequence is after its first source.
        origin: the row of a table of offsets that target i reads for source i; None if there is no
            such table, or if the row is not the same in all sequences.
    """

    sequences: Tensor
    shifts: Tensor
    origin: int | None

    @cached_property
    def has_self_loops(self) -> bool:
        """Whether every target is also a source and sees itself."""
        target, targets, source, sources, _, before, after, loops = self.sequences.unbind(1)
        same = (target == source) & (targets == sources)
        return bool((same & (before >= 0) & (after >= 0) & (loops == 1)).all())

    @cached_property
    def _covered(self) -> tuple[int, int]:
        """The number of targets and of sources in all sequences."""
        return int(self.sequences[:, 1].sum()), int(self.sequences[:, 3].sum())

    def covers(self, num_targets: int, num_sources: int) -> bool:
        """Whether all of `num_targets` targets and `num_sources` sources are in a sequence."""
        return self._covered == (num_targets, num_sources)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether targets and sources are the same tokens, and every edge has its reverse edge."""
        target, targets, source, sources, _, before, after, loops = self.sequences.unbind(1)
        same = (target == source) & (targets == sources) & ((loops == 0) | (loops == 1))
        return bool((same & (before == after)).all())


def has_bands(structure: GraphStructure) -> bool:
    """Whether a structure is made of bands, so that :func:`bands_of` returns a table."""
    if isinstance(structure, Parts):
        return all(has_bands(part) for part in structure.parts)
    if isinstance(structure, Section):
        return isinstance(structure.whole, Band | Blocks | Complete)
    return isinstance(structure, Band | Blocks | Complete)


@stores_results(64)
def bands_of(structure: GraphStructure) -> Bands | None:
    """Make the table of a structure; None if it is not made of bands."""
    with torch.device("cpu"):  # The cached result must not depend on torch's default device.
        table = _sequences(structure)
    if table is None:
        return None
    sequences, origin = table[:, :8].contiguous(), None
    with_edges = (sequences[:, 1] > 0) & (sequences[:, 3] > 0)
    shifts = set(table[with_edges, 8].tolist()) or {0}
    match structure.offset_table:
        case ("sequence", first, _, _) if len(shifts) == 1:
            origin = -first - shifts.pop()
    return Bands(sequences, table[:, 8], origin)


@stores_results(64)
def band_schedule_of(structure: GraphStructure, device: torch.device) -> BandSchedule:
    """Make the schedule of a structure on the host, and copy it to the device; cached."""
    bands = bands_of(structure)
    assert bands is not None
    return BandSchedule(bands.sequences, device, origin=bands.origin)


def bands_and_others(structure: GraphStructure) -> tuple[GraphStructure, Tensor] | None:
    """Split a union, such as a window with global tokens, into bands and other edges [2, E].

    The structure may also be a batch of such unions. The result is None if the bands have less than
    half of the edges.
    """
    match structure:
        case Union(parts):
            bands = [part for part in parts if has_bands(part)]
            if not bands:
                return None
            band = max(bands, key=lambda part: part.num_edges())
            source, target = union_of([part for part in parts if part is not band]).edges()
            new = ~band.contains(target, source)
            others = torch.stack([source[new], target[new]])
        case Parts():
            splits = [
                split for part in structure.parts if (split := bands_and_others(part)) is not None
            ]
            if not splits or len(splits) < len(structure.parts):
                return None
            band = Parts(tuple(split for split, _ in splits))
            others = torch.cat(
                [
                    split + torch.tensor([[s], [t]])
                    for (_, split), (_, t, s) in zip(splits, structure.placed(), strict=True)
                ],
                dim=1,
            )
        case _ if has_bands(structure):
            return structure, torch.empty((2, 0), dtype=torch.int64)
        case _:
            return None
    return (band, others) if others.shape[1] <= band.num_edges() else None


def _sequences(structure: GraphStructure) -> Tensor | None:
    """Make the table with one column more: how many steps the first target is after the source."""
    match structure:
        case Complete(targets, sources):
            return torch.tensor([_full(targets, sources)])
        case Blocks():
            return _of_blocks(structure, (0, structure.num_tokens), (0, structure.num_tokens))
        case Band():
            return _of_band(structure, (0, structure.num_tokens), (0, structure.num_tokens))
        case Section(whole):
            target_run = structure.start, structure.stop
            seen = structure.source_start, structure.source_stop
            match whole:
                case Complete():
                    full = _full(structure.num_targets, structure.num_sources)
                    return torch.tensor([[*full[:-1], structure.shift]])
                case Blocks():
                    return _of_blocks(whole, target_run, seen)
                case Band():
                    return _of_band(whole, target_run, seen)
        case Parts():
            tables = []
            for part, t, s in structure.placed():
                if (table := _sequences(part)) is None:
                    return None
                tables.append(table + torch.tensor([t, 0, s, 0, 0, 0, 0, 0, 0]))
            return torch.cat(tables) if tables else torch.zeros(0, 9, dtype=torch.int64)
    return None


def _full(targets: int, sources: int) -> list[int]:
    """Make the row of a sequence whose targets see all of its sources."""
    last = max(targets, sources, 1) - 1
    return [0, targets, 0, sources, 1, last, last, 1, 0]


def _of_band(band: Band, targets: Run, sources: Run) -> Tensor:
    """Make a row for every remainder, of those tokens of a band that are in the two runs."""
    step, remainder = band._stride, torch.arange(min(band.dilation, band.num_tokens))
    (target, n), (source, m) = (_strided(remainder, run, step) for run in (targets, sources))
    shift = (targets[0] + target - sources[0] - source) // step
    before, after = band._reach(band.before) - shift, band._reach(band.after) + shift
    loops = torch.ones_like(shift) if band.self_loops else -2 * shift
    columns = (target, n, source, m, step, before, after, loops, shift)
    return torch.stack([torch.as_tensor(x).expand_as(remainder) for x in columns], dim=1)


def _strided(remainder: Tensor, run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Find, for each remainder, the first token of a run that has it, and count such tokens."""
    first = (remainder - run[0]) % step
    return first, (run[1] - run[0] - first + step - 1).clamp(min=0) // step


def _of_blocks(blocks: Blocks, targets: Run, sources: Run) -> Tensor:
    size, N = blocks._size, blocks.num_tokens
    first = torch.arange(blocks.shift - size, N, size) if N else torch.zeros(0, dtype=torch.int64)
    runs = [(first.clamp(*run), (first + size).clamp(*run)) for run in (targets, sources)]
    (start, stop), (low, high) = runs
    here = (stop > start) | (high > low)
    start, stop, low, high = start[here], stop[here], low[here], high[here]
    n, m, one = stop - start, high - low, torch.ones_like(start)
    last = (torch.maximum(n, m) - 1).clamp(min=0)
    columns = (start - targets[0], n, low - sources[0], m, one, last, last, one, start - low)
    return torch.stack(columns, dim=1)
