"""`graphattn demo`: real tokens through every graph and every layer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import graphattn as ga
from graphattn.cli.sample import Sample, load_sample

DIM, HEADS = 64, 4


@dataclass(frozen=True)
class NamedGraph:
    """A graph, its name, and what theory says of its Fiedler value (None: no theorem applies)."""

    name: str
    graph: ga.TokenGraph
    fiedler_bounds: tuple[float, float] | None = None


def run_demo(file: Path | None, num_tokens: int, seed: int, console: Console) -> None:
    """Read the file, then print the two tables."""
    started = time.perf_counter()
    sample = load_sample(file, num_tokens)
    torch.manual_seed(seed)
    console.print(f"[bold]{escape(sample.title)}[/bold]", highlight=False)
    graphs = graphs_that_fit(sample)
    console.print(graph_table(graphs, len(sample.tokens)))
    console.print(layer_table(sample, console))
    console.print(f"done in {time.perf_counter() - started:.1f} s", highlight=False)


# Graphs.


def graphs_that_fit(sample: Sample) -> list[NamedGraph]:
    """One graph of each kind that makes sense for these tokens."""
    N = len(sample.tokens)
    bounds = cycle = None
    if N > 4:
        bounds = ga.spectral.path_fiedler_bounds(N, 2)
        cycle = (ga.spectral.cycle_fiedler_value(N, 2),) * 2
    path = ga.window_path_graph(N, 2)
    graphs = [
        NamedGraph("window path, 2 each side", path, bounds),
        NamedGraph("window cycle, 2 each side", ga.window_cycle_graph(N, 2), cycle),
        NamedGraph("causal window, 16 keys", ga.causal_window_graph(N, 16)),
        NamedGraph("causal", ga.causal_graph(N)),
        NamedGraph("complete", ga.complete_graph(N), (float(N), float(N)) if N > 1 else None),
        NamedGraph("blocks of 32", ga.block_window_graph(N, 32)),
        NamedGraph("dilated window, 2 x 4", ga.dilated_window_graph(N, 2, 4)),
        NamedGraph("Longformer, 8 each side + 1 global", ga.longformer_graph(N, 8, [0])),
        NamedGraph("BigBird, 3 each side + 3 random", ga.bigbird_graph(N, 3, 3, [0], seed=0)),
    ]
    if sample.packed:
        packed = ga.batch([ga.window_path_graph(n, 2) for n in sample.packed])
        graphs.append(NamedGraph(f"batch of {len(sample.packed)} window paths", packed))
    if sample.ca_positions is not None:
        if N > 1:
            nearest = ga.knn_graph(sample.ca_positions, k=min(8, N - 1))
            graphs.append(NamedGraph("8 nearest C-alpha atoms", nearest))
            graphs.append(NamedGraph("window path + 8 nearest", ga.union(path, nearest)))
        contacts = ga.radius_graph(sample.ca_positions, radius=8.0)
        graphs.append(NamedGraph("C-alpha contacts within 8 Å", contacts))
    return graphs


def graph_table(graphs: list[NamedGraph], num_tokens: int) -> Table:
    """Facts of every graph; a bound that fails would be a bug, and is marked as one."""
    table = Table(title="Graphs: who talks to whom", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("graph", no_wrap=True)
    for name in ("tokens", "edges", "mean degree"):
        table.add_column(name, justify="right")
    table.add_column("lower ≤ Fiedler value ≤ upper", justify="center", no_wrap=True)
    table.add_column("largest step", justify="right")
    for entry in graphs:
        graph, tokens = entry.graph, entry.graph.num_targets
        fiedler = ga.spectral.fiedler_value(graph)
        step = ga.spectral.max_step_size(graph)
        table.add_row(
            entry.name,
            f"{tokens:,}",
            f"{graph.num_edges:,}",
            f"{graph.num_edges / tokens:.1f}",
            _sandwich(fiedler, entry.fiedler_bounds),
            f"{step:.4g}" if math.isfinite(step) else "any",
        )
    table.caption = (
        "Bounds: Remarks 4.1 and 4.2 of the consensus paper, and K_N. Fiedler value 0: not "
        "connected. Largest step: 1 / (2 λ_max), the last at which no mode changes sign."
    )
    table.caption_justify = "left"
    return table


def _sandwich(value: float, bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return f"{value:.4g}"
    lower, upper = bounds
    slack = 1e-9 * max(upper, 1e-300)
    holds = lower - slack <= value <= upper + slack
    mark = "[green]✓[/green]" if holds else "[red]✗ bound violated[/red]"
    return f"{lower:.4g} ≤ {value:.4g} ≤ {upper:.4g} {mark}"


# Layers.


class Measurement(NamedTuple):
    """How far apart the tokens are before and after a layer, by some measure."""

    what: str
    before: float
    after: float

    def __str__(self) -> str:
        change = f" ({self.after / self.before - 1:+.0%})" if self.before > 0 else ""
        return f"{self.what} {self.before:.4g} → {self.after:.4g}{change}"


@dataclass(frozen=True)
class Run:
    """One layer on one graph, and what measures how far the tokens came together."""

    name: str
    graph_name: str
    layer: nn.Module
    graph: ga.TokenGraph
    measure: Callable[[Any, ga.TokenGraph, dict[str, Tensor]], Measurement]
    context: Tensor | None = None


def layer_runs(sample: Sample) -> list[Run]:
    """Every mechanism of the four papers on a graph it is meant for."""
    N = len(sample.tokens)
    path = ga.window_path_graph(N, 2)
    causal = ga.causal_window_graph(N, 32)
    if sample.ca_positions is not None and N > 1:
        near, near_name = ga.knn_graph(sample.ca_positions, k=min(16, N - 1)), "16 nearest C-alpha"
    else:
        near, near_name = causal, "causal window, 32 keys"
    context = embed(sample)
    nn_ = ga.nn
    return [
        Run("SelfConsensus", "window path, 2 each side",
            nn_.SelfConsensus(DIM, HEADS, edge_hidden=64, step_size="auto"), path, _energy),
        Run("SelfConsensus, target", "causal window, 32 keys",
            nn_.SelfConsensus(DIM, HEADS, edge_hidden=64, step_size="auto", update="target"),
            causal, _spread),
        Run("CrossConsensus", "two tracks, 2 each side",
            nn_.CrossConsensus(DIM, HEADS, edge_hidden=64, step_size="auto"),
            ga.bipartite_window_graph(N, 2), _energy, context),
        Run("GaussianKernelAttention", "complete", nn_.GaussianKernelAttention(DIM, HEADS),
            ga.complete_graph(N), _spread),
        Run("KrauseAttention, top 8", near_name, nn_.KrauseAttention(DIM, HEADS, top_k=8),
            near, _spread),
        Run("DotProductAttention", "complete", nn_.DotProductAttention(DIM, HEADS, rope=True),
            ga.complete_graph(N), _spread),
        Run("DotProductAttention", "window path + self",
            nn_.DotProductAttention(DIM, HEADS, rope=True),
            ga.window_path_graph(N, 2, self_loops=True), _spread),
        Run("DotProductAttention, value-less", "causal",
            nn_.DotProductAttention(DIM, HEADS, value_projection=False),
            ga.causal_graph(N), _spread),
        Run("DotProductAttention, cross", "all of another track",
            nn_.DotProductAttention(DIM, HEADS), ga.bipartite_complete_graph(N, N),
            _spread, context),
    ]  # fmt: skip


def embed(sample: Sample) -> Tensor:
    """Normalised random features of the tokens, [1, N, DIM]."""
    return nn.functional.layer_norm(nn.Embedding(sample.vocab_size, DIM)(sample.tokens), (DIM,))[
        None
    ]


@torch.no_grad()
def layer_table(sample: Sample, console: Console) -> Table:
    """Apply every layer once for what it does, and three times for how long it takes."""
    x = embed(sample)
    table = Table(
        title="Layers: what they do to the tokens", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("layer", no_wrap=True)
    table.add_column("graph", no_wrap=True)
    table.add_column("parameters", justify="right")
    table.add_column("time", justify="right", min_width=9)
    table.add_column("disagreement, before → after", justify="center", no_wrap=True)
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
            for _ in range(3):
                start = time.perf_counter()
                run.layer(*inputs)
                times.append(time.perf_counter() - start)
            table.add_row(
                run.name,
                run.graph_name,
                f"{sum(p.numel() for p in run.layer.parameters()):,}",
                f"{1000 * sorted(times)[1]:.1f} ms",
                str(run.measure(run.layer, run.graph, seen)),
            )
    table.caption = (
        "Random weights. Spread: variance of the features over the tokens, of what is averaged and "
        "of the averages. Energy: Eq. 14 (Eq. 37 for two tracks), before and after the step."
    )
    table.caption_justify = "left"
    return table


def _keep(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    """A hook that stores a projection's output, and what the output projection is given."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = output
        seen[f"before {name}"] = inputs[0]

    return hook


def _spread(layer: Any, graph: ga.TokenGraph, seen: dict[str, Tensor]) -> Measurement:
    """Variance over tokens of the values (or of u) and of what the layer makes of them."""
    values = seen.get("value_proj", seen.get("source_proj", seen["context"]))
    mixed = seen["before output_proj"]
    return Measurement("spread", *(float(t.var(-2, correction=0).mean()) for t in (values, mixed)))


def _energy(layer: Any, graph: ga.TokenGraph, seen: dict[str, Tensor]) -> Measurement:
    """1/2 sum over edges of (u_i - v_j)^T R_ij (u_i - v_j), before and after the step."""
    network = layer.edge_net
    R = ga.consensus_edge_matrices(
        network.target_hidden(seen["x"]),
        network.source_hidden(seen["context"]),
        network.second_layer(),
        graph,
    )
    source, target = graph.edge_index
    energies = []
    for u in (seen["source_proj"], seen["before output_proj"]):
        v = seen.get("context_proj", u)
        d = (u[..., target, :] - v[..., source, :]).unflatten(-1, (layer.heads, -1))
        energies.append(float(0.5 * torch.einsum("...i,...ij,...j->", d, R, d)))
    return Measurement("energy", *energies)
