"""HTML that a notebook shows of a graph is well-formed, true, and cheap for a million tokens."""

import re
import time
import xml.etree.ElementTree as ET

import pytest
import torch

import graphattn as ga


def table_of(graph):
    tree = ET.fromstring(graph._repr_html_())
    return {row[0].text: row[1].text for row in tree.iter("tr")}, tree


@pytest.mark.parametrize(
    "graph",
    [
        ga.window_path_graph(9, 2),
        ga.causal_graph(5),
        ga.bipartite_complete_graph(3, 7),
        ga.from_edge_index(torch.tensor([[0, 2], [1, 0]]), 3),
        ga.knn_graph(torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), 3),
        ga.batch([ga.window_path_graph(4, 1), ga.complete_graph(3)]),
        ga.grid_window_graph(8, 8, 1),
    ],
)
def test_the_picture_has_a_cell_where_the_mask_is_true(graph):
    _, tree = table_of(graph)
    svg = next(tree.iter("svg"))
    drawn = torch.zeros(graph.num_targets, graph.num_sources, dtype=torch.bool)
    for j, i in re.findall(r"M(\d+) (\d+)h1v1h-1z", svg.find("path").get("d")):
        drawn[int(i), int(j)] = True
    assert torch.equal(drawn, graph.to_mask())
    assert svg.get("viewBox") == f"0 0 {graph.num_sources} {graph.num_targets}"


def test_the_table_says_what_the_graph_is():
    rows, _ = table_of(ga.batch([ga.causal_window_graph(4, 2), ga.causal_window_graph(1000, 2)]))
    assert rows["tokens"] == "1,004"
    assert rows["edges"] == "2,006"
    assert rows["sequences"] == "2"
    assert rows["causal"] == "yes"
    assert float(rows["edges per token"]) == pytest.approx(2006 / 1004, rel=1e-3)
    rows, _ = table_of(ga.bipartite_complete_graph(3, 7))
    assert (rows["targets"], rows["sources"]) == ("3", "7")
    assert table_of(ga.knn_graph(torch.randn(9, 2), 3))[0]["structure"] == "table of neighbours"


def test_a_million_tokens_cost_nothing_and_no_edge_is_listed():
    graph = ga.longformer_graph(1_000_000, window=16, global_tokens=[0, 999_999])
    start = time.process_time()
    rows, tree = table_of(graph)
    assert time.process_time() - start < 0.5
    assert graph._edge_index is None
    assert len(ET.tostring(tree)) < 3000
    assert rows["edges"] == f"{graph.num_edges:,}"
    assert not list(tree.iter("svg"))


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_graphs_have_a_table_too(tokens):
    rows, _ = table_of(ga.complete_graph(tokens))
    assert rows["tokens"] == str(tokens)
