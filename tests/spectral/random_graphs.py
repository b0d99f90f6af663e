"""Random graphs, weights and tokens for the tests of spectra, and weights written out by hand."""

import numpy as np
import torch

import graphattn as ga


def random_digraph(num_tokens, seed, density=0.5):
    """A digraph with self-loops and one-sided edges, its weights, and the generator of both."""
    rng = np.random.default_rng(seed)
    graph = ga.from_mask(torch.from_numpy(rng.random((num_tokens, num_tokens)) < density))
    return graph, torch.from_numpy(rng.exponential(size=graph.num_edges)), rng


def weighted(graph, seed=0):
    """Weights of edges, none of them near 0."""
    generator = torch.Generator().manual_seed(seed)
    return 0.01 + torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)


def drawn(*shape, seed=0, dtype=torch.float32):
    """Normal numbers, such as tokens."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights_by_hand(graph, edge_weight=None):
    """W_sym [N, N] summed up edge by edge, without self-loops."""
    W = np.zeros((graph.num_targets, graph.num_targets))
    values = np.ones(graph.num_edges) if edge_weight is None else edge_weight.tolist()
    for (source, target), value in zip(graph.edge_index.T.tolist(), values, strict=True):
        if source != target:
            W[target, source] += value / 2
            W[source, target] += value / 2
    return W


def as_dense(L, layout):
    """A Laplacian of any layout as an array."""
    if layout == "operator":
        return L @ np.eye(L.shape[1])
    return L.toarray() if layout == "scipy" else L.to_dense().numpy()
