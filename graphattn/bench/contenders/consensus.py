"""The consensus step and layer as hand-written message passing, with one message per edge."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import graphattn as ga
from graphattn.bench.cases.inputs import ConsensusTensors, LayerInputs
from graphattn.bench.contenders.peers import check_memory_of_edge_networks


def gather_scatter_consensus(x: ConsensusTensors) -> Tensor:
    """Compute the energy step as hand-written message passing, with one message per edge."""
    check_memory_of_edge_networks(x.num_edges, x.network)
    hidden = x.target_hidden, x.source_hidden
    return _consensus_step(x.state, *hidden, x.network, x.graph.edge_index, x.step_size)


def gather_scatter_layer(x: LayerInputs) -> Tensor:
    """Compute a whole layer as hand-written message passing."""
    layer, first = x.layer, x.layer.edge_net
    network = first.second_layer()
    check_memory_of_edge_networks(len(x.tokens) * x.graph.num_edges, network)
    by_head = x.tokens.unflatten(-1, (layer.heads, -1))
    new = _consensus_step(
        layer.source_proj(x.tokens).unflatten(-1, (layer.heads, -1)),
        torch.einsum("...hd,hxd->...hx", by_head, first.target.weight) + first.target.bias,
        torch.einsum("...hd,hxd->...hx", by_head, first.source.weight),
        network,
        x.graph.edge_index,
        layer.step_size,
    )
    projected: Tensor = layer.output_proj(new.flatten(-2))
    return projected


def _consensus_step(
    state: Tensor,
    target_hidden: Tensor,
    source_hidden: Tensor,
    network: ga.EdgeNetworkParameters,
    edge_index: Tensor,
    step_size: float,
) -> Tensor:
    source, target = edge_index
    hidden = functional.gelu(
        target_hidden.index_select(-3, target) + source_hidden.index_select(-3, source)
    )
    alpha = functional.softplus((hidden * network.alpha).sum(-1) + network.alpha_bias)
    beta = functional.softplus((hidden * network.beta).sum(-1) + network.beta_bias)
    rows = torch.einsum("...ehx,hrdx->...ehrd", hidden, network.shear) + network.shear_bias
    rows = functional.normalize(rows, dim=-1)
    difference = state.index_select(-3, target) - state.index_select(-3, source)
    along = torch.einsum("...ehrd,...ehd->...ehr", rows, difference)
    pull = torch.einsum("...ehrd,...ehr->...ehd", rows, along) / rows.shape[-2]
    message = alpha[..., None] * difference + beta[..., None] * pull
    gradient = torch.zeros_like(state).index_add(-3, target, message)
    return state - step_size * gradient.index_add(-3, source, message, alpha=-1)


def dominant_product(x: ConsensusTensors) -> Tensor:
    """Compute the product per edge that every implementation needs, and nothing else."""
    return x.hidden_of_edges @ x.network.shear.flatten(1, 2).mT
