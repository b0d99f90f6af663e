"""Attention over all pairs of queries [B, H, Q, D] and keys [B, Hk, K, D], with a dense mask.

A step of generation has few queries, and models of other libraries have masks in which most pairs
are edges: to list edges would cost more than to compute all pairs. There is one operation of torch
for all of them, which can be differentiated any number of times, traced and mapped
(:func:`attend_pairs`). Without gradients, on a CPU, one query per text is one call of C++ code.
Plain dot products, if no log-sums are needed, are torch's fused attention. Heads come before
tokens, as in the caches of other libraries, and caches are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.kernels.shared.launch import is_transformed
from graphattn.ops.attention.logits.score import Score, capped, pair_logits_of
from graphattn.ops.attention.native import steps as native_steps
from graphattn.ops.backends import has_values
from graphattn.ops.inputs import (
    compute_dtype,
    full_precision,
    keep_freed_memory,
    may_be_differentiated,
    repeat_heads,
)
from graphattn.ops.segments import even_sigmoid
from graphattn.ops.top_k import among_best

PAIRS = 1 << 16  # products of features at a time: 256 kilobytes of float32, which stay in a cache
FEW = 16  # torch.compile sums up the products of so many queries pair by pair for top-k


class PairLogits(NamedTuple):
    """How logits are computed, and what is done with the weights.

    Attributes:
        score: the logits of pairs.
        top_k: sources selected per query and head; all if None.
        softcap: the bound of logits; none if None.
        sink: logits [H] that add to the denominator only.
        dropout: the share of the weights that is dropped.
    """

    score: Score
    top_k: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0

    def is_plain(self, query: Tensor) -> bool:
        """Whether these are the logits and weights of torch's fused attention."""
        if self.score.kernel != "dot" or self[1:4] != (None, None, None):
            return False
        return not isinstance(self.score.pair_factor(query), Tensor)


class PairRows(NamedTuple):
    """Output [B, H, Q, Dv]; log-sums [B, H, Q], without the sink; weights [B, H, Q, K].

    Weights are those before dropout. What was not asked for may be None.
    """

    out: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None


def attend_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: PairLogits,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    need_lse: bool = False,
    need_weights: bool = False,
) -> PairRows:
    """Attend from every query to the keys that it sees; output and weights in its dtype.

    A query that sees nothing gets exactly 0. A key or value that a query does not see changes no
    bit of its output or of any gradient, not even if it is NaN. A NaN in what it sees makes it NaN.
    With `need_lse`, results can be differentiated any number of times, and else at least once.

    Args:
        query: [B, H, Q, D].
        key, value: [B, Hk, K, D] and [B, Hk, K, Dv]; Hk divides H.
        logits: how logits are computed, and what is done with the weights.
        allowed: bool [B or 1, 1 or H, 1 or Q, K], the keys that a query sees; all if None.
        bias: added to the logits, [B or 1, 1 or H, 1 or Q, K]; -inf hides a pair.
    """
    tracked = may_be_differentiated((query, key, value, bias, logits.sink))
    readable = has_values(query) and not is_transformed()
    if readable and not tracked and bias is None and not (need_weights or logits.dropout):
        rows = _by_compiled_code(query, key, value, logits, allowed, need_lse)
        if rows is not None:
            return rows
    if key.device.type == "cpu":
        keep_freed_memory()
    dtype, given_dtype = compute_dtype(query.dtype), query.dtype
    with full_precision(query.device):
        query, key, value = (x.to(dtype) for x in (query, key, value))
        bias = None if bias is None else bias.to(dtype)
        if bias is not None and not (readable and _is_finite(bias)):
            hidden = bias == -torch.inf
            allowed = ~hidden if allowed is None else allowed & ~hidden
            bias = bias.masked_fill(hidden, 0)
        is_fused = logits.is_plain(query) and not (need_lse or need_weights)
        cut = logits.top_k is not None and logits.top_k < key.shape[2]
        bad = None
        if (tracked or is_fused) and (allowed is not None or cut):
            query, key, bias, bad = _cleaned(query, key, bias, allowed, readable)
        if is_fused:
            average = _fused(query, key, allowed, bias, logits)
            rows = PairRows(_hiding(average, value, allowed, once=logits.dropout > 0))
        else:
            exact = logits.top_k is not None
            numbers = capped(pair_logits(logits.score, query, key, exact=exact), logits.softcap)
            rows = attend_logits(
                numbers if bias is None else numbers + bias,
                value,
                allowed,
                top_k=logits.top_k,
                sink=logits.sink,
                dropout=logits.dropout,
                need_lse=need_lse,
                need_weights=need_weights,
            )
        if bad is not None:
            rows = _with_nan(rows, bad, allowed)
    out, lse, weights = rows
    return PairRows(out.to(given_dtype), lse, None if weights is None else weights.to(given_dtype))


def _by_compiled_code(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: PairLogits,
    allowed: Tensor | None,
    need_lse: bool,
) -> PairRows | None:
    """The rows of one query per text, each of which reads only what it sees; None if impossible."""
    (B, _, Q, _), K = query.shape, key.shape[2]
    if Q != 1 or logits.score.kernel is None or (allowed is not None and allowed.shape[1] > 1):
        return None
    tokens = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if native_steps.why_no_decoding(*tokens) is not None:
        return None
    lengths: int | list[int] = K
    seen = None
    if allowed is not None and K:
        seen = allowed[:, 0, 0].expand(B, K).contiguous()
        if not seen[:, -1].all():  # a text ends with the last key that it sees
            lengths = (seen * torch.arange(1, K + 1)).amax(-1).tolist()
    compute = compute_dtype(query.dtype)
    sink = None if logits.sink is None else logits.sink.to(compute)
    out, lse = native_steps.decode(
        *tokens,
        lengths,
        logits.score,
        top_k=logits.top_k,
        softcap=logits.softcap,
        sink=sink,
        seen=seen,
        need_lse=need_lse,
    )
    return PairRows(out.transpose(1, 2), None if lse is None else lse.transpose(1, 2))


def _fused(
    query: Tensor, key: Tensor, allowed: Tensor | None, bias: Tensor | None, logits: PairLogits
) -> Callable[[Tensor], Tensor]:
    """Torch's fused attention as a function of values; it gives 0 to a row that sees nothing."""
    mask, shape = allowed, query.shape
    scale: Any = logits.score.pair_factor(query)
    if bias is not None:
        mask = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    is_grouped = shape[1] != key.shape[1]
    if is_grouped and shape[2] == 1 and (mask is None or mask.shape[1] == 1):
        query, is_grouped = query.reshape(shape[0], key.shape[1], -1, shape[3]), False

    def average(value: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, logits.dropout, scale=scale, enable_gqa=is_grouped
        )
        return out.reshape(*shape[:3], value.shape[-1])

    return average


# The two parts of the operation: logits, and averages by logits.


def pair_logits(score: Score, query: Tensor, key: Tensor, *, exact: bool) -> Tensor:
    """The logits [B, H, Q, K] of queries [B, H, Q, D] and keys [B, Hk, K, D].

    Distances are sums of squared differences, which do not cancel. With `exact`, equal keys have
    equal logits to the last bit, so that top-k can prefer the first of them.
    """
    (B, H, Q, D), (Hk, K) = query.shape, key.shape[1:3]
    if score.kernel is None:
        by_head = repeat_heads(key.transpose(1, 2), H).transpose(1, 2)
        return pair_logits_of(score.ready(H, query), query, by_head)
    rows = query.reshape(B, Hk, H // Hk * Q, D)  # rows that share keys
    if score.kernel == "rbf":
        logits = _sums_of_pairs(rows, key, lambda q, k: (q - k).square()) * -0.5
    elif exact and (Q <= FEW or not torch.compiler.is_compiling()):
        logits = _sums_of_pairs(rows, key, torch.mul)
    else:
        logits = rows @ key.mT
    scale = score.pair_factor(query)
    if isinstance(scale, Tensor) and scale.dim():
        scale = scale[:, None, None]
    return logits.reshape(B, H, Q, K) * scale


def _sums_of_pairs(
    query: Tensor, key: Tensor, of_features: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Sums over the features of all pairs, for queries [*, R, D] and keys [*, K, D]."""
    query, length = query[..., None, :], key.shape[-2]
    if not torch.compiler.is_compiling():
        most = PAIRS if key.device.type == "cpu" else 1024 * PAIRS
        length = max(1, min(length, most // max(1, query.numel())))
    parts = [of_features(query, k).sum(-1) for k in key[..., None, :, :].split(length, dim=-2)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def attend_logits(
    logits: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    *,
    top_k: int | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    need_lse: bool = False,
    need_weights: bool = False,
) -> PairRows:
    """Averages of values [B, Hk, K, Dv] by logits [B, H, Q, K]; options as in `attend_pairs`."""
    (B, H, Q, K), selected = logits.shape, allowed
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if top_k is not None and top_k < K:
        best = among_best(logits.detach(), top_k)
        selected = best if allowed is None else best & allowed
        logits = logits.masked_fill(~selected, -torch.inf)
    weights = logits.softmax(-1)
    if selected is not None:
        weights = weights.masked_fill(~selected, 0)  # a row that sees nothing is 0 / 0
    kept = functional.dropout(weights, dropout) if dropout else weights
    kept = kept.reshape(B, value.shape[1], H // value.shape[1] * Q, K)
    out = _hiding(lambda v: (kept @ v).reshape(B, H, Q, v.shape[-1]), value, selected)
    lse = logits.logsumexp(-1) if need_lse or sink is not None else None
    if lse is not None and sink is not None:
        nothing = lse == -torch.inf
        share = even_sigmoid(lse.masked_fill(nothing, 0) - sink.to(lse.dtype)[:, None])[..., None]
        out, weights = out * share, weights * share if need_weights else weights
    return PairRows(out, lse, weights if need_weights else None)


# Numbers that are not finite.


def _is_finite(x: Tensor) -> bool:
    """Whether all numbers are finite; False also if their sum is not."""
    return math.isfinite(x.detach().sum())


def _hiding(
    average: Callable[[Tensor], Tensor],
    value: Tensor,
    selected: Tensor | None,
    *,
    once: bool = False,
) -> Tensor:
    """`average(value)`, in which a value that is not finite reaches only rows that select it.

    If `once`, the average is not computed twice, because it draws random numbers.
    """
    if selected is None:
        return average(value)
    if has_values(value) and not (once or is_transformed()):
        out = average(value)
        if _is_finite(value if out.requires_grad else out):
            return out
    bad = ~value.isfinite()
    out = average(value.masked_fill(bad, 0))
    return out.masked_fill(_touched(bad.any(-1), selected, out.shape[1]), torch.nan)


def _touched(sources: Tensor, selected: Tensor | None, heads: int) -> Tensor:
    """Mark queries that select a marked source, [B, H, 1 or Q, 1], for marks [B, Hk, K]."""
    by_head = sources.repeat_interleave(heads // sources.shape[1], dim=1)
    if selected is None:
        return by_head.any(-1)[..., None, None]
    return selected.float() @ by_head[..., None].float() > 0


def _cleaned(
    query: Tensor, key: Tensor, bias: Tensor | None, allowed: Tensor | None, readable: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Query, key and bias with 0 in place of what is not finite, and a mask of the rows it is in.

    Gradients would be NaN, as 0 times NaN is, and so would torch's fused attention. The mask, bool
    [B, H, Q, 1], is None if all is finite.
    """
    if readable and all(_is_finite(x) for x in (query, key, bias) if x is not None):
        return query, key, bias, None
    of_query, of_key = ~query.isfinite().all(-1, keepdim=True), ~key.isfinite().all(-1)
    bad = of_query | _touched(of_key, allowed, query.shape[1])
    if bias is not None:
        of_bias = ~bias.isfinite()
        bias = bias.masked_fill(of_bias, 0)
        bad = bad | (of_bias if allowed is None else of_bias & allowed).any(-1, keepdim=True)
    if allowed is not None:
        bad = bad & allowed.any(-1, keepdim=True)
    return query.masked_fill(of_query, 0), key.masked_fill(of_key[..., None], 0), bias, bad


def _with_nan(rows: PairRows, bad: Tensor, allowed: Tensor | None) -> PairRows:
    """Put NaN into the rows [B, H, Q, 1] whose logits contain one."""
    out, lse, weights = rows
    out = out.masked_fill(bad, torch.nan)
    lse = None if lse is None else lse.masked_fill(bad[..., 0], torch.nan)
    if weights is not None:
        weights = weights.masked_fill(bad if allowed is None else bad & allowed, torch.nan)
    return PairRows(out, lse, weights)
