"""Neighborhood attention is NATTEN's: against a plain loop over queries and their windows."""

import itertools
import math

import pytest
import torch
from cases_ops import BACKENDS, random
from torch import Tensor

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}

CASES = {
    "1-D": ((9,), {"kernel_size": (3,)}),
    "1-D, causal": ((9,), {"kernel_size": (4,), "is_causal": (True,)}),
    "1-D, dilated": ((11,), {"kernel_size": (3,), "dilation": (3,)}),
    "2-D": ((5, 6), {"kernel_size": (3, 5)}),
    "2-D, even": ((5, 6), {"kernel_size": (2, 4)}),
    "2-D, dilated": ((6, 5), {"kernel_size": (3, 2), "dilation": (2, 2)}),
    "2-D, causal": ((5, 6), {"kernel_size": (3, 3), "is_causal": (True, False)}),
    "3-D": ((2, 4, 3), {"kernel_size": (2, 3, 3)}),
    "3-D, causal and dilated": (
        (4, 4, 3),
        {"kernel_size": (2, 3, 3), "dilation": (2, 1, 1), "is_causal": (True, False, False)},
    ),
}


def windows(x: int, length: int, kernel: int, dilation: int, causal: bool) -> list[tuple[int, int]]:
    """List what x sees along one axis, and where `rpb` has its bias: centred on kernel - 1.

    The first index of a window is x - (kernel // 2) * dilation, moved by whole hops until the
    window fits (Hassani & Shi, 2022); along a causal axis the window ends at x.
    """
    if causal:
        seen = [x - k * dilation for k in range(kernel) if x - k * dilation >= 0]
    else:
        start = x - kernel // 2 * dilation
        while start < 0:
            start += dilation
        while start + (kernel - 1) * dilation >= length:
            start -= dilation
        seen = [start + k * dilation for k in range(kernel)]
    return [(y, (y - x) // dilation + kernel - 1) for y in seen]


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, rpb: Tensor, kernel_size, dilation, is_causal
) -> Tensor:
    """[*shape, H, D]: the softmax of every query over its window, with NATTEN's bias."""
    shape, (heads, features) = query.shape[:-2], query.shape[-2:]
    out = torch.empty_like(query)
    for place in itertools.product(*(range(size) for size in shape)):
        along = [
            windows(x, *of_axis)
            for x, *of_axis in zip(place, shape, kernel_size, dilation, is_causal, strict=True)
        ]
        seen = list(itertools.product(*along))
        for h in range(heads):
            logits = []
            for cell in seen:
                other, bias = zip(*cell, strict=True)
                score = (query[(*place, h)] @ key[(*other, h)]) / math.sqrt(features)
                logits.append(score + rpb[(h, *bias)])
            weights = torch.stack(logits).softmax(0)
            values = torch.stack([value[(*(y for y, _ in cell), h)] for cell in seen])
            out[(*place, h)] = weights @ values
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_attention_in_neighborhoods_is_nattens(name: str, backend: str) -> None:
    shape, options = CASES[name]
    kernel_size = options["kernel_size"]
    dilation = options.get("dilation", (1,) * len(shape))
    is_causal = options.get("is_causal", (False,) * len(shape))
    query, key, value = (random(*shape, 2, 4, seed=seed) for seed in range(3))
    rpb = random(2, *(2 * k - 1 for k in kernel_size), seed=3)
    expected = by_hand(query, key, value, rpb, kernel_size, dilation, is_causal)
    graph = ga.neighborhood_graph(shape, **options)
    # A table has no rows for what is ahead along a causal axis.
    rows = [slice(k if c else None) for k, c in zip(kernel_size, is_causal, strict=True)]
    table = rpb[(slice(None), *rows)]
    flat = (x.flatten(0, len(shape) - 1) for x in (query, key, value))
    out = ga.dot_product_attention(*flat, graph, edge_bias=table.flatten(1).T, backend=backend)
    torch.testing.assert_close(out.view_as(expected), expected, **EXACT)


@pytest.mark.long
@pytest.mark.parametrize("name", ["2-D, dilated", "3-D, causal and dilated"])
def test_gradients_of_a_table_of_a_grid_are_those_of_its_biases_per_edge(name: str) -> None:
    shape, options = CASES[name]
    graph = ga.neighborhood_graph(shape, **options)
    flat = [random(graph.num_tokens, 2, 3, seed=seed).requires_grad_() for seed in range(3)]
    table = random(graph.structure.num_offsets, 2, seed=4).requires_grad_()

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return ga.dot_product_attention(
            query, key, value, graph, edge_bias=table, backend="structured"
        )

    assert torch.autograd.gradcheck(attend, (*flat, table))
