"""Display of a token graph in a notebook: a table of facts, and a picture of a small graph."""

from __future__ import annotations

from html import escape

from graphattn.graphs.edges.storage import StoredGraph

DRAWN = 64  # the most targets, or sources, of a graph whose matrix is drawn
PIXELS = 192  # the longer side of the picture


def graph_html(graph: StoredGraph) -> str:
    """Return HTML with a table of facts, and the matrix of a small graph."""
    targets, sources, edges = graph.num_targets, graph.num_sources, graph.num_edges
    if targets == sources:
        rows = [("tokens", f"{targets:,}")]
    else:
        rows = [("targets", f"{targets:,}"), ("sources", f"{sources:,}")]
    rows.append(("edges", f"{edges:,}"))
    if targets:
        rows.append(("edges per token", f"{edges / targets:.4g}"))
    if targets and sources:
        rows.append(("share of all pairs", f"{edges / (targets * sources):.3g}"))
    if len(graph.sizes) > 1:
        rows.append(("sequences", f"{len(graph.sizes):,}"))
    rows.append(("structure", _structure(graph)))
    rows.append(("causal", "yes" if graph.is_causal else "no"))
    rows.append(("device", str(graph.device)))
    table = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<div><strong>TokenGraph</strong><table>{table}</table>{_picture(graph)}</div>"


def _structure(graph: StoredGraph) -> str:
    if graph.structure is not None:
        return type(graph.structure).__name__
    return "table of neighbours" if graph.is_table else "list of edges"


def _picture(graph: StoredGraph) -> str:
    """Draw the matrix as SVG: the edge of target i and source j is in row i, column j."""
    targets, sources = graph.num_targets, graph.num_sources
    if not 0 < max(targets, sources) <= DRAWN or min(targets, sources) == 0:
        return ""
    cells = "".join(f"M{j} {i}h1v1h-1z" for j, i in graph.edge_index.T.tolist())
    scale = PIXELS / max(targets, sources)
    return (
        f'<svg width="{sources * scale:.0f}" height="{targets * scale:.0f}" '
        f'viewBox="0 0 {sources} {targets}" role="img" '
        'aria-label="target i in row i, the sources it looks at in columns">'
        f'<rect width="{sources}" height="{targets}" fill="#eeeeee"/>'
        f'<path d="{cells}" fill="#0072b2"/></svg>'
    )
