"""Linear attention is its formula on every graph, and its sums forget nothing in generation."""

import copy
import math
import pickle

import pytest
import torch
from nn_by_hand import rotate
from nn_steps import causal, stream
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import graphattn as ga
from graphattn.ops.linear_attention.operators import linear_sums
from graphattn.ops.linear_attention.sums import sums_over_graph

DIM, HEADS = 12, 3
OPTIONS = [
    {},
    {"bias": False, "eps": 0.3},
    {"rope": True},
    {"kv_heads": 1},
    {"kv_heads": 1, "rope": ga.nn.RotaryEmbedding(4, base=50.0), "eps": 1e-6},
]
GRAPHS = {
    "complete": lambda: ga.complete_graph(40),
    "everyone else": lambda: ga.complete_graph(40, self_loops=False),
    "causal": lambda: ga.causal_graph(150),
    "causal transposed": lambda: ga.causal_graph(150).transpose(),
    "window": lambda: ga.window_path_graph(70, 3),
    "wide window": lambda: ga.window_path_graph(150, 20, self_loops=True),
    "causal window": lambda: ga.causal_window_graph(70, 5),
    "long causal window": lambda: ga.causal_window_graph(200, 67),
    "rows of a window": lambda: ga.causal_window_graph(200, 67).targets(70, 190)[0],
    "causal window with a past": lambda: ga.causal_window_graph(30, 9, past=17),
    "causal with a past": lambda: ga.causal_graph(30, past=80),
    "blocks": lambda: ga.block_window_graph(47, 8, shift=3),
    "dilated": lambda: ga.dilated_window_graph(40, 2, 3),
    "cycle": lambda: ga.window_cycle_graph(30, 2),
    "grid": lambda: ga.grid_window_graph(5, 6, 1),
    "knn": lambda: ga.knn_graph(torch.randn(40, 2, generator=torch.Generator().manual_seed(1)), 4),
    "bipartite": lambda: ga.bipartite_complete_graph(9, 33),
    "empty rows": lambda: ga.from_edge_index(torch.tensor([[0, 3, 3], [1, 1, 5]]), 9),
    "batch": lambda: ga.batch(
        [
            ga.complete_graph(5),
            ga.complete_graph(5),
            ga.causal_graph(70),
            ga.causal_window_graph(9, 3),
            ga.causal_graph(1),
        ]
    ),
}


def make(seed=0, **options):
    torch.manual_seed(seed)
    layer = ga.nn.LinearAttention(DIM, HEADS, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def phi(z):
    return torch.nn.functional.elu(z) + 1


def loop(layer, x, graph, context=None, valid=None):
    """The definition, one target, head and source after the other; x [N, dim]."""
    context = x if context is None else context
    base = None if layer.rotary is None else layer.rotary.base
    H, Hk = layer.heads, layer.kv_heads
    query = phi(layer.query_proj(x)).view(len(x), H, -1)
    key = phi(layer.key_proj(context)).view(len(context), Hk, -1)
    value = layer.value_proj(context).view(len(context), Hk, -1)
    turned_query = rotate(query, graph.positions, base)
    turned_key = rotate(key, graph.source_positions, base)
    mask = graph.to_mask().tolist()
    mixed = torch.zeros_like(query)
    for i in range(len(x)):
        seen = [j for j in range(len(context)) if mask[i][j]]
        if valid is not None:
            seen = [j for j in seen if valid[i] and valid[j]]
        for h in range(H if seen else 0):
            g = h // (H // Hk)
            below = layer.eps + sum(query[i, h] @ key[j, g] for j in seen)
            mixed[i, h] = (
                sum((turned_query[i, h] @ turned_key[j, g]) * value[j, g] for j in seen) / below
            )
    return layer.output_proj(mixed.flatten(1))


def tokens_of(graph, *batch, seed=1):
    """x, and what is seen where that is something else."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [graph.num_targets] if graph.has_same_tokens else [graph.num_targets, graph.num_sources]
    return [torch.randn(*batch, n, DIM, generator=generator, dtype=torch.float64) for n in sizes]


def run(layer, tokens, graph, **keywords):
    return layer(tokens[0], graph, *tokens[1:], **keywords)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_layer_is_its_formula(name, options):
    graph, layer = GRAPHS[name](), make(**options)
    tokens = tokens_of(graph)
    with torch.no_grad():
        # A loop over pairs: the last rows of a long sequence are as good as all.
        rows = range(max(0, graph.num_targets - 12), graph.num_targets)
        part, seen = graph.targets(rows.start, rows.stop)
        context = tokens[-1][seen.start : seen.stop]
        expected = loop(layer, tokens[0][rows.start : rows.stop], part, context)
        out = run(layer, tokens, graph)[rows.start : rows.stop]
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("options", OPTIONS[:4:2], ids=str)
def test_sums_messages_and_the_list_of_edges_give_the_same_and_the_same_gradients(name, options):
    graph, layer = GRAPHS[name](), make(**options)
    tokens = [x.requires_grad_() for x in tokens_of(graph, 2)]
    listed = ga.from_edge_index(graph.edge_index, graph.num_targets, graph.num_sources)
    d_out = torch.randn(2, graph.num_targets, DIM, dtype=torch.float64)
    positions = graph.positions, graph.source_positions
    results = []
    for way in ("sums", "messages", "edges"):
        here = listed if way == "edges" else graph
        given = tokens if graph.has_same_tokens else [tokens[0], tokens[-1]]
        with ga.use_backend("reference" if way == "messages" else "auto"):
            y = run(layer, given, here, positions=positions)
        results.append([y, *torch.autograd.grad(y, [*tokens, *layer.parameters()], d_out)])
    for others in results[1:]:
        for mine, theirs in zip(results[0], others, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["complete", "causal", "window", "knn", "batch"])
def test_padding_is_no_source_and_what_it_holds_is_not_read(name):
    graph, layer = GRAPHS[name](), make(rope=True)
    (x,) = tokens_of(graph)
    valid = torch.rand(len(x), generator=torch.Generator().manual_seed(2)) < 0.7
    spoilt = x.masked_fill(~valid[:, None], torch.nan)
    out = layer(spoilt, graph, valid=valid)
    assert torch.equal(out, layer(x, graph, valid=valid))
    assert torch.equal(out[~valid], layer.output_proj.bias.expand_as(out[~valid]))
    rows = range(len(x) - 10, len(x))
    part, seen = graph.targets(rows.start, rows.stop)
    by_edge = ga.from_edge_index(graph.edge_index, len(x))
    kept = valid[by_edge.edge_index].all(0)
    cut = ga.from_edge_index(by_edge.edge_index[:, kept], len(x))
    torch.testing.assert_close(
        out[valid], layer(x, cut, positions=graph.positions)[valid], rtol=1e-11, atol=1e-12
    )
    assert part.num_targets == 10
    assert len(seen) > 0


def test_a_row_without_edges_is_exactly_zero_and_has_a_gradient():
    layer = make(bias=False)
    graph = GRAPHS["empty rows"]()
    (x,) = tokens_of(graph)
    x.requires_grad_()
    y = layer(x, graph)
    empty = graph.in_degree() == 0
    assert bool((y[empty] == 0).all())
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert bool(gradient.isfinite().all())
    assert bool((gradient[8] == 0).all())  # sees nobody, and nobody sees it


def test_features_stay_exact_far_below_zero_where_elu_plus_one_is_zero():
    z = torch.tensor([-80.0, -20.0, -1.0, 0.0, 0.5], requires_grad=True)
    features = ga.elu_features(z)
    torch.testing.assert_close(features, torch.where(z > 0, z + 1, z.exp()), rtol=1e-6, atol=0)
    assert float(phi(z.detach())[1]) == 0
    (gradient,) = torch.autograd.grad(features.sum(), z)
    torch.testing.assert_close(gradient, torch.where(z > 0, 1.0, z.exp()), rtol=1e-6, atol=0)
    layer = ga.nn.LinearAttention(4, 1)
    with torch.no_grad():
        layer.query_proj.bias.fill_(-30)  # every feature is about e^-30
    x = torch.randn(5, 4)
    _, weights = layer(x, ga.complete_graph(5), return_attention_weights=True)
    torch.testing.assert_close(weights.view(5, 5).sum(1), torch.ones(5))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_are_what_the_values_are_averaged_by(options):
    graph, layer = GRAPHS["knn"](), make(**options)
    (x,) = tokens_of(graph, 2)
    y, weights = layer(x, graph, return_attention_weights=True)
    source, target = graph.edge_index
    value = layer.value_proj(x).view(2, 40, layer.kv_heads, 4)
    value = value.repeat_interleave(HEADS // layer.kv_heads, -2)
    mixed = torch.zeros(2, 40, HEADS, 4, dtype=torch.float64)
    mixed.index_add_(1, target, weights[..., None] * value[:, source])
    torch.testing.assert_close(y, layer.output_proj(mixed.flatten(-2)), rtol=1e-11, atol=1e-12)
    if layer.rotary is None and layer.eps == 0:
        sums = torch.zeros(2, 40, HEADS, dtype=torch.float64).index_add_(1, target, weights)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        assert bool((weights > 0).all())


def test_rotation_turns_the_numerator_alone():
    """RoFormer, Eq. 19: where all values are one, they come back as numerator / denominator."""
    layer = make(rope=True)
    with torch.no_grad():
        layer.value_proj.weight.zero_()
        layer.value_proj.bias.fill_(1)
    graph = ga.complete_graph(7)
    (x,) = tokens_of(graph)
    _, weights = layer(x, graph, return_attention_weights=True)
    sums = weights.view(7, 7, HEADS).sum(1)
    assert float((sums - 1).detach().abs().max()) > 1e-3
    y = layer(x, graph)
    expected = layer.output_proj(sums[..., None].expand(7, HEADS, 4).flatten(1))
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    # By relative positions alone, as rotation has it.
    torch.testing.assert_close(y, layer(x, graph, positions=torch.arange(7) + 50))


@pytest.mark.parametrize("name", ["complete", "causal with a past", "causal window", "knn"])
def test_gradients_are_those_of_finite_differences_twice_too(name):
    small = {
        "complete": lambda: ga.bipartite_complete_graph(3, 4),
        "causal with a past": lambda: ga.causal_graph(3, past=1),
        "causal window": lambda: ga.causal_window_graph(4, 2),
        "knn": lambda: ga.from_edge_index(torch.tensor([[0, 2, 1], [1, 1, 0]]), 3),
    }[name]()
    q, k, v = (
        torch.rand(1, n, 2, 2, dtype=torch.float64, requires_grad=True)
        for n in (small.num_targets, small.num_sources, small.num_sources)
    )

    def call(q, k, v):
        return ga.linear_attention(q, k, v, small, rotated=(q - 0.5, k.square()), eps=0.1)

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v))


@pytest.mark.parametrize("name", ["complete", "knn"])
def test_tokens_in_another_order_give_outputs_in_that_order(name):
    graph, layer = GRAPHS[name](), make()
    (x,) = tokens_of(graph, 2)
    order = torch.randperm(40)
    place = order.argsort()
    moved = ga.from_edge_index(place[graph.edge_index], 40)
    out = layer(x[:, order], moved)
    torch.testing.assert_close(out, layer(x, graph)[:, order], rtol=1e-11, atol=1e-12)


def test_packed_sequences_are_the_sequences_one_by_one():
    layer = make(rope=True)
    graphs = [ga.causal_graph(80), ga.complete_graph(7), ga.complete_graph(7), ga.causal_graph(3)]
    parts = [torch.randn(g.num_tokens, DIM, dtype=torch.float64) for g in graphs]
    together = layer(torch.cat(parts), ga.batch(graphs)).split([len(x) for x in parts])
    for x, graph, out in zip(parts, graphs, together, strict=True):
        torch.testing.assert_close(out, layer(x, graph), rtol=1e-11, atol=1e-12)


def test_no_matrix_per_token_is_ever_made(monkeypatch):
    """A causal graph of N tokens and D features: tensors of O(N D) numbers, none of N D^2."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    N, D = 2048, 64
    q, k, v = (torch.rand(1, N, D) for _ in range(3))
    with Watch():
        sums_over_graph(q, k, v, ga.causal_graph(N), transposed=False)
    assert largest <= 2 * N * D


# Numbers of fewer bits, other devices, copies.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_up_in_float32(dtype):
    """20,000 terms of 1 and a bit: bfloat16 would stop counting at 256."""
    N = 20_000
    q = torch.ones(N, 1, 4, dtype=dtype)
    v = torch.arange(N, dtype=torch.float32).remainder(2).view(N, 1, 1).to(dtype)
    out = ga.linear_attention(q, q, v, ga.causal_graph(N))
    assert out.dtype == dtype
    torch.testing.assert_close(float(out[-1]), 0.5, rtol=1e-2, atol=0)


def test_autocast_computes_like_float32_to_the_rounding_of_its_products():
    torch.manual_seed(0)
    layer = ga.nn.LinearAttention(64, 4, rope=True)
    x, graph = torch.randn(2, 300, 64), ga.causal_graph(300)
    exact = layer(x, graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, graph)
        with ga.use_backend("reference"):
            by_message = layer(x, graph)
        y.float().square().sum().backward()
    assert y.dtype == by_message.dtype == torch.bfloat16
    bound = 8 * torch.finfo(torch.bfloat16).eps * float(exact.detach().abs().max())
    assert float((y - exact).detach().abs().max()) < bound
    assert float((by_message - y).detach().abs().max()) < bound
    assert layer.query_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant):
    layer, graph = make(rope=True), ga.causal_graph(90)
    x = torch.randn(2, 90, DIM, dtype=torch.float64, requires_grad=True)
    results = []
    for again in (False, True):
        call = lambda x: layer(x, graph)  # noqa: E731
        y = checkpoint(call, x, use_reentrant=reentrant) if again else call(x)
        x.grad = None
        y.square().sum().backward()
        results.append((y, x.grad))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_copies_and_files_are_the_same_layer(tmp_path):
    layer, graph = make(kv_heads=1, rope=True, eps=0.5), ga.causal_graph(9)
    x = torch.randn(9, DIM, dtype=torch.float64)
    y = layer(x, graph)
    ga.save(layer, tmp_path / "layer")
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        ga.load(tmp_path / "layer"),
    ):
        assert torch.equal(other.double()(x, graph), y)
        assert repr(other) == repr(layer)
    assert repr(layer) == "LinearAttention(12, heads=3, kv_heads=1, rope=True, eps=0.5)"


def test_non_contiguous_and_meta_inputs():
    layer, graph = make(), ga.causal_graph(70)
    x = torch.randn(DIM, 70, 2, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(layer(x, graph), layer(x.contiguous(), graph), rtol=0, atol=1e-14)
    shape = layer.to("meta")(x.to("meta"), graph.to("meta")).shape
    assert shape == (2, 70, DIM)


@pytest.mark.long
def test_three_lengths_take_two_compilations():
    torch._dynamo.reset()
    layer = ga.nn.LinearAttention(8, 2, rope=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (12, 25, 90):
        x, graph = torch.randn(2, n, 8), ga.causal_graph(n)
        torch.testing.assert_close(compiled(x, graph), layer(x, graph), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["causal", "wide window", "knn", "batch"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_operator_keeps_the_promises_of_torch_library(name, transposed):
    graph = GRAPHS[name]()
    sizes = (graph.num_targets, graph.num_sources)[:: -1 if transposed else 1]
    a, b, c = (torch.rand(1, 2, n, 3, requires_grad=True) for n in (sizes[0], sizes[1], sizes[1]))
    torch.library.opcheck(
        torch.ops.graphattn.linear_sums, (a, b, c, graph.code, graph.listed, transposed)
    )


def test_functional_transforms_run_edge_by_edge():
    layer, graph = make(), ga.causal_window_graph(9, 3)
    x = torch.randn(4, 9, DIM, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(lambda x: layer(x, graph))(x), layer(x, graph))
    _, tangent = torch.func.jvp(lambda x: layer(x, graph), (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape


# What it costs.


def test_operations_are_those_of_the_formula():
    layer = ga.nn.LinearAttention(64, 4)
    x = torch.randn(100, 64)
    projections = 4 * 2 * 100 * 64 * 64
    sums = 2 * 4 * (100 + 100) * 16 * 17  # a matrix k [v, 1]^T per token, and a product with it
    for graph in (ga.complete_graph(100), ga.causal_graph(100)):
        assert ga.diagnostics.flops(layer, x, graph) == projections + sums
    window = ga.causal_window_graph(100, 4)
    edges = 2 * 4 * 394 * (16 + 17)
    assert ga.diagnostics.flops(layer, x, window) == projections + edges
    turned = ga.nn.LinearAttention(64, 4, rope=True)
    assert ga.diagnostics.flops(turned, x, ga.causal_graph(100)) == projections + sums
    meta = layer.to("meta")
    assert ga.diagnostics.flops(meta, x.to("meta"), ga.complete_graph(100).to("meta")) == (
        projections + sums
    )


def test_twice_the_tokens_cost_twice():
    layer = ga.nn.LinearAttention(32, 2).to("meta")

    def cost(n):
        return ga.diagnostics.flops(
            layer, torch.empty(n, 32, device="meta"), ga.causal_graph(n).to("meta")
        )

    assert cost(20_000) == 2 * cost(10_000)


# Token by token.


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("window", [1, 5, 40, None])
def test_steps_are_one_forward(options, window):
    layer, rng = make(**options), torch.Generator().manual_seed(3)
    for batch in ((), (2,), (2, 3)):
        x = torch.randn(*batch, 30, DIM, dtype=torch.float64, generator=rng)
        expected = layer(x, causal(30, window))
        for pieces in (None, [30], [7, 1, 1, 13, 8], [2] * 15):
            y = stream(layer, x, layer.init_cache(batch, window, rollback=3), pieces)
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rollback", [0, 4])
def test_padded_texts_go_on_beside_each_other(rollback):
    layer = make(rope=True)
    x = torch.randn(2, 25, DIM, dtype=torch.float64)
    valid = torch.arange(25) >= torch.tensor([[0], [9]])
    spoilt = x.masked_fill(~valid[..., None], torch.nan)
    expected = layer(x, ga.causal_graph(25), valid=valid)
    for pieces in (None, [14, 1, 1, 9]):
        cache = layer.init_cache(2, None, rollback=rollback)
        y = stream(layer, spoilt, cache, pieces, valid=valid)
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


def test_a_running_state_is_two_sums_and_their_rests_per_head_however_long_the_text():
    layer = make(kv_heads=1)
    cache = layer.init_cache(2, None)
    assert isinstance(cache, ga.nn.RunningCache)
    assert cache.num_bytes == 2 * 2 * (4 * 4 + 4) * 8
    size = None
    for n in (1, 1, 300, 1, 50):
        layer.step(torch.randn(2, n, DIM, dtype=torch.float64), cache)
        assert cache.num_bytes == 2 * 2 * (4 * 4 + 4) * 8
        size = size or len(pickle.dumps(cache))
    assert cache.position == cache.min_length == 353
    assert abs(len(pickle.dumps(cache)) - size) < 100
    half = ga.nn.LinearAttention(DIM, HEADS).bfloat16().init_cache(2, None)
    assert {x.dtype for x in half.sums.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_add_up_in_a_long_text_that_repeats_itself(dtype):
    """Sums are those in float64, to float32's rounding. Of tokens simply added, they were off by
    3e-5 here, and by 2e-3 after 200,000."""
    torch.manual_seed(0)
    layer = ga.nn.LinearAttention(DIM, HEADS).to(dtype)
    cache = layer.init_cache((), None)
    keys = ga.elu_features(torch.randn(3, HEADS, DIM // HEADS)).to(dtype)
    values = (torch.randn(3, HEADS, DIM // HEADS) + 2).to(dtype)
    with torch.no_grad():
        for t in range(3000):
            here = slice(t % 3, t % 3 + 1)
            cache.append({"key": keys[here], "value": values[here]}, None)
    state = 1000 * torch.einsum("thd,the->hde", keys.double(), values.double())
    total = 1000 * keys.double().sum(0)
    assert cache.position == 3000
    near = {"rtol": 3e-7, "atol": 0}
    torch.testing.assert_close(cache.sums["state"].double(), state, **near)
    torch.testing.assert_close(cache.sums["total"].double(), total, **near)


@pytest.mark.parametrize("window", [None, 6])
def test_tokens_that_are_taken_back_were_never_seen(window):
    layer = make(rope=True)
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    expected = layer(x, causal(40, window))
    cache = layer.init_cache(2, window, rollback=3)
    stream(layer, x[:, :20], cache, [15, 1, 1, 3])
    for wrong in (1, 2, 3):
        layer.step(torch.full((2, wrong, DIM), 1e6, dtype=torch.float64), cache)
        cache.truncate(cache.position - wrong)
        t = cache.position
        y = layer.step(x[:, t], cache)
        torch.testing.assert_close(y, expected[:, t], rtol=1e-11, atol=1e-12)
    cache.truncate(0)
    torch.testing.assert_close(layer.step(x, cache), expected, rtol=1e-11, atol=1e-12)


def test_a_sum_does_not_give_back_more_than_the_rollback():
    layer = make()
    cache = layer.init_cache((), None, rollback=2)
    layer.step(torch.randn(2, DIM, dtype=torch.float64), cache)
    cache.truncate(1)  # nothing has joined the sums yet
    layer.step(torch.randn(9, DIM, dtype=torch.float64), cache)
    assert cache.min_length == 8
    before = pickle.dumps(cache)
    with pytest.raises(ValueError, match=r"length must be 8 to 10 .*got 7.*rollback=d"):
        cache.truncate(7)
    assert pickle.dumps(cache) == before
    cache.truncate(8)
    with pytest.raises(ValueError, match=r"length must be 8 to 8 "):
        cache.truncate(7)
    none = layer.init_cache((), None)
    layer.step(torch.randn(3, DIM, dtype=torch.float64), none)
    with pytest.raises(ValueError, match="rollback = 0"):
        none.truncate(2)


@pytest.mark.parametrize("rollback", [0, 2])
def test_beams_clones_and_pickles_go_their_own_ways(rollback):
    layer = make(kv_heads=1, rope=True)
    x = torch.randn(3, 20, DIM, dtype=torch.float64)
    cache = layer.init_cache(3, None, rollback=rollback)
    layer.step(x[:, :12], cache)
    others = [cache.clone(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    order = torch.tensor([2, 0, 0, 1])
    cache.reorder(order)
    assert cache.batch == (4,)
    expected = layer(x, ga.causal_graph(20))[:, 12:]
    y = stream(layer, x[order][:, 12:], cache)
    torch.testing.assert_close(y, expected[order], rtol=1e-11, atol=1e-12)
    for other in others:
        torch.testing.assert_close(stream(layer, x[:, 12:], other), expected, rtol=1e-11, atol=0)
    with pytest.raises(ValueError, match="index"):
        cache.reorder(torch.tensor([4]))


def test_a_cache_of_inference_mode_goes_on_outside():
    layer, x = make(), torch.randn(2, 9, DIM, dtype=torch.float64)
    with torch.inference_mode():
        cache = layer.init_cache(2, None, rollback=2)
        layer.step(x[:, :5], cache)
        copied = pickle.loads(pickle.dumps(cache))
    expected = layer(x, ga.causal_graph(9))[:, 5:]
    for other in (cache, copied):
        torch.testing.assert_close(layer.step(x[:, 5:], other), expected, rtol=1e-11, atol=1e-12)


def test_a_message_of_somebody_elses_is_what_steps_run():
    class Largest(ga.nn.LinearAttention):
        def message(self, value_j):
            return 2 * value_j

    torch.manual_seed(0)
    layer = Largest(DIM, HEADS).double()
    x = torch.randn(8, DIM, dtype=torch.float64)
    cache = layer.init_cache((), None)
    assert not isinstance(cache, ga.nn.RunningCache)
    torch.testing.assert_close(stream(layer, x, cache), layer(x, ga.causal_graph(8)))
    with pytest.raises(ValueError, match="message"):
        layer(x, ga.causal_graph(8), return_attention_weights=True)
    plain = make()
    running = plain.init_cache((), None)
    plain.message = lambda value_j: value_j
    with pytest.raises(ValueError, match="cache must be a new one from init_cache"):
        plain.step(x[0], running)


# In models, and what is refused.


def test_a_context_of_another_width_is_attended_to_and_has_no_steps():
    layer = make(context_dim=5, kv_heads=1)
    x, context = (torch.randn(n, d, dtype=torch.float64) for n, d in ((6, DIM), (9, 5)))
    graph = ga.bipartite_complete_graph(6, 9)
    expected = loop(layer, x, graph, context)
    torch.testing.assert_close(layer(x, graph, context), expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="context_dim = 5"):
        layer.init_cache((), None)


def test_an_encoder_of_it_trains_and_generates():
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(
        9, 16, 2, 4, mixer="linear", mixer_options={"kv_heads": 2, "eps": 1e-6}
    ).double()
    kinds = {type(block.mixer) for block in model.blocks}
    assert kinds == {ga.nn.LinearAttention}
    assert [graph.structure for graph in model.graphs(30)] == [ga.complete_graph(30).structure] * 2
    tokens = torch.randint(9, (2, 30))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    cache = model.init_cache(2)
    steps = stream(model, tokens, cache, [11, 1, 1, 17], dims=0)
    torch.testing.assert_close(steps, model(tokens, ga.causal_graph(30)), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("rope", [False, True])
def test_a_recording_holds_its_weights_and_no_shares_of_negative_ones(rope):
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 16, 2, 4, mixer="linear", rope=rope)
    with ga.diagnostics.record(model) as recording:
        model(torch.randint(9, (2, 30)))
    assert recording.names == ("blocks.0.mixer", "blocks.1.mixer")
    for call in recording:
        assert call.weights.shape == (2, 900, 4)
        assert bool((call.weights < 0).any()) == rope
        assert bool(call.effective_rank.isfinite().all())
        for shares in (call.entropy, call.sinks, call.diversity):
            assert bool(shares.isnan().all() if rope else shares.isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 2}, "kv_heads must divide heads = 3, got 2"),
        ({"eps": -1.0}, "eps"),
        ({"backend": "triton"}, "backend must be 'auto', 'reference' or 'structured'"),
        ({"rope": "yes"}, "rope"),
        ({"context_dim": 0}, "context_dim"),
    ],
)
def test_what_the_layer_refuses_it_names(options, message):
    with pytest.raises(ValueError, match=message):
        ga.nn.LinearAttention(DIM, HEADS, **options)


def test_what_the_operation_refuses_it_names():
    q, graph = torch.rand(4, 2, 3), ga.complete_graph(4)
    with pytest.raises(ValueError, match="key must have 3 features like query, got 2"):
        ga.linear_attention(q, q[..., :2], q, graph)
    with pytest.raises(ValueError, match="key heads must divide query heads"):
        ga.linear_attention(q, q.repeat(1, 2, 1)[:, :3], q.repeat(1, 2, 1)[:, :3], graph)
    with pytest.raises(ValueError, match="value must have the tokens and heads of key"):
        ga.linear_attention(q, q, q[:, :1], graph)
    with pytest.raises(ValueError, match="rotated must be a pair"):
        ga.linear_attention(q, q, q, graph, rotated=q)
    with pytest.raises(ValueError, match=r"rotated \(key\) must have the shape of key"):
        ga.linear_attention(q, q, q, graph, rotated=(q, q[:2]))
    with pytest.raises(ValueError, match="backend 'triton' cannot run"):
        ga.linear_attention(q, q, q, graph, backend="triton")
    support = ga.backends("linear_attention", graph, q)
    assert [name for name, why_not in support.items() if why_not is None] == [
        "reference",
        "structured",
    ]


def test_sums_of_nothing_are_zero():
    for n, m in ((0, 0), (0, 5), (5, 0)):
        graph = ga.bipartite_complete_graph(n, m)
        a, b = torch.rand(2, n, 3), torch.rand(2, m, 3)
        out = linear_sums(a, b, b, graph)
        assert out.shape == (2, n, 3)
        assert math.isclose(float(out.abs().sum()), 0)
