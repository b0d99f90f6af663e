"""A few queries and the many keys of a cache: the core of decoding, without gradients.

:func:`~graphattn.decode_attention` and the steps of layers both end here. Caches are long and
queries few, so on a CPU time is that of reading keys and values, once each and where they stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.logits.score import Kernel
from graphattn.ops.memory import keep_freed_memory

SMALL = 1 << 15  # numbers of the keys of a cache up to which the fewest calls are the fastest way
PAIRS = 1 << 20  # numbers at a time in those: 4 megabytes of float32; fewer is slower
CHUNK = 1 << 17  # numbers whose differences stay near the processor: half a megabyte of float32
# Rows that share keys from which RBF logits are products and norms, where those do not cancel; a
# single one where the keys of a head stand one after the other.
MANY_ROWS = 3
LARGEST = 32.0  # scaled squares up to which they do not: five bits of a logit at most
# Keys at a time of a head that is spread over a cache: their pages stay known to the processor.
SPREAD = 1024


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Kernel,
    scale: float | Tensor,
    *,
    top_k: int | None = None,
    keep: Tensor | None = None,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Output [G, R, Dv] and log-sums [G, R], or None where nobody needs them.

    What a row does not see, or does not keep, reaches no bit of it: not even by the choice of how
    to compute, which depends on sizes alone.

    Args:
        query: [G, R, D], R rows that share keys: those of grouped heads and of new tokens.
        key, value: [G, n, D] and [G, n, Dv], views of caches.
        score, scale: as in :mod:`.reference`; scale a number or a tensor [G, R, 1].
        top_k: sources kept per row.
        keep: bool, broadcastable to [G, R, n]: what a row sees; all if None.
    """
    large = key.numel() > SMALL and key.device.type == "cpu"
    if large:
        keep_freed_memory()
    cut = top_k is not None and top_k < key.shape[-2]
    # Keys that some rows do not see may not decide how the logits of others are computed.
    exact = (cut and not large) or (keep is not None and score == "rbf")
    logits = pair_logits(query, key, score, scale, exact=exact, large=large)
    products = Products(query, key, score, scale) if cut and large else None
    return attend_logits(logits, value, top_k, keep, products=products, need_lse=need_lse)


class Products(NamedTuple):
    """Products that logits are rounded from: queries [G, R, D], keys [G, n, D], score and scale."""

    query: Tensor
    key: Tensor
    score: Kernel
    scale: float | Tensor


def attend_logits(
    logits: Tensor,
    value: Tensor,
    top_k: int | None,
    keep: Tensor | None,
    *,
    products: Products | None = None,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend_cached` from logits [G, R, n]; without `products`, equal ones are ties."""
    R, n = logits.shape[1:]
    if keep is not None:
        logits = logits.masked_fill(~keep, -torch.inf)
    hidden = None if keep is None else ~keep
    if top_k is not None and top_k < n:
        large = products is not None or value.numel() > SMALL
        if not large or value.device.type != "cpu":
            worse = not_among_best(logits, top_k)
        elif 2 * top_k * R <= n:
            best = _best_places(logits, top_k, products)
            return _average_few(logits, value, best, keep is not None, need_lse)
        else:
            worse = _worse(logits, top_k, products)
        logits = logits.masked_fill(worse, -torch.inf)
        hidden = worse if hidden is None else worse | hidden
    weights = logits.softmax(dim=-1)
    lse = _log_sums(logits, weights, keep is not None) if need_lse else None
    if keep is not None:
        weights = weights.masked_fill(~keep, 0)  # a row without sources is 0 / 0
    out = weigh(weights, value)
    # A value that is not kept must not be read: 0 * NaN is NaN. (Elsewhere than on a CPU,
    # looking whether there is one would wait for the device.)
    if hidden is not None and (out.device.type != "cpu" or not math.isfinite(out.sum())):
        out = _without_hidden(weights, value, hidden.expand_as(weights))
    return out, lse


def _log_sums(logits: Tensor, weights: Tensor, masked: bool) -> Tensor:
    """Log-sums [G, R]; a row that sees nothing has weights without meaning."""
    if masked:
        return logits.logsumexp(dim=-1)
    # The largest weight is exp(0) over the sum: fewer calls.
    return logits.amax(dim=-1) - weights.amax(dim=-1).log_()


def _without_hidden(weights: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """The averages where values that are hidden from a row may be NaN or infinite."""
    bad = ~value.isfinite()
    # By the very product of before, so that other rows keep their bits.
    clean = weigh(weights, torch.where(bad, 0, value))
    seen = torch.bmm((~hidden).to(value.dtype), bad.to(value.dtype)) > 0
    if value.device.type != "cpu":
        kept = value[:, None].masked_fill(hidden[..., None], 0)
        return torch.where(seen, (weights[..., None, :] @ kept).squeeze(-2), clean)
    for g, r in seen.any(-1).nonzero().tolist():
        kept = value[g].masked_fill(hidden[g, r, :, None], 0)
        clean[g, r] = torch.where(seen[g, r], weights[g, r] @ kept, clean[g, r])
    return clean


def weigh(weights: Tensor, value: Tensor) -> Tensor:
    """Weights [G, R, n] times values [G, n, Dv]."""
    if not _is_spread(value):
        return torch.bmm(weights, value)
    out = weights.new_zeros(*weights.shape[:2], value.shape[-1])
    for some, there in zip(weights.split(SPREAD, -1), value.split(SPREAD, -2), strict=True):
        out.baddbmm_(some, there)
    return out


def _is_spread(x: Tensor) -> bool:
    """Whether the tokens of a head stand far apart, as in a long cache [M, Hk, D]."""
    return x.shape[-2] > SPREAD and x.stride(-2) > x.shape[-1] and x.device.type == "cpu"


# Logits.


def pair_logits(
    query: Tensor, key: Tensor, score: Kernel, scale: float | Tensor, *, exact: bool, large: bool
) -> Tensor:
    """Logits [G, R, n]. Distances are `exact`, and are equal where keys are.

    Products are where they are few; else they are rounded as a matrix product rounds. Without
    `exact`, distances of many rows come from products too.
    """
    if score == "rbf":
        if large and not exact and (query.shape[-2] >= MANY_ROWS or not _side_by_side(key)):
            return _by_norms(query, key, scale)
        scale = scale * -0.5
        if large:
            return distances(query, key).square_().mul_(scale)
        return sum_pairs(query, key, difference=True).mul_(scale)
    if exact and not large:
        return sum_pairs(query, key, difference=False).mul_(scale)
    return products(query, key).mul_(scale)


def products(query: Tensor, key: Tensor) -> Tensor:
    """q . k of every pair, [G, R, n]."""
    if not _is_spread(key):
        return torch.bmm(query, key.mT)
    found = query.new_empty(*query.shape[:2], key.shape[-2])
    for part, keys in zip(found.split(SPREAD, -1), key.split(SPREAD, -2), strict=True):
        torch.bmm(query, keys.mT, out=part)
    return found


def _by_norms(query: Tensor, key: Tensor, scale: float | Tensor) -> Tensor:
    """RBF logits [G, R, n] from q . k - (|q|^2 + |k|^2) / 2, or by differences where that cancels.

    Keys are read twice, however many rows there are. Every group decides for itself.
    """
    in_order = key.transpose(0, 1) if _side_by_side(key) else key
    of_key = torch.linalg.vector_norm(in_order, dim=-1).square_()
    if in_order is not key:
        of_key = of_key.t()
    of_query = query.square().sum(-1, keepdim=True)
    logits = products(query, key).sub_(of_key[:, None], alpha=0.5).sub_(of_query, alpha=0.5)
    logits = logits.mul_(scale)
    size = torch.maximum(of_key.amax(-1)[:, None, None], of_query) * scale
    cancels = ~(size <= LARGEST).all(1).squeeze(-1)
    if bool(cancels.any()):
        strength = scale.expand(*query.shape[:2], 1) if isinstance(scale, Tensor) else scale
        for g in cancels.nonzero().squeeze(-1).tolist():
            apart = distances(query[g : g + 1], key[g : g + 1]).square_()
            by_row = strength[g] if isinstance(strength, Tensor) else strength
            logits[g] = apart[0].mul_(by_row * -0.5)
    return logits


def distances(query: Tensor, key: Tensor) -> Tensor:
    """||q - k|| of every pair, [G, R, n], by differences: nothing cancels.

    A chunk of keys stays in the cache of the processor for all rows, and is read in the order in
    which it stands.
    """
    found = query.new_empty(*query.shape[:2], key.shape[-2])
    apart = None
    for groups, tokens in _chunks(key):
        keys = key[groups, tokens]
        if apart is None or apart.shape != keys.shape:
            apart = torch.empty_like(keys)  # in the order of the keys
        for r in range(query.shape[1]):
            torch.sub(keys, query[groups, r, None], out=apart)
            torch.linalg.vector_norm(apart, dim=-1, out=found[groups, r, tokens])
    return found


def _side_by_side(key: Tensor) -> bool:
    """Whether the heads of a token stand side by side, as in a cache [M, Hk, D]."""
    return key.stride(0) < key.stride(1)


def _chunks(key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Groups and tokens whose keys are CHUNK numbers, as they stand in memory."""
    G, n, D = key.shape
    some = G if _side_by_side(key) else max(1, CHUNK // max(1, n * D))
    length = max(1, CHUNK // max(1, min(some, G) * D))
    for g in range(0, G, some):
        for s in range(0, n, length):
            yield slice(g, g + some), slice(s, s + length)


def sum_pairs(query: Tensor, key: Tensor, *, difference: bool) -> Tensor:
    """q . k or |q - k|^2 of queries [B, g, D] and keys [B, n, D], pair by pair, [B, g, n].

    Not by a matrix product: differences do not cancel, and equal keys tie to the last bit.
    """
    found = []
    query = query[:, :, None]
    for keys in key[:, None].split(max(1, PAIRS // max(1, query.numel())), dim=-2):
        pairs = (query - keys).square_() if difference else query * keys
        found.append(pairs.sum(dim=-1))
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


# The best of a row.


def not_among_best(logits: Tensor, k: int) -> Tensor:
    """Marks what is not among the k < n largest of a row [*, n]; of equal ones the first are."""
    n = logits.shape[-1]
    if logits.device.type == "cpu":  # elsewhere this would wait for the device
        worse = logits < logits.kthvalue(n - k + 1, dim=-1, keepdim=True).values
        # No row has more than n - k of them, so that their sum tells whether all have.
        if int(worse.sum()) * n == worse.numel() * (n - k):
            return worse
    best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.ones_like(logits, dtype=torch.bool).scatter_(-1, best, False)


def _worse(logits: Tensor, k: int, products: Products | None) -> Tensor:
    """:func:`not_among_best` of many logits; products are judged again near a tie."""
    last = logits.kthvalue(logits.shape[-1] - k + 1, dim=-1, keepdim=True)
    worse = logits < last.values
    for g, r, best in _judged(logits, k, last.values, last.indices, products):
        worse[g, r] = True
        worse[g, r, best] = False
    return worse


def _best_places(logits: Tensor, k: int, products: Products | None) -> Tensor:
    """Return the places of the k largest of every row, [G, R, k]; products are judged again near a
    tie.
    """
    values, places = logits.topk(k, dim=-1, sorted=False)
    last = values.min(dim=-1, keepdim=True)
    place = places.gather(-1, last.indices)
    for g, r, best in _judged(logits, k, last.values, place, products):
        places[g, r] = best
    return places


def _judged(
    logits: Tensor, k: int, threshold: Tensor, place: Tensor, products: Products | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Rows (g, r) in which the k-th largest is not alone, and the places that they keep.

    `threshold` and `place` [G, R, 1] are those of the k-th largest. Products that are no further
    from it than rounding could bring equal ones are computed again, pair by pair.
    """
    lowest = highest = threshold
    if products is not None:
        group = torch.arange(len(logits))[:, None, None]
        of_key = torch.linalg.vector_norm(products.key[group, place], dim=-1)
        of_query = torch.linalg.vector_norm(products.query, dim=-1, keepdim=True)
        if products.score == "rbf":
            size = (of_key + of_query).square_()
        else:
            size = of_key * of_query
        features = products.query.shape[-1]
        rounding = 2 * (features**0.5 + 4) * torch.finfo(logits.dtype).eps
        size = (size * products.scale).abs_().mul_(rounding)
        size = torch.where(size.isnan(), torch.inf, size)
        lowest, highest = threshold - size, threshold + size
    lowest = lowest.clamp(min=torch.finfo(logits.dtype).min)  # -inf is never kept
    close = (logits >= lowest).sum(-1) > k
    if not bool(close.any()):
        return
    for g, r in close.nonzero().tolist():
        row = logits[g, r]
        if bool(row.isnan().any()):
            continue  # whatever it keeps, it is no number
        sure = (row > highest[g, r]).nonzero().squeeze(-1)
        near = ((row >= lowest[g, r]) & (row <= highest[g, r])).nonzero().squeeze(-1)
        if products is not None:
            own = products.key[g, near]
            if products.score == "rbf":
                by = -(products.query[g, r] - own).square_().sum(-1)
            else:
                by = (products.query[g, r] * own).sum(-1)
            scale = products.scale
            if isinstance(scale, Tensor):
                scale = scale.expand(*logits.shape[:2], 1)[g, r]
            near = near[(by * scale).argsort(descending=True, stable=True)]
        yield g, r, torch.cat([sure, near[: k - len(sure)]])


def _average_few(
    logits: Tensor, value: Tensor, places: Tensor, masked: bool, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The average of the values at `places` [G, R, k]: no other is read."""
    kept = logits.gather(-1, places)
    read = value[torch.arange(len(value))[:, None, None], places]  # [G, R, k, Dv]
    if masked:  # a row may see fewer than k
        read.masked_fill_((kept == -torch.inf)[..., None], 0)
    weights = kept.softmax(dim=-1)
    if masked:  # or nothing: then its softmax is 0 / 0
        weights = weights.masked_fill(kept == -torch.inf, 0)
    out = (weights[..., None, :] @ read).squeeze(-2)
    return out, _log_sums(kept, weights, masked) if need_lse else None
