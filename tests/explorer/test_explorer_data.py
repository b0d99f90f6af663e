"""The page holds the graph, its spectrum, attention and clusters as Python computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pages_explorer import array, data_of, edges_in

import graphattn as ga
from graphattn.explorer import explore as module
from graphattn.explorer import graph_data
from graphattn.explorer.packing import rows_of

RANDOM = torch.Generator().manual_seed(0)


def pairs(graph: ga.TokenGraph) -> list[tuple[int, int]]:
    return [(i, j) for j, i in graph.edge_index.T.tolist()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "page.html"


GRAPHS = {
    "window": ga.window_path_graph(30, 3),
    "causal": ga.causal_graph(20),
    "complete": ga.complete_graph(9),
    "longformer": ga.longformer_graph(40, 2, [0, 17]),
    "bigbird": ga.bigbird_graph(30, 1, 2, [0], 0),
    "nearest": ga.knn_graph(torch.randn(25, 3, generator=RANDOM), 4),
    "one edge": ga.from_edge_index(torch.tensor([[2], [0]]), 3),
    "no edge": ga.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 3),
    "one token": ga.complete_graph(1),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", GRAPHS)
def test_edges_eigenvalues_and_reach_are_those_of_the_graph(name, path):
    graph = GRAPHS[name]
    data = data_of(ga.explore(graph, path))
    (found,) = data["graphs"]
    assert data["num_tokens"] == graph.num_tokens
    assert edges_in(found["edges"]) == pairs(graph)
    assert found["num_edges"] == graph.num_edges
    A = np.zeros((graph.num_tokens,) * 2)
    for i, j in pairs(graph):
        A[i, j] += 0.5 * (i != j)
        A[j, i] += 0.5 * (i != j)
    eigenvalues = np.linalg.eigvalsh(np.diag(A.sum(1)) - A)
    assert array(found["spectrum"], "<f4") == pytest.approx(eigenvalues, abs=1e-5)
    second = eigenvalues[1] if len(eigenvalues) > 1 else 0
    assert found["fiedler"] == pytest.approx(second, rel=1e-6, abs=1e-9)
    known = sees = np.eye(graph.num_tokens, dtype=int)
    sees = sees.copy()
    for i, j in pairs(graph):
        sees[i, j] = 1
    layers = 0
    while ((grown := np.minimum(sees @ known, 1)) != known).any():
        known, layers = grown, layers + 1
    assert found["layers"] == layers
    assert ("everything has reached everything" in found["reach"]) == bool(known.all())


def test_layers_are_counted_alike_where_edges_are_gathered_in_small_pieces(monkeypatch):
    graph = ga.from_mask(torch.rand(70, 70, generator=RANDOM) < 0.03)
    whole = graph_data.layers_until_settled(rows_of(graph))
    monkeypatch.setattr(graph_data, "AT_ONCE", 7)
    assert graph_data.layers_until_settled(rows_of(graph)) == whole
    assert whole[0] > 2


def test_the_words_say_what_the_fiedler_value_means(path):
    words = data_of(ga.explore(ga.block_window_graph(12, 4), path))["graphs"][0]["words"]
    assert "The Fiedler value is 0" in words
    assert "3 separate parts" in words
    graph = ga.window_path_graph(50, 2)
    words = data_of(ga.explore(graph, path))["graphs"][0]["words"]
    fiedler, largest = ga.spectral.fiedler_value(graph), ga.spectral.max_eigenvalue(graph)
    assert f"{fiedler:.4g}" in words
    steps = next(n for n in range(10**6) if (1 - fiedler / largest) ** n <= 0.5)
    assert f"after {steps} steps" in words
    words = data_of(ga.explore(ga.complete_graph(5), path))["graphs"][0]["words"]
    assert "removes all disagreement" in words


def test_of_a_large_graph_two_eigenvalues_are_computed_and_the_page_says_so(path, monkeypatch):
    monkeypatch.setattr(graph_data, "WHOLE", 20)
    graph = ga.window_path_graph(40, 2)
    (found,) = data_of(ga.explore(graph, path))["graphs"]
    assert found["spectrum"] is None
    assert found["layers"] is None
    assert found["fiedler"] == ga.spectral.fiedler_value(graph)
    assert "up to 20 tokens" in found["words"]
    assert "Beyond 20 tokens" in found["reach"]


def test_every_value_of_a_slider_has_its_graph(path):
    graphs = {w: ga.window_path_graph(20, w) for w in (4, 1, 2)}
    data = data_of(ga.explore(graphs, path, option="window", start=4))
    assert data["values"] == [1, 2, 4]
    assert data["shown"] == 2
    assert data["option"] == "window"
    for w, found in zip(data["values"], data["graphs"], strict=True):
        assert edges_in(found["edges"]) == pairs(graphs[w])


class Sdpa(torch.nn.Module):
    def forward(self, x, is_causal=True):
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(x, x, x, is_causal=is_causal)


def test_weights_are_those_of_the_recording(path):
    model = ga.models.CausalLM(20, 16, depth=2, heads=2, window=5, dropout=0.5)
    model.blocks[0].eval()
    training = [part.training for part in model.modules()]
    tokens = torch.randint(20, (2, 12), generator=RANDOM)
    data = data_of(ga.explore(model, path, inputs=tokens))
    assert [part.training for part in model.modules()] == training
    model.eval()
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        model(tokens)
    assert [call["name"] for call in data["calls"]] == list(recording.names)
    for found, call in zip(data["calls"], recording, strict=True):
        weights = array(found["weights"], "<u2").reshape(2, -1) / 65_535
        expected = call.matrix[0].numpy()
        assert np.count_nonzero(expected[0]) == weights.shape[1]
        for e, (i, j) in enumerate(edges_in(found["edges"])):
            assert weights[:, e] == pytest.approx(expected[:, i, j], abs=1e-5)
    assert data_of(ga.explore(recording, path)) == data
    assert "first sequence" in path.read_text()


def test_attention_of_other_libraries_is_the_graph_of_its_weights(path):
    x = torch.randn(1, 3, 10, 4, generator=RANDOM)
    data = data_of(ga.explore(Sdpa(), path, inputs=(x, True)))
    assert edges_in(data["graphs"][0]["edges"]) == pairs(ga.causal_graph(10))
    assert data == data_of(ga.explore(Sdpa(), path, inputs={"x": x}))


def test_means_over_heads_are_one_head(path):
    x = torch.randn(1, 3, 10, 4, generator=RANDOM)
    with ga.diagnostics.record(model := Sdpa(), keep="mean") as recording:
        model(x)
    (call,) = data_of(ga.explore(recording, path))["calls"]
    assert call["heads"] == 1
    mean = recording[0].mean_over_heads()[0]
    weights = array(call["weights"], "<u2") / 65_535
    assert weights == pytest.approx(mean[mean > 0].numpy(), abs=1e-5)


@pytest.mark.long
def test_a_page_of_2000_tokens_and_4_layers_is_under_3_megabytes(path, monkeypatch):
    """All weights would be 14 MB as text: the page has the largest, and says what they hold."""
    monkeypatch.setattr(graph_data, "WHOLE", 100)  # what takes seconds is not of this claim
    model = ga.models.CausalLM(20, 16, depth=4, heads=4, window=128).eval()
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        model(torch.randint(20, (1, 2000), generator=RANDOM))
    graph = ga.causal_window_graph(2000, 128)
    found = data_of(ga.explore(graph, path, recording=recording))["calls"][2]
    assert path.stat().st_size < 3_000_000
    assert "of all weight" in path.read_text()
    assert array(found["degrees"], "<u2").tolist() == graph.in_degree().tolist()
    most, kept = recording[2].matrix[0].amax(dim=0), {}
    for i, j in edges_in(found["edges"]):
        kept.setdefault(i, []).append(j)
    for i in range(0, 2000, 97):
        left = most[i].clone()
        left[kept[i]] = 0
        assert most[i, kept[i]].min() >= left.max()


def test_a_structure_lies_across_the_page_and_is_not_mirrored(path):
    turn = 1.7 * torch.arange(20.0)
    places = torch.stack([5 * turn.cos(), 2 * turn.sin(), 1.5 * torch.arange(20.0)], dim=1)
    data = data_of(ga.explore(ga.data.Structure("A" * 20, places), path, start=2))
    shown = torch.tensor(array(data["positions"], "<f4").reshape(20, 3).copy())
    across, up, deep = (shown.amax(dim=0) - shown.amin(dim=0)).tolist()
    assert across > 28 > 11 > up > 9 > 5 > deep
    volume, before = (torch.linalg.det(x[1:4] - x[:1]) for x in (shown, places))
    assert float(volume) == pytest.approx(float(before), rel=1e-4)


def test_a_structure_without_positions_is_drawn_as_a_graph(path):
    nowhere = ga.data.Structure("GWAT", torch.full((4, 3), torch.nan))
    data = data_of(ga.explore(nowhere, path, start=1))
    assert data["labels"] == ["G1", "W2", "A3", "T4"]
    assert data["bonds"] == [0, 0, 0]


def test_a_structure_has_its_places_its_names_and_its_neighbours(path):
    places = 3.8 * torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
    places[4:] += 40
    structure = ga.data.Structure(
        "GWKACD", places, torch.tensor([0, 0, 0, 0, 1, 1]), chain_ids=("A", "B")
    )
    data = data_of(ga.explore(structure, path, start=2))
    assert data["labels"][:2] == ["A:G1", "A:W2"]
    shown = torch.tensor(array(data["positions"], "<f4").reshape(6, 3).copy())
    assert torch.allclose(torch.cdist(shown, shown), torch.cdist(places, places), atol=1e-5)
    assert data["bonds"] == [1, 1, 1, 0, 1]
    assert data["values"] == [2, 4]
    assert edges_in(data["graphs"][0]["edges"]) == pairs(structure.neighbor_graph(2))
    model = ga.models.ProteinModel(16, depth=2, heads=2, mixer="dot").eval()
    data = data_of(ga.explore(model, path, inputs=structure))
    assert len(data["calls"]) == 2
    assert data["dimensions"] == 3
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        model.logits(structure)
    both = data_of(ga.explore(structure, path, recording=recording))
    assert both["calls"] == data["calls"]
    assert len(both["graphs"]) == len(both["values"])


@pytest.mark.parametrize("features", [1, 2, 5])
def test_clusters_of_a_flow_are_those_of_python(features, path):
    x = torch.randn(40, features, generator=RANDOM)
    flow = ga.dynamics.krause_flow(x, radius=0.8, steps=12)
    found = data_of(ga.explore(flow, path))["flow"]
    assert found["steps"] == list(range(13))
    assert found["counts"] == [flow.num_clusters(step) for step in range(13)]
    assert len(set(found["clusters"])) == found["counts"][-1]
    points = array(found["points"], "<u2").reshape(13, 40, 2).astype(float)
    if features <= 2:  # similar figures: all distances are the same multiple
        shown = np.linalg.norm(points[:, :, None] - points[:, None], axis=-1)
        states = flow.states.double()
        true = torch.cdist(states, states).numpy()
        assert shown / shown.max() == pytest.approx(true / true.max(), abs=1e-4)
    else:
        assert "principal components" in found["what"]


def test_a_trajectory_shows_its_updates_and_its_graph(path):
    x = ga.dynamics.standardize(torch.randn(30, 3, generator=RANDOM))
    graph = ga.window_path_graph(30, 8)
    trajectory = ga.dynamics.simulate(x, graph, steps=5)
    data = data_of(ga.explore(trajectory, path))
    assert data["flow"]["counts"] == ga.dynamics.cluster_counts(trajectory).tolist()
    assert data["flow"]["clusters"] == ga.dynamics.cluster(trajectory.updates[-1]).tolist()
    assert edges_in(data["graphs"][0]["edges"]) == pairs(graph)


def test_the_page_needs_no_network_and_shows_names_as_text(path):
    hostile = "</script><script>document.title='owned'</script>"
    ga.explore(ga.window_path_graph(2, 1), path, labels=[hostile, "&"], title=hostile)
    html = path.read_text()
    assert "http" not in html
    assert not any(word in html for word in ("src=", "url(", "import(", "fetch("))
    assert "<script>document.title" not in html
    assert data_of(path)["labels"] == [hostile, "&"]


GRAPH = ga.window_path_graph(5, 1)
MODEL = ga.models.CausalLM(20, 16, depth=1, heads=2)
CONSENSUS = ga.models.SequenceEncoder(20, 16, depth=1, heads=2, mixer="consensus")
TOKENS = torch.zeros(1, 6, dtype=torch.int64)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("subject", "options", "message"),
    [
        ("window", {}, r"^subject must be a TokenGraph, .* got str"),
        (GRAPH, {"inputs": TOKENS}, r"^inputs must be None unless subject is a model"),
        (MODEL, {}, r"^inputs must be given for a model \(CausalLM\), got None"),
        (CONSENSUS, {"inputs": TOKENS}, r"nothing was recorded.*consensus"),
        (ga.causal_graph(5001), {}, r"^subject must have 1 to 5,000 tokens, .* got 5,001"),
        (ga.bipartite_complete_graph(4, 3), {}, r"the same tokens, got 4 targets and 3 sources"),
        ({}, {}, r"at least one graph, got an empty dict"),
        ({1: GRAPH, 2: ga.causal_graph(6)}, {}, r"the same tokens, got 5 and 6"),
        ({"a": GRAPH}, {}, r"from integers to TokenGraphs, got 'a': TokenGraph"),
        ({1: GRAPH}, {"start": 3}, r"^start must be one of the keys 1, got 3"),
        (GRAPH, {"labels": ["a"]}, r"^labels must have 5 names, one per token, got 1"),
        (GRAPH, {"positions": torch.zeros(5, 4)}, r"^positions must be a tensor \[5, 2\] or"),
        (GRAPH, {"positions": [1]}, r"^positions must be a tensor .* got list"),
        (GRAPH, {"recording": MODEL}, r"^recording must be a Recording, got CausalLM"),
        (ga.diagnostics.Recording(), {}, r"^recording must have a call .* got .* none"),
        (ga.dynamics.simulate(torch.eye(5), GRAPH, steps=0), {}, r"^flow must have at least one"),
    ],
)
def test_errors_name_the_argument_its_value_and_what_is_allowed(subject, options, message, path):
    with pytest.raises(ValueError, match=message):
        ga.explore(subject, path, **options)
    assert not path.exists()


def test_a_path_that_cannot_be_written_is_named_before_the_work(tmp_path):
    with pytest.raises(ValueError, match=r"^path must be .* there is no folder .*nowhere"):
        ga.explore(MODEL, tmp_path / "nowhere" / "page.html")
    with pytest.raises(ValueError, match=r"^path must be .* it is a folder"):
        ga.explore(GRAPH, tmp_path)
    with pytest.raises(ValueError, match=r"^path must be the name of a file, got int"):
        ga.explore(GRAPH, 3)
    with pytest.raises(ValueError, match=r"^path must be a file that can be written, got"):
        ga.explore(GRAPH, tmp_path / ("x" * 300))


def test_a_page_that_would_be_too_large_is_refused(path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 30_000)
    with pytest.raises(ValueError, match=r"fit into a page of 30,000 bytes, got"):
        ga.explore(GRAPH, path)


def test_weights_that_cannot_be_cut_to_fit_are_refused(path, monkeypatch):
    from graphattn.explorer import attention_data

    monkeypatch.setattr(attention_data, "BYTES", 20)
    with pytest.raises(ValueError, match=r"^recording must have fewer weights.*keep='mean'"):
        ga.explore(MODEL, path, inputs=TOKENS)
