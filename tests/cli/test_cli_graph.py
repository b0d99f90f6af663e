"""`graphattn graph` says what networkx and theory say, draws it, and refuses nonsense."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from cli_helpers import call, done, refused

import graphattn as ga
from graphattn.cli.graph.facts import diameter_bounds, fiedler_value
from graphattn.cli.graph.kinds import KINDS, build


def facts(folder: Path, *arguments: str | int) -> dict:
    done("graph", *arguments, "--json", folder / "facts.json")
    return json.loads((folder / "facts.json").read_text(encoding="utf-8"))


SMALL = {
    "window-path": ["--tokens", 23, "--window", 3],
    "window-cycle": ["--tokens", 17, "--window", 2],
    "causal-window": ["--tokens", 19, "--window", 4],
    "causal": ["--tokens", 11],
    "complete": ["--tokens", 9, "--no-self-loops"],
    "block-window": ["--tokens", 14, "--block-size", 5, "--shift", 2],
    "dilated-window": ["--tokens", 20, "--window", 2, "--dilation", 3],
    "longformer": ["--tokens", 16, "--window", 1, "--global-tokens", 2],
    "causal-longformer": ["--tokens", 16, "--window", 3, "--global-tokens", 2],
    "bigbird": ["--tokens", 18, "--window", 1, "--random", 2, "--seed", 5],
    "grid-window": ["--height", 3, "--width", 5, "--radius", 1, "--metric", "manhattan"],
    "grid-block": ["--height", 4, "--width", 7, "--block-size", 3, "--shift", 1],
    "volume-window": ["--depth", 2, "--height", 3, "--width", 4, "--dilation", 2],
}


@pytest.mark.parametrize("kind", KINDS)
def test_facts_are_those_that_networkx_finds(kind, tmp_path):
    record = facts(tmp_path, kind, *SMALL[kind])
    graph = build(kind, {n: range(*v) if n == "global_tokens" else v for n, v in as_built(record)})
    looks = graph.to_networkx()
    N = looks.number_of_nodes()
    assert (record["tokens"], record["edges"]) == (N, looks.number_of_edges())
    degrees = [degree for _, degree in looks.in_degree()]
    assert (record["least_degree"], record["most_degree"]) == (min(degrees), max(degrees))
    assert record["mean_degree"] == pytest.approx(np.mean(degrees))
    assert record["density"] == pytest.approx(looks.number_of_edges() / N**2)
    assert record["is_causal"] == (kind.startswith("causal"))

    both = looks.to_undirected()
    parts = list(networkx.connected_components(both))
    assert record["components"] == len(parts)
    largest = both.subgraph(max(parts, key=len))
    assert record["diameter"] == [networkx.diameter(largest)] * 2

    W = networkx.to_numpy_array(looks)
    W = (W + W.T) / 2
    values = np.linalg.eigvalsh(np.diag(W.sum(1)) - W)
    assert record["fiedler_value"] == pytest.approx(values[1], abs=1e-12)
    assert record["max_eigenvalue"] == pytest.approx(values[-1])
    assert record["max_step_size"] == record["step_size"] == pytest.approx(1 / (2 * values[-1]))
    eta = record["step_size"]
    rate, steps = record["smoothing_rate"], record["steps_until_consensus"]
    assert rate == pytest.approx(ga.spectral.smoothing_rate(graph, eta), abs=1e-12)
    expected = ga.spectral.steps_until_consensus(graph, eta)
    assert steps == (expected if math.isfinite(expected) else None)
    assert record["mask_bytes"] == N**2
    assert record["edge_index_bytes"] == graph.edge_index.nbytes


def as_built(record: dict) -> list[tuple[str, object]]:
    """The sizes of a record; global tokens are listed in it."""
    return [
        (name, (0, len(value)) if name == "global_tokens" else value)
        for name, value in record["sizes"].items()
    ]


def test_steps_to_consensus_are_counted_as_the_filter_does_them(tmp_path):
    record = facts(tmp_path, "window-path", "--tokens", 30, "--window", 2, "--step-size", 0.05)
    L = ga.spectral.laplacian(ga.window_path_graph(30, 2)).toarray()
    H = np.eye(30) - 2 * 0.05 * L
    factors = np.sort(np.abs(np.linalg.eigvalsh(H)))
    assert record["smoothing_rate"] == pytest.approx(factors[-2])
    steps = record["steps_until_consensus"]
    for n, below in ((steps, True), (steps - 1, False)):
        rest = np.linalg.matrix_power(H, n) - np.full((30, 30), 1 / 30)
        assert (np.linalg.norm(rest, 2) <= 1e-3) == below


def test_a_step_that_is_too_large_never_ends_in_consensus(tmp_path):
    result = call("graph", "complete", "--tokens", 8, "--step-size", 0.2)
    assert "never" in result.output
    assert "the step is too large" in result.output
    assert facts(tmp_path, "complete", "--step-size", 1)["steps_until_consensus"] is None
    assert "because the graph is not connected" in call("graph", "block-window").output


THEORY = {
    "window-path": [{"num_tokens": N, "window": w} for N, w in ((7, 3), (40, 1), (50, 24), (6, 3))],
    "window-cycle": [{"num_tokens": N, "window": w} for N, w in ((7, 3), (40, 1), (8, 4))],
    "causal-window": [{"num_tokens": N, "window": w} for N, w in ((9, 1), (9, 4), (40, 5), (8, 8))],
    "causal": [{"num_tokens": N} for N in (1, 2, 13)],
    "complete": [{"num_tokens": N} for N in (1, 2, 13)],
    "block-window": [
        {"num_tokens": N, "block_size": b, "shift": s}
        for N, b, s in ((9, 9, 0), (9, 10, 4), (9, 3, 0), (9, 8, 0), (4, 8, 4), (4, 8, 3))
    ],
    "dilated-window": [
        {"num_tokens": N, "window": 2, "dilation": d}
        for N, d in ((12, 1), (12, 2), (2, 5), (12, 11))
    ],
    "longformer": [
        {"num_tokens": N, "window": 1, "global_tokens": range(g), "dilation": 1}
        for N, g in ((9, 0), (9, 1), (9, 3), (4, 4))
    ],
    "causal-longformer": [
        {"num_tokens": N, "window": 2, "global_tokens": range(g)}
        for N, g in ((9, 0), (9, 1), (9, 3), (4, 4))
    ],
    "bigbird": [
        {"num_tokens": N, "window": 1, "num_random": 2, "global_tokens": range(g), "seed": 3}
        for N, g in ((12, 0), (12, 2), (3, 1))
    ],
    "grid-window": [
        {"height": h, "width": w, "radius": r, "metric": metric, "class_token": token}
        for h, w, r in ((3, 4, 1), (1, 6, 1), (1, 1, 1), (3, 3, 2), (2, 5, 3))
        for metric in ("chebyshev", "manhattan")
        for token in (False, True)
    ]
    + [
        {"height": 5, "width": 6, "radius": 1, "metric": "chebyshev", "class_token": token, **more}
        for more in ({"dilation": 2}, {"causal": True}, {"border": "shift"})
        for token in (False, True)
    ],
    "grid-block": [
        {"height": h, "width": w, "block_size": b, "shift": s}
        for h, w, b, s in (
            *((4, 4, 2, 0), (4, 6, 4, 2), (3, 4, 4, 0), (3, 4, 9, 4)),
            *((3, 4, 9, 3), (1, 5, 3, 1), (1, 1, 1, 0)),
        )
    ],
    "volume-window": [
        {"depth": d, "height": 3, "width": 2, "radius": r, "metric": metric, "class_token": token}
        for d, r in ((4, 1), (1, 1), (3, 2))
        for metric in ("chebyshev", "manhattan")
        for token in (False, True)
    ],
}


@pytest.mark.parametrize(("kind", "sizes"), [(k, s) for k, all_ in THEORY.items() for s in all_])
def test_what_theory_says_of_a_kind_holds_in_every_corner(kind, sizes):
    theory = KINDS[kind].theory(sizes)
    L = ga.spectral.laplacian(build(kind, sizes)).toarray()
    value = np.linalg.eigvalsh(L)[1] if len(L) > 1 else 0.0
    if theory is not None:
        assert theory.lower - 1e-9 <= value <= theory.upper + 1e-9
        assert theory.source


def test_a_theory_that_fails_is_marked(monkeypatch):
    monkeypatch.setattr(ga.spectral, "cycle_fiedler_value", lambda N, w: 0.5)
    assert "VIOLATED" in call("graph", "window-cycle").output
    monkeypatch.undo()
    assert "VIOLATED" not in call("graph", "window-cycle").output


@pytest.mark.long
def test_the_title_is_what_to_type_for_the_same_graph(tmp_path):
    for kind, arguments in SMALL.items():
        first = facts(tmp_path, kind, *arguments)
        title = call("graph", kind, *arguments).output.splitlines()[0]
        name, typed = re.fullmatch(r"\s*([\w-]+): (.*?)\s*", title).groups()
        assert name == kind
        assert facts(tmp_path, kind, *typed.split()) == first


def test_large_diameters_are_bounded_from_both_sides():
    for graph, exact in (
        (ga.window_path_graph(3001, 7), math.ceil(3000 / 7)),
        (ga.window_cycle_graph(2000, 3), math.ceil(1000 / 3)),
        (ga.grid_window_graph(40, 50, 1, metric="manhattan"), 88),
        (ga.longformer_graph(2000, 2, [0]), 2),
    ):
        edges = graph.to_scipy()
        lower, upper = diameter_bounds(
            scipy.sparse.csr_array(edges + edges.T), np.zeros(graph.num_tokens, dtype=int)
        )
        assert lower <= exact <= upper
        assert upper <= 2 * lower
    lower, upper = diameter_bounds(ga.window_path_graph(3001, 7).to_scipy(), np.zeros(3001, int))
    assert (lower, upper) in {(429, 429), (429, 430)}  # from the middle, twice the radius


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
    result = done("graph", "bigbird", "--plot", tmp_path / "g.png", "--html", tmp_path / "g.html")
    assert result.output.split()[-2:] == [str(tmp_path / "g.png"), str(tmp_path / "g.html")]
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    call("graph", "complete", "--tokens", 20, "--plot", tmp_path / "g.svg")
    assert "<svg" in (tmp_path / "g.svg").read_text()
    html = (tmp_path / "g.html").read_text(encoding="utf-8")
    pictures = re.findall(r'src="data:image/png;base64,([^"]*)"', html)
    assert len(pictures) == 3
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for data in pictures)
    for number in re.findall(r"\d+\.\d+", result.output.split("fiedler")[0]):
        assert number in html


# With single edges, with a colour bar, and too long for a spectrum.
@pytest.mark.parametrize(("tokens", "figures"), [(20, 3), (1000, 3), (1500, 2)])
def test_labels_of_figures_can_be_read_on_a_phone(tmp_path, tokens, figures, on_a_phone):
    done("graph", "window-path", "--tokens", tokens, "--html", tmp_path / "g.html")
    assert len(on_a_phone) == figures
    assert on_a_phone.smallest_label() >= 9


@pytest.mark.parametrize(
    "graph",
    [
        ga.longformer_graph(40, 2, [0, 7]),
        ga.bigbird_graph(40, 1, 2, [3], 1),
        ga.longformer_graph(5, 1, range(5)),
        ga.longformer_graph(6, 1, range(5)),
        ga.from_edge_index(torch.tensor([[0, 0, 1, 2], [1, 2, 0, 0]]), 3),  # a star
        ga.from_edge_index(torch.tensor([[0, 0], [1, 2]]), 3),  # seen by all, sees nobody
        ga.block_window_graph(6, 3),
    ],
)
def test_tokens_joined_to_all_add_one_each_to_the_fiedler_value(graph):
    L = networkx.laplacian_matrix(
        networkx.Graph([(j, i, {"weight": 1.0}) for j, i in graph.edge_index.T.tolist() if j < i])
    )
    A = graph.to_scipy().toarray()
    np.fill_diagonal(A, 0)
    W = (A + A.T) / 2
    expected = np.linalg.eigvalsh(np.diag(W.sum(1)) - W)[1]
    assert fiedler_value(graph) == pytest.approx(expected, abs=1e-12)
    if np.array_equal(A, A.T):
        assert np.linalg.eigvalsh(L.toarray())[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.long
def test_beside_a_global_token_a_hundred_thousand_tokens_take_seconds():
    """The rest is a path, whose value theory bounds (Remark 4.2); the hub adds 1."""
    graph = ga.longformer_graph(100_000, 4, [0])
    lower, upper = ga.spectral.path_fiedler_bounds(99_999, 4)
    assert lower - 1e-15 <= fiedler_value(graph) - 1 <= upper + 1e-15  # beside 1, rounding counts


def test_a_graph_with_too_many_edges_is_counted_and_not_listed(monkeypatch, tmp_path):
    monkeypatch.setattr(ga.TokenGraph, "edge_index", property(lambda self: pytest.fail("listed")))
    record = facts(tmp_path, "complete", "--tokens", 100_000)
    assert record["edges"] == 10**10
    assert record["mask_bytes"] == 10**10
    assert "fiedler_value" not in record
    assert "20,000,000 edges" in record["left_out"]
    reason = refused("graph", "complete", "--tokens", 100_000, "--plot", tmp_path / "g.png")
    assert "10,000,000,000" in reason


@pytest.mark.long
def test_without_a_kind_all_of_them_are_listed_with_options_that_are_taken():
    listing = done("graph").output
    for kind in KINDS:
        assert [line.split()[0] for line in listing.splitlines() if line.strip()].count(kind) == 1
        assert call("graph", kind).exit_code == 0
    assert "--block-size 16" in listing
    assert "--no-class-token" in listing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["window"], r"KIND must be one of window-path, .*got 'window'"),
        (["longformr"], r"got 'longformr': did you mean 'longformer'\?"),
        (["causal", "--window", 3], r"not an option of causal, which has the options --tokens$"),
        (["window-path", "--tokens", -1], r"--tokens must be >= 0, got -1"),
        (["window-path", "--window", 0], r"--window must be >= 1, got 0"),
        (["block-window", "--shift", 20], r"--shift must be < block_size = 16, got 20"),
        (["longformer", "--global-tokens", 65], r"--global-tokens must be from 0 to --tokens = 64"),
        (["grid-window", "--metric", "round"], r"--metric must be one of 'chebyshev', 'manhattan'"),
        (["complete", "--step-size", 0], r"--step-size must be a finite number > 0, got 0"),
        (["complete", "--plot", "nowhere/a.png"], r"--plot must be .*there is no folder nowhere"),
        (["complete", "--plot", "a.jpg"], r"--plot: the ending must be one of '.png'.*'.jpg'"),
        (["complete", "--json", "nowhere/a.json"], r"--json must .*there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    assert re.search(words, refused("graph", *arguments))


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "num_tokens" in KINDS[kind].options])
def test_the_smallest_graphs_have_facts_too(kind, tokens):
    hubs = ["--global-tokens", 0] if "global_tokens" in KINDS[kind].options else []
    result = done("graph", kind, "--tokens", tokens, *hubs)
    assert re.search(rf"tokens\s+{tokens}\b", result.output)


@pytest.mark.parametrize("share", [0.3, 1.5, 1.99, 2.5])
def test_smoothing_beyond_the_largest_step_is_the_library_s(share, tmp_path):
    """Between the largest step and twice it the top mode is the last to go; then it stays."""
    graph = ga.window_path_graph(64, 2)
    eta = share * ga.spectral.max_step_size(graph)
    record = facts(tmp_path, "window-path", "--step-size", repr(eta))
    assert record["smoothing_rate"] == pytest.approx(ga.spectral.smoothing_rate(graph, eta))
    expected = ga.spectral.steps_until_consensus(graph, eta)
    assert record["steps_until_consensus"] == (expected if math.isfinite(expected) else None)
