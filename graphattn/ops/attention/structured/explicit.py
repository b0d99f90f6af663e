"""The inside of a tile by products with the logits stored: top-k, tables, and what is not finite.

A product touches every pair of a tile, edges or not, and 0 * NaN is NaN. So where not all is
`finite`, what is summed up holds zeros in place of NaN and infinity, and rows that see one are
marked by a second product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.softcap import capped
from graphattn.ops.attention.structured.operands import (
    Differences,
    Operands,
    Pulled,
    product,
)
from graphattn.ops.dropout import Kept

ROWS_AT_A_TIME = 256  # whose logits are computed one by one


class Exact(NamedTuple):
    """Logits one by one, from q . k or q - k as they came, in which equal sources are equal."""

    operands: Operands
    query: Tensor
    key: Tensor
    bias: Tensor | None

    @property
    def rounding(self) -> Tensor:
        """How far two of a row's logits by products may be from those here, [G, H, n, 1].

        Many times what rounding does, so that rows beyond it keep the same either way: what is
        not seen may only widen it.
        """
        query, key = (
            torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True)
            for x in (self.operands.query, self.operands.key)
        )
        scale = self.operands.scale.detach().abs()
        key = key.amax(-2, keepdim=True)
        largest = 2 * scale * query * key
        if self.operands.bias is not None:
            largest = largest + scale * (key.square() + query.square() / 2)
        if self.bias is not None:
            bias = self.bias.detach().abs()
            bias = bias.masked_fill(bias.isinf(), 0).amax((-1, -2))
            largest = largest + 2 * bias[..., None, None]
        features = self.query.shape[-1]
        rounding = 2 * (features**0.5 + 4) * torch.finfo(largest.dtype).eps * largest
        return torch.where(rounding.isnan(), torch.inf, rounding)

    def rows(self, g: Tensor, h: Tensor, i: Tensor) -> Tensor:
        """Of row i of head h of tile g, [rows, m]."""
        query, key = self.query[g, h, i, None].detach(), self.key[g, h].detach()
        scale = self.operands.scale[h, 0].detach()
        if self.operands.bias is not None:
            logits = scale / -2 * (query - key).square().sum(-1)
        else:
            logits = capped(scale * (query * key).sum(-1), self.operands.softcap)
        if self.bias is None:
            return logits
        bias = self.bias.detach().expand(len(self.query), *self.bias.shape[-3:])
        return logits + bias[g, h, i]


def logits_of(operands: Operands | Differences, bias: Tensor | None) -> Tensor:
    """[G, H, n, m], of edges and others; `bias` [H, n, m] or [1 or G, H, n, m]."""
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
        logits = logits.masked_fill(logits.isnan(), torch.inf)
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
                forbidden = row == -torch.inf
                row = exact.rows(*few)
                row = row.masked_fill_(row.isnan(), torch.inf).masked_fill_(forbidden, -torch.inf)
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


def forward(
    operands: Operands | Differences,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
    finite: bool,
    exact: Exact | None,
    *,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [G, H, n, Dv] and the log-sums of the operands' logits [G, H, n].

    Pairs that are not `kept` are dropped from the output alone.
    """
    logits = logits_of(operands, bias)
    weights, lse, keep = softmax(logits, allowed, top_k, finite, exact)
    if kept is not None:
        weights, keep = kept.weights(weights), kept.among(keep)
    return product(weights, value, keep, finite), lse


def backward(
    operands: Operands | Differences,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    top_k: int | None,
    finite: bool,
    exact: Exact | None,
    d_out: Tensor,
    d_lse: Tensor | None,
    *,
    kept: Kept | None = None,
) -> tuple[Pulled, Tensor, Tensor]:
    """Gradients of query, key and scale, of the value, and of the logits [G, H, n, m]."""
    logits = logits_of(operands, bias)
    weights, _, keep = softmax(logits, allowed, top_k, finite, exact)
    hidden = None if finite or keep is None else ~keep
    if hidden is not None:
        weights.masked_fill_(hidden, 0)  # 0 / NaN
    averaged, read = weights, keep
    if kept is not None:
        averaged, read = kept.weights(weights), kept.among(keep)
    back = None if read is None else read.transpose(-1, -2)
    d_value = product(averaged.transpose(-1, -2), d_out, back, finite)
    d_logits = d_out @ value.transpose(-1, -2)
    if kept is not None:
        d_logits = kept.weights(d_logits)
    if hidden is not None:
        d_logits.masked_fill_(hidden, 0)
    mean = (weights * d_logits).sum(-1, keepdim=True)
    d_logits.sub_(mean if d_lse is None else mean - d_lse[..., None]).mul_(weights)
    if hidden is not None:
        d_logits.masked_fill_(hidden, 0)
    return operands.pulled(d_logits, keep, finite), d_value, d_logits
