"""Later calls of a layer over a graph use what the first one has checked, and only if it holds."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.nn.edges.network import EdgeNetwork

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

DIM, HEADS, N = 16, 4, 11
FEW = {"rank": 2, "edge_hidden": 8}
LAYERS = {
    "dot": lambda: ga.nn.DotProductAttention(DIM, HEADS),
    "turned": lambda: ga.nn.DotProductAttention(DIM, HEADS, kv_heads=2, rope=True, bias=False),
    "no values": lambda: ga.nn.DotProductAttention(DIM, HEADS, value_projection=False, rope=True),
    "capped": lambda: ga.nn.DotProductAttention(DIM, 1, softcap=2.0, top_k=3),
    "gka": lambda: ga.nn.GaussianKernelAttention(DIM, HEADS),
    "gka, turned": lambda: ga.nn.GaussianKernelAttention(DIM, HEADS, rope=True),
    "gka, normalized": lambda: ga.nn.GaussianKernelAttention(DIM, HEADS, normalize=True),
    "krause": lambda: ga.nn.KrauseAttention(DIM, HEADS, top_k=3, rope=True),
    "one sigma": lambda: ga.nn.KrauseAttention(DIM, HEADS, sigma_per_head=False, kv_heads=1),
    "linear": lambda: ga.nn.LinearAttention(DIM, HEADS),
    "linear, turned": lambda: ga.nn.LinearAttention(DIM, HEADS, rope=True),
    "linear, eps": lambda: ga.nn.LinearAttention(DIM, HEADS, eps=0.3, bias=False),
    "consensus": lambda: ga.nn.SelfConsensus(DIM, HEADS, update="target", **FEW),
    "consensus, learned": lambda: ga.nn.SelfConsensus(
        DIM, HEADS, update="target", step_size="learned", trunk="separate", bias=False, **FEW
    ),
    "consensus, auto": lambda: ga.nn.SelfConsensus(
        DIM, HEADS, update="target", step_size="auto", edge_input="full", **FEW
    ),
}
GRAPHS = {
    "window": lambda: ga.causal_window_graph(N, 4),
    "complete": lambda: ga.complete_graph(N),
    "batch": lambda: ga.batch([ga.causal_graph(N - 4), ga.complete_graph(4)]),
    "list": lambda: ga.from_edge_index(torch.tensor([[0, 4, 2, 9, 9], [0, 0, 1, 5, 9]]), N, N),
    "moved": lambda: ga.causal_window_graph(N, 4).permute(torch.arange(N).flip(0)),
    "neighbors": lambda: ga.knn_graph(torch.arange(N).double().square()[:, None], k=3),
}
each_layer = pytest.mark.parametrize("name", LAYERS)
each_graph = pytest.mark.parametrize("graph", GRAPHS)


def layer_of(name, dtype=torch.float64):
    torch.manual_seed(0)
    return LAYERS[name]().to(dtype)


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


def by_messages(layer, x, graph):
    with ga.use_backend("reference"):
        return layer(x, graph)


@each_graph
@each_layer
@pytest.mark.parametrize("lead", [(), (2,), (2, 0), (1, 3)], ids=str)
def test_values_and_gradients_are_those_of_messages(name, graph, lead):
    layer, graph = layer_of(name), GRAPHS[graph]()
    x = tokens(*lead, N).requires_grad_()
    upstream = tokens(*lead, N).flip(-1)
    wanted = [x, *layer.parameters()]
    expected = by_messages(layer, x, graph)
    gradients = torch.autograd.grad(expected, wanted, upstream)
    for _ in range(2):  # the first finds out, the second knows
        out = layer(x, graph)
        torch.testing.assert_close(out, expected)
        for mine, other in zip(torch.autograd.grad(out, wanted, upstream), gradients, strict=True):
            torch.testing.assert_close(mine, other)
        with torch.no_grad():
            assert torch.equal(layer(x, graph), out)


@each_layer
@pytest.mark.parametrize("edges", [True, False])
def test_second_derivatives_are_right(name, edges):
    layer, graph = layer_of(name), ga.causal_window_graph(4, 2)
    if not edges:
        graph = ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 4)
    x = tokens(2, 4).requires_grad_()
    weight = layer.output_proj.weight
    assert torch.autograd.gradgradcheck(
        lambda x, _: layer(x, graph), (x, weight), atol=1e-4, fast_mode=True
    )


@each_layer
def test_few_tensors_may_ask_for_gradients(name):
    layer, graph = layer_of(name), GRAPHS["window"]()
    named = dict(layer.named_parameters())
    for asked in ("x", "output_proj.weight", "query_proj.weight", "value_proj.weight", "log_sigma"):
        if asked != "x" and asked not in named:
            continue
        layer.requires_grad_(False)
        x = tokens(N)
        leaf = x.requires_grad_() if asked == "x" else named[asked].requires_grad_()
        mine, other = (
            torch.autograd.grad(run(layer, x, graph).square().sum(), leaf)[0]
            for run in (lambda layer, x, graph: layer(x, graph), by_messages)
        )
        torch.testing.assert_close(mine, other)


@each_layer
def test_projections_of_somebody_else_are_read_as_they_are(name):
    """Features that lie apart, and hooks that change them."""

    class Apart(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).mT.contiguous().mT

    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(2, N)
    called = []
    for role in ("query_proj", "key_proj", "value_proj"):
        if getattr(layer, role, None) is not None:
            setattr(layer, role, Apart(getattr(layer, role)))
            getattr(layer, role).register_forward_hook(
                lambda module, given, out: called.append(module) or 2 * out
            )
    for _ in range(2):
        called.clear()
        out = layer(x, graph)
        hooked = len(called)
        assert len({*called}) == hooked  # once each
        torch.testing.assert_close(out, by_messages(layer, x, graph))
        assert len(called) == 2 * hooked


@pytest.mark.parametrize("name", ["dot", "turned", "krause", "linear"])
@pytest.mark.parametrize("left", ["query_proj", "key_proj", "value_proj", None])
def test_one_tensor_may_be_several_of_the_three(name, left):
    """Projections that give back their tokens: all gradients of these come together."""
    layer, graph = layer_of(name), GRAPHS["window"]()
    if name == "turned":
        layer.kv_heads = layer.heads
        layer.key_proj, layer.value_proj = (nn.Linear(DIM, DIM).double() for _ in range(2))
    for role in {"query_proj", "key_proj", "value_proj"} - {left}:
        setattr(layer, role, nn.Identity())
    x = torch.randn(2, 1, N, DIM, dtype=torch.float64).expand(2, 3, N, DIM).requires_grad_()
    wanted = [x, *layer.parameters()]
    out, expected = layer(x, graph), by_messages(layer, x, graph)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    for create_graph in (False, True):
        mine, other = (
            torch.autograd.grad(y, wanted, upstream, create_graph=create_graph, retain_graph=True)
            for y in (out, expected)
        )
        torch.testing.assert_close(mine, other)


def test_one_tensor_of_two_widths_is_refused():
    """One tensor of 16 features makes four heads of queries and two heads of keys, of 8 each."""
    layer, graph, x = layer_of("turned"), GRAPHS["window"](), tokens(N)
    layer.rotary, layer.query_proj, layer.key_proj = None, nn.Identity(), nn.Identity()
    for _ in range(2):
        with pytest.raises(ValueError, match="key must have 4 features like query, got 8"):
            layer(x, graph)


@pytest.mark.parametrize("name", ["dot", "linear"])
def test_projections_of_another_width_are_refused_after_right_ones(name):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N)
    layer(x, graph)
    layer.key_proj = nn.Linear(DIM, DIM // 2).double()
    with pytest.raises((ValueError, RuntimeError)) as mine:
        layer(x, graph)
    with pytest.raises((ValueError, RuntimeError)) as fresh:
        layer(x, copy.deepcopy(graph))
    assert str(mine.value) == str(fresh.value)


@each_layer
def test_a_projection_of_half_precision_ends_as_it_does_on_a_new_graph(name):
    layer, graph, x = layer_of(name, torch.float32), GRAPHS["window"](), tokens(N).float()
    layer(x, graph)
    layer.output_proj.register_forward_hook(lambda *given: given[-1] + 1)
    if hasattr(layer, "query_proj"):
        layer.query_proj.register_forward_hook(lambda *given: given[-1].bfloat16())

    def outcome(graph):
        try:
            return layer(x, graph)
        except (ValueError, RuntimeError) as error:
            return str(error)

    mine, fresh = outcome(graph), outcome(copy.deepcopy(graph))
    assert type(mine) is type(fresh)
    assert mine == fresh if isinstance(mine, str) else torch.equal(mine, fresh)


def replace_in_instance(layer, method):
    setattr(layer, method, lambda *given, **named: 1 / 0)


def replace_in_class(layer, method):
    layer.__class__ = type("Own", (type(layer),), {method: lambda self, *given, **named: 1 / 0})


@pytest.mark.parametrize("replace", [replace_in_instance, replace_in_class])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(
            ("turned", method)
            for method in (
                "message", "log_affinity", "aggregate", "fused", "mix", "project", "split",
                "rotate", "rotations", "prepare", "edge_arguments", "project_back",
                "forward_pass", "uses_propagate",
            )
        ),
        ("krause", "sigma"),
        *(("linear", method) for method in ("message", "fused", "mix", "project")),
        *(
            ("consensus", method)
            for method in (
                "message", "aggregate", "fused", "mix", "project", "states", "prepare", "split",
                "rotate", "rotations", "project_back", "rotate_back", "step_tensor",
                "uses_propagate", "checked_features", "applies_first_layer",
            )
        ),
    ],
)  # fmt: skip
def test_what_somebody_replaces_is_run(name, method, replace):
    """After plain calls, too; of a copy that goes on as before nothing changes."""
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N)
    expected = layer(x, graph)
    other = copy.deepcopy(layer)
    replace(layer, method)
    with pytest.raises(ZeroDivisionError):
        layer(x, graph)
    assert torch.equal(other(x, graph), expected)


def test_a_method_that_is_patched_in_the_class_is_run(monkeypatch):
    layer, graph, x = layer_of("dot"), GRAPHS["window"](), tokens(N)
    layer(x, graph)
    monkeypatch.setattr(ga.nn.DotProductAttention, "mix", lambda *given, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(x, graph)
    own = type("Own", (ga.nn.DotProductAttention,), {})(DIM, HEADS).double()
    with pytest.raises(ZeroDivisionError):
        own(x, graph)


@pytest.mark.parametrize("name", ["dot", "linear"])
def test_hooks_of_messages_are_run(name):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N)
    layer(x, graph)
    seen = []
    layer.register_message_forward_hook(lambda *given: seen.append(given))
    layer(x, graph)
    assert seen


@pytest.mark.parametrize(
    ("name", "attribute", "value", "message"),
    [
        ("krause", "top_k", True, "top_k"),
        ("krause", "top_k", 0, "top_k"),
        ("capped", "softcap", -1.0, "softcap"),
        ("dot", "backend", "triton", "triton"),
        ("dot", "backend", "fast", "backend"),
        ("linear", "eps", -1.0, "eps"),
        ("linear", "backend", "native", "native"),
        *(("krause", "top_k", value, "top_k") for value in ([3], np.array([3, 4]))),
        *(("capped", "softcap", value, "softcap") for value in ([3.0], np.array([3.0, 4.0]))),
        *((n, "eps", value, "eps") for n in ("gka", "linear") for value in ([3.0], None)),
        *((n, "eps", torch.ones(2), "eps") for n in ("gka", "linear")),
    ],
)
def test_options_that_are_changed_to_wrong_ones_are_refused(name, attribute, value, message):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N)
    layer(x, graph)
    setattr(layer, attribute, value)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            layer(x, graph)


@each_layer
def test_a_graph_on_another_device_knows_nothing_of_the_first(name):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N)
    layer(x, graph)
    other = graph.to("meta")
    assert graph._derived
    assert not other._derived
    with pytest.raises(ValueError, match="graph is on meta, but the tensors are on cpu"):
        layer(x, other)


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_numbers_of_other_libraries_are_taken_and_read_anew(make):
    for name, attribute in (("krause", "top_k"), ("capped", "softcap"), ("linear", "eps")):
        layer, graph, x = layer_of(name), GRAPHS["complete"](), tokens(N)
        number = make(2)
        setattr(layer, attribute, number)
        for _ in range(2):
            torch.testing.assert_close(layer(x, graph), layer(x, copy.deepcopy(graph)))
            number += 3


def test_true_is_not_taken_for_the_number_1_that_was_checked():
    layer, graph, x = layer_of("krause"), GRAPHS["window"](), tokens(N)
    layer.top_k = 1
    layer(x, graph)
    layer.top_k = True
    with pytest.raises(ValueError, match="top_k must be an integer"):
        layer(x, graph)


@each_layer
def test_wrong_tokens_are_refused_after_right_ones(name):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N)
    layer(x, graph)
    for wrong, message in (
        (x.float(), "dtype"),
        (x[:-1], "graph has 11 targets"),
        (x[..., :-1], "shape"),
        (x.long(), "floating-point"),
        (x.to("meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(wrong, graph)
    layer.float()
    with pytest.raises(ValueError, match="dtype"):
        layer(x, graph)
    assert layer(x.float(), graph).dtype == torch.float32


def test_options_that_are_changed_to_right_ones_count():
    layer, graph, x = layer_of("krause"), GRAPHS["complete"](), tokens(N)
    for top_k in (3, 1, None, 5):
        layer.top_k = top_k
        torch.testing.assert_close(layer(x, graph), by_messages(layer, x, graph))
    layer.rotary = ga.nn.RotaryEmbedding(DIM // HEADS, base=3.0)
    torch.testing.assert_close(layer(x, graph), by_messages(layer, x, graph))
    layer.attention_dropout = 0.999
    layer(x, graph)
    layer.eval()
    layer(x, graph)


def test_positions_that_are_changed_in_place_count():
    layer, graph, x = layer_of("turned"), GRAPHS["moved"](), tokens(N)
    before = layer(x, graph)
    graph.positions.mul_(3)
    expected = layer(x, graph, positions=3 * torch.arange(N).flip(0))
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(layer(x, graph), expected)


def test_a_list_of_edges_that_is_changed_in_place_counts():
    graph, x = ga.from_edge_index(torch.tensor([[0, 1], [0, 1]]), 2, 2), tokens(2)
    for name in ("dot", "linear"):
        layer = layer_of(name)
        layer(x, graph)
        graph.listed[0, 0] = 1 - graph.listed[0, 0]
        torch.testing.assert_close(layer(x, graph), by_messages(layer, x, graph))


@each_layer
def test_later_calls_of_other_kinds_give_the_same(name):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(2, N)
    expected = layer(x, graph)
    valid = torch.ones(N, dtype=torch.bool)
    for options in (
        {"valid": valid},
        {"positions": torch.arange(N)},
        {"return_attention_weights": True},
        {"context": x.clone()},
    ):
        if "consensus" in name and "return_attention_weights" in options:
            continue
        out = layer(x, graph, **options)
        torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, expected)
    torch.testing.assert_close(layer(x, graph.edge_index), expected)
    torch.testing.assert_close(torch.func.vmap(lambda x: layer(x, graph))(x), expected)
    torch.testing.assert_close(
        torch.func.functional_call(layer, dict(layer.named_parameters()), (x, graph)), expected
    )
    torch.func.jvp(lambda x: layer(x, graph), (x,), (x,))
    torch.func.grad(lambda x: layer(x, graph).sum())(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer.float()(x.float(), graph)


class Over(nn.Module):
    """A layer with its graph."""

    def __init__(self, layer, graph):
        super().__init__()
        self.layer, self.graph = layer, graph

    def forward(self, x):
        return self.layer(x, self.graph)


@pytest.mark.parametrize("trains", [False, True])
@each_layer
def test_a_traced_layer_gives_what_the_layer_gives(name, trains):
    """A traced layer gives its outputs for other tokens, and after its parameters have changed."""
    layer = Over(layer_of(name), GRAPHS["window"]()).requires_grad_(trains)
    layer(tokens(2, N))
    traced = torch.jit.trace(layer, tokens(2, N), check_trace=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.1)
    other = tokens(2, N).flip(-2)
    torch.testing.assert_close(traced(other), layer(other))


@each_layer
def test_nan_that_nobody_sees_stays_where_it_is(name):
    """Forward and in gradients: token 5 sees itself, and nobody else sees it."""
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[5], mask[:, 5] = False, False
    mask[5, 5] = True
    packed = ga.batch([ga.causal_window_graph(5, 3), ga.complete_graph(1), ga.causal_graph(N - 6)])
    graphs = [(ga.from_mask(mask), 5), (packed, 5)]
    if "consensus" not in name:  # 0 times an edge's matrix that is NaN is NaN
        graphs.append((ga.causal_window_graph(N, 4), N - 1))
    layer = layer_of(name)
    for graph, unseen in graphs:
        x, rest = tokens(N), torch.arange(N) != unseen
        expected = layer(x, graph)[rest]
        x[unseen] = torch.nan
        x.requires_grad_()
        out = layer(x, graph)
        assert torch.equal(out[rest], expected)
        out[rest].square().sum().backward()
        assert x.grad[rest].isfinite().all()


@each_layer
def test_a_gradient_that_is_nan_reaches_what_its_row_saw_alone(name):
    """The last row sees the last four tokens."""
    graph, layer, x = ga.causal_window_graph(N, 4), layer_of(name), tokens(N).requires_grad_()
    out = layer(x, graph)
    upstream = torch.ones_like(out)
    (clean,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    upstream[-1] = torch.nan
    (spoilt,) = torch.autograd.grad(out, x, upstream)
    torch.testing.assert_close(spoilt[:-4], clean[:-4], rtol=1e-12, atol=1e-12)
    assert spoilt[-1].isnan().all()


@each_layer
def test_inference_first_and_training_then(name):
    layer, graph = layer_of(name), GRAPHS["window"]()
    with torch.inference_mode():
        first = layer(tokens(N), graph)
    out = layer(tokens(N).requires_grad_(), graph)
    out.sum().backward()
    assert torch.equal(first, out)


@each_graph
@pytest.mark.parametrize("name", ["turned", "linear"])
def test_fake_tensors_first_and_real_ones_then(name, graph):
    """Fake tensors have no memory, so nothing derived from them may be kept with a graph."""
    layer, graph = layer_of(name), GRAPHS[graph]()
    expected = by_messages(layer, tokens(N), copy.deepcopy(graph))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(tokens(N))
        for look in (
            lambda: layer(x, graph),
            lambda: (graph.positions, graph.source_positions),
            lambda: graph.edge_index,
            lambda: graph.rowptr,
            lambda: graph.transpose_permutation(),
            lambda: graph.transpose().edge_index,
        ):
            with contextlib.suppress(RuntimeError):  # what reads numbers does not run
                look()
    torch.testing.assert_close(layer(tokens(N), graph), expected)
    source, target = graph.transpose().edge_index[:, graph.transpose().transpose_permutation()]
    assert graph.edge_index.tolist() == [target.tolist(), source.tolist()]


@each_layer
def test_results_may_be_written_to(name):
    layer, graph = layer_of(name), GRAPHS["window"]()
    layer.output_proj = nn.Identity()
    layer.output_proj.weight = torch.empty(0, dtype=torch.float64)
    x = tokens(2, N).requires_grad_()
    out = layer(x, graph)
    out.add_(1)
    if not isinstance(layer, ga.nn.LinearAttention | ga.nn.SelfConsensus):  # others read the output
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()
        assert x.grad.isfinite().all()


@each_layer
def test_threads_share_a_graph(name):
    layer, graph = layer_of(name), GRAPHS["window"]()
    inputs = [tokens(N) * k for k in range(1, 5)]
    expected = [layer(x, copy.deepcopy(graph)).detach() for x in inputs]
    wrong = []

    def work(k):
        for _ in range(20):
            x = inputs[k].clone().requires_grad_()
            out = layer(x, graph)
            torch.autograd.grad(out.sum(), x)
            if not torch.equal(out, expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_another_thread_drops_in_between_is_still_given():
    class Dropping(dict):
        """Forgets all as soon as somebody has looked for one or put one in."""

        def __contains__(self, key):
            is_there = super().__contains__(key)
            self.clear()
            return is_there

        def __setitem__(self, key, value):
            pass

    graph = GRAPHS["window"]()
    graph._derived = Dropping()
    expected = by_messages(layer_of("dot"), tokens(N), graph)
    torch.testing.assert_close(layer_of("dot")(tokens(N), graph), expected)


@pytest.mark.long
def test_a_graph_keeps_what_few_kinds_of_calls_share_and_no_layer():
    graph = ga.causal_window_graph(N, 4)
    for batch in range(1, 60):
        layer_of("dot")(tokens(batch, N), graph)
    assert len(graph._derived) <= 32
    layer = layer_of("krause")
    layer(tokens(N), graph)
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None
    for same in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), copy.copy(graph)):
        assert not same._derived
        assert torch.equal(layer_of("dot")(tokens(N), same), layer_of("dot")(tokens(N), graph))


@each_layer
def test_hooks_of_saved_tensors_are_asked_for_them_once(name):
    layer, graph, x = layer_of(name), GRAPHS["window"](), tokens(N).requires_grad_()
    layer(x, graph)
    packed, asked = [], []

    def pack(t):
        packed.append(t)
        return len(packed) - 1

    def unpack(k):
        asked.append(k)
        return packed[k]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = layer(x, graph)
    out.sum().backward()
    assert len({*asked}) == len(asked)
    torch.testing.assert_close(
        x.grad, torch.autograd.grad(by_messages(layer, x, graph).sum(), x)[0]
    )


@pytest.mark.parametrize("graph", ["path", "batch", "list"])
@pytest.mark.parametrize("step_size", [0.1, "auto", "learned"])
def test_energy_moves_both_ends_of_an_edge(step_size, graph):
    graph = {
        "path": lambda: ga.window_path_graph(N, 2),
        "batch": lambda: ga.batch([ga.window_path_graph(N - 4, 2), ga.complete_graph(4)]),
        "list": lambda: ga.knn_graph(torch.arange(N).double().square()[:, None], k=3),
    }[graph]()
    torch.manual_seed(0)
    layer = ga.nn.SelfConsensus(DIM, HEADS, step_size=step_size, **FEW).double()
    x, upstream = tokens(2, N).requires_grad_(), tokens(2, N).flip(-1)
    wanted = [x, *layer.parameters()]
    expected = by_messages(layer, x, graph)
    gradients = torch.autograd.grad(expected, wanted, upstream)
    out = layer(x, graph)
    torch.testing.assert_close(out, expected)
    for mine, other in zip(torch.autograd.grad(out, wanted, upstream), gradients, strict=True):
        torch.testing.assert_close(mine, other)


# Only messages call `edge_matrix`.
@pytest.mark.parametrize("method", ["target_hidden", "source_hidden", "by_group", "second_layer"])
def test_what_somebody_replaces_of_an_edge_network_is_run(method, monkeypatch):
    """Methods of edge networks may be replaced on an instance, in a subclass or in the class."""
    graph, x = GRAPHS["window"](), tokens(N)
    for replace in (
        lambda network, fails: setattr(network, method, fails),
        lambda network, fails: setattr(
            network, "__class__", type("Own", (EdgeNetwork,), {method: fails})
        ),
        lambda _, fails: monkeypatch.setattr(EdgeNetwork, method, fails),
    ):
        layer = layer_of("consensus")
        layer(x, graph)
        replace(layer.edge_net, lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x, graph)


def test_energy_over_edges_that_all_point_backward_still_warns():
    graph = ga.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4, 4)
    layer = ga.nn.SelfConsensus(DIM, HEADS, **FEW).double()
    with pytest.warns(UserWarning, match="all edges of this edge list point backward"):
        layer(tokens(4), graph)


def test_hooks_of_first_layers_and_their_changes_count():
    layer, graph, x = layer_of("consensus"), GRAPHS["window"](), tokens(N)
    before = layer(x, graph)
    handle = layer.edge_net.target.register_forward_hook(lambda *given: given[-1] + 1)
    hooked = layer(x, graph)
    torch.testing.assert_close(hooked, by_messages(layer, x, graph))
    assert not torch.equal(hooked, before)
    handle.remove()
    with torch.no_grad():
        layer.edge_net.shear.mul_(2)
    torch.testing.assert_close(layer(x, graph), by_messages(layer, x, graph))
    layer.edge_net.alpha = nn.Parameter(layer.edge_net.alpha[:, :-1].detach())
    with pytest.raises(ValueError, match=r"edge_network\.alpha must have shape"):
        layer(x, graph)
