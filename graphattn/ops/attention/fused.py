"""Attention over complete and causal graphs by torch's `scaled_dot_product_attention` (SDPA).

Torch chooses the engine: cuDNN, flash or memory-efficient attention on a GPU, flash on a CPU. It
knows scaled dot products. The logit of a Gaussian kernel is q . k - |k|^2 / 2 but for a number per
row, of queries and keys in units of sigma, so the half squares are more features of the keys,
beside ones in the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.structure import Band, Complete, GraphStructure
from graphattn.kernels.shared.launch import WIDEST, capability
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.score import WIDE, DotProduct
from graphattn.ops.inputs import compute_dtype, gradients_by_autograd, repeat_heads

# The feature of queries that half squares are multiplied by: half squares of up to 64 times the
# largest number of float16 (65,504) are finite in it.
UNIT = 64.0
# From how many targets and sources on SDPA was measured to be faster than the kernels of "triton"
# over a complete graph, by the compute capability of the GPU and the score. There is no entry,
# because no record has the two side by side: docs/benchmarks/cuda-h200.json has Gaussian kernels by
# "triton" beside dot products by SDPA.
FEWEST: dict[tuple[tuple[int, int], str], int] = {}


def why_not(call: AttentionCall) -> str | None:
    """The reason why SDPA cannot run a call; None if it can."""
    options = {
        "top_k": call.top_k is not None,
        "edge_bias": call.bias is not None,
        "softcap": call.softcap is not None,
        "dropout of edges": call.dropout > 0,
        "mask of valid tokens": call.valid != (None, None),
        "log-sums, which return_lse, eps and a sink need": call.needs_log_sums,
    }
    for name, is_given in options.items():
        if is_given:
            return f"torch's fused attention has no {name}"
    if _sequences(call.graph.structure) is None:
        return "it takes complete and causal graphs, and batches of equal ones, not this graph"
    if call.query.device.type != "cpu":  # where torch would store the logits of all pairs
        if call.query.dtype is torch.float64:
            return "torch's fused attention has float64 on a CPU alone"
        if (width := _width(call)) > WIDEST:
            return f"torch's fused attention takes at most {WIDEST} features, not {width}"
    return None


def is_fastest(call: AttentionCall) -> bool:
    """Whether "auto" may take SDPA on this GPU: where it was measured to be the fastest.

    Never over causal graphs: there it can pass NaN of a token to earlier tokens.
    """
    if not FEWEST or call.query.device.type != "cuda":
        return False
    of_device, sequences = capability(call.query.device), _sequences(call.graph.structure)
    if of_device is None or sequences is None or sequences[1]:
        return False
    fewest = FEWEST.get((of_device, str(call.score.kernel)))
    tokens = min(call.query.shape[-3], call.key.shape[-3]) // sequences[0]
    return fewest is not None and tokens >= fewest


def attend(call: AttentionCall) -> Tensor:
    """The output [*, N, H, Dv], in the dtype of the query."""
    sequences = _sequences(call.graph.structure)
    assert sequences is not None
    count, is_causal = sequences
    heads, features = call.query.shape[-2], call.value.shape[-1]
    batch = call.query.shape[:-3].numel() * count
    query, key, value = (
        x.reshape(batch, x.shape[-3] // count, *x.shape[-2:])
        for x in (call.query, call.key, call.value)
    )
    scale: float | None = 1.0
    if call.score.kernel == "rbf":
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        query, key = _with_half_squares(query, key, call.scale[:, None], is_causal)
    else:
        assert isinstance(call.score, DotProduct)
        scale = call.score.number
        if scale is None or scale <= 0:  # engines look for the largest product before they scale it
            query, scale = (query * call.scale[:, None]).to(key.dtype), 1.0
    width = _width(call)
    query, key, value = (_widened(x, width).transpose(1, 2) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=bool(key.shape[1] < heads)
    )
    return out.transpose(1, 2)[..., :features].reshape(*call.query.shape[:-1], features)


def _sequences(structure: GraphStructure | None) -> tuple[int, bool] | None:
    """The number of sequences, which are all equal, and whether they are causal or complete.

    The result is None for other graphs.
    """
    parts = structure.parts if isinstance(structure, Parts) else (structure,)
    if not parts or not all(part == parts[0] for part in parts[1:]):
        return None
    match parts[0]:
        case Complete():
            return len(parts), False
        case Band(num_tokens, before, 0, dilation=1, self_loops=True) if num_tokens <= before + 1:
            return len(parts), True
    return None


def _width(call: AttentionCall) -> int:
    """The features of all operands: engines want them equal, and a multiple of 8."""
    features = call.query.shape[-1]
    if call.score.kernel == "rbf":
        features += _num_pieces(call.query.dtype)
    return 8 * max(-(-max(features, call.value.shape[-1]) // 8), 1)


def _widened(x: Tensor, width: int) -> Tensor:
    """x with zeros added to its features, which lie side by side: engines read them as if so."""
    if x.shape[-1] < width:
        return functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _num_pieces(dtype: torch.dtype) -> int:
    """How many numbers of a dtype add up to one of its compute dtype."""
    return 1 if dtype in WIDE else 3


def _with_half_squares(
    query: Tensor, key: Tensor, scale: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys whose dot products are the logits of a Gaussian kernel; see above.

    Both are relative to a centre that all rows see, so that no large numbers cancel. Both are
    rounded before half squares are computed from them, so the logits are those of distances between
    rounded points, and equal points have distance 0. `scale` is [H, 1].
    """
    dtype, wide = key.dtype, compute_dtype(key.dtype)
    centre = key.detach().to(wide)
    count = max(key.shape[1], 1)  # the mean of no keys would be NaN
    centre = centre[:, :1] if is_causal else centre.sum(1, keepdim=True) / count
    root = scale.sqrt()
    query, key = (((x.to(wide) - centre) * root).to(dtype) for x in (query, key))
    half = key.to(wide).square().sum(-1, keepdim=True) / (-2 * UNIT)
    rest, pieces = half.detach(), []
    for _ in range(_num_pieces(dtype)):
        pieces.append(rest.to(dtype))
        rest = rest - pieces[-1].to(wide)
    pieces[0] = pieces[0] + (half - half.detach()).to(dtype)  # adds 0, with the gradient
    units = query.new_full((*query.shape[:-1], len(pieces)), UNIT)
    return torch.cat([query, units], dim=-1), torch.cat([key, *pieces], dim=-1)


def differentiable_again(
    out: Tensor, tensors: tuple[Tensor, ...], again: Callable[..., Tensor]
) -> Tensor:
    """The output, which can be differentiated more than once.

    SDPA has no second derivatives. If its gradient is to be differentiated, it is computed by
    `again`, a function of `tensors` that can be.
    """
    result: Tensor = _Again.apply(again, out, *tensors)
    return result


class _Again(torch.autograd.Function):
    """Passes the gradient on to `out`, or with ``create_graph=True`` to the tensors behind it."""

    @staticmethod
    def forward(ctx: Any, again: Callable[..., Tensor], out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, d_out, *[None] * len(tensors)
        needed = ctx.needs_input_grad[2:]
        again = gradients_by_autograd(lambda *xs: (ctx.again(*xs),), tensors, needed, (d_out,))
        return None, None, *again
