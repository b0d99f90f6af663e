"""The consensus step and layer as hand-written message passing, with one message per edge."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

import graphattn as ga
from graphattn.bench.cases.inputs import ConsensusLayerInputs, ConsensusTensors, MissingError
from graphattn.bench.contenders.peers import check_memory_of_edge_networks


def gather_scatter_consensus(x: ConsensusTensors) -> Tensor:
    """Compute the energy step as hand-written message passing, with one message per edge."""
    return _consensus_of(x, _consensus_step)


def compiled_consensus(x: ConsensusTensors) -> Tensor:
    """Compute the hand-written energy step through torch.compile, on a GPU only."""
    return _consensus_of(x, _compiled_on_gpu(_consensus_step, x.state))


def gather_scatter_layer(x: ConsensusLayerInputs) -> Tensor:
    """Compute a whole layer as hand-written message passing.

    The layer consists of the projections, the edge network's first layer and the energy step.
    """
    return _consensus_layer_of(x, _consensus_layer)


def compiled_layer(x: ConsensusLayerInputs) -> Tensor:
    """Compute the hand-written layer through torch.compile as one function, on a GPU only."""
    return _consensus_layer_of(x, _compiled_on_gpu(_consensus_layer, x.tokens))


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _compiled_on_gpu(function: Callable[..., Tensor], like: Tensor) -> Callable[..., Tensor]:
    if like.device.type != "cuda":
        raise MissingError("it is compiled only for a GPU")
    return _compiled(function)


def _consensus_of(x: ConsensusTensors, step: Callable[..., Tensor]) -> Tensor:
    check_memory_of_edge_networks(x)
    hidden = x.target_hidden, x.source_hidden
    return step(x.state, *hidden, x.network, x.graph.edge_index, x.step_size)


def _consensus_layer_of(x: ConsensusLayerInputs, layer: Callable[..., Tensor]) -> Tensor:
    check_memory_of_edge_networks(x)
    first, own = x.layer.edge_net, x.layer
    return layer(
        x.tokens,
        (own.source_proj.weight, own.source_proj.bias),
        (first.target.weight, first.target.bias, first.source.weight),
        x.network,
        (own.output_proj.weight, own.output_proj.bias),
        x.graph.edge_index,
        own.step_size,
    )


def _consensus_layer(
    tokens: Tensor,
    source_proj: tuple[Tensor, Tensor],
    first_layer: tuple[Tensor, Tensor, Tensor],
    network: ga.EdgeNetworkParameters,
    output_proj: tuple[Tensor, Tensor],
    edge_index: Tensor,
    step_size: float,
) -> Tensor:
    H = len(network.shear)
    of_target, bias, of_source = first_layer
    by_head = tokens.unflatten(-1, (H, -1))
    new = _consensus_step(
        functional.linear(tokens, *source_proj).unflatten(-1, (H, -1)),
        torch.einsum("...hd,hxd->...hx", by_head, of_target) + bias,
        torch.einsum("...hd,hxd->...hx", by_head, of_source),
        network,
        edge_index,
        step_size,
    )
    return functional.linear(new.flatten(-2), *output_proj)


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
    """Compute one product per edge, from the hidden vector to Lambda, and nothing else.

    Every implementation has to compute these products, so their time is a lower limit.
    """
    return x.hidden_of_edges @ x.network.shear.flatten(1, 2).mT
