"""Hand-written, compiled attention in a narrow window: it reads slices and gathers nothing.

The code has two forms: one slice per offset, or one view with all offsets (`unfold`). The backward
pass of `unfold` by autograd adds overlapping parts atomically. Both forms therefore have a
hand-written backward pass, which uses that the targets of a source are a window, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from graphattn.bench.cases.inputs import AttentionInputs, MissingError
from graphattn.bench.contenders.by_hand.window_blocks import of_band
from graphattn.bench.contenders.peers import check_memory, needs_compiler, only_on_a_cpu

WIDEST = 64  # largest number of offsets; the compiled code grows with it


class Form(NamedTuple):
    """One form of the computation: the three functions that are compiled."""

    attend: Callable[..., Any]
    d_targets: Callable[..., Any]
    d_sources: Callable[..., Any]


def compiled_windows(form: Form) -> Callable[[AttentionInputs], Tensor]:
    """Return a run of RBF attention in one of the two forms."""

    def run(x: AttentionInputs) -> Tensor:
        only_on_a_cpu(x.query.device)
        band = of_band(x)
        width = band.before + 1 + band.after
        if width > WIDEST:
            raise MissingError(f"it supports only windows of at most {WIDEST} tokens")
        needs_compiler(x.query.device)
        check_memory(float(x.query.shape[:-1].numel()) * width, "its weights", x.query)
        return SlicedWindows.apply(x.query, x.key, x.value, x.sigma, band.before, band.after, form)

    return run


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
        form: Form,
    ) -> Tensor:
        """[N, H, D]."""
        out, weight = compile_once(form.attend)(query, key, value, sigma, before, after)
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.given = sigma, before, after, form
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        """Return the gradients of query, key and value."""
        query, key, value, out, weight = ctx.saved_tensors
        sigma, before, after, form = ctx.given
        d_query, pull = compile_once(form.d_targets)(
            query, key, value, out, d_out, weight, sigma, before, after
        )
        d_key, d_value = compile_once(form.d_sources)(
            query, key, d_out, weight, pull, before, after
        )
        return d_query, d_key, d_value, None, None, None, None


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once for the sizes of one case."""
    return torch.compile(function, dynamic=False)


def no_edge(tokens: int, before: int, after: int) -> Tensor:
    """Mark the places of windows beyond the ends of the sequence, [N, 1, W + 1]."""
    source = torch.arange(tokens)[:, None] + torch.arange(-before, after + 1)
    return ((source < 0) | (source >= tokens))[:, None]


# One slice per offset. Place o of the window of target i is source i + o - before.


def attend_by_slices(
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


def d_targets_by_slices(
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


def d_sources_by_slices(
    query: Tensor, key: Tensor, d_out: Tensor, weight: Tensor, pull: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the keys and of the values.

    Source j is at place o of the window of target j - o + before.
    """
    N, width = len(key), before + 1 + after
    padded = (pad(t, (0, 0, 0, 0, after, before)) for t in (query, d_out, weight, pull))
    queries, d_outs, weights, pulls = padded
    seen = [slice(width - 1 - o, width - 1 - o + N) for o in range(width)]
    d_key = sum_of(pulls[s, :, o, None] * (queries[s] - key) for o, s in enumerate(seen))
    return d_key, sum_of(weights[s, :, o, None] * d_outs[s] for o, s in enumerate(seen))


def sum_of(parts: Any) -> Tensor:
    """Add up tensors."""
    first, *others = parts
    for part in others:
        first = first + part
    return first


# One view of all windows, [N, H, D, W + 1].


def attend_by_unfold(
    query: Tensor, key: Tensor, value: Tensor, sigma: float, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Compute outputs and weights."""
    keys, values = (windows(t, before, after) for t in (key, value))
    logits = -(query[..., None] - keys).square().sum(-2) / (2 * sigma**2)
    weight = logits.masked_fill(no_edge(len(query), before, after), -torch.inf).softmax(-1)
    return (weight[..., None, :] * values).sum(-1), weight


def d_targets_by_unfold(
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
    keys, values = (windows(t, before, after) for t in (key, value))
    along = (values * d_out[..., None]).sum(-2)
    pull = weight * (along - (out * d_out).sum(-1)[..., None]) / sigma**2
    return (pull[..., None, :] * (keys - query[..., None])).sum(-1), pull


def d_sources_by_unfold(
    query: Tensor, key: Tensor, d_out: Tensor, weight: Tensor, pull: Tensor, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the keys and of the values.

    The targets that see a source are a window. The source is at the last place of the window of the
    first of these targets.
    """
    queries, d_outs = (windows(t, after, before) for t in (query, d_out))
    weights, pulls = (
        windows(t, after, before).flip(-1).diagonal(dim1=-2, dim2=-1).flip(-1)
        for t in (weight, pull)
    )
    d_key = (pulls[..., None, :] * (queries - key[..., None])).sum(-1)
    return d_key, (weights[..., None, :] * d_outs).sum(-1)


def windows(x: Tensor, before: int, after: int) -> Tensor:
    """Return all windows as a view of the padded tensor, [N, *] -> [N, *, W + 1]."""
    return pad(x, (0, 0, 0, 0, before, after)).unfold(0, before + 1 + after, 1)


SLICES = Form(attend_by_slices, d_targets_by_slices, d_sources_by_slices)
UNFOLD = Form(attend_by_unfold, d_targets_by_unfold, d_sources_by_unfold)
