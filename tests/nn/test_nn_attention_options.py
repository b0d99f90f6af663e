"""Sinks, dropout of weights and softcap as options of the attention layers."""

import copy
import pickle

import pytest
import torch
from nn_by_hand import DIM, HEADS
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import graphattn as ga
from graphattn.diagnostics.hidden.changes import disabled_parameters
from graphattn.ops.dropout import draw_seed, dropout_of_call

KINDS = ("DotProductAttention", "KrauseAttention", "GaussianKernelAttention")
EVERY = pytest.mark.parametrize("kind", KINDS)


def made(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = getattr(ga.nn, kind)(DIM, HEADS, **options).to(dtype)
    if layer.sink is not None:
        with torch.no_grad():
            layer.sink.copy_(torch.linspace(-1, 1.5, HEADS))
    return layer


def tokens(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Sinks.


@EVERY
def test_a_sink_is_a_parameter_per_head_that_starts_at_zero_and_never_decays(kind):
    layer = getattr(ga.nn, kind)(DIM, HEADS, sink=True)
    assert torch.equal(layer.sink, torch.zeros(HEADS))
    layer.sink.data.fill_(3.0)
    layer.reset_parameters()
    assert torch.equal(layer.sink, torch.zeros(HEADS))
    assert getattr(ga.nn, kind)(DIM, HEADS).sink is None
    decays, free = ga.train.parameter_groups(layer)
    assert any(p is layer.sink for p in free["params"])
    assert not any(p is layer.sink for p in decays["params"])


@EVERY
def test_diagnostics_and_certificates_know_that_rows_lack_what_a_sink_takes(kind):
    graph, x = ga.causal_graph(9), tokens(9)
    certificate = ga.spectral.certify(made(kind, sink=True), x, graph=graph)
    fact = certificate["rows are averages"]
    assert fact.status == "not applicable"
    assert "a sink" in fact.statement
    assert "eigenvalue 1" not in [f.name for f in certificate.facts]
    assert certificate.sound is None  # no theorem is left
    layer = made(kind, sink=True)
    with ga.diagnostics.record_attention(layer) as records:
        layer(x, graph)
    (record,) = records
    assert torch.equal(record.weights, layer(x, graph, return_attention_weights=True)[1])
    assert (ga.diagnostics.sink_share(record.weights, graph) < 1).all()
    entropy = ga.diagnostics.attention_entropy(record.weights, graph)
    layer.sink.data.fill_(-torch.inf)  # the shares among the tokens stay
    _, plain = layer(x, graph, return_attention_weights=True)
    torch.testing.assert_close(entropy, ga.diagnostics.attention_entropy(plain, graph))


# Dropout of weights.


@EVERY
def test_weights_are_dropped_in_training_only(kind):
    graph, x = ga.causal_graph(30), tokens(2, 30)
    layer, plain = made(kind, attention_dropout=0.5), made(kind)
    assert torch.equal(layer.eval()(x, graph), plain(x, graph))
    layer.train()
    one, two = layer(x, graph), layer(x, graph)
    assert not torch.equal(one, two)
    torch.manual_seed(4)
    one = layer(x, graph)
    torch.manual_seed(4)
    assert torch.equal(layer(x, graph), one)


@EVERY
def test_message_and_operation_drop_the_same(kind):
    graph, x = ga.window_path_graph(12, 3), tokens(2, 12)
    options = {"attention_dropout": 0.4, "sink": True}
    if kind != "GaussianKernelAttention":
        options["top_k"] = 4
    results = {}
    for backend in ("reference", "structured"):
        layer, leaf = made(kind, backend=backend, **options), x.clone().requires_grad_()
        torch.manual_seed(7)
        y = layer(leaf, graph)
        y.square().sum().backward()
        results[backend] = y, leaf.grad, *(p.grad for p in layer.parameters())
    for a, b in zip(results["reference"], results["structured"], strict=True):
        torch.testing.assert_close(a, b)


@EVERY
@pytest.mark.parametrize("backend", ["reference", "structured"])
def test_the_output_of_training_averages_to_that_of_evaluation(kind, backend):
    graph, x = ga.causal_graph(8), tokens(500, 8)[:1].expand(4000, 8, DIM)
    layer = made(kind, attention_dropout=0.3, backend=backend)
    layer.output_proj = torch.nn.Identity()  # linear anyway
    layer.check_dtype = lambda name, given: None
    draws = layer(x, graph)
    error = (draws.mean(0) - layer.eval()(x[0], graph)) / (draws.std(0) / 4000**0.5)
    assert error.abs().max() < 5


@EVERY
def test_asking_for_weights_changes_no_draw_and_gives_those_of_no_draw(kind):
    graph, x = ga.causal_graph(20), tokens(20)
    layer = made(kind, attention_dropout=0.5)
    torch.manual_seed(2)
    plain, state = layer(x, graph), torch.get_rng_state()
    torch.manual_seed(2)
    y, weights = layer(x, graph, return_attention_weights=True)
    assert torch.equal(y, plain)
    assert torch.equal(torch.get_rng_state(), state)
    _, expected = layer.eval()(x, graph, return_attention_weights=True)
    assert torch.equal(weights, expected)


@EVERY
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_steps_drop_nothing_in_training_mode_either(kind, backend):
    layer, x = made(kind, attention_dropout=0.5, backend=backend), tokens(2, 20)
    assert layer.training
    expected = copy.deepcopy(layer).eval()(x, ga.causal_graph(20))
    for pieces in ([20], [1] * 20, [7, 1, 12]):
        cache = layer.init_cache(2, window=None)
        rows = [layer.step(part, cache) for part in x.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(rows, 1), expected)
    assert layer.training


@EVERY
@pytest.mark.parametrize("backend", ["structured", "reference"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_a_layer_drops_the_same_again(kind, reentrant, backend):
    graph = ga.causal_window_graph(30, 5)
    layer = made(kind, attention_dropout=0.4, backend=backend)
    results = []
    for call in (layer, lambda *given: checkpoint(layer, *given, use_reentrant=reentrant)):
        x = tokens(2, 30).requires_grad_()
        layer.zero_grad()
        torch.manual_seed(5)
        y = call(x, graph)
        y.square().sum().backward()
        results.append((y, x.grad, *(p.grad.clone() for p in layer.parameters())))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Sum(ga.nn.KrauseAttention):
    """Adds up what it sees."""

    def message(self, value_j):
        return value_j


def test_messages_of_somebody_are_dropped_too():
    graph, x = ga.causal_graph(12), tokens(12)
    layer, plain = made_sum(attention_dropout=0.3), made_sum()
    torch.manual_seed(5)
    dropped = layer(x, graph)
    torch.manual_seed(5)
    dropout = dropout_of_call(0.3, draw_seed(None, x.device), torch.empty(12, HEADS, 1), graph)
    kept = dropout.kept_edges(*graph.edge_index, torch.Size())
    value = plain.split(plain.value_proj(x), HEADS)
    source, target = graph.edge_index
    total = torch.zeros_like(value).index_add_(0, target, value[source] * kept[..., None] / 0.7)
    torch.testing.assert_close(dropped, plain.output_proj(total.flatten(-2)))
    torch.testing.assert_close(layer.eval()(x, graph), plain(x, graph))


def made_sum(**options):
    torch.manual_seed(0)
    return Sum(DIM, HEADS, **options).double()


def test_an_aggregate_that_cannot_drop_is_refused():
    class Twice(ga.nn.KrauseAttention):
        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return 2 * super().aggregate(inputs, index, ptr, dim_size)

    graph, x = ga.causal_graph(5), tokens(5)
    layer = Twice(DIM, HEADS, attention_dropout=0.1).double()
    with pytest.raises(ValueError, match=r"attention_dropout = 0.1 .* aggregate\(\) of Twice"):
        layer(x, graph)
    layer.eval()(x, graph)


def test_a_log_affinity_of_somebody_is_capped_beside_a_sink_and_dropped():
    class Own(ga.nn.DotProductAttention):
        def log_affinity(self, query_i, key_j):
            return 2 * super().log_affinity(query_i, key_j)

    graph, x = ga.causal_graph(9), tokens(9)
    torch.manual_seed(0)
    doubled = Own(DIM, HEADS, sink=True, softcap=0.5, attention_dropout=0.3).double()
    like = ga.nn.DotProductAttention(DIM, HEADS, sink=True, softcap=0.5, attention_dropout=0.3)
    like = like.double()
    like.load_state_dict(dict(doubled.state_dict()))
    with torch.no_grad():
        for p in (like.query_proj.weight, like.query_proj.bias):
            p.mul_(2)
    torch.manual_seed(1)
    mine, weights = doubled(x, graph, return_attention_weights=True)
    torch.manual_seed(1)
    theirs, expected = like(x, graph, return_attention_weights=True)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(weights, expected)


# All of them.


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.long
@EVERY
def test_a_compiled_layer_draws_anew_in_every_call(kind, fresh_compiler):
    graph, x = ga.causal_graph(24), tokens(2, 24, dtype=torch.float32)
    options = {"softcap": 5.0} if kind == "DotProductAttention" else {}
    layer = made(kind, torch.float32, attention_dropout=0.4, sink=True, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    one, two = compiled(x, graph), compiled(x, graph)
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    mine = compiled(x, graph)
    torch.manual_seed(3)
    theirs = layer(x, graph)
    torch.testing.assert_close(mine, theirs)
    for a, b in zip(
        torch.autograd.grad(mine.square().sum(), list(layer.parameters())),
        torch.autograd.grad(theirs.square().sum(), list(layer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@EVERY
def test_options_survive_config_copies_files_and_pickles(kind, tmp_path):
    options = {"attention_dropout": 0.25, "sink": True}
    if kind == "DotProductAttention":
        options["softcap"] = 30.0
    layer = made(kind, **options)
    assert {name: layer.config[name] for name in options} == options
    for name, value in options.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        assert f"{name}={shown}" in repr(layer)
    graph, x = ga.causal_graph(9), tokens(9)
    layer.eval()
    ga.save(layer, tmp_path)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), ga.load(tmp_path)):
        assert torch.equal(twin.eval()(x, graph), layer(x, graph))
        assert twin.config == layer.config
    assert "sink" not in repr(made(kind))


def test_weights_of_another_softcap_do_not_load_and_dropout_is_no_obstacle():
    saved = made("DotProductAttention", softcap=30.0, attention_dropout=0.1).state_dict()
    made("DotProductAttention", softcap=30.0).load_state_dict(saved)
    with pytest.raises(
        RuntimeError, match=r"saved with softcap=30.0, but this one has softcap=None"
    ):
        made("DotProductAttention").load_state_dict(saved)
    with pytest.raises(RuntimeError, match="sink"):
        made("DotProductAttention", sink=True, softcap=30.0).load_state_dict(saved)


@EVERY
def test_half_precision_and_autocast(kind):
    graph, x = ga.causal_graph(12), tokens(2, 12)
    exact = made(kind, sink=True)
    half = copy.deepcopy(exact).bfloat16()
    y = half(x.bfloat16(), graph)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact(x, graph), rtol=0.05, atol=0.05)
    single = copy.deepcopy(exact).float()
    single.attention_dropout = 0.5
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        a = single(x.float(), graph)
        a.float().square().sum().backward()
    assert single.sink.grad.isfinite().all()


@EVERY
def test_a_layer_on_meta_gets_its_sink_when_it_is_made(kind):
    with torch.device("meta"):
        layer = getattr(ga.nn, kind)(DIM, HEADS, sink=True)
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.sink, torch.zeros(HEADS))


@EVERY
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention_dropout": 1.0}, r"attention_dropout must be in \[0, 1\), got 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout must be a finite number >= 0"),
        ({"sink": 1}, "sink must be True or False, got 1"),
        ({"sink": torch.zeros(HEADS)}, "sink must be True or False"),
    ],
    ids=str,
)
def test_options_that_are_refused(kind, options, says):
    with pytest.raises(ValueError, match=says):
        getattr(ga.nn, kind)(DIM, HEADS, **options)


def test_a_softcap_is_of_dot_products_and_positive():
    with pytest.raises(ValueError, match="softcap must be a finite number > 0, got 0"):
        ga.nn.DotProductAttention(DIM, HEADS, softcap=0.0)
    for kind in KINDS[1:]:
        with pytest.raises(TypeError, match="has no argument 'softcap'"):
            getattr(ga.nn, kind)(DIM, HEADS, softcap=5.0)


def test_the_step_kernel_refuses_a_softcap_by_name():
    layer = ga.nn.DotProductAttention(DIM, HEADS, softcap=5.0, backend="triton")
    with pytest.raises(ValueError, match="its step kernel has no softcap"):
        layer.init_cache(2, window=8)


@pytest.mark.long
@EVERY
def test_a_compiled_layer_with_dropout_is_compiled_twice_at_most(kind, fresh_compiler):
    layer = made(kind, torch.float32, attention_dropout=0.4, sink=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (12, 17, 40):
        x, graph = tokens(2, n, dtype=torch.float32), ga.causal_window_graph(n, 5)
        torch.manual_seed(n)
        mine = compiled(x, graph)
        torch.manual_seed(n)
        torch.testing.assert_close(mine, layer(x, graph))
    assert counter.frame_count <= 2


@EVERY
def test_a_layer_without_its_weights_has_the_sink_of_the_start(kind):
    layer = made(kind, sink=True)
    disabled = disabled_parameters(layer, {"": layer}, ())
    assert torch.equal(disabled["sink"], torch.zeros(HEADS).double())


def test_non_contiguous_tokens_and_grouped_heads_drop_as_contiguous_ones():
    graph = ga.window_path_graph(14, 3)
    layer = made("DotProductAttention", attention_dropout=0.3, sink=True, kv_heads=2)
    x = tokens(2, 14)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.manual_seed(1)
    y = layer(x, graph)
    torch.manual_seed(1)
    torch.testing.assert_close(layer(strided, graph), y)
