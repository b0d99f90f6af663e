"""Attention over a graph, beside torch's attention with the mask of the graph."""

import torch

import graphattn as ga
from graphattn.kernels.cpu import library

# Without a C++ compiler there is no "native".
BACKENDS = ["native"] * (library.library() is not None) + ["structured", "reference"]


def inputs_of(tokens: int) -> torch.Tensor:
    """Query, key and value, [3, tokens, 2, 8]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, tokens, 2, 8, generator=generator, dtype=torch.float64)


def check_attention(graph: ga.TokenGraph) -> None:
    query, key, value = inputs_of(graph.num_targets)
    by_head = [x.transpose(0, 1) for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=graph.to_mask())
    for backend in BACKENDS:
        out = ga.dot_product_attention(query, key, value, graph, backend=backend)
        torch.testing.assert_close(out.transpose(0, 1), expected)
