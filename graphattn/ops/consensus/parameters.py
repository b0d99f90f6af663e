"""The second layer of the edge network, as tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EdgeNetworkParameters(NamedTuple):
    """What turns an edge's hidden vector h [xi] into alpha, beta and Lambda.

    W_alpha, b_alpha, W_beta, b_beta, W_Lambda, b_Lambda of Algorithm 2 of the consensus paper, for
    each of H heads, rank r and D features per head:
    ``alpha = softplus(W_alpha . h + b_alpha)``, beta likewise, and the rows of
    ``W_Lambda h + b_Lambda``, normalised and divided by sqrt(r), are Lambda.

    Example:
        >>> import torch, graphattn as ga
        >>> H, r, D, xi = 2, 4, 8, 16
        >>> network = ga.EdgeNetworkParameters(
        ...     alpha=torch.randn(H, xi), alpha_bias=torch.zeros(H),
        ...     beta=torch.randn(H, xi), beta_bias=torch.zeros(H),
        ...     shear=torch.randn(H, r, D, xi), shear_bias=torch.zeros(H, r, D))
        >>> hidden = torch.randn(10, H, xi)
        >>> ga.consensus_edge_matrices(hidden, hidden, network, ga.window_path_graph(10, 1)).shape
        torch.Size([18, 2, 8, 8])
    """

    alpha: Tensor  # [H, xi]
    alpha_bias: Tensor  # [H]
    beta: Tensor  # [H, xi]
    beta_bias: Tensor  # [H]
    shear: Tensor  # [H, r, D, xi]
    shear_bias: Tensor  # [H, r, D]
