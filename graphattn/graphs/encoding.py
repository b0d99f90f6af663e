"""Encoding of a graph as a tensor of numbers, so that a custom operator can take it.

torch.compile compiles again for every new Python object, but not for new values in a tensor. So an
operator that takes its graph as a tensor is compiled once for all windows and lengths.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from graphattn.graphs.structures.graph_code import (
    HAS_TABLE,
    PER_SEQUENCE,
    SIZES,
    facts_of,
    structure_of,
)
from graphattn.graphs.structures.graph_code import encode as encode
from graphattn.graphs.token_graph import TokenGraph


def decode(code: Tensor, edge_index: Tensor | None, device: torch.device) -> TokenGraph:
    """Return the graph that :func:`encode` encoded.

    Args:
        code: the result of :func:`encode`, which is ``graph.code``.
        edge_index: ``graph.listed``, a list of edges [2, E] or a table of neighbours [N, k], as the
            code says, in int32 or int64; None for a structured graph.
        device: the device of the edges of a structured graph.

    Example:
        >>> import torch, graphattn as ga
        >>> from graphattn.graphs.encoding import decode
        >>> graph = ga.knn_graph(torch.tensor([[0.0], [1.0], [3.0]]), k=1)
        >>> decode(graph.code, graph.listed, graph.device).neighbors
        tensor([[1],
                [0],
                [1]])
    """
    numbers = code.tolist()
    if edge_index is None:
        return _structured(tuple(numbers), device)
    facts = facts_of(numbers)
    facts["neighbors" if numbers[HAS_TABLE] else "edge_index"] = edge_index
    return TokenGraph(**facts)


@lru_cache(maxsize=64)
def _structured(code: tuple[int, ...], device: torch.device) -> TokenGraph:
    """Make a structured graph; the cache avoids listing its edges more than once."""
    facts = facts_of(list(code))
    structure = structure_of(iter(code[SIZES + PER_SEQUENCE * code[SIZES - 1] :]))
    return TokenGraph(
        structure=structure, sizes=facts["sizes"], starts=facts["starts"], device=device
    )
