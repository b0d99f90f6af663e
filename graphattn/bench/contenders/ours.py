"""Contenders by graphattn, written as its users would."""

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
    """RBF attention on the backend that "auto" takes."""
    if ga.backends("rbf_attention", x.graph, x.query)["structured"] is not None:
        check_memory_of_edges(x)  # on the reference backend
    return ga.rbf_attention(x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k)


def dot_product(x: AttentionInputs) -> Tensor:
    """The dot product over the same edges: what dense SDPA computes over all."""
    return ga.dot_product_attention(x.query, x.key, x.value, x.graph)


def rbf_structured(x: AttentionInputs) -> Tensor:
    """RBF attention by torch's operators alone: beside it stands what own compiled code gains."""
    only_on_a_cpu(x.query.device)
    return ga.rbf_attention(
        x.query, x.key, x.value, x.graph, x.sigma, top_k=x.top_k, backend="structured"
    )


def rbf_without_top_k(x: AttentionInputs) -> Tensor:
    """Attend without top-k: what selection costs."""
    return rbf(replace(x, top_k=None))


def consensus(x: ConsensusTensors) -> Tensor:
    """A consensus step on the backend that "auto" takes."""
    if ga.backends("consensus_update", x.graph, x.state)["structured"] is not None:
        check_memory_of_edge_networks(x)  # on the reference backend
    return ga.consensus_update(
        x.state, x.state, x.target_hidden, x.source_hidden, x.network, x.graph, x.step_size
    )


def layer(x: LayerInputs) -> Tensor:
    """A whole layer, on the backend that "auto" takes."""
    out: Tensor = x.layer(x.tokens, x.graph)
    return out


def neighbors(x: NeighborInputs) -> tuple[Tensor, Tensor]:
    """Nearest neighbours; squared distances and indices."""
    indices, distances = ga.knn(x.points, x.k)
    return distances, indices


def build_graph(x: WindowSize) -> ga.TokenGraph:
    """A window graph, known in closed form."""
    return ga.window_path_graph(x.num_tokens, x.window)


def list_edges(x: WindowSize) -> Tensor:
    """List a graph's edges after making it."""
    return build_graph(x).edge_index


def fiedler_value(x: SpectralInputs) -> float:
    """The Fiedler value of a weighted graph whose edges are listed."""
    return ga.spectral.fiedler_value(x.graph, x.edge_weight)


def late_step(x: StreamInputs) -> Tensor:
    """One more token of a long stream."""
    return x.late.step()


def early_step(x: StreamInputs) -> Tensor:
    """One more token of a short stream."""
    return x.early.step()
