"""Inputs of a case, the same for all contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

import graphattn as ga

Made = TypeVar("Made")


class MissingError(Exception):
    """Error of a contender, or a whole case, that cannot run here."""


class ForwardOnlyError(MissingError):
    """Error of a contender that has no backward pass here.

    Its forward pass, without gradients, may run.
    """


@dataclass(frozen=True)
class AttentionInputs:
    """Attention: head-split tensors [*, N, H, D], the same one three times or not, and a graph."""

    query: Tensor
    key: Tensor
    value: Tensor
    graph: ga.TokenGraph
    sigma: float
    top_k: int | None = None
    prepared: dict[str, Any] = field(default_factory=dict)  # what peers derive from the graph once

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """Return what `make` derives from the graph; it is called once per case."""
        if name not in self.prepared:
            self.prepared[name] = make()
        made: Made = self.prepared[name]
        return made

    def learned(self) -> list[Tensor]:
        """Tensors that gradients are taken of: one tensor, or three."""
        return [self.query] if self.query is self.key else [self.query, self.key, self.value]

    def like(self, learned: list[Tensor], graph: ga.TokenGraph) -> AttentionInputs:
        """Return inputs of the same kind with other tensors and edges."""
        query, key, value = learned * 3 if len(learned) == 1 else learned
        return replace(self, query=query, key=key, value=value, graph=graph, prepared={})


@dataclass(frozen=True)
class ConsensusTensors:
    """A consensus step of update "energy": state [B, N, H, D], hidden [B, N, H, xi]."""

    state: Tensor
    target_hidden: Tensor
    source_hidden: Tensor
    network: ga.EdgeNetworkParameters
    graph: ga.TokenGraph
    step_size: float = 0.1

    def learned(self) -> list[Tensor]:
        """Tensors that gradients are taken of."""
        return [self.state, self.target_hidden, self.source_hidden, *self.network]

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.state.shape[:-3].numel()

    @cached_property
    def hidden_of_edges(self) -> Tensor:
        """Random hidden vectors [H, edges of all sequences, xi]: the operand of a yardstick."""
        H, _, _, xi = self.network.shear.shape
        edges = self.state.shape[:-3].numel() * self.graph.num_edges
        return torch.randn(H, edges, xi).to(self.state).requires_grad_()

    def like(self, learned: list[Tensor], graph: ga.TokenGraph) -> ConsensusTensors:
        """Return inputs of the same kind with other tensors and edges."""
        state, target_hidden, source_hidden, *network = learned
        return ConsensusTensors(
            state,
            target_hidden,
            source_hidden,
            ga.EdgeNetworkParameters(*network),
            graph,
            self.step_size,
        )


@dataclass(frozen=True)
class LayerInputs:
    """Tokens [B, N, dim], a layer of :mod:`graphattn.nn` with its weights, and a graph."""

    tokens: Tensor
    layer: Any
    graph: ga.TokenGraph

    def learned(self) -> list[Tensor]:
        """Tensors that gradients are taken of."""
        return [self.tokens, *self.layer.parameters()]


@dataclass(frozen=True)
class ConsensusLayerInputs(LayerInputs):
    """Inputs of a :class:`graphattn.nn.SelfConsensus`."""

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.tokens.shape[:-2].numel()

    @property
    def network(self) -> ga.EdgeNetworkParameters:
        """The second layer of the edge network."""
        network: ga.EdgeNetworkParameters = self.layer.edge_net.second_layer()
        return network


@dataclass(frozen=True)
class NeighborInputs:
    """Points [N, D] and how many neighbours of each."""

    points: Tensor
    k: int


@dataclass(frozen=True)
class WindowSize:
    """A window graph to be built."""

    num_tokens: int
    window: int


@dataclass(frozen=True)
class SpectralInputs:
    """A graph with its edges listed, and positive weights [E] in float64."""

    graph: ga.TokenGraph
    edge_weight: Tensor


class Stream:
    """A layer that reads endless texts, one token of each per step.

    The texts repeat `tokens`, [length, texts, dim], so that the tokens that the layer sees are
    known at every position.
    """

    def __init__(self, layer: Any, tokens: Tensor, window: int, read: int) -> None:
        self.layer, self.tokens, self.window, self.position = layer, tokens, window, 0
        self.cache = layer.init_cache(tokens.shape[1], window=window)
        with torch.no_grad():
            for _ in range(read):
                self.step()

    def step(self) -> Tensor:
        """The outputs for the next tokens, [texts, dim]."""
        token = self.tokens[self.position % len(self.tokens)]
        self.position += 1
        return self.layer.step(token, self.cache)

    def seen(self) -> Tensor:
        """The tokens that the next step sees, itself the last of them, [texts, tokens, dim]."""
        positions = range(max(0, self.position + 1 - self.window), self.position + 1)
        return self.tokens[[position % len(self.tokens) for position in positions]].transpose(0, 1)


@dataclass(frozen=True)
class StreamInputs:
    """Two streams through one layer, at an early and at a late position."""

    early: Stream
    late: Stream


def attention_inputs(
    graph: ga.TokenGraph,
    heads: int,
    features: int,
    device: torch.device,
    dtype: torch.dtype,
    top_k: int | None = None,
    *,
    batch: int | None = None,
    shared: bool = False,
) -> AttentionInputs:
    """Normal random queries, keys and values; sigma = sqrt(D), the layers' own default.

    With `batch` of shape [B, N, H, D]; `shared` is one tensor in all three roles, as in GKA.
    """
    generator = torch.Generator().manual_seed(0)
    lead = () if batch is None else (batch,)
    tokens = [graph.num_targets] if shared else [graph.num_targets, *2 * [graph.num_sources]]
    tensors = [
        torch.randn(*lead, n, heads, features, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for n in tokens
    ]
    query, key, value = tensors * 3 if shared else tensors
    return AttentionInputs(query, key, value, graph.to(device), features**0.5, top_k)


def consensus_inputs(
    size: dict[str, int], device: torch.device, dtype: torch.dtype
) -> ConsensusTensors:
    """Normal random states and hidden vectors; an edge network at the scale layers start with."""
    graph = ga.window_path_graph(size["tokens"], size["window"])
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
    return ConsensusTensors(
        random(B, N, H, D),
        random(B, N, H, xi),
        random(B, N, H, xi),
        network,
        graph.to(device),
    )


def consensus_layer_inputs(
    size: dict[str, int], device: torch.device, dtype: torch.dtype
) -> ConsensusLayerInputs:
    """Normal random tokens; weights as the layer starts with them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = ga.nn.SelfConsensus(
            size["dim"], size["heads"], rank=size["rank"], edge_hidden=size["edge_hidden"]
        )
        tokens = torch.randn(size["batch"], size["tokens"], size["dim"])
    return ConsensusLayerInputs(
        tokens.to(device, dtype).requires_grad_(),
        layer.to(device, dtype),
        ga.window_path_graph(size["tokens"], size["window"]).to(device),
    )


def spectral_inputs(num_tokens: int, window: int) -> SpectralInputs:
    """A window-path graph with log-normal weights, another one for each direction of an edge."""
    graph = ga.window_path_graph(num_tokens, window)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(graph.edge_index.shape[1], generator=generator, dtype=torch.float64).exp()
    return SpectralInputs(graph, weight)


def streams_of(
    make: Callable[[dict[str, int]], Any],
) -> Callable[[dict[str, int], torch.device, torch.dtype], StreamInputs]:
    """Two streams through the layer that `make` gives for a size; one text each, or a batch."""

    def inputs(size: dict[str, int], device: torch.device, dtype: torch.dtype) -> StreamInputs:
        generator = torch.Generator().manual_seed(0)
        layer = make(size).to(device, dtype)
        if not hasattr(layer, "step"):
            raise MissingError(f"it is not available, because {type(layer).__name__} has no step()")
        length, texts = 4 * size["window"] + 1, size.get("batch", 1)
        tokens = torch.randn(length, texts, size["dim"], generator=generator)
        early, late = (
            Stream(layer, tokens.to(device, dtype), size["window"], size[position])
            for position in ("early", "late")
        )
        return StreamInputs(early, late)

    return inputs


def dot_product_layer(size: dict[str, int]) -> Any:
    """Dot-product attention: of all causal layers the one that does least beside projections."""
    return ga.nn.DotProductAttention(size["dim"], size["heads"])


def krause_layer(size: dict[str, int]) -> Any:
    """Krause attention with top-k: the one that does most."""
    return ga.nn.KrauseAttention(size["dim"], size["heads"], top_k=size["top_k"])
