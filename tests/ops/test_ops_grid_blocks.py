"""Attention over blocks of an image, done block by block in another order of the tokens."""

import pytest
import torch
from cases_ops import attend

import graphattn as ga
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.structured import plan_of
from graphattn.ops.attention.structured.chunked import TilePlan

CASES = [
    (8, 8, 4, 0),
    (8, 8, 4, 2),
    (7, 9, (3, 4), (1, 2)),
    (5, 5, 7, 3),
    (3, 10, 4, 0),
    (6, 5, 1, 0),
    (14, 13, 13, 6),
]
EVERY_CASE = pytest.mark.parametrize(("height", "width", "block", "shift"), CASES)
H, D = 2, 5


def inputs(tokens, *, seed=0, batch=(3,), grad=False):
    draw = torch.Generator().manual_seed(seed)
    found = (torch.randn(*batch, tokens, H, D, generator=draw, dtype=torch.float64) for _ in "qkv")
    return [x.requires_grad_(grad) for x in found]


def table_of(graph, *, grad=False):
    draw = torch.Generator().manual_seed(7)
    rows = graph.structure.num_offsets
    return torch.randn(rows, H, generator=draw, dtype=torch.float64).requires_grad_(grad)


def listed(graph):
    """Return the edges of a graph as a list of which nothing else is known."""
    return ga.from_edge_index(graph.edge_index, graph.num_targets)


def test_they_are_taken_block_by_block():
    graph = ga.grid_block_graph(8, 8, 4, shift=2)
    call = AttentionCall(*inputs(64, batch=(1,)), graph, ga.DotProduct(torch.ones(H)))
    plan = plan_of(call)
    assert isinstance(plan, TilePlan)
    assert max(chunk.sources.shape[1] for chunk in plan.chunks(call.inputs())) == 16


@EVERY_CASE
@pytest.mark.parametrize("kind", ["dot", "rbf"])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_blocks_give_what_their_edges_give(
    height, width, block, shift, kind, top_k, padded, biased
):
    """Outputs and all gradients, against message passing along the list of edges."""
    graph = ga.grid_block_graph(height, width, block, shift=shift)
    tensors = inputs(height * width, grad=True)
    options, plain = {"top_k": top_k}, {"top_k": top_k}
    if padded:
        valid = torch.rand(3, height * width, generator=torch.Generator().manual_seed(1)) < 0.7
        options["valid"] = plain["valid"] = valid
    if biased and graph.structure.num_offsets != graph.num_edges:
        table = table_of(graph, grad=True)
        source, target = graph.edge_index
        options["edge_bias"] = table
        plain["edge_bias"] = table[graph.structure.offset_index(target, source)][None]
        tensors.append(table)
    mine = attend(kind, *tensors[:3], graph, **options)
    expected = attend(kind, *tensors[:3], listed(graph), backend="reference", **plain)
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(expected)
    found = [torch.autograd.grad(y, tensors, weight) for y in (mine, expected)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("kind", ["dot", "rbf"])
def test_what_stands_in_another_block_changes_no_bit(kind, top_k, shift):
    graph = ga.grid_block_graph(8, 8, 4, shift=shift)
    q, k, v = (x.float() for x in inputs(64))
    before = attend(kind, q, k, v, graph, top_k=top_k, edge_bias=table_of(graph).float())
    for bad in (torch.nan, torch.inf, 1e30):
        others = [x.clone() for x in (q, k, v)]
        for x in others:
            x[:, 27] = bad
        after = attend(kind, *others, graph, top_k=top_k, edge_bias=table_of(graph).float())
        apart = ~graph.to_mask()[:, 27]
        assert torch.equal(after[:, apart], before[:, apart])
    assert int(apart.sum()) == 64 - 16


@pytest.mark.long
def test_second_derivatives_too():
    graph = ga.grid_block_graph(2, 3, 2, shift=(0, 1))
    q, k, v = (x[:, :1, :2].detach().requires_grad_() for x in inputs(6, batch=()))
    table = table_of(graph)[:, :1].clone().requires_grad_()

    def call(q, k, v, table):
        return ga.dot_product_attention(q, k, v, graph, edge_bias=table)

    assert torch.autograd.gradcheck(call, (q, k, v, table))
    assert torch.autograd.gradgradcheck(call, (q, k, v, table))


def test_images_of_several_sizes_are_packed():
    graphs = [ga.grid_block_graph(h, w, 4, shift=2) for h, w in ((8, 8), (5, 7), (3, 3))]
    packed, table = ga.batch(graphs), table_of(graphs[0])
    q, k, v = inputs(packed.num_tokens, batch=(2,))
    mine = ga.dot_product_attention(q, k, v, packed, edge_bias=table)
    first = 0
    for graph in graphs:
        own = slice(first, first + graph.num_tokens)
        alone = ga.dot_product_attention(q[:, own], k[:, own], v[:, own], graph, edge_bias=table)
        torch.testing.assert_close(mine[:, own], alone, rtol=1e-10, atol=1e-10)
        first = own.stop


def test_dropout_drops_the_edges_it_drops_in_any_order():
    """The draw belongs to a pair of tokens, not to where they stand."""
    graph = ga.grid_block_graph(7, 9, (3, 4), shift=(1, 2))
    q, k, v = inputs(63)
    found = []
    for own in (graph, listed(graph)):
        draw = torch.Generator().manual_seed(3)
        found.append(ga.dot_product_attention(q, k, v, own, dropout=0.4, generator=draw))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
