"""layer(x[rows], part, context=x[seen]) is those rows of layer(x, graph), whatever the layer."""

import copy
import itertools
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import graphattn as ga

DIM = 8
LAYERS = {
    "krause": lambda **o: ga.nn.KrauseAttention(DIM, 2, **o),
    "krause, top-k, grouped": lambda **o: ga.nn.KrauseAttention(DIM, 4, top_k=2, kv_heads=2, **o),
    "gaussian": lambda **o: ga.nn.GaussianKernelAttention(DIM, 2, **o),
    "gaussian, normalised, eps": lambda **o: ga.nn.GaussianKernelAttention(
        DIM, 2, normalize=True, eps=0.1, **o
    ),
    "dot": lambda **o: ga.nn.DotProductAttention(DIM, 2, **o),
    "value-less": lambda **o: ga.nn.DotProductAttention(DIM, 2, value_projection=False, **o),
    "consensus": lambda **o: ga.nn.SelfConsensus(
        DIM, 2, rank=2, edge_hidden=5, update="target", **o
    ),
    "consensus, auto, full": lambda **o: ga.nn.SelfConsensus(
        DIM, 2, rank=2, edge_hidden=5, update="target", edge_input="full",
        **({"step_size": "learned" if o.get("rope") is True else "auto"} | o)
    ),
}  # fmt: skip
ROPES = (False, True)
GRAPHS = {
    "causal window": lambda: ga.causal_window_graph(17, 4),
    "causal": lambda: ga.causal_graph(13),
    "path": lambda: ga.window_path_graph(17, 2),
    "dilated": lambda: ga.dilated_window_graph(19, 2, 3),
    "grid": lambda: ga.grid_window_graph(4, 4, 1, class_token=True),
    "longformer": lambda: ga.longformer_graph(16, 1, [3]),
    "batch": lambda: ga.batch([ga.causal_window_graph(7, 3), ga.window_path_graph(9, 1)]),
    "list": lambda: ga.from_mask(torch.eye(9).roll(1, 0).bool() | torch.eye(9).bool()),
    "table": lambda: ga.knn_graph(torch.arange(24.0).view(12, 2).sin(), 3),
}
BACKENDS = ("reference", "structured")


def made(name, **options):
    torch.manual_seed(0)
    return LAYERS[name](**options).double()


def by_rows(layer, x, graph, borders, **keywords):
    """The rows between every two borders, one call each."""
    outputs = []
    for start, stop in itertools.pairwise(borders):
        part, seen = graph.targets(start, stop)
        mine, there = slice(start, stop), slice(seen.start, seen.stop)
        given = {k: (v[0][..., mine], v[1][..., there]) for k, v in keywords.items()}
        outputs.append(layer(x[..., mine, :], part, x[..., there, :], **given))
    return torch.cat(outputs, dim=-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_one_chunk_after_the_other_are_the_whole(name, rope, backend):
    layer = made(name, rope=rope, backend=backend)
    for build in GRAPHS.values():
        graph = build()
        N = graph.num_targets
        x = torch.randn(2, N, DIM, dtype=torch.float64, requires_grad=True)
        whole, rows = layer(x, graph), by_rows(layer, x, graph, (0, 3, 7, N))
        torch.testing.assert_close(rows, whole, rtol=1e-9, atol=1e-10)
        leaves, d = [x, *layer.parameters()], torch.randn_like(whole)
        for mine, theirs in zip(
            torch.autograd.grad(rows, leaves, d, allow_unused=True),
            torch.autograd.grad(whole, leaves, d, allow_unused=True),
            strict=True,
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("rope", [False, "isometric"])
def test_isometric_consensus_turns_rows_back_where_they_stand(rope):
    layer, graph = made("consensus", rope=rope), ga.causal_window_graph(15, 4)
    x = torch.randn(15, DIM, dtype=torch.float64)
    torch.testing.assert_close(by_rows(layer, x, graph, (0, 4, 15)), layer(x, graph))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYERS)
def test_padding_in_rows_and_in_what_they_see_is_not_read(name, backend):
    layer, graph = made(name, rope=True, backend=backend), ga.window_path_graph(17, 3)
    x = torch.randn(2, 17, DIM, dtype=torch.float64)
    valid = torch.rand(2, 17, generator=torch.Generator().manual_seed(1)) < 0.7
    x[~valid] = torch.nan
    whole = layer(x, graph, valid=valid)
    rows = by_rows(layer, x, graph, (0, 6, 11, 17), valid=(valid, valid))
    assert rows[valid].isfinite().all()
    torch.testing.assert_close(rows[valid], whole[valid])


@pytest.mark.parametrize("name", LAYERS)
def test_positions_of_the_caller_are_a_pair(name):
    layer, graph = made(name, rope=True), ga.causal_window_graph(15, 4)
    x = torch.randn(15, DIM, dtype=torch.float64)
    places = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:15]
    whole = layer(x, graph, positions=places)
    rows = by_rows(layer, x, graph, (0, 6, 15), positions=(places, places))
    torch.testing.assert_close(rows, whole)
    assert not torch.allclose(rows, layer(x, graph))


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_with_a_past_takes_the_newest_rows_and_all_that_came_before(name, window):
    layer = made(name, rope=True)
    x = torch.randn(2, 14, DIM, dtype=torch.float64)
    if window is None:
        whole, graph = layer(x, ga.causal_graph(14)), ga.causal_graph(5, past=9)
    else:
        whole = layer(x, ga.causal_window_graph(14, window))
        graph = ga.causal_window_graph(5, window, past=9)
    torch.testing.assert_close(layer(x[:, 9:], graph, context=x), whole[:, 9:])


@pytest.mark.parametrize("name", [n for n in LAYERS if "consensus" not in n])
def test_weights_of_rows_are_those_of_their_edges(name):
    layer, graph = made(name), ga.window_path_graph(12, 2)
    x = torch.randn(12, DIM, dtype=torch.float64)
    _, whole = layer(x, graph, return_attention_weights=True)
    part, seen = graph.targets(4, 9)
    _, mine = layer(x[4:9], part, x[seen.start : seen.stop], return_attention_weights=True)
    target = graph.edge_index[1]
    torch.testing.assert_close(mine, whole[(target >= 4) & (target < 9)])


def test_energy_with_a_context_is_refused_by_name():
    layer, graph = ga.nn.SelfConsensus(DIM, 2, rank=2, edge_hidden=5), ga.window_path_graph(9, 2)
    x = torch.randn(9, DIM)
    part, seen = graph.targets(2, 6)
    with pytest.raises(ValueError, match=r"context must be None with update='energy'.*'target'"):
        layer(x[2:6], part, x[seen.start : seen.stop])
    assert layer(x, graph, x).equal(layer(x, graph)), "the tokens themselves are no other context"


@pytest.mark.parametrize("name", LAYERS)
def test_rows_without_what_they_see_are_refused(name):
    """Sizes tell where they differ; where they are equal, positions do."""
    layer = made(name)
    x = torch.randn(1, DIM, dtype=torch.float64)
    graph, _ = ga.window_path_graph(9, 1).targets(0, 1)  # token 0 sees token 1
    assert (graph.num_targets, graph.num_sources) == (1, 1)
    with pytest.raises(ValueError, match=re.escape("context must be the tokens that are seen")):
        layer(x, graph)
    with pytest.raises(ValueError, match="graph has 3 targets and 7 sources"):
        layer(torch.randn(3, DIM, dtype=torch.float64), ga.causal_graph(3, past=4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_by_rows_gives_the_gradients_of_the_whole(reentrant):
    layer, graph = made("krause", rope=True), ga.causal_window_graph(24, 5)
    x = torch.randn(24, DIM, dtype=torch.float64, requires_grad=True)
    rows = []
    for start in range(0, 24, 8):
        part, seen = graph.targets(start, start + 8)
        here, context = x[start : start + 8], x[seen.start : seen.stop]
        rows.append(checkpoint(layer, here, part, context, use_reentrant=reentrant))
    leaves = [x, *layer.parameters()]
    torch.cat(rows).square().sum().backward()
    mine = [leaf.grad for leaf in leaves]
    theirs = torch.autograd.grad(layer(x, graph).square().sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.long
@pytest.mark.parametrize("name", ["krause", "gaussian", "dot", "consensus"])
def test_a_compiled_layer_takes_rows_of_three_lengths(name):
    torch._dynamo.reset()
    layer = made(name, rope=True)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="eager")
    graph = ga.causal_window_graph(60, 5)
    x = torch.randn(60, DIM, dtype=torch.float64)
    whole = layer(x, graph)
    for stop in (25, 40, 60):
        part, seen = graph.targets(20, stop)
        out = compiled(x[20:stop], part, x[seen.start : seen.stop])
        torch.testing.assert_close(out, whole[20:stop])
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["krause", "dot", "consensus"])
def test_rows_under_autocast_are_those_of_the_whole_under_autocast(name):
    layer, graph = made(name, rope=True).float(), ga.causal_window_graph(20, 4)
    x = torch.randn(20, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, rows = layer(x, graph), by_rows(layer, x, graph, (0, 9, 20))
    torch.testing.assert_close(rows, whole, rtol=2e-2, atol=2e-2)


def test_a_subclass_with_an_affinity_of_its_own_takes_rows():
    class Halved(ga.nn.KrauseAttention):
        def log_affinity(self, query_i, key_j):
            return super().log_affinity(query_i, key_j) / 2

    layer, graph = Halved(DIM, 2, rope=True).double(), ga.causal_window_graph(15, 4)
    x = torch.randn(15, DIM, dtype=torch.float64)
    torch.testing.assert_close(by_rows(layer, x, graph, (0, 4, 15)), layer(x, graph))


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_of_any_strides_are_rows(name):
    layer, graph = made(name, rope=True), ga.causal_window_graph(15, 4)
    x = torch.randn(DIM, 15, 2, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(by_rows(layer, x, graph, (0, 4, 15)), layer(x, graph))
