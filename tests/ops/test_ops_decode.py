"""decode_attention gives the last rows of causal attention, and reads nothing else of a cache."""

import math

import oracle_ops as oracle
import pytest
import torch
from cases_ops import random
from torch import Tensor

import graphattn as ga

STRENGTHS = pytest.mark.parametrize(
    "strength",
    [{}, {"scale": 0.7}, {"sigma": 1.5}, {"sigma": torch.tensor([0.8, 1.0, 1.7, 2.5])}],
    ids=["dot", "scale", "rbf", "sigma of heads"],
)
LONG = 700  # keys, enough of them for the ways that long caches take


def caches(
    batch: int, tokens: int, heads: int, kv_heads: int, features: int, new: int = 1, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query [B, T, H, D] and caches [B, M, Hk, D]."""
    return (
        random(batch, new, heads, features, seed=1, **options),
        random(batch, tokens, kv_heads, features, seed=2, **options),
        random(batch, tokens, kv_heads, features, seed=3, **options),
    )


def seen(tokens: int, length: int, new: int, window: int | None) -> Tensor:
    """Mark which places the `new` last tokens of a text see, [new, tokens], by definition."""
    mask = torch.zeros(new, tokens, dtype=torch.bool)
    for t in range(new):
        position = length - new + t
        for j in range(tokens):
            mask[t, j] = j <= position and (window is None or j > position - window)
    return mask


def by_loops(query, key, value, lengths, *, window=None, sink=None, **options):
    """Text by text in Python loops: out and log-sums."""
    outs, sums = [], []
    for b, length in enumerate(lengths):
        mask = seen(key.shape[1], length, query.shape[1], window)
        rows = oracle.attention(query[b], key[b], value[b], mask, **options)
        out = rows.out
        if sink is not None:  # e^lse / (e^sink + e^lse)
            share = 1 / (1 + torch.exp(sink.double() - rows.lse))
            out = out * share[..., None]
        outs.append(out)
        sums.append(rows.lse)
    return torch.stack(outs), torch.stack(sums)


def poisoned(x: Tensor, lengths: list[int]) -> Tensor:
    """Return `x` with NaN in every place beyond the length of its text."""
    x = x.clone()
    for b, length in enumerate(lengths):
        x[b, length:] = torch.nan
    return x


@STRENGTHS
@pytest.mark.parametrize("top_k", [None, 1, 3])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("new", [1, 3])
def test_new_tokens_see_what_the_definition_says(strength, top_k, window, new):
    lengths = [0, 2, 7, 12]
    query, key, value = caches(4, 12, 4, 2, 3, new)
    key, value = poisoned(key, lengths), poisoned(value, lengths)
    options = {"window": window, "top_k": top_k, **strength}
    out, lse = ga.decode_attention(
        query, key, value, torch.tensor(lengths), return_lse=True, **options
    )
    expected = by_loops(query, key, value, lengths, **options)
    torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 4])  # many rows share keys, or each has its own
@STRENGTHS
@pytest.mark.parametrize("top_k", [None, 16, 500])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("new", [1, 4])
def test_over_long_caches_it_is_attention_on_the_causal_graph(
    kv_heads, strength, top_k, window, new
):
    lengths = [LONG, 431, 2, 700]
    query, key, value = caches(4, LONG, 4, kv_heads, 32, new)
    key, value = poisoned(key, lengths), poisoned(value, lengths)
    out, lse = ga.decode_attention(
        query, key, value, torch.tensor(lengths), window=window, top_k=top_k, return_lse=True,
        **strength,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        real = min(new, length)
        assert (out[b, : new - real] == 0).all()
        assert (lse[b, : new - real] == -torch.inf).all()
        graph = ga.from_mask(seen(length, length, real, window))
        arguments = query[b, new - real :], key[b, :length], value[b, :length], graph
        options = {"top_k": top_k, "backend": "reference", "return_lse": True, **strength}
        operation = ga.rbf_attention if "sigma" in strength else ga.dot_product_attention
        expected = operation(*arguments, **options)
        torch.testing.assert_close(out[b, new - real :], expected[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(lse[b, new - real :], expected[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tokens", [9, LONG])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("sigma", [None, 1.5])
def test_a_sink_is_one_more_source_whose_value_is_nothing(tokens, top_k, sigma):
    """A sink adds e^sink to the denominator, e^l / (e^sink + sum e^l), and changes nothing else.

    The log-sums that are returned leave it out.
    """
    query, key, value = caches(2, tokens, 4, 2, 16, new=2)
    sink = torch.tensor([-1.0, 0.5, 3.0, -torch.inf], dtype=torch.float64)
    options = {"sigma": sigma, "top_k": top_k}
    out, lse = ga.decode_attention(query, key, value, tokens, sink=sink, return_lse=True, **options)
    plain, plain_lse = ga.decode_attention(query, key, value, tokens, return_lse=True, **options)
    assert torch.equal(lse, plain_lse)
    numerator = plain * plain_lse.exp()[..., None]
    expected = numerator / (sink.exp() + plain_lse.exp())[..., None]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    nothing = ga.decode_attention(query, key, value, 0, sink=sink, **options)
    assert (nothing == 0).all()


@pytest.mark.parametrize("kv_heads", [1, 4])  # many rows share keys, or each has its own
@pytest.mark.parametrize("strength", [{}, {"sigma": 8.0}], ids=["dot", "rbf"])
@pytest.mark.parametrize("top_k", [None, 20, 400])
def test_what_is_not_seen_changes_no_bit(kv_heads, strength, top_k):
    """Beyond the lengths, before the window, and later drafts, for earlier ones."""
    lengths = torch.tensor([650, 300])
    query, key, value = caches(2, LONG, 4, kv_heads, 64, new=3, dtype=torch.float32)
    options = {"window": 250, "top_k": top_k, **strength}
    clean = ga.decode_attention(query, key, value, lengths, **options)
    for bad in (torch.nan, torch.inf, 1e30, 300.0):
        k, v = key.clone(), value.clone()
        for x in (k, v):
            x[0, 650:] = x[1, 300:] = bad
            x[0, : 650 - 252] = x[1, : 300 - 252] = bad
        assert torch.equal(ga.decode_attention(query, k, v, lengths, **options), clean)
        k[0, 649] = v[0, 649] = bad  # the newest of the first text: seen by its last row alone
        k[0, 650 - 252] = v[0, 650 - 252] = bad  # the oldest: by its first row alone
        other = ga.decode_attention(query, k, v, lengths, **options)
        assert torch.equal(other[1], clean[1])
        assert torch.equal(other[0, 1], clean[0, 1])


@pytest.mark.parametrize("kv_heads", [1, 4])  # many rows share keys, or each has its own
@pytest.mark.parametrize("strength", [{}, {"sigma": 8.0}], ids=["dot", "rbf"])
@pytest.mark.parametrize("top_k", [None, 20, 400])
def test_what_one_text_holds_changes_no_bit_of_another(kv_heads, strength, top_k):
    query, key, value = caches(3, LONG, 4, kv_heads, 64, dtype=torch.float32)
    options = {"top_k": top_k, **strength}
    clean = ga.decode_attention(query, key, value, LONG, **options)
    for bad in (torch.nan, torch.inf, 1e30, 300.0):
        k, v = key.clone(), value.clone()
        k[1, 5] = v[1, 6] = bad
        other = ga.decode_attention(query, k, v, LONG, **options)
        assert torch.equal(other[[0, 2]], clean[[0, 2]])
        assert not math.isnan(bad) or other[1].isnan().any()  # its own text does see it


@pytest.mark.parametrize("tokens", [40, LONG])
@pytest.mark.parametrize("top_k", [2, 30])
@pytest.mark.parametrize("sigma", [None, 4.0])
def test_a_value_that_top_k_leaves_out_is_not_read(tokens, top_k, sigma):
    query, key, value = caches(2, tokens, 2, 2, 32)
    clean = ga.decode_attention(query, key, value, tokens, sigma=sigma, top_k=top_k)
    graph = ga.bipartite_complete_graph(1, tokens)
    weights = ga.attention_weights(query, key, graph, sigma=sigma, top_k=top_k)  # [B, M, H]
    value[weights == 0] = torch.nan
    out = ga.decode_attention(query, key, value, tokens, sigma=sigma, top_k=top_k)
    torch.testing.assert_close(out, clean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 4])  # many rows share keys, or each has its own
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("new", [1, 3])
def test_rbf_in_float32_survives_a_common_offset(kv_heads, offset, new):
    """Relative error <= 1e-5 is promised; expanded squares lose 1e-3 at 100."""
    query, key, value = caches(2, LONG, 4, kv_heads, 64, new, dtype=torch.float32)
    query, key = query + offset, key + offset
    exact, exact_lse = by_loops(query, key, value, [LONG] * 2, sigma=8.0)
    for q in (query, query.clone().requires_grad_()):
        out, lse = ga.decode_attention(q, key, value, LONG, sigma=8.0, return_lse=True)
        assert (out.double() - exact).norm() <= 1e-5 * exact.norm()
        assert (lse.double() - exact_lse).norm() <= 1e-5 * exact_lse.norm()


@pytest.mark.parametrize("kv_heads", [1, 4])  # many rows share keys, or each has its own
@pytest.mark.parametrize("outlier", [0, 350, LONG - 1])
def test_an_outlier_among_near_keys_costs_no_precision(kv_heads, outlier):
    query, key, value = caches(1, LONG, 4, kv_heads, 32, dtype=torch.float32)
    key[0, outlier] += 1e4
    for place in (query, query + 1e4):  # near the others, and near the outlier
        out = ga.decode_attention(place, key, value, LONG, sigma=4.0)
        exact, _ = by_loops(place, key, value, [LONG], sigma=4.0)
        assert (out.double() - exact).norm() <= 1e-5 * exact.norm()


def test_an_offset_changes_no_choice_of_top_k():
    query, key, _ = caches(2, LONG, 4, 4, 64, dtype=torch.float32)
    query, key = query + 100, key + 100
    distance = (query.double() - key.double()).square().sum(-1)  # [B, M, H]
    nearest = distance.argsort(dim=1, stable=True)[:, :50]
    expected = torch.zeros_like(distance).scatter_(1, nearest, 1.0)
    for h in range(4):  # which keys are kept shows in values that are their own numbers
        marks = torch.eye(LONG)[None, :, None].expand(2, LONG, 4, LONG)
        out = ga.decode_attention(query, key, marks, LONG, sigma=8.0, top_k=50)
        assert torch.equal((out[:, 0, h] > 0).double(), expected[:, :, h])


@pytest.mark.parametrize("tokens", [50, LONG])
@pytest.mark.parametrize("strength", [{}, {"sigma": 5.0}], ids=["dot", "rbf"])
@pytest.mark.parametrize("top_k", [7, 40])
def test_of_equally_near_keys_the_older_are_kept(tokens, strength, top_k):
    """Keys are few different ones, many times: values are positions, so the average tells."""
    generator = torch.Generator().manual_seed(4)
    kinds = torch.randn(5, 2, 64, generator=generator)
    which = torch.randint(5, (2, tokens), generator=generator)
    key, query = kinds[which], torch.randn(2, 1, 2, 64, generator=generator)
    value = torch.arange(tokens).float()[None, :, None, None].expand(2, tokens, 2, 64).contiguous()
    out = ga.decode_attention(query, key, value, tokens, top_k=top_k, **strength)
    expected, _ = by_loops(query, key, value, [tokens] * 2, top_k=top_k, **strength)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)


def test_a_thousand_equal_keys_keep_the_first():
    key = torch.ones(1, 1000, 2, 64)
    value = torch.arange(1000.0)[None, :, None, None].expand(1, 1000, 2, 64).contiguous()
    for strength in ({}, {"sigma": 2.0}):
        out = ga.decode_attention(torch.randn(1, 1, 2, 64), key, value, 1000, top_k=5, **strength)
        torch.testing.assert_close(out, torch.full((1, 1, 2, 64), 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"sigma": 4.0}, {"sigma": 4.0, "top_k": 9}], ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype, options):
    lengths = torch.tensor([LONG, 90])
    tensors = caches(2, LONG, 4, 2, 32, new=2, dtype=dtype)
    out, lse = ga.decode_attention(*tensors, lengths, return_lse=True, **options)
    single = [x.float() for x in tensors]
    expected, expected_lse = ga.decode_attention(*single, lengths, return_lse=True, **options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("options", [{}, {"sigma": 1.3}, {"sigma": 1.3, "top_k": 2}], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_right_twice(options, window):
    lengths = [5, 1]
    query, key, value = (x.requires_grad_() for x in caches(2, 6, 2, 1, 2, new=2))
    sink = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)

    def run(query, key, value, sink):
        return ga.decode_attention(
            query, key, value, torch.tensor(lengths), window=window, sink=sink, return_lse=True,
            **options,
        )[0]  # fmt: skip

    assert torch.autograd.gradcheck(run, (query, key, value, sink))
    assert torch.autograd.gradgradcheck(run, (query, key, value, sink))


def test_gradients_reach_bandwidths_and_log_sums():
    tensors = caches(2, 6, 2, 2, 3, new=2)
    sigma = torch.tensor([1.1, 0.7], dtype=torch.float64, requires_grad=True)

    def run(sigma):
        return ga.decode_attention(*tensors, 6, sigma=sigma, return_lse=True)

    assert torch.autograd.gradcheck(run, (sigma,))
    scale = torch.tensor([0.4, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda scale: ga.decode_attention(*tensors, 6, scale=scale, return_lse=True), (scale,)
    )


@pytest.mark.parametrize("options", [{}, {"sigma": 4.0}, {"sigma": 4.0, "top_k": 9}], ids=str)
def test_no_gradient_is_nan_where_something_unseen_is(options):
    lengths = torch.tensor([30, 0])
    query, key, value = caches(2, 40, 4, 2, 8, new=2)
    key[0, 30:], value[0, 30:], key[1], value[1] = (torch.nan,) * 4
    tensors = [x.requires_grad_() for x in (query, key, value)]
    out = ga.decode_attention(*tensors, lengths, sink=torch.zeros(4), **options)
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][1] == 0).all()
    assert (gradients[1][0, 30:] == 0).all()
    assert (gradients[1][0, :28] != 0).any()


@pytest.mark.parametrize("tokens", [40, LONG])
@pytest.mark.parametrize(
    "options", [{}, {"sigma": 4.0}, {"sigma": 4.0, "top_k": 9, "window": 20}], ids=str
)
def test_with_and_without_gradients_it_gives_the_same(tokens, options):
    query, key, value = caches(3, tokens, 4, 2, 32, new=2)
    lengths = torch.tensor([tokens, 30, 1])
    fast = ga.decode_attention(query, key, value, lengths, return_lse=True, **options)
    slow = ga.decode_attention(
        query.requires_grad_(), key, value, lengths, return_lse=True, **options
    )
    assert slow[0].requires_grad
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"sigma": 4.0, "window": 5}, {"top_k": 4}], ids=str)
def test_it_compiles_whole_at_any_length(options):
    compiled = torch.compile(ga.decode_attention, fullgraph=True, backend="eager")
    for tokens in (8, 20, 33):
        tensors = caches(2, tokens, 4, 2, 8, new=2)
        lengths = torch.tensor([tokens, tokens - 3])
        out = compiled(*tensors, lengths, **options)
        expected = ga.decode_attention(*tensors, lengths, **options)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        one = compiled(*tensors, tokens, **options)
        torch.testing.assert_close(one, ga.decode_attention(*tensors, tokens, **options))


@pytest.mark.parametrize("options", [{}, {"sigma": 4.0, "window": 5}, {"top_k": 4}], ids=str)
def test_it_maps_over_texts(options):
    tensors = (*caches(3, 12, 4, 2, 8, new=2), torch.tensor([12, 1, 7]))
    out = torch.vmap(lambda *text: ga.decode_attention(*text, **options))(*tensors)
    torch.testing.assert_close(out, ga.decode_attention(*tensors, **options), rtol=1e-9, atol=1e-11)


def test_shapes_are_known_without_numbers():
    tensors = (x.to("meta") for x in caches(2, 20, 4, 2, 8, new=3))
    lengths = torch.zeros(2, dtype=torch.long, device="meta")
    out, lse = ga.decode_attention(*tensors, lengths, sigma=1.0, return_lse=True)
    assert out.shape == (2, 3, 4, 8)
    assert lse.shape == (2, 3, 4)


@pytest.mark.parametrize("options", [{}, {"sigma": 4.0}, {"sigma": 4.0, "top_k": 9}], ids=str)
def test_batches_of_any_shape_and_views_of_caches(options):
    query, key, value = caches(6, LONG, 4, 2, 32, dtype=torch.float32)
    lengths = torch.tensor([LONG, 3, 500, LONG, 40, 0])
    expected = ga.decode_attention(query, key, value, lengths, **options)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]
    for b in range(6):
        alone = ga.decode_attention(query[b], key[b], value[b], lengths[b].int(), **options)
        assert torch.equal(alone, expected[b])
    folded = [x.unflatten(0, (2, 3)) for x in (query, key, value)]
    out = ga.decode_attention(*folded, lengths.view(2, 3).int(), **options)
    assert torch.equal(out.flatten(0, 1), expected)
    out = ga.decode_attention(query, *heads_first, lengths, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    strided = [x.repeat_interleave(2, -1)[..., ::2] for x in (query, key, value)]
    out = ga.decode_attention(*strided, lengths, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_values_may_have_another_width_and_batches_no_text():
    query, key, _ = caches(2, LONG, 4, 2, 32)
    value = random(2, LONG, 2, 5, seed=7)
    for options in ({}, {"sigma": 4.0}, {"top_k": 8}, {"top_k": 600}):
        out = ga.decode_attention(query, key, value, LONG, **options)
        expected, _ = by_loops(query, key, value, [LONG] * 2, **options)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        none = ga.decode_attention(query[:0], key[:0], value[:0], LONG, **options)
        assert none.shape == (0, 1, 4, 5)
        none = ga.decode_attention(query[:, :0], key, value, LONG, **options)
        assert none.shape == (2, 0, 4, 5)


def test_autocast_changes_nothing_and_inputs_stay():
    tensors = caches(2, LONG, 4, 2, 32, dtype=torch.float32)
    copies = [x.clone() for x in tensors]
    for options in ({}, {"sigma": 4.0}, {"sigma": 4.0, "top_k": 9}):
        plain = ga.decode_attention(*tensors, LONG, **options)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ga.decode_attention(*tensors, LONG, **options), plain)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("options", [{"top_k": 20}, {}], ids=str)
@pytest.mark.parametrize("kind", ["KrauseAttention", "DotProductAttention"])
def test_the_step_of_a_layer_is_decoding_of_its_cache(kind, options):
    torch.manual_seed(0)
    layer = getattr(ga.nn, kind)(128, 4, kv_heads=2, **options)
    x = torch.randn(2, 300, 128)
    cache = layer.init_cache(2, 256)
    layer.step(x[:, :-1], cache)
    y = layer.step(x[:, -1], cache)
    with torch.no_grad():
        query, key, value = layer.project(x[:, -1:], x, None)
        if kind == "KrauseAttention":
            options = {"sigma": layer.sigma(), **options}
        mixed = ga.decode_attention(query, key, value, 300, window=256, **options)
        expected = layer.output_proj(mixed.flatten(-2))[:, 0]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([3, 9])}, r"lengths must be within 0 .. 8, .* got \[3, 9\]"),
        ({"lengths": torch.tensor([3, -1])}, r"lengths must be within 0 .. 8, .* got \[3, -1\]"),
        ({"lengths": 9}, "lengths must be <= 8, the room of the caches, got 9"),
        ({"lengths": -1}, "lengths must be >= 0, got -1"),
        ({"lengths": 2.5}, "lengths must be an integer >= 0, got 2.5"),
        ({"lengths": torch.tensor([3.0, 1.0])}, r"lengths must be .*\[2\], got torch.float32"),
        ({"lengths": torch.tensor([3])}, r"lengths must be .* shape \[2\], got .*shape \[1\]"),
        ({"sigma": 1.0, "scale": 1.0}, "not both: 1.0, 1.0"),
        ({"sigma": 0.0}, "sigma must be .* > 0, got 0.0"),
        ({"sigma": 1e-200}, "sigma must be > 0 and finite, like 1 / sigma"),
        ({"sigma": torch.ones(3)}, r"sigma must be .* \[4\] \(heads\), got shape \[3\]"),
        ({"scale": math.inf}, "scale must be a finite number or a tensor, got inf"),
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"sink": torch.ones(3)}, r"sink must be .* \[4\] \(heads\), got shape \[3\]"),
        ({"key_cache": torch.ones(2, 8, 2, 5)}, "key_cache must have 6 features .* got 5"),
        ({"key_cache": torch.ones(2, 8, 3, 6)}, r"value_cache must have .*\[8, 3\]"),
        ({"value_cache": torch.ones(2, 7, 2, 6)}, r"value_cache must have .*\[8, 2\].*\[7, 2\]"),
        ({"query": torch.ones(3, 1, 4, 6)}, r"key_cache must have the batch dimensions of query"),
        ({"query": torch.ones(2, 1, 3, 6)}, r"key_cache heads must divide query heads \(3\)"),
        ({"query": torch.ones(2, 1, 4, 6).double()}, "key_cache must have the dtype .* of query"),
        ({"key_cache": [1.0]}, "key_cache must be a tensor, got list"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    arguments = {
        "query": torch.ones(2, 1, 4, 6),
        "key_cache": torch.ones(2, 8, 2, 6),
        "value_cache": torch.ones(2, 8, 2, 6),
        "lengths": 8,
    }
    with pytest.raises(ValueError, match=message):
        ga.decode_attention(**{**arguments, **change})


def test_no_new_tokens_and_padding_before_the_first_are_nothing_for_gradients_too():
    q, k = torch.randn(2, 0, 4, 8, requires_grad=True), torch.randn(2, 16, 2, 8, requires_grad=True)
    out = ga.decode_attention(q, k, k, 5)
    assert out.shape == (2, 0, 4, 8)
    out.sum().backward()
    assert not k.grad.any()
    q = torch.randn(1, 3, 2, 4)
    q[0, 0] = torch.nan  # stands before the first of two tokens
    q.requires_grad_()
    k = torch.randn(1, 5, 2, 4)
    ga.decode_attention(q, k, k, torch.tensor([2]), sigma=1.0).sum().backward()
    assert q.grad[0, 0].abs().max() == 0
    assert q.grad[0, 2].abs().max() > 0


@pytest.mark.parametrize("sink", [torch.inf, torch.nan])
def test_a_sink_that_leaves_nothing_is_refused(sink):
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 4, 8)
    with pytest.raises(ValueError, match="sink must be finite"):
        ga.decode_attention(q, k, k, 5, sink=torch.full((4,), sink))


def test_a_layout_with_heads_first_is_told_from_ours():
    q, k = torch.randn(2, 64, 1, 8), torch.randn(2, 9, 64, 8)
    with pytest.raises(ValueError, match=r"query fits after transpose\(1, 2\)"):
        ga.decode_attention(q, k, k, 5)
