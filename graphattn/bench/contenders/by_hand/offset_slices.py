"""Hand-written, compiled attention in a narrow window: it reads slices and gathers nothing.

Every offset of the window is a slice of the padded keys. The backward pass is written by hand, too:
the targets of a source are a window, so nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from graphattn.bench.cases.inputs import AttentionInputs, MissingError
from graphattn.bench.contenders.by_hand.window_blocks import of_band
from graphattn.bench.contenders.peers import (
    check_memory,
    compile_once,
    needs_compiler,
    only_on_a_cpu,
)

WIDEST = 64  # largest number of offsets; the compiled code grows with it


def compiled_slices(x: AttentionInputs) -> Tensor:
    """Compute RBF attention in a narrow window by compiled slices."""
    only_on_a_cpu(x.query.device)
    band = of_band(x)
    width = band.before + 1 + band.after
    if width > WIDEST:
        raise MissingError(f"it supports only windows of at most {WIDEST} tokens")
    needs_compiler(x.query.device)
    check_memory(float(x.query.shape[:-1].numel()) * width, "its weights", x.query)
    return SlicedWindows.apply(x.query, x.key, x.value, x.sigma, band.before, band.after)


class SlicedWindows(Function):
    """RBF attention in a window; the weights [N, H, W + 1] are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sigma: float,
        before: int,
        after: int,
    ) -> Tensor:
        out, weight = compile_once(attend)(query, key, value, sigma, before, after)
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.given = sigma, before, after
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        query, key, value, out, weight = ctx.saved_tensors
        sigma, before, after = ctx.given
        d_query, pull = compile_once(d_targets)(
            query, key, value, out, d_out, weight, sigma, before, after
        )
        d_key, d_value = compile_once(d_sources)(query, key, d_out, weight, pull, before, after)
        return d_query, d_key, d_value, None, None, None


def no_edge(tokens: int, before: int, after: int) -> Tensor:
    """Mark the places of windows beyond the ends of the sequence, [N, 1, W + 1]."""
    source = torch.arange(tokens)[:, None] + torch.arange(-before, after + 1)
    return ((source < 0) | (source >= tokens))[:, None]


# Place o of the window of target i is source i + o - before.


def attend(
    query: Tensor, key: Tensor, value: Tensor, sigma: float, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Compute outputs and weights."""
    N, width = len(query), before + 1 + after
    keys, values = (pad(t, (0, 0, 0, 0, before, after)) for t in (key, value))
    logits = torch.stack(
        [-(query - keys[o : o + N]).square().sum(-1) / (2 * sigma**2) for o in range(width)], -1
    )
    weight = logits.masked_fill(no_edge(N, before, after), -torch.inf).softmax(-1)
    return sum_of(weight[..., o, None] * values[o : o + N] for o in range(width)), weight


def d_targets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    d_out: Tensor,
    weight: Tensor,
    sigma: float,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the queries, and those of the logits divided by sigma^2."""
    N, width = len(query), before + 1 + after
    keys, values = (pad(t, (0, 0, 0, 0, before, after)) for t in (key, value))
    along = torch.stack([(values[o : o + N] * d_out).sum(-1) for o in range(width)], -1)
    pull = weight * (along - (out * d_out).sum(-1)[..., None]) / sigma**2
    return sum_of(pull[..., o, None] * (keys[o : o + N] - query) for o in range(width)), pull


def d_sources(
    query: Tensor, key: Tensor, d_out: Tensor, weight: Tensor, pull: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Compute d_key and d_value; source j is at place o of the window of target j - o + before."""
    N, width = len(key), before + 1 + after
    padded = (pad(t, (0, 0, 0, 0, after, before)) for t in (query, d_out, weight, pull))
    queries, d_outs, weights, pulls = padded
    seen = [slice(width - 1 - o, width - 1 - o + N) for o in range(width)]
    d_key = sum_of(pulls[s, :, o, None] * (queries[s] - key) for o, s in enumerate(seen))
    return d_key, sum_of(weights[s, :, o, None] * d_outs[s] for o, s in enumerate(seen))


def sum_of(parts: Any) -> Tensor:
    first, *others = parts
    for part in others:
        first = first + part
    return first
