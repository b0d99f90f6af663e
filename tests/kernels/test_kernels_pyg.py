"""Layers of PyTorch Geometric, and the same layers by the kernels for edges on the same weights.

PyG computes in float64, the kernels in float32; random graphs come from PyG's own generators.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from cases_edges import cut_at, gathering
from cases_kernels import check, random
from torch import Tensor, nn
from torch_geometric.datasets.graph_generator import BAGraph, ERGraph, GridGraph
from torch_geometric.nn import GATConv, TransformerConv
from torch_geometric.utils import coalesce

import graphattn as ga
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device", "edge_tiles")

SINGLE = 5e-6  # relative RMS of float32
ISOLATED = 3

Layer = Callable[[nn.Module, tuple[Tensor, Tensor], ga.TokenGraph, Tensor | None], Tensor]


def with_hubs_and_isolated_nodes(edge_index: Tensor) -> tuple[Tensor, int]:
    """Node 0 sees every node, node 1 is seen by every node; the last ones have no edges at all."""
    everybody = torch.arange(int(edge_index.max()) + 1)
    zero = torch.zeros_like(everybody)
    of_hubs = torch.stack([torch.cat([everybody, zero + 1]), torch.cat([zero, everybody])])
    edge_index = coalesce(torch.cat([edge_index, of_hubs], dim=1))
    return edge_index, len(everybody) + ISOLATED


GENERATORS = {
    "Erdos-Renyi": lambda: ERGraph(60, 0.1),
    "Barabasi-Albert": lambda: BAGraph(50, 3),
    "grid": lambda: GridGraph(6, 8),
}


def generated(name: str) -> tuple[Tensor, int]:
    """Edges and number of nodes."""
    torch.manual_seed(0)
    np.random.seed(0)  # BAGraph draws from it  # noqa: NPY002
    return with_hubs_and_isolated_nodes(GENERATORS[name]()().edge_index)


def without_skip(*channels: Any, **options: Any) -> TransformerConv:
    """A TransformerConv that adds no projection of the targets, and has no weights for it."""
    conv = TransformerConv(*channels, root_weight=False, **options)
    conv.lin_skip = None
    return conv


def transformer_conv(
    conv: nn.Module, x: tuple[Tensor, Tensor], graph: ga.TokenGraph, _: Tensor | None = None
) -> Tensor:
    """TransformerConv: softmax attention over edges, in PyG's words (sources, targets)."""
    of_sources, of_targets = x
    heads = conv.heads, conv.out_channels
    query = conv.lin_query(of_targets).unflatten(-1, heads)
    key = conv.lin_key(of_sources).unflatten(-1, heads)
    value = conv.lin_value(of_sources).unflatten(-1, heads)
    return ga.dot_product_attention(query, key, value, graph, backend="triton").flatten(-2)


def gat_conv(
    conv: nn.Module, x: tuple[Tensor, Tensor], graph: ga.TokenGraph, edge_attr: Tensor | None = None
) -> Tensor:
    """GATConv: all a weight depends on is a bias of its edge, and queries are 0."""
    heads = conv.heads, conv.out_channels
    of_sources, of_targets = (
        (conv.lin or lin)(side).unflatten(-1, heads)
        for lin, side in zip((conv.lin_src, conv.lin_dst), x, strict=True)
    )
    source, target = graph.edge_index
    bias = (of_sources * conv.att_src).sum(-1)[source] + (of_targets * conv.att_dst).sum(-1)[target]
    if edge_attr is not None:
        bias = bias + (conv.lin_edge(edge_attr).unflatten(-1, heads) * conv.att_edge).sum(-1)
    bias = nn.functional.leaky_relu(bias, conv.negative_slope)
    query, key = torch.zeros_like(of_targets), torch.zeros_like(of_sources)
    out = ga.dot_product_attention(
        query, key, of_sources, graph, edge_bias=bias, backend="triton"
    ).flatten(-2)
    return out if conv.bias is None else out + conv.bias


def features(*shape: int, seed: int = 0) -> Tensor:
    return sixteenths(random(*shape, seed=seed).float())


def sixteenths(x: Tensor) -> Tensor:
    return (16 * x).round() / 16


def agree(
    conv: nn.Module,
    layer: Layer,
    edge_index: Tensor,
    x: tuple[Tensor, Tensor],
    device: str,
    edge_attr: Tensor | None = None,
    allowed: float = SINGLE,
) -> None:
    """Outputs and the gradients of features and weights, both given the same numbers.

    `x`: features of sources and targets, one tensor where these are the same tokens. Weights are
    sixteenths, like features: so GATConv's logits are exact in float32, too, and none of them gets
    to the other side of leaky_relu's kink, where gradients jump.
    """
    for parameter in conv.parameters():
        parameter.data = sixteenths(parameter.data)
    tokens = len(x[1]), len(x[0])
    graph, order = ga.from_edge_index(edge_index, *tokens, return_permutation=True)
    upstream = random(tokens[0], conv.heads * conv.out_channels, seed=9).float()
    results: list[dict[str, Tensor]] = []
    for dtype, where in ((torch.float32, device), (torch.float64, "cpu")):
        model = deepcopy(conv).to(where, dtype)
        leaves = {"sources": x[0].to(where, dtype).requires_grad_()}
        if x[0] is not x[1]:
            leaves["targets"] = x[1].to(where, dtype).requires_grad_()
        pair = leaves["sources"], leaves.get("targets", leaves["sources"])
        attr = None if edge_attr is None else edge_attr.to(where, dtype)
        if where is device and dtype == torch.float32:
            attr = None if attr is None else attr[order.to(where)]
            out = layer(model, pair, graph.to(where), attr)
        else:
            given = pair if "targets" in leaves else pair[0]
            out = model(given, edge_index, **({} if attr is None else {"edge_attr": attr}))
        leaves |= dict(model.named_parameters())
        gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(where, dtype))
        results.append({"out": out.detach().cpu(), **{
            name: g.cpu() for name, g in zip(leaves, gradients, strict=True)
        }})  # fmt: skip
    mine, theirs = results
    # A bias that all keys share moves no weight: its gradient is 0, its rounding is beside 1.
    zero = {name for name in mine if name == "lin_key.bias"}
    for names, floor in ((mine.keys() - zero, 1e-3), (zero, 1.0)):
        check({n: mine[n] for n in names}, {n: theirs[n] for n in names}, allowed, floor)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", GENERATORS)
def test_attention_over_edges_is_transformer_conv(name: str, heads: int, device: str) -> None:
    edge_index, N = generated(name)
    conv = without_skip(10, 7, heads=heads)
    x = features(N, 10)
    agree(conv, transformer_conv, edge_index, (x, x), device)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_bias_per_edge_is_gat_conv(name: str, heads: int, device: str) -> None:
    edge_index, N = generated(name)
    conv = GATConv(10, 7, heads=heads, add_self_loops=False)
    x = features(N, 10)
    agree(conv, gat_conv, edge_index, (x, x), device)


def test_features_of_edges_follow_the_sorted_order(device: str) -> None:
    """GATConv reads them in the caller's order; from_edge_index says which edge went where."""
    edge_index, N = generated("Erdos-Renyi")
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1])]
    conv = GATConv(10, 7, heads=2, add_self_loops=False, edge_dim=4)
    x, edge_attr = features(N, 10), features(edge_index.shape[1], 4, seed=1)
    agree(conv, gat_conv, edge_index, (x, x), device, edge_attr)


@pytest.mark.parametrize("kind", ["TransformerConv", "GATConv"])
def test_sources_may_be_other_tokens_than_targets(kind: str, device: str) -> None:
    edge_index, N = generated("Barabasi-Albert")
    edge_index = edge_index[:, edge_index[0] < 33]
    x = features(33, 10), features(N, 6, seed=1)
    if kind == "TransformerConv":
        conv = without_skip((10, 6), 7, heads=2)
        agree(conv, transformer_conv, edge_index, x, device)
    else:
        conv = GATConv((10, 6), 7, heads=2, add_self_loops=False)
        agree(conv, gat_conv, edge_index, x, device)


MILLION = {
    "long rows": (
        lambda: ERGraph(4700, 0.046),
        lambda: GATConv(8, 8, add_self_loops=False),
        gat_conv,
    ),
    "short rows": (
        lambda: GridGraph(335, 335),
        lambda: without_skip(8, 8, bias=False),
        transformer_conv,
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MILLION)
def test_a_million_edges(name: str, device: str) -> None:
    generator, build, layer = MILLION[name]
    edge_index, N = with_hubs_and_isolated_nodes(generator()().edge_index)
    assert edge_index.shape[1] >= 1_000_000
    x = features(N, 8)
    # The interpreter looks at every row that might be cut: fewer may be.
    longest, choices = (4096, gathering(1024, 16)) if device == "cpu" else (512, {})
    with cut_at(longest), tuning.override(**choices):
        # Gradients of weights are sums of up to 112,000 tokens, which torch adds up in float32.
        agree(build(), layer, edge_index, (x, x), device, allowed=2e-5)
