"""Top-k attention over disjoint sets of sources: the best candidates of every part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphattn.graphs.arguments import as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.logits.score import Score, edge_logits, score_of
from graphattn.ops.inputs import (
    Valid,
    check_graph,
    check_qkv,
    check_valid,
    compute_dtype,
    flat_masks,
    full_precision,
    repeat_heads,
)
from graphattn.ops.top_k import order_of_selection

Candidates = tuple[Tensor, Tensor]
CHUNK = 1 << 20  # numbers of the keys or values that are gathered at a time


def top_k_candidates(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph | Tensor,
    k: int,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    first_source: int = 0,
    valid: Valid = None,
) -> Candidates:
    """Find the k best sources of every target and head among the edges of one part.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    Use it for attention with `top_k` over sources in several places, such as chunks of a cache or
    shards of a sequence. Every part is a graph over all targets and its own sources. There are
    three steps: the candidates of every part, :func:`merge_top_k` of all of them, and
    :func:`attend_candidates` in every part. Only k numbers per row are exchanged, never values.

    Args:
        query: [*, N, H, D].
        key: [*, M, Hk, D], the sources of this part.
        graph: N targets, M sources: the edges of this part.
        k: candidates per target and head, >= 1.
        sigma, scale: as in :func:`~graphattn.attention_weights`; they define the logits.
        first_source: the index of this part's first source among all sources.
        valid: as in :func:`~graphattn.rbf_attention`.

    Returns:
        (logits, index), both [*, N, H, k], the largest logits first, of equal ones the smaller
        index first; -inf and -1 where a target has fewer sources. `index` is among all sources.
        `logits` can be differentiated, and are float32 for half-precision inputs.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k, v = torch.randn(3, 6, 2, 4)  # [tokens, heads, features]
        >>> parts = [(0, 4), (4, 6)]
        >>> candidates = [
        ...     ga.top_k_candidates(q, k[a:b], ga.bipartite_complete_graph(6, b - a), 3, sigma=2.0,
        ...                         first_source=a)
        ...     for a, b in parts]
        >>> best = ga.merge_top_k(candidates, 3)
        >>> averages = [ga.attend_candidates(*best, v[a:b], first_source=a) for a, b in parts]
        >>> out, lse = ga.merge_attention(averages)
        >>> z = ga.rbf_attention(q, k, v, ga.complete_graph(6), 2.0, top_k=3)
        >>> torch.allclose(out, z, atol=1e-6)
        True
    """
    check_qkv(query, key, key)
    given = score_of(sigma, scale)
    first_source = as_int("first_source", first_source, 0)
    logits, index = candidates_by_score(query, key, graph, k, given, valid=valid)
    return logits, torch.where(index < 0, index, index + first_source)


def candidates_by_score(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph | Tensor,
    k: int,
    given: Score,
    *,
    valid: Valid = None,
) -> Candidates:
    """Implement :func:`top_k_candidates` for any score; sources are numbered from 0."""
    heads, k = query.shape[-2], as_int("k", k, 1)
    N, M = query.shape[-3], key.shape[-3]
    graph = check_graph(graph, query, N, M, source=key)
    batch = query.shape[:-3]
    masks = flat_masks(check_valid(valid, batch, query.device, N, M), batch)
    score = given.ready(heads, query)
    dtype = compute_dtype(query.dtype)
    query, key = (x.reshape(batch.numel(), *x.shape[-3:]).to(dtype) for x in (query, key))
    rowptr, source = graph.compact_csr()
    degrees = rowptr.diff().tolist()
    chunks: list[Candidates] = []
    start = 0
    with full_precision(query.device):
        while start < N:
            widest, stop = 1, start
            while stop < N:  # as many rows as fit into a chunk
                widest = max(widest, degrees[stop])
                if stop > start and (stop - start + 1) * widest * query[:, 0].numel() > CHUNK:
                    break
                stop += 1
            rows = slice(start, stop)
            table = _table(rowptr[start : stop + 1], source, max(degrees[rows]), masks, rows)
            chunks.append(_best_of_rows(query[:, rows], key, *table, k, score))
            start = stop
    if not chunks:
        empty = query.new_zeros(len(query), 0, heads, k)
        chunks = [(empty, empty.long())]
    logits, index = (torch.cat(x, dim=1) for x in zip(*chunks, strict=True))
    return logits.reshape(*batch, N, heads, k), index.reshape(*batch, N, heads, k)


def _table(
    rowptr: Tensor, source: Tensor, width: int, valid: tuple[Tensor | None, ...], rows: slice
) -> tuple[Tensor, Tensor]:
    """The sources of some targets, padded, [n, w], and which are no padding, bool [1 or B, n, w].

    They are in rising order, as in the list of edges.
    """
    slot = torch.arange(width, device=source.device)
    present = slot < rowptr.diff()[:, None]
    places = torch.where(present, rowptr[:-1, None] + slot, 0)
    sources = source[places].long() if width else slot[None]
    present = present[None]
    of_target, of_source = valid
    if of_target is not None:
        present = present & of_target[:, rows, None]
    if of_source is not None:
        present = present & of_source[:, sources]
    return sources.expand(present.shape[1:]), present


def _best_of_rows(
    query: Tensor, key: Tensor, sources: Tensor, present: Tensor, k: int, score: Any
) -> Candidates:
    """The k largest logits of rows and their sources, [B, n, H, k], among `sources` [n, w]."""
    B, n, H, _ = query.shape
    with torch.no_grad():
        shown = key.index_select(1, sources.flatten()).unflatten(1, sources.shape)
        shown = repeat_heads(shown.masked_fill(~present[..., None, None], 0), H)
        logits = edge_logits(score, query[:, :, None], shown).transpose(2, 3)
        logits = logits.masked_fill(~present[:, :, None], -torch.inf)  # [B, n, H, w]
        places = order_of_selection(logits)[..., :k]
        logits = logits.gather(-1, places)
        index = sources.expand(B, n, -1)[:, :, None].expand(B, n, H, -1).gather(-1, places)
        index = index.masked_fill(logits == -torch.inf, -1)
    strength = score.strength  # None if the score is somebody's own: its parameters are not known
    is_learned = strength is None or strength.requires_grad
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or is_learned):
        chosen = _gathered(key, index)
        logits = edge_logits(score, query[:, :, None], chosen.transpose(2, 3)).transpose(2, 3)
        logits = logits.masked_fill(index < 0, -torch.inf)
    return _padded(logits, index, k)


def _padded(logits: Tensor, index: Tensor, k: int) -> Candidates:
    """k candidates of every row; -inf and -1 where there are fewer."""
    missing = (0, max(k - index.shape[-1], 0))
    return pad(logits, missing, value=-torch.inf), pad(index, missing, value=-1)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Gather x [B, M, Hk, D] at the sources `index` [B, n, H, k]; 0 where the index is -1."""
    B, _, H, _ = index.shape
    device = x.device
    text = torch.arange(B, device=device)[:, None, None, None]
    head = torch.arange(H, device=device)[:, None] // (H // x.shape[2])
    if x.shape[1] == 0:
        return x.new_zeros(*index.shape, x.shape[-1])
    return x[text, index.clamp(min=0), head].masked_fill((index < 0)[..., None], 0)


def merge_top_k(parts: Iterable[Candidates], k: int) -> Candidates:
    """Choose the k best among the candidates of several parts, exactly as one pass would.

    The k best sources of a row are among the k best of every part, so nothing is lost. Of equal
    logits, the smaller index is selected, whatever its part.

    Args:
        parts: at least one pair (logits [*, N, H, k'], index [*, N, H, k']) with k' >= k, from
            :func:`top_k_candidates` or this function; no source may be in two parts.
        k: how many sources per row are selected.

    Returns:
        (logits, index) of the selected sources, [*, N, H, k], the largest first; -inf and -1 where
        there are fewer. Logits can be differentiated.

    Raises:
        ValueError: names the part, its shapes and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> left = torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[0, 1]]])
        >>> right = torch.tensor([[[3.0, 2.0]]]), torch.tensor([[[5, 4]]])
        >>> ga.merge_top_k([right, left], 2)[1]
        tensor([[[0, 5]]])
    """
    pairs, k = list(parts), as_int("k", k, 1)
    if not pairs:
        raise ValueError("parts must hold at least one pair (logits, index), got none")
    for p, part in enumerate(pairs):
        _check_candidates(part, f"parts[{p}]")
        if part[0].shape[:-1] != pairs[0][0].shape[:-1]:
            raise ValueError(
                f"parts[{p}] must have the rows of parts[0], {list(pairs[0][0].shape[:-1])}, "
                f"got {list(part[0].shape[:-1])}"
            )
        if part[0].shape[-1] < k:
            raise ValueError(
                f"parts[{p}] must hold at least k = {k} candidates of every row (those of no edge "
                f"have index -1), got {part[0].shape[-1]}"
            )
    logits, index = (torch.cat(x, dim=-1) for x in zip(*pairs, strict=True))
    by_index = index.argsort(dim=-1)
    order = order_of_selection(logits.gather(-1, by_index))
    best = by_index.gather(-1, order)[..., :k]
    logits, index = logits.gather(-1, best), index.gather(-1, best)
    index = index.masked_fill(logits == -torch.inf, -1)
    return _padded(logits, index, k)


def attend_candidates(
    logits: Tensor, index: Tensor, value: Tensor, *, first_source: int = 0
) -> tuple[Tensor, Tensor]:
    """Average the values of those selected candidates that are in one part.

    The softmax is over the candidates whose `index` is first_source .. first_source + M - 1. The
    others belong to other parts. :func:`~graphattn.merge_attention` of the results of all parts is
    attention over all candidates. If one part holds all values, its result is that already.

    Args:
        logits, index: [*, N, H, k], from :func:`merge_top_k` or :func:`top_k_candidates`.
        value: [*, M, Hk, Dv], the values of this part; Hk divides H.
        first_source: the index of this part's first source among all sources.

    Returns:
        (out [*, N, H, Dv], lse [*, N, H]), out in the dtype of `value`; 0 and -inf for a row
        without candidates in this part. Both can be differentiated.

    Raises:
        ValueError: names the argument, its shape and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k, v = torch.randn(3, 6, 2, 4)
        >>> graph = ga.causal_graph(6)
        >>> best = ga.top_k_candidates(q, k, graph, 2)
        >>> out, lse = ga.attend_candidates(*best, v)
        >>> torch.allclose(out, ga.dot_product_attention(q, k, v, graph, top_k=2), atol=1e-6)
        True
    """
    _check_candidates((logits, index), "(logits, index)")
    first_source = as_int("first_source", first_source, 0)
    *batch, N, H, k = index.shape
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or value.dim() != index.dim()
        or list(value.shape[:-3]) != batch
        or value.shape[-2] == 0
        or H % value.shape[-2]
    ):
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"value must be floating-point {[*batch, 'M', f'{H} or fewer', 'Dv']} "
                         f"with heads that divide {H}, got {got}")  # fmt: skip
    texts = torch.Size(batch).numel()
    dtype = torch.promote_types(compute_dtype(value.dtype), logits.dtype)
    values = value.reshape(texts, *value.shape[-3:]).to(dtype)
    logits, index = logits.reshape(texts, N, H, k).to(dtype), index.reshape(texts, N, H, k)
    local = index - first_source
    here = (local >= 0) & (local < values.shape[1]) & (index >= 0) & (logits != -torch.inf)
    local = torch.where(here, local, -1)
    empty = ~here.any(-1)
    logits = logits.masked_fill(~here, -torch.inf).masked_fill(empty[..., None], 0)
    weights = logits.softmax(-1).masked_fill(~here, 0)
    rows = max(1, CHUNK // max(1, texts * H * k * values.shape[-1]))
    out = torch.cat(
        [
            (w[..., None, :] @ _gathered(values, places)).squeeze(-2)
            for w, places in zip(weights.split(rows, 1), local.split(rows, 1), strict=True)
        ],
        dim=1,
    )
    lse = logits.logsumexp(-1).masked_fill(empty, -torch.inf)
    return out.to(value.dtype).reshape(*batch, N, H, value.shape[-1]), lse.reshape(*batch, N, H)


def _check_candidates(part: Any, name: str) -> None:
    pair = isinstance(part, tuple | list) and len(part) == 2
    if not pair or not all(isinstance(x, Tensor) for x in part):
        raise ValueError(f"{name} must be a pair of tensors (logits, index), got {part!r}")
    logits, index = part
    if not logits.is_floating_point() or index.dtype != torch.int64:
        raise ValueError(
            f"{name} must be floating-point logits and an int64 index, "
            f"got {logits.dtype} and {index.dtype}"
        )
    if logits.dim() < 3 or logits.shape != index.shape or logits.device != index.device:
        raise ValueError(
            f"{name} must be of one shape [*, N, H, k] on one device, got {list(logits.shape)} "
            f"on {logits.device} and {list(index.shape)} on {index.device}"
        )
