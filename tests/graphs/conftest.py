"""Promises of every token graph, checked against a mask written out by hand."""

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch

import graphattn as ga
from graphattn.graphs.structures.structure import GraphStructure

Mask = Sequence[Sequence[bool]]


@pytest.fixture(scope="session")
def mask_of() -> Callable[..., list[list[bool]]]:
    """The mask of a definition: `sees(i, j)` for every target i and source j, in plain Python."""

    def write_out(sees: Callable[[int, int], bool], num_targets: int, num_sources=None):
        num_sources = num_targets if num_sources is None else num_sources
        return [[bool(sees(i, j)) for j in range(num_sources)] for i in range(num_targets)]

    return write_out


@pytest.fixture(scope="session")
def check_graph() -> Callable[..., None]:
    """Asserts that a graph, fresh from its builder, is the given mask in every respect."""

    def check(
        graph: ga.TokenGraph,
        mask: Mask,
        *,
        num_sources: int | None = None,
        positions: Sequence[int] | None = None,
        source_positions: Sequence[int] | None = None,
        place: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:
        num_targets = len(mask)
        if num_sources is None:
            num_sources = len(mask[0]) if mask else 0
        edges = [(j, i) for i in range(num_targets) for j in range(num_sources) if mask[i][j]]
        degrees = [sum(row) for row in mask]
        positions = list(range(num_targets)) if positions is None else list(positions)
        if source_positions is None:
            source_positions = positions if num_targets == num_sources else range(num_sources)
        source_positions = list(source_positions)

        # Counted first: nothing below may depend on the edges having been listed.
        assert (graph.num_targets, graph.num_sources) == (num_targets, num_sources)
        assert graph.num_edges == len(edges)
        assert graph.in_degree().tolist() == degrees
        assert graph.structure is None or graph._edge_index is None, "counting listed the edges"

        # The edges: exactly these, by target, then source; so no duplicates either.
        assert graph.edge_index.dtype == torch.int64
        assert graph.edge_index.shape == (2, len(edges))
        assert list(zip(*graph.edge_index.tolist(), strict=True)) == edges
        assert graph.edge_index is graph.edge_index
        assert graph.num_edges == len(edges)
        assert graph.in_degree().dtype == torch.int64
        assert graph.in_degree().tolist() == degrees

        rowptr, source = graph.csr()
        assert rowptr.tolist() == [0, *itertools.accumulate(degrees)]
        assert torch.equal(rowptr, graph.rowptr)
        assert source.tolist() == [j for j, _ in edges]

        expected = torch.zeros((num_targets, num_sources), dtype=torch.bool)
        for j, i in edges:
            expected[i, j] = True
        assert torch.equal(graph.to_mask(), expected)

        if graph.structure is not None:
            i = torch.arange(num_targets)[:, None].expand(num_targets, num_sources)
            j = torch.arange(num_sources)[None, :].expand(num_targets, num_sources)
            assert torch.equal(graph.structure.contains(i, j), expected)
            assert torch.equal(graph.structure.contains(i[:, :1], j[:1]), expected), "broadcasting"
            assert graph.structure.num_targets == num_targets
            assert graph.structure.num_sources == num_sources
        if graph.is_causal:
            assert all(source_positions[j] <= positions[i] for j, i in edges)

        flipped = graph.transpose()
        assert (flipped.num_targets, flipped.num_sources) == (num_sources, num_targets)
        assert flipped.num_edges == len(edges)
        assert list(zip(*flipped.edge_index.tolist(), strict=True)) == sorted(
            ((i, j) for j, i in edges), key=lambda edge: (edge[1], edge[0])
        )
        permutation = graph.transpose_permutation()
        assert sorted(permutation.tolist()) == list(range(len(edges)))
        assert torch.equal(flipped.edge_index, graph.edge_index[:, permutation].flip(0))
        assert flipped.positions.tolist() == source_positions
        assert flipped.source_positions.tolist() == positions
        assert flipped.transpose() == graph
        assert copy.copy(flipped).transpose() == graph, "a copy knows nothing of where it came from"

        assert graph.positions.dtype == torch.int64
        assert graph.positions.tolist() == positions
        assert graph.source_positions.tolist() == source_positions

        num_offsets = None if graph.structure is None else graph.structure.num_offsets
        if num_offsets is not None:
            assert num_offsets >= 0
            source, target = graph.edge_index
            rows = graph.structure.offset_index(target, source).tolist()
            assert all(0 <= row < num_offsets for row in rows)
            if place is None:
                moves = [(source_positions[j] - positions[i],) for j, i in edges]
            else:
                moves = [
                    tuple(b - a for a, b in zip(place(i), place(j), strict=True)) for j, i in edges
                ]
            # One row per displacement and one displacement per row.
            pairs = set(zip(moves, rows, strict=True))
            assert len(pairs) == len(set(moves)) == len(set(rows))

        plain = ga.from_mask(expected)
        for twin in (pickle.loads(pickle.dumps(graph)), copy.copy(graph), copy.deepcopy(graph)):
            assert twin is not graph
            assert twin == graph
            assert hash(twin) == hash(graph)
            assert twin.is_causal == graph.is_causal
            assert twin.structure == graph.structure
            assert torch.equal(twin.edge_index, graph.edge_index)
            assert torch.equal(twin.positions, graph.positions)
        places = plain.positions.tolist(), plain.source_positions.tolist()
        if (positions, source_positions) == places and len(graph.sizes) == 1:
            assert graph == plain
            assert plain == graph
            assert hash(plain) == hash(graph)

    return check


@pytest.fixture
def nobody_lists_edges(monkeypatch):
    """Makes every structure refuse to list its edges."""

    def refuse(self, device=None):
        raise AssertionError(f"{type(self).__name__} listed its edges")

    def every_subclass(kind):
        for sub in kind.__subclasses__():
            yield sub
            yield from every_subclass(sub)

    for kind in every_subclass(GraphStructure):
        monkeypatch.setattr(kind, "edges", refuse)
