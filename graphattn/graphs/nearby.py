"""The edges of a graph between tokens that are near each other in their sequence."""

from __future__ import annotations

from graphattn.graphs.edges.storage import G
from graphattn.graphs.structures.composites import Parts, Section, intersection_of
from graphattn.graphs.structures.structure import Band, Complete, GraphStructure


def nearby_edges(graph: G, window: int) -> G:
    """Return the graph of those edges (i, j) whose positions are less than `window` apart.

    Of a causal graph, these are the last `window` keys of every token, itself included, as in
    :func:`~graphattn.causal_window_graph`. The result is stored with the graph. If the graph is
    made of bands (windows, causal and complete graphs, and batches and sections of these), no edge
    is listed.

    Args:
        graph: any graph over the positions of sequences.
        window: keys, >= 1.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.graphs.nearby import nearby_edges
        >>> packed = ga.batch([ga.causal_graph(100), ga.causal_graph(50)])
        >>> near = ga.batch([ga.causal_window_graph(100, 8), ga.causal_window_graph(50, 8)])
        >>> nearby_edges(packed, 8) == near
        True
    """
    return graph.derived((nearby_edges, window), lambda: _nearby(graph, window))


def _nearby(graph: G, window: int) -> G:
    structure = None
    if graph.structure is not None and graph.own_positions is None:
        structure = _near(graph.structure, window)
    edges = None
    if structure is None:
        edges = graph.compact_edges
        distance = graph.positions[edges[1]] - graph.source_positions[edges[0]]
        edges = edges[:, distance.abs() < window]
    return type(graph)(
        structure=structure,
        edge_index=edges,
        num_targets=graph.num_targets,
        num_sources=graph.num_sources,
        sizes=graph.sizes,
        starts=graph.starts,
        is_causal=graph.is_causal,
        has_causal_part=graph.has_causal_part,
        device=graph.device,
        positions=graph.own_positions,
    )


def _near(structure: GraphStructure, window: int) -> GraphStructure | None:
    """Return the structure of the near edges in closed form; None if it is not made of bands."""
    match structure:
        case Parts(parts):
            near = [_near(part, window) for part in parts]
            known = tuple(part for part in near if part is not None)
            return Parts(known) if len(known) == len(near) else None
        case Section(whole):
            of_whole = _near(whole, window)
            return None if of_whole is None else Section(of_whole, *structure.place)
        case Band(num_tokens):
            return intersection_of(structure, Band(num_tokens, window - 1, window - 1))
        case Complete(num_targets, num_sources) if num_targets == num_sources:
            return Band(num_targets, window - 1, window - 1)
    return None
