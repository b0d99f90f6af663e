"""The way to compute a row depends only on what the row sees.

Scores by differences are computed from q - k itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases_ops import FAST, random
from torch import Tensor

import graphattn as ga

UNSEEN = [torch.nan, torch.inf, 1e20, 300.0]
FLOATS = [torch.float32, torch.float64]


@pytest.fixture(autouse=True, params=FAST)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let "auto" take each of the fast backends."""
    with ga.use_backend(request.param):
        yield


def with_content(x: Tensor, place: int, content: float) -> Tensor:
    return x.index_fill(0, torch.tensor([place]), content)


@pytest.mark.parametrize("bad", UNSEEN)
@pytest.mark.parametrize("name", ["packed", "causal", "blocks", "path"])
def test_what_a_row_does_not_see_breaks_no_tie_of_top_k(name: str, bad: float) -> None:
    """Repeated keys under a common offset: products round them apart, and only q - k knows."""
    graph = {
        "packed": lambda: ga.batch([ga.complete_graph(7), ga.complete_graph(1)]),
        "causal": lambda: ga.causal_graph(8),
        "blocks": lambda: ga.block_window_graph(8, 7),
        "path": lambda: ga.window_path_graph(8, 5, self_loops=True),
    }[name]()
    blind = ~graph.to_mask()[:, 7]
    for seed in range(6):
        two = random(2, 16, seed=seed, dtype=torch.float32) * 3 + 100
        kind = torch.randint(2, (8,), generator=torch.Generator().manual_seed(seed))
        key, query = two[kind].view(8, 1, 16), random(8, 1, 16, seed=seed + 9).float() * 3 + 100
        value = random(8, 1, 1, seed=seed + 99, dtype=torch.float32)
        clean = ga.rbf_attention(query, key, value, graph, 1.3, top_k=2)
        for q, k, v in ((query, key, with_content(value, 7, bad)),
                        (query, with_content(key, 7, bad), value)):  # fmt: skip
            after = ga.rbf_attention(q, k, v, graph, 1.3, top_k=2)
            assert torch.equal(after[blind], clean[blind])


@pytest.mark.parametrize("bad", UNSEEN)
@pytest.mark.parametrize("dtype", FLOATS)
def test_no_unseen_token_stands_in_for_padding(dtype: torch.dtype, bad: float) -> None:
    """A token that a row does not see never stands in for padding in that row.

    If the source that all rows of a tile see is padding, the next valid token is some row's future.
    """
    graph = ga.causal_window_graph(40, 8)
    query, key, value = (random(40, 1, 4, seed=s, dtype=dtype) + 9 for s in range(3))
    for hole in range(40):
        sources = torch.ones(40, dtype=torch.bool)
        sources[hole] = False
        valid = None, sources
        clean = ga.rbf_attention(query, key, value, graph, 1.0, valid=valid)
        for place in range(max(hole - 8, 0), min(hole + 4, 40)):
            blind = ~graph.to_mask()[:, place]
            spoilt = with_content(key, place, bad)
            after = ga.rbf_attention(query, spoilt, value, graph, 1.0, valid=valid)
            assert torch.equal(after[blind], clean[blind])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_entry_of_a_table_reaches_only_the_rows_that_read_it(bad: float) -> None:
    graph = ga.window_path_graph(40, 2, self_loops=True)
    query, key, value = (random(40, 1, 4, seed=s) for s in range(3))
    table = random(5, 1, seed=3)
    clean = ga.rbf_attention(query, key, value, graph, 1.0, edge_bias=table)
    for entry in range(5):
        other = with_content(table, entry, bad)
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        after = ga.rbf_attention(*leaves, graph, 1.0, edge_bias=other)
        places = torch.arange(40) + entry - 2
        reads = (places >= 0) & (places < 40)
        assert torch.equal(after[~reads], clean[~reads])
        assert after[reads].isnan().all()
        for gradient in torch.autograd.grad(after[~reads].sum(), leaves):
            assert gradient.isfinite().all()


def test_an_entry_of_minus_infinity_says_that_nobody_is_seen_there() -> None:
    graph = ga.window_path_graph(40, 2, self_loops=True)
    query, key, value = (random(40, 1, 4, seed=s) for s in range(3))
    table = with_content(random(5, 1, seed=3), 4, -torch.inf)
    narrower = ga.from_mask(graph.to_mask() & (torch.arange(40) <= torch.arange(40)[:, None] + 1))
    per_edge = table[narrower.edge_index[0] - narrower.edge_index[1] + 2]
    for options in ({}, {"top_k": 2}):
        mine = ga.rbf_attention(query, key, value, graph, 1.0, edge_bias=table, **options)
        plain = ga.rbf_attention(query, key, value, narrower, 1.0, edge_bias=per_edge,
                                 backend="reference", **options)  # fmt: skip
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def test_an_unseen_number_overflows_nobody_elses_scores() -> None:
    """Sound by itself, but not times the scale and a query."""
    graph = ga.causal_window_graph(40, 4)
    query, key, value = (random(40, 1, 4, seed=s, dtype=torch.float32) for s in range(3))
    query, key = 1e-5 * query, 1e-23 * key
    clean = ga.dot_product_attention(query, key, value, graph, scale=1e30)
    spoilt, blind = with_content(key, 20, 1e15), ~graph.to_mask()[:, 20]
    after = ga.dot_product_attention(query, spoilt, value, graph, scale=1e30)
    assert clean.isfinite().all()
    assert torch.equal(after[blind], clean[blind])


@pytest.mark.parametrize("size", [1e12, 1e15])
@pytest.mark.parametrize(
    "graph",
    [
        ga.complete_graph(24),
        ga.complete_graph(24, self_loops=False),
        ga.causal_graph(24),
        ga.block_window_graph(24, 8),
        ga.window_path_graph(24, 3),
        ga.window_path_graph(24, 3, self_loops=True),
    ],
    ids=str,
)
def test_one_enormous_key_costs_float64_no_digit(graph: ga.TokenGraph, size: float) -> None:
    for place in (0, 5, 23):
        query, key, value = (random(24, 1, 3, seed=s) for s in range(3))
        key = with_content(key, place, size)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = ga.rbf_attention(*leaves, graph, 1.0, backend="structured")
        upstream = random(24, 1, 3, seed=7)
        plain = ga.rbf_attention(*leaves, graph, 1.0, backend="reference")  # by q - k itself
        torch.testing.assert_close(out, plain, rtol=0, atol=2e-15)
        gradients = (torch.autograd.grad(y, leaves, upstream) for y in (out, plain))
        torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


def test_two_crowds_far_from_zero_and_from_each_other_keep_their_gradients() -> None:
    """Tokens around 1e9 and around -1e9 keep all digits of their gradients.

    By differences nothing is subtracted but q and k, so the distance from 0 costs nobody a digit.
    """
    graph = ga.complete_graph(20)
    x, value, upstream = (random(20, 1, 3, seed=s) for s in range(3))
    x[::2] += 1e9
    x[1::2] -= 1e9
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_(), value.requires_grad_()]
    outs = [ga.rbf_attention(*leaves, graph, 1.0, backend=name) for name in ("auto", "reference")]
    gradients = (torch.autograd.grad(out, leaves, upstream) for out in outs)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e3), (torch.float64, 1e10)])
@pytest.mark.parametrize(
    "graph", [ga.complete_graph(60), ga.causal_graph(60), ga.causal_window_graph(60, 8)], ids=str
)
def test_steep_dot_products_have_the_gradients_of_their_weights(
    graph: ga.TokenGraph, dtype: torch.dtype, size: float
) -> None:
    """Weights of exactly 0 and 1 pass nothing on to queries and keys.

    A backward that computes products again, and rounds them differently, would find e^1000.
    """
    torch.manual_seed(0)
    leaves = [size * random(60, 2, 8, seed=s, dtype=dtype) for s in range(2)]
    leaves = [x.requires_grad_() for x in (*leaves, random(60, 2, 8, seed=2, dtype=dtype))]
    out = ga.dot_product_attention(*leaves, graph, backend="structured")
    upstream = random(60, 2, 8, seed=3, dtype=dtype)
    d_query, d_key, d_value = torch.autograd.grad(out, leaves, upstream)
    assert (d_query == 0).all()
    assert (d_key == 0).all()
    torch.testing.assert_close(d_value.sum(0), upstream.sum(0), rtol=1e-4, atol=1e-4)
