"""Graphs made of bands, as one table: what kernels read in place of a structure.

Windows, causal and complete graphs, blocks and dilated windows, alone or side by side, are all
sequences of tokens in which target i sees the sources from i - before to i + after. A block is a
short complete sequence; a dilated window is one sequence for every remainder of the token's index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from graphattn.graphs.composites import Parts, Union, union_of
from graphattn.graphs.structure import Band, Blocks, Complete, Structure
from graphattn.kernels.band_tables import BandTables


@dataclass(frozen=True, eq=False)
class Bands:
    """`sequences` [S, 8], int64 on the CPU, and what they have in common.

    The columns are: first target, number of targets, first source, number of sources, step from a
    token of the sequence to its next, `before`, `after`, and 1 where tokens see themselves.

    Attributes:
        origin: the row of a table of offsets that a token reads for itself; None: no such table.
    """

    sequences: Tensor
    origin: int | None

    @cached_property
    def has_self_loops(self) -> bool:
        """Every target is a source, too, and sees itself."""
        target, targets, source, sources, _, before, after, loops = self.sequences.unbind(1)
        same = (target == source) & (targets == sources)
        return bool((same & (before >= 0) & (after >= 0) & (loops == 1)).all())

    @cached_property
    def is_symmetric(self) -> bool:
        """Targets and sources are the same tokens, and see each other."""
        target, targets, source, sources, _, before, after, _ = self.sequences.unbind(1)
        return bool(((target == source) & (targets == sources) & (before == after)).all())


def has_bands(structure: Structure) -> bool:
    """Whether :func:`bands_of` finds some, and every token's sources are one run of neighbours."""
    if isinstance(structure, Parts):
        return all(has_bands(part) for part in structure.parts)
    return isinstance(structure, Band | Blocks | Complete)


@lru_cache(maxsize=64)
def bands_of(structure: Structure) -> Bands | None:
    """The table of a structure; None where it is not made of bands.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.graphs.bands import bands_of
        >>> graph = ga.batch([ga.causal_window_graph(9, window=4), ga.complete_graph(3)])
        >>> bands_of(graph.structure).sequences
        tensor([[0, 9, 0, 9, 1, 3, 0, 1],
                [9, 3, 9, 3, 1, 2, 2, 1]])
        >>> bands_of(ga.window_cycle_graph(9, window=2).structure) is None
        True
    """
    sequences = _sequences(structure)
    if sequences is None:
        return None
    match structure.offset_table:
        case ("sequence", first, _, _):
            return Bands(sequences, -first)
    return Bands(sequences, None)


@lru_cache(maxsize=64)
def band_tables(structure: Structure, device: torch.device) -> BandTables:
    """Kept: made on the host, and copied to the device once per graph, for all kernels."""
    bands = bands_of(structure)
    assert bands is not None
    return BandTables(bands.sequences, device, origin=bands.origin)


def bands_and_others(structure: Structure) -> tuple[Structure, Tensor] | None:
    """A structure made of bands and, [2, E], the other edges; None where bands hold less than half.

    Splits a union, such as a window with global tokens, or a batch of such unions.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.graphs.bands import bands_and_others
        >>> graph = ga.longformer_graph(6, window=1, global_tokens=(0,))
        >>> band, others = bands_and_others(graph.structure)
        >>> band
        Band(num_tokens=6, before=1, after=1, dilation=1, self_loops=True)
        >>> others
        tensor([[2, 3, 4, 5, 0, 0, 0, 0],
                [0, 0, 0, 0, 2, 3, 4, 5]])
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
            found = [own for part in structure.parts if (own := bands_and_others(part)) is not None]
            if not found or len(found) < len(structure.parts):
                return None
            band = Parts(tuple(own for own, _ in found))
            starts = zip(structure.source_ptr, structure.target_ptr, strict=True)
            others = torch.cat(
                [
                    own + torch.tensor(start)[:, None]
                    for (_, own), start in zip(found, starts, strict=False)
                ],
                dim=1,
            )
        case _ if has_bands(structure):
            return structure, torch.empty((2, 0), dtype=torch.int64)
        case _:
            return None
    return (band, others) if others.shape[1] <= band.num_edges() else None


def _sequences(structure: Structure) -> Tensor | None:
    match structure:
        case Complete(targets, sources):
            last = max(targets, sources, 1) - 1
            return torch.tensor([[0, targets, 0, sources, 1, last, last, 1]])
        case Blocks():
            return _of_blocks(structure)
        case Band():
            return _of_band(structure)
        case Parts():
            found = []
            for part, t, s in zip(
                structure.parts, structure.target_ptr, structure.source_ptr, strict=False
            ):
                own = _sequences(part)
                if own is None:
                    return None
                found.append(own + torch.tensor([t, 0, s, 0, 0, 0, 0, 0]))
            return torch.cat(found) if found else torch.zeros(0, 8, dtype=torch.int64)
    return None


def _of_band(band: Band) -> Tensor:
    first = torch.arange(min(band.dilation, band.num_tokens))
    length = (band.num_tokens - first + band.dilation - 1) // band.dilation
    before, after = band._reach(band.before), band._reach(band.after)
    columns = (first, length, first, length, band._stride, before, after, int(band.self_loops))
    return torch.stack([torch.as_tensor(x).expand_as(first) for x in columns], dim=1)


def _of_blocks(blocks: Blocks) -> Tensor:
    size, N = blocks._size, blocks.num_tokens
    first = torch.arange(blocks.shift - size, N, size) if N else torch.zeros(0, dtype=torch.int64)
    start, stop = first.clamp(min=0), (first + size).clamp(max=N)
    start, stop = start[stop > start], stop[stop > start]
    last = (stop - start - 1).clamp(min=0)
    ones = torch.ones_like(start)
    columns = (start, stop - start, start, stop - start, ones, last, last, ones)
    return torch.stack(columns, dim=1)
