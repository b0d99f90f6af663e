"""Run every layer on a suitable graph, and measure its effect on the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphattn as ga
from graphattn.cli.demo.sample import Sample
from graphattn.plain_tables import number_columns, plain_table, short

DIM, HEADS, EDGE_HIDDEN = 64, 4, 64


Measurement = tuple[str, float, float]  # its name, and the value before and after a layer


@dataclass(frozen=True)
class LayerRun:
    """One layer on one graph, and the measure of its effect."""

    name: str
    graph_name: str
    layer: nn.Module
    graph: ga.TokenGraph
    measure: Callable[[Any, ga.TokenGraph, dict[str, Tensor]], Measurement]
    context: Tensor | None = None


def layer_runs(sample: Sample) -> list[LayerRun]:
    N = len(sample.tokens)
    path = ga.window_path_graph(N, 2)
    causal = ga.causal_window_graph(N, 32)
    if sample.ca_positions is not None and N > 1:
        near, near_name = ga.knn_graph(sample.ca_positions, k=min(16, N - 1)), "16 nearest C-alpha"
    else:
        near, near_name = causal, "causal window 32"
    track = embed(sample)
    consensus: dict[str, Any] = {"edge_hidden": EDGE_HIDDEN, "step_size": "auto"}
    nn_ = ga.nn
    return [
        LayerRun("SelfConsensus", "path, window 2",
            nn_.SelfConsensus(DIM, HEADS, **consensus), path, _energy),
        LayerRun("SelfConsensus, target", "causal window 32",
            nn_.SelfConsensus(DIM, HEADS, update="target", **consensus), causal, _spread),
        LayerRun("CrossConsensus", "another track, window 2",
            nn_.CrossConsensus(DIM, HEADS, **consensus),
            ga.bipartite_window_graph(N, 2), _energy, track),
        LayerRun("GaussianKernelAttention", "complete", nn_.GaussianKernelAttention(DIM, HEADS),
            ga.complete_graph(N), _spread),
        LayerRun("KrauseAttention, top 8", near_name, nn_.KrauseAttention(DIM, HEADS, top_k=8),
            near, _spread),
        LayerRun("DotProductAttention", "complete", nn_.DotProductAttention(DIM, HEADS, rope=True),
            ga.complete_graph(N), _spread),
        LayerRun("DotProductAttention", "path, window 2, with self",
            nn_.DotProductAttention(DIM, HEADS, rope=True),
            ga.window_path_graph(N, 2, self_loops=True), _spread),
        LayerRun("DotProductAttention value-less", "causal",
            nn_.DotProductAttention(DIM, HEADS, value_projection=False),
            ga.causal_graph(N), _spread),
        LayerRun("DotProductAttention, cross", "another track, all of it",
            nn_.DotProductAttention(DIM, HEADS), ga.bipartite_complete_graph(N, N),
            _spread, track),
    ]  # fmt: skip


def embed(sample: Sample) -> Tensor:
    """Return normalised random features of the tokens, [1, N, DIM]."""
    features = nn.Embedding(sample.vocab_size, DIM)(sample.tokens)
    return nn.functional.layer_norm(features, (DIM,))[None]


@torch.no_grad()
def layer_table(sample: Sample, console: Console) -> Table:
    """Apply every layer once to measure its effect, then five times to measure its time."""
    x = embed(sample)
    table = plain_table(
        f"Layers: their effect on the tokens (dim {DIM}, {HEADS} heads, random weights; consensus: "
        f"rank 4, edge_hidden {EDGE_HIDDEN}, step_size auto)"
    )
    table.add_column("layer\n  on graph", min_width=20)
    number_columns(table, "weights", "time")
    table.add_column("what", no_wrap=True)
    number_columns(table, "before", "after", "change")
    with console.status("applying the layers") as status:
        for run in layer_runs(sample):
            status.update(f"applying {run.name}")
            inputs = (x, run.graph) if run.context is None else (x, run.graph, run.context)
            seen: dict[str, Tensor] = {"x": x, "context": x if run.context is None else run.context}
            hooks = [
                part.register_forward_hook(_keep(seen, name))
                for name, part in run.layer.named_children()
                if name.endswith("_proj")
            ]
            run.layer(*inputs)
            for hook in hooks:
                hook.remove()
            times = []
            for _ in range(5):
                start = time.perf_counter()
                run.layer(*inputs)
                times.append(time.perf_counter() - start)
            what, before, after = run.measure(run.layer, run.graph, seen)
            table.add_row(
                f"{run.name}\n  [dim]{run.graph_name}[/dim]",
                f"{sum(p.numel() for p in run.layer.parameters()):,}",
                f"{short(1000 * min(times))} ms",
                what,
                short(before),
                short(after),
                f"{after / before - 1:+.1%}" if before > 0 else "",
            )
    table.caption = (
        "Time: best of five, a rough guide. Spread: variance of the features over the tokens, of "
        "the averaged features and of the averages. Energy: disagreement along the edges, 1/2 sum "
        "of (u_i - u_j)' R_ij (u_i - u_j), before and after the step (consensus paper, Eq. 14 and "
        "37)."
    )
    return table


def _keep(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Make a hook that stores the output and the input of a projection."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = output
        seen[f"before {name}"] = inputs[0]

    return hook


def _spread(layer: Any, graph: ga.TokenGraph, seen: dict[str, Tensor]) -> Measurement:
    """Measure the variance over tokens of the values (or of u), before and after mixing."""
    values = seen.get("value_proj", seen.get("source_proj", seen["context"]))
    mixed = seen["before output_proj"]
    before, after = (float(t.var(-2, correction=0).mean()) for t in (values, mixed))
    return "spread", before, after


def _energy(layer: Any, graph: ga.TokenGraph, seen: dict[str, Tensor]) -> Measurement:
    """Measure 1/2 sum over edges of (u_i - v_j)^T R_ij (u_i - v_j), before and after the step."""
    network = layer.edge_net
    R = ga.consensus_edge_matrices(
        network.target_hidden(seen["x"]),
        network.source_hidden(seen["context"]),
        network.second_layer(),
        graph,
    )
    source, target = graph.edge_index

    def energy(u: Tensor) -> float:
        v = seen.get("context_proj", u)
        d = (u[..., target, :] - v[..., source, :]).unflatten(-1, (layer.heads, -1))
        return float(0.5 * torch.einsum("...i,...ij,...j->", d, R, d))

    return "energy", energy(seen["source_proj"]), energy(seen["before output_proj"])
