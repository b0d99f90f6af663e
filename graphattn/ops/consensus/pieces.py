"""The edges of a graph, in pieces of bounded size, without listing those of a band.

Target i of a band sees i + dilation * hop. So the edges with one hop, from a run of neighbouring
targets, have contiguous slices of targets and of sources, and nothing is gathered. A *move* is
source minus target, dilation * hop. Pieces of any other graph are parts of its edge list.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.composites import Parts, Section, section_of_band
from graphattn.graphs.structures.structure import Band, GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.edge_network import EdgeNetworkParameters
from graphattn.ops.inputs import ValidPair

MANY_HOPS = 16
SHORT = 4096  # edges per hop: with fewer and many hops, a list of edges is faster
SHORTEST = 512  # tokens: in shorter sequences, a list of edges is faster than a call per hop

Tokens = slice | Tensor  # a run of tokens, or their indices [n]


class EdgePiece(NamedTuple):
    """n edges, of b sequences of the batch, for k networks; edge e joins target[e] and source[e].

    Attributes:
        networks, batch: slices of the k networks and of the b sequences.
        target, source: the tokens at the ends of the edges.
        counts: which of the pairs are edges, bool [b or 1, n]; all if None.
        places: the indices of the edges in ``graph.edge_index``; None if they are not needed.
    """

    networks: slice
    batch: slice
    target: Tokens
    source: Tokens
    counts: Tensor | None
    places: Tokens | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes b and n."""
        n = (
            self.target.stop - self.target.start
            if isinstance(self.target, slice)
            else len(self.target)
        )
        return self.batch.stop - self.batch.start, n

    def of_networks(self, network: EdgeNetworkParameters) -> EdgeNetworkParameters:
        """The parameters of the networks of this piece."""
        if self.is_first and self.networks.stop == len(network.alpha):
            return network
        return EdgeNetworkParameters(*(x[self.networks] for x in network))

    @property
    def is_first(self) -> bool:
        """Whether both its slices, of networks and of sequences, start at 0."""
        return self.networks.start == self.batch.start == 0

    def clear(self, x: Tensor) -> Tensor:
        """x [k, b, n, heads, features] with 0 for pairs that are no edges, which may hold NaN."""
        return x if self.counts is None else x.masked_fill(~self.counts[..., None, None], 0)

    def of_edges(self, x: Tensor) -> Tensor:
        """Values [b or 1, n, 1 or G, features] of its edges, from those of all [B or 1, E, ...]."""
        places = self.places
        assert places is not None
        x = x if len(x) == 1 else x[self.batch]
        x = x[:, places] if isinstance(places, slice) else x.index_select(1, places)
        return self.clear(x)

    def add_to_edges(self, total: Tensor, values: Tensor) -> None:
        """Add values [b, n, 1 or G, features] to those of all edges; they are 0 for other pairs."""
        assert self.places is not None
        if len(total) == 1:
            values = values.sum(0, keepdim=True)
        else:
            total = total[self.batch]
        if isinstance(self.places, slice):
            total[:, self.places].add_(values)
        else:  # every edge occurs once, so the order of additions does not matter
            total.index_add_(1, self.places, values)


def _with_loops(graph: TokenGraph) -> tuple[Tensor, Tensor, Tensor | None]:
    source, target = graph.compact_edges
    return source, target, None


def _without_loops(graph: TokenGraph) -> tuple[Tensor, Tensor, Tensor | None]:
    source, target = graph.compact_edges
    apart = source != target
    if bool(apart.all()):
        return source, target, None
    return source[apart], target[apart], apart.nonzero()[:, 0]


def _of_piece(x: Tensor, piece: EdgePiece) -> Tensor:
    """The networks and sequences of a piece, from x [G, B, ...]."""
    whole = x.shape[:2] == (piece.networks.stop, piece.batch.stop)  # runs start at 0
    return x if whole and piece.is_first else x[piece.networks, piece.batch]


def at(x: Tensor, piece: EdgePiece, tokens: Tokens) -> Tensor:
    """x [G, B, N, heads, features] at one end of every edge, [k, b, n, heads, features]."""
    x = _of_piece(x, piece)
    return x[:, :, tokens] if isinstance(tokens, slice) else x.index_select(2, tokens)


def add_at(total: Tensor, piece: EdgePiece, tokens: Tokens, values: Tensor, sign: int = 1) -> None:
    """Add values [k, b, n, heads, features] at the tokens of one end, in a fixed order."""
    total = _of_piece(total, piece)
    if isinstance(tokens, slice):
        total[:, :, tokens].add_(values, alpha=sign)
    elif total.device.type == "cpu":
        total.index_add_(2, tokens, values, alpha=sign)
    else:  # on a GPU, index_add_ adds in any order; this sorts first
        values = (values if sign == 1 else -values).movedim(2, 0)
        total.movedim(2, 0).index_put_((tokens,), values, accumulate=True)


class Pieces:
    """Every edge of a graph, for every network and every sequence of a batch, exactly once.

    Self-loops are left out if `loops` is False. The order of edges, and so that of every sum, is
    fixed. With `places`, every piece has the indices of its edges in ``graph.edge_index``.
    """

    def __init__(
        self,
        graph: TokenGraph,
        *,
        networks: int,
        batch: int,
        valid: ValidPair,
        loops: bool,
        places: bool = False,
    ) -> None:
        self.networks, self.batch = networks, batch
        self.num_tokens, self.device = graph.num_targets, graph.device
        self.num_sources = graph.num_sources
        self.valid = [  # [B or 1, tokens]
            None if of is None else of.reshape(of.shape[:-1].numel(), of.shape[-1]) for of in valid
        ]
        # The indices of edges are not known in a section of a band, so its edges are listed.
        listed = places and isinstance(graph.structure, Section)
        self.bands = () if listed else _bands(graph)
        if self.bands:
            self.moves = moves_of(self.bands, loops=loops, shift=shift_of(graph.structure))
            lengths = [band.num_tokens for band in self.bands]
            self.borders = torch.tensor(lengths).cumsum(0).tolist() if len(lengths) > 1 else []
            self.length = self.num_tokens
            self.middle = _middle_of_rows(graph, self.bands) if places else None
            self.num_edges = graph.num_edges
        else:
            make = _with_loops if loops else _without_loops
            # `listed` are the indices of the edges, if some are left out.
            self.source, self.target, self.listed = graph.derived(make, lambda: make(graph))
            self.length = len(self.source)

    @property
    def rows(self) -> int:
        """The number of edges (on bands, of tokens) times that of networks and sequences."""
        return self.length * self.batch * self.networks

    def chunks(self, rows: int | None = None) -> Iterator[EdgePiece]:
        """Pieces with k * b * n <= `rows`; if None, as few pieces as possible."""
        if self.rows == 0:
            return
        rows = rows or self.rows
        # As many tokens or edges as fit. If all do, several sequences; then several networks.
        n = min(self.length, rows)
        b = min(self.batch, rows // n)
        k = min(self.networks, rows // (n * b))
        for networks in _runs(self.networks, k):
            for batch in _runs(self.batch, b):
                for run in _runs(self.length, n):
                    ends = self._band_edges(run) if self.bands else self._listed_edges(run)
                    for target, source, inside, places in ends:
                        counts = self._counts(batch, target, source, inside)
                        yield EdgePiece(networks, batch, target, source, counts, places)

    def no_edges(self) -> EdgePiece:
        """A piece without edges: it makes sums depend on every tensor, and does not change them."""
        none = slice(0, 0)
        return EdgePiece(slice(0, self.networks), slice(0, self.batch), none, none, None, none)

    def _listed_edges(self, run: slice) -> Iterator[tuple[Tokens, Tokens, None, Tokens]]:
        places = run if self.listed is None else self.listed[run]
        yield self.target[run].long(), self.source[run].long(), None, places

    def _band_edges(
        self, run: slice
    ) -> Iterator[tuple[Tokens, Tokens, Tensor | None, Tensor | None]]:
        """The edges of a run of targets, one hop after the other."""
        for move in self.moves:
            start, stop = max(run.start, -move), min(run.stop, self.num_sources - move)
            if start < stop:
                target, source = slice(start, stop), slice(start + move, stop + move)
                low, high = min(start, source.start), max(stop, source.stop)
                part, last = (bisect_right(self.borders, token) for token in (low, high - 1))
                inside = None
                if part < last:  # with several sequences, a pair may join two of them
                    if all(band.num_tokens <= abs(move) for band in self.bands[part : last + 1]):
                        continue
                    token = torch.arange(low, high, device=self.device)
                    borders = torch.tensor(self.borders[part:last], device=self.device)
                    sequence = torch.bucketize(token, borders, right=True)
                    inside = (sequence[: stop - start] == sequence[abs(move) :])[None]
                yield target, source, inside, self._places(target, move)

    def _places(self, target: slice, move: int) -> Tensor | None:
        """The indices of the edges of one hop, counted from the middle of their rows.

        A pair that joins two sequences is no edge, and gets the index of some other edge.
        """
        if self.middle is None:
            return None
        band = self.bands[0]
        hop = move // band.dilation
        skipped = int(hop > 0 and not band.self_loops)
        return (self.middle[target] + (hop - skipped)).clamp_(0, self.num_edges - 1)

    def _counts(
        self, batch: slice, target: Tokens, source: Tokens, inside: Tensor | None
    ) -> Tensor | None:
        """Mark the pairs that are edges between valid tokens, bool [b or 1, n]; None: all."""
        counts = inside
        for of, tokens in zip(self.valid, (target, source), strict=True):
            if of is not None:
                at_end = (of[batch] if len(of) > 1 else of)[:, tokens]
                counts = at_end if counts is None else counts & at_end
        return counts


def equal_bands(structure: GraphStructure | None) -> tuple[Band, ...]:
    """The one band, or the bands of a batch that have the same offsets; () for other graphs.

    A section of a band counts as one: its offsets are shifted, see :func:`shift_of`.
    """
    band = section_of_band(structure)
    if band is not None:
        return (band,)
    parts = structure.parts if isinstance(structure, Parts) else (structure,)
    bands = tuple(part for part in parts if isinstance(part, Band))
    kinds = {(b.before, b.after, b.dilation, b.self_loops) for b in bands}
    return () if len(bands) < len(parts) or len(kinds) != 1 else bands


def shift_of(structure: GraphStructure | None) -> int:
    """How much larger the position of a target is than that of the source with the same index."""
    return structure.shift if isinstance(structure, Section) else 0


def moves_of(bands: tuple[Band, ...], *, loops: bool, shift: int = 0) -> list[int]:
    """The moves, source minus target, of all edges that a token of equal bands may have, ascending.

    Without `loops`, edges from an index to itself are left out.
    """
    longest = max(bands, key=lambda band: band.num_tokens)
    first, last = -longest._reach(longest.before), longest._reach(longest.after)
    return [
        move
        for hop in range(first, last + 1)
        if (hop or longest.self_loops) and ((move := hop * longest._stride + shift) or loops)
    ]


def _middle_of_rows(graph: TokenGraph, bands: tuple[Band, ...]) -> Tensor:
    """The index of the edge of every token to itself, or of the first one after it, [N]."""
    before = [
        (torch.arange(band.num_tokens) // band.dilation).clamp(max=band.before) for band in bands
    ]
    return graph.rowptr[:-1] + torch.cat(before).to(graph.device)


def _bands(graph: TokenGraph) -> tuple[Band, ...]:
    """The equal bands of a graph; none if a list is faster: in short sequences, with many hops."""
    bands = equal_bands(graph.structure)
    if all(band.num_tokens < SHORTEST for band in bands):
        return ()
    hops = max((band._reach(band.before) + band._reach(band.after) for band in bands), default=0)
    return () if hops > MANY_HOPS and graph.num_edges < hops * SHORT else bands


def _runs(length: int, most: int) -> Iterator[slice]:
    """Cut 0 .. length - 1 into slices of at most `most`, equally long except for the last."""
    size = math.ceil(length / math.ceil(length / most))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
