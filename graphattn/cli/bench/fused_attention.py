"""Fused attention of others: SDPA by the name of its backend, FlexAttention, flash-attention.

Their layout is [B, H, N, D] (flash-attention's [B, N, H, D]); transposing copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphattn.cli.bench.contenders import Run, afford, installed
from graphattn.cli.bench.inputs import AttentionInputs, MissingError
from graphattn.graphs.composites import Union
from graphattn.graphs.structure import Band, GlobalTokens, Structure

Contains = Callable[[Tensor, Tensor], Tensor]  # whether (target, source) are edges


def sdpa(backend: SDPBackend, *, is_causal: bool = False) -> Run:
    """Dense dot-product SDPA by one backend, over all pairs or over those of the past."""

    def run(x: AttentionInputs) -> Tensor:
        refuse_cudnn_on_a_cpu(backend, x.query.device)
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(*by_head(x), is_causal=is_causal)
        return by_token(out, x)

    return run


def refuse_cudnn_on_a_cpu(backend: SDPBackend, device: torch.device) -> None:
    """It would warn five times first."""
    if backend is SDPBackend.CUDNN_ATTENTION and device.type == "cpu":
        raise MissingError("cuDNN needs a GPU")


def by_head(x: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, N, D]; B = 1 where there is no batch (or SDPA takes no fused kernel on a CPU)."""
    q, k, v = (t.transpose(-3, -2) for t in (x.query, x.key, x.value))
    return (q, k, v) if q.dim() == 4 else (q[None], k[None], v[None])


def by_token(out: Tensor, x: AttentionInputs) -> Tensor:
    """The layout of the inputs again."""
    return out.transpose(-3, -2).reshape(x.query.shape)


def masked_sdpa(backend: SDPBackend) -> Run:
    """Dense dot-product SDPA with the graph as an additive mask, which is made once.

    On a CPU by the one fused kernel there is, flash: on a GPU that takes no masks.
    """

    def run(x: AttentionInputs) -> Tensor:
        on_cpu = x.query.device.type == "cpu"
        refuse_cudnn_on_a_cpu(backend, x.query.device)
        if "additive_mask" not in x.prepared:
            mask = dense_mask(x)
            zero = torch.zeros(mask.shape, dtype=x.query.dtype, device=mask.device)
            x.prepared["additive_mask"] = zero.masked_fill_(~mask, -torch.inf)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if on_cpu else backend):
            out = functional.scaled_dot_product_attention(
                *by_head(x), attn_mask=x.prepared["additive_mask"]
            )
        return by_token(out, x)

    return run


def dense_mask(x: AttentionInputs) -> Tensor:
    """[N, M], True where there is an edge."""
    afford(float(x.graph.num_targets) * x.graph.num_sources, "its mask", x.query)
    return x.graph.to_mask()


# FlexAttention: the mask is the graph's own, its blocks are listed once per case.


def flex_dot(x: AttentionInputs) -> Tensor:
    """FlexAttention of the dot product."""
    return by_token(on_gpu(x, dot_product)(*by_head(x), block_mask(x)), x)


def flex_rbf(x: AttentionInputs) -> Tensor:
    """FlexAttention of the Gaussian kernel, as a dot product with a bias of the keys."""
    query, key, value = by_head(x)
    # Compiled by itself: the gradient of a bias that is computed in the same graph as the
    # attention may get lost without a word (pytorch/pytorch#162228).
    bias = on_gpu(x, key_bias)(key, x.sigma)
    return by_token(on_gpu(x, biased)(query, key, value, bias, block_mask(x), x.sigma), x)


def dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """With the scale 1 / sqrt(D)."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, block_mask=mask)


def key_bias(key: Tensor, sigma: float) -> Tensor:
    """-|k|^2 / (2 sigma^2), [B, H, N]; what is missing to the distance, |q|^2, cancels."""
    return -key.float().square().sum(-1) / (2 * sigma**2)


def biased(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Any, sigma: float
) -> Tensor:
    """q . k / sigma^2 and the bias of the key."""
    from torch.nn.attention.flex_attention import flex_attention

    def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, j]

    return flex_attention(
        query, key, value, score_mod=with_bias, block_mask=mask, scale=1 / sigma**2
    )


def on_gpu(x: AttentionInputs, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled: what FlexAttention does otherwise is no fused attention."""
    if x.query.device.type != "cuda":
        raise MissingError("FlexAttention has no backward pass on a CPU")
    return compiled(attend)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For the sizes of one case, as everything else here."""
    return torch.compile(function, dynamic=False)


def block_mask(x: AttentionInputs) -> Any:
    """The blocks of the graph's own mask, listed once; None where every pair is an edge."""
    N, M = x.graph.num_targets, x.graph.num_sources
    if x.graph.num_edges == N * M:
        return None
    if "block_mask" not in x.prepared:
        from torch.nn.attention.flex_attention import create_block_mask

        structure = x.graph.structure
        contains = looked_up(dense_mask(x)) if structure is None else elementwise(structure)

        def is_edge(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return contains(i, j)

        device = x.query.device
        # Uncompiled it holds all pairs: 34 GB of distances for 65,536 tokens.
        create = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
        x.prepared["block_mask"] = create(is_edge, None, None, N, M, device=device)
    return x.prepared["block_mask"]


def looked_up(mask: Tensor) -> Contains:
    """Of a list of edges: its dense mask."""
    return lambda i, j: mask[i, j]


def elementwise(structure: Structure) -> Contains:
    """`structure.contains` in arithmetic that FlexAttention compiles, which searches no lists."""
    match structure:
        case Union(parts=parts):
            tests = [elementwise(part) for part in parts]
            return lambda i, j: reduce(or_, [test(i, j) for test in tests])
        case GlobalTokens(tokens=tokens):
            return lambda i, j: reduce(or_, [(i == token) | (j == token) for token in tokens])
    return structure.contains


# flash-attention


def flash_window(x: AttentionInputs) -> Tensor:
    """The package flash_attn, whose windows are those of a band: no mask, nothing to list."""
    attend = installed("flash_attn").flash_attn_func
    structure = x.graph.structure
    if x.graph.num_edges == x.graph.num_targets * x.graph.num_sources:
        window = (-1, -1)
    elif isinstance(structure, Band) and structure.self_loops and structure.dilation == 1:
        window = (structure.before, structure.after)
    else:
        raise MissingError("flash-attention has windows only")
    q, k, v = (t if t.dim() == 4 else t[None] for t in (x.query, x.key, x.value))
    return attend(q, k, v, window_size=window).reshape(x.query.shape)
