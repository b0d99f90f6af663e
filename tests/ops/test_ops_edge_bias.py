"""edge_bias: one row per edge, or on a window one row per relative offset (ALiBi, T5, Swin)."""

from collections.abc import Callable

import oracle_ops as oracle
import pytest
import torch
from cases_ops import qkv, random

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def along(first: int) -> Callable[[int, int], int]:
    """The row of a pair in a sequence whose smallest offset is -first."""
    return lambda i, j: j - i + first


def across(width: int, down: int, rows: int, right: int, step: int = 1) -> Callable[..., int]:
    """The row of a pair on a grid of this width, whose smallest offset is (-down, -right steps)."""

    def row(i: int, j: int) -> int:
        return (j // width - i // width + down) * rows + (j % width - i % width) // step + right

    return row


def in_volume(i: int, j: int) -> int:
    plane, line, place = j // 9 - i // 9, j // 3 % 3 - i // 3 % 3, j % 3 - i % 3
    return (plane + 1) * 9 + (line + 1) * 3 + place + 1


# graph, rows of the table, and the row of (target i, source j), worked out by hand.
TABLES = {
    "path": (ga.window_path_graph(9, 2), 5, along(2)),
    "path with self loops": (ga.window_path_graph(9, 3, self_loops=True), 7, along(3)),
    "path shorter than its window": (ga.window_path_graph(4, 9), 19, along(9)),
    "causal window": (ga.causal_window_graph(9, 3), 3, along(2)),
    "causal": (ga.causal_graph(7), 7, along(6)),
    "dilated": (ga.dilated_window_graph(14, 2, 3), 5, lambda i, j: (j - i) // 3 + 2),
    "blocks": (ga.block_window_graph(10, 4), 7, along(3)),
    "shifted blocks": (ga.block_window_graph(10, 4, shift=1), 7, along(3)),
    "complete": (ga.complete_graph(6), 11, along(5)),
    "complete without self": (ga.complete_graph(6, self_loops=False), 11, along(5)),
    "grid": (ga.grid_window_graph(3, 4, 1), 9, across(4, 1, 3, 1)),
    "manhattan grid": (ga.grid_window_graph(4, 3, 2, metric="manhattan"), 25, across(3, 2, 5, 2)),
    "shifted grid": (
        ga.neighborhood_graph((4, 5), (3, 2), dilation=(1, 2)),
        15,
        across(5, 2, 3, 1, step=2),
    ),
    "causal dilated grid": (
        ga.grid_window_graph(4, 6, (1, 2), dilation=(1, 2), causal=(True, False)),
        10,
        across(6, 1, 5, 2, step=2),
    ),
    "volume": (ga.volume_window_graph(2, 3, 3, 1), 27, in_volume),
    "seen from the other side": (
        ga.neighborhood_graph((4, 3), 2, is_causal=(True, False)).transpose(),
        6,
        across(3, 0, 3, 1),
    ),
    "batch of windows": (ga.batch([ga.window_path_graph(n, 2) for n in (5, 1, 7)]), 5, along(2)),
    "batch of causal windows": (
        ga.batch([ga.causal_window_graph(n, 3) for n in (5, 4)]),
        3,
        along(2),
    ),
}


def table_bias(name: str, heads: int) -> tuple[ga.TokenGraph, torch.Tensor, torch.Tensor]:
    """Graph, table [offsets, H] and the same bias for every pair, [N, M, H]."""
    graph, rows, row_of = TABLES[name]
    table = random(rows, heads, seed=4)
    dense = torch.zeros(graph.num_targets, graph.num_sources, heads, dtype=torch.float64)
    for i, j in graph.to_mask().nonzero().tolist():
        dense[i, j] = table[row_of(i, j)]
    return graph, table, dense


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_holds_one_bias_per_relative_offset(name: str, top_k: int | None) -> None:
    graph, table, dense = table_bias(name, heads=2)
    q, k, v = qkv(graph, batch=(2,))
    mask = graph.to_mask()
    expected = oracle.attention(q, k, v, mask, sigma=1.2, bias=dense, top_k=top_k)
    out = ga.rbf_attention(q, k, v, graph, 1.2, edge_bias=table, top_k=top_k)
    torch.testing.assert_close(out, expected.out, **EXACT)
    expected = oracle.attention(q, k, v, mask, bias=dense, top_k=top_k)
    out, lse = ga.dot_product_attention(
        q, k, v, graph, edge_bias=table, top_k=top_k, return_lse=True
    )
    torch.testing.assert_close((out, lse), expected[:2], **EXACT)
    weights = ga.attention_weights(q, k, graph, edge_bias=table, top_k=top_k)
    torch.testing.assert_close(weights, oracle.per_edge(expected.weights, mask), **EXACT)


def test_a_table_row_gathers_the_gradient_of_all_its_edges() -> None:
    graph, table, dense = table_bias("path", heads=2)
    q, k, v = qkv(graph)
    table.requires_grad_()
    per_edge = oracle.per_edge(dense, graph.to_mask()).requires_grad_()
    loss = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=table).square().sum()
    (of_table,) = torch.autograd.grad(loss, table)
    loss = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=per_edge).square().sum()
    (of_edges,) = torch.autograd.grad(loss, per_edge)
    expected = torch.zeros_like(of_table)
    for e, (i, j) in enumerate(graph.to_mask().nonzero().tolist()):
        expected[j - i + 2] += of_edges[e]
    torch.testing.assert_close(of_table, expected, **EXACT)
    assert (of_table[2] == 0).all()  # no self loops: nobody reads the row of offset 0


def test_an_alibi_table_is_a_penalty_by_distance() -> None:
    """Press et al. (2022): logits minus slope times distance, as SDPA's additive mask has it."""
    graph = ga.causal_window_graph(8, 8)
    q, k, v = qkv(graph)
    slope = torch.tensor([0.5, 0.25], dtype=torch.float64)
    table = torch.arange(-7, 1, dtype=torch.float64)[:, None] * slope
    gap = torch.arange(8, dtype=torch.float64)[:, None] - torch.arange(8, dtype=torch.float64)
    additive = (-slope[:, None, None] * gap).masked_fill(gap < 0, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=additive[None]
    )[0].transpose(0, 1)
    out = ga.dot_product_attention(q, k, v, graph, edge_bias=table)
    torch.testing.assert_close(out, expected, **EXACT)


def test_a_bias_of_minus_infinity_removes_an_edge() -> None:
    graph = ga.window_path_graph(6, 2, self_loops=True)
    q, k, v = qkv(graph)
    bias = torch.zeros(graph.num_edges, 2, dtype=torch.float64)
    source, target = graph.edge_index
    cut = (source > target) | (target == 0)
    bias[cut] = -torch.inf
    out, lse = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias, return_lse=True)
    fewer = ga.from_edge_index(graph.edge_index[:, ~cut], 6)
    expected = ga.rbf_attention(q, k, v, fewer, 1.0, return_lse=True)
    torch.testing.assert_close((out, lse), expected, **EXACT)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


def test_a_bias_on_a_packed_batch_of_unlike_windows_is_per_edge() -> None:
    graph = ga.batch([ga.window_path_graph(5, 1), ga.window_path_graph(7, 2)])
    q, k, v = qkv(graph)
    bias = random(graph.num_edges, 2, seed=7)
    dense = oracle.dense_bias(bias, graph.to_mask())
    expected = oracle.attention(q, k, v, graph.to_mask(), sigma=1.0, bias=dense)
    out = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias)
    torch.testing.assert_close(out, expected.out, **EXACT)
    with pytest.raises(ValueError, match="edge_bias"):
        ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=random(5, 2, seed=7))


@pytest.mark.parametrize(
    "graph",
    [
        ga.batch([ga.causal_window_graph(4, 3), ga.window_path_graph(4, 1)]),
        ga.batch([ga.dilated_window_graph(9, 1, 2), ga.window_path_graph(4, 1)]),
        ga.batch([ga.complete_graph(5), ga.grid_window_graph(3, 3, 1)]),
    ],
    ids=["causal and both sides", "dilated and not", "line and grid"],
)
def test_a_table_is_refused_where_its_rows_mean_different_offsets(graph: ga.TokenGraph) -> None:
    """A table is refused for a batch in whose parts its rows mean different offsets.

    The two parts have equally many offsets, but row 0 is, for example, offset -2 in one and -1 in
    the other.
    """
    q, k, v = qkv(graph)
    rows = graph.structure.parts[0].num_offsets
    with pytest.raises(ValueError, match="edge_bias"):
        ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=random(rows, 2, seed=1))


def test_a_bias_that_could_be_either_is_refused() -> None:
    graph = ga.causal_window_graph(2, 3)  # 3 edges, 3 offsets
    q, k, v = qkv(graph)
    bias = random(3, 2, seed=1)
    with pytest.raises(ValueError, match=r"edge_bias.*3 rows is ambiguous.*edge_bias\[None\]"):
        ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias)
    dense = oracle.dense_bias(bias, graph.to_mask())
    expected = oracle.attention(q, k, v, graph.to_mask(), sigma=1.0, bias=dense)
    for other, per_edge in ((ga.from_edge_index(graph.edge_index, 2), bias), (graph, bias[None])):
        out = ga.rbf_attention(q, k, v, other, 1.0, edge_bias=per_edge)
        torch.testing.assert_close(out, expected.out, **EXACT)
