"""R of a chunk of edges, its product with a vector, and their gradients.

The mathematics is that of edge_matrix.py. The expensive part is the product from hidden vectors to
Lambda; everything else is a few passes over memory that stays in cache. The rows of Lambda are
never normalised: with raw rows l_k,
R d = alpha d + (beta / r) sum_k l_k (l_k . d) / |l_k|^2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.ops.consensus.edge_network import EdgeNetworkParameters

LARGEST_SQUARE = 2.0**40  # of a row; up to it, the square and its reciprocal do not overflow


class Buffers:
    """Memory that all chunks use in turn, so that it stays in cache."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.memory: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory, valid until the next call with this name."""
        size = math.prod(shape)
        if name not in self.memory or self.memory[name].numel() < size:
            self.memory[name] = self.like.new_empty(size)
        return self.memory[name][:size].view(shape)


def by_network(network: EdgeNetworkParameters, networks: int) -> EdgeNetworkParameters:
    """The parameters by network: each of the G networks is for h = H / G heads.

    alpha, beta [G, h, xi] and their biases [G, 1, h]; shear [G, h r D, xi] and its [G, 1, h r D].
    """
    alpha, alpha_bias, beta, beta_bias, shear, shear_bias = network
    xi = alpha.shape[-1]
    heads = alpha.shape[0] // networks
    rows = heads * math.prod(shear_bias.shape[1:])
    return EdgeNetworkParameters(
        alpha.reshape(networks, heads, xi),
        alpha_bias.reshape(networks, 1, heads),
        beta.reshape(networks, heads, xi),
        beta_bias.reshape(networks, 1, heads),
        shear.reshape(networks, rows, xi),
        shear_bias.reshape(networks, 1, rows),
    )


class EdgeRows:
    """R of n edges, by k networks with h heads each.

    Args:
        hidden_sum: target_hidden_i + source_hidden_j, [k, n, xi or 3 xi], from `buffers`.
        network: its k networks, as from :func:`by_network`.
        rank, features: r, D.
        gradients: whether gradients are needed; if not, less memory is used.
    """

    def __init__(
        self,
        hidden_sum: Tensor,
        network: EdgeNetworkParameters,
        rank: int,
        features: int,
        buffers: Buffers,
        *,
        gradients: bool,
    ) -> None:
        k, n, width = hidden_sum.shape
        heads, self.xi = network.alpha.shape[-2:]
        self.rank, self.network, self.hidden_sum, self.buffers = rank, network, hidden_sum, buffers
        self.hidden = buffers.get("hidden", k, n, width) if gradients else hidden_sum
        torch.ops.aten.gelu.out(hidden_sum, out=self.hidden)
        for_alpha, for_beta, for_shear = self.trunks(self.hidden)
        self.alpha_logit = torch.baddbmm(network.alpha_bias, for_alpha, network.alpha.mT)
        self.beta_logit = torch.baddbmm(network.beta_bias, for_beta, network.beta.mT)
        self.alpha = functional.softplus(self.alpha_logit)  # [k, n, h]
        self.beta = functional.softplus(self.beta_logit)
        rows = buffers.get("rows", k, n, network.shear.shape[1])
        torch.baddbmm(network.shear_bias, for_shear, network.shear.mT, out=rows)
        self.rows = rows.view(k, n, heads, rank, features)
        unused = "scratch" if gradients else "hidden_sum"
        self.scratch = buffers.get(unused, *self.rows.shape)
        self._bring_into_range()

    def trunks(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden vectors for alpha, beta and Lambda.

        They are thirds of 3 * xi features, or all three the same tensor with xi features.
        """
        if hidden.shape[-1] == self.xi:
            return hidden, hidden, hidden
        alpha, beta, shear = hidden.split(self.xi, dim=-1)
        return alpha, beta, shear

    def _bring_into_range(self) -> None:
        """Divide rows whose squares would overflow or underflow by their largest entry.

        This is decided row by row, so that no edge changes the rounding of another.
        """
        square = self._squares()
        self.divisor: Tensor | None = None
        if self.rows.numel() and not self._are_usual(square):
            usual = (square >= 1 / LARGEST_SQUARE) & (square <= LARGEST_SQUARE)
            largest = self.rows.abs().amax(dim=-1, keepdim=True)
            self.divisor = largest.masked_fill_(usual | (largest == 0), 1)
            self.rows.div_(self.divisor)
            square = self._squares()
            self.per_square = square.reciprocal().masked_fill_(square == 0, 0)
        else:
            self.per_square = square.reciprocal_()  # 1 / |l_k|^2

    def _squares(self) -> Tensor:
        """|l_k|^2, [k, n, h, r, 1]."""
        return torch.mul(self.rows, self.rows, out=self.scratch).sum(-1, keepdim=True)

    def _are_usual(self, square: Tensor) -> bool:
        """Whether all squares are in range; False on a GPU, where to read them would wait."""
        if square.device.type != "cpu":
            return False
        least, most = torch.aminmax(square)
        return float(least) >= 1 / LARGEST_SQUARE and float(most) <= LARGEST_SQUARE

    def along(self, d: Tensor) -> Tensor:
        """l_k . d for d [k, n, h, D]: [k, n, h, r, 1]."""
        return torch.mul(self.rows, d[..., None, :], out=self.scratch).sum(-1, keepdim=True)

    def apply(self, d: Tensor, along: Tensor) -> Tensor:
        """R d, from d [k, n, h, D] and :meth:`along` of it."""
        share = (self.beta / self.rank)[..., None, None] * along * self.per_square
        low_rank = torch.mul(self.rows, share, out=self.scratch).sum(-2)
        return low_rank.addcmul_(self.alpha[..., None], d)

    def row_gradients(self, d: Tensor, e: Tensor, along_d: Tensor, along_e: Tensor) -> Tensor:
        """Return the gradient of e . R d with respect to the raw rows, [k, n, h r D].

        (beta / r) [(l . e) d + (l . d) e - 2 (l . d) (l . e) l / |l|^2] / |l|^2 for every row l.
        """
        if d.shape[-1] == 1:  # it is exactly 0; rounding errors would be multiplied by 1 / |l|
            return self.scratch.zero_().flatten(2)
        scale = (self.beta / self.rank)[..., None, None] * self.per_square
        if self.divisor is not None:
            scale = scale / self.divisor
        both = scale * along_d
        back = both * along_e * self.per_square
        d_rows = torch.mul(self.rows, back.mul_(-2), out=self.scratch)
        d_rows.addcmul_(scale * along_e, d[..., None, :]).addcmul_(both, e[..., None, :])
        return d_rows.flatten(2)

    def logit_gradients(
        self, d: Tensor, e: Tensor, along_d: Tensor, along_e: Tensor, d_strength: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return gradients with respect to the logits of alpha and beta, [k, n, h].

        Differentiated are e . R d, and alpha + beta where degrees are wanted.
        """
        d_alpha = (d * e).sum(-1)
        d_beta = (along_d * along_e * self.per_square).sum((-2, -1)).div_(self.rank)
        if d_strength is not None:
            d_alpha, d_beta = d_alpha + d_strength, d_beta + d_strength
        through = torch.ops.aten.softplus_backward
        return through(d_alpha, self.alpha_logit, 1, 20), through(d_beta, self.beta_logit, 1, 20)

    def add_network_gradients(
        self, total: EdgeNetworkParameters, d_alpha: Tensor, d_beta: Tensor, d_rows: Tensor
    ) -> None:
        """Add the gradients of these edges to those of the second layer."""
        gradients = (d_alpha, d_beta, d_rows)
        weights, biases = total[::2], total[1::2]
        for weight, bias, gradient, hidden in zip(
            weights, biases, gradients, self.trunks(self.hidden), strict=True
        ):
            weight.baddbmm_(gradient.mT, hidden)
            bias.add_(gradient.sum(1, keepdim=True))

    def hidden_gradient(self, d_alpha: Tensor, d_beta: Tensor, d_rows: Tensor) -> Tensor:
        """The gradient of `hidden_sum`, written into the memory of `hidden`, which it replaces."""
        of_alpha, of_beta, of_shear = self.trunks(self.hidden)
        shared = of_alpha is of_shear
        of_shear.baddbmm_(d_rows, self.network.shear, beta=0)
        of_alpha.baddbmm_(d_alpha, self.network.alpha, beta=int(shared))
        of_beta.baddbmm_(d_beta, self.network.beta, beta=int(shared))
        return torch.ops.aten.gelu_backward.grad_input(
            self.hidden, self.hidden_sum, grad_input=self.hidden
        )
