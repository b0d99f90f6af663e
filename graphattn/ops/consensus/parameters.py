"""The second layer of the edge network, as tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EdgeNetworkParameters(NamedTuple):
    """What turns an edge's hidden vector h [xi] into alpha, beta and Lambda (Algorithm 2).

    The paper's W_alpha, b_alpha, W_beta, b_beta, W_Lambda, b_Lambda for each of H heads, rank r,
    D features per head: ``alpha = softplus(W_alpha . h + b_alpha)``, beta likewise, and the rows
    of ``W_Lambda h + b_Lambda``, normalised and divided by sqrt(r), are Lambda.
    """

    alpha: Tensor  # [H, xi]
    alpha_bias: Tensor  # [H]
    beta: Tensor  # [H, xi]
    beta_bias: Tensor  # [H]
    shear: Tensor  # [H, r, D, xi]
    shear_bias: Tensor  # [H, r, D]
