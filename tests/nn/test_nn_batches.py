"""A batch of sequences, however it is laid out, is every sequence alone."""

import pytest
import torch
from nn_by_hand import CASES, DIM, ONE_OF_EACH, run, tokens_of

import graphattn as ga

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def graph_for(case, n: int) -> ga.TokenGraph:
    if case.context_width is not None:
        return ga.bipartite_complete_graph(n, n + 2)
    return ga.window_path_graph(n, 2, self_loops=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_packed_sequences_equal_each_alone(case, backend):
    layer, graphs = case.make(), [graph_for(case, n) for n in (5, 1, 8, 2)]
    packed = ga.batch(graphs)
    tokens = tokens_of(case, packed, ())
    with ga.use_backend(backend):
        out = run(layer, tokens, packed)
        pieces = [tokens[0].split([g.num_targets for g in graphs])]
        if case.context_width is not None:
            pieces.append(tokens[1].split([g.num_sources for g in graphs]))
        alone = [run(layer, t, g) for *t, g in zip(*pieces, graphs, strict=True)]
    torch.testing.assert_close(out, torch.cat(alone), **TIGHT)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_shared_graph_treats_every_sequence_alone(case, backend):
    layer, graph = case.make(), graph_for(case, 7)
    tokens = tokens_of(case, graph, (2, 2))
    with ga.use_backend(backend):
        out = run(layer, tokens, graph)
        alone = [[run(layer, tuple(t[a, b] for t in tokens), graph) for b in range(2)]
                 for a in range(2)]  # fmt: skip
    assert out.shape == (2, 2, 7, DIM)
    torch.testing.assert_close(out, torch.stack([torch.stack(row) for row in alone]), **TIGHT)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_padded_sequences_equal_each_alone(case, backend):
    """Padding may hold anything; here it holds NaN."""
    layer, lengths = case.make(), (8, 3, 1)
    graph = graph_for(case, 8)
    tokens = tokens_of(case, graph, (3,))
    length = torch.tensor(lengths)[:, None]
    valid = (torch.arange(8) < length, torch.arange(10) < length + 2)
    padded = tuple(
        t.masked_fill(~mask[..., None], torch.nan) for t, mask in zip(tokens, valid, strict=False)
    )
    given = valid if case.context_width is not None else valid[0]
    with ga.use_backend(backend):
        out = run(layer, padded, graph, valid=given)
        for b, n in enumerate(lengths):
            short = (tokens[0][b, :n], *(t[b, : n + 2] for t in tokens[1:]))
            torch.testing.assert_close(out[b, :n], run(layer, short, graph_for(case, n)), **TIGHT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_permutation_of_the_tokens_permutes_the_output(case):
    """Permuting tokens, edges and positions permutes the output, as every layer promises."""
    if "top_k" in case.options:
        pytest.skip("ties aside, also true; ties are broken by index")
    layer, graph = case.make(), graph_for(case, 8)
    tokens = tokens_of(case, graph)
    to, to_source = torch.randperm(8), torch.randperm(graph.num_sources)
    if case.context_width is None:
        to_source = to
    source, target = graph.edge_index
    edges = torch.stack([to_source.argsort()[source], to.argsort()[target]])
    shuffled = ga.from_edge_index(edges, graph.num_targets, graph.num_sources)
    places = (graph.positions[to], graph.source_positions[to_source])
    moved = (tokens[0][:, to], *(t[:, to_source] for t in tokens[1:]))
    positions = places[0] if case.context_width is None else places
    out = run(layer, moved, shuffled, positions=positions)
    torch.testing.assert_close(out, run(layer, tokens, graph)[:, to], **TIGHT)


@pytest.mark.parametrize("case", [c for c in CASES if c.context_width is None], ids=str)
def test_raw_edge_index_and_pyg_edge_index_are_taken_as_the_graph(case):
    layer, graph = case.make(), ga.window_path_graph(8, 2, self_loops=True)
    tokens = tokens_of(case, graph)
    expected = run(layer, tokens, graph)
    shuffled = graph.edge_index[:, torch.randperm(graph.num_edges)]
    for raw in (graph.edge_index, shuffled, shuffled.int(), graph.to_pyg()):
        torch.testing.assert_close(run(layer, tokens, raw), expected, **TIGHT)


@pytest.mark.parametrize("case", [c for c in CASES if c.context_width is not None], ids=str)
def test_raw_edges_of_a_bipartite_graph_are_taken_as_the_graph(case):
    layer, graph = case.make(), ga.bipartite_complete_graph(7, 4)
    tokens = tokens_of(case, graph)
    expected = run(layer, tokens, graph)
    for raw in (graph.edge_index, graph.edge_index.flip(1), graph.to_pyg()):
        torch.testing.assert_close(run(layer, tokens, raw), expected, **TIGHT)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("batch", "n"), [((), 0), ((2,), 0), ((0,), 5), ((2,), 1)], ids=str)
def test_empty_batches_empty_sequences_and_single_tokens_are_sequences_too(case, backend, batch, n):
    layer = case.make()
    sources = n if case.context_width is None else 6
    graph = ga.from_edge_index(torch.empty(2, 0, dtype=torch.long), n, sources)
    if n == 5:
        graph = graph_for(case, 5)
    with ga.use_backend(backend):
        out = run(layer, tokens_of(case, graph, batch), graph)
    assert out.shape == (*batch, n, DIM)
    assert out.isfinite().all()
