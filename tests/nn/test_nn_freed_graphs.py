"""Nothing that the library stores keeps a graph, or its list of edges, alive."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable, Iterator

import nn_by_hand as by_hand
import pytest
import torch

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops import edge_cache

N = 60
BACKENDS = ["reference", "structured", "auto"] + ["native"] * (library.why_not() is None)


def _edges(seed: int, tokens: int = N, share: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(tokens, tokens, generator=generator) < share
    return (seen | seen.T).fill_diagonal_(False)  # symmetric, as energy descent asks


GRAPHS: dict[str, Callable[[int], ga.TokenGraph]] = {
    "list": lambda seed: ga.from_edge_index(_edges(seed).nonzero().T, N),
    "mask": lambda seed: ga.from_mask(_edges(seed)),
    "radius": lambda seed: ga.radius_graph(
        torch.rand(N, 2, generator=torch.Generator().manual_seed(seed)), 0.4
    ),
    "table": lambda seed: ga.knn_graph(
        torch.rand(N, 2, generator=torch.Generator().manual_seed(seed)), 3
    ),
    "batch": lambda seed: ga.batch(
        [ga.from_mask(_edges(seed, 20)), ga.from_mask(_edges(seed, 40))]
    ),
    "mixed batch": lambda seed: ga.batch([ga.from_mask(_edges(seed, 20)), ga.complete_graph(40)]),
    "union": lambda seed: ga.union(ga.from_mask(_edges(seed)), ga.window_path_graph(N, 1)),
    "permuted": lambda seed: ga.window_path_graph(N, 2).permute(
        torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    ),
    "structure": lambda seed: ga.longformer_graph(N, 1 + seed % 3, [seed % N]),
}

Run = Callable[[ga.TokenGraph], torch.Tensor]


def _operations(backend: str) -> Iterator[tuple[str, Run]]:
    def tensors() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(N, 2, 4, requires_grad=True) for _ in range(3))

    options = {"backend": backend}
    yield "dot", lambda g: ga.dot_product_attention(*tensors(), g, **options)
    yield "top_k", lambda g: ga.dot_product_attention(*tensors(), g, top_k=2, **options)
    yield "rbf", lambda g: ga.rbf_attention(*tensors(), g, 1.0, **options)
    yield (
        "biased",
        lambda g: ga.dot_product_attention(
            *tensors(), g, edge_bias=torch.randn(g.num_edges, 2, requires_grad=True), **options
        ),
    )
    yield (
        "masked",
        lambda g: ga.dot_product_attention(*tensors(), g, valid=torch.arange(N) < 50, **options),
    )
    if backend != "native":  # linear attention has no C++ code
        yield "linear", lambda g: ga.linear_attention(*(x.exp() for x in tensors()), g, **options)


CASES = [
    *by_hand.ONE_OF_EACH,
    by_hand.Case("LinearAttention"),
    by_hand.Case("LinearAttention", {"rope": True}),
]


def _layers(backend: str) -> Iterator[tuple[str, Run]]:
    for case in CASES:
        if case.kind == "SelfConsensus":  # energy descent would warn of directed graphs
            case = by_hand.Case(case.kind, {**case.options, "update": "target"})
        if backend == "native" and case.kind == "LinearAttention":
            continue
        layer = case.make(dtype=torch.float32, backend=backend)

        def run(graph: ga.TokenGraph, layer=layer, case=case) -> torch.Tensor:
            x = torch.randn(N, by_hand.DIM, requires_grad=True)
            if case.context_width is None:
                return layer(x, graph)
            return layer(x, graph, context=torch.randn(N, case.context_width))

        yield str(case), run


def _calls(backend: str) -> dict[str, Run]:
    return dict([*_operations(backend), *_layers(backend)])


def _train(run: Run, graph: ga.TokenGraph, *, twice: bool) -> None:
    out = run(graph)
    gradients = torch.autograd.grad(
        out.square().sum(), _leaves(out.grad_fn), create_graph=twice, allow_unused=True
    )
    if twice:
        sum(g.square().sum() for g in gradients if g is not None).backward()


def _leaves(node: object) -> list[torch.Tensor]:
    """The leaves of a graph of autograd."""
    seen, variables, todo = set(), [], [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            variables.append(node.variable)
        todo.extend(following for following, _ in node.next_functions)
    return variables


@pytest.mark.every_case
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_graph_and_its_list_are_freed_without_a_search_for_garbage(kind: str, backend: str):
    gc.collect()
    before = len(edge_cache._cache)
    gc.disable()
    try:
        for name, run in _calls(backend).items():
            graph = GRAPHS[kind](0)
            run(graph)
            _train(run, graph, twice=True)
            stored = (graph._edge_index, graph._neighbors, graph._rowptr)
            alive = [weakref.ref(x) for x in (graph, *stored) if x is not None]
            del graph, stored
            assert not any(x() is not None for x in alive), name
            if kind != "structure":  # a few graphs of structures are stored
                assert len(edge_cache._cache) == before, name
    finally:
        gc.enable()


def _resident() -> float:
    """Megabytes of this process that are in memory now."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_stays_flat_over_two_thousand_graphs(backend: str):
    calls, kinds = _calls(backend), list(GRAPHS.values())
    for seed in range(2000):
        if seed == 200:  # by then, everything that is stored once for all graphs is there
            before = _resident()
        graph = kinds[seed % len(kinds)](seed)
        for run in calls.values():
            _train(run, graph, twice=False)
    gc.collect()
    assert _resident() - before < 16
