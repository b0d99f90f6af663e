"""What is measured: one case per row of the performance targets, in three sizes.

The targets are those of ``--size paper`` on two cores; at other sizes their numbers are shown and
say little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import graphattn as ga
from graphattn.cli.bench import contenders as other
from graphattn.cli.bench import ours, work
from graphattn.cli.bench.inputs import (
    AttentionInputs,
    NeighborInputs,
    WindowSize,
    attention_inputs,
    consensus_inputs,
    spectral_inputs,
    stream_inputs,
)
from graphattn.cli.bench.record import OURS
from graphattn.cli.bench.targets import Target
from graphattn.cli.bench.work import Size, Work

FORWARD, BOTH = "forward", "forward + backward"


class Entry(NamedTuple):
    """What is run under one name."""

    contender: str
    run: other.Run
    size: Size


@dataclass(frozen=True)
class Case:
    """One workload; every contender computes the same from the same inputs.

    With `lengths`, a number of tokens takes a contender's place: graphattn alone, at every length.
    """

    name: str
    title: str
    sizes: dict[str, Size]
    make: Callable[[Size, torch.device, torch.dtype], Any]
    contenders: dict[str, other.Run]
    yardsticks: dict[str, other.Run] = field(default_factory=dict)  # they compute something else
    targets: tuple[Target, ...] = ()
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    backward: bool = True
    memory: bool = True  # whether the peak is measured, from inputs made anew
    work: Callable[[Size], Work] = lambda size: (0.0, 0.0)

    def runs(self) -> dict[str, other.Run]:
        """Everything to be timed, by the name of the contender."""
        return {**self.contenders, **self.yardsticks}

    def entries(self, size_name: str) -> dict[str, Entry]:
        """Everything to be timed, by the name it has in tables and records."""
        size = self.sizes[size_name]
        if self.lengths:
            return {
                tokens_label(n): Entry(OURS, self.contenders[OURS], {**size, "tokens": n})
                for n in self.lengths[size_name]
            }
        return {name: Entry(name, run, size) for name, run in self.runs().items()}


def tokens_label(tokens: int) -> str:
    """The name of a length."""
    return f"{tokens:,} tokens"


# Inputs.


def attention_over(
    graph: Callable[[Size], ga.TokenGraph],
) -> Callable[[Size, torch.device, torch.dtype], AttentionInputs]:
    """Random tensors over a graph of that size."""

    def make(size: Size, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
        return attention_inputs(
            graph(size), size["heads"], size["features"], device, dtype, size.get("top_k")
        )

    return make


def causal_window(size: Size) -> ga.TokenGraph:
    """`window` keys, the token itself among them."""
    return ga.causal_window_graph(size["tokens"], size["window"])


def centred_window(size: Size) -> ga.TokenGraph:
    """`window` keys around the token, itself among them."""
    return ga.window_path_graph(size["tokens"], size["window"] // 2, self_loops=True)


def points(size: Size, device: torch.device, dtype: torch.dtype) -> NeighborInputs:
    """Normal random points."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size["tokens"], size["features"], generator=generator)
    return NeighborInputs(x.to(device, dtype), size["k"])


in_window = work.attention(lambda size: size["tokens"] * size["window"])
GATHER_SCATTER = {
    "index_add": other.index_add,
    "torch-scatter": other.torch_scatter,
    "compiled": other.compiled,
}
SEARCHES = {
    "cdist + topk": other.cdist_topk,
    "chunked matmul + topk": other.chunked_matmul_topk,
    "scikit-learn brute": other.sklearn_brute,
}
HEADS = {"heads": 8, "features": 64}
THOUSANDS = {
    "small": (512, 1024, 2048, 4096),
    "paper": tuple(1024 * 2**i for i in range(8)),
    "long": tuple(1024 * 2**i for i in range(10)),
}
DOT, CAUSAL_DOT = "SDPA (dot product)", "SDPA, causal (dot product)"
OUR_DOT = f"{OURS} (dot product)"

CASES = [
    Case(
        "complete",
        "RBF attention, complete graph",
        {
            "small": {"tokens": 512, **HEADS},
            "paper": {"tokens": 4096, **HEADS},
            "long": {"tokens": 16384, **HEADS},
        },
        attention_over(lambda size: ga.complete_graph(size["tokens"])),
        {OURS: ours.rbf, "masked dense": other.masked_dense, "KeOps": other.keops},
        {DOT: other.sdpa_dot},
        (
            Target("time", (DOT,), at_most=1.1),
            Target("time", (DOT,), at_most=1.25, passes=BOTH),
        ),
        work=work.attention(lambda size: size["tokens"] ** 2),
    ),
    Case(
        "causal-window",
        "RBF attention, causal window",
        {
            "small": {"tokens": 1024, "window": 64, **HEADS},
            "paper": {"tokens": 16384, "window": 256, **HEADS},
            "long": {"tokens": 131072, "window": 256, **HEADS},
        },
        attention_over(causal_window),
        {OURS: ours.rbf, "index_add": other.index_add, "masked dense": other.masked_dense},
        {OUR_DOT: ours.dot_product, CAUSAL_DOT: other.sdpa_causal},
        tuple(
            Target("time", (CAUSAL_DOT,), at_least=10, of=own, passes=passes)
            for own in (OURS, OUR_DOT)
            for passes in (FORWARD, BOTH)
        ),
        work=in_window,
    ),
    Case(
        "window",
        "RBF attention, 8 tokens on each side",
        {
            "small": {"tokens": 2048, "window": 17, **HEADS},
            "paper": {"tokens": 65536, "window": 17, **HEADS},
            "long": {"tokens": 131072, "window": 17, **HEADS},
        },
        attention_over(centred_window),
        {OURS: ours.rbf, **GATHER_SCATTER},
        targets=tuple(
            target
            for passes in (FORWARD, BOTH)
            for rival in (("index_add", "torch-scatter"), ("compiled",))
            for target in (
                Target("time", rival, at_least=10, passes=passes),
                Target("memory", rival, at_most=1 / 5, passes=passes),
            )
        ),
        work=in_window,
    ),
    Case(
        "krause",
        "Krause attention: causal window, top-k",
        {
            "small": {"tokens": 512, "window": 64, "top_k": 48, **HEADS},
            "paper": {"tokens": 8192, "window": 256, "top_k": 192, **HEADS},
            "long": {"tokens": 65536, "window": 256, "top_k": 192, **HEADS},
        },
        attention_over(causal_window),
        {OURS: ours.rbf, "masked dense": other.masked_dense},
        {"without top-k": ours.rbf_without_top_k},
        (
            Target("time", ("masked dense",), at_least=30),
            Target("time", ("without top-k",), at_most=3),
        ),
        work=in_window,
    ),
    Case(
        "consensus",
        "Consensus step, window-path graph",
        {
            "small": {"batch": 1, "tokens": 256, "window": 2, "dim": 384, "heads": 6,
                      "edge_hidden": 64, "rank": 4},
            "paper": {"batch": 4, "tokens": 1024, "window": 2, "dim": 384, "heads": 6,
                      "edge_hidden": 256, "rank": 4},
            "long": {"batch": 1, "tokens": 131072, "window": 2, "dim": 64, "heads": 1,
                     "edge_hidden": 64, "rank": 4},
        },
        consensus_inputs,
        {OURS: ours.consensus, "gather/scatter": other.gather_scatter_consensus},
        {"its product alone": other.dominant_product},
        (
            Target("time", ("gather/scatter",), at_least=3.5),
            Target("time", ("its product alone",), at_most=2),
            Target("memory", ("gather/scatter",), at_most=1 / 4),
            Target("time", ("its product alone",), at_most=3.5, passes=BOTH),
            Target("memory", ("gather/scatter",), at_most=1 / 4, passes=BOTH),
        ),
        work=work.consensus,
    ),
    Case(
        "knn",
        "Nearest neighbours",
        {
            "small": {"tokens": 1024, "features": 64, "k": 16},
            "paper": {"tokens": 16384, "features": 64, "k": 16},
            "long": {"tokens": 32768, "features": 64, "k": 16},
        },
        points,
        {OURS: ours.neighbors, **SEARCHES},
        targets=(
            Target("time", tuple(SEARCHES), at_most=1),
            Target("memory", ("cdist + topk",), at_most=1 / 20),
        ),
        backward=False,
        work=work.neighbors,
    ),
    Case(
        "edges",
        "The edges of a window-path graph",
        {
            "small": {"tokens": 100_000, "window": 8},
            "paper": {"tokens": 1_000_000, "window": 8},
            "long": {"tokens": 4_000_000, "window": 8},
        },
        lambda size, device, dtype: WindowSize(size["tokens"], size["window"]),
        {OURS: ours.list_edges, "offsets and mask": other.offsets_and_mask},
        {"graph without edges": ours.build_graph},
        (
            Target("time", at_most=1e-3, of="graph without edges"),
            Target("time", at_most=1.0),
        ),
        backward=False,
        work=work.edges,
    ),
    Case(
        "million",
        "RBF attention, causal window, a million tokens",
        {
            "small": {"tokens": 20_000, "window": 64, "heads": 2, "features": 16},
            "paper": {"tokens": 1_000_000, "window": 64, "heads": 2, "features": 16},
            "long": {"tokens": 4_000_000, "window": 64, "heads": 2, "features": 16},
        },
        attention_over(causal_window),
        {OURS: ours.rbf, "index_add": other.index_add},
        targets=(Target("memory", at_most=3e9, passes=BOTH),),
        work=in_window,
    ),
    Case(
        "fiedler",
        "Fiedler value, random weights",
        {
            "small": {"tokens": 5_000, "window": 8},
            "paper": {"tokens": 100_000, "window": 8},
            "long": {"tokens": 1_000_000, "window": 8},
        },
        lambda size, device, dtype: spectral_inputs(size["tokens"], size["window"]),
        {OURS: ours.fiedler_value, "eigsh, shift-invert": other.shift_invert_lanczos},
        targets=(Target("time", at_most=1.0), Target("error", at_most=1e-9)),
        backward=False,
    ),
    Case(
        "streaming",
        "One token of dot-product attention, late in a stream",
        {
            "small": {"window": 64, "dim": 512, "heads": 8, "early": 100, "late": 2_000},
            "paper": {"window": 256, "dim": 512, "heads": 8, "early": 1_000, "late": 100_000},
            "long": {"window": 256, "dim": 512, "heads": 8, "early": 1_000, "late": 300_000},
        },
        stream_inputs,
        {OURS: ours.late_step, "early in a stream": ours.early_step},
        {"its projections alone": other.projections_alone},
        (
            Target("time", ("early in a stream",), at_most=1.1),
            Target("time", ("its projections alone",), at_most=2),
        ),
        backward=False,
        memory=False,
        work=work.stream_step,
    ),
    Case(
        "doubling",
        "RBF attention, causal window, twice as long",
        {
            "small": {"window": 64, **HEADS},
            "paper": {"window": 256, **HEADS},
            "long": {"window": 256, **HEADS},
        },
        attention_over(causal_window),
        {OURS: ours.rbf},
        targets=(
            Target("time", (tokens_label(16384),), at_most=2.2, of=tokens_label(32768)),
        ),
        lengths={"small": (1024, 2048), "paper": (16384, 32768), "long": (65536, 131072)},
        backward=False,
        work=in_window,
    ),
    Case(
        "scaling-window",
        "RBF attention, causal window, by length",
        {
            "small": {"window": 32, "heads": 2, "features": 32},
            "paper": {"window": 256, "heads": 2, "features": 64},
            "long": {"window": 256, "heads": 2, "features": 64},
        },
        attention_over(causal_window),
        {OURS: ours.rbf},
        lengths=THOUSANDS,
        work=in_window,
    ),
    Case(
        "scaling-consensus",
        "Consensus step, window-path graph, by length",
        {
            "small": {"batch": 1, "window": 2, "dim": 64, "heads": 2, "edge_hidden": 32, "rank": 2},
            "paper": {"batch": 1, "window": 2, "dim": 128, "heads": 2, "edge_hidden": 64,
                      "rank": 4},
            "long": {"batch": 1, "window": 2, "dim": 128, "heads": 2, "edge_hidden": 64,
                     "rank": 4},
        },
        consensus_inputs,
        {OURS: ours.consensus},
        lengths=THOUSANDS,
        work=work.consensus,
    ),
]  # fmt: skip
