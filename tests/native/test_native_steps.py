"""Steps of generation by compiled code, beside a plain loop in float64, SDPA, and whole texts."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import builds
import pytest
import torch
from threads import same_on_threads
from torch import Tensor
from torch.nn import functional

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.attention.native import steps

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

HALVES = torch.float16, torch.bfloat16
LAYERS: dict[str, Callable[..., Any]] = {
    "dot": lambda **o: ga.nn.DotProductAttention(32, 4, kv_heads=2, rope=True, softcap=5.0, **o),
    "no values": lambda **o: ga.nn.DotProductAttention(32, 2, value_projection=False, **o),
    "krause": lambda **o: ga.nn.KrauseAttention(32, 4, kv_heads=1, top_k=5, sink=True, **o),
    "gka": lambda **o: ga.nn.GaussianKernelAttention(32, 4, rope=True, eps=0.3, sink=True, **o),
    "normalized": lambda **o: ga.nn.GaussianKernelAttention(32, 4, normalize=True, **o),
}
each_layer = pytest.mark.parametrize("name", LAYERS)
each_score = pytest.mark.parametrize("score", ["dot", "rbf"])


def layer_of(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = LAYERS[name](**options).to(dtype)
    for parameter in ("sink", "log_sigma"):
        if getattr(layer, parameter, None) is not None:
            torch.nn.init.normal_(getattr(layer, parameter))
    return layer


def stream(layer: Any, x: Tensor, cache: Any) -> Tensor:
    return torch.stack([layer.step(x[..., t, :], cache) for t in range(x.shape[-2])], dim=-2)


@contextmanager
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many calls of compiled steps there are within the block."""
    assert steps._LIBRARY is not None
    run, calls = steps._LIBRARY.graphattn_attention_steps, [0]

    class Counted:
        def graphattn_attention_steps(self, *arguments: Any) -> int:
            calls[0] += 1
            status: int = run(*arguments)
            return status

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_LIBRARY", Counted())
        yield calls


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: int,
    score: str,
    *,
    strength: Tensor,
    window: int | None = None,
    top_k: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Row by row, in float64: the newest tokens of one text [T, H, D] and its caches."""
    query, key, value = query.double(), key.double(), value.double()
    T, H, _ = query.shape
    out = torch.zeros(T, H, value.shape[-1], dtype=torch.float64)
    lse = torch.full((T, H), -torch.inf, dtype=torch.float64)
    for t in range(T):
        p = length - T + t
        seen = torch.arange(0 if window is None else max(0, p - window + 1), max(0, p + 1))
        for h in range(H):
            g = h * key.shape[1] // H
            if score == "rbf":
                logits = -(query[t, h] - key[seen, g]).square().sum(-1) / (2 * strength[h] ** 2)
            else:
                logits = strength[h] * (key[seen, g] @ query[t, h])
            order = logits.argsort(descending=True, stable=True)[:top_k]
            if len(order) == 0:
                continue
            lse[t, h] = logits[order].logsumexp(0)
            below = lse[t, h] if sink is None else torch.logaddexp(lse[t, h], sink[h].double())
            out[t, h] = (logits[order] - below).exp() @ value[seen[order], g]
    return out, lse


def decoded(query: Tensor, key: Tensor, value: Tensor, lengths: Any, score: str, **o: Any) -> Any:
    strength = o.pop("strength")
    with torch.no_grad():
        return ga.decode_attention(
            query,
            key,
            value,
            lengths,
            return_lse=True,
            **{"sigma" if score == "rbf" else "scale": strength},
            **o,
        )


def caches(
    texts: int, tokens: int, room: int, heads: int, kv_heads: int, width: int, more: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(texts + 7 * width + room)
    shapes = (tokens, heads, width), (room, kv_heads, width), (room, kv_heads, width + more)
    return [torch.randn(texts, *shape, generator=generator) for shape in shapes]


@each_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_decoding_is_a_plain_loop(score: str, dtype: torch.dtype, tokens: int) -> None:
    """Lengths of every kind, padding in front among them, grouped heads and any width."""
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 8e-3)
    for width, more, window, top_k in (
        (16, 0, None, None),
        (7, 2, 20, None),
        (64, 0, 70, 9),
        (32, 0, None, 40),
        (1, 0, 1, 1),
    ):
        query, key, value = (x.to(dtype) for x in caches(4, tokens, 150, 6, 2, width, more))
        size = width**0.5 if score == "rbf" else width**-0.5
        strength, sink = size * (0.5 + torch.rand(6)), torch.randn(6).to(dtype)
        lengths = torch.tensor([150, 65, tokens - 1, 0])
        strength = strength.to(dtype)
        for given in (None, sink):
            options = {"window": window, "top_k": top_k, "sink": given}
            out, lse = decoded(query, key, value, lengths, score, strength=strength, **options)
            options["strength"] = strength.double()
            for b, length in enumerate(lengths.tolist()):
                expected, sums = by_hand(query[b], key[b], value[b], length, score, **options)
                torch.testing.assert_close(out[b].double(), expected, rtol=0, atol=tolerance)
                torch.testing.assert_close(lse[b].double(), sums, rtol=1e-4, atol=1e-4)


def test_views_of_caches_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads before tokens, some tokens of more, keys and values in one tensor: the same bits."""
    query, key, value = caches(2, 2, 90, 4, 2, 16)
    expected = decoded(query, key, value, 70, "rbf", strength=2.0)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]
    both = torch.cat([key, value], dim=-1)
    longer = [functional.pad(x, (0, 0, 0, 0, 5, 9), value=torch.nan)[:, 5:95] for x in (key, value)]
    with taken(monkeypatch) as calls:
        for keys, values in (apart, (both[..., :16], both[..., 16:]), longer):
            result = decoded(query, keys, values, 70, "rbf", strength=2.0)
            assert torch.equal(result[0], expected[0])
            assert torch.equal(result[1], expected[1])
    assert calls == [3]


@each_score
def test_of_equal_keys_the_oldest_are_kept(score: str) -> None:
    """Wherever in a vector or a block they stand, equal keys have the same logit to the bit."""
    for width in (5, 16, 40):
        query, key, value = caches(1, 1, 203, 2, 1, width)
        equal = torch.randperm(203)[:80].sort().values
        key[0, equal] = query[0, :, :1] * 1.5  # the best, or (of distances) the worst
        if score == "rbf":
            key[0, equal] = query[0, :, :1] + 1e-3
        value = torch.eye(203)[None, :, None]  # the output is the weights
        out, _ = decoded(query, key, value, 203, score, strength=1.0, top_k=30)
        assert torch.equal(out[0, 0, 0].nonzero().squeeze(-1), equal[:30])


@each_score
def test_what_is_not_seen_changes_no_bit(score: str) -> None:
    """Beyond the length, before the window, in another text, or not among the top k."""
    query, key, value = caches(2, 2, 120, 4, 2, 16)
    options: dict[str, Any] = {"strength": 1.0, "window": 40}
    lengths = torch.tensor([100, 77])
    expected = decoded(query, key, value, lengths, score, **options)[0]
    for place in (slice(100, None), slice(0, 59)):
        for x in (key, value):
            x[0, place] = torch.nan
    result = decoded(query, key, value, lengths, score, **options)[0]
    assert torch.equal(result, expected)
    key[1, 50, 1] = torch.nan
    result = decoded(query, key, value, lengths, score, **options)[0]
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1, :, :2], expected[1, :, :2])  # they read another head
    assert result[1, :, 2:].isnan().all()
    few = decoded(query, key, value, 100, score, strength=1.0, window=40, top_k=3)[0]
    kept = torch.zeros(100, dtype=torch.bool)
    for h in range(2):
        _, best = by_best(query[1, 1, h], key[1, 60:100, 0], score)
        kept[60 + best[:3]] = True
    value[1, :100, 0][~kept] = torch.nan
    again = decoded(query, key, value, 100, score, strength=1.0, window=40, top_k=3)[0]
    assert torch.equal(again[1, 1, :2], few[1, 1, :2])


def by_best(query: Tensor, key: Tensor, score: str) -> tuple[Tensor, Tensor]:
    logits = -(query - key).square().sum(-1) if score == "rbf" else key @ query
    return logits.sort(descending=True, stable=True)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    query, key, value = caches(3, 2, 2000, 4, 4, 64)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]
    (out, lse), of_others = same_on_threads(
        lambda: [
            decoded(query, *kept, 2000, "rbf", strength=3.0, top_k=500)
            for kept in ((key, value), apart)
        ],
        (1, 2, 3, 7),
    )
    assert torch.equal(out, of_others[0])
    assert torch.equal(lse, of_others[1])


# Layers.


@each_layer
@pytest.mark.parametrize("window", [1, 6, 70, None])
def test_steps_are_one_forward_over_the_whole_text(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, T = layer_of(name, torch.float64), 90
    x = torch.randn(2, 3, T, 32, dtype=torch.float64)
    graph = ga.causal_graph(T) if window is None else ga.causal_window_graph(T, window)
    with taken(monkeypatch) as calls:
        y = stream(layer, x, layer.init_cache((2, 3), window))
    assert calls == [T]
    expected = layer(x, ga.from_edge_index(graph.edge_index, T))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)


@each_layer
def test_without_the_library_steps_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(name), torch.randn(2, 60, 32)
    y = stream(layer, x, layer.init_cache(2, 25))
    module = importlib.import_module("graphattn.ops.backends")  # `ops.backends` is a function
    monkeypatch.setattr(module, "_WHY_NOT_BUILT", "it was not built")
    with taken(monkeypatch) as calls:
        plain = stream(layer, x, layer.init_cache(2, 25))
    assert calls == [0]
    torch.testing.assert_close(y, plain, rtol=1e-4, atol=1e-5)
    layer.backend = "native"
    with pytest.raises(ValueError, match=r"backend 'native' cannot run.*it was not built"):
        layer.init_cache(2, 25)


@each_layer
def test_a_ring_has_the_bits_of_a_line(name: str) -> None:
    """Wherever the newest token stands, in a ring of places or in a buffer that moves."""
    layer, x = layer_of(name), torch.randn(2, 100, 32)
    line = layer.init_cache(2, 20)
    ring = ga.nn.LayerCache(
        line.owner, line.fields, (2,), 20, dtype=line.dtype, device=line.device, ring=True
    )
    assert torch.equal(stream(layer, x, line), stream(layer, x, ring))


@each_layer
@pytest.mark.parametrize("window", [30, None])
def test_a_text_alone_has_the_bits_that_it_has_padded_in_a_batch(
    name: str, window: int | None
) -> None:
    """A rotary embedding counts padding as positions, so they are given."""
    layer, x = layer_of(name), torch.randn(3, 50, 32)
    start = torch.tensor([0, 13, 49])
    valid = torch.arange(50) >= start[:, None]
    positions = torch.arange(50) + 0 * start[:, None]
    padded, cache = x.masked_fill(~valid[..., None], torch.nan), layer.init_cache(3, window)
    steps_taken = [
        layer.step(padded[:, t], cache, valid=valid[:, t], positions=positions[:, t])
        for t in range(50)
    ]
    for b, first in enumerate(start.tolist()):
        alone = layer.init_cache((), window)
        for t in range(first, 50):
            y = layer.step(x[b, t], alone, positions=positions[b, t])
            torch.testing.assert_close(y, steps_taken[t][b], rtol=1e-5, atol=1e-6)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_the_first_step_and_those_with_a_mask_have_the_bits_of_others(
    name: str, dtype: torch.dtype
) -> None:
    """Compiled code turns queries and keys itself, where nothing else is to be done with them."""
    layer, x = layer_of(name, dtype), torch.randn(2, 30, 32, dtype=dtype)
    quick, afresh = layer.init_cache(2, 12), layer.init_cache(2, 12)
    real = torch.ones(2, dtype=torch.bool)
    for t in range(30):
        masked = quick.clone()
        y = layer.step(x[:, t], quick)
        afresh = afresh.clone()
        assert torch.equal(layer.step(x[:, t], afresh), y)
        assert torch.equal(layer.step(x[:, t], masked, valid=real), y)


@each_layer
def test_what_a_token_does_not_see_is_not_read(name: str) -> None:
    layer, x = layer_of(name), torch.randn(1, 40, 32)
    expected = stream(layer, x, layer.init_cache(1, 8))
    x[:, 20] = torch.nan
    y = stream(layer, x, layer.init_cache(1, 8))
    assert torch.equal(y[:, :20], expected[:, :20])
    assert y[:, 20:28].isnan().all()
    assert torch.equal(y[:, 28:], expected[:, 28:])


@each_layer
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_caches_of_half_precision(name: str, dtype: torch.dtype) -> None:
    """A cache of half precision serves a layer of float32, and one of its own precision.

    Outputs have the dtype of the layer, and are near those of float32.
    """
    layer, x = layer_of(name), torch.randn(2, 50, 32)
    expected = stream(layer, x, layer.init_cache(2, 20))
    kept = stream(layer, x, layer.init_cache(2, 20, dtype=dtype))
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept, expected, rtol=0, atol=0.03 if name != "krause" else 0.3)
    whole = layer.to(dtype)
    y = stream(whole, x.to(dtype), whole.init_cache(2, 20))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.1 if name != "krause" else 0.5)


@each_layer
def test_caches_go_back_apart_and_into_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses that a call knows are those of one cache at one time."""
    layer, x = layer_of(name), torch.randn(2, 40, 32)
    cache = layer.init_cache(2, 12, rollback=4)
    stream(layer, x[:, :30], cache)
    twins = [cache.clone(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    stream(layer, torch.randn(2, 3, 32), cache)
    cache.truncate(30)
    with taken(monkeypatch) as calls:
        expected = stream(layer, x[:, 30:], cache)
        for twin in twins:
            assert torch.equal(stream(layer, x[:, 30:], twin), expected)
    assert calls == [40]
    cache.reorder(torch.tensor([1, 1, 0]))
    y = layer.step(x[:, 0], twins[0])
    assert torch.equal(layer.step(x[[1, 1, 0], 0], cache), y[[1, 1, 0]])


@each_layer
def test_a_layer_that_changes_is_followed(name: str) -> None:
    """Parameters in other places, other options, and another layer on the same cache."""
    layer, x = layer_of(name), torch.randn(2, 60, 32)
    other = layer_of(name)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    cache, line = layer.init_cache(2, 10), []
    for t in range(60):
        who = other if t % 3 == 0 else layer
        line.append(who.step(x[:, t], cache))
    monitor = layer.init_cache(2, 10)
    for t in range(60):
        who = other if t % 3 == 0 else layer
        with ga.use_backend("structured"):
            expected = who.step(x[:, t], monitor)
        torch.testing.assert_close(line[t], expected, rtol=1e-4, atol=1e-4)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer.step(x[:, 0], cache.clone()), other.step(x[:, 0], cache.clone()))


class Doubled(ga.nn.KrauseAttention):
    def row_logits(self, query: Tensor, key: Tensor) -> Tensor:
        return 2 * super().row_logits(query, key)

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        return 2 * super().log_affinity(query_i, key_j)


def test_what_somebody_has_replaced_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(30, 32)
    graph = ga.causal_window_graph(30, 9)
    layer = Doubled(32, 4)
    with taken(monkeypatch) as calls:
        y = stream(layer, x, layer.init_cache((), 9))
        assert calls == [0]
        torch.testing.assert_close(y, layer(x, graph), rtol=1e-4, atol=1e-5)
        plain = ga.nn.KrauseAttention(32, 4)
        cache = plain.init_cache((), 9)
        stream(plain, x[:20], cache)
        assert calls == [20]
        plain.log_affinity = lambda query_i, key_j: 3 * (query_i * key_j).sum(-1)
        late = stream(plain, x[20:], cache)
        assert calls == [20]
    torch.testing.assert_close(late, plain(x, graph)[20:], rtol=1e-4, atol=1e-5)


def test_steps_leave_no_gradient_and_the_mode_as_it_was() -> None:
    layer = layer_of("dot")
    cache, x = layer.init_cache((), 5), torch.randn(3, 32, requires_grad=True)
    for t in range(3):
        assert not layer.step(x[t], cache).requires_grad
        assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="x must be a tensor of shape"):
        layer.step(x[:, :5], cache)
    assert torch.is_grad_enabled()


@pytest.mark.long
@pytest.mark.parametrize("build", ["base", "v3"])
def test_every_build_has_steps(build: str) -> None:
    builds.run_with(
        build,
        "import torch, test_native_steps as native\n"
        "for score in ('dot', 'rbf'):\n"
        "    for dtype in (torch.float32, torch.float64, torch.bfloat16):\n"
        "        native.test_decoding_is_a_plain_loop(score, dtype, 3)\n"
        "    native.test_of_equal_keys_the_oldest_are_kept(score)\n"
        "    native.test_what_is_not_seen_changes_no_bit(score)\n"
        "for name in native.LAYERS:\n"
        "    native.test_a_ring_has_the_bits_of_a_line(name)",
    )
