"""Attention on a structure: every line stands between the residues it belongs to, in true scale."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import graphattn as ga
from graphattn.data.structures.principal_axes import rotated_to_principal_axes


def helix(residues: int, start: float = 0.0) -> torch.Tensor:
    """An alpha helix along z: 100 degrees and 1.5 Angstrom per residue, radius 2.3."""
    k = torch.arange(residues, dtype=torch.float64)
    angle = k * math.radians(100)
    return torch.stack([start + 2.3 * angle.cos(), 2.3 * angle.sin(), 1.5 * k], dim=1)


def draw(x, graph, weights, **options):
    options.setdefault("ax", Figure(layout="compressed").add_subplot())
    return ga.plot.structure_attention(x, graph, weights, **options)


def segments(ax) -> np.ndarray:
    """Ends of the lines of attention, [K, 2, 2]."""
    return np.asarray(ax.collections[-1].get_segments())


def pairs_of(ax, x) -> list[tuple[int, int]]:
    """Find the pairs of residues that lines of attention join."""
    flat = rotated_to_principal_axes(x.double())[:, :2].numpy()
    near = [[int(np.abs(flat - end).sum(1).argmin()) for end in line] for line in segments(ax)]
    return [(min(pair), max(pair)) for pair in near]


def test_the_view_is_a_rotation_of_the_structure():
    """Distances stay, and so does the hand of a helix; the longest direction lies across."""
    x = helix(30) @ torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    turned = rotated_to_principal_axes(x)
    distances = [(y[:, None] - y[None]).norm(dim=-1) for y in (turned, x)]
    torch.testing.assert_close(*distances, rtol=1e-9, atol=1e-9)
    extent = turned.amax(0) - turned.amin(0)
    assert extent[0] > extent[1] >= 0.9 * extent[2]

    def hand(y):
        a, b, c = y.diff(dim=0)[:3]
        return torch.sign(torch.linalg.cross(a, b) @ c)

    assert hand(turned) == hand(x)


def test_the_strongest_pairs_are_drawn_from_residue_to_residue():
    x, graph = helix(40), ga.complete_graph(40)
    weights = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0))
    ax = draw(x, graph, weights, strongest=15, min_separation=5)
    matrix = weights.view(40, 40)
    both = torch.maximum(matrix, matrix.T)
    expected = sorted(
        ((float(both[i, j]), i, j) for i in range(40) for j in range(i + 5, 40)), reverse=True
    )[:15]
    assert sorted(pairs_of(ax, x)) == sorted((i, j) for _, i, j in expected)
    assert sorted(ax.collections[-1].get_array()) == pytest.approx(sorted(w for w, *_ in expected))
    widths = ax.collections[-1].get_linewidth()
    assert list(np.argsort(widths)) == list(np.argsort(ax.collections[-1].get_array()))


def test_targets_show_what_they_look_at_and_nothing_else():
    x, graph = helix(30), ga.complete_graph(30)
    weights = torch.zeros(30, 30)
    weights[7, 20], weights[20, 7], weights[3, 15] = 0.5, 0.9, 0.8  # row: the target
    ax = draw(x, graph, weights.flatten(), targets=[7], labels=[f"A{k}" for k in range(30)])
    assert pairs_of(ax, x) == [(7, 20)]
    assert ax.collections[-1].get_array().tolist() == [0.5]
    assert "A7" in [text.get_text() for text in ax.texts]


def test_chains_are_apart_and_gaps_are_not_bridged():
    """No piece of the trace is longer than a bond; neighbours of other chains count as far."""
    x = torch.cat([helix(20), helix(20, start=9.0)])
    x[10:20, 2] += 12  # some residues are missing in the first chain
    chain = torch.tensor([0] * 20 + [1] * 20)
    graph = ga.complete_graph(40)
    weights = torch.zeros(40, 40)
    weights[19, 20] = 1.0  # the last residue of one chain and the first of the next
    weights[5, 6] = 2.0
    ax = draw(x, graph, weights.flatten(), chain_index=chain, chain_names=["A", "$B"])
    assert pairs_of(ax, x) == [(19, 20)]
    trace = ax.collections[0]
    for line in trace.get_segments():
        assert np.linalg.norm(line[-1] - line[0]) < 4.5
    colours = {tuple(np.round(colour, 2)) for colour in trace.get_colors()}
    assert len(colours) > 4  # two chains, shaded by depth
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["A", "$B"]


def test_missing_atoms_are_left_out_and_leave_a_gap():
    """Residues without atoms are left out with their edges, and leave a gap in the trace.

    All edges of the others are drawn that join residues three or more places apart.
    """
    x, weights = helix(30), torch.rand(900, generator=torch.Generator().manual_seed(2))
    x[[4, 17]] = math.nan
    ax = draw(x, ga.complete_graph(30), weights, strongest=400)
    there = [k for k in range(30) if k not in (4, 17)]
    far = sum(b - a >= 3 for a in there for b in there)
    assert len(segments(ax)) == far
    assert np.isfinite(segments(ax)).all()
    for line in ax.collections[0].get_segments():
        assert np.isfinite(line).all()
        assert np.linalg.norm(line[-1] - line[0]) < 4.5


def test_lengths_are_angstrom_in_both_directions():
    ax = draw(helix(30), ga.complete_graph(30), torch.rand(900))
    assert ax.get_aspect() == 1
    (bar,) = (line for line in ax.lines if len(line.get_xdata()) == 2)
    assert np.ptp(bar.get_xdata()) == pytest.approx(10)
    assert "10 Å" in [text.get_text() for text in ax.texts]


@pytest.mark.long
def test_a_long_chain_has_few_lines_and_small_ones_are_not_empty():
    for residues, lines in ((900, 150), (60, 30), (16, 12)):
        graph = ga.knn_graph(helix(residues), k=12)
        ax = draw(helix(residues), graph, torch.rand(graph.num_edges) + 0.1)
        assert len(segments(ax)) == lines
    ax.figure.savefig(io.BytesIO(), format="png")


def test_without_any_weight_there_is_the_trace_alone():
    ax = draw(helix(8), ga.complete_graph(8), torch.zeros(64))
    assert len(ax.collections) == 1
    assert len(ax.figure.axes) == 1  # no colour bar
    ax.figure.savefig(io.BytesIO(), format="svg")


def test_shades_of_two_figures_can_be_made_the_same():
    graph = ga.complete_graph(20)
    weights = torch.rand(400, generator=torch.Generator().manual_seed(1))
    assert draw(helix(20), graph, weights, vmax=3.0).collections[-1].get_clim() == (0, 3)
    low, high = draw(helix(20), graph, weights).collections[-1].get_clim()
    assert 0 < low < high <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ca_positions": torch.zeros(5, 2)}, r"ca_positions must be .* \[N, 3\], got \[5, 2\]"),
        ({"ca_positions": torch.full((5, 3), math.nan)}, "ca_positions must be finite for at le"),
        ({"ca_positions": torch.full((5, 3), math.inf)}, "ca_positions must be finite"),
        ({"graph": ga.complete_graph(4)}, "graph must be a TokenGraph of 5 tokens"),
        ({"weights": torch.zeros(7)}, r"weights must be a tensor of shape \[25\]"),
        ({"weights": -torch.ones(25)}, "weights must be finite numbers >= 0"),
        ({"chain_index": torch.arange(4)}, "chain_index must be a tensor of integers"),
        ({"targets": [5]}, r"targets must be residues from 0 to 4, got 5"),
        ({"targets": 3}, r"targets must be a list of residues, got 3"),
        ({"chain_index": torch.zeros(5)}, r"of shape \[5\], got torch.float32 of shape \[5\]$"),
        ({"chain_index": torch.arange(5) - 1}, r"got torch.int64 of shape \[5\] with -1$"),
        ({"labels": ["A"]}, "labels must be 5 texts, one per residue, got 1"),
        ({"chain_names": ["A", "B"]}, "chain_names must be 1 texts, one per chain, got 2"),
        ({"min_separation": 0}, "min_separation must be"),
        ({"strongest": -1}, "strongest must be"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    given = {"ca_positions": helix(5), "graph": ga.complete_graph(5), "weights": torch.ones(25)}
    with pytest.raises(ValueError, match=message):
        ga.plot.structure_attention(**{**given, **change})
