"""The support matrix: which backend runs what, from the library itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.structured import plan_of
from graphattn.ops.backends import BACKEND_NAMES
from graphattn.ops.support import OPERATIONS

GRAPHS = {
    "window path, causal window": lambda: ga.causal_window_graph(64, 5),
    "dilated window": lambda: ga.dilated_window_graph(64, 2, 3),
    "blocks": lambda: ga.block_window_graph(64, 16, shift=3),
    "complete": lambda: ga.complete_graph(64),
    "causal": lambda: ga.causal_graph(64),
    "bipartite, complete": lambda: ga.bipartite_complete_graph(64, 9),
    "batch of the above": lambda: ga.batch([ga.causal_graph(40), ga.complete_graph(24)]),
    "batch of equal sequences": lambda: ga.batch([ga.causal_graph(32)] * 2),
    "longformer": lambda: ga.longformer_graph(64, 2, (0,)),
    "causal longformer": lambda: ga.causal_longformer_graph(64, 3, 2),
    "batch of longformers": lambda: ga.batch([ga.longformer_graph(32, 2, (0,))] * 2),
    "bigbird": lambda: ga.bigbird_graph(64, 2, 2, (0,), seed=0),
    "cycle": lambda: ga.window_cycle_graph(64, 2),
    "grid": lambda: ga.grid_window_graph(8, 8, 1),
    "list of edges, nearest neighbours": lambda: ga.knn_graph(torch.randn(64, 2), 3),
}
HOW = {
    "WholePlan": "torch's fused attention",
    "TilePlan": "tiles of neighbouring tokens",
    "PartsPlan": "sequence by sequence",
    "GlobalTokensPlan": "global tokens apart from tiles",
    "RowPlan": "gathered rows, listed edges",
}


# Kernels are interpreted where this is built (conf.py). A GPU has run them if there is a record.
RECORDS = Path(__file__).parent / "benchmarks"
STAR = "\\*"
RUN = (
    "an NVIDIA H200 has compared them with float64 on 2026-11-26 ([some have changed since]"
    "(gpu.md#what-has-been-tested)), **no other GPU has run them**"
    if any(RECORDS.glob("visits/*.json"))
    else "**not yet run on a GPU**"
)
NOTE = (
    "\\* checked in Triton's interpreter and compiled ahead of time for sm_80, sm_90, sm_100 and "
    f"gfx942; {RUN}.\n"
)


def by_graph() -> str:
    """Backends by operation and graph, and how the structured one sees the graph."""
    rows = []
    for op in OPERATIONS:
        for name, build in GRAPHS.items():
            graph = build()
            query = torch.zeros(graph.num_targets, 2, 8)
            found = ga.backends(op, graph, query)
            how = "" if op == "consensus_update" else f" ({_how(graph)})"
            cells = [
                _yes(b) + how * (b == "structured") if why is None else "no"
                for b, why in found.items()
            ]
            rows.append([f"`{op}`, {name}", *cells])
    return _table(["operation, graph", *BACKEND_NAMES], rows) + "\n" + NOTE


def _how(graph: ga.TokenGraph) -> str:
    query, key = (torch.zeros(n, 2, 8) for n in (graph.num_targets, graph.num_sources))
    plan = plan_of(AttentionCall(query, key, key, graph, ga.DotProduct()))
    return HOW[type(plan).__name__]


def _causal(backend: str) -> ga.TokenGraph:
    """A causal window, or a causal graph for a backend that has no windows."""
    return ga.causal_graph(9) if backend == "fused" else ga.causal_window_graph(9, 3)


def _attend(backend: str, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
    graph: Any = options.pop("graph", None) or (
        ga.causal_graph(12) if backend == "fused" else ga.window_path_graph(12, 2, self_loops=True)
    )
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(12, 2, 4, generator=generator, dtype=torch.float64).to(dtype)
    kv_heads = options.pop("kv_heads", 2)
    key = query[:, :kv_heads].clone().requires_grad_()
    return ga.rbf_attention(query, key, key, graph, 1.0, backend=backend, **options)


def _capped(backend: str) -> Tensor:
    x = torch.randn(12, 2, 4).requires_grad_()
    graph = ga.window_path_graph(12, 2, self_loops=True)
    return ga.dot_product_attention(x, x, x, graph, softcap=5.0, backend=backend)


def _twice(backend: str) -> None:
    x = torch.randn(9, 2, 3, requires_grad=True)
    loss = ga.rbf_attention(x, x, x, _causal(backend), 1.0, backend=backend).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(gradient.sum(), x)


def _compiled(backend: str) -> None:
    kind = ga.nn.GaussianKernelAttention if backend == "fused" else ga.nn.KrauseAttention
    layer = kind(8, 2, backend=backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(9, 8), _causal(backend)).sum().backward()


def _transformed(backend: str) -> None:
    graph = _causal(backend)

    def loss(x: Tensor) -> Tensor:
        return ga.rbf_attention(x, x, x, graph, 1.0, backend=backend).square().sum()

    torch.func.grad(loss)(torch.randn(9, 2, 3))


def _lse(backend: str) -> None:
    _attend(backend, return_lse=True)[1].sum().backward()


def _per_sample(backend: str) -> None:
    graph = ga.window_path_graph(12, 2, self_loops=True)
    x, bias = torch.randn(3, 12, 2, 4), torch.zeros(3, 54, 2, requires_grad=True)
    ga.rbf_attention(x, x, x, graph, 1.0, edge_bias=bias, backend=backend).sum().backward()


CYCLE = ga.window_cycle_graph(12, 2)
FEATURES: dict[str, Callable[[str], object]] = {
    "float64": lambda b: _attend(b, torch.float64).sum().backward(),
    "float32": lambda b: _attend(b, torch.float32).sum().backward(),
    "bfloat16 (summed up in float32)": lambda b: _attend(b, torch.bfloat16).sum().backward(),
    "float16 (summed up in float32)": lambda b: _attend(b, torch.float16).sum().backward(),
    "`top_k` over windows": lambda b: _attend(b, top_k=2).sum().backward(),
    "`top_k` over other graphs": lambda b: _attend(b, top_k=2, graph=CYCLE).sum().backward(),
    "`eps`": lambda b: _attend(b, eps=0.1).sum().backward(),
    "`valid`": lambda b: _attend(b, valid=torch.arange(12) < 9).sum().backward(),
    "`edge_bias` per offset": lambda b: _attend(b, edge_bias=torch.zeros(5, 2)).sum().backward(),
    "`edge_bias` per edge": lambda b: _attend(b, edge_bias=torch.zeros(54, 2)).sum().backward(),
    "`edge_bias` per sample": _per_sample,
    "`sink`": lambda b: _attend(b, sink=torch.zeros(2)).sum().backward(),
    "`dropout`": lambda b: _attend(b, dropout=0.1).sum().backward(),
    "`softcap` (dot product)": lambda b: _capped(b).sum().backward(),
    "grouped-query heads": lambda b: _attend(b, kv_heads=1).sum().backward(),
    "gradient of `return_lse`": _lse,
    "second derivatives": _twice,
    "`torch.compile(fullgraph=True)` of a layer": _compiled,
    "`torch.func.grad`": _transformed,
}


def by_feature() -> str:
    """Attention's dtypes and options on every backend, each of them run."""
    rows = [
        [name, *(_answer(run, backend) for backend in BACKEND_NAMES)]
        for name, run in FEATURES.items()
    ]
    note = "\n`fused` was asked over causal graphs, because it has no windows.\n"
    return _table(["attention", *BACKEND_NAMES], rows) + note


def _answer(run: Callable[[str], object], backend: str) -> str:
    try:
        run(backend)
    except (RuntimeError, ValueError, NotImplementedError):
        return "no"
    return _yes(backend)


def _yes(backend: str) -> str:
    return "yes" + STAR * (backend == "triton")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
