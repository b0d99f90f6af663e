"""The inside of a tile by products with the logits stored: top-k, tables, and what is not finite.

A product touches every pair of a tile, edges or not, and 0 * NaN is NaN. So what is summed up holds
zeros in place of NaN and infinity, and rows that see one are marked by a second product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.structured.operands import Operands

ROWS_AT_A_TIME = 256  # whose logits are computed one by one


class Exact(NamedTuple):
    """Logits one by one, in which equal sources are equal."""

    operands: Operands
    bias: Tensor | None

    @property
    def rounding(self) -> Tensor:
        """A bound of what products err by, [G, H, 1, 1]."""
        query, key = (
            torch.linalg.vector_norm(x.detach(), dim=-1).amax(-1)
            for x in (self.operands.query, self.operands.key)
        )
        scale = self.operands.scale[:, 0, 0].detach().abs()
        largest = query * key * scale
        if self.operands.bias is not None:
            largest = largest + scale * self.operands.bias.detach().abs().amax(-1)
        if self.bias is not None:
            largest = largest + self.bias.detach().abs().amax((-1, -2))
        return 4 * torch.finfo(largest.dtype).eps * largest[..., None, None]

    def rows(self, g: Tensor, h: Tensor, i: Tensor) -> Tensor:
        """Of row i of head h of tile g, [rows, m]."""
        query, key = self.operands.query[g, h, i, None].detach(), self.operands.key[g, h].detach()
        scale = self.operands.scale[h, 0].detach()
        if self.operands.bias is not None:
            logits = scale / -2 * (query - key).square().sum(-1)
        else:
            logits = scale * (query * key).sum(-1)
        return logits if self.bias is None else logits + self.bias[h, i].detach()


def logits_of(operands: Operands, bias: Tensor | None) -> Tensor:
    """[G, H, n, m], of edges and others; `bias` [H, n, m]."""
    return operands.logits if bias is None else operands.logits + bias


def keep_best(
    logits: Tensor,
    allowed: Tensor | None,
    top_k: int | None,
    finite: bool,
    exact: Exact | None = None,
) -> Tensor | None:
    """Bool, broadcastable to the logits: the edges that count; None: all pairs.

    Of equal logits the earlier source is kept. Products round equal sources apart, so with them go
    `exact` logits, by which rows are judged that are within rounding of a tie. Where nothing is
    allowed, logits become -inf.
    """
    if allowed is not None:
        _forbid(logits, allowed, finite)
    if top_k is None or top_k >= logits.shape[-1]:
        return allowed
    logits = logits.detach()
    if not finite:  # NaN counts as the largest, as in a sort
        best = _first_of_sorted(logits, top_k)
        return best if allowed is None else best & allowed
    threshold = logits.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    threshold = threshold.clamp(min=torch.finfo(logits.dtype).min)  # -inf is never kept
    best = logits >= threshold
    near = best if exact is None else logits >= threshold - exact.rounding
    # Bytes are summed four times faster than bools.
    close = near.view(torch.uint8).sum(-1, dtype=torch.int32) > top_k
    if bool(close.any()):
        places = close.nonzero(as_tuple=True)
        for few in zip(*(place.split(ROWS_AT_A_TIME) for place in places), strict=True):
            row = logits[few]
            if exact is not None:
                row = exact.rows(*few).masked_fill(row == -torch.inf, -torch.inf)
            best[few] = _first_of_sorted(row, top_k) & (row > -torch.inf)
    return best


def _first_of_sorted(logits: Tensor, count: int) -> Tensor:
    """Marks the `count` largest, of equal ones the earlier."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def _forbid(logits: Tensor, keep: Tensor, finite: bool) -> None:
    """-inf where `keep` is False, in place."""
    if finite and keep.dim() < logits.dim():  # a sum runs faster than a broadcast mask
        logits += torch.zeros_like(keep, dtype=logits.dtype).masked_fill_(~keep, -torch.inf)
    else:
        logits.masked_fill_(~keep, -torch.inf)


def softmax(
    logits: Tensor,
    allowed: Tensor | None,
    top_k: int | None,
    finite: bool,
    exact: Exact | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights [G, H, n, m], log-sums [G, H, n], and the edges kept; `logits` are used up.

    A row that keeps nothing gets zeros and -inf.
    """
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], -torch.inf), allowed
    keep = keep_best(logits, allowed, top_k, finite, exact)
    if keep is not None and keep is not allowed:
        _forbid(logits, keep, finite)
    highest = logits.amax(dim=-1)
    empty = highest == -torch.inf
    some_empty = bool(empty.any())
    if some_empty:
        logits = logits.masked_fill(empty[..., None], 0)
    weights = torch.softmax(logits, dim=-1)  # four times faster than its steps, on a CPU
    lse = highest - weights.amax(dim=-1).log()  # the largest weight is exp(0) over the sum
    if some_empty:
        weights, lse = weights.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return weights, lse, keep


def product(weights: Tensor, x: Tensor, keep: Tensor | None, finite: bool) -> Tensor:
    """weights @ x over the kept pairs: NaN in x reaches the rows that keep it and no other."""
    if finite:
        return weights @ x
    bad = ~x.isfinite()
    marked = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    seen = marked @ bad.to(x.dtype) > 0
    return (weights @ x.masked_fill(bad, 0)).masked_fill(seen, torch.nan)


def forward(
    operands: Operands,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
    finite: bool,
) -> tuple[Tensor, Tensor]:
    """Output [G, H, n, Dv] and the log-sums of the operands' logits [G, H, n]."""
    logits = logits_of(operands, bias)
    weights, lse, keep = softmax(logits, allowed, top_k, finite, Exact(operands, bias))
    return product(weights, value, keep, finite), lse


def backward(
    operands: Operands,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
    finite: bool,
    d_out: Tensor,
    d_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `scaled_query`, `key`, `value` and of the logits [G, H, n, m]."""
    logits = logits_of(operands, bias)
    weights, _, keep = softmax(logits, allowed, top_k, finite, Exact(operands, bias))
    hidden = None if finite or keep is None else ~keep
    if hidden is not None:
        weights.masked_fill_(hidden, 0)  # 0 / NaN
    d_value = product(
        weights.transpose(-1, -2),
        d_out,
        None if keep is None else keep.transpose(-1, -2),
        finite,
    )
    d_logits = d_out @ value.transpose(-1, -2)
    if hidden is not None:
        d_logits.masked_fill_(hidden, 0)
    mean = (weights * d_logits).sum(-1, keepdim=True)
    d_logits.sub_(mean if d_lse is None else mean - d_lse[..., None]).mul_(weights)
    if hidden is not None:
        d_logits.masked_fill_(hidden, 0)
    d_query = product(d_logits, operands.key, keep, finite)
    d_key = product(
        d_logits.transpose(-1, -2),
        operands.scaled_query,
        None if keep is None else keep.transpose(-1, -2),
        finite,
    )
    return d_query, d_key, d_value, d_logits
