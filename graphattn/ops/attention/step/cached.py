"""A few queries and the many keys of a cache: the core of decoding, without gradients.

:func:`~graphattn.decode_attention` and the steps of layers both use this file. Caches are long and
queries few, so on a CPU most of the time goes into reading keys and values. Each is read once, and
not copied before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.logits.score import Kernel
from graphattn.ops.inputs import keep_freed_memory

SMALL = 1 << 15  # with at most so many numbers in the keys, the fewest calls of torch are fastest
PAIRS = 1 << 20  # numbers of all pairs at a time: 4 megabytes of float32; fewer is slower
CHUNK = 1 << 17  # numbers of keys whose differences stay in cache: half a megabyte of float32
# From so many rows per key on, RBF logits are computed from products and norms, if these do not
# cancel. One row is enough if the keys of a head are not interleaved with those of other heads.
MANY_ROWS = 3
LARGEST = 32.0  # up to these scaled squares they do not: at most five bits of a logit are lost
# Keys at a time of a head that is interleaved with others: their pages stay in the TLB.
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
    """Output [G, R, Dv], and log-sums [G, R] if needed, else None.

    A source that a row does not see, or does not select, changes no bit of the row. Even the way of
    computing depends on sizes only.

    Args:
        query: [G, R, D], R rows that share keys: of the heads of a group, and of new tokens.
        key, value: [G, n, D] and [G, n, Dv], views of caches.
        score, scale: as in :mod:`.reference`; scale a number or a tensor [G, R, 1].
        top_k: sources kept per row.
        keep: bool, broadcastable to [G, R, n], the sources that a row sees; all if None.
    """
    large = key.numel() > SMALL and key.device.type == "cpu"
    if large:
        keep_freed_memory()
    cut = top_k is not None and top_k < key.shape[-2]
    # Keys that some rows do not see must not decide how the logits of others are computed.
    exact = (cut and not large) or (keep is not None and score == "rbf")
    logits = pair_logits(query, key, score, scale, exact=exact, large=large)
    products = Products(query, key, score, scale) if cut and large else None
    return attend_logits(logits, value, top_k, keep, products=products, need_lse=need_lse)


class Products(NamedTuple):
    """Factors of logits: queries [G, R, D], keys [G, n, D], score and scale."""

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
    """:func:`attend_cached` from logits [G, R, n].

    With `products`, logits that differ by rounding only are compared again; without, they count as
    exact.
    """
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
    # A value that is not selected may be NaN, and 0 * NaN is NaN. (On other devices than a CPU,
    # to find out whether there is one would wait for the device.)
    if hidden is not None and (out.device.type != "cpu" or not math.isfinite(out.sum())):
        out = _without_hidden(weights, value, hidden.expand_as(weights))
    return out, lse


def _log_sums(logits: Tensor, weights: Tensor, masked: bool) -> Tensor:
    """Log-sums [G, R]; with `masked`, a row may see nothing, and then its weights are NaN."""
    if masked:
        return logits.logsumexp(dim=-1)
    # The largest weight is exp(0) / sum, which takes fewer calls.
    return logits.amax(dim=-1) - weights.amax(dim=-1).log_()


def _without_hidden(weights: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """The averages if values that are hidden from a row may be NaN or infinite."""
    bad = ~value.isfinite()
    # By the same product as before, so that the other rows keep their bits.
    clean = weigh(weights, torch.where(bad, 0, value))
    seen = torch.bmm((~hidden).to(value.dtype), bad.to(value.dtype)) > 0
    if value.device.type != "cpu":
        visible = value[:, None].masked_fill(hidden[..., None], 0)
        return torch.where(seen, (weights[..., None, :] @ visible).squeeze(-2), clean)
    for g, r in seen.any(-1).nonzero().tolist():
        visible = value[g].masked_fill(hidden[g, r, :, None], 0)
        clean[g, r] = torch.where(seen[g, r], weights[g, r] @ visible, clean[g, r])
    return clean


def weigh(weights: Tensor, value: Tensor) -> Tensor:
    """The sums of values [G, n, Dv] with weights [G, R, n], [G, R, Dv]."""
    if not _is_spread(value):
        return torch.bmm(weights, value)
    out = weights.new_zeros(*weights.shape[:2], value.shape[-1])
    for some, there in zip(weights.split(SPREAD, -1), value.split(SPREAD, -2), strict=True):
        out.baddbmm_(some, there)
    return out


def _is_spread(x: Tensor) -> bool:
    """Whether the tokens of a head are far apart in memory, as in a long cache [M, Hk, D]."""
    return x.shape[-2] > SPREAD and x.stride(-2) > x.shape[-1] and x.device.type == "cpu"


# Logits.


def pair_logits(
    query: Tensor, key: Tensor, score: Kernel, scale: float | Tensor, *, exact: bool, large: bool
) -> Tensor:
    """The logits [G, R, n].

    With `exact`, equal keys have equal logits: distances are computed from differences, and a small
    number of dot products pair by pair. A `large` number of dot products, and without `exact` the
    distances of many rows, come from matrix products, whose rounding may differ for equal keys.
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
    """RBF logits [G, R, n] from q . k - (|q|^2 + |k|^2) / 2, or from differences if that cancels.

    Keys are read twice, however many rows there are. Whether it cancels is decided per group.
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
    """||q - k|| of every pair, [G, R, n], from differences, which do not cancel.

    A chunk of keys stays in the cache of the processor for all rows, and is read in the order of
    memory.
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
    """Whether the heads of a token are side by side in memory, as in a cache [M, Hk, D]."""
    return key.stride(0) < key.stride(1)


def _chunks(key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of groups and tokens with about CHUNK numbers of keys, in the order of memory."""
    G, n, D = key.shape
    some = G if _side_by_side(key) else max(1, CHUNK // max(1, n * D))
    length = max(1, CHUNK // max(1, min(some, G) * D))
    for g in range(0, G, some):
        for s in range(0, n, length):
            yield slice(g, g + some), slice(s, s + length)


def sum_pairs(query: Tensor, key: Tensor, *, difference: bool) -> Tensor:
    """q . k or |q - k|^2 of queries [B, g, D] and keys [B, n, D], pair by pair, [B, g, n].

    No matrix product is used, so that differences do not cancel and equal keys give equal bits.
    """
    found = []
    query = query[:, :, None]
    for keys in key[:, None].split(max(1, PAIRS // max(1, query.numel())), dim=-2):
        pairs = (query - keys).square_() if difference else query * keys
        found.append(pairs.sum(dim=-1))
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


# The best of a row.


def not_among_best(logits: Tensor, k: int) -> Tensor:
    """Mark all but the k < n largest of every row [*, n]; of equal ones the first are best."""
    n = logits.shape[-1]
    if logits.device.type == "cpu":  # on other devices, this would wait for the device
        worse = logits < logits.kthvalue(n - k + 1, dim=-1, keepdim=True).values
        # No row has more than n - k of them, so the total tells whether all rows have n - k.
        if int(worse.sum()) * n == worse.numel() * (n - k):
            return worse
    best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.ones_like(logits, dtype=torch.bool).scatter_(-1, best, False)


def _worse(logits: Tensor, k: int, products: Products | None) -> Tensor:
    """:func:`not_among_best` for many logits, where near ties of products are computed again."""
    last = logits.kthvalue(logits.shape[-1] - k + 1, dim=-1, keepdim=True)
    worse = logits < last.values
    for g, r, best in _judged(logits, k, last.values, last.indices, products):
        worse[g, r] = True
        worse[g, r, best] = False
    return worse


def _best_places(logits: Tensor, k: int, products: Products | None) -> Tensor:
    """The indices of the k largest of every row, [G, R, k].

    Near ties of products are computed again.
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
    """Rows (g, r) in which other logits are as large as the k-th largest, and their k best indices.

    `threshold` and `place`, [G, R, 1], are value and index of the k-th largest. Products whose
    difference to it could come from rounding are computed again, pair by pair.
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
    lowest = lowest.clamp(min=torch.finfo(logits.dtype).min)  # -inf is never selected
    close = (logits >= lowest).sum(-1) > k
    if not bool(close.any()):
        return
    for g, r in close.nonzero().tolist():
        row = logits[g, r]
        if bool(row.isnan().any()):
            continue  # its result is NaN, whatever it selects
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
    """The average of the values at the indices `places`, [G, R, k]; no other value is read."""
    selected = logits.gather(-1, places)
    read = value[torch.arange(len(value))[:, None, None], places]  # [G, R, k, Dv]
    if masked:  # a row may see fewer than k
        read.masked_fill_((selected == -torch.inf)[..., None], 0)
    weights = selected.softmax(dim=-1)
    if masked:  # or nothing, and then its softmax is 0 / 0
        weights = weights.masked_fill(selected == -torch.inf, 0)
    out = (weights[..., None, :] @ read).squeeze(-2)
    return out, _log_sums(selected, weights, masked) if need_lse else None
