"""The operands of a tile, so that its logits are one product, and the way back for gradients.

RBF attention is softmax attention over ``q . k - ||k||^2 / 2``, because ``||q||^2`` is the same for
a whole row. With one more feature, ``[q, 1] . [k, -||k||^2 / 2]``, that is a plain product, and the
gradient of the bias comes with it. Both are taken around a centre, so that little cancels, and in
float64 where even then too many digits would go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Operands:
    """Queries [G, H, n, F] and keys [G, H, m, F] of G tiles; logits are scale * query @ key^T.

    For "rbf" the last of the F features is the bias, and the true logits are lower by
    scale * ||q||^2 / 2, which :meth:`true_lse` puts right.
    """

    query: Tensor
    key: Tensor
    scale: Tensor  # [H, 1, 1]
    rbf: bool
    differences: bool = False  # logits from q - k itself: slow, but nothing cancels

    @property
    def scaled_query(self) -> Tensor:
        """What to multiply the keys with."""
        return self.query * self.scale

    @property
    def logits(self) -> Tensor:
        """[G, H, n, m], up to what :meth:`true_lse` puts right."""
        if not self.differences:
            return self.scaled_query @ self.key.transpose(-1, -2)
        query, key = self.query[..., :-1], self.key[..., :-1]
        if torch.is_grad_enabled():  # cdist knows only one derivative
            squared = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        else:
            mode = "donot_use_mm_for_euclid_dist"
            squared = torch.cdist(query, key, compute_mode=mode).square()
        return self.scale / -2 * squared

    def true_lse(self, lse: Tensor) -> Tensor:
        """Log-sums [G, H, n] of the true logits."""
        if not self.rbf or self.differences:
            return lse
        return lse - self.scale[..., 0] * self._half_square()

    def _half_square(self) -> Tensor:
        """||q||^2 / 2 around the centre, [G, H, n]."""
        return _half_square(self.query[..., :-1])

    @property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """scale * ||q||^2 / 2 [G, H, n] and scale * ||k||^2 / 2 [G, H, m], around the centre."""
        scale = self.scale[..., 0]
        return scale * self._half_square().detach(), -scale * self.key[..., -1].detach()

    def gradients(
        self, d_query: Tensor, d_key: Tensor, row_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From gradients of `scaled_query` and `key` to those of q, k and scale [H].

        `row_sums` [G, H, n] are those of the logits' gradient. In exact arithmetic they are the
        log-sums' gradient; the true ones let the rounding of weights meet q - k instead of q and k.
        """
        d_scale = (d_query * self.query).sum((0, 2, 3))
        d_query = d_query * self.scale
        if not self.rbf:
            return d_query, d_key, d_scale
        query, key = self.query[..., :-1], self.key[..., :-1]
        d_scale = d_scale - (row_sums * self._half_square()).sum((0, 2))
        d_query = torch.addcmul(
            d_query[..., :-1], row_sums[..., None] * self.scale, query, value=-1
        )
        d_key = torch.addcmul(d_key[..., :-1], d_key[..., -1:], key, value=-1)
        return d_query, d_key, d_scale


def dot_operands(query: Tensor, key: Tensor, scale: Tensor) -> Operands:
    """For scale * q . k."""
    return Operands(query, key, scale[:, None, None], rbf=False)


def rbf_operands(query: Tensor, key: Tensor, scale: Tensor, center: Tensor) -> Operands:
    """For -scale * ||q - k||^2 / 2, around `center` [G, H, 1, D]."""
    if torch.is_grad_enabled():
        query, key = query - center, key - center
        bias = -_half_square(key)[..., None]
        one = torch.ones_like(query[..., :1])
        query, key = torch.cat([query, one], dim=-1), torch.cat([key, bias], dim=-1)
    else:  # the same, without copies in between
        query, key = (_beside(x, center) for x in (query, key))
        query[..., -1] = 1
        torch.neg(_half_square(key[..., :-1]), out=key[..., -1])
    return Operands(query, key, scale[:, None, None], rbf=True)


def _beside(x: Tensor, center: Tensor) -> Tensor:
    """x - center, and room for one more feature."""
    found = x.new_empty((*x.shape[:-1], x.shape[-1] + 1))
    torch.sub(x, center, out=found[..., :-1])
    return found


def _half_square(x: Tensor) -> Tensor:
    """||x||^2 / 2, over the features: exact for whole numbers, so that what ties ties."""
    return torch.linalg.vecdot(x, x) / 2
