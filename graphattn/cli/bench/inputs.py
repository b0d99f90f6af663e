"""What the contenders of a case are given, all of them the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import graphattn as ga


@dataclass(frozen=True)
class AttentionInputs:
    """RBF attention: head-split tensors [N, H, D] and a graph."""

    query: Tensor
    key: Tensor
    value: Tensor
    graph: ga.TokenGraph
    sigma: float
    top_k: int | None = None

    def learned(self) -> list[Tensor]:
        """What gradients are taken of."""
        return [self.query, self.key, self.value]

    def like(self, learned: list[Tensor], graph: ga.TokenGraph) -> AttentionInputs:
        """The same with other tensors and edges."""
        query, key, value = learned
        return replace(self, query=query, key=key, value=value, graph=graph)


@dataclass(frozen=True)
class ConsensusInputs:
    """A consensus step of update "energy": state [B, N, H, D], hidden [B, N, H, xi]."""

    state: Tensor
    target_hidden: Tensor
    source_hidden: Tensor
    network: ga.EdgeNetworkParameters
    graph: ga.TokenGraph
    step_size: float = 0.1

    def learned(self) -> list[Tensor]:
        """What gradients are taken of."""
        return [self.state, self.target_hidden, self.source_hidden, *self.network]

    def like(self, learned: list[Tensor], graph: ga.TokenGraph) -> ConsensusInputs:
        """The same with other tensors and edges."""
        state, target_hidden, source_hidden, *network = learned
        return ConsensusInputs(
            state,
            target_hidden,
            source_hidden,
            ga.EdgeNetworkParameters(*network),
            graph,
            self.step_size,
        )


@dataclass(frozen=True)
class NeighborInputs:
    """Points [N, D] and how many neighbours of each."""

    points: Tensor
    k: int


def attention_inputs(
    graph: ga.TokenGraph,
    heads: int,
    features: int,
    device: torch.device,
    dtype: torch.dtype,
    top_k: int | None = None,
) -> AttentionInputs:
    """Normal random queries, keys and values; sigma = sqrt(D), the layers' own default."""
    generator = torch.Generator().manual_seed(0)
    shape = (graph.num_targets, heads, features)
    query, key, value = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    )
    return AttentionInputs(query, key, value, graph.to(device), features**0.5, top_k)


def consensus_inputs(
    graph: ga.TokenGraph,
    size: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
) -> ConsensusInputs:
    """Normal random states and hidden vectors; an edge network at the scale layers start with."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        tensor = scale * torch.randn(shape, generator=generator)
        return tensor.to(device, dtype).requires_grad_()

    B, N, H, xi, r = (size[name] for name in ("batch", "tokens", "heads", "edge_hidden", "rank"))
    D = size["dim"] // H
    small = xi**-0.5
    network: Any = ga.EdgeNetworkParameters(
        random(H, xi, scale=small),
        random(H, scale=small),
        random(H, xi, scale=small),
        random(H, scale=small),
        random(H, r, D, xi, scale=small),
        random(H, r, D, scale=small),
    )
    return ConsensusInputs(
        random(B, N, H, D),
        random(B, N, H, xi),
        random(B, N, H, xi),
        network,
        graph.to(device),
    )
