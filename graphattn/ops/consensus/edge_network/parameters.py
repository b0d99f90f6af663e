"""The edge network as tensors: its first and its second layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; without a call of torch if x has it, because such calls take time."""
    return x if x.dtype is dtype else x.to(dtype)


class FirstLayer(NamedTuple):
    """First layer of the edge network, ``weight y + bias`` per token and group of heads.

    Pass it in place of hidden vectors, which are several times as large as the tokens. A fused
    backend then computes them piece by piece, and again in the backward pass, and does not store
    them. As `edge_hidden`, its tokens are the features of edges, [*, E, 1, F], which all groups
    share; the hidden vectors of all edges are never in memory at once.

    Example:
        >>> import torch, graphattn as ga
        >>> y = torch.randn(10, 2, 8)  # tokens, groups, features
        >>> first = ga.FirstLayer(y, weight=torch.randn(2, 16, 8), bias=torch.zeros(2, 16))
        >>> first.hidden().shape
        torch.Size([10, 2, 16])
    """

    tokens: Tensor  # y, [*, N, G, in]; features of edges, [*, E, 1, in]
    weight: Tensor  # [G, xi, in]
    bias: Tensor | None = None  # [G, xi]

    def hidden(self) -> Tensor:
        """The hidden vectors, [*, N, G, xi]; under autocast, in the dtype of autocast."""
        tokens, weight, bias = self
        groups, xi, _ = weight.shape
        by_group = tokens.flatten(0, -3).transpose(0, 1).expand(groups, -1, -1)
        by_group = torch.bmm(by_group, weight.mT)
        hidden = by_group.transpose(0, 1).view(*tokens.shape[:-2], groups, xi)
        # Autocast computes the product in its own dtype, and the result keeps it.
        return hidden if bias is None else hidden + bias.to(hidden.dtype)


class EdgeNetworkParameters(NamedTuple):
    """Second layer, from an edge's hidden vector h [xi] to alpha, beta and Lambda.

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
