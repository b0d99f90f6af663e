"""Biases of edges: checks of `edge_bias`, and the bias of every edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph


def check_edge_bias(
    edge_bias: Any,
    graph: TokenGraph,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    batch: torch.Size,
) -> Tensor | None:
    """The bias in the compute dtype: per edge [E, H], per sample [*, E, H], or per offset.

    Leading sizes are those of `batch`, or 1; where all are 1 there is one bias for all samples.
    """
    if edge_bias is None:
        return None
    rows = None if graph.structure is None else graph.structure.num_offsets
    E = graph.num_edges
    if (
        not isinstance(edge_bias, Tensor)
        or edge_bias.dim() < 2
        or edge_bias.shape[-1] != heads
        or edge_bias.shape[-2] not in (E, rows)
    ):
        raise ValueError(_wrong_shape(edge_bias, E, rows, heads, batch))
    if not edge_bias.is_floating_point():
        raise ValueError(
            f"edge_bias must be floating-point, got {edge_bias.dtype} (it is no mask: which edges "
            "there are is given by the graph and by valid)"
        )
    if edge_bias.device != device:
        raise ValueError(f"edge_bias must be on {device}, got {edge_bias.device}")
    edge_bias = edge_bias.to(dtype)
    if edge_bias.dim() == 2:
        if edge_bias.shape[0] == E == rows and E > 1:
            raise ValueError(
                f"edge_bias with {rows} rows is ambiguous: this graph has as many edges as "
                "offsets, because the window is longer than the sequence. For a table, build the "
                "graph with a window of at most num_tokens; for one value per edge, give it a "
                "leading dimension (edge_bias[None]), or use from_edge_index(graph.edge_index, ...)"
            )
        return edge_bias
    lead = edge_bias.shape[:-2]
    if edge_bias.shape[-2] != E:
        raise ValueError(
            f"{_wrong_shape(edge_bias, E, rows, heads, batch)}: a table of offsets is one for all "
            "samples. Spread it out, edge_bias[..., graph.structure.offset_index("
            "target, source), :] with source, target = graph.edge_index"
        )
    if all(size == 1 for size in lead):
        return edge_bias.reshape(edge_bias.shape[-2:])
    fits = len(lead) <= len(batch) and all(
        size in (1, samples) for size, samples in zip(reversed(lead), reversed(batch), strict=False)
    )
    if not fits:
        raise ValueError(_wrong_shape(edge_bias, E, rows, heads, batch))
    return edge_bias.expand(*batch, E, heads)


def _wrong_shape(
    edge_bias: Any, num_edges: int, rows: int | None, heads: int, batch: torch.Size
) -> str:
    allowed = f"[{num_edges}, {heads}] (edges, heads)"
    if batch:
        per_sample = [*batch, num_edges, heads]
        allowed += f", {per_sample} (batch, edges, heads; a batch size may be 1)"
    if rows is not None:
        allowed += f" or [{rows}, {heads}] (offsets, heads)"
    got = list(edge_bias.shape) if isinstance(edge_bias, Tensor) else type(edge_bias).__name__
    return f"edge_bias must have shape {allowed}, got {got}"


def is_table(bias: Tensor | None, graph: TokenGraph) -> bool:
    """Whether a checked bias has a row per relative offset."""
    return bias is not None and bias.dim() == 2 and bias.shape[0] != graph.num_edges


def per_edge(bias: Tensor | None, graph: TokenGraph) -> Tensor | None:
    """One number per edge and head, [E, H] or [*, E, H], of a checked bias."""
    if bias is None or not is_table(bias, graph):
        return bias
    source, target = graph.edge_index
    return bias[graph.structure.offset_index(target, source)]  # type: ignore[union-attr]
