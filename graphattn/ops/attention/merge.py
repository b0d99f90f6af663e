"""The merging of attention over disjoint sets of sources, by the log-sums of the parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.ops.inputs import compute_dtype

Part = tuple[Tensor, Tensor]
LEVEL = 1024.0  # log-sums in float32, with which weights have some 4 digits
SOUND = 1e9  # no product of two such numbers and a scale overflows


def merge_attention(parts: Iterable[Part]) -> Part:
    r"""Merge attention over disjoint sets of sources into attention over all of them.

    .. math::
        L = \log \sum_p e^{L_p}, \qquad y = \sum_p e^{L_p - L} \, y_p

    with the outputs y_p and log-sums L_p of the parts, as ``return_lse=True`` gives them: of chunks
    of a cache, of the shards of a sequence on several devices, of a window and of global tokens.
    The parts share no edge, and none of them may have applied `eps` or a sink: that is done once,
    to the result, as ``out * torch.sigmoid(lse - sink)[..., None]``.

    **Results with top_k cannot be merged like this.** A row selects the k best of all its sources,
    and a part does not know which of its own are among them. To select k in every part was measured
    to be 51 % wrong. Merge candidates instead: :func:`~graphattn.top_k_candidates` finds the k best
    of every part, and :func:`~graphattn.merge_top_k` compares them.
    :func:`~graphattn.attend_candidates` then averages the selected sources of every part, and this
    function merges those averages.

    A part without sources for a row has the log-sum -inf there, and its output is not read, even if
    it is NaN (as from torch's fused attention). A row without sources in any part gets exactly 0
    and -inf, and its gradients are not NaN. A NaN in a part that does have sources reaches the
    result, even if its weight underflows to 0, as it would in one pass. Outputs and log-sums can be
    differentiated any number of times.

    Args:
        parts: pairs (out [*, N, H, Dv], lse [*, N, H]), one at least, all of one shape.

    Returns:
        The pair (out, lse) over all edges: out in the dtype of the parts, lse in the same or, for
        parts in half precision, in float32. Those are merged in float32.

    Raises:
        ValueError: names the part, its shape, dtype or device and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k, v = torch.randn(3, 6, 2, 4)  # [tokens, heads, features]
        >>> left, right = ga.bipartite_complete_graph(6, 4), ga.bipartite_complete_graph(6, 2)
        >>> parts = [
        ...     ga.dot_product_attention(q, k[:4], v[:4], left, return_lse=True),
        ...     ga.dot_product_attention(q, k[4:], v[4:], right, return_lse=True),
        ... ]
        >>> out, lse = ga.merge_attention(parts)
        >>> torch.allclose(out, ga.dot_product_attention(q, k, v, ga.complete_graph(6)), atol=1e-6)
        True
    """
    pairs = list(parts)
    _check_parts(pairs)
    dtype = pairs[0][0].dtype
    full = compute_dtype(dtype)
    outs, sums = [], []
    for out, lse in pairs:
        lse = lse.to(full)
        sums.append(lse)
        outs.append(out.to(full).masked_fill((lse == -torch.inf)[..., None], 0))
    merged_out, merged_lse = merged(outs, sums)
    return merged_out.to(dtype), merged_lse


def merged(outs: Sequence[Tensor], sums: Sequence[Tensor]) -> Part:
    """Merge checked tensors, whose outputs are 0 where a log-sum is -inf.

    The operations can be differentiated any number of times.
    """
    parts = torch.stack(list(sums), dim=-1)
    empty = (parts == -torch.inf).all(-1)
    parts = parts.masked_fill(empty[..., None], 0)  # -inf - -inf is NaN
    share = parts.softmax(-1)
    out = share[..., :1] * outs[0]
    for p in range(1, len(outs)):
        out = out + share[..., p : p + 1] * outs[p]
    return out, parts.logsumexp(-1).masked_fill(empty, -torch.inf)


def _check_parts(parts: list[Any]) -> None:
    """Check the parts of :func:`merge_attention`."""
    if not parts:
        raise ValueError("parts must hold at least one pair (out, lse), got none")
    first: Tensor | None = None
    for p, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            got = f"{len(part)} of them" if isinstance(part, tuple | list) else type(part).__name__
            raise ValueError(f"parts[{p}] must be a pair of tensors (out, lse), got {got}")
        out, lse = part
        for name, x in (("out", out), ("lse", lse)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"parts[{p}]: {name} must be a floating-point tensor, got {got}")
        if out.dim() < 3 or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"parts[{p}] must be (out [*, N, H, Dv], lse [*, N, H]), "
                f"got {list(out.shape)} and {list(lse.shape)}"
            )
        first = out if first is None else first
        if out.shape != first.shape or out.dtype != first.dtype:
            raise ValueError(
                f"parts[{p}] must be like parts[0], {first.dtype} {list(first.shape)}, "
                f"got {out.dtype} {list(out.shape)}"
            )
        if out.device != first.device or lse.device != first.device:
            raise ValueError(
                f"parts[{p}] must be on {first.device} like parts[0], "
                f"got {out.device} and {lse.device}"
            )


# Which numbers the gradients of a part are exact for, if log-sums over all parts are given. A
# weight is exp(l - L). Both are rounded, and so the weight has a relative error of about |L| times
# the precision of the dtype. A softmax of the part alone would not: it subtracts the largest logit.


def are_moderate(numbers: Iterable[Tensor], sums: Iterable[Tensor]) -> bool:
    """Whether all numbers are at most SOUND, all log-sums at most LEVEL, and none of them NaN.

    Log-sums in float64 may be as large as other numbers. On a GPU, the answer waits for the device.
    """
    fit = []
    for x, most in [*((x, SOUND) for x in numbers), *((x, LEVEL) for x in sums)]:
        if x.numel():
            low, high = x.detach().aminmax()
            bound = SOUND if x.dtype == torch.float64 else most
            fit.append((low >= -bound) & (high <= bound))
    return not fit or bool(torch.stack(fit).all())
