"""Attention of the newest tokens of texts to the caches of all that came before."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int
from graphattn.ops.attention.calls import check_sink
from graphattn.ops.attention.logits.score import Kernel, score_of
from graphattn.ops.attention.native import steps as native_steps
from graphattn.ops.attention.step.cached import attend_cached
from graphattn.ops.attention.step.masked_rows import attend_masked
from graphattn.ops.backends import has_values
from graphattn.ops.inputs import check_qkv, compute_dtype, full_precision
from graphattn.ops.segments import even_sigmoid


class DecodeKind(NamedTuple):
    """How the logits of a step are computed; `scale` is a number, or a tensor [Hk, g]."""

    score: Kernel
    scale: float | Tensor
    top_k: int | None


@overload
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor | int,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    window: int | None = None,
    top_k: int | None = None,
    sink: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor | int,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    window: int | None = None,
    top_k: int | None = None,
    sink: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor | int,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    window: int | None = None,
    top_k: int | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attend from the newest few tokens of every text to a cache of all its tokens.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    Text b has ``lengths[b]`` tokens, and the queries are its last T. Keys and values of all its
    tokens are at the start of row b of the caches; write the newest ones there before the call.
    Query t has the position p = lengths[b] - T + t and sees the positions j <= p, or with `window`
    the last `window` of these, itself included, as in ``causal_window_graph``. A cache is never
    read from ``lengths[b]`` on. For dot products this is ``flash_attn_with_kvcache`` of
    flash-attention; Gaussian kernel and Krause attention work in the same way:

    .. math::
        \ell_{pj} = s \, q_p \cdot k_j \quad\text{or}\quad
        -\frac{\lVert q_p - k_j \rVert^2}{2 \sigma_h^2}, \qquad
        y_p = \sum_{j \in S(p)} \frac{e^{\ell_{pj}}}
              {e^{\text{sink}_h} + \sum_{j' \in S(p)} e^{\ell_{pj'}}} \, v_j

    with S(p) the positions that p sees, or the `top_k` of them with the largest logits (of equal
    ones the smaller index). Rows are those of :func:`~graphattn.dot_product_attention` and
    :func:`~graphattn.rbf_attention` on the causal graph of the whole text. A query before the first
    token (lengths[b] < T: padding in front) gets exactly 0, as from flash-attention.

    Args:
        query: [*, T, H, D], * being the batch.
        key_cache: [*, M, Hk, D] with room for M tokens; Hk divides H, and query head h reads key
            head h // (H / Hk). Views are read as they are, without a copy.
        value_cache: [*, M, Hk, Dv].
        lengths: how many tokens every text has, the T newest included: an integer tensor [*] with
            numbers from 0 to M, or one int for all. On other devices than a CPU, the numbers are
            not checked, because that would wait for the device; numbers beyond M then count as M.
        sigma: bandwidth of RBF attention, a float or a tensor broadcastable to [H]. Without it,
            logits are scaled dot products.
        scale: of dot products, the same; 1 / sqrt(D) if None.
        window: keys that a token sees, itself included; all if None.
        top_k: sources kept per token and head; all if None.
        sink: logits [H] that add to the denominator only (attention sinks).
        return_lse: also return the log-sums [*, T, H] (after top-k, without the sink), -inf for a
            query that sees nothing; float32 for half-precision inputs. With them chunks of a cache
            are merged: :func:`~graphattn.merge_attention`.

    Returns:
        [*, T, H, Dv] in the dtype of `query`; with `return_lse` a pair. Half-precision inputs are
        computed in float32. Results can be differentiated, any number of times; without gradients,
        on a CPU, it is several times faster.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> keys, values = torch.randn(2, 2, 64, 4, 8)  # caches of two texts, room for 64 tokens
        >>> query = torch.randn(2, 1, 8, 8)  # the newest token of each; 8 heads share 4
        >>> ga.decode_attention(query, keys, values, torch.tensor([40, 17])).shape
        torch.Size([2, 1, 8, 8])
        >>> y = ga.decode_attention(query, keys, values, 40, sigma=2.0, window=16, top_k=4)
        >>> z = ga.rbf_attention(
        ...     query, keys[:, 24:40], values[:, 24:40], ga.bipartite_complete_graph(1, 16), 2.0,
        ...     top_k=4)
        >>> torch.allclose(y, z, atol=1e-6)
        True
    """
    check_qkv(query, key_cache, value_cache, ("query", "key_cache", "value_cache"))
    kind = _kind(query, key_cache.shape[-2], sigma, scale, top_k)
    window = None if window is None else as_int("window", window, 1)
    sink = check_sink(sink, query.shape[-2], query)
    batch = query.shape[:-3]
    if len(batch) != 1:
        query, key_cache, value_cache = (
            x.reshape(batch.numel(), *x.shape[-3:]) for x in (query, key_cache, value_cache)
        )
    counted = _lengths(lengths, batch, key_cache.shape[1], query.device)
    tensors = query, key_cache, value_cache
    with full_precision(query.device):
        if isinstance(counted, Tensor) or _needs_masks(*tensors, kind.scale):
            out, lse = _by_masks(*tensors, counted, kind, window)
        elif native_steps.why_no_decoding(*tensors) is None:
            out, lse = native_steps.decode(
                *tensors,
                counted,
                is_rbf=kind.score == "rbf",
                scale=kind.scale,
                window=window,
                top_k=kind.top_k,
                sink=sink,
                need_lse=return_lse,
            )
            sink = None  # it stands in the sums already
        else:
            need_lse = return_lse or sink is not None
            out, lse = _by_rows(*tensors, counted, kind, window, need_lse)
    if sink is not None:
        assert lse is not None
        out = _beside_sink(out, lse, sink)
    out = out.to(query.dtype)
    out = out.reshape(*batch, *out.shape[1:])
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.reshape(*batch, *lse.shape[1:])


def _by_masks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: int | list[int] | Tensor,
    kind: DecodeKind,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """All texts at once, with a mask per row; the operations do not depend on values."""
    T, device = query.shape[1], query.device
    if isinstance(lengths, int):
        key, value = key[:, :lengths], value[:, :lengths]
        lengths = torch.full((1,), lengths, device=device)
    elif isinstance(lengths, list):
        lengths = torch.tensor(lengths, device=device)
    positions = lengths.to(device)[:, None] - T + torch.arange(T, device=device)
    sources = torch.arange(key.shape[1], device=device)
    allowed = seen_from(positions[..., None], sources, window)
    dtype = compute_dtype(query.dtype)
    out, lse = attend_masked(
        query.to(dtype).unflatten(2, (key.shape[2], -1)),
        key.to(dtype),
        value.to(dtype),
        allowed,
        score=kind.score,
        scale=kind.scale,
        top_k=kind.top_k,
    )
    return out.flatten(2, 3), lse.flatten(2, 3)


def seen_from(position: Tensor, source: Tensor, window: int | None) -> Tensor:
    """Whether a token at `position` sees the one at `source`."""
    seen = source <= position
    return seen if window is None else seen & (source > position - window)


def _by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: int | list[int],
    kind: DecodeKind,
    window: int | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Text by text; each reads only the part of its cache that it sees."""
    B, T, H, _ = query.shape
    dtype = compute_dtype(query.dtype)
    if isinstance(lengths, int):
        lengths = [lengths] * B
    texts = [
        _text(query[b], key[b], value[b], length, kind, window, need_lse)
        for b, length in enumerate(lengths)
    ]
    if not texts:
        return query.new_zeros(0, T, H, value.shape[-1]), query.new_zeros(0, T, H, dtype=dtype)
    outs = [out for out, _ in texts]
    sums = [lse for _, lse in texts if lse is not None]
    if len(texts) == 1:
        return outs[0][None], sums[0][None] if sums else None
    return torch.stack(outs), torch.stack(sums) if sums else None


def _text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: int,
    kind: DecodeKind,
    window: int | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output [T, H, Dv] and log-sums [T, H] of the newest tokens of one text, [T, H, D]."""
    (T, H, D), (_, Hk, Dv) = query.shape, value.shape
    dtype = compute_dtype(query.dtype)
    first = length - T
    if first < 0 or T == 0:  # padding in front
        out = query.new_zeros(T, H, Dv, dtype=dtype)
        sums = query.new_full((T, H), -torch.inf, dtype=dtype)
        if length and T:
            real, found = _text(query[-first:], key, value, length, kind, window, True)
            assert found is not None
            out[-first:], sums[-first:] = real, found
        return out, sums
    low = 0 if window is None else max(0, first - window + 1)
    keys, values = (x[low:length].to(dtype).transpose(0, 1) for x in (key, value))
    query, scale, keep = query.to(dtype), kind.scale, None
    if T == 1:
        rows = query.reshape(Hk, -1, D)
    else:
        rows = query.unflatten(1, (Hk, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hk, g T, D]
        sources = torch.arange(low, length)
        keep = seen_from(torch.arange(first, length)[:, None], sources, window)
        keep = keep.repeat(H // Hk, 1)[None]  # [1, g T, n]
    if isinstance(scale, Tensor):
        scale = scale.repeat_interleave(T, dim=1)[..., None]
    out, lse = attend_cached(
        rows, keys, values, kind.score, scale, top_k=kind.top_k, keep=keep, need_lse=need_lse
    )
    if T == 1:
        return out.reshape(1, H, Dv), None if lse is None else lse.reshape(1, H)
    return _by_token(out, T), None if lse is None else _by_token(lse[..., None], T)[..., 0]


def _by_token(x: Tensor, tokens: int) -> Tensor:
    """[Hk, g T, D] -> [T, H, D]."""
    return x.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3).flatten(1, 2)


def _beside_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Compute out * sum / (e^sink + sum), so that no gradient overflows.

    A row that sees nothing stays 0. A row that is NaN gives the sink no gradient.
    """
    share = even_sigmoid(lse.masked_fill(lse == -torch.inf, 0) - sink)[..., None]
    if not (torch.is_grad_enabled() and (out.requires_grad or sink.requires_grad)):
        return out * share
    bad = ~out.isfinite()
    share = share.masked_fill(bad.any(-1, keepdim=True), torch.nan)
    return torch.where(bad, torch.nan, out.masked_fill(bad, 0) * share)


def _kind(
    query: Tensor,
    kv_heads: int,
    sigma: float | Tensor | None,
    scale: float | Tensor | None,
    top_k: int | None,
) -> DecodeKind:
    given = score_of(sigma, scale)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    score = given.kernel
    H, D = query.shape[-2:]
    if isinstance(sigma, Tensor) or isinstance(scale, Tensor):
        by_head = given.ready(H, query).strength
        return DecodeKind(score, by_head.unflatten(0, (kv_heads, -1)), top_k)
    if scale is None and sigma is None:
        return DecodeKind(score, 1 / math.sqrt(max(D, 1)), top_k)
    if sigma is None:
        if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number or a tensor, got {scale!r}")
        return DecodeKind(score, float(scale), top_k)
    bandwidth = as_float("sigma", sigma, positive=True)
    strength = 1 / bandwidth / bandwidth
    if not 0 < strength <= torch.finfo(compute_dtype(query.dtype)).max:
        raise ValueError(f"sigma must be > 0 and finite, like 1 / sigma^2, got {sigma}")
    return DecodeKind(score, strength, top_k)


def _lengths(
    lengths: Any, batch: torch.Size, room: int, device: torch.device
) -> int | list[int] | Tensor:
    """One length for all texts, or a list; a tensor whose values cannot be read stays a tensor."""
    if not isinstance(lengths, Tensor):
        number = as_int("lengths", lengths, 0)
        if number > room:
            raise ValueError(f"lengths must be <= {room}, the room of the caches, got {number}")
        return number
    if lengths.dtype not in (torch.int64, torch.int32) or lengths.shape != batch:
        raise ValueError(
            f"lengths must be an int, or an int64 or int32 tensor of shape {list(batch)}, "
            f"got {lengths.dtype} of shape {list(lengths.shape)}"
        )
    if lengths.device.type != "cpu" and lengths.device != device:
        raise ValueError(f"lengths must be on cpu or {device}, got {lengths.device}")
    if not has_values(lengths):
        return lengths.reshape(-1)
    found: list[int] = lengths.reshape(-1).tolist()
    if found and not 0 <= min(found) <= max(found) <= room:
        raise ValueError(f"lengths must be within 0 .. {room}, the room of the caches, got {found}")
    return found[0] if len(set(found)) == 1 else found


def _needs_masks(*inputs: Tensor | float) -> bool:
    """Whether masks must be used: for gradients, and where values cannot be read."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not all(has_values(x) for x in tensors):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
