"""Attention and consensus over rows of a graph are those rows over the whole, on every backend."""

import itertools

import pytest
import torch
from cases_ops import BACKENDS, consensus_inputs, qkv, random, valid_tokens
from oracle_ops import attention

import graphattn as ga
from graphattn.graphs.structures.bands import has_bands
from graphattn.ops.attention.structured.chunked import tiles_of

TIGHT = {"rtol": 1e-10, "atol": 1e-11}
WHOLE = {
    "causal": (ga.causal_graph(40), 11, 40),
    "causal window": (ga.causal_window_graph(40, 5), 13, 33),
    "path": (ga.window_path_graph(40, 3), 9, 31),
    "path at the start": (ga.window_path_graph(40, 3, self_loops=True), 0, 17),
    "dilated": (ga.dilated_window_graph(40, 2, 3), 7, 32),
    "dilated without self-loops": (ga.dilated_window_graph(40, 3, 4, self_loops=False), 6, 35),
    "complete": (ga.complete_graph(19), 4, 13),
    "complete without self-loops": (ga.complete_graph(12, self_loops=False), 4, 9),
    "blocks": (ga.block_window_graph(40, 6, shift=2), 5, 29),
    "cycle": (ga.window_cycle_graph(30, 2), 8, 25),
    "cycle around the corner": (ga.window_cycle_graph(30, 2), 0, 9),
    "grid": (ga.grid_window_graph(5, 6, 1), 8, 23),
    "class token": (ga.grid_window_graph(4, 5, 1, class_token=True), 0, 9),
    "longformer": (ga.longformer_graph(300, 2, [3, 150]), 100, 260),
    "longformer without hubs among the rows": (ga.longformer_graph(400, 2, [0, 399]), 50, 250),
    "bigbird": (ga.bigbird_graph(30, 1, 2, [0], seed=0), 3, 20),
    "batch": (
        ga.batch([ga.causal_graph(9), ga.window_path_graph(7, 2), ga.causal_window_graph(12, 3)]),
        4, 22,
    ),
    "batch of equal windows": (ga.batch([ga.causal_window_graph(n, 3) for n in (9, 4, 8)]), 3, 18),
    "past": (ga.causal_graph(21, past=12), 0, 21),
    "short past": (ga.causal_graph(21, past=5), 0, 21),
    "rows after the first few": (ga.causal_graph(30), 4, 30),
    "window with a past": (ga.causal_window_graph(21, 6, past=12), 0, 21),
    "window with a past, transposed": (ga.causal_window_graph(9, 6, past=12).transpose(), 0, 21),
    "table of neighbours": (ga.knn_graph(random(20, 2, seed=4), 3), 5, 15),
    "list": (ga.from_mask(random(9, 14, seed=2) > 0.3), 2, 8),
}  # fmt: skip
OPTIONS = {
    "rbf": {"sigma": 1.3},
    "rbf top-k": {"sigma": 1.3, "top_k": 2},
    "rbf eps": {"sigma": 0.7, "eps": 0.2},
    "dot": {},
    "dot top-k": {"top_k": 2},
}


def attend(tensors, graph, options, backend, valid=None):
    options = {**options, "valid": valid, "backend": backend, "return_lse": True}
    if "sigma" in options:
        return ga.rbf_attention(*tensors, graph, **options)
    return ga.dot_product_attention(*tensors, graph, **options)


def cut(tensors, start, stop, seen):
    query, key, value = tensors
    own = slice(seen.start, seen.stop)
    return query[..., start:stop, :, :], key[..., own, :, :], value[..., own, :, :]


LOOPED = [  # the loop is long: of the long graphs one of each kind is enough
    (name, kind)
    for name in WHOLE
    for kind in OPTIONS
    if WHOLE[name][0].num_targets < 100 or kind in ("rbf", "dot")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "kind"), LOOPED)
def test_attention_over_rows_is_the_loop_over_the_rows_of_the_mask(name, kind, backend):
    graph, start, stop = WHOLE[name]
    part, seen = graph.targets(start, stop)
    tensors = cut(qkv(graph, heads=2, kv_heads=1), start, stop, seen)
    mask = graph.to_mask()[start:stop, seen.start : seen.stop]
    out, lse = attend(tensors, part, OPTIONS[kind], backend)
    expected = attention(*tensors, mask, **OPTIONS[kind])
    torch.testing.assert_close((out, lse), expected[:2], **TIGHT)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", WHOLE)
def test_gradients_over_rows_are_those_of_the_whole(name, kind, padded):
    """The sum over all chunks of rows is the whole graph: outputs, and gradients of all inputs."""
    graph, start, stop = WHOLE[name]
    tensors = [x.requires_grad_() for x in qkv(graph, batch=(2,))]
    N, M = graph.num_targets, graph.num_sources
    valid = (valid_tokens(2, N), valid_tokens(2, M, seed=1)) if padded else None
    d_out, d_lse = random(2, N, 2, 3, seed=8), random(2, N, 2, seed=9)
    whole = attend(tensors, graph, OPTIONS[kind], "reference", valid)
    expected = torch.autograd.grad(whole, tensors, (d_out, finite(d_lse, whole[1])))
    pieces = []
    for a, b in itertools.pairwise((0, start, stop, N)):
        part, seen = graph.targets(a, b)
        own = None if valid is None else (valid[0][:, a:b], valid[1][:, seen.start : seen.stop])
        pieces.append(attend(cut(tensors, a, b, seen), part, OPTIONS[kind], "structured", own))
    out, lse = (torch.cat(x, dim=1) for x in zip(*pieces, strict=True))
    torch.testing.assert_close((out, lse), whole, **TIGHT)
    found = torch.autograd.grad((out, lse), tensors, (d_out, finite(d_lse, lse)))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def finite(d_lse, lse):
    """No gradient into the log-sum of a row without edges."""
    return d_lse.masked_fill(lse.detach() == -torch.inf, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WHOLE)
def test_a_table_of_offsets_is_that_of_the_whole(name, backend):
    graph, start, stop = WHOLE[name]
    rows = None if graph.structure is None else graph.structure.num_offsets
    if rows is None:
        return
    part, seen = graph.targets(start, stop)
    if rows == part.num_edges:
        return
    table = random(rows, 2, seed=5).requires_grad_()
    tensors = qkv(graph)
    whole = ga.rbf_attention(*tensors, graph, 1.1, edge_bias=table, backend="reference")
    out = ga.rbf_attention(
        *cut(tensors, start, stop, seen), part, 1.1, edge_bias=table, backend=backend
    )
    torch.testing.assert_close(out, whole[start:stop], **TIGHT)
    d = random(*out.shape, seed=6)
    gradients = (torch.autograd.grad(y, table, d) for y in (out, whole[start:stop]))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", WHOLE)
def test_a_bias_per_edge_follows_the_edges_of_the_rows(name):
    graph, start, stop = WHOLE[name]
    target = graph.edge_index[1]
    bias = random(graph.num_edges, 2, seed=5)
    part, seen = graph.targets(start, stop)
    tensors = qkv(graph)
    own = bias[(target >= start) & (target < stop)]
    if graph.structure is not None and part.structure.num_offsets == part.num_edges:
        return
    whole = ga.dot_product_attention(*tensors, graph, edge_bias=bias, backend="reference")
    for backend in BACKENDS:
        out = ga.dot_product_attention(
            *cut(tensors, start, stop, seen), part, edge_bias=own, backend=backend
        )
        torch.testing.assert_close(out, whole[start:stop], **TIGHT)


def moved(graph, tensors, step, backend, valid=None):
    state, neighbor, of_target, of_source, network = tensors
    return ga.consensus_update(
        state, neighbor, of_target, of_source, network, graph, step,
        update="target", valid=valid, backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WHOLE)
def test_consensus_over_rows_is_those_rows_of_the_whole(name, backend, step, padded):
    graph, start, stop = WHOLE[name]
    inputs = consensus_inputs(graph, batch=(2,), neighbor=True)
    leaves = [x.requires_grad_() for x in (*inputs[:4], *inputs.network)]
    valid = None
    if padded:
        valid = valid_tokens(2, graph.num_targets), valid_tokens(2, graph.num_sources, seed=1)
    whole = moved(graph, inputs, step, "reference", valid)[:, start:stop]
    part, seen = graph.targets(start, stop)
    own, there = slice(start, stop), slice(seen.start, seen.stop)
    rows = inputs._replace(
        state=inputs.state[:, own],
        neighbor_state=inputs.neighbor_state[:, there],
        target_hidden=inputs.target_hidden[:, own],
        source_hidden=inputs.source_hidden[:, there],
    )
    own_valid = None if valid is None else (valid[0][:, own], valid[1][:, there])
    found = moved(part, rows, step, backend, own_valid)
    torch.testing.assert_close(found, whole, **TIGHT)
    d = random(*found.shape, seed=7)
    gradients = (torch.autograd.grad(out, leaves, d) for out in (found, whole))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", WHOLE)
def test_attention_lists_no_edge_of_rows_of_a_window(name):
    graph, start, stop = WHOLE[name]
    part, seen = graph.targets(start, stop)
    if part.structure is None or not has_bands(part.structure):
        return
    part = ga.TokenGraph(structure=part.structure)
    attend(cut(qkv(graph), start, stop, seen), part, {"sigma": 1.0}, "structured")
    assert part._edge_index is None
    assert tiles_of(part.structure, torch.device("cpu")) is not None


def test_windows_of_rows_go_through_consensus_without_a_list_of_edges():
    graph, inputs = ga.window_path_graph(4000, 2), None
    part, seen = graph.targets(1000, 3000)
    inputs = consensus_inputs(part)
    moved(part, inputs, 0.1, "structured")
    assert part._edge_index is None
    assert len(seen) == 2004


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["causal", "causal window", "path", "blocks", "past", "short past", "dilated"]
)
def test_what_no_row_sees_is_not_read(name, backend, bad):
    graph, start, stop = WHOLE[name]
    part, seen = graph.targets(start, stop)
    tensors = [x.clone() for x in cut(qkv(graph), start, stop, seen)]
    before, _ = attend(tensors, part, {"sigma": 1.0}, backend)
    last = len(seen) - 1
    for x in tensors[1:]:
        x[last] = bad
    after, _ = attend(tensors, part, {"sigma": 1.0}, backend)
    blind = ~part.to_mask()[:, last]
    assert torch.equal(after[blind], before[blind])
    assert not after[~blind].isfinite().any()


def test_energy_over_a_graph_with_a_past_is_refused_by_name():
    graph = ga.causal_window_graph(4, 3, past=2)
    inputs = consensus_inputs(graph)
    with pytest.raises(ValueError, match="use update='target'"):
        ga.consensus_update(*inputs, graph, 0.1, update="energy")


def test_energy_over_equally_many_shifted_sources_is_that_of_the_list_of_edges():
    """Energy updates over as many shifted sources as targets equal those over the list of edges.

    Such a graph is square by number: its own numbers say what a self-loop is.
    """
    from graphattn.graphs.structures.composites import Section
    from graphattn.graphs.structures.structure import Band

    for loops in (True, False):
        structure = Section(Band(12, 2, 2, 1, loops), 3, 9, 1, 7)
        graph = ga.TokenGraph(structure=structure)
        plain = ga.from_mask(graph.to_mask())
        inputs = consensus_inputs(graph)
        for step in (0.1, "auto"):
            expected = ga.consensus_update(*inputs, plain, step, backend="reference")
            for backend in BACKENDS:
                found = ga.consensus_update(*inputs, graph, step, backend=backend)
                torch.testing.assert_close(found, expected, **TIGHT)
