"""T steps are one forward over T tokens, in memory that does not grow."""

import copy
import pickle
import random

import pytest
import torch
from nn_by_hand import CASES, DIM, Case
from nn_steps import STEPPING, causal, poisoned, random_pieces, stream

import graphattn as ga
from graphattn.nn.caches.layer_cache import ANGLES_AHEAD
from graphattn.ops.top_k import among_best

STREAMING = [
    case
    for case in CASES
    if case.context_width is None and not case.is_energy and case.options.get("iterations", 1) == 1
]
EVERY_LAYER = pytest.mark.parametrize("case", STEPPING, ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


def by_edges(num_tokens, window):
    """Return the graph of `causal` as a plain list of its edges."""
    return ga.from_edge_index(causal(num_tokens, window).edge_index, num_tokens)


def held(cache):
    """Return the entries of the cache that the next token sees, by field."""
    count = cache.held(None if cache.window is None else cache.window - 1)
    return {name: cache.tokens(name, count) for name in cache.buffers}


@pytest.mark.parametrize("case", STREAMING, ids=str)
@pytest.mark.parametrize("window", [1, 5, 40, None])
def test_steps_are_one_forward(case, window):
    layer, tokens = case.make(), 21
    for batch in ((), (2,), (2, 3)):
        x = torch.randn(*batch, tokens, DIM, dtype=torch.float64)
        y = stream(layer, x, poisoned(layer.init_cache(batch, window)))
        expected = layer(x, by_edges(tokens, window))
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.long
@EVERY_LAYER
@BACKENDS
def test_prompts_and_steps_mix_in_any_way(case, backend):
    layer, rng = case.make(), random.Random(5)
    for window in (1, 2, 7, 24, 100, None):
        for _ in range(2):
            x = torch.randn(2, 70, DIM, dtype=torch.float64)
            pieces = random_pieces(70, rng)
            with ga.use_backend(backend):
                cache = poisoned(layer.init_cache(2, window))
                y = stream(layer, x, cache, pieces)
            expected = layer(x, by_edges(70, window))
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12, msg=str(pieces))


@EVERY_LAYER
@pytest.mark.parametrize("window", [1, 6, 50, None])
def test_a_prompt_leaves_the_cache_of_single_steps(case, window):
    layer, x = case.make(), torch.randn(3, 40, DIM, dtype=torch.float64)
    at_once, one_by_one = layer.init_cache(3, window), layer.init_cache(3, window)
    layer.step(x, at_once)
    stream(layer, x, one_by_one)
    assert at_once.position == one_by_one.position == 40
    for name, expected in held(one_by_one).items():
        torch.testing.assert_close(held(at_once)[name], expected, rtol=1e-12, atol=1e-13)


@EVERY_LAYER
def test_memory_is_constant_and_the_position_keeps_counting(case):
    layer = case.make()
    cache = layer.init_cache(2, window=9)
    bytes_at_first, storages = cache.num_bytes, {b.data_ptr() for b in cache.buffers.values()}
    for t in range(200):
        assert cache.position == t
        layer.step(torch.randn(2, DIM, dtype=torch.float64), cache)
        assert cache.num_bytes == bytes_at_first
    layer.step(torch.randn(2, 300, DIM, dtype=torch.float64), cache)
    assert cache.num_bytes == bytes_at_first
    assert {b.data_ptr() for b in cache.buffers.values()} == storages
    per_token = 2 * sum(heads * width for heads, width in cache.fields.values()) * 8
    assert bytes_at_first <= (9 + 16) * per_token
    longer = layer.init_cache(2, window=1000)
    assert longer.num_bytes <= 1.25 * 1000 * per_token
    # Nothing else grows either, tables of angles for one.
    size = len(pickle.dumps(cache))
    for _ in range(3):
        layer.step(torch.randn(2, 40, DIM, dtype=torch.float64), cache)
        layer.step(torch.randn(2, DIM, dtype=torch.float64), cache)
    assert abs(len(pickle.dumps(cache)) - size) < 100


def test_without_a_window_memory_is_that_of_the_text():
    layer = Case("KrauseAttention").make()
    cache = layer.init_cache((), window=None)
    for t in range(1, 500):
        layer.step(torch.randn(DIM, dtype=torch.float64), cache)
        assert cache.num_bytes <= max(64, 2 * t) * 2 * DIM * 8


@pytest.mark.parametrize("rope", [True, "isometric"])
def test_positions_count_on_far_beyond_the_window(rope):
    kinds = ["SelfConsensus"] if rope == "isometric" else ["KrauseAttention", "SelfConsensus"]
    for kind in kinds:
        options = {"update": "target", "edge_hidden": 6} if kind == "SelfConsensus" else {}
        layer, tokens = Case(kind, {"rope": rope, **options}).make(), 3 * ANGLES_AHEAD + 5
        x = torch.randn(tokens, DIM, dtype=torch.float64)
        expected = layer(x, causal(tokens, 4))
        for pieces in (None, [60, 1, 1, 10, *[1] * 100, 20, 5]):
            y = stream(layer, x, layer.init_cache((), 4), pieces)
            torch.testing.assert_close(y, expected[: len(y)], rtol=1e-11, atol=1e-12)


@EVERY_LAYER
def test_positions_may_be_given(case):
    layer, graph = case.make(), causal(20, 6)
    x = torch.randn(2, 20, DIM, dtype=torch.float64)
    positions = torch.randint(0, 1000, (2, 20)).sort(dim=-1).values
    expected = layer(x, graph, positions=positions)
    for pieces in (None, [7, 1, 5, 1, 6]):
        y = stream(layer, x, layer.init_cache(2, 6), pieces, positions=positions)
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", STREAMING, ids=str)
def test_padding_on_the_left_changes_nothing(case):
    layer, window = case.make(), 6
    x = torch.randn(3, 30, DIM, dtype=torch.float64)
    valid = torch.arange(30) >= torch.tensor([0, 4, 17])[:, None]
    expected = layer(x, by_edges(30, window), valid=valid)
    x = x.masked_fill(~valid[..., None], torch.nan)
    for pieces in (None, [20, *[1] * 10], [5, 3, 1, 1, 20]):
        y = stream(layer, x, poisoned(layer.init_cache(3, window)), pieces, valid)
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@EVERY_LAYER
@BACKENDS
def test_padding_may_come_late_and_in_one_call_only(case, backend):
    """The first calls know of no padding, a middle one does, the last do not again."""
    layer, window = case.make(), 7
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, 12:15] = valid[1, 13] = valid[0, 18] = False
    expected = layer(x, by_edges(40, window), valid=valid)
    with ga.use_backend(backend):
        for middle in ([10], [1] * 10, [5, 1, 1, 3]):
            cache = poisoned(layer.init_cache(2, window))
            first = stream(layer, x[:, :10], cache)
            second = stream(layer, x[:, 10:20], cache, middle, valid[:, 10:20])
            rest = stream(layer, x[:, 20:], cache, [1, 1, 2, 16])
            y = torch.cat([first, second, rest], dim=1)
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@EVERY_LAYER
@BACKENDS
@pytest.mark.parametrize("content", [torch.nan, torch.inf, 1e300])
def test_a_token_that_is_no_number_is_forgotten_with_the_window(case, backend, content):
    layer, window = case.make(), 5
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    broken = x.clone()
    broken[0, 11] = content
    with ga.use_backend(backend):
        for pieces in (None, [12, *[1] * 28], [9, 1, 1, 1, 1, 2, 25]):
            y = stream(layer, x, layer.init_cache(2, window), pieces)
            z = stream(layer, broken, layer.init_cache(2, window), pieces)
            seen = torch.zeros(2, 40, dtype=torch.bool)
            seen[0, 11 : 11 + window] = True
            assert torch.equal(z[~seen], y[~seen])
            assert not torch.equal(z[seen], y[seen])


@BACKENDS
@pytest.mark.parametrize("kind", ["DotProductAttention", "KrauseAttention"])
def test_a_value_that_top_k_leaves_out_is_not_read(kind, backend):
    layer = Case(kind, {"top_k": 1}).make()
    x = torch.randn(8, DIM, dtype=torch.float64)
    results = []
    for poison in (False, True):
        cache = layer.init_cache((), 6)
        stream(layer, x[:7], cache)
        keep = layer(x, causal(8, 6), return_attention_weights=True)[1][-6:] > 0
        with ga.use_backend(backend):
            if poison:  # the newest token is the last edge of the last row; keys stand before it
                left_out = (~keep)[:5].T  # [heads, 5]
                cache.rows("value", 5)[left_out] = torch.nan
            results.append(layer.step(x[7], cache))
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-14)


@BACKENDS
@pytest.mark.parametrize("kind", ["DotProductAttention", "KrauseAttention"])
@pytest.mark.parametrize("position", [3, 30, 61, 200])
def test_of_equally_near_tokens_the_older_is_kept(kind, backend, position):
    """Keys are all equal, values are the positions: the average is that of the oldest k."""
    layer = getattr(ga.nn, kind)(4, heads=2, top_k=3).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        for projection in (layer.value_proj, layer.output_proj):
            projection.weight.copy_(torch.eye(4))
    x = torch.arange(position + 1, dtype=torch.float64)[:, None].expand(-1, 4)
    with ga.use_backend(backend):
        last = stream(layer, x, layer.init_cache((), 8))[-1]
    oldest = max(0, position - 7)
    kept = torch.arange(oldest, min(oldest + 3, position + 1)).double()
    torch.testing.assert_close(last, kept.mean().expand(4))


def test_ties_are_selected_as_by_a_stable_sort_and_of_nan_at_least_one():
    generator = torch.Generator().manual_seed(3)
    for trial in range(200):
        logits = torch.randint(-3, 4, (2, 3, 9), generator=generator).double()
        logits[logits == 2] = torch.nan if trial % 3 == 0 else -0.0
        logits[logits == 1] = torch.inf if trial % 2 else 0.0
        logits[logits == -3] = -torch.inf
        for k in (1, 4, 8):
            order = logits.argsort(dim=-1, descending=True, stable=True)
            expected, best = order.argsort(dim=-1) < k, among_best(logits, k)
            bad = logits.isnan()
            assert torch.equal(best[~bad.any(-1)], expected[~bad.any(-1)])
            assert (best & bad).any(-1)[bad.any(-1)].all()


@pytest.mark.parametrize("kind", ["KrauseAttention", "GaussianKernelAttention"])
def test_distances_do_not_cancel_at_a_common_offset(kind):
    torch.manual_seed(1)
    layer = getattr(ga.nn, kind)(64, heads=2, bias=False)
    if kind == "KrauseAttention":
        with torch.no_grad():
            layer.query_proj.weight.copy_(torch.eye(64))
            layer.key_proj.weight.copy_(torch.eye(64))
    # Exact in float32, so that what is measured is the step and not the rounding of its input.
    x = torch.randn(2, 60, 64).mul(1024).round().div(1024) + 100
    y = stream(layer, x, layer.init_cache(2, 16), [20, *[1] * 40])
    exact = copy.deepcopy(layer).double()(x.double(), causal(60, 16))
    assert ((y - exact).norm() / exact.norm()).item() < 1e-5
    around = exact - exact.mean(1, keepdim=True)
    assert ((y - exact).norm() / around.norm()).item() < 1e-4


@EVERY_LAYER
def test_a_step_has_no_gradient_and_says_so_by_its_output(case):
    layer, x = case.make(), torch.randn(2, 12, DIM, dtype=torch.float64, requires_grad=True)
    cache = layer.init_cache(2, 4)
    for y in (layer.step(x[:, 0], cache), layer.step(x[:, 1:], cache)):
        assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()
    assert not any(buffer.requires_grad for buffer in cache.buffers.values())


@EVERY_LAYER
@pytest.mark.parametrize("window", [4, None])
def test_a_cache_made_in_inference_mode_works_outside_and_back(case, window):
    layer, x = case.make(), torch.randn(2, 130, DIM, dtype=torch.float64)
    valid = torch.ones(2, 130, dtype=torch.bool)
    with torch.inference_mode():
        cache = layer.init_cache(2, window)
        first = stream(layer, x[:, :50], cache, valid=valid)
    second = stream(layer, x[:, 50:90], cache, valid=valid)
    with torch.inference_mode():
        cache.reorder(torch.tensor([0, 1]))
        third = stream(layer, x[:, 90:120], cache)
    fourth = stream(layer, x[:, 120:], cache)
    y = torch.cat([first, second, third, fourth], dim=1)
    torch.testing.assert_close(y, layer(x, by_edges(130, window)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in STEPPING if "top_k" not in c.options], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_that_of_forward(case, dtype):
    """Steps err at most 1.5 times as much as forward, both compared with float64.

    Layers with top_k are left out: of nearly equal tokens they may choose another one at every
    rounding.
    """
    layer, exact = case.make(dtype=dtype), case.make(dtype=torch.float64)
    x = torch.randn(2, 30, DIM).to(dtype)
    truth = exact.load_state_dict(layer.state_dict()) and exact(x.double(), causal(30, 7))
    cache = layer.init_cache(2, 7)
    assert all(buffer.dtype == dtype for buffer in cache.buffers.values())
    y, forward = stream(layer, x, cache), layer(x, causal(30, 7))
    assert y.dtype == dtype
    error, of_forward = (y - truth).norm(), (forward - truth).norm()
    assert error <= 1.5 * of_forward + 1e-12


@EVERY_LAYER
def test_autocast_gives_what_forward_gives_under_it(case):
    layer, x = case.make(dtype=torch.float32), torch.randn(2, 30, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, causal(30, 7))
        for pieces in (None, [12, *[1] * 10, 8]):
            y = stream(layer, x, layer.init_cache(2, 7), pieces)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    exact = layer(x, causal(30, 7))
    assert (y - exact).norm() <= 1.5 * (expected - exact).norm()


def test_what_is_kept_may_have_another_dtype():
    layer, x = Case("KrauseAttention", {"rope": True}).make(), torch.randn(2, 30, DIM).double()
    small, whole = layer.init_cache(2, 7, dtype=torch.float32), layer.init_cache(2, 7)
    assert small.num_bytes * 2 == whole.num_bytes
    for pieces in (None, [12, *[1] * 10, 8]):
        cache = layer.init_cache(2, 7, dtype=torch.float32)
        y = stream(layer, x, cache, pieces)
        assert y.dtype == torch.float64
        error = (y - layer(x, causal(30, 7))).abs().max()
        assert 1e-12 < error < 1e-5


@EVERY_LAYER
def test_beams_are_reordered_and_texts_branch(case):
    layer = case.make()
    x, more = (torch.randn(3, n, DIM, dtype=torch.float64) for n in (11, 6))
    cache = layer.init_cache(3, 5)
    layer.step(x, cache)
    branch = copy.deepcopy(cache)
    index = torch.tensor([2, 0, 0, 1])
    cache.reorder(index)
    assert cache.batch == (4,)
    more = more[index]
    y = stream(layer, more, cache)
    expected = layer(torch.cat([x[index], more], 1), causal(17, 5))[:, 11:]
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    assert branch.position == 11
    y = stream(layer, more[:3], branch)
    expected = layer(torch.cat([x, more[:3]], 1), causal(17, 5))[:, 11:]
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


@EVERY_LAYER
def test_no_tokens_are_no_step(case):
    layer, cache = case.make(), case.make().init_cache(2, 5)
    assert layer.step(torch.empty(2, 0, DIM, dtype=torch.float64), cache).shape == (2, 0, DIM)
    assert cache.position == 0
    nobody = layer.init_cache(0, 5)
    for shape in ((0, DIM), (0, 7, DIM)):
        y = layer.step(torch.empty(shape, dtype=torch.float64), nobody)
        assert y.shape == shape


def test_the_cache_tells_where_it_stands_in_one_line():
    layer = ga.nn.KrauseAttention(DIM, 4)
    cache = layer.init_cache((2, 3), window=16)
    layer.step(torch.randn(2, 3, 7, DIM), cache)
    assert repr(cache) == (
        "LayerCache(KrauseAttention, batch=[2, 3], window=16, position=7, 24576 bytes)"
    )


# What is refused.


def test_layers_that_cannot_go_token_by_token_say_why():
    with pytest.raises(ValueError, match=r"update='target'.*moves both tokens"):
        ga.nn.SelfConsensus(DIM, 4).init_cache(2, 5)
    with pytest.raises(ValueError, match=r"context_dim = 10 .*context"):
        ga.nn.DotProductAttention(DIM, 4, context_dim=10).init_cache(2, 5)
    assert not hasattr(ga.nn.CrossConsensus, "step")
    target = ga.nn.SelfConsensus(DIM, 4, update="target")
    with pytest.raises(ValueError, match=r"update='target'"):
        ga.nn.SelfConsensus(DIM, 4).step(torch.randn(2, DIM), target.init_cache(2, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0), "window must be >= 1, got 0"),
        ((2, 2.5), "window must be an integer >= 1, got 2.5"),
        ((-1, 4), "batch must be >= 0, got -1"),
        (((2, "3"), 4), "batch must be an integer >= 0, got '3'"),
    ],
)
def test_a_cache_out_of_range_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ga.nn.KrauseAttention(DIM, 4).init_cache(*arguments)
    with pytest.raises(ValueError, match=r"dtype must be floating-point, got torch.int64"):
        ga.nn.KrauseAttention(DIM, 4).init_cache(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(3, DIM), r"x must .*\[2, 16\] .*\[2, n, 16\] .*batch \[2\], got \[3, 16\]"),
        (torch.randn(3, 4, DIM), r"x must .* got \[3, 4, 16\]"),
        (torch.randn(DIM), r"x must .* got \[16\]"),
        (torch.randn(2, 15), r"x must .* got \[2, 15\]"),
        (torch.randn(1, 2, 4, DIM), r"x must .* got \[1, 2, 4, 16\]"),
        ([1.0], r"x must .* got list"),
        (torch.ones(2, DIM, dtype=torch.long), r"x must be floating-point, got torch.int64"),
        (torch.randn(2, DIM).double(), r"x must have the layer's dtype torch.float32, got .*64"),
        (torch.randn(2, DIM, device="meta"), r"x must be on the device of cache, cpu, got meta"),
    ],
)
def test_tokens_that_do_not_fit_the_cache_are_refused_and_it_stays(x, message):
    layer = ga.nn.KrauseAttention(DIM, 4)
    cache = layer.init_cache(2, 5)
    with pytest.raises(ValueError, match=message):
        layer.step(x, cache)
    assert cache.position == cache.end == 0


def test_the_cache_of_another_layer_is_refused():
    layer, x = ga.nn.KrauseAttention(DIM, 4), torch.randn(2, DIM)
    for other in (
        ga.nn.KrauseAttention(DIM, 2),
        ga.nn.KrauseAttention(DIM, 4, kv_heads=2),
        ga.nn.DotProductAttention(DIM, 4),
        ga.nn.GaussianKernelAttention(DIM, 4),
        ga.nn.KrauseAttention(DIM, 4).double(),
    ):
        with pytest.raises(ValueError, match=r"cache must come from init_cache of this layer"):
            layer.step(x, other.init_cache(2, 5))
    with pytest.raises(ValueError, match=r"cache must be a LayerCache.*got NoneType"):
        layer.step(x, None)


def test_masks_and_positions_that_do_not_fit_are_refused():
    layer = ga.nn.KrauseAttention(DIM, 4, rope=True)
    cache = layer.init_cache(2, 5)
    for valid in (torch.ones(2), torch.ones(3, dtype=torch.bool), [True, True]):
        with pytest.raises(ValueError, match=r"valid must be a bool tensor of shape \[2\]"):
            layer.step(torch.randn(2, DIM), cache, valid=valid)
    with pytest.raises(ValueError, match=r"valid must be a bool tensor of shape \[2, 3\]"):
        layer.step(torch.randn(2, 3, DIM), cache, valid=torch.ones(2, dtype=torch.bool))
    for positions in (torch.arange(4), 7, [1, 2]):
        with pytest.raises(ValueError, match=r"positions must"):
            layer.step(torch.randn(2, 3, DIM), cache, positions=positions)
    for index in (torch.tensor([0, 2]), torch.tensor([-1]), torch.tensor([0.0]), [0, 1]):
        with pytest.raises(ValueError, match="index must be"):
            cache.reorder(index)
    with pytest.raises(ValueError, match="index cannot reorder a cache without batch dimensions"):
        layer.init_cache((), 5).reorder(torch.tensor([0]))
    assert cache.position == 0


@pytest.mark.parametrize("kind", ["KrauseAttention", "DotProductAttention"])
def test_padding_after_a_long_text_sees_nothing_and_is_no_nan(kind):
    """Few are kept of many: the way that reads kept values alone has rows that keep none."""
    layer, n = getattr(ga.nn, kind)(64, heads=4, top_k=3), 700
    x, valid = torch.randn(2, n, 64), torch.ones(2, n, dtype=torch.bool)
    valid[1, -1] = False
    cache = layer.init_cache(2, None)
    layer.step(x[:, :-1], cache, valid=valid[:, :-1])
    y = layer.step(x[:, -1], cache, valid=valid[:, -1])
    torch.testing.assert_close(y[1], layer.output_proj.bias)
    expected = layer(x, ga.causal_graph(n), valid=valid)[:, -1]
    torch.testing.assert_close(y[0], expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY_LAYER
def test_a_single_text_in_half_precision(case, dtype):
    """A text without batch dimensions, whose tokens are features alone, equals a batch of one."""
    torch.manual_seed(0)
    layer, x = case.make().to(dtype), torch.randn(9, DIM, dtype=dtype)
    alone = stream(layer, x, layer.init_cache((), window=4))
    assert alone.shape == x.shape
    torch.testing.assert_close(alone[None], stream(layer, x[None], layer.init_cache(1, window=4)))
