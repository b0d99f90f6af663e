"""Compute facts about a graph, without training."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import breadth_first_order, connected_components, shortest_path

import graphattn as ga
from graphattn.cli.graph.kinds import Theory
from graphattn.plain_tables import short

MOST_EDGES = 20_000_000  # for facts that need a list of edges: a minute and two gigabytes
EXACT_DIAMETER = 1024  # up to this number of tokens, all pairs are measured
TOLERANCE = 1e-3  # consensus: share of the initial disagreement that may remain


class GraphFact(NamedTuple):
    """A line of the table; the JSON file contains `key` and `value`."""

    key: str
    name: str
    value: Any
    text: str
    note: str = ""


def facts_of(
    graph: ga.TokenGraph, theory: Theory | None, step_size: float | None
) -> list[GraphFact]:
    """Compute sizes, reach, spectrum and memory; for too many edges, only what needs no list."""
    facts = sizes_and_degrees(graph)
    if graph.num_edges > MOST_EDGES:
        why = f"reach and spectrum: not computed beyond {MOST_EDGES:,} edges"
        facts.append(GraphFact("left_out", "left out", why, "", why))
    elif graph.num_tokens:
        facts += reach(graph)
        facts += spectrum(graph, theory, step_size)
    return facts + memory(graph)


def sizes_and_degrees(graph: ga.TokenGraph) -> list[GraphFact]:
    """Count tokens, edges and degrees; a structured graph needs no list of edges."""
    N, E = graph.num_tokens, graph.num_edges
    degree = graph.in_degree()
    least, most = (int(degree.min()), int(degree.max())) if N else (0, 0)
    mean, density = (E / N, E / N**2) if N else (0.0, 0.0)
    sees = "sources that a token sees"
    causal = ("yes", "no token sees a later one") if graph.is_causal else ("no", "")
    return [
        GraphFact("tokens", "tokens", N, f"{N:,}"),
        GraphFact("edges", "edges", E, f"{E:,}"),
        GraphFact("least_degree", "smallest degree", least, f"{least:,}", sees),
        GraphFact("mean_degree", "mean degree", mean, f"{mean:,.4g}"),
        GraphFact("most_degree", "largest degree", most, f"{most:,}"),
        GraphFact("density", "density", density, f"{density:.3g}", "edges / tokens²"),
        GraphFact("is_causal", "causal", graph.is_causal, *causal),
    ]


def reach(graph: ga.TokenGraph) -> list[GraphFact]:
    """Count components and find the diameter, with edges in both directions."""
    edges = graph.to_scipy()
    both = scipy.sparse.csr_array(edges + edges.T)
    count, component = connected_components(both, directed=False)
    lower, upper = diameter_bounds(both, component)
    text = f"{lower:,}" if lower == upper else f"{lower:,} to {upper:,}"
    note = "most hops between two tokens, either way" + (" (of one component)" * (count > 1))
    return [
        GraphFact("components", "components", int(count), f"{count:,}", "edges taken either way"),
        GraphFact("diameter", "diameter", [lower, upper], text, note),
    ]


def diameter_bounds(
    adjacency: scipy.sparse.csr_array, component: np.ndarray[Any, Any]
) -> tuple[int, int]:
    """Bound the diameter of the largest component; for small graphs the two bounds are equal.

    Large graphs: from the eccentricities of the ends and the middle of a long path, because the
    diameter is between the eccentricity of a token and twice that.
    """
    tokens = np.flatnonzero(component == np.bincount(component).argmax())
    part = scipy.sparse.csr_array(adjacency[tokens][:, tokens])
    if len(tokens) <= EXACT_DIAMETER:
        exact = int(shortest_path(part, directed=False, unweighted=True).max(initial=0))
        return exact, exact
    path = farthest_path(part, farthest_path(part, 0)[-1])
    ends = farthest_path(part, path[len(path) // 2])
    longest, radius = len(path) - 1, len(ends) - 1
    return max(longest, radius), min(2 * radius, 2 * longest)


def farthest_path(adjacency: scipy.sparse.csr_array, start: int) -> list[int]:
    """Find a shortest path from `start` to one of the tokens farthest from it."""
    order, before = breadth_first_order(adjacency, start, directed=False)
    path = [int(order[-1])]
    while path[-1] != start:
        path.append(int(before[path[-1]]))
    return path[::-1]


def spectrum(
    graph: ga.TokenGraph, theory: Theory | None, step_size: float | None
) -> list[GraphFact]:
    """Return both ends of the spectrum of the Laplacian, and facts about consensus with R = I."""
    fiedler = fiedler_value(graph)
    largest = ga.spectral.max_eigenvalue(graph)
    limit = 1 / (2 * largest) if largest > 0 else math.inf
    value, note = f"{fiedler:.6g}", "how fast it mixes"
    facts = [GraphFact("fiedler_value", "Fiedler value λ₁", fiedler, value, note)]
    if theory is not None:
        facts.append(theory_fact(theory, fiedler))
    step = f"{limit:.6g}" if math.isfinite(limit) else "any"
    signs = "1 / (2 λ_max): no mode changes sign"
    facts += [
        GraphFact("max_eigenvalue", "largest eigenvalue", largest, f"{largest:.6g}"),
        GraphFact("max_step_size", "largest step", limit, step, signs),
    ]
    eta = step_size if step_size is not None else limit
    if math.isfinite(eta):
        note = "the largest" if step_size is None else ""
        facts.append(GraphFact("step_size", "step η", eta, f"{eta:.6g}", note))
        facts += smoothing(graph, fiedler, largest, eta)
    return facts


def fiedler_value(graph: ga.TokenGraph) -> float:
    """Compute λ₁, with tokens that see and are seen by all taken out first.

    g such tokens add g to every eigenvalue of the rest except 0, and the eigenvalue N, which is the
    largest (Merris 1994, Laplacian matrices of graphs: a survey, Theorem 2.20). With a global
    token, the eigenvalues of a long path are so close that Lanczos takes minutes; without it, it
    takes seconds.
    """
    N, (source, target) = graph.num_tokens, graph.edge_index
    others = source != target
    hub = torch.bincount(source[others], minlength=N) == N - 1
    hub &= torch.bincount(target[others], minlength=N) == N - 1
    g = int(hub.sum())
    if N < 2 or g == 0:
        return ga.spectral.fiedler_value(graph)
    if N - g < 2:
        return float(N)
    place = torch.cumsum(~hub, 0) - 1
    kept = others & ~hub[source] & ~hub[target]
    rest = ga.from_edge_index(place[graph.edge_index[:, kept]], N - g)
    return g + ga.spectral.fiedler_value(rest)


def smoothing(graph: ga.TokenGraph, fiedler: float, largest: float, eta: float) -> list[GraphFact]:
    """Return the factor of the slowest mode per step, and the number of steps to consensus.

    :func:`graphattn.spectral.smoothing_rate` and ``steps_until_consensus`` from both ends of the
    spectrum, which are already known and slow to compute for long graphs.
    """
    if fiedler > 0:
        taken = min(2 * eta * fiedler, 2 - 2 * eta * largest)  # 1 - |1 - x| = min(x, 2 - x)
    else:
        taken = 1 - ga.spectral.smoothing_rate(graph, eta)  # of every component separately
    text = f"1 - {taken:.3g}" if 0 < taken < 1e-3 else f"{1 - taken:.6g}"
    steps, why = math.inf, "because the step is too large"
    if fiedler == 0:
        why = "because the graph is not connected"
    elif taken > 0:
        steps = math.ceil(math.log(TOLERANCE) / math.log1p(-taken)) if taken < 1 else 1
        why = f"until every disagreement is at most {TOLERANCE:g} of the initial one"
    count, factor = (
        short(steps) if math.isfinite(steps) else "never",
        "of the slowest mode per step",
    )
    return [
        GraphFact("smoothing_rate", "smoothing rate", 1 - taken, text, f"factor {factor}"),
        GraphFact("steps_until_consensus", "steps to consensus", steps, count, why),
    ]


def theory_fact(theory: Theory, fiedler: float) -> GraphFact:
    """Return the statement of the theorem; a value that violates it is a bug, and is marked."""
    lower, upper = theory.lower, theory.upper
    rounding = 1e-9 * max(upper, 1e-300)
    holds = lower - rounding <= fiedler <= upper + rounding
    text = f"{lower:.6g}" if lower == upper else f"{lower:.6g} to {upper:.6g}"
    note = theory.source + ("" if holds else ": VIOLATED")
    value = {"lower": lower, "upper": upper, "source": theory.source, "holds": holds}
    return GraphFact("fiedler_theory", "  by theory", value, text, note)


def memory(graph: ga.TokenGraph) -> list[GraphFact]:
    """Return the memory of a dense bool mask, and of a list of edges with two int64 each."""
    mask, edges = graph.num_tokens**2, 16 * graph.num_edges
    note = "structured layers list no edge" if graph.structure is not None else ""
    return [
        GraphFact("mask_bytes", "dense mask", mask, as_bytes(mask), "bool [N, N]"),
        GraphFact("edge_index_bytes", "edge list", edges, as_bytes(edges), note),
    ]


def as_bytes(count: int) -> str:
    """Format a number of bytes, such as ``1.05 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
