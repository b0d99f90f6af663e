"""message(), run by PyG's propagate, and the fused operation are the same layer."""

import copy

import pytest
import torch
from nn_by_hand import CASES, DIM, HEADS, ONE_OF_EACH, graph_of, irregular_graph, run, tokens_of
from torch_geometric.nn import MessagePassing

import graphattn as ga

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def twins(case):
    """The layer with backend="auto" and a copy of it that was made with backend="reference"."""
    fused, readable = case.make(), case.make(backend="reference")
    readable.load_state_dict(fused.state_dict())
    return fused, readable


def value_and_gradients(layer, tokens, graph, **keywords):
    """The output and the gradients of a random projection of it, by name."""
    tokens = tuple(t.clone().requires_grad_() for t in tokens)
    out = run(layer, tokens, graph, **keywords)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad((out * weight).sum(), (*parameters, *tokens))
    return out, dict(zip((*names, "x", "context"), gradients, strict=False))


def assert_same(case, tokens, graph, **keywords):
    fused, readable = twins(case)
    out, gradients = value_and_gradients(fused, tokens, graph, **keywords)
    out_m, gradients_m = value_and_gradients(readable, tokens, graph, **keywords)
    torch.testing.assert_close(out_m, out, **TIGHT)
    assert gradients_m.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_m[name], gradient, **TIGHT, msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_message_and_operation_agree_in_value_and_every_gradient(case, batch):
    graph = graph_of(case)
    assert_same(case, tokens_of(case, graph, batch), graph)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mask", ["shared", "per sequence"])
def test_message_and_operation_agree_on_valid_tokens(case, mask):
    graph = graph_of(case)
    batch = (2,) if mask == "per sequence" else ()
    valid = torch.rand(*batch, graph.num_targets) < 0.7
    if case.context_width is not None:
        valid = (valid, torch.rand(graph.num_sources) < 0.7)
    assert_same(case, tokens_of(case, graph), graph, valid=valid)


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if c.context_width], ids=str)
@pytest.mark.parametrize("side", [0, 1], ids=["targets", "sources"])
def test_message_and_operation_agree_where_one_side_has_a_mask(case, side):
    graph = graph_of(case)
    count = (graph.num_targets, graph.num_sources)[side]
    valid = [None, None]
    valid[side] = torch.rand(2, count) < 0.7
    assert_same(case, tokens_of(case, graph), graph, valid=tuple(valid))


GRAPHS = {
    "no edges": lambda: ga.from_edge_index(torch.empty(2, 0, dtype=torch.long), 9),
    "window": lambda: ga.window_path_graph(9, 2),
    "cycle": lambda: ga.window_cycle_graph(9, 2),
    "complete": lambda: ga.complete_graph(9),
    "longformer": lambda: ga.longformer_graph(9, 1, [0]),
    "grid": lambda: ga.grid_window_graph(3, 3, 1),
    "batch": lambda: ga.batch([ga.complete_graph(4), ga.window_path_graph(5, 1)]),
    "union": lambda: ga.union(ga.window_path_graph(9, 1), ga.window_cycle_graph(9, 3)),
    "raw edge_index": lambda: ga.complete_graph(9).edge_index.flip(1),
    "EdgeIndex": lambda: ga.complete_graph(9).to_pyg(),
    "causal": lambda: ga.causal_graph(9),
}


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if not c.context_width], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_message_and_operation_agree_on_every_kind_of_graph(case, name):
    if name == "causal" and case.is_energy:
        pytest.skip("refused, as test_nn_causality_and_padding says")
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    assert_same(case, (x,), GRAPHS[name]())


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if c.context_width], ids=str)
@pytest.mark.parametrize(
    "graph",
    [
        ga.bipartite_complete_graph(9, 6),
        ga.batch([ga.bipartite_complete_graph(4, 2), ga.bipartite_complete_graph(5, 4)]),
        irregular_graph(5, 12),
    ],
    ids=["complete", "batch", "irregular"],
)
def test_message_and_operation_agree_on_bipartite_graphs(case, graph):
    assert_same(case, tokens_of(case, graph), graph)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("path", ["operation", "constructor", "context manager"])
def test_message_runs_only_where_the_reference_backend_was_asked_for(case, path, monkeypatch):
    layer = case.make(backend="reference" if path == "constructor" else "auto")
    calls, propagate = [], layer.propagate  # (a message() put into its place would be run)

    def counted(*args, **keywords):
        calls.append(None)
        return propagate(*args, **keywords)

    monkeypatch.setattr(layer, "propagate", counted)
    graph = graph_of(case)
    tokens = tokens_of(case, graph)
    if path == "context manager":
        with ga.use_backend("reference"):
            run(layer, tokens, graph)
    else:
        run(layer, tokens, graph)
    both_ends = 2 if case.is_energy else 1  # "energy" also sends a message to the source
    steps = case.options.get("iterations", 1)
    assert len(calls) == (0 if path == "operation" else both_ends * steps)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_what_message_returns_is_what_the_layer_computes(case, monkeypatch):
    """Silencing every message leaves attention with its bias, and consensus with its state."""
    layer, graph = case.make(backend="reference"), graph_of(case)
    tokens = tokens_of(case, graph)
    message = layer.message
    monkeypatch.setattr(layer, "message", lambda *a, **k: torch.zeros_like(message(*a, **k)))
    silent = torch.zeros(1, dtype=torch.float64)
    if case.is_consensus:
        silent = layer.source_proj(tokens[0])
    expected = layer.output_proj(silent.expand_as(tokens[0]))
    torch.testing.assert_close(run(layer, tokens, graph), expected, **TIGHT)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_the_context_manager_gives_the_same_numbers(case):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph)
    with ga.use_backend("reference"):
        inside, gradients_inside = value_and_gradients(layer, tokens, graph)
    outside, gradients = value_and_gradients(layer, tokens, graph)
    torch.testing.assert_close(inside, outside, **TIGHT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_inside[name], gradient, **TIGHT, msg=name)


def test_the_context_manager_ends_with_its_block_even_after_an_error():
    layer = ga.nn.GaussianKernelAttention(DIM, HEADS)
    with ga.use_backend("reference"):
        assert layer.uses_propagate()
    with pytest.raises(RuntimeError, match="on purpose"), ga.use_backend("reference"):
        raise RuntimeError("on purpose")
    assert not layer.uses_propagate()


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_every_layer_is_a_pyg_message_passing_layer(case):
    assert isinstance(case.make(), MessagePassing)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_pyg_hooks_see_the_messages(case):
    """Message hooks fire, as a PyG user expects of a MessagePassing layer."""
    layer, graph = case.make(backend="reference"), graph_of(case)
    shapes = []
    handle = layer.register_message_forward_hook(lambda m, i, out: shapes.append(out.shape))
    run(layer, tokens_of(case, graph), graph)
    handle.remove()
    assert shapes
    assert all(s == (2, graph.num_edges, HEADS, DIM // HEADS) for s in shapes)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer_is_twice_differentiable(case, backend):
    layer, graph = case.make(backend=backend), graph_of(case)
    layer.requires_grad_(False)
    tokens = tokens_of(case, graph, ())
    scale = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)

    def loss(scale):
        x = tokens[0] * scale.repeat(DIM // 2)
        return run(layer, (x, *tokens[1:]), graph).square().sum()

    assert torch.autograd.gradcheck(loss, (scale,))
    assert torch.autograd.gradgradcheck(loss, (scale,))


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_message_in_half_precision_is_no_worse_than_the_operation(case, dtype):
    """The message and the operation are compared with float64 on the same rounded numbers."""
    fused, readable = (layer.to(dtype) for layer in twins(case))
    graph = graph_of(case)
    tokens = tokens_of(case, graph, dtype=dtype)
    exact = run(copy.deepcopy(fused).double(), tuple(t.double() for t in tokens), graph)
    budget = (run(fused, tokens, graph) - exact).norm() + torch.finfo(dtype).eps * exact.norm()
    error = (run(readable, tokens, graph) - exact).norm()
    assert error <= 2 * budget


@pytest.mark.parametrize("kind", ["KrauseAttention", "GaussianKernelAttention"])
@pytest.mark.parametrize("sigma", [100.0, 600.0], ids=str)
def test_squared_distances_beyond_the_range_of_float16_do_not_overflow(kind, sigma):
    """float16 ends at 65504; sigma^2 and squared distances here do not fit, weights do."""
    graph = ga.window_path_graph(6, 2)  # no self loops: every distance is large
    x = (600 * torch.randn(6, DIM)).half()
    layer = getattr(ga.nn, kind)(DIM, HEADS, init_sigma=sigma).half()
    exact = copy.deepcopy(layer).double()(x.double(), graph)
    for backend in ("auto", "reference"):
        with ga.use_backend(backend):
            error = (layer(x, graph) - exact).norm() / exact.norm()
        assert error < 0.02, backend


@pytest.mark.parametrize("kind", ["KrauseAttention", "DotProductAttention"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_message_never_reads_the_value_of_a_source_that_is_not_chosen(kind, bad):
    """0 * infinity is NaN: the second of two sources, far from the target, must not be read."""
    layer = getattr(ga.nn, kind)(DIM, HEADS, top_k=1)
    like_the_target = torch.ones(1, HEADS, DIM // HEADS)
    key = torch.cat([like_the_target, -like_the_target])
    value = torch.cat([like_the_target, torch.full_like(like_the_target, bad)])
    message = layer.message(
        query_i=like_the_target.expand_as(key),
        key_j=key,
        value_j=value,
        valid_i=None,
        valid_j=None,
        index=torch.tensor([0, 0]),
        rowptr=torch.tensor([0, 2]),
    )
    assert torch.equal(message, torch.cat([like_the_target, 0 * like_the_target]))
