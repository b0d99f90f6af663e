"""Attention of the newest tokens of texts to the caches of all that came before."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int
from graphattn.ops.attention.calls import check_sink
from graphattn.ops.attention.logits.score import GaussianKernel, Score, score_of
from graphattn.ops.attention.native import steps as native_steps
from graphattn.ops.attention.step.pairs import PairLogits, attend_pairs
from graphattn.ops.backends import has_values
from graphattn.ops.inputs import check_qkv, compute_dtype, may_be_differentiated


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
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    window = None if window is None else as_int("window", window, 1)
    score = _score(query, sigma, scale)
    sink = check_sink(sink, query.shape[-2], query)
    batch = query.shape[:-3]
    if len(batch) != 1:
        query, key_cache, value_cache = (
            x.reshape(batch.numel(), *x.shape[-3:]) for x in (query, key_cache, value_cache)
        )
    counted = _lengths(lengths, batch, key_cache.shape[1], query.device)
    tensors = query, key_cache, value_cache
    given = [x for x in (*tensors, sigma, scale, sink) if isinstance(x, Tensor)]
    must_trace = may_be_differentiated(given) or not all(has_values(x) for x in given)
    if must_trace or isinstance(counted, Tensor):
        # Torch's fused attention, which serves where no log-sums are needed, has one derivative.
        out, lse = _by_masks(*tensors, counted, PairLogits(score, top_k, sink=sink), window, True)
    elif native_steps.why_no_decoding(*tensors) is None:
        options: dict[str, Any] = {"window": window, "top_k": top_k, "sink": sink}
        out, lse = native_steps.decode(*tensors, counted, score, need_lse=return_lse, **options)
    else:
        logits = PairLogits(score, top_k, sink=sink)
        out, lse = _by_text(*tensors, counted, logits, window, return_lse)
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
    logits: PairLogits,
    window: int | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """All texts at once, with a mask per row; the operations do not depend on values."""
    T, device, seen = query.shape[1], query.device, None
    if isinstance(lengths, int):
        key, value = key[:, :lengths], value[:, :lengths]
        ends: int | Tensor = lengths
    else:
        ends = torch.as_tensor(lengths, device=device).reshape(-1, 1, 1, 1)
    if not (isinstance(lengths, int) and T == 1 and lengths > 0 and window is None):
        position = ends - T + torch.arange(T, device=device).reshape(1, 1, T, 1)
        seen = seen_from(position, torch.arange(key.shape[1], device=device), window)
    tokens = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out, lse, _ = attend_pairs(*tokens, logits, allowed=seen, need_lse=need_lse)
    return out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)


def seen_from(position: Tensor, source: Tensor, window: int | None) -> Tensor:
    """Whether a token at `position` sees the one at `source`."""
    seen = source <= position
    return seen if window is None else seen & (source > position - window)


def _by_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: int | list[int],
    logits: PairLogits,
    window: int | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Text by text; each reads only the part of its cache that it sees."""
    B, T = query.shape[:2]
    if isinstance(lengths, int):
        lengths = [lengths] * B
    rows = []
    for b, length in enumerate(lengths):
        low = 0 if window is None else max(0, length - T - window + 1)
        here, read = slice(b, b + 1), slice(low, None)
        given = query[here], key[here, read], value[here, read], length - low
        rows.append(_by_masks(*given, logits, window, need_lse))
    if not rows:
        return _by_masks(query, key, value, 0, logits, window, need_lse)
    outs, sums = zip(*rows, strict=True)
    return torch.cat(outs), torch.cat(sums) if need_lse else None


def _score(query: Tensor, sigma: float | Tensor | None, scale: float | Tensor | None) -> Score:
    """The checked score; a number stays a number, with which short calls are faster."""
    score = score_of(sigma, scale)
    if isinstance(sigma, Tensor) or isinstance(scale, Tensor):
        return score.ready(query.shape[-2], query)
    if sigma is not None:
        bandwidth = as_float("sigma", sigma, positive=True)
        if not 0 < 1 / bandwidth / bandwidth <= torch.finfo(compute_dtype(query.dtype)).max:
            raise ValueError(f"sigma must be > 0 and finite, like 1 / sigma^2, got {sigma}")
        return GaussianKernel(bandwidth)
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    if scale is not None and not (is_number and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or a tensor, got {scale!r}")
    return score


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
    numbers: list[int] = lengths.reshape(-1).tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) <= room:
        raise ValueError(
            f"lengths must be within 0 .. {room}, the room of the caches, got {numbers}"
        )
    return numbers[0] if len(set(numbers)) == 1 else numbers
