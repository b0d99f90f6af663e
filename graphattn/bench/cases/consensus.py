"""Consensus: the step alone, a whole layer, and the step by length."""

from __future__ import annotations

import graphattn as ga
from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.attention import THOUSANDS
from graphattn.bench.cases.case import (
    BOTH,
    BenchmarkCase,
    Target,
    fast_and_small,
    in_both_passes,
    sizes,
)
from graphattn.bench.cases.inputs import consensus_inputs, layer_inputs
from graphattn.bench.cases.least_work import Size
from graphattn.bench.contenders import consensus as other
from graphattn.bench.contenders import ours
from graphattn.bench.reporting.record import OURS

EAGER = "gather/scatter"
SIZES = sizes(
    batch=(1, 4, 1),
    tokens=(256, 1024, 131072),
    window=2,
    dim=(384, 384, 64),
    heads=(6, 6, 1),
    edge_hidden=(64, 256, 64),
    rank=4,
)
ON_GPU = {"paper": {**SIZES["paper"], "batch": 64, "dim": 768, "heads": 12}}


def _layer(size: Size) -> ga.nn.SelfConsensus:
    rank, edge_hidden = size["rank"], size["edge_hidden"]
    return ga.nn.SelfConsensus(size["dim"], size["heads"], rank=rank, edge_hidden=edge_hidden)


def _path(size: Size) -> ga.TokenGraph:
    return ga.window_path_graph(size["tokens"], size["window"])


CONSENSUS = [
    BenchmarkCase(
        "consensus",
        "Consensus step, window-path graph",
        SIZES,
        consensus_inputs,
        {OURS: ours.consensus, EAGER: other.gather_scatter_consensus},
        yardsticks={"its product alone": other.dominant_product},
        targets=(
            Target("time", (EAGER,), at_least=3.5),
            Target("time", ("its product alone",), at_most=2),
            Target("time", ("its product alone",), at_most=3.5, passes=BOTH),
            *in_both_passes(Target("memory", (EAGER,), at_most=1 / 4)),
            *fast_and_small((EAGER,), 5, 1 / 10, device="cuda"),
        ),
        work=work.consensus,
        cuda=ON_GPU,
    ),
    BenchmarkCase(
        "consensus-layer",
        "Consensus layer with its projections, window-path graph",
        SIZES,
        layer_inputs(_layer, _path),
        {OURS: ours.layer, EAGER: other.gather_scatter_layer},
        targets=in_both_passes(Target("memory", (EAGER,), at_most=1 / 10, device="cuda")),
        work=work.consensus_layer,
        cuda=ON_GPU,
    ),
]
SCALING_CONSENSUS = BenchmarkCase(
    "scaling-consensus",
    "Consensus step, window-path graph, by length",
    sizes(batch=1, window=2, dim=(64, 128, 128), heads=2, edge_hidden=(32, 64, 64), rank=(2, 4, 4)),
    consensus_inputs,
    {OURS: ours.consensus},
    lengths=THOUSANDS,
    work=work.consensus,
)
