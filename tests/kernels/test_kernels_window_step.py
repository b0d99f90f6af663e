"""Generation by kernel: one launch takes a token into the cache and attends from it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import graphattn as ga
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import launch, recording
from graphattn.nn.caches.layer_cache import LayerCache

DIM, WINDOW = 8, 5
TINY = tuning.Choice(1, 4, 4, 2)  # a window is a tile and one token of a second

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gaussian": ("GaussianKernelAttention", {}),
    "Gaussian, rotary, normalised, eps": (
        "GaussianKernelAttention",
        {"rope": True, "normalize": True, "eps": 0.3},
    ),
    "Krause, top 3": ("KrauseAttention", {"top_k": 3, "rope": True}),
    "Krause, top 1, shared heads": ("KrauseAttention", {"top_k": 1, "kv_heads": 1}),
    "Krause, one sigma, all kept": ("KrauseAttention", {"top_k": 5, "sigma_per_head": False}),
    "Krause, a sink, top 2": ("KrauseAttention", {"sink": True, "top_k": 2}),
    "Gaussian, a sink beside eps": ("GaussianKernelAttention", {"sink": True, "eps": 0.3}),
    "dot product, a sink, shared heads": ("DotProductAttention", {"kv_heads": 1, "sink": True}),
    "dot product, shared heads": ("DotProductAttention", {"kv_heads": 1, "rope": True}),
    "values are the input, top 2": ("DotProductAttention", {"value_projection": False, "top_k": 2}),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
SOME = pytest.mark.parametrize(
    "name", ["Gaussian, rotary, normalised, eps", "Krause, top 3", "dot product, shared heads"]
)
TOP_K = pytest.mark.parametrize("kind", ["KrauseAttention", "DotProductAttention"])


@pytest.fixture(autouse=True)
def _tiny_tiles(device: str) -> Iterator[None]:
    with tuning.override(**({"window_step": TINY} if device == "cpu" else {})):
        yield


def layer_of(name: str, device: str, dtype: torch.dtype = torch.float32, dim: int = DIM) -> Any:
    """Make a layer that has the same weights on every device and in every dtype.

    Bandwidths and sinks are random, so that heads differ.
    """
    torch.manual_seed(7)
    kind, options = LAYERS[name]
    layer = getattr(ga.nn, kind)(dim, 2, backend="triton", **options)
    if hasattr(layer, "log_sigma"):
        with torch.no_grad():
            layer.log_sigma.add_(0.5 * torch.randn_like(layer.log_sigma))
    if layer.sink is not None:
        with torch.no_grad():
            layer.sink.add_(torch.randn_like(layer.sink))
    return layer.to(device, dtype)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))


def forward(layer: Any, x: Tensor, window: int = WINDOW, **keywords: Any) -> Tensor:
    """All tokens at once, by the reference backend in float64 on the CPU."""
    exact = copy.deepcopy(layer).cpu().double()
    exact.backend = "reference"
    graph = ga.causal_window_graph(x.shape[-2], window)
    with torch.no_grad():
        return exact(x.cpu().double(), graph, **keywords)


def stream(
    layer: Any,
    x: Tensor,
    cache: LayerCache,
    pieces: Sequence[int] | None = None,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Outputs of x [*, T, dim] in pieces of these lengths, 1 for a single token; on the CPU."""
    outputs, t, on = [], 0, cache.device
    for n in pieces or [1] * x.shape[-2]:
        here: Any = t if n == 1 else slice(t, t + n)
        y = layer.step(
            x[..., here, :].to(on),
            cache,
            valid=None if valid is None else valid[..., here].to(on),
            positions=None if positions is None else positions[..., here].to(on),
        )
        outputs.append(y.unsqueeze(-2) if n == 1 else y)
        t += n
    return torch.cat(outputs, dim=-2).cpu()


def poisoned(cache: LayerCache) -> LayerCache:
    """Room that was never written holds NaN: whoever reads it shows."""
    for name, buffer in cache.buffers.items():
        if name != "valid":
            buffer.fill_(torch.nan)
    return cache


def close(outputs: Tensor, expected: Tensor, allowed: float = 2e-5) -> None:
    torch.testing.assert_close(outputs.double(), expected.double(), rtol=allowed, atol=allowed)


@contextmanager
def counting() -> Iterator[list[str]]:
    """The names of the kernels that are started."""
    names: list[str] = []

    def counted(kernel: Any, *arguments: Any, **keywords: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **keywords)

    with mock.patch("graphattn.kernels.generation.step.launch", counted):
        yield names


# What steps give.


@pytest.mark.long
@EVERY_LAYER
def test_steps_are_one_forward_and_one_launch_each(name: str, device: str) -> None:
    layer, x = layer_of(name, device), tokens(1, 3 * WINDOW + 2)
    cache = poisoned(layer.init_cache(1, WINDOW))
    with counting() as launched:
        y = stream(layer, x, cache)
    assert launched == ["window_step_kernel"] * x.shape[-2]
    close(y, forward(layer, x))


@pytest.mark.parametrize(("window", "batch"), [(1, ()), (2, (2, 1)), (9, ()), (40, (1,))], ids=str)
def test_windows_and_batches_of_any_shape(window: int, batch: tuple[int, ...], device: str) -> None:
    layer, x = layer_of("Krause, top 3", device), tokens(*batch, 11)
    cache = poisoned(layer.init_cache(batch, window))
    close(stream(layer, x, cache), forward(layer, x, window))


@pytest.mark.parametrize("dim", [2, 6, 34])
@SOME
def test_heads_of_any_width(name: str, dim: int, device: str) -> None:
    if dim // 2 % 2 and "rope" in LAYERS[name][1]:
        dim += 2
    layer = layer_of(name, device, dim=dim)
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(1))
    close(stream(layer, x, poisoned(layer.init_cache((), 3))), forward(layer, x, 3))


@pytest.mark.long
def test_the_widest_heads_and_longer_windows_than_one_tile_of_them(device: str) -> None:
    torch.manual_seed(0)
    layer = ga.nn.KrauseAttention(256, 1, top_k=7, backend="triton").to(device)
    x = torch.randn(12, 256)
    with tuning.override(window_step=tuning.Choice(1, 8, 4, 1)):
        y = stream(layer, x, poisoned(layer.init_cache((), 11)))
    close(y, forward(layer, x, 11))


@pytest.mark.long
@EVERY_LAYER
def test_prompts_and_steps_mix_in_any_way(name: str, device: str) -> None:
    layer, x = layer_of(name, device), tokens(1, 24)
    rng = random.Random(name)
    pieces = [7, 1, 1, 2, 1, 12]
    rng.shuffle(pieces)
    y = stream(layer, x, poisoned(layer.init_cache(1, WINDOW)), pieces)
    close(y, forward(layer, x))


@SOME
def test_positions_may_be_given(name: str, device: str) -> None:
    layer, x = layer_of(name, device), tokens(2, 7)
    positions = torch.tensor([[0, 3, 4, 9, 12, 13, 40], [1, 2, 3, 5, 8, 9, 99]])
    expected = forward(layer, x, positions=positions)
    close(stream(layer, x, layer.init_cache(2, WINDOW), positions=positions), expected)


@pytest.mark.long
def test_positions_beyond_32_bits(device: str) -> None:
    layer, x = layer_of("Gaussian", device), tokens(12)
    cache = layer.init_cache((), WINDOW)
    first = stream(layer, x[:7], cache)
    cache.position += WINDOW << 40  # the same place
    close(torch.cat([first, stream(layer, x[7:], cache)]), forward(layer, x))
    assert cache.position == 12 + (WINDOW << 40)


# Padding.


@pytest.mark.long
@EVERY_LAYER
def test_padding_on_the_left_changes_nothing(name: str, device: str) -> None:
    layer, x = layer_of(name, device), tokens(2, 9)
    valid = torch.arange(9) >= torch.tensor([0, 5])[:, None]
    expected = forward(layer, x, valid=valid)
    x = x.masked_fill(~valid[..., None], torch.nan)
    y = stream(layer, x, poisoned(layer.init_cache(2, WINDOW)), valid=valid)
    close(y[valid], expected[valid])
    close(y, expected)  # padding sees nothing, not even itself


@pytest.mark.long
@SOME
@pytest.mark.parametrize("middle", [[1] * 6, [4, 1, 1]], ids=str)
def test_padding_may_come_late_and_in_one_call_only(
    name: str, middle: list[int], device: str
) -> None:
    layer, x = layer_of(name, device), tokens(2, 15)
    valid = torch.ones(2, 15, dtype=torch.bool)
    valid[0, 6:8] = valid[1, 7] = valid[0, 11] = False
    cache = poisoned(layer.init_cache(2, WINDOW))
    first = stream(layer, x[:, :6], cache, [5, 1])
    assert "valid" not in cache.buffers
    second = stream(layer, x[:, 6:12], cache, middle, valid[:, 6:12])
    third = stream(layer, x[:, 12:], cache)
    y = torch.cat([first, second, third], dim=1)
    close(y, forward(layer, x, valid=valid))


# What is kept and what is read.


@TOP_K
@pytest.mark.parametrize("position", [1, 4, 7, 12])
def test_of_equally_near_tokens_the_older_is_kept(kind: str, position: int, device: str) -> None:
    """Keys are all equal, values are the positions: the average is that of the oldest k."""
    layer = getattr(ga.nn, kind)(4, heads=2, top_k=3, backend="triton").to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.key_proj.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        layer.query_proj.bias.copy_(torch.tensor([0.3, -0.7, 0.9, 0.1]))
        for projection in (layer.value_proj, layer.output_proj):
            projection.weight.copy_(torch.eye(4))
    x = torch.arange(position + 1.0)[:, None].expand(-1, 4)
    last = stream(layer, x, layer.init_cache((), WINDOW))[-1]
    oldest = max(0, position - WINDOW + 1)
    kept = torch.arange(oldest, min(oldest + 3, position + 1), dtype=torch.float32)
    close(last, kept.mean().expand(4))


def test_zeros_of_either_sign_are_equal(device: str) -> None:
    """Products are the smallest number there is or its negative, and half of that is rounded."""
    layer = ga.nn.DotProductAttention(4, heads=1, top_k=3, backend="triton").to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.query_proj.bias[0] = 2.0**-75
        layer.key_proj.weight[0, 0] = 2.0**-74
        for projection in (layer.value_proj, layer.output_proj):
            projection.weight.copy_(torch.eye(4))
    x = torch.zeros(6, 4)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    x[:, 1] = torch.arange(6)
    last = stream(layer, x, layer.init_cache((), WINDOW))[-1]
    close(last, x[1:4].mean(0))


@pytest.mark.long
@TOP_K
def test_a_value_that_top_k_leaves_out_is_not_read(kind: str, device: str) -> None:
    torch.manual_seed(0)
    layer = getattr(ga.nn, kind)(DIM, 2, top_k=2, backend="triton").to(device)
    x, results = tokens(8), []
    for poison in (False, True):
        cache = layer.init_cache((), WINDOW)
        stream(layer, x[:7], cache)
        _, weights = layer(
            x.to(device),
            ga.causal_window_graph(8, WINDOW).to(device),
            return_attention_weights=True,
        )
        if poison:  # the last row's edges are the tokens 3 .. 7; token 7 is still to come
            for token in range(3, 7):
                left_out = weights[-8 + token] == 0  # [heads]
                cache.buffers["value"][left_out, token % WINDOW] = torch.nan
        results.append(layer.step(x[7].to(device), cache).cpu())
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


@pytest.mark.long
@EVERY_LAYER
def test_a_token_that_is_no_number_is_forgotten_with_the_window(name: str, device: str) -> None:
    layer, x = layer_of(name, device), tokens(9).repeat(2, 1, 1)
    x[1, 2] = torch.inf if name == "Gaussian" else torch.nan
    whole, broken = stream(layer, x, layer.init_cache(2, WINDOW))
    seen = (torch.arange(9) >= 2) & (torch.arange(9) < 2 + WINDOW)
    assert torch.equal(broken[~seen], whole[~seen])
    assert not broken[2].isfinite().all()


def test_distances_do_not_cancel_at_a_common_offset(device: str) -> None:
    layer = ga.nn.GaussianKernelAttention(DIM, 2, bias=False, backend="triton").to(device)
    x = tokens(12).mul(1024).round().div(1024) + 1000  # exact in float32
    y, exact = stream(layer, x, layer.init_cache((), WINDOW)), forward(layer, x)
    around = exact - exact.mean(0, keepdim=True)
    assert (y - exact).norm() / around.norm() < 1e-3


# Precision.


@pytest.mark.long
@SOME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_that_of_the_reference(
    name: str, dtype: torch.dtype, device: str
) -> None:
    if "top" in name:  # of nearly equal tokens, another one may be chosen at every rounding
        name = "Krause, one sigma, all kept"
    layer, x = layer_of(name, device, dtype), tokens(1, 11).to(dtype)
    y, exact = stream(layer, x, layer.init_cache(1, WINDOW)), forward(layer, x)
    assert y.dtype == dtype
    plain = copy.deepcopy(layer).cpu()
    plain.backend = "reference"
    of_reference = plain(x, ga.causal_window_graph(11, WINDOW)) - exact
    rounding = torch.finfo(dtype).eps / 2 * exact.norm()
    assert (y - exact).norm() <= 2 * (of_reference.norm() + rounding)


@pytest.mark.long
def test_what_is_kept_may_have_another_dtype(device: str) -> None:
    layer, x = layer_of("Krause, one sigma, all kept", device), 3 * tokens(12)
    whole = layer.init_cache((), WINDOW)
    small = layer.init_cache((), WINDOW, dtype=torch.float16)
    assert small.is_ring
    assert 2 * small.num_bytes == whole.num_bytes
    y = stream(layer, x, small, [3, *[1] * 9])
    assert y.dtype == torch.float32
    error = (y - forward(layer, x)).abs().max()
    assert 1e-5 < error < 2e-2
    # The newest token is read as it is kept, like all others.
    old = copy.deepcopy(layer)
    old.backend = "structured"
    again = stream(old, x, old.init_cache((), WINDOW, dtype=torch.float16), [3, *[1] * 9])
    close(y[3:], again[3:])


# The cache.


@pytest.mark.long
@SOME
def test_a_ring_with_places_for_a_guess_takes_it_back(name: str, device: str) -> None:
    layer, x = layer_of(name, device), tokens(2, 12)
    expected = forward(layer, x)
    cache = poisoned(layer.init_cache(2, WINDOW, rollback=2))
    assert (cache.is_ring, cache.capacity) == (True, WINDOW + 2)
    t = 0
    while t < 12:
        twin, n = cache.clone(), 1 if t % 3 else 2
        guess = torch.full((2, 2, DIM), torch.nan) if t % 2 else tokens(2, 2, seed=t)
        stream(layer, guess, cache, [2] if t % 3 else [1, 1])
        cache.truncate(t)
        y = stream(layer, x[:, t : t + n], cache, [n])
        assert torch.equal(y, stream(layer, x[:, t : t + n], twin, [n]))
        close(y, expected[:, t : t + n])
        t += n
    cache.truncate(11)
    with pytest.raises(ValueError, match="length must be 11 to 11"):  # 13 had been seen
        cache.truncate(10)
    close(stream(layer, x[:, 11:], cache), expected[:, 11:])


@pytest.mark.long
def test_a_ring_of_the_window_alone_cannot_go_back(device: str) -> None:
    layer = layer_of("Krause, top 3", device)
    cache = layer.init_cache((), WINDOW)
    stream(layer, tokens(WINDOW), cache)
    cache.truncate(2)  # nothing has been written over yet
    stream(layer, tokens(WINDOW - 1), cache)
    with pytest.raises(ValueError, match=r"length must be 6 to 6 .*rollback = 0"):
        cache.truncate(WINDOW)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "other"),
    [("Krause, top 3", "structured"), ("Gaussian, rotary, normalised, eps", "reference")],
)
def test_either_form_of_the_cache_serves_either_way(name: str, other: str, device: str) -> None:
    by_kernel, x = layer_of(name, device), tokens(1, 12)
    by_torch = copy.copy(by_kernel)
    by_torch.backend = other
    expected = forward(by_kernel, x)
    for maker in (by_kernel, by_torch):
        cache, outputs = poisoned(maker.init_cache(1, WINDOW)), []
        with counting() as launched:
            for t, layer in enumerate([by_kernel, by_kernel, by_torch, by_torch] * 3):
                outputs.append(stream(layer, x[:, t : t + 1], cache))
        assert len(launched) == 6
        close(torch.cat(outputs, dim=1), expected)


@SOME
def test_beams_are_reordered_and_texts_branch(name: str, device: str) -> None:
    layer, x, more = layer_of(name, device), tokens(2, 8), tokens(2, 3, seed=2)
    cache = layer.init_cache(2, WINDOW)
    stream(layer, x, cache, [7, 1])
    branch = copy.deepcopy(cache)
    index = torch.tensor([1, 0, 1])
    cache.reorder(index.to(device))
    y = stream(layer, more[index], cache)
    close(y, forward(layer, torch.cat([x, more], 1)[index])[:, 8:])
    assert branch.position == 8
    assert branch.is_ring
    y = stream(layer, more, branch)
    close(y, forward(layer, torch.cat([x, more], 1))[:, 8:])


def test_a_cache_made_in_inference_mode_works_outside_and_back(device: str) -> None:
    layer, x = layer_of("Gaussian", device), tokens(2, 12)
    with torch.inference_mode():
        cache = layer.init_cache(2, WINDOW)
        first = stream(layer, x[:, :7], cache, [6, 1])
    second = stream(layer, x[:, 7:9], cache, valid=torch.ones(2, 2, dtype=torch.bool))
    with torch.inference_mode():
        third = stream(layer, x[:, 9:], cache)
    y = torch.cat([first, second, third], dim=1)
    assert not y.requires_grad
    close(y, forward(layer, x))


def test_no_texts_are_no_launch_that_fails(device: str) -> None:
    layer = layer_of("Krause, top 3", device)
    assert layer.step(torch.empty(0, DIM, device=device), layer.init_cache(0, 5)).shape == (0, DIM)


# How it is started.


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on "meta" may be given to kernels; autocast knows no "meta"."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)


def on_meta(name: str) -> tuple[Any, LayerCache]:
    layer = layer_of(name, "meta")
    return layer, layer.init_cache(3, WINDOW)


@EVERY_LAYER
def test_a_step_waits_for_nothing(name: str, interpreted: None) -> None:
    """Tensors on "meta" hold nothing, so whatever would be read on the host raises."""
    layer, cache = on_meta(name)
    x, valid = torch.empty(3, DIM, device="meta"), torch.ones(3, dtype=torch.bool, device="meta")
    with recording() as launches:
        for t in range(3 * WINDOW):
            assert layer.step(x, cache, valid=valid if t % 3 == 1 else None).shape == x.shape
    assert len(launches) == 3 * WINDOW


def test_only_places_change_from_token_to_token(interpreted: None) -> None:
    """Launches of successive steps differ only in their places, `first` and `held`.

    The compiler does not look at those, so nothing is compiled anew.
    """
    with recording() as launches:
        layer, cache = on_meta("Krause, top 3")
        for _ in range(3 * WINDOW):
            layer.step(torch.empty(3, DIM, device="meta"), cache)
    for one, other in pairwise(launches):
        numbers = [
            {
                name: [number for number in tree_leaves(value) if not isinstance(number, Tensor)]
                for name, value in step.arguments.items()
            }
            for step in (one, other)
        ]
        assert {k for k in numbers[0] if numbers[0][k] != numbers[1][k]} <= {"first", "held"}
        assert one.grid == other.grid


def test_only_a_gpu_or_the_backends_name_brings_in_the_kernel(device: str) -> None:
    layer, x = layer_of("Gaussian", "cpu"), tokens(2, 4)
    layer.backend = "auto"
    with counting() as launched:
        cache = layer.init_cache(2, WINDOW)
        y = stream(layer, x, cache)
        assert not cache.is_ring
        assert not launched
        with ga.use_backend("triton" if device == "cpu" else "auto"):
            cache = layer.to(device).init_cache(2, WINDOW)
            assert cache.is_ring
            close(stream(layer, x, cache), y)
    assert len(launched) == 4


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"window": None}, r"cannot run this case: its step kernel needs a window"),
        ({"top_k": 3}, {"window": 8193}, r"top_k in windows of at most 8192, not 8193"),
        ({}, {"window": 4, "dtype": torch.float64}, r"not float64, which the cache holds"),
    ],
)
def test_what_the_kernel_cannot_is_refused_by_name(
    options: dict[str, Any], arguments: dict[str, Any], message: str, device: str
) -> None:
    layer = ga.nn.KrauseAttention(DIM, 2, backend="triton", **options).to(device)
    with pytest.raises(ValueError, match=message):
        layer.init_cache(2, **arguments)
    layer.backend = "structured"
    cache = layer.init_cache(2, **arguments)
    layer.backend = "triton"
    with pytest.raises(ValueError, match=message):
        layer.step(torch.randn(2, DIM, device=device), cache)
    assert cache.position == 0


def test_heads_and_devices_that_no_kernel_takes_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = ga.nn.KrauseAttention(257, 1, backend="triton").to(device)
    with pytest.raises(ValueError, match="heads of 1 to 256 features, not of 257"):
        wide.init_cache(2, 4)
    with pytest.raises(ValueError, match="not float64"):
        layer_of("Gaussian", device, torch.float64).init_cache(2, 4)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="run on CUDA and HIP devices, not on cpu"):
        layer_of("Gaussian", "cpu").init_cache(2, 4)
