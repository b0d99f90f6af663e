"""Tables of bands say what the graph's own edges say, and their tiles cover it exactly once."""

from collections import Counter

import pytest
import torch

import graphattn as ga
from graphattn.graphs.structures.bands import bands_of, has_bands
from graphattn.kernels.bands.schedule import BandSchedule

BANDS = {
    "path": lambda: ga.window_path_graph(9, 2),
    "path with self loops": lambda: ga.window_path_graph(9, 2, self_loops=True),
    "path shorter than its window": lambda: ga.window_path_graph(4, 9),
    "one token that sees nobody": lambda: ga.window_path_graph(1, 1),
    "causal window": lambda: ga.causal_window_graph(9, 3),
    "causal": lambda: ga.causal_graph(20),
    "causal, transposed": lambda: ga.causal_window_graph(9, 3).transpose(),
    "complete": lambda: ga.complete_graph(19),
    "complete without self": lambda: ga.complete_graph(6, self_loops=False),
    "blocks": lambda: ga.block_window_graph(19, 4),
    "shifted blocks": lambda: ga.block_window_graph(19, 5, shift=2),
    "block longer than the sequence": lambda: ga.block_window_graph(4, 10, shift=3),
    "blocks of one token": lambda: ga.block_window_graph(4, 1),
    "dilated": lambda: ga.dilated_window_graph(41, 2, 3),
    "dilated without self": lambda: ga.dilated_window_graph(20, 2, 4, self_loops=False),
    "dilation beyond the sequence": lambda: ga.dilated_window_graph(5, 2, 40),
    "more sources": lambda: ga.bipartite_complete_graph(4, 17),
    "more targets": lambda: ga.bipartite_complete_graph(17, 4),
    "no sources": lambda: ga.bipartite_complete_graph(3, 0),
    "batch": lambda: ga.batch(
        [ga.causal_graph(5), ga.window_path_graph(20, 1), ga.dilated_window_graph(7, 1, 2)]
    ),
    "batch of equal windows": lambda: ga.batch([ga.window_path_graph(n, 2) for n in (5, 1, 18)]),
    "batch of rectangles": lambda: ga.batch(
        [ga.bipartite_complete_graph(2, 5), ga.bipartite_complete_graph(18, 1)]
    ),
    "batch of a batch": lambda: ga.batch(
        [ga.batch([ga.causal_graph(3), ga.complete_graph(2)]), ga.block_window_graph(5, 2)]
    ),
    "rows of a path": lambda: ga.window_path_graph(20, 3).targets(6, 15)[0],
    "rows of a path, transposed": lambda: ga.window_path_graph(20, 3).targets(6, 15)[0].transpose(),
    "rows of a dilated path": lambda: ga.dilated_window_graph(41, 2, 3, self_loops=False).targets(
        4, 31
    )[0],
    "rows of blocks": lambda: ga.block_window_graph(33, 5, shift=2).targets(6, 24)[0],
    "rows of a complete graph": lambda: ga.complete_graph(9).targets(2, 5)[0],
    "causal with a past": lambda: ga.causal_graph(5, past=8),
    "causal window with a past": lambda: ga.causal_window_graph(5, 3, past=8),
    "causal window with a past, transposed": lambda: ga.causal_window_graph(
        5, 3, past=8
    ).transpose(),
    "rows of a batch": lambda: ga.batch(
        [ga.window_path_graph(9, 2), ga.causal_graph(3), ga.block_window_graph(9, 4)]
    ).targets(4, 17)[0],
    "empty": lambda: ga.complete_graph(0),
    "empty window": lambda: ga.causal_window_graph(0, 3),
    "empty blocks": lambda: ga.block_window_graph(0, 3),
}
OTHERS = {
    "cycle": lambda: ga.window_cycle_graph(8, 2),
    "longformer": lambda: ga.longformer_graph(10, 1, [0, 5]),
    "bigbird": lambda: ga.bigbird_graph(10, 1, 2, [0], seed=3),
    "grid": lambda: ga.grid_window_graph(3, 4, 1),
    "union": lambda: ga.union(ga.window_path_graph(9, 1), ga.dilated_window_graph(9, 1, 4)),
    "batch with a cycle": lambda: ga.batch([ga.causal_graph(3), ga.window_cycle_graph(8, 2)]),
}


def edges_of(sequences: torch.Tensor) -> list[tuple[int, int]]:
    """(source, target) in plain loops, as the columns are documented."""
    edges = []
    for target, targets, source, sources, step, before, after, loops in sequences.tolist():
        for i in range(targets):
            for j in range(max(i - before, 0), min(i + after + 1, sources)):
                if loops != -2 * (j - i):
                    edges.append((source + j * step, target + i * step))
    return sorted(edges, key=lambda edge: (edge[1], edge[0]))


@pytest.fixture(params=BANDS)
def graph(request: pytest.FixtureRequest) -> ga.TokenGraph:
    return BANDS[request.param]()


def test_the_table_lists_the_edges_of_the_graph(graph: ga.TokenGraph) -> None:
    assert has_bands(graph.structure)
    bands = bands_of(graph.structure)
    assert bands is not None
    assert bands.sequences.shape[1:] == (8,)
    assert bands.sequences.dtype == torch.int64
    assert edges_of(bands.sequences) == [tuple(edge) for edge in graph.edge_index.T.tolist()]


def test_every_target_and_every_source_lies_in_one_sequence(graph: ga.TokenGraph) -> None:
    sequences = bands_of(graph.structure).sequences.tolist()
    for start, length, count in ((0, 1, graph.num_targets), (2, 3, graph.num_sources)):
        tokens = Counter(row[start] + k * row[4] for row in sequences for k in range(row[length]))
        assert tokens == Counter(range(count))


def test_what_is_said_of_all_sequences_holds_for_the_edges(graph: ga.TokenGraph) -> None:
    bands, edges = bands_of(graph.structure), graph.to_mask()
    degrees = edges.sum(1).tolist()
    window = BandSchedule(bands.sequences, "cpu").window
    assert window >= max([*degrees, *edges.sum(0).tolist()], default=0)
    assert window <= max((max(row[1], row[3]) for row in bands.sequences.tolist()), default=0)
    square = graph.num_targets == graph.num_sources
    if bands.has_self_loops:
        assert square
        assert edges.diagonal().all()
    if bands.is_symmetric:
        assert square
        assert torch.equal(edges, edges.T)


@pytest.mark.parametrize(
    ("name", "self_loops", "symmetric", "window"),
    [
        ("path", False, True, 5),
        ("path with self loops", True, True, 5),
        ("path shorter than its window", False, True, 4),
        ("causal window", True, False, 3),
        ("causal", True, False, 20),
        ("complete", True, True, 19),
        ("complete without self", False, True, 6),
        ("shifted blocks", True, True, 5),
        ("dilated", True, True, 5),
        ("dilated without self", False, True, 5),
        ("more sources", False, False, 17),
        ("more targets", False, False, 17),
        ("batch", False, False, 5),
    ],
)
def test_what_fast_paths_ask(name: str, self_loops: bool, symmetric: bool, window: int) -> None:
    bands = bands_of(BANDS[name]().structure)
    assert bands.has_self_loops == self_loops
    assert bands.is_symmetric == symmetric
    assert BandSchedule(bands.sequences, "cpu").window == window


def test_the_origin_is_the_row_that_target_i_reads_for_source_i(graph: ga.TokenGraph) -> None:
    """Numbered as in their sequence, however far apart they stand in the whole graph."""
    structure, bands = graph.structure, bands_of(graph.structure)
    if structure.num_offsets is None:
        assert bands.origin is None
    if bands.origin is None or not graph.num_edges:
        return
    places: tuple[dict, dict] = {}, {}
    for row in bands.sequences.tolist():
        for side in (0, 1):
            first, count, step = row[2 * side], row[2 * side + 1], row[4]
            places[side].update({first + k * step: k for k in range(count)})
    source, target = graph.edge_index
    rows = structure.offset_index(target, source)
    edges = zip(target.tolist(), source.tolist(), strict=True)
    hops = torch.tensor([places[1][j] - places[0][i] for i, j in edges])
    assert torch.equal(rows, hops + bands.origin)
    assert int(rows.min()) >= 0
    assert int(rows.max()) < structure.num_offsets


def test_sequences_that_differ_in_it_have_no_origin() -> None:
    graph = ga.block_window_graph(33, 5, shift=2).targets(8, 24)[0]
    assert graph.structure.num_offsets == 9
    assert bands_of(graph.structure).origin is None
    assert bands_of(ga.block_window_graph(33, 5, shift=2).targets(7, 24)[0].structure).origin == 4


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_have_no_table(name: str) -> None:
    structure = OTHERS[name]().structure
    assert bands_of(structure) is None
    assert not has_bands(structure)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 32), (4, 2)])
def test_pairs_of_tiles_are_those_a_program_goes_over(
    graph: ga.TokenGraph, rows: int, columns: int
) -> None:
    """A tile meets all tokens from the first in its reach to the last, `columns` at a time."""
    bands = bands_of(graph.structure)
    tables = BandSchedule(bands.sequences, "cpu")
    for side in ("targets", "sources"):
        total = 0
        for _, targets, _, sources, _, before, after, _ in bands.sequences.tolist():
            count, other_count = (targets, sources) if side == "targets" else (sources, targets)
            for first in range(0, count, rows):
                reached = {
                    j
                    for i in range(first, min(first + rows, count))
                    for j in range(other_count)
                    if (-before <= j - i <= after if side == "targets" else
                        -before <= i - j <= after)
                }  # fmt: skip
                between = max(reached) - min(reached) + 1 if reached else 0
                total += -(-between // columns)
        assert tables.tile_pairs(rows, columns, side) == total


def test_a_million_tokens_cost_no_list_of_edges() -> None:
    graph = ga.causal_window_graph(1_000_000, 256)
    bands = bands_of(graph.structure)
    assert len(bands.sequences) == 1
    assert len(BandSchedule(bands.sequences, "cpu").tiles("targets", 128)) == 7813
    assert graph._edge_index is None
