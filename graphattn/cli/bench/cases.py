"""What is measured: one case per row of the performance targets, in three sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import graphattn as ga
from graphattn.cli.bench import contenders as other
from graphattn.cli.bench.inputs import (
    AttentionInputs,
    ConsensusInputs,
    NeighborInputs,
    attention_inputs,
    consensus_inputs,
)

Size = dict[str, int]
OURS = "graphattn"


@dataclass(frozen=True)
class Case:
    """One workload; every contender computes the same from the same inputs."""

    name: str
    title: str
    sizes: dict[str, Size]
    make: Callable[[Size, torch.device, torch.dtype], Any]
    contenders: dict[str, other.Run]
    yardsticks: dict[str, other.Run] = field(default_factory=dict)  # they compute something else
    backward: bool = True
    work: Callable[[Size], tuple[float, float]] = lambda size: (0.0, 0.0)  # flops, bytes

    def runs(self) -> dict[str, other.Run]:
        """Everything that is timed."""
        return {**self.contenders, **self.yardsticks}


# What graphattn does.


def rbf(x: AttentionInputs) -> torch.Tensor:
    """RBF attention on the backend that "auto" takes."""
    if ga.backends("rbf_attention", x.graph, x.query)["structured"] is not None:
        other.afford_edges(x)  # on the reference backend
    return ga.rbf_attention(x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k)


def rbf_reference(x: AttentionInputs) -> torch.Tensor:
    """The same on the reference backend."""
    return ga.rbf_attention(
        x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k, backend="reference"
    )


def consensus(x: ConsensusInputs) -> torch.Tensor:
    """A consensus step on the backend that "auto" takes."""
    return ga.consensus_update(
        x.state, x.state, x.target_hidden, x.source_hidden, x.network, x.graph, x.step_size
    )


def neighbors(x: NeighborInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest neighbours; squared distances and indices."""
    indices, distances = ga.knn(x.points, x.k)
    return distances, indices


# Inputs and work.


def _attention(
    graph: Callable[[Size], ga.TokenGraph],
) -> Callable[[Size, torch.device, torch.dtype], AttentionInputs]:
    def make(size: Size, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
        return attention_inputs(
            graph(size), size["heads"], size["features"], device, dtype, size.get("top_k")
        )

    return make


def _attention_work(edges: Callable[[Size], int]) -> Callable[[Size], tuple[float, float]]:
    """Two products per edge and head; queries, keys, values and outputs moved once (float32)."""

    def work(size: Size) -> tuple[float, float]:
        width = size["heads"] * size["features"]
        return 4.0 * edges(size) * width, 4.0 * 4 * size["tokens"] * width

    return work


def _window_edges(size: Size) -> int:
    return size["tokens"] * size["window"]


def _consensus_graph(size: Size) -> ga.TokenGraph:
    return ga.window_path_graph(size["tokens"], size["window"])


def _consensus_work(size: Size) -> tuple[float, float]:
    """The product xi -> r D of every edge and head; state and hidden vectors moved once."""
    edges = size["batch"] * _consensus_graph(size).num_edges
    tokens = size["batch"] * size["tokens"]
    moved = tokens * (2 * size["dim"] + 2 * size["heads"] * size["edge_hidden"])
    return 2.0 * edges * size["edge_hidden"] * size["rank"] * size["dim"], 4.0 * moved


def _points(size: Size, device: torch.device, dtype: torch.dtype) -> NeighborInputs:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(size["tokens"], size["features"], generator=generator)
    return NeighborInputs(points.to(device, dtype), size["k"])


GATHER_SCATTER = {
    "index_add": other.index_add,
    "torch-scatter": other.torch_scatter,
    "compiled": other.compiled,
}
HEADS = {"heads": 8, "features": 64}

CASES = [
    Case(
        "complete",
        "RBF attention, complete graph",
        {
            "small": {"tokens": 512, **HEADS},
            "paper": {"tokens": 4096, **HEADS},
            "long": {"tokens": 16384, **HEADS},
        },
        _attention(lambda size: ga.complete_graph(size["tokens"])),
        {OURS: rbf, "masked dense": other.masked_dense, "KeOps": other.keops},
        {"SDPA (dot product)": other.sdpa_dot},
        work=_attention_work(lambda size: size["tokens"] ** 2),
    ),
    Case(
        "causal-window",
        "RBF attention, causal window",
        {
            "small": {"tokens": 1024, "window": 64, **HEADS},
            "paper": {"tokens": 16384, "window": 256, **HEADS},
            "long": {"tokens": 131072, "window": 256, **HEADS},
        },
        _attention(lambda size: ga.causal_window_graph(size["tokens"], size["window"])),
        {OURS: rbf, "index_add": other.index_add, "masked dense": other.masked_dense},
        {"SDPA, causal (dot product)": other.sdpa_causal},
        work=_attention_work(_window_edges),
    ),
    Case(
        "window",
        "RBF attention, 8 tokens on each side",
        {
            "small": {"tokens": 2048, "window": 17, **HEADS},
            "paper": {"tokens": 65536, "window": 17, **HEADS},
            "long": {"tokens": 131072, "window": 17, **HEADS},
        },
        _attention(
            lambda size: ga.window_path_graph(
                size["tokens"], size["window"] // 2, self_loops=True
            )
        ),
        {OURS: rbf, **GATHER_SCATTER},
        work=_attention_work(_window_edges),
    ),
    Case(
        "krause",
        "Krause attention: causal window, top-k",
        {
            "small": {"tokens": 512, "window": 64, "top_k": 48, **HEADS},
            "paper": {"tokens": 8192, "window": 256, "top_k": 192, **HEADS},
            "long": {"tokens": 65536, "window": 256, "top_k": 192, **HEADS},
        },
        _attention(lambda size: ga.causal_window_graph(size["tokens"], size["window"])),
        {OURS: rbf, "masked dense": other.masked_dense},
        work=_attention_work(_window_edges),
    ),
    Case(
        "consensus",
        "Consensus step, window-path graph",
        {
            "small": {"batch": 1, "tokens": 256, "window": 2, "dim": 384, "heads": 6,
                      "edge_hidden": 64, "rank": 4},
            "paper": {"batch": 4, "tokens": 1024, "window": 2, "dim": 384, "heads": 6,
                      "edge_hidden": 256, "rank": 4},
            "long": {"batch": 1, "tokens": 131072, "window": 2, "dim": 64, "heads": 1,
                     "edge_hidden": 64, "rank": 4},
        },
        lambda size, device, dtype: consensus_inputs(_consensus_graph(size), size, device, dtype),
        {OURS: consensus, "gather/scatter": other.gather_scatter_consensus},
        {"its product alone": other.dominant_product},
        work=_consensus_work,
    ),
    Case(
        "knn",
        "Nearest neighbours",
        {
            "small": {"tokens": 1024, "features": 64, "k": 16},
            "paper": {"tokens": 16384, "features": 64, "k": 16},
            "long": {"tokens": 32768, "features": 64, "k": 16},
        },
        _points,
        {
            OURS: neighbors,
            "cdist + topk": other.cdist_topk,
            "chunked matmul + topk": other.chunked_matmul_topk,
            "scikit-learn brute": other.sklearn_brute,
        },
        backward=False,
        work=lambda size: (2.0 * size["tokens"] ** 2 * size["features"], 0.0),
    ),
]  # fmt: skip
