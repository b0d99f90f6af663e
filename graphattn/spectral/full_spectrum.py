"""All eigenvalues of a Laplacian by a dense solver."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_square_graph, has_blocks
from graphattn.spectral.laplacians.laplacian import laplacian
from graphattn.spectral.laplacians.operators import component_of

LARGEST = 5_000  # the most rows of the matrix, which then takes 200 MB and about half a minute


def spectrum(graph: TokenGraph, edge_weight: Tensor | None = None) -> Tensor:
    r"""Compute all eigenvalues of the Laplacian, in ascending order, by a dense solver.

    The absolute errors are a few roundings of the largest eigenvalue. (:func:`fiedler_value` has
    small relative errors, even for a small value.) Every connected part of the graph has an
    eigenvalue that is exactly 0.0, or C such eigenvalues if `edge_weight` has matrices
    (Appendix A).

    Source: Stabilizing Transformer Training Through Consensus, Section 2.2 and Appendix A.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E], or symmetric positive
            semidefinite matrices, [E, C, C]; ones if None.

    Returns:
        A float64 tensor [N] or [N C] on the graph's device.

    Raises:
        ValueError: in the same cases as :func:`laplacian`, and if there are more than 5,000 tokens
            (N C > 5,000 with matrices).

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
            + (f" (with matrices of {channels} rows)" if channels > 1 else "")
            + f", got {graph.num_targets}: for larger graphs, use fiedler_value and max_eigenvalue"
        )
    L = laplacian(graph, edge_weight).toarray()
    values = np.maximum(np.linalg.eigvalsh(L), 0.0)
    values[: len(np.unique(component_of(graph, edge_weight))) * channels] = 0
    return torch.from_numpy(values).to(graph.device)
