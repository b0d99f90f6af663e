"""All eigenvalues of a Laplacian at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_square_graph, has_blocks
from graphattn.spectral.laplacians.laplacian import laplacian
from graphattn.spectral.laplacians.operators import component_of

LARGEST = 5_000  # rows of a matrix that is solved: 200 megabytes, and about half a minute


def spectrum(graph: TokenGraph, edge_weight: Tensor | None = None) -> Tensor:
    r"""All eigenvalues of the Laplacian, ascending, by a dense solver.

    Absolute errors are roundings of the largest eigenvalue; :func:`fiedler_value` is as exact for
    small values. The zeros that belong to the connected parts of the graph are exactly 0.0: one
    each, or C each where `edge_weight` holds matrices (Appendix A).

    Source: Stabilizing Transformer Training Through Consensus, Section 2.2 and Appendix A.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E], or symmetric positive
            semidefinite matrices, [E, C, C]; ones if None.

    Returns:
        [N] or [N C], float64, on the graph's device.

    Raises:
        ValueError: as :func:`laplacian`, and above 5,000 tokens (N C > 5,000 with matrices).

    Example:
        >>> import graphattn as ga
        >>> ga.spectral.spectrum(ga.window_cycle_graph(4, window=1)).round(decimals=9)
        tensor([0., 2., 2., 4.], dtype=torch.float64)
    """
    graph = as_square_graph(graph)
    channels = 1
    if edge_weight is not None and has_blocks(edge_weight):
        channels = edge_weight.shape[2]
    size = graph.num_targets * channels
    if size > LARGEST:
        raise ValueError(
            f"graph must have at most {LARGEST // channels} tokens for all its eigenvalues"
            + (f" (matrices of {channels} rows)" if channels > 1 else "")
            + f", got {graph.num_targets}; fiedler_value and max_eigenvalue take larger ones"
        )
    L = laplacian(graph, edge_weight).toarray()
    values = np.maximum(np.linalg.eigvalsh(L), 0.0)
    values[: len(np.unique(component_of(graph, edge_weight))) * channels] = 0
    return torch.from_numpy(values).to(graph.device)
