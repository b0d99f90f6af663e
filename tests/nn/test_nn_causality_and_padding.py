"""A future token, and what padding holds, reaches nothing."""

import warnings

import pytest
import torch
from nn_by_hand import CASES, DIM, ONE_OF_EACH, Case, graph_of, irregular_graph, run, tokens_of

import graphattn as ga

BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])
SELF_CASES = [case for case in CASES if case.context_width is None]
CAUSAL_CASES = [case for case in SELF_CASES if not case.is_energy]
CAUSAL_GRAPHS = {
    "causal": ga.causal_graph(10),
    "causal window": ga.causal_window_graph(10, 4),
    "packed": ga.batch([ga.causal_graph(6), ga.causal_window_graph(4, 2)]),
    "union": ga.union(ga.causal_window_graph(10, 2), ga.causal_graph(10)),
}


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
@pytest.mark.parametrize("name", ["causal", "causal window"])
@BACKENDS
def test_no_output_changes_by_a_bit_when_the_future_does(case, name, backend):
    layer, graph = case.make(dtype=torch.float32), CAUSAL_GRAPHS[name]
    (x,) = tokens_of(case, graph, dtype=torch.float32)
    with ga.use_backend(backend), torch.no_grad():
        before = layer(x, graph)
        for start in (1, 6):
            for content in (torch.nan, torch.inf, 1e4):
                changed = x.clone()
                changed[:, start:] = content
                after = layer(changed, graph)
                assert torch.equal(after[:, :start], before[:, :start]), (start, content)
                assert not torch.equal(after[:, start:], before[:, start:])


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
@pytest.mark.parametrize("name", ["packed", "union"])
def test_gradients_of_a_causal_layer_point_backward_only(case, name):
    layer, graph = case.make(), CAUSAL_GRAPHS[name]
    assert graph.is_causal
    x = torch.randn(10, DIM, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x, graph)[:5].square().sum(), x)
    assert (gradient[5:] == 0).all()
    assert (gradient[:5] != 0).any()


@pytest.mark.parametrize("case", [c for c in SELF_CASES if c.is_energy], ids=str)
@BACKENDS
def test_energy_consensus_refuses_a_causal_graph_and_names_the_way_out(case, backend):
    layer, x = case.make(), torch.randn(10, DIM, dtype=torch.float64)
    with ga.use_backend(backend):
        for graph in CAUSAL_GRAPHS.values():
            with pytest.raises(ValueError, match=r"causal graph.*update='target'"):
                layer(x, graph)


@BACKENDS
def test_energy_consensus_would_leak_and_target_does_not(backend):
    """A plain list of causal edges is not refused, and shows the leak that a refusal prevents."""
    edges = ga.from_edge_index(ga.causal_graph(10).edge_index, 10)
    x = torch.randn(10, DIM, dtype=torch.float64)
    changed = x.clone()
    changed[9] = 1.0
    leaks = {}
    for update in ("energy", "target"):
        layer = Case("SelfConsensus", {"update": update, "edge_hidden": 6}).make()
        with ga.use_backend(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leaks[update] = (layer(changed, edges) - layer(x, edges))[:9].abs().max().item()
    assert leaks["target"] == 0
    assert leaks["energy"] > 1e-3


@BACKENDS
def test_a_foreign_edge_list_that_points_backward_warns_and_names_both_readings(backend):
    edges = ga.causal_graph(6).edge_index
    layer = Case("SelfConsensus", {"edge_hidden": 6}).make()
    x = torch.randn(6, DIM, dtype=torch.float64)
    with ga.use_backend(backend), pytest.warns(UserWarning, match="update='target'") as caught:
        layer(x, ga.from_edge_index(edges, 6))
    assert len(caught) == 1
    assert "update='energy' is right" in str(caught[0].message)


def test_that_warning_comes_once_however_often_layers_run():
    edges = ga.from_edge_index(ga.causal_graph(6).edge_index, 6)
    layers = [Case("SelfConsensus", {"edge_hidden": 6}).make(seed) for seed in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for layer in layers * 2:
            layer(torch.randn(6, DIM, dtype=torch.float64), edges)
    assert len(caught) == 1


@pytest.mark.parametrize("plain", [False, True])
def test_energy_is_refused_where_one_sequence_of_a_batch_is_causal(plain):
    mixed = [ga.causal_graph(4), ga.complete_graph(2)]
    if plain:  # an edge list beside it leaves the batch without a structure
        mixed.append(ga.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2))
    graph = ga.batch(mixed)
    layer = Case("SelfConsensus", {"edge_hidden": 6}).make()
    x = torch.randn(graph.num_targets, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match="update='target'"):
        layer(x, graph)
    # Nor does a choice among its edges lose that.
    nearest = ga.knn_graph(x, k=1, within=graph)
    with pytest.raises(ValueError, match="update='target'"):
        layer(x, nearest)
    # A sequence of one token has no future.
    harmless = ga.batch([ga.causal_graph(1), ga.complete_graph(graph.num_targets - 1)])
    assert layer(x, harmless).isfinite().all()


def padded(case, graph):
    """Tokens, the `valid` argument, and the masks one by one."""
    tokens = tokens_of(case, graph, (2,))
    masks = [torch.rand(2, t.shape[-2]) < 0.6 for t in tokens]
    masks[0][0, :2], masks[0][1, :2] = True, False
    return tokens, masks[0] if case.context_width is None else tuple(masks), masks


@pytest.mark.parametrize("case", CASES, ids=str)
@BACKENDS
def test_what_padding_holds_reaches_no_output_and_no_gradient(case, backend):
    layer, graph = case.make(), graph_of(case)
    tokens, valid, masks = padded(case, graph)
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300], dtype=torch.float64)

    def outputs(filling):
        filled = tuple(
            torch.where(mask[..., None], t, filling.repeat(t.shape[-1])[: t.shape[-1]])
            for t, mask in zip(tokens, masks, strict=True)
        )
        filled = tuple(t.requires_grad_() for t in filled)
        with ga.use_backend(backend):
            out = run(layer, filled, graph, valid=valid)
        wanted = (*layer.parameters(), *filled)
        return out, torch.autograd.grad(out.square().sum(), wanted)

    clean, clean_gradients = outputs(torch.zeros_like(poison))
    out, gradients = outputs(poison)
    assert out.isfinite().all()
    assert torch.equal(out, clean)
    for gradient, expected in zip(gradients, clean_gradients, strict=True):
        assert gradient.isfinite().all()
        assert torch.equal(gradient, expected)
    for gradient, mask in zip(gradients[-len(tokens) :], masks, strict=True):
        assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("case", [c for c in CASES if not c.is_consensus], ids=str)
@BACKENDS
def test_a_row_of_padding_alone_is_no_average_of_anything(case, backend):
    """Every key invalid: attention gives the output bias, not a uniform average."""
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph, (2,))
    nobody = torch.zeros(graph.num_sources, dtype=torch.bool)
    valid = nobody if case.context_width is None else (None, nobody)
    with ga.use_backend(backend):
        out = run(layer, tokens, graph, valid=valid)
    bias = layer.output_proj.bias
    expected = torch.zeros(DIM, dtype=torch.float64) if bias is None else bias
    assert torch.equal(out, expected.expand_as(out))


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@BACKENDS
def test_isolated_tokens_give_finite_gradients_in_every_dtype(case, dtype, backend):
    layer, graph = case.make(dtype=dtype), graph_of(case)
    tokens = tuple(t.requires_grad_() for t in tokens_of(case, graph, dtype=dtype))
    with ga.use_backend(backend):
        out = run(layer, tokens, graph)
    assert out.dtype == dtype
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.float().square().sum(), (*layer.parameters(), *tokens)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@BACKENDS
def test_a_graph_without_edges_has_finite_gradients(case, backend):
    layer = case.make()
    sources = 9 if case.context_width is None else 6
    graph = ga.from_edge_index(torch.empty(2, 0, dtype=torch.long), 9, sources)
    tokens = tuple(t.requires_grad_() for t in tokens_of(case, graph))
    with ga.use_backend(backend):
        out = run(layer, tokens, graph)
    expected = layer.output_proj(
        layer.source_proj(tokens[0]) if case.is_consensus else torch.zeros_like(tokens[0])
    )
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(
        out.square().sum(), (*layer.parameters(), *tokens), allow_unused=True
    )
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize("kind", ["KrauseAttention", "GaussianKernelAttention"])
@BACKENDS
def test_tokens_far_from_everything_are_averaged_not_lost(kind, backend):
    """exp underflows for every pair (distances of 1e4 sigma); the weights still sum to 1."""
    layer = getattr(ga.nn, kind)(DIM, 4, init_sigma=0.01)
    graph = ga.window_path_graph(9, 2)
    x = (100 * torch.randn(9, DIM)).requires_grad_()
    with ga.use_backend(backend):
        out, weights = layer(x, graph, return_attention_weights=True)
    total = torch.zeros(9, 4).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(total, torch.ones(9, 4))
    wanted = (x, *layer.parameters())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), wanted))


@BACKENDS
def test_equal_tokens_have_finite_gradients(backend):
    """Distance 0 everywhere: no square root is differentiated."""
    for case in SELF_CASES:
        layer, graph = case.make(), irregular_graph()
        x = torch.zeros(9, DIM, dtype=torch.float64, requires_grad=True)
        with ga.use_backend(backend):
            out = layer(x, graph)
        gradients = torch.autograd.grad(out.sum(), (x, *layer.parameters()), allow_unused=True)
        assert all(g.isfinite().all() for g in gradients if g is not None), case
