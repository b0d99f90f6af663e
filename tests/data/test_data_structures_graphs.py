"""Graphs of structures: neighbours across chains, windows that respect gaps, features of edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structure_files import pdb_line
from torch import Tensor

import graphattn as ga
from graphattn.data import Structure, read_structure

Edges = set[tuple[int, int]]


def edges_of(graph: ga.TokenGraph) -> Edges:
    return {(target, source) for source, target in graph.edge_index.T.tolist()}


def kept(structure: Structure, rows: list[int], numbers: Tensor | None = None) -> Structure:
    """A structure of one chain without the other residues."""
    numbers = structure.residue_numbers[rows] if numbers is None else numbers
    sequence = "".join(structure.sequence[row] for row in rows)
    return Structure(sequence, structure.ca_positions[rows], residue_numbers=numbers)


def line_of_residues(numbers: list[int], codes: str | None = None, step: float = 3.8) -> Structure:
    places = torch.zeros(len(numbers), 3)
    places[:, 0] = step * torch.arange(len(numbers))
    stripped = None if codes is None else tuple(code.strip() for code in codes)
    return Structure(
        "A" * len(numbers),
        places,
        residue_numbers=torch.tensor(numbers),
        **({} if stripped is None else {"insertion_codes": stripped}),
    )


@pytest.fixture
def complex_of_three(tmp_path: Path) -> Structure:
    """Three strands side by side, 5 Angstrom apart, read from a file; B misses 4 to 6."""
    pytest.importorskip("biotite", reason="structures are read with biotite")
    lines = [
        pdb_line("CA", "ALA", chain, number, (3.8 * number, 5.0 * row, 0.0))
        for row, chain in enumerate("ABC")
        for number in range(1, 11)
        if chain != "B" or not 4 <= number <= 6
    ]
    path = tmp_path / "complex.pdb"
    path.write_text("\n".join(lines))
    return read_structure(path)


@pytest.fixture(scope="module")
def lysozyme(real_file: Callable[[str], Path]) -> Structure:
    pytest.importorskip("biotite", reason="structures are read with biotite")
    return read_structure(real_file("structure/pdb/1aki.pdb"))


def test_neighbours_in_space_are_of_every_chain(complex_of_three):
    structure = complex_of_three
    assert structure.chain_ids == ("A", "B", "C")
    chain, places = structure.chain_index.tolist(), structure.ca_positions.double()
    distance = torch.cdist(places, places)
    near = structure.neighbor_graph(k=5)
    for i, row in enumerate(near.neighbors.tolist()):
        others = [float(distance[i, j]) for j in range(len(structure)) if j != i]
        distances = sorted(float(distance[i, j]) for j in row)
        assert distances == pytest.approx(sorted(others)[:5], abs=1e-4)
    pairs = {(chain[i], chain[j]) for i, j in edges_of(near)}
    assert {(0, 1), (1, 0), (1, 2), (2, 1)} <= pairs
    within = structure.radius_graph(6.0)
    expected = {
        (i, j)
        for i in range(len(structure))
        for j in range(len(structure))
        if i != j and float(distance[i, j]) <= 6.0
    }
    assert edges_of(within) == expected
    assert {(chain[i], chain[j]) for i, j in expected} >= {(0, 1), (1, 2)}
    # A batch vector of chains takes just these edges away.
    alone = ga.knn_graph(structure.ca_positions, 5, batch=structure.chain_index)
    assert all(chain[i] == chain[j] for i, j in edges_of(alone))


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 40])
def test_a_window_is_of_one_chain_and_counts_missing_residues(complex_of_three, window, self_loops):
    structure = complex_of_three
    chain, number = structure.chain_index.tolist(), structure.residue_numbers.tolist()
    expected = {
        (i, j)
        for i in range(len(structure))
        for j in range(len(structure))
        if chain[i] == chain[j] and abs(number[i] - number[j]) <= window and (i != j or self_loops)
    }
    graph = structure.window_graph(window, self_loops=self_loops)
    assert edges_of(graph) == expected
    if window == 3:  # 3 and 7 of chain B are neighbours in the file, and four places apart
        assert (12, 13) not in edges_of(graph)
        assert number[12:14] == [3, 7]
    if window:
        union = ga.union(graph, structure.neighbor_graph(k=5))
        assert edges_of(union) == expected | edges_of(structure.neighbor_graph(k=5))


def test_places_grow_by_the_missing_residues_and_by_far_more_between_chains(complex_of_three):
    A, B, C = (complex_of_three.positions[complex_of_three.chain_index == c] for c in range(3))
    assert A.tolist() == list(range(10))
    assert (B - B[0]).tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert B[0] - A[-1] == C[0] - B[-1] == 512
    gaps = complex_of_three.gaps.nonzero()[:, 0].tolist()
    assert gaps == [13]


@pytest.mark.parametrize("window", [1, 5, 12, 30])
def test_a_window_over_a_chain_with_holes_is_that_of_the_whole_chain(lysozyme, window):
    whole = lysozyme.window_graph(window)
    assert whole == ga.window_path_graph(129, window)
    assert type(whole.structure).__name__ == "Band"  # in closed form
    rows = [row for row in range(129) if not (40 <= row < 49 or row == 70)]
    place = {row: new for new, row in enumerate(rows)}
    expected = {(place[i], place[j]) for i, j in edges_of(whole) if i in place and j in place}
    holed = kept(lysozyme, rows)
    assert edges_of(holed.window_graph(window)) == expected
    assert holed.gaps.nonzero()[:, 0].tolist() == [40, 61]
    assert holed.positions.diff()[[39, 60]].tolist() == [10, 2]


def test_a_hole_in_a_chain_that_was_numbered_anew_is_found_by_distance(lysozyme):
    ends = lysozyme.ca_positions
    for start, missing in [(14, 4), (60, 9), (100, 1), (30, 2)]:
        rows = [row for row in range(129) if not start <= row < start + missing]
        holed = kept(lysozyme, rows, torch.arange(1, len(rows) + 1))
        assert holed.gaps.nonzero()[:, 0].tolist() == [start]
        steps = int(holed.positions[start] - holed.positions[start - 1])
        distance = float((ends[start + missing] - ends[start - 1]).norm())
        assert 2 <= steps <= missing + 1  # never more than there were
        assert 3.8 * steps + 0.7 >= distance > 3.8 * (steps - 1) + 0.7
        assert (start, start - 1) not in edges_of(holed.window_graph(1))


def test_no_entry_has_a_gap_where_it_is_whole(real_files):
    """Globin domains of SCOPe have every residue between their ends; the numbers agree."""
    pytest.importorskip("biotite", reason="structures are read with biotite")
    for path in real_files("structure/globins/*.pdb"):
        structure = read_structure(path)
        skips = (structure.residue_numbers.diff() > 1).nonzero()[:, 0] + 1
        assert torch.equal(structure.gaps.nonzero()[:, 0], skips), path


def test_insertion_codes_make_places_of_their_own():
    structure = line_of_residues([51, 52, 52, 52, 53, 55, 55], "  AB  A")
    assert structure.positions.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert structure.gaps.tolist() == [False] * 5 + [True, False]
    edges = edges_of(structure.window_graph(1))
    assert {(1, 2), (2, 3), (3, 4), (5, 6)} <= edges
    assert (4, 5) not in edges
    backwards = line_of_residues([60, 60, 60, 61], "BA  ")  # as in chymotrypsin
    assert backwards.positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("numbers", [[-2, -1, 0, 1, 2], [9997, 9998, 9999, 0, 1], [3, 3, 3, 3, 3]])
def test_negative_and_restarted_numbers_are_places_one_after_another(numbers):
    structure = line_of_residues(numbers)
    assert structure.positions.tolist() == [0, 1, 2, 3, 4]
    assert not structure.gaps.any()


def test_an_inserted_residue_behind_a_hole_is_of_the_same_chain():
    """15 Angstrom are four steps of at most 3.8 each, and not another chain."""
    structure = line_of_residues([51, 52, 52, 53], "  A ")
    places = structure.ca_positions.clone()
    places[2:, 0] += 15.0 - 3.8
    holed = replace(structure, ca_positions=places)
    assert structure.positions.tolist() == [0, 1, 2, 3]
    assert holed.positions.tolist() == [0, 1, 5, 6]
    assert holed.gaps.tolist() == [False, False, True, False]
    assert {(1, 2), (2, 1)} <= edges_of(holed.window_graph(4))
    same = replace(holed, insertion_codes=("", "", "", ""))  # one number twice: numbered anew
    assert same.positions.tolist() == [0, 1, 513, 514]


def test_no_window_is_long_enough_for_another_chain():
    """No window joins two chains, even if it is longer than the places between them."""
    numbers, index = torch.arange(1, 5).repeat(2), torch.arange(8) // 4
    places = 3.8 * torch.arange(8.0)[:, None] * torch.eye(3)[:1]
    structure = Structure("A" * 8, places, index, ("A", "B"), numbers)
    # As near as neighbours of one chain, and 512 places apart all the same.
    assert structure.positions.tolist() == [0, 1, 2, 3, 515, 516, 517, 518]
    graph = structure.window_graph(600)
    expected = {(i, j) for i in range(8) for j in range(8) if i // 4 == j // 4 and i != j}
    assert edges_of(graph) == expected
    assert edges_of(structure.window_graph(600, self_loops=True)) == expected | {
        (i, i) for i in range(8)
    }


def test_a_chain_that_starts_again_far_away_is_another_one():
    """Residues whose numbers start again far away are another chain.

    If they are as near as joined residues are, the chain goes on. Files without chain names need
    this.
    """
    numbers = [1, 2, 3, 1, 2, 3]
    structure = line_of_residues(numbers)
    places = structure.ca_positions.clone()
    places[3:, 1] = 9.0
    apart = replace(structure, ca_positions=places)
    assert structure.positions.tolist() == list(range(6))
    assert apart.positions.tolist() == [0, 1, 2, 514, 515, 516]
    assert (2, 3) not in edges_of(apart.window_graph(6))


def test_residues_without_a_place_keep_their_window_and_have_no_neighbours():
    structure = line_of_residues(list(range(1, 9)))
    places = structure.ca_positions.clone()
    places[3] = math.nan
    holed = replace(structure, ca_positions=places)
    assert torch.equal(holed.positions, structure.positions)
    assert holed.window_graph(2) == structure.window_graph(2)
    near = edges_of(holed.neighbor_graph(2)) | edges_of(holed.radius_graph(10.0))
    assert near
    assert not [edge for edge in near if 3 in edge]
    graph = holed.window_graph(2)
    features = holed.edge_features(graph)
    assert features.isfinite().all()
    at_it = (graph.edge_index == 3).any(dim=0)
    assert (features[at_it, :16] == 0).all()
    assert torch.equal(features[~at_it], structure.edge_features(graph)[~at_it])


def test_few_residues_see_all_others():
    for count in (1, 2, 4):
        structure = line_of_residues(list(range(count)))
        assert structure.neighbor_graph(16).num_edges == count * (count - 1)
        assert structure.window_graph(16).num_edges == count * (count - 1)
        assert structure.edge_features(structure.neighbor_graph(16)).shape[1] == 82
    assert line_of_residues([1, 2, 4]).window_graph(16, self_loops=True).num_edges == 9


def features_by_loops(
    structure: Structure, graph: ga.TokenGraph, num: int, reach: float, most: int
) -> list[list[float]]:
    rows = []
    places = structure.ca_positions.double().tolist()
    for j, i in graph.edge_index.T.tolist():
        distance = min(math.dist(places[i], places[j]), reach)
        width = reach / (num - 1)
        row = [math.exp(-((distance - k * width) ** 2) / (2 * width**2)) for k in range(num)]
        same = bool(structure.chain_index[i] == structure.chain_index[j])
        offset = int(structure.positions[j] - structure.positions[i])
        offset = max(-most, min(most, offset))
        row += [float(same and offset == column) for column in range(-most, most + 1)]
        rows.append([*row, float(same)])
    return rows


@pytest.mark.parametrize("sizes", [(16, 20.0, 32), (5, 9.0, 3), (2, 4.0, 0)])
def test_features_of_edges_are_their_equation(complex_of_three, sizes):
    structure = complex_of_three
    num, reach, most = sizes
    graph = ga.union(structure.window_graph(4), structure.neighbor_graph(k=9))
    options: dict[str, Any] = {"num_distances": num, "max_distance": reach, "max_offset": most}
    features = structure.edge_features(graph, **options)
    assert features.shape == (graph.num_edges, Structure.num_edge_features(**options))
    assert features.dtype == torch.float32
    expected = torch.tensor(features_by_loops(structure, graph, num, reach, most))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_features_of_edges_do_not_change_when_all_is_moved_and_turned(lysozyme):
    places = lysozyme.ca_positions.double()
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    here = replace(lysozyme, ca_positions=places)
    there = replace(lysozyme, ca_positions=places @ turn.T + torch.tensor([50.0, -70.0, 10.0]))
    graph = here.neighbor_graph(12)
    assert there.neighbor_graph(12) == graph
    assert there.radius_graph(9.0) == here.radius_graph(9.0)
    features = here.edge_features(graph)
    assert features.dtype == torch.float64
    torch.testing.assert_close(there.edge_features(graph), features, rtol=0, atol=1e-10)
    stretched = replace(lysozyme, ca_positions=places * 1.2).edge_features(graph)
    assert (stretched - features).abs().max() > 0.1


def test_features_of_a_batch_are_those_of_its_structures(complex_of_three):
    """Graphs are batched, features joined: edges stand structure after structure."""
    torch.manual_seed(0)
    items = [complex_of_three, complex_of_three.select(chains=["C", "A"])]
    graphs = [item.neighbor_graph(6) for item in items]
    features = [item.edge_features(graph) for item, graph in zip(items, graphs, strict=True)]
    layer = ga.nn.SelfConsensus(16, 4, edge_hidden=4, edge_features=Structure.num_edge_features())
    x = [torch.randn(len(item), 16) for item in items]
    packed = layer(torch.cat(x), ga.batch(graphs), edge_features=torch.cat(features))
    alone = [layer(*of, edge_features=f) for *of, f in zip(x, graphs, features, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)
    changed = [
        layer(*of, edge_features=f.flip(1)) for *of, f in zip(x, graphs, features, strict=True)
    ]
    assert (torch.cat(changed) - packed).abs().max() > 1e-3


def test_gradients_reach_the_coordinates_and_stay_finite():
    structure = line_of_residues(list(range(1, 9)))
    torch.manual_seed(0)
    places = structure.ca_positions + torch.rand(8, 3)
    places[3], places[5] = math.nan, places[4]  # one unknown, two in one place
    places.requires_grad_()
    structure = replace(structure, ca_positions=places)
    structure.edge_features(structure.window_graph(2, self_loops=True)).square().sum().backward()
    assert places.grad is not None
    assert places.grad.isfinite().all()
    assert (places.grad[[0, 1, 2, 4, 5, 6, 7]] != 0).all()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda s, g: s.window_graph(-1), "window"),
        (lambda s, g: s.window_graph(2.0), "window"),
        (lambda s, g: s.neighbor_graph(0), "k"),
        (lambda s, g: s.radius_graph(-1.0), "radius"),
        (lambda s, g: s.edge_features(g, num_distances=0), "num_distances"),
        (lambda s, g: s.edge_features(g, max_distance=0.0), "max_distance"),
        (lambda s, g: s.edge_features(g, max_offset=-1), "max_offset"),
        (lambda s, g: s.num_edge_features(max_offset=1.5), "max_offset"),
        (lambda s, g: s.edge_features(ga.window_path_graph(9, 1)), "graph"),
        (lambda s, g: s.edge_features(g.edge_index), "graph"),
        (lambda s, g: s.edge_features(g.to("meta")), "graph"),
    ],
)
def test_an_argument_out_of_range_is_named(call, name):
    structure = line_of_residues([1, 2, 3, 4])
    with pytest.raises(ValueError, match=f"^{name} must"):
        call(structure, structure.window_graph(1))
