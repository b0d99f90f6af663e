"""Attention over all pairs [B, H, Q, K] with a dense mask, for models of other libraries.

If most pairs are edges, to list them costs more than to compute all pairs. Dot products use torch's
fused attention. For what that does not have (distances, top-k, softcap, sinks, the weights), all
logits are computed here. Heads come before tokens, as in the caches of other libraries, and tensors
are not copied. The operations do not depend on values, so that torch.compile can trace them; on a
CPU without gradients there are faster ways.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.kernels.shared.launch import is_transformed
from graphattn.ops.attention.logits.score import Kernel, capped
from graphattn.ops.attention.step.cached import (
    PAIRS,
    attend_cached,
    attend_logits,
    pair_logits,
)
from graphattn.ops.backends import has_values
from graphattn.ops.inputs import compute_dtype, full_precision
from graphattn.ops.segments import even_sigmoid

FEW = 16  # up to so many queries, top-k compares products that are summed pair by pair


class Logits(NamedTuple):
    """How logits are computed: as in :mod:`.reference`, with one `scale` for all heads.

    Attributes:
        score: "dot" or "rbf".
        scale: the factor of dot products, or 1 / sigma^2.
        top_k: sources selected per query and head; all if None.
        softcap: the bound of dot products; none if None.
        sink: logits [H] that add to the denominator only.
        dropout: the share of the weights that is dropped.
    """

    score: Kernel
    scale: float
    top_k: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0


def attend_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    logits: Logits,
    *,
    bias: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, Q, Dv] in the dtype of `query`, and the weights [B, H, Q, K] if needed.

    A query that sees nothing gets exactly 0. A key or value that a query does not see changes no
    bit of its output or of any gradient, not even if it is NaN. A NaN that it sees makes its whole
    row NaN. Results can be differentiated once.

    Args:
        query: [B, H, Q, D].
        key, value: [B, Hk, K, D] and [B, Hk, K, Dv]; Hk divides H.
        allowed: bool [B or 1, 1 or H, 1 or Q, K], the keys that a query sees; all if None.
        logits: how logits are computed, and what is done with the weights.
        bias: added to the logits, [B or 1, 1 or H, 1 or Q, K]; -inf hides a pair.
        need_weights: whether to return the weights, without dropout.
    """
    if 0 in (query.numel(), key.shape[2]):
        weights = query.new_zeros(*query.shape[:3], key.shape[2]) if need_weights else None
        return query.new_zeros(*query.shape[:3], value.shape[-1]), weights
    dtype, given_dtype = compute_dtype(query.dtype), query.dtype
    if logits.top_k is not None and logits.top_k >= key.shape[2]:
        logits = logits._replace(top_k=None)
    with full_precision(query.device):
        query, key, value = (x.to(dtype) for x in (query, key, value))
        bias = None if bias is None else bias.to(dtype)
        if logits.sink is not None:
            logits = logits._replace(sink=logits.sink.to(dtype))
        tensors = query, key, value, bias, logits.sink
        # Under torch.func, the values of masks may not be there either.
        can_read_values = has_values(query) and not is_transformed()
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        out, weights = None, None
        if can_read_values and not grad and not need_weights:
            out = _fast_output(query, key, value, allowed, logits, bias)
        if out is None:
            out, weights = _output_and_weights(
                query, key, value, allowed, logits, bias, need_weights, can_read_values
            )
    return out.to(given_dtype), None if weights is None else weights.to(given_dtype)


# Without gradients, on a CPU.


def _fast_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    logits: Logits,
    bias: Tensor | None,
) -> Tensor | None:
    """The output by a faster way, or None if there is none for this call."""
    fused = logits.score == "dot" and logits[2:5] == (None, None, None)
    if logits.dropout:  # it must be drawn once, and this way may fail and be repeated
        return None
    if not fused:
        short = query.shape[2] == 1 and key.shape[2] > 0 and _shared(allowed)
        return _newest(query, key, value, allowed, logits, bias) if short else None
    out = _fused(query, key, value, allowed, logits, bias)
    # A NaN or an infinite number may come from a hidden key or value.
    return out if math.isfinite(out.sum()) else None


def _shared(allowed: Tensor | None) -> bool:
    return allowed is None or allowed.shape[1] == 1


def _newest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    logits: Logits,
    bias: Tensor | None,
) -> Tensor:
    """The output for one query per sequence; each reads only what it sees of its cache."""
    B, H, _, D = query.shape
    Hk, K = key.shape[1:3]
    rows = query.reshape(B, Hk, H // Hk, D)
    if bias is not None:
        bias = bias.expand(B, H, 1, K).reshape(B, Hk, H // Hk, K)
    outs = []
    for b in range(B):
        own = slice(0, K)
        keep = None
        if allowed is not None:
            seen = allowed[b if len(allowed) > 1 else 0, 0, 0]
            places = seen.nonzero().squeeze(-1)
            if len(places) == 0:
                outs.append(query.new_zeros(Hk, H // Hk, value.shape[-1]))
                continue
            own = slice(int(places[0]), int(places[-1]) + 1)
            keep = None if own.stop - own.start == len(places) else seen[None, None, own]
        tensors = rows[b], key[b, :, own], value[b, :, own]
        outs.append(_one_text(*tensors, keep, logits, None if bias is None else bias[b, ..., own]))
    return torch.stack(outs).reshape(B, H, 1, -1)


def _one_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    logits: Logits,
    bias: Tensor | None,
) -> Tensor:
    """The output [Hk, g, Dv] of one sequence, from queries [Hk, g, D] and keys [Hk, n, D]."""
    score, scale, top_k, softcap, sink, _ = logits
    need_lse = sink is not None
    if bias is None and softcap is None:
        out, lse = attend_cached(
            query, key, value, score, scale, top_k=top_k, keep=keep, need_lse=need_lse
        )
    else:
        found = pair_logits(query, key, score, scale, exact=True, large=False)
        found = capped(found, softcap)
        found = found if bias is None else found + bias
        out, lse = attend_logits(found, value, top_k, keep, need_lse=need_lse)
    if sink is None or lse is None:
        return out
    return out * even_sigmoid(lse - sink.reshape(lse.shape))[..., None]


# In full.


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    logits: Logits,
    bias: Tensor | None,
) -> Tensor:
    """The output by torch's fused attention, which gives 0 to a row that sees nothing."""
    mask = allowed
    if bias is not None:
        mask = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    shape = query.shape
    grouped = shape[1] != key.shape[1]
    if grouped and shape[2] == 1 and (mask is None or mask.shape[1] == 1):
        query, grouped = query.reshape(shape[0], key.shape[1], -1, shape[3]), False
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=logits.dropout,
        scale=logits.scale,
        enable_gqa=grouped,
    )
    return out.reshape(*shape[:3], -1)


def _output_and_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    logits: Logits,
    bias: Tensor | None,
    need_weights: bool,
    can_read_values: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output and the weights, for tensors that may hold NaN or infinity.

    Numbers that are not finite are replaced by 0 first. At the end, rows that see one become NaN.
    """
    if bias is not None and not (can_read_values and bool(bias.isfinite().all())):
        hidden = bias == -torch.inf
        allowed = ~hidden if allowed is None else allowed & ~hidden
        bias = bias.masked_fill(hidden, 0)
    bad: _Bad | None = _Bad.of(query, key, value, bias)
    assert bad is not None
    if can_read_values and not bad.any():
        bad = None
    else:
        query = query.masked_fill(bad.query, 0)
        key = key.masked_fill(bad.key[..., None], 0)
        value = value.masked_fill(bad.value[..., None], 0)
        bias = None if bias is None or bad.bias is None else bias.masked_fill(bad.bias, 0)
    if logits.score == "dot" and logits[2:5] == (None, None, None) and not need_weights:
        out, weights, selected = _fused(query, key, value, allowed, logits, bias), None, allowed
    else:
        out, weights, selected = _from_all_logits(query, key, value, allowed, logits, bias, bad)
    if bad is not None:
        in_logits = bad.in_logits(allowed)
        if weights is not None:
            hidden = torch.zeros_like(in_logits) if allowed is None else ~allowed
            weights = weights.masked_fill(in_logits & ~hidden, torch.nan)
        out = out.masked_fill(in_logits | bad.in_values(selected), torch.nan)
    return out, weights if need_weights else None


class _Bad(NamedTuple):
    """Masks of what is not finite: queries [B, H, Q, 1], keys and values [B, Hk, K], the bias."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> _Bad:
        return _Bad(
            ~query.isfinite().all(-1, keepdim=True),
            ~key.isfinite().all(-1),
            ~value.isfinite().all(-1),
            None if bias is None else ~bias.isfinite(),
        )

    def any(self) -> bool:
        return any(bool(bad.any()) for bad in self if bad is not None)

    def in_logits(self, allowed: Tensor | None) -> Tensor:
        """Mark queries with a logit that is not finite, bool [B, H, Q, 1]."""
        found = self.query | self._touched(self.key, allowed)
        if self.bias is not None:
            seen = self.bias if allowed is None else self.bias & allowed
            found = found | seen.any(-1, keepdim=True)
        return found if allowed is None else found & allowed.any(-1, keepdim=True)

    def in_values(self, selected: Tensor | None) -> Tensor:
        """Mark queries that select a value that is not finite, bool [B, H, Q, 1]."""
        return self._touched(self.value, selected)

    def _touched(self, sources: Tensor, selected: Tensor | None) -> Tensor:
        by_head = sources.repeat_interleave(self.query.shape[1] // sources.shape[1], dim=1)
        if selected is None:
            return by_head.any(-1)[..., None, None]
        return selected.float() @ by_head[..., None].float() > 0


def _from_all_logits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    logits: Logits,
    bias: Tensor | None,
    bad: _Bad | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, weights without dropout, and the selected pairs, from finite tensors."""
    (B, H, Q, _), (Hk, K) = query.shape, key.shape[1:3]
    rows = query.reshape(B, Hk, -1, query.shape[-1])  # rows that share keys
    if logits.score == "rbf":
        found = _squared_distances(rows, key) * (-logits.scale / 2)
    elif logits.top_k is not None and Q <= FEW:  # so that equal keys give equal bits
        found = (rows[..., None, :] * key[:, :, None]).sum(-1) * logits.scale
    else:
        found = rows @ key.mT * logits.scale
    found = capped(found.reshape(B, H, Q, K), logits.softcap)
    if bias is not None:
        found = found + bias
    selected = allowed
    if allowed is not None:
        found = found.masked_fill(~allowed, -torch.inf)
    if logits.top_k is not None:
        best = found.detach().argsort(dim=-1, descending=True, stable=True)[..., : logits.top_k]
        among = torch.zeros_like(found, dtype=torch.bool).scatter(-1, best, True)
        selected = among if allowed is None else among & allowed
        found = found.masked_fill(~selected, -torch.inf)
    if selected is not None:  # a row that sees nothing is 0 / 0
        empty = ~selected.any(-1, keepdim=True)
        found = found.masked_fill(empty, 0)
        weights = found.softmax(-1).masked_fill(empty, 0)
    else:
        weights = found.softmax(-1)
    if logits.sink is not None:
        share = even_sigmoid(found.logsumexp(-1, keepdim=True) - logits.sink[:, None, None])
        weights = weights * share
    dropped = functional.dropout(weights, logits.dropout) if logits.dropout else weights
    out = (dropped.reshape(B, Hk, -1, K) @ value).reshape(B, H, Q, -1)
    return out, weights, selected


def _squared_distances(query: Tensor, key: Tensor) -> Tensor:
    """||q - k||^2 of queries [*, R, D] and keys [*, n, D], from differences: nothing cancels."""
    if query.numel() * key.shape[-2] <= PAIRS:
        return (query[..., None, :] - key[..., None, :, :]).square().sum(-1)
    by_differences = "donot_use_mm_for_euclid_dist"
    return torch.cdist(query, key, compute_mode=by_differences).square()
