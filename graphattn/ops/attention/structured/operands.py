"""The operands of a tile, so that its logits are one product, and the way back for gradients.

RBF attention is softmax attention over ``q . k - ||k||^2 / 2``, because ``||q||^2`` is the same for
a whole row. Both are taken around a centre, so that little cancels, and in float64 where even then
too many digits would go; where float64 would not do either, from ``q - k`` itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.ops.attention.softcap import capped, slope
from graphattn.ops.attention.structured.workspace import Workspace

Pulled = tuple[Tensor, Tensor, Tensor]  # gradients of query, key and scale [H]


@dataclass
class Operands:
    """Queries [G, H, n, D] and keys [G, H, m, D] of G tiles, and what is added to their products.

    Logits are scale * (query . key + bias). For RBF the bias is -||k||^2 / 2, and the true logits
    are lower by scale * ||q||^2 / 2, which :meth:`true_lse` puts right. Those of dot products may
    have a `softcap`.
    """

    query: Tensor
    key: Tensor
    scale: Tensor  # [H, 1, 1]
    bias: Tensor | None = None  # [G, H, m]; None: the dot product
    half_square: Tensor | None = None  # ||q||^2 / 2 [G, H, n] if there is a bias
    workspace: Workspace | None = None
    softcap: float | None = None

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
        products, bias = self.scaled_query @ self.key.transpose(-1, -2), self.scaled_bias
        products = products if bias is None else products.add_(bias)
        return capped(products, self.softcap)

    def true_lse(self, lse: Tensor) -> Tensor:
        """Log-sums [G, H, n] of the true logits."""
        if self.half_square is None:
            return lse
        return lse - self.scale[..., 0] * self.half_square

    @property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """|scale| * ||q||^2 / 2 [G, H, n] and |scale| * ||k||^2 / 2 [G, H, m], around the centre.

        Their geometric mean, doubled, bounds the products that logits are made of.
        """
        scale = self.scale[..., 0].detach().abs()
        if self.bias is None or self.half_square is None:
            of_query, of_key = (_half_square(x.detach(), None) for x in (self.query, self.key))
        else:
            of_query, of_key = self.half_square.detach(), -self.bias.detach()
        return scale * of_query, scale * of_key

    def pulled(self, d_logits: Tensor, keep: Tensor | None, finite: bool) -> Pulled:
        """Gradients of q, k and scale [H] from those of the logits [G, H, n, m], 0 if not kept."""
        if self.softcap is not None:
            d_logits = d_logits * slope(self.logits, self.softcap)
            if not finite and keep is not None:  # 0 * NaN is NaN
                d_logits = d_logits.masked_fill(~keep, 0)
        back = None if keep is None else keep.transpose(-1, -2)
        d_query = product(d_logits, self.key, keep, finite)
        d_key = product(d_logits.transpose(-1, -2), self.scaled_query, back, finite)
        return self.gradients(d_query, d_key, d_logits.sum(-1), d_logits.sum(-2))

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


@dataclass
class Differences:
    """The same for RBF attention from q - k itself: slow, but there is nothing to cancel.

    Not even a centre is subtracted: beside a number of 1e15 it would cost every other its digits.
    """

    query: Tensor
    key: Tensor
    scale: Tensor  # [H, 1, 1]

    @property
    def logits(self) -> Tensor:
        """[G, H, n, m], the true ones."""
        return self.scale * self._affinity

    @property
    def _affinity(self) -> Tensor:
        """-||q - k||^2 / 2 of every pair."""
        if torch.is_grad_enabled():  # cdist knows only one derivative
            squared = (self.query[..., :, None, :] - self.key[..., None, :, :]).square().sum(-1)
        else:
            mode = "donot_use_mm_for_euclid_dist"
            squared = torch.cdist(self.query, self.key, compute_mode=mode).square()
        return squared / -2

    def true_lse(self, lse: Tensor) -> Tensor:
        return lse

    def pulled(self, d_logits: Tensor, keep: Tensor | None, finite: bool) -> Pulled:
        """See :meth:`Operands.pulled`; feature by feature, in memory of the logits."""
        d_query, d_key = torch.zeros_like(self.query), torch.zeros_like(self.key)
        hidden = None if finite or keep is None else ~keep
        pull = self.scale * d_logits
        for f in range(self.query.shape[-1]):
            parts = pull * (self.key[..., None, :, f] - self.query[..., :, None, f])
            if hidden is not None:  # 0 * NaN is NaN
                parts.masked_fill_(hidden, 0)
            d_query[..., f], d_key[..., f] = parts.sum(-1), -parts.sum(-2)
        per_pair = d_logits * self._affinity
        if hidden is not None:
            per_pair.masked_fill_(hidden, 0)
        return d_query, d_key, per_pair.sum((0, 2, 3))


def product(weights: Tensor, x: Tensor, keep: Tensor | None, finite: bool) -> Tensor:
    """weights @ x over the kept pairs: NaN in x reaches the rows that keep it and no other."""
    if finite:
        return weights @ x
    bad = ~x.isfinite()
    marked = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    seen = marked @ bad.to(x.dtype) > 0
    return (weights @ x.masked_fill(bad, 0)).masked_fill(seen, torch.nan)


def dot_operands(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    workspace: Workspace | None = None,
    softcap: float | None = None,
) -> Operands:
    """For scale * q . k."""
    return Operands(query, key, scale[:, None, None], workspace=workspace, softcap=softcap)


def rbf_operands(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    center: Tensor,
    workspace: Workspace | None = None,
) -> Operands:
    """For -scale * ||q - k||^2 / 2, around `center` [G, H, 1, D]."""
    query = torch.sub(query, center, out=_room(workspace, "query", query))
    key = torch.sub(key, center, out=_room(workspace, "key", key))
    bias, half_square = -_half_square(key, workspace), _half_square(query, workspace)
    return Operands(query, key, scale[:, None, None], bias, half_square, workspace)


def _half_square(x: Tensor, workspace: Workspace | None) -> Tensor:
    """||x||^2 / 2, over the features: exact for whole numbers, so that what ties ties."""
    return torch.mul(x, x, out=_room(workspace, "square", x)).sum(-1) / 2


def _room(workspace: Workspace | None, name: str, like: Tensor) -> Tensor | None:
    """Where a result may be written; None: wherever there is memory."""
    return None if workspace is None else workspace.room(name, like)
