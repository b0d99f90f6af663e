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

DIM, HEADS, EDGE_HIDDEN = 64, 4, 64


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
    console.print()
    console.print(graph_table(graphs))
    console.print()
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
        NamedGraph("path, window 2", path, bounds),
        NamedGraph("cycle, window 2", ga.window_cycle_graph(N, 2), cycle),
        NamedGraph("causal window 32", ga.causal_window_graph(N, 32)),
        NamedGraph("causal", ga.causal_graph(N)),
        NamedGraph("complete", ga.complete_graph(N), (float(N), float(N)) if N > 1 else None),
        NamedGraph("blocks of 32", ga.block_window_graph(N, 32)),
        NamedGraph("dilated, 2 x 4", ga.dilated_window_graph(N, 2, 4)),
        NamedGraph("Longformer 8 + 1", ga.longformer_graph(N, 8, [0])),
        NamedGraph("BigBird 3 + 3 + 1", ga.bigbird_graph(N, 3, 3, [0], seed=0)),
    ]
    if len(sample.packed) > 1:
        packed = ga.batch([ga.window_path_graph(n, 2) for n in sample.packed])
        graphs.append(NamedGraph(f"batch of {len(sample.packed)} paths", packed))
    if sample.ca_positions is not None:
        if N > 1:
            nearest = ga.knn_graph(sample.ca_positions, k=min(16, N - 1))
            graphs.append(NamedGraph("16 nearest C-alpha", nearest))
        contacts = ga.radius_graph(sample.ca_positions, radius=8.0)
        graphs.append(NamedGraph("C-alpha within 8 Å", contacts))
    return graphs


def graph_table(graphs: list[NamedGraph]) -> Table:
    """Facts of every graph; a bound that fails would be a bug, and is marked as one."""
    table = _table("Graphs: who talks to whom")
    table.add_column("graph", min_width=10)
    for name in ("tokens", "edges", "degree", "at least", "Fiedler", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("max step", justify="right", no_wrap=True)
    for entry in graphs:
        graph, tokens = entry.graph, entry.graph.num_targets
        fiedler = ga.spectral.fiedler_value(graph)
        step = ga.spectral.max_step_size(graph)
        lower, upper, mark = "", "", ""
        if entry.fiedler_bounds is not None:
            least, most = entry.fiedler_bounds
            holds = least * (1 - 1e-9) <= fiedler <= most * (1 + 1e-9)
            lower, upper = f"{least:.3g}", f"{most:.3g}"
            mark = "[green]✓[/green]" if holds else "[red]violated[/red]"
        table.add_row(
            entry.name,
            f"{tokens:,}",
            f"{graph.num_edges:,}",
            f"{graph.num_edges / tokens:.1f}",
            lower,
            f"{fiedler:.3g}",
            upper,
            mark,
            f"{step:.3g}" if math.isfinite(step) else "any",
        )
    table.caption = (
        "Degree: sources per token. Fiedler: second-smallest eigenvalue of the Laplacian of the "
        "symmetrised graph, how fast information mixes; 0 where the tokens do not hang together. "
        "At least / at most: what theory says (consensus paper, Remarks 4.1 and 4.2; complete "
        "graph: N). Max step: the largest consensus step at which no mode changes sign, "
        "1 / (2 λ_max)."
    )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,  # one blank between columns comes with the box; it all fits 80 columns
    )


# Layers.


class Measurement(NamedTuple):
    """How far apart the tokens are before and after a layer, by some measure."""

    what: str
    before: float
    after: float

    def cells(self) -> tuple[str, str, str, str]:
        """What, before, after and the change in percent."""
        change = f"{self.after / self.before - 1:+.1%}" if self.before > 0 else ""
        return self.what, f"{self.before:.3g}", f"{self.after:.3g}", change


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
    """Every mechanism of the papers on a graph it is meant for."""
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
        Run("SelfConsensus", "path, window 2",
            nn_.SelfConsensus(DIM, HEADS, **consensus), path, _energy),
        Run("SelfConsensus, target", "causal window 32",
            nn_.SelfConsensus(DIM, HEADS, update="target", **consensus), causal, _spread),
        Run("CrossConsensus", "another track, window 2",
            nn_.CrossConsensus(DIM, HEADS, **consensus),
            ga.bipartite_window_graph(N, 2), _energy, track),
        Run("GaussianKernelAttention", "complete", nn_.GaussianKernelAttention(DIM, HEADS),
            ga.complete_graph(N), _spread),
        Run("KrauseAttention, top 8", near_name, nn_.KrauseAttention(DIM, HEADS, top_k=8),
            near, _spread),
        Run("DotProductAttention", "complete", nn_.DotProductAttention(DIM, HEADS, rope=True),
            ga.complete_graph(N), _spread),
        Run("DotProductAttention", "path, window 2, with self",
            nn_.DotProductAttention(DIM, HEADS, rope=True),
            ga.window_path_graph(N, 2, self_loops=True), _spread),
        Run("DotProductAttention value-less", "causal",
            nn_.DotProductAttention(DIM, HEADS, value_projection=False),
            ga.causal_graph(N), _spread),
        Run("DotProductAttention, cross", "another track, all of it",
            nn_.DotProductAttention(DIM, HEADS), ga.bipartite_complete_graph(N, N),
            _spread, track),
    ]  # fmt: skip


def embed(sample: Sample) -> Tensor:
    """Normalised random features of the tokens, [1, N, DIM]."""
    return nn.functional.layer_norm(nn.Embedding(sample.vocab_size, DIM)(sample.tokens), (DIM,))[
        None
    ]


@torch.no_grad()
def layer_table(sample: Sample, console: Console) -> Table:
    """Apply every layer once for what it does, then five times for how long it takes."""
    x = embed(sample)
    table = _table(
        f"Layers: what they do to the tokens (dim {DIM}, {HEADS} heads, random weights; "
        f"consensus: rank 4, edge_hidden {EDGE_HIDDEN}, step_size auto)"
    )
    table.add_column("layer\n  on graph", min_width=20)
    for name in ("weights", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
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
            table.add_row(
                f"{run.name}\n  [dim]{run.graph_name}[/dim]",
                f"{sum(p.numel() for p in run.layer.parameters()):,}",
                f"{1000 * min(times):.1f} ms",
                *run.measure(run.layer, run.graph, seen).cells(),
            )
    table.caption = (
        "Time: best of five. Spread: variance of the features over the tokens, of what is averaged "
        "and of the averages. Energy: disagreement along the edges, 1/2 sum of "
        "(u_i - u_j)' R_ij (u_i - u_j), before and after the step (consensus paper, Eq. 14 and 37)."
    )
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
