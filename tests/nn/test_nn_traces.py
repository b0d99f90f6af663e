"""A layer whose graph was first seen in a trace: nothing made there is kept, and it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import nn_by_hand as by_hand
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphattn as ga
from graphattn.graphs.structures.bands import band_schedule_of, has_bands
from graphattn.kernels.cpu import library
from graphattn.ops.attention.structured.chunked import tiles_of
from graphattn.ops.attention.structured.plans import _graph_of as graph_of

N = 9
BACKENDS = ["reference", "structured", "auto"] + ["native"] * (library.why_not() is None)
GRAPHS: dict[str, Callable[[], ga.TokenGraph]] = {
    "window": lambda: ga.window_path_graph(N, 2),
    "complete": lambda: ga.complete_graph(N),
    "cycle": lambda: ga.window_cycle_graph(N, 2),
    "grid": lambda: ga.grid_window_graph(3, 3, 1),
    "blocks": lambda: ga.block_window_graph(N, 4, shift=2),
    "blocks of a grid": lambda: ga.grid_block_graph(3, 3, 2),
    "bigbird": lambda: ga.bigbird_graph(N, 1, 2, [0], seed=3),  # its edges are drawn
    "longformer": lambda: ga.longformer_graph(N, 1, [0]),
    "list": lambda: by_hand.irregular_graph(N, N),
    "table": lambda: ga.knn_graph(torch.arange(N).double().square()[:, None], 3),
    "batch": lambda: ga.batch([ga.window_path_graph(4, 1), ga.window_path_graph(5, 1)]),
    "mixed batch": lambda: ga.batch([ga.complete_graph(4), by_hand.irregular_graph(5, 5)]),
    "permuted": lambda: ga.window_path_graph(N, 2).permute(torch.arange(N).flip(0)),
    "no edges": lambda: ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), N),
}
CASES = [
    by_hand.Case("DotProductAttention", {"rope": True, "kv_heads": 2}),
    by_hand.Case("KrauseAttention", {"top_k": 2, "sink": True, "rope": True}),
    by_hand.Case("GaussianKernelAttention", {"rope": True, "normalize": True, "eps": 0.01}),
    by_hand.Case("LinearAttention", {"rope": True}),
    by_hand.Case("LinearAttention"),
    by_hand.Case("SelfConsensus", {"edge_hidden": 6, "step_size": "auto", "rope": "isometric"}),
    by_hand.Case("CrossConsensus", {"edge_hidden": 6, "rope": True}, by_hand.DIM),
]


def _export(model: Any, inputs: tuple[Tensor, ...]) -> Any:
    return torch.export.export(model, inputs).module()


def _export_for_any_batch(model: Any, inputs: tuple[Tensor, ...]) -> Any:
    batch = {0: torch.export.Dim("batch", min=2)}
    shapes: dict[str, Any] = {"x": batch} | ({"context": (batch,)} if inputs[1:] else {})
    return torch.export.export(model, inputs, dynamic_shapes=shapes).module()


def _make_fx(mode: Any, *, pre_dispatch: bool = False) -> Callable[..., Any]:
    def trace(model: Any, inputs: tuple[Tensor, ...]) -> Any:
        return make_fx(
            lambda *x: model(*x),
            tracing_mode=mode,
            pre_dispatch=pre_dispatch,
            _allow_non_fake_inputs=True,
        )(*inputs)

    return trace


def _functionalize(model: Any, inputs: tuple[Tensor, ...]) -> Any:
    return torch.func.functionalize(lambda *x: model(*x))


def _fake(model: Any, inputs: tuple[Tensor, ...]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = model(*(mode.from_tensor(x) for x in inputs))
    assert out.shape == inputs[0].shape


def _jit(model: Any, inputs: tuple[Tensor, ...]) -> Any:
    return torch.jit.trace(model, inputs, check_trace=False)


TRACES: dict[str, Callable[..., Any]] = {
    "export": _export,
    "export for any batch": _export_for_any_batch,
    "make_fx": _make_fx("real"),
    "make_fx before dispatch": _make_fx("real", pre_dispatch=True),
    "make_fx of fakes": _make_fx("fake"),
    "make_fx of symbols": _make_fx("symbolic"),
    "functionalize": _functionalize,
    "jit": _jit,
    "fake": _fake,
}


class Model(torch.nn.Module):
    """A layer over one graph."""

    def __init__(self, layer: Any, graph: ga.TokenGraph) -> None:
        super().__init__()
        self.layer, self.graph = layer, graph

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return self.layer(x, self.graph, **dict(zip(("context",), context, strict=False)))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Every tensor and symbolic number in a value of this library, at any depth."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Any = ()
    if isinstance(value, Tensor | torch.SymInt):
        yield value
    elif isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, tuple | list | set):
        parts = value
    elif type(value).__module__.startswith("graphattn"):
        parts = getattr(value, "__dict__", {}).values()
    for part in list(parts):
        yield from _tensors_in(part, seen)


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_trace_first_then_calls_then_training(
    kind: str, trace: str, case: by_hand.Case, backend: str
):
    layer = case.make(dtype=torch.float32, backend=backend)
    widths = [by_hand.DIM] if case.context_width is None else [by_hand.DIM, case.context_width]
    inputs = tuple(torch.randn(2, N, width) for width in widths)
    graph = GRAPHS[kind]()
    model = Model(layer, graph)
    expected = Model(layer, GRAPHS[kind]())(*inputs)
    traced = TRACES[trace](model, inputs)
    kept = list(_tensors_in(graph, set()))
    assert all(type(x) is Tensor and not torch._is_functional_tensor(x) for x in kept)
    torch.testing.assert_close(model(*inputs), expected)
    if traced is not None:
        other = tuple(torch.randn_like(x) for x in inputs)
        torch.testing.assert_close(traced(*other), model(*other))
    x = inputs[0].requires_grad_()
    model(x, *inputs[1:]).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "make", [ga.causal_window_graph, ga.window_cycle_graph], ids=["band", "cycle"]
)
def test_tables_that_graphs_share_are_not_made_in_a_trace(make: Callable[..., ga.TokenGraph]):
    """The first use of a structure is in a trace; another graph of it is used after that."""
    graph, other = (make(61, 7) for _ in range(2))
    assert graph.structure is not None

    def first(x: Tensor) -> Tensor:
        for table in (tiles_of, band_schedule_of) if has_bands(graph.structure) else ():
            table(graph.structure, x.device)
        assert graph_of(graph.structure, x.device).edge_index.shape[0] == 2
        ga.rbf_attention(x, x, x, graph, 1.25, backend="reference")  # the number is stored, too
        return x

    x = torch.randn(61, 2, 3)
    torch.func.functionalize(first)(x)
    for backend in BACKENDS:
        mine = ga.rbf_attention(x, x, x, other, 1.25, backend=backend)
        torch.testing.assert_close(mine, ga.rbf_attention(x, x, x, other, torch.tensor(1.25)))


@pytest.mark.parametrize("case", [*CASES, *by_hand.ONE_OF_EACH], ids=str)
@pytest.mark.parametrize("kind", ["window", "list"])
def test_an_ensemble_gives_what_its_layers_give(kind: str, case: by_hand.Case):
    """Outputs and gradients of three layers at once, whose parameters vmap stacks."""
    graph, layers = GRAPHS[kind](), [case.make(seed=seed) for seed in range(3)]
    x = torch.randn(2, N, by_hand.DIM, dtype=torch.float64)
    given = {}
    if case.context_width is not None:
        given["context"] = torch.randn(2, N, case.context_width, dtype=torch.float64)
    stacked, _ = torch.func.stack_module_state(layers)

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], parameters, (x, graph), given)

    together = torch.func.vmap(run)(stacked)
    gradients = torch.func.vmap(torch.func.grad(lambda p: run(p).square().sum()))(stacked)
    for k, layer in enumerate(layers):
        out = layer(x, graph, **given)
        torch.testing.assert_close(together[k], out)
        parameters = dict(layer.named_parameters())
        apart = torch.autograd.grad(out.square().sum(), parameters.values())
        for name, gradient in zip(parameters, apart, strict=True):
            torch.testing.assert_close(gradients[name][k], gradient)


def test_numbers_of_heads_may_be_mapped():
    """A bandwidth and a sink per entry, in operations and in a step of generation."""
    graph, x = ga.causal_graph(N), torch.randn(N, 2, 3, dtype=torch.float64)
    sigma, sink = torch.tensor([[0.5, 1.0], [2.0, 0.1]]), torch.tensor([[0.0, 1.0], [-1.0, 2.0]])

    def whole(sigma: Tensor, sink: Tensor) -> Tensor:
        return ga.rbf_attention(x, x, x, graph, sigma, sink=sink)

    def step(sigma: Tensor, sink: Tensor) -> Tensor:
        caches = x[None], x[None]
        return ga.decode_attention(x[None, -1:], *caches, N, sigma=sigma, sink=sink)[0, 0]

    outputs = torch.func.vmap(whole)(sigma, sink)
    torch.testing.assert_close(outputs, torch.stack([*map(whole, sigma, sink)]))
    torch.testing.assert_close(torch.func.vmap(step)(sigma, sink), outputs[:, -1])
    with pytest.raises(ValueError, match="sigma must be > 0"):  # it can be read, so it is checked
        torch.func.grad(lambda x: ga.rbf_attention(x, x, x, graph, -sigma[0]).sum())(x)


@pytest.mark.parametrize("backend", ["structured", *(["native"] if "native" in BACKENDS else [])])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
@pytest.mark.parametrize("case", by_hand.ONE_OF_EACH, ids=str)
def test_a_backend_that_torch_func_cannot_follow_says_so(
    case: by_hand.Case, transform: str, backend: str
):
    layer, graph = case.make(backend=backend), GRAPHS["list"]()
    x = torch.randn(2, N, by_hand.DIM, dtype=torch.float64)
    given = {}
    if case.context_width is not None:
        given["context"] = torch.randn(N, case.context_width, dtype=torch.float64)
    transforms: dict[str, Callable[..., Any]] = {
        "grad": lambda run: torch.func.grad(lambda x: run(x).sum())(x[0]),
        "vmap": lambda run: torch.func.vmap(run)(x),
        "jvp": lambda run: torch.func.jvp(run, (x[0],), (x[1],)),
    }
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run inside torch.func"):
        transforms[transform](lambda x: layer(x, graph, **given))


@pytest.mark.parametrize("case", [*CASES, *by_hand.ONE_OF_EACH], ids=str)
def test_a_layer_that_was_made_without_values_tells_shapes(case: by_hand.Case):
    with FakeTensorMode():
        layer = getattr(ga.nn, case.kind)(by_hand.DIM, by_hand.HEADS, **case.options)
        x = torch.randn(2, N, by_hand.DIM, requires_grad=True)
        given = {}
        if case.context_width is not None:
            given["context"] = torch.randn(2, N, case.context_width)
        out = layer(x, ga.window_path_graph(N, 2), **given)
        out.sum().backward()
    assert out.shape == x.shape
    assert isinstance(x.grad, FakeTensor)


@pytest.mark.parametrize("trace", ["make_fx", "make_fx before dispatch", "make_fx of fakes"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_bias_per_edge_is_traced_over_a_new_graph(kind: str, trace: str):
    """Edges are counted, some of them from the degrees of tokens."""
    graph, bias = GRAPHS[kind](), torch.randn(1, GRAPHS[kind]().num_edges, 2)

    def attend(x: Tensor, bias: Tensor) -> Tensor:
        return ga.rbf_attention(x, x, x, graph, 1.0, edge_bias=bias)

    x = torch.randn(N, 2, 3)
    traced = TRACES[trace](attend, (x, bias))
    torch.testing.assert_close(traced(x + 1, bias), attend(x + 1, bias))


def test_where_all_tensors_are_fake_none_is_kept():
    """Constants would then not be allowed."""
    graph = ga.causal_window_graph(N, 3)
    with FakeTensorMode():
        assert isinstance(graph.positions, FakeTensor)
    assert graph.positions.tolist() == list(range(N))


def test_a_graph_made_in_a_trace_is_traced():
    """Edges are those of every later call, not constants."""

    def sums(x: Tensor) -> Tensor:
        neighbors = ga.knn_graph(x, 2, self_loops=True).neighbors
        assert neighbors is not None
        return neighbors.sum(1)

    traced = make_fx(sums)(torch.randn(7, 3))
    for x in torch.randn(4, 7, 3):
        torch.testing.assert_close(traced(x), sums(x))
