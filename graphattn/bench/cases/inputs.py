"""Inputs of a case, the same for all contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import graphattn as ga
from graphattn.bench.cases.least_work import Size

Made = TypeVar("Made")


class MissingError(Exception):
    """Error of a contender, or a whole case, that cannot run here."""


class ForwardOnlyError(MissingError):
    """Error of a contender whose forward pass, without gradients, may run here."""


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
        return cast(Made, self.prepared[name])

    def learned(self) -> list[Tensor]:
        """Tensors that gradients are taken of: one tensor, or three."""
        return [self.query] if self.query is self.key else [self.query, self.key, self.value]

    def like(self, learned: list[Tensor], graph: ga.TokenGraph) -> AttentionInputs:
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
        return [self.state, self.target_hidden, self.source_hidden, *self.network]

    @property
    def num_edges(self) -> int:
        """The number of edges of all sequences."""
        return self.state.shape[:-3].numel() * self.graph.num_edges

    @cached_property
    def hidden_of_edges(self) -> Tensor:
        """Random hidden vectors [H, edges of all sequences, xi]: the operand of a yardstick."""
        H, _, _, xi = self.network.shear.shape
        return torch.randn(H, self.num_edges, xi).to(self.state).requires_grad_()

    def like(self, learned: list[Tensor], graph: ga.TokenGraph) -> ConsensusTensors:
        state, target_hidden, source_hidden, *network = learned
        parameters = ga.EdgeNetworkParameters(*network)
        hidden = target_hidden, source_hidden
        return ConsensusTensors(state, *hidden, parameters, graph, self.step_size)


@dataclass(frozen=True)
class LayerInputs:
    """Tokens [B, N, dim], a layer of :mod:`graphattn.nn` with its weights, and a graph."""

    tokens: Tensor
    layer: Any
    graph: ga.TokenGraph

    def learned(self) -> list[Tensor]:
        return [self.tokens, *self.layer.parameters()]


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
    """A layer that reads endless texts, repeats of `tokens` [length, texts, dim], step by step."""

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
    """Normal random tensors, or one that is `shared`; sigma = sqrt(D), as in the layers."""
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


def consensus_inputs(size: Size, device: torch.device, dtype: torch.dtype) -> ConsensusTensors:
    """Normal random states and hidden vectors; an edge network at the scale layers start with."""
    graph = ga.window_path_graph(size["tokens"], size["window"])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        tensor = scale * torch.randn(shape, generator=generator)
        return tensor.to(device, dtype).requires_grad_()

    B, N, H, xi, r = (size[name] for name in ("batch", "tokens", "heads", "edge_hidden", "rank"))
    D = size["dim"] // H
    shapes = [(H, xi), (H,), (H, xi), (H,), (H, r, D, xi), (H, r, D)]
    network = ga.EdgeNetworkParameters(*(random(*shape, scale=xi**-0.5) for shape in shapes))
    state, target, source = random(B, N, H, D), random(B, N, H, xi), random(B, N, H, xi)
    return ConsensusTensors(state, target, source, network, graph.to(device))


def layer_inputs(
    make: Callable[[Size], Any], graph: Callable[[Size], ga.TokenGraph]
) -> Callable[[Size, torch.device, torch.dtype], LayerInputs]:
    """Normal random tokens; the layer that `make` gives for a size, with its first weights."""

    def inputs(size: Size, device: torch.device, dtype: torch.dtype) -> LayerInputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = make(size)
            tokens = torch.randn(size.get("batch", 1), size["tokens"], size["dim"])
        return LayerInputs(
            tokens.to(device, dtype).requires_grad_(),
            layer.to(device, dtype),
            graph(size).to(device),
        )

    return inputs


def spectral_inputs(num_tokens: int, window: int) -> SpectralInputs:
    """A window-path graph with log-normal weights, another one for each direction of an edge."""
    graph = ga.window_path_graph(num_tokens, window)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(graph.edge_index.shape[1], generator=generator, dtype=torch.float64).exp()
    return SpectralInputs(graph, weight)


def streams_of(
    make: Callable[[Size], Any],
) -> Callable[[Size, torch.device, torch.dtype], StreamInputs]:
    """Two streams through the layer that `make` gives for a size; one text each, or a batch."""

    def inputs(size: Size, device: torch.device, dtype: torch.dtype) -> StreamInputs:
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
