"""Steps of consensus by compiled code, beside whole texts in float64 and the same step in torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import builds
import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.consensus.native import steps

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "automatic": {"step_size": "auto", "rank": 1},
    "learned": {"step_size": "learned", "trunk": "separate"},
    "full networks": {"edge_input": "full", "edge_networks": "per_head", "bias": False},
    "one network": {"edge_input": "full", "step_size": "auto", "bias": False},
    "rope": {"rope": True},
    "isometric": {"rope": "isometric", "step_size": "auto", "edge_input": "full"},
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = ga.nn.SelfConsensus(
        24, 2, edge_hidden=19, **{"update": "target", **LAYERS[name], **options}
    ).to(dtype)
    if layer.step_size == "learned":
        torch.nn.init.normal_(layer.raw_step_size, -2)
    return layer


def text(tokens: int, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(*batch, tokens, 24, generator=generator).to(dtype)


def stream(layer: Any, x: Tensor, cache: Any, valid: Tensor | None = None) -> Tensor:
    rows = []
    for t in range(x.shape[-2]):
        mask = None if valid is None else valid[..., t]
        rows.append(layer.step(x[..., t, :], cache, valid=mask))
    return torch.stack(rows, dim=-2)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many calls of compiled steps there are within the block."""
    assert steps._LIBRARY is not None
    compiled, calls = steps._LIBRARY, [0]

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls[0] += name == "graphattn_consensus_steps"
            return getattr(compiled, name)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_LIBRARY", Counted())
        yield calls


def graph_of(tokens: int, window: int | None) -> ga.TokenGraph:
    return ga.causal_graph(tokens) if window is None else ga.causal_window_graph(tokens, window)


@each_layer
@pytest.mark.parametrize("window", [1, 7, 40, None])
def test_steps_give_what_the_whole_text_gives(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None
) -> None:
    layer, x = layer_of(name), text(60, 3)
    reference = layer_of(name, backend="reference")
    expected = reference(x, graph_of(60, window))
    with counted(monkeypatch) as calls:
        y = stream(layer, x, layer.init_cache(3, window))
    assert calls[0] == 60
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("build", ["base", "v3", "v4"])
def test_every_build_steps_as_the_whole_text(build: str) -> None:
    builds.run_with(
        build,
        """
import torch
from test_native_consensus_steps import LAYERS, graph_of, layer_of, stream, text
for name in LAYERS:
    layer, reference = layer_of(name), layer_of(name, backend="reference")
    for window in (1, 23, None):
        x = text(50, 2)
        y = stream(layer, x, layer.init_cache(2, window))
        expected = reference(x, graph_of(50, window))
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
""",
    )


@each_layer
def test_padding_is_never_read(name: str) -> None:
    """Steps never read padding, which holds NaN here.

    It stands on the left of two texts, and anywhere in a third.
    """
    layer, reference = layer_of(name), layer_of(name, backend="reference")
    x, valid = text(40, 3), torch.ones(3, 40, dtype=torch.bool)
    valid[0, :9], valid[1, :1] = False, False
    valid[2] = torch.arange(40) % 5 != 3
    x = x.masked_fill(~valid[..., None], torch.nan)
    expected = reference(x, graph_of(40, 8), valid=valid)
    y = stream(layer, x, layer.init_cache(3, 8), valid)
    torch.testing.assert_close(y[valid], expected[valid], rtol=1e-11, atol=1e-11)
    assert y.isfinite().all()


@each_layer
def test_where_the_tokens_stand_in_the_cache_changes_no_bit(name: str) -> None:
    """Steps give the same bits wherever the tokens stand in the cache.

    Tokens stand in a line, in a ring, and in a ring that was copied in between.
    """
    layer, x = layer_of(name, torch.float32), text(70, 2, dtype=torch.float32)
    line = layer.init_cache(2, 16)
    sizes = line.owner, line.fields, (2,), 16
    ring = ga.nn.LayerCache(*sizes, dtype=torch.float32, device=line.device, ring=True)
    expected = stream(layer, x, line)
    assert torch.equal(stream(layer, x[:, :40], ring), expected[:, :40])
    for twin in (copy.deepcopy(ring), pickle.loads(pickle.dumps(ring)), ring.clone()):
        assert torch.equal(stream(layer, x[:, 40:], twin), expected[:, 40:])


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_other_texts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    layer, x = layer_of(name, dtype), text(300, 3, dtype=dtype)
    before, results = torch.get_num_threads(), []
    cache = layer.init_cache(3, 256)
    layer.step(x[:, :280], cache)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(stream(layer, x[:, 280:], cache.clone()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_layer
def test_a_cache_of_half_precision_is_read_as_it_is(
    name: str, dtype: torch.dtype, kept: torch.dtype
) -> None:
    """Compiled steps read a cache of half precision as steps in operations of torch read it.

    Only the order of sums differs there.
    """
    layer, x = layer_of(name, dtype), text(40, 2, dtype=dtype)
    cache = layer.init_cache(2, 12, dtype=kept)
    twin = layer.init_cache(2, 12, dtype=kept)
    y = stream(layer, x, cache)
    layer.backend = "structured"
    expected = stream(layer, x, twin)
    rounding = 1e-5 if dtype == torch.float32 and kept == torch.float16 else 2e-2
    torch.testing.assert_close(y, expected, rtol=rounding, atol=max(rounding, 1e-3))


CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "another projection": (
        lambda layer: setattr(layer, "source_proj", Doubled(layer.source_proj)),
        True,
    ),
    "another first layer": (
        lambda layer: setattr(layer.edge_net, "target", Doubled(layer.edge_net.target)),
        True,
    ),
    "a hook on a first layer": (
        lambda layer: layer.edge_net.source.register_forward_hook(
            lambda *arguments: arguments[2] * 2
        ),
        True,
    ),
    "another step": (
        lambda layer: setattr(layer, "step_tensor", lambda: torch.tensor([0.3])),
        False,
    ),
    "a step of each head": (
        lambda layer: setattr(layer, "step_tensor", lambda: torch.tensor([0.3, 0.1]).double()),
        True,
    ),
    "another matrix": (
        lambda layer: setattr(layer.edge_net, "edge_matrix", scaled(layer.edge_net.edge_matrix)),
        False,
    ),
    "weights of another layout": (
        lambda layer: setattr(
            layer.edge_net.alpha, "data", layer.edge_net.alpha.data.t().clone().t()
        ),
        True,
    ),
}


class Doubled(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * self.inner(x)
        return y


def scaled(matrix: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(*given: Any) -> Any:
        R = matrix(*given)
        return R._replace(alpha=2 * R.alpha)

    return doubled


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_put_into_a_layer_is_what_steps_do(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Steps do what somebody put into a layer, even while a cache is in use.

    Compiled code still runs wherever it can tell what the layer does.
    """
    layer, twin, x = layer_of("plain"), layer_of("plain", backend="reference"), text(20)
    cache, other = layer.init_cache((), 5), twin.init_cache((), 5)
    for each, kept in ((layer, cache), (twin, other)):
        stream(each, x[:8], kept)
        CHANGES[change][0](each)
    with counted(monkeypatch) as calls:
        y = stream(layer, x[8:], cache)
    assert bool(calls[0]) == CHANGES[change][1]
    torch.testing.assert_close(y, stream(twin, x[8:], other), rtol=1e-11, atol=1e-11)


def test_a_step_that_was_asked_for_by_name_is_refused_where_it_cannot_be() -> None:
    layer = layer_of("plain", torch.float32, backend="native")
    with pytest.raises(ValueError, match="does not mix"):
        layer.init_cache((), 4, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"torch\.func, a trace or a mode of torch must see every operation"
    ):
        torch.func.vmap(lambda x: layer.step(x, layer.init_cache((), 4)))(
            text(3, dtype=torch.float32)
        )


def test_steps_in_inference_mode_leave_a_cache_that_others_may_use() -> None:
    layer, x = layer_of("automatic", torch.float32), text(12, dtype=torch.float32)
    cache = layer.init_cache((), 4)
    with torch.inference_mode():
        first = stream(layer, x[:6], cache)
    rest = stream(layer, x[6:], cache)
    expected = layer(x, graph_of(12, 4))
    torch.testing.assert_close(torch.cat([first, rest]), expected, rtol=1e-4, atol=1e-5)
    assert not rest.requires_grad
