"""Graphs that fit the tokens, and theoretical bounds for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

import graphattn as ga
from graphattn.cli.demo.sample import Sample
from graphattn.plain_tables import number_columns, plain_table


@dataclass(frozen=True)
class NamedGraph:
    """A graph, its name, and bounds on its Fiedler value (None if no theorem applies)."""

    name: str
    graph: ga.TokenGraph
    fiedler_bounds: tuple[float, float] | None = None


def graphs_that_fit(sample: Sample) -> list[NamedGraph]:
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
    """Make the table of facts about every graph; a violated bound is a bug, and is marked."""
    table = plain_table("Graphs: which tokens see which")
    table.add_column("graph", min_width=10)
    number_columns(table, "tokens", "edges", "degree", "at least", "Fiedler", "at most")
    table.add_column("", no_wrap=True)
    number_columns(table, "max step")
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
        "Numbers in names: window on each side (causal: number of keys), x dilation, + random, + "
        "global tokens. Degree: sources per token. Fiedler: second-smallest eigenvalue of the "
        "Laplacian of the symmetrised graph, how fast information mixes; 0 if the graph is not "
        "connected. At least / at most: theoretical bounds (consensus paper, Remarks 4.1 and 4.2; "
        "complete graph: N). Max step: the largest consensus step size with which no mode changes "
        "sign, 1 / (2 λ_max)."
    )
    return table
