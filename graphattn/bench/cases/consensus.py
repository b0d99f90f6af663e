"""Consensus: the step alone, a whole layer, and the step by length."""

from __future__ import annotations

from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.attention import THOUSANDS
from graphattn.bench.cases.case import BOTH, FORWARD, BenchmarkCase
from graphattn.bench.cases.edges import times_as_fast_and_small
from graphattn.bench.cases.inputs import consensus_inputs, consensus_layer_inputs
from graphattn.bench.cases.targets import Target
from graphattn.bench.contenders import consensus as other
from graphattn.bench.contenders import ours
from graphattn.bench.reporting.record import OURS

EAGER = "gather/scatter"
SIZES = {
    "small": {"batch": 1, "tokens": 256, "window": 2, "dim": 384, "heads": 6,
              "edge_hidden": 64, "rank": 4},
    "paper": {"batch": 4, "tokens": 1024, "window": 2, "dim": 384, "heads": 6,
              "edge_hidden": 256, "rank": 4},
    "long": {"batch": 1, "tokens": 131072, "window": 2, "dim": 64, "heads": 1,
             "edge_hidden": 64, "rank": 4},
}  # fmt: skip
ON_GPU = {
    "paper": {"batch": 64, "tokens": 1024, "window": 2, "dim": 768, "heads": 12,
              "edge_hidden": 256, "rank": 4},
}  # fmt: skip

CONSENSUS = [
    BenchmarkCase(
        "consensus",
        "Consensus step, window-path graph",
        SIZES,
        consensus_inputs,
        {
            OURS: ours.consensus,
            EAGER: other.gather_scatter_consensus,
        },
        yardsticks={"its product alone": other.dominant_product},
        targets=(
            Target("time", (EAGER,), at_least=3.5),
            Target("time", ("its product alone",), at_most=2),
            Target("memory", (EAGER,), at_most=1 / 4),
            Target("time", ("its product alone",), at_most=3.5, passes=BOTH),
            Target("memory", (EAGER,), at_most=1 / 4, passes=BOTH),
            *times_as_fast_and_small((EAGER,), 5, 10),
        ),
        work=work.consensus,
        cuda=ON_GPU,
    ),
    BenchmarkCase(
        "consensus-layer",
        "Consensus layer with its projections, window-path graph",
        SIZES,
        consensus_layer_inputs,
        {OURS: ours.layer, EAGER: other.gather_scatter_layer},
        targets=tuple(
            Target("memory", (EAGER,), at_most=1 / 10, passes=passes, device="cuda")
            for passes in (FORWARD, BOTH)
        ),
        work=work.consensus_layer,
        cuda=ON_GPU,
    ),
]
SCALING_CONSENSUS = BenchmarkCase(
    "scaling-consensus",
    "Consensus step, window-path graph, by length",
    {
        "small": {"batch": 1, "window": 2, "dim": 64, "heads": 2, "edge_hidden": 32, "rank": 2},
        "paper": {"batch": 1, "window": 2, "dim": 128, "heads": 2, "edge_hidden": 64, "rank": 4},
        "long": {"batch": 1, "window": 2, "dim": 128, "heads": 2, "edge_hidden": 64, "rank": 4},
    },
    consensus_inputs,
    {OURS: ours.consensus},
    lengths=THOUSANDS,
    work=work.consensus,
)
