"""A layer with a score of somebody's own: one method, from which every way of running follows."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from nn_by_hand import DIM, HEADS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphattn as ga

EXACT = {"rtol": 1e-9, "atol": 1e-10}


class Laplacian(ga.Score):
    def __init__(self, bandwidth: Tensor) -> None:
        self.bandwidth = bandwidth

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return -(query - key).norm(dim=-1) / self.bandwidth


class LaplacianAttention(ga.nn.DotProductAttention):
    def __init__(self, dim: int, heads: int, **options: object) -> None:
        super().__init__(dim, heads, **options)  # type: ignore[arg-type]
        self.log_bandwidth = nn.Parameter(torch.zeros(heads))

    def score(self) -> ga.Score:
        return Laplacian(self.log_bandwidth.exp())


class Cosine(ga.Score):
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return self.scale * functional.cosine_similarity(query, key, dim=-1)

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = (functional.normalize(x, dim=-1) for x in (query, key))
        return self.scale[:, None, None] * (query @ key.mT)


class CosineAttention(ga.nn.DotProductAttention):
    def __init__(self, dim: int, heads: int, **options: object) -> None:
        super().__init__(dim, heads, **options)  # type: ignore[arg-type]
        self.scale = nn.Parameter(torch.linspace(1, 8, heads))

    def score(self) -> ga.Score:
        return Cosine(self.scale)


LAYERS = {"laplacian": LaplacianAttention, "cosine": CosineAttention}
EVERY = pytest.mark.parametrize("name", LAYERS)
OPTIONS = {
    "plain": {},
    "rope, top 3, sink, grouped": {"rope": True, "top_k": 3, "sink": True, "kv_heads": 1},
    "softcap, no value": {"softcap": 1.5, "value_projection": False},
}


def made(name: str, dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name](DIM, HEADS, **options).to(dtype)


def tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)


def with_gradients(layer: nn.Module, x: Tensor, graph: ga.TokenGraph) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, graph)
    layer.zero_grad()
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("options", OPTIONS)
@EVERY
def test_message_and_the_operation_agree_and_its_parameter_learns(name: str, options: str) -> None:
    layer, graph = made(name, **OPTIONS[options]), ga.causal_window_graph(12, 5)
    results = {}
    for backend in ("reference", "structured", "auto"):
        layer.backend = backend
        results[backend] = with_gradients(layer, tokens(2, 12), graph)
    for backend in ("structured", "auto"):
        for a, b in zip(results[backend], results["reference"], strict=True):
            torch.testing.assert_close(a, b, **EXACT)
    parameter = layer.log_bandwidth if name == "laplacian" else layer.scale
    assert bool((parameter.grad != 0).all())


@EVERY
def test_weights_by_hand(name: str) -> None:
    """Attention weights are the softmax of the formula on paper, on the layer's projections."""
    layer, x = made(name), tokens(6)
    graph = ga.complete_graph(6)
    _, weights = layer(x, graph, return_attention_weights=True)
    q, k = (f(x).view(6, HEADS, -1) for f in (layer.query_proj, layer.key_proj))
    if name == "laplacian":
        distance = (q[:, None] - k[None]).square().sum(-1).sqrt()
        logits = -distance / layer.log_bandwidth.exp()
    else:
        lengths = q.square().sum(-1).sqrt()[:, None] * k.square().sum(-1).sqrt()[None]
        logits = layer.scale * torch.einsum("ihd,jhd->ijh", q, k) / lengths
    torch.testing.assert_close(weights, logits.softmax(1).flatten(0, 1), **EXACT)


@pytest.mark.parametrize("options", OPTIONS)
@EVERY
def test_steps_of_generation_are_the_rows_of_the_layer(name: str, options: str) -> None:
    layer, x = made(name, **OPTIONS[options]).eval(), tokens(2, 14)
    expected = layer(x, ga.causal_window_graph(14, 4))
    with torch.no_grad():
        cache = layer.init_cache(2, 4)
        rows = [layer.step(x[:, i], cache) for i in range(14)]
    torch.testing.assert_close(torch.stack(rows, 1), expected, **EXACT)


@EVERY
def test_padding_is_never_read(name: str) -> None:
    layer, x = made(name), tokens(2, 10)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[0, 6:] = False
    x[0, 6:] = math.nan
    graph = ga.complete_graph(10)
    results = layer(x, graph, valid=valid)
    torch.testing.assert_close(results[0, :6], layer(x[0, :6], ga.complete_graph(6)), **EXACT)


def test_steps_of_a_score_within_the_library_are_its_rows() -> None:
    """Methods of the library's own layers count as shipped, but C++ code knows two scores only."""

    def score(_: ga.nn.DotProductAttention) -> ga.Score:
        return Laplacian(torch.ones(HEADS, dtype=torch.float64))

    methods = {"__module__": "graphattn.nn.krause", "score": score}
    layer = type("Inside", (ga.nn.DotProductAttention,), methods)(DIM, HEADS).double()
    x, graph = torch.randn(1, 12, DIM, dtype=torch.float64), ga.causal_window_graph(12, 5)
    with torch.no_grad():
        cache = layer.init_cache(1, window=5)
        steps = torch.stack([layer.step(x[:, t], cache) for t in range(12)], dim=1)
        torch.testing.assert_close(steps, layer(x, graph), **EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY
def test_checkpoints_give_the_same_gradients(name: str, reentrant: bool) -> None:
    layer, graph = made(name), ga.causal_graph(9)
    expected = with_gradients(layer, tokens(2, 9), graph)

    class Again(nn.Module):
        def forward(self, x: Tensor, graph: ga.TokenGraph) -> Tensor:
            results: Tensor = checkpoint(layer, x, graph, use_reentrant=reentrant)
            return results

        def zero_grad(self, set_to_none: bool = True) -> None:
            layer.zero_grad(set_to_none)

        def parameters(self, recurse: bool = True):
            return layer.parameters(recurse)

    for a, b in zip(with_gradients(Again(), tokens(2, 9), graph), expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.long
@EVERY
def test_it_compiles_whole_and_once_for_three_lengths(name: str) -> None:
    layer = made(name, torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for n in (11, 18, 27):
        x, graph = tokens(2, n).float(), ga.causal_graph(n)
        torch.testing.assert_close(compiled(x, graph), layer(x, graph), rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts[0] == counts[2]


@EVERY
def test_copies_and_files_are_the_same_layer(name: str) -> None:
    layer, graph, x = made(name), ga.causal_graph(9), tokens(2, 9)
    expected = layer(x, graph)
    assert torch.equal(copy.deepcopy(layer)(x, graph), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, graph), expected)


@EVERY
def test_autocast_and_torch_func_run_it(name: str) -> None:
    layer, graph, x = made(name, torch.float32), ga.causal_graph(9), tokens(2, 9).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(x, graph)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), layer(x, graph), rtol=0.1, atol=0.1)
    mapped = torch.func.vmap(lambda row: layer(row, graph))(x)
    torch.testing.assert_close(mapped, layer(x, graph), rtol=1e-4, atol=1e-5)


@EVERY
def test_compiled_code_is_refused_by_name(name: str) -> None:
    layer = made(name, backend="native")
    with pytest.raises(ValueError, match=r"backend 'native' cannot run this case.*not the score"):
        layer(tokens(2, 9), ga.causal_graph(9))


def test_a_layer_that_returns_a_shipped_score_is_what_that_score_says() -> None:
    """A shipped score with a tripled scale gives what tripled queries give, in steps too.

    Compiled code knows such a score, whatever its numbers.
    """

    class Sharp(ga.nn.DotProductAttention):
        def score(self) -> ga.Score:
            return ga.DotProduct(3 / math.sqrt(self.head_dim))

    torch.manual_seed(0)
    layer, x = Sharp(DIM, HEADS).double(), tokens(2, 9)
    plain = copy.deepcopy(layer)
    plain.__class__ = ga.nn.DotProductAttention
    with torch.no_grad():
        plain.query_proj.weight.mul_(3)
        plain.query_proj.bias.mul_(3)
    graph = ga.causal_graph(9)
    for backend in ("auto", "reference", "structured"):
        layer.backend = backend
        torch.testing.assert_close(layer(x, graph), plain(x, graph), **EXACT)
    layer.backend = "auto"
    cache = layer.init_cache(2, 9)
    with torch.no_grad():
        rows = [layer.step(x[:, i], cache) for i in range(9)]
    torch.testing.assert_close(torch.stack(rows, 1), plain(x, graph), **EXACT)


@pytest.mark.parametrize("kind", ["DotProductAttention", "KrauseAttention"])
def test_message_is_the_reference_operation_bit_by_bit(kind: str) -> None:
    """One statement of the score: message() and the operation do the same arithmetic."""
    torch.manual_seed(0)
    layer = getattr(ga.nn, kind)(DIM, HEADS, backend="reference").double()
    graph, x = ga.causal_window_graph(12, 5), tokens(12)
    query, key, value = layer.project(x, x, None)
    expected = ga.score_attention(query, key, value, graph, layer.score(), backend="reference")
    assert torch.equal(layer.mix(query, key, value, graph, (None, None)), expected)
