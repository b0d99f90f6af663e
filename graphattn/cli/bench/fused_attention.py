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

Contains = Callable[..., Tensor]  # whether (target, source) are edges, or of (batch, head) too
ROWS = 256  # of targets whose windows of keys are gathered at a time: 134 MB for 8 heads of 64


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
    return by_distance(x, block_mask)


def flex_kept(x: AttentionInputs) -> Tensor:
    """The same over the top-k sources of every target, which are chosen once, before the clock."""
    return by_distance(x, kept_mask)


def by_distance(x: AttentionInputs, mask: Callable[[AttentionInputs], Any]) -> Tensor:
    """FlexAttention of the Gaussian kernel with a mask of that kind."""
    query, key, value = by_head(x)
    # Compiled by itself: the gradient of a bias that is computed in the same graph as the
    # attention may get lost without a word (pytorch/pytorch#162228).
    bias = on_gpu(x, key_bias)(key, x.sigma)
    return by_token(on_gpu(x, biased)(query, key, value, bias, mask(x), x.sigma), x)


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
        structure = x.graph.structure
        contains = looked_up(dense_mask(x)) if structure is None else elementwise(structure)

        def is_edge(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return contains(i, j)

        x.prepared["block_mask"] = list_blocks(is_edge, None, None, x)
    return x.prepared["block_mask"]


def list_blocks(mask: Contains, batch: int | None, heads: int | None, x: AttentionInputs) -> Any:
    """The blocks with a pair in `mask`, of each of so many sequences and heads; None: of all."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = x.query.device
    # Uncompiled it holds all pairs: 34 GB of distances for 65,536 tokens.
    create = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(mask, batch, heads, x.graph.num_targets, x.graph.num_sources, device=device)


def kept_mask(x: AttentionInputs) -> Any:
    """The blocks of a window in which every target keeps its top-k sources."""
    if "kept_mask" not in x.prepared:
        band, kept = x.graph.structure, kept_in_window(x)
        assert isinstance(band, Band)
        B, H, _, width = kept.shape

        def is_kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            place = j - i + band.before
            return (place >= 0) & (place < width) & kept[b, h, i, place.clamp(0, width - 1)]

        x.prepared["kept_mask"] = list_blocks(is_kept, B, H, x)
    return x.prepared["kept_mask"]


@torch.no_grad()
def kept_in_window(x: AttentionInputs) -> Tensor:
    """bool [B, H, N, window]: which sources of its window a target keeps, by distance in float32.

    Of equally near ones the first. Sources stand in their order, some rows of targets at a time.
    """
    band = x.graph.structure
    if not isinstance(band, Band) or band.dilation != 1:
        raise MissingError("its top-k sources are looked for in windows only")
    query, key, _ = (t.float() for t in by_head(x))
    B, H, N, _ = query.shape
    offsets = torch.arange(-band.before, band.after + 1, device=query.device)
    kept = torch.zeros(B, H, N, len(offsets), dtype=torch.bool, device=query.device)
    for start in range(0, N, ROWS):
        target = torch.arange(start, min(start + ROWS, N), device=query.device)[:, None]
        source = target + offsets
        is_edge = (source >= 0) & (source < key.shape[2])
        source = source.clamp(0, key.shape[2] - 1)
        is_edge &= band.contains(target.expand_as(source), source)
        nearness = -(query[:, :, target] - key[:, :, source]).square().sum(-1)
        nearness = nearness.masked_fill(~is_edge, -torch.inf)
        nearest = nearness.sort(dim=-1, descending=True, stable=True).indices[..., : x.top_k]
        rows = kept[:, :, start : start + ROWS]
        rows.scatter_(-1, nearest, True)
        rows &= is_edge
    return kept


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
