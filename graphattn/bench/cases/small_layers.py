"""Layers of few tokens, where what a call costs beside its numbers is most of the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

import graphattn as ga
from graphattn.bench.cases.case import BOTH, BenchmarkCase, Target, sizes
from graphattn.bench.cases.inputs import LayerInputs, layer_inputs
from graphattn.bench.cases.least_work import Size
from graphattn.bench.contenders import ours
from graphattn.bench.reporting.record import OURS

PROJECTIONS = "its projections alone"
SIZES = sizes(tokens=(16, 32, 64), dim=(64, 128, 256), heads=(4, 4, 8))
ATTENTION_SECONDS, CONSENSUS_SECONDS = 0.2e-3, 0.9e-3  # of a forward pass; with backward 3 times


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


LAYERS: dict[str, Callable[[int, int], Any]] = {  # by the width of tokens and the heads
    # The gradient of a key's bias is 0, of which nobody is right by a share.
    "dot": partial(ga.nn.DotProductAttention, bias=False),
    "rope": partial(ga.nn.DotProductAttention, rope=True),
    "gka": ga.nn.GaussianKernelAttention,
    "krause": partial(ga.nn.KrauseAttention, top_k=4),
    "linear": ga.nn.LinearAttention,
    "consensus": ga.nn.SelfConsensus,
}


def _graph(name: str, size: Size) -> ga.TokenGraph:
    if name == "consensus":
        return ga.window_path_graph(size["tokens"], 2)
    return ga.causal_window_graph(size["tokens"], 8)


def _case(name: str, make: Callable[[int, int], Any]) -> BenchmarkCase:
    seconds = CONSENSUS_SECONDS if name == "consensus" else ATTENTION_SECONDS
    return BenchmarkCase(
        f"small-{name}",
        f"A layer of {SIZES['paper']['tokens']} tokens: {name}",
        SIZES,
        layer_inputs(lambda size: make(size["dim"], size["heads"]), partial(_graph, name)),
        {OURS: ours.layer, "messages (PyG)": by_messages},
        yardsticks={PROJECTIONS: projections_alone},
        targets=(
            Target("time", at_most=seconds),
            Target("time", at_most=3 * seconds, passes=BOTH),
        ),
        memory=False,
        devices=("cpu",),
    )


SMALL = [_case(name, make) for name, make in LAYERS.items()]
