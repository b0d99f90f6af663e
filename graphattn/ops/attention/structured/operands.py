"""The operands of a tile, so that its logits are one product, and the way back for gradients.

RBF attention is softmax attention over ``q . k - ||k||^2 / 2``, because ``||q||^2`` is the same for
a whole row. Both are taken around a centre, so that little cancels, and in float64 where even then
too many digits would go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.ops.attention.structured.workspace import Workspace


@dataclass
class Operands:
    """Queries [G, H, n, D] and keys [G, H, m, D] of G tiles, and what is added to their products.

    Logits are scale * (query . key + bias). For RBF the bias is -||k||^2 / 2, and the true logits
    are lower by scale * ||q||^2 / 2, which :meth:`true_lse` puts right.
    """

    query: Tensor
    key: Tensor
    scale: Tensor  # [H, 1, 1]
    bias: Tensor | None = None  # [G, H, m]; None: the dot product
    half_square: Tensor | None = None  # ||q||^2 / 2 [G, H, n] if there is a bias
    differences: bool = False  # logits from q - k itself: slow, but nothing cancels
    workspace: Workspace | None = None

    @property
    def scaled_query(self) -> Tensor:
        """What to multiply the keys with."""
        return torch.mul(self.query, self.scale, out=_room(self.workspace, "scaled", self.query))

    @property
    def scaled_bias(self) -> Tensor | None:
        """What to add to the products, the same in every row: [G, H, 1, m]."""
        return None if self.bias is None else self.scale * self.bias[..., None, :]

    @property
    def logits(self) -> Tensor:
        """[G, H, n, m], up to what :meth:`true_lse` puts right."""
        if not self.differences:
            products, bias = self.scaled_query @ self.key.transpose(-1, -2), self.scaled_bias
            return products if bias is None else products.add_(bias)
        if torch.is_grad_enabled():  # cdist knows only one derivative
            squared = (self.query[..., :, None, :] - self.key[..., None, :, :]).square().sum(-1)
        else:
            mode = "donot_use_mm_for_euclid_dist"
            squared = torch.cdist(self.query, self.key, compute_mode=mode).square()
        return self.scale / -2 * squared

    def true_lse(self, lse: Tensor) -> Tensor:
        """Log-sums [G, H, n] of the true logits."""
        if self.half_square is None or self.differences:
            return lse
        return lse - self.scale[..., 0] * self.half_square

    @property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """scale * ||q||^2 / 2 [G, H, n] and scale * ||k||^2 / 2 [G, H, m], around the centre."""
        assert self.bias is not None
        assert self.half_square is not None
        scale = self.scale[..., 0]
        return (scale * self.half_square).detach(), -(scale * self.bias).detach()

    def gradients(
        self, d_query: Tensor, d_key: Tensor, row_sums: Tensor | None, column_sums: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From gradients of `scaled_query` and `key` to those of q, k and scale [H].

        Those of the logits have `row_sums` [G, H, n] and `column_sums` [G, H, m]; the dot product
        does not ask for them. In exact arithmetic the row sums are the log-sums' gradient; the true
        ones let the rounding of weights meet q - k instead of q and k.
        """
        d_scale = (d_query * self.query).sum((0, 2, 3))
        d_query = d_query * self.scale
        if self.bias is None or self.half_square is None:
            return d_query, d_key, d_scale
        assert row_sums is not None
        assert column_sums is not None
        d_scale = d_scale + (column_sums * self.bias).sum((0, 2))
        d_scale = d_scale - (row_sums * self.half_square).sum((0, 2))
        d_query = torch.addcmul(d_query, row_sums[..., None] * self.scale, self.query, value=-1)
        d_key = torch.addcmul(d_key, column_sums[..., None] * self.scale, self.key, value=-1)
        return d_query, d_key, d_scale


def dot_operands(
    query: Tensor, key: Tensor, scale: Tensor, workspace: Workspace | None = None
) -> Operands:
    """For scale * q . k."""
    return Operands(query, key, scale[:, None, None], workspace=workspace)


def rbf_operands(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    center: Tensor,
    differences: bool = False,
    workspace: Workspace | None = None,
) -> Operands:
    """For -scale * ||q - k||^2 / 2, around `center` [G, H, 1, D]."""
    query = torch.sub(query, center, out=_room(workspace, "query", query))
    key = torch.sub(key, center, out=_room(workspace, "key", key))
    bias, half_square = -_half_square(key, workspace), _half_square(query, workspace)
    return Operands(query, key, scale[:, None, None], bias, half_square, differences, workspace)


def _half_square(x: Tensor, workspace: Workspace | None) -> Tensor:
    """||x||^2 / 2, over the features: exact for whole numbers, so that what ties ties."""
    return torch.mul(x, x, out=_room(workspace, "square", x)).sum(-1) / 2


def _room(workspace: Workspace | None, name: str, like: Tensor) -> Tensor | None:
    """Where a result may be written; None: wherever there is memory."""
    return None if workspace is None else workspace.room(name, like)
