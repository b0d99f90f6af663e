"""Values of edges and values of pairs: one as the other, for one graph or a packed batch.

A packed graph has the tokens of every sample one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.structures.recognize import ListedRows, structure_of_rows
from graphattn.graphs.token_graph import TokenGraph


def from_pairs(values: Tensor, graph: TokenGraph, packed: int) -> Tensor:
    """Return the values [B or 1, H or 1, N, M] of pairs at the edges.

    The graph has N targets and M sources, and the result is [B or 1, E, H or 1]. A packed graph of
    B samples has B N and B M, and the result is [E, H or 1]. `packed` is B, or 0.
    """
    source, target = graph.edge_index
    if not packed:
        return values[:, :, target, source].transpose(1, 2)
    n, m = graph.num_targets // packed, graph.num_sources // packed
    return values.expand(packed, -1, -1, -1)[target // n, :, target % n, source % m]


def to_pairs(values: Tensor, graph: TokenGraph, batch: int, packed: bool) -> Tensor:
    """Return values of edges, [B, E, H] or [1, E, H] if packed, as [B, H, N, M], 0 elsewhere."""
    source, target = graph.edge_index
    samples = batch if packed else 1
    n, m = graph.num_targets // samples, graph.num_sources // samples
    full = values.new_zeros(batch, n, m, values.shape[-1])
    if packed:
        full[target // n, target % n, source % m] = values[0]
    else:
        full[:, target, source] = values
    return full.permute(0, 3, 1, 2)


def structure_of_runs(allowed: Tensor) -> Any:
    """Return the structure of masks [B, N, N], packed, if all rows are runs of sources; else None.

    So are the rows of windows, of causal masks and of packed sequences.
    """
    B, N, M = allowed.shape
    if N != M or N < 2:
        return None
    rows = allowed.flatten(0, 1).to(torch.uint8)
    count, first = rows.sum(-1), rows.argmax(-1)
    last = M - 1 - rows.flip(-1).argmax(-1)
    if bool(((count == 0) | (last - first + 1 != count)).any()):
        return None
    shift = torch.arange(B, device=rows.device).repeat_interleave(N) * M
    return structure_of_rows(
        ListedRows(first + shift, last + shift, step=1, loops=True, num_sources=B * M)
    )
