"""The matrix of an edge, R = alpha I + beta Lambda^T Lambda, and the network that makes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.ops.consensus.edge_network.parameters import EdgeNetworkParameters


class EdgeMatrix(NamedTuple):
    """The parts of R = alpha I + beta Lambda^T Lambda, for every edge and head.

    alpha, beta [*, E, H]; unit_rows [*, E, H, r, D] holds sqrt(r) Lambda, rows of norm 1 (or 0).
    """

    alpha: Tensor
    beta: Tensor
    unit_rows: Tensor

    def apply(self, d: Tensor) -> Tensor:
        """R d = alpha d + (beta / r) sum_k row_k (row_k . d), for d [*, E, H, D]."""
        along_rows = (self.unit_rows * d[..., None, :]).sum(-1, keepdim=True)
        low_rank = (self.unit_rows * along_rows).sum(-2)
        rank = self.unit_rows.shape[-2]
        return self.alpha[..., None] * d + (self.beta / rank)[..., None] * low_rank

    def dense(self) -> Tensor:
        """R itself, [*, E, H, D, D]."""
        rank, features = self.unit_rows.shape[-2:]
        gram = self.unit_rows.transpose(-1, -2) @ self.unit_rows
        identity = torch.eye(features, dtype=gram.dtype, device=gram.device)
        return self.alpha[..., None, None] * identity + (self.beta / rank)[..., None, None] * gram


def edge_matrix(pre_activation: Tensor, network: EdgeNetworkParameters) -> EdgeMatrix:
    """The edge network (Algorithm 2) from its first layer's sum, [*, E, G, xi or 3 xi], G = H or 1.

    With 3 xi features the thirds feed alpha, beta and Lambda (one trunk each); with xi one trunk
    feeds all three.
    """
    hidden = functional.gelu(pre_activation)
    xi = network.alpha.shape[-1]
    thirds = hidden.split(xi, dim=-1) if hidden.shape[-1] == 3 * xi else (hidden,) * 3
    alpha = functional.softplus((thirds[0] * network.alpha).sum(-1) + network.alpha_bias)
    beta = functional.softplus((thirds[1] * network.beta).sum(-1) + network.beta_bias)
    shared = thirds[2].expand(*alpha.shape, xi)  # one trunk for all heads where G = 1
    raw = torch.einsum("...hx,hrdx->...hrd", shared, network.shear) + network.shear_bias
    return EdgeMatrix(alpha, beta, _unit_rows(raw))


def _unit_rows(rows: Tensor) -> Tensor:
    """Rows divided by their norm; a zero row stays zero (RN of Eq. 36)."""
    # Dividing by the largest entry first changes nothing but keeps the squares in range.
    largest = rows.detach().abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1)
    squared = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(squared == 0, 1, squared).rsqrt()
