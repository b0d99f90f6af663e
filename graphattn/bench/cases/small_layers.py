"""Layers of few tokens, where what a call costs beside its numbers is most of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import graphattn as ga
from graphattn.bench.cases.case import BOTH, BenchmarkCase
from graphattn.bench.cases.inputs import LayerInputs
from graphattn.bench.cases.targets import Target
from graphattn.bench.contenders import ours
from graphattn.bench.reporting.record import OURS

PROJECTIONS = "its projections alone"
SIZES = {
    "small": {"tokens": 16, "dim": 64, "heads": 4},
    "paper": {"tokens": 32, "dim": 128, "heads": 4},
    "long": {"tokens": 64, "dim": 256, "heads": 8},
}
ATTENTION_SECONDS, CONSENSUS_SECONDS = 0.2e-3, 0.9e-3  # of a forward pass; with backward 3 times


@dataclass(frozen=True)
class SmallLayer:
    """Maker of a layer's inputs: the layer, by the width of tokens and its heads, and its graph."""

    make: Callable[[int, int], Any]
    graph: Callable[[int], ga.TokenGraph]

    def __call__(
        self, size: dict[str, int], device: torch.device, dtype: torch.dtype
    ) -> LayerInputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = self.make(size["dim"], size["heads"])
            tokens = torch.randn(1, size["tokens"], size["dim"])
        return LayerInputs(
            tokens.to(device, dtype).requires_grad_(),
            layer.to(device, dtype),
            self.graph(size["tokens"]).to(device),
        )


def projections_alone(x: LayerInputs) -> Tensor:
    """Multiply the tokens by a square matrix as often as the layer has projections."""
    y = x.tokens
    for module in x.layer.children():
        if isinstance(module, nn.Linear):
            y = module(y)
    return y


def by_messages(x: LayerInputs) -> Tensor:
    """Run the layer by one message per edge."""
    with ga.use_backend("reference"):
        out: Tensor = x.layer(x.tokens, x.graph)
    return out


def _causal(tokens: int) -> ga.TokenGraph:
    return ga.causal_window_graph(tokens, 8)


def _both_ways(tokens: int) -> ga.TokenGraph:
    return ga.window_path_graph(tokens, 2)


LAYERS: dict[str, SmallLayer] = {
    # The gradient of a key's bias is 0, of which nobody is right by a share.
    "dot": SmallLayer(partial(ga.nn.DotProductAttention, bias=False), _causal),
    "rope": SmallLayer(partial(ga.nn.DotProductAttention, rope=True), _causal),
    "gka": SmallLayer(ga.nn.GaussianKernelAttention, _causal),
    "krause": SmallLayer(partial(ga.nn.KrauseAttention, top_k=4), _causal),
    "linear": SmallLayer(ga.nn.LinearAttention, _causal),
    "consensus": SmallLayer(ga.nn.SelfConsensus, _both_ways),
}


def _case(name: str, inputs: SmallLayer) -> BenchmarkCase:
    seconds = CONSENSUS_SECONDS if name == "consensus" else ATTENTION_SECONDS
    return BenchmarkCase(
        f"small-{name}",
        f"A layer of {SIZES['paper']['tokens']} tokens: {name}",
        SIZES,
        inputs,
        {OURS: ours.layer, "messages (PyG)": by_messages},
        yardsticks={PROJECTIONS: projections_alone},
        targets=(
            Target("time", at_most=seconds),
            Target("time", at_most=3 * seconds, passes=BOTH),
        ),
        memory=False,
        devices=("cpu",),
    )


SMALL = [_case(name, inputs) for name, inputs in LAYERS.items()]
