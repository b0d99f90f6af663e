"""Contenders that use graphattn, written as a user of the library writes them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

import graphattn as ga
from graphattn.bench.cases.inputs import (
    AttentionInputs,
    ConsensusTensors,
    LayerInputs,
    NeighborInputs,
    SpectralInputs,
    StreamInputs,
    WindowSize,
)
from graphattn.bench.contenders.peers import (
    check_memory_of_edge_networks,
    check_memory_of_edges,
    only_on_a_cpu,
)


def rbf(x: AttentionInputs) -> Tensor:
    """Compute RBF attention on the backend that "auto" selects."""
    if ga.backends("rbf_attention", x.graph, x.query)["structured"] is not None:
        check_memory_of_edges(x)  # "auto" selects the reference backend
    return ga.rbf_attention(x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k)


def rbf_fused(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by PyTorch's fused attention, with half squares as more features."""
    return ga.rbf_attention(x.query, x.key, x.value, x.graph, x.sigma, backend="fused")


def dot_product(x: AttentionInputs) -> Tensor:
    """Compute dot-product attention over the edges; dense SDPA computes it over all pairs."""
    return ga.dot_product_attention(x.query, x.key, x.value, x.graph)


def rbf_structured(x: AttentionInputs) -> Tensor:
    """Compute RBF attention with PyTorch's operators, without graphattn's compiled kernels."""
    only_on_a_cpu(x.query.device)
    return ga.rbf_attention(
        x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k, backend="structured"
    )


def rbf_without_top_k(x: AttentionInputs) -> Tensor:
    """Compute RBF attention without top-k: the difference to `rbf` is the cost of it."""
    return rbf(replace(x, top_k=None))


def consensus(x: ConsensusTensors) -> Tensor:
    """Compute one consensus step on the backend that "auto" selects."""
    if ga.backends("consensus_update", x.graph, x.state)["structured"] is not None:
        check_memory_of_edge_networks(
            x.num_edges, x.network
        )  # "auto" selects the reference backend
    return ga.consensus_update(
        x.state, x.state, x.target_hidden, x.source_hidden, x.network, x.graph, x.step_size
    )


def layer(x: LayerInputs) -> Tensor:
    out: Tensor = x.layer(x.tokens, x.graph)
    return out


def neighbors(x: NeighborInputs) -> tuple[Tensor, Tensor]:
    """Find the nearest neighbours; return their squared distances and indices."""
    indices, distances = ga.knn(x.points, x.k)
    return distances, indices


def build_graph(x: WindowSize) -> ga.TokenGraph:
    """Build a window graph, which is stored as a band and not as a list of edges."""
    return ga.window_path_graph(x.num_tokens, x.window)


def list_edges(x: WindowSize) -> Tensor:
    return build_graph(x).edge_index


def fiedler_value(x: SpectralInputs) -> float:
    """Compute the Fiedler value of a weighted graph that is given as a list of edges."""
    return ga.spectral.fiedler_value(x.graph, x.edge_weight)


def late_step(x: StreamInputs) -> Tensor:
    return x.late.step()


def early_step(x: StreamInputs) -> Tensor:
    return x.early.step()
