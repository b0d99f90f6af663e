"""Compiled FlexAttention with the graph as its mask.

The blocks of the mask are listed once per case. FlexAttention has only a forward pass on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from graphattn.bench.cases.inputs import AttentionInputs, ForwardOnlyError, MissingError
from graphattn.bench.contenders.fused_attention import by_head, by_token, dense_mask
from graphattn.bench.contenders.peers import compile_once, needs_compiler
from graphattn.graphs.structures.composites import Union
from graphattn.graphs.structures.structure import Band, GlobalTokens, GraphStructure

Contains = Callable[..., Tensor]  # tests (target, source), or (batch, head, target, source)
ROWS = 256  # targets in a chunk: 134 MB of keys for 8 heads of 64, windows of 256
FEW_SOURCES = 64  # blocks are smaller if targets have fewer sources (see `block_size`)


def flex_dot(x: AttentionInputs) -> Tensor:
    return by_token(compile_once(dot_product)(*operands(x), block_mask(x)), x)


def flex_rbf(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by FlexAttention, as a dot product plus a bias for every key."""
    return by_distance(x, block_mask)


def flex_kept(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by FlexAttention over top-k sources that were chosen before."""
    return by_distance(x, kept_mask)


def by_distance(x: AttentionInputs, mask: Callable[[AttentionInputs], Any]) -> Tensor:
    """Compute RBF attention by FlexAttention with the mask that `mask` makes."""
    query, key, value = operands(x)
    # The bias is compiled separately. If the compiled attention also computed it, the gradient of
    # the bias could be lost without a warning (pytorch/pytorch#162228).
    bias = compile_once(key_bias)(key, x.sigma)
    return by_token(compile_once(biased)(query, key, value, bias, mask(x), x.sigma), x)


def operands(x: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as [B, H, N, D]; on a CPU FlexAttention takes no gradients."""
    query, key, value = by_head(x)
    if x.query.device.type == "cuda":
        return query, key, value
    if torch.is_grad_enabled():
        raise ForwardOnlyError("FlexAttention has no backward pass on a CPU")
    needs_compiler(x.query.device)
    return query.detach(), key.detach(), value.detach()


def dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, block_mask=mask)


def key_bias(key: Tensor, sigma: float) -> Tensor:
    """Compute -|k|^2 / (2 sigma^2), [B, H, N]; the softmax of a row cancels -|q|^2."""
    return -key.float().square().sum(-1) / (2 * sigma**2)


def biased(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Any, sigma: float
) -> Tensor:
    """Compute attention with the logits q . k / sigma^2 plus the bias of the key."""
    from torch.nn.attention.flex_attention import flex_attention

    def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, j]

    return flex_attention(
        query, key, value, score_mod=with_bias, block_mask=mask, scale=1 / sigma**2
    )


# Masks.


def block_mask(x: AttentionInputs) -> Any:
    """Return the block mask of the graph, which is made once; None if every pair is an edge."""
    N, M = x.graph.num_targets, x.graph.num_sources
    if x.graph.num_edges == N * M:
        return None
    if "block_mask" not in x.prepared:
        structure = x.graph.structure
        contains = looked_up(dense_mask(x)) if structure is None else elementwise(structure)

        def is_edge(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return contains(i, j)

        if x.query.device.type == "cuda":
            x.prepared["block_mask"] = list_blocks(is_edge, None, None, x)
        else:
            source, target = x.graph.edge_index
            size = block_size(x)
            x.prepared["block_mask"] = mask_of_counts(
                edges_in_blocks(target, source, x, size)[None, None], is_edge, x, size
            )
    return x.prepared["block_mask"]


def list_blocks(mask: Contains, batch: int | None, heads: int | None, x: AttentionInputs) -> Any:
    """List the blocks that contain a pair of `mask`, per sequence and head if these are given."""
    from torch.nn.attention.flex_attention import create_block_mask

    # The uncompiled function stores all pairs: 34 GB of distances for 65,536 tokens.
    create = compile_once(create_block_mask)
    N, M = x.graph.num_targets, x.graph.num_sources
    return create(mask, batch, heads, N, M, device=x.query.device)


def block_size(x: AttentionInputs) -> int:
    """Return the fastest block size on a CPU among 128, 64 and 32.

    FlexAttention's default is 128. These times were measured with 4,096 tokens, 8 heads of 64 and
    one thread, for blocks of 128, 64 and 32: 98, 69 and 90 ms for a causal window of 256 tokens;
    80, 59 and 33 ms for a window of 17.
    """
    return 32 if x.graph.num_edges < FEW_SOURCES * x.graph.num_targets else 64


def edges_in_blocks(target: Tensor, source: Tensor, x: AttentionInputs, size: int) -> Tensor:
    """Count the edges in every block: [rows of blocks, columns of blocks]."""
    rows, columns = (-(-n // size) for n in (x.graph.num_targets, x.graph.num_sources))
    block = target // size * columns + source // size
    return torch.bincount(block, minlength=rows * columns).view(rows, columns)


def mask_of_counts(counts: Tensor, mask: Contains, x: AttentionInputs, size: int) -> Any:
    """Make a block mask from the number of pairs of `mask` in every block, [B, H, R, C]."""
    from torch.nn.attention.flex_attention import BlockMask

    full = counts == size * size  # FlexAttention does not call the mask for these blocks

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1).int(), order.int()

    return BlockMask.from_kv_blocks(
        *listed((counts > 0) & ~full),
        *listed(full),
        BLOCK_SIZE=size,
        mask_mod=mask,
        seq_lengths=(x.graph.num_targets, x.graph.num_sources),
    )


def kept_mask(x: AttentionInputs) -> Any:
    """Return the block mask of a window in which every target sees only its top-k sources."""
    if "kept_mask" not in x.prepared:
        band, kept = x.graph.structure, kept_in_window(x)
        assert isinstance(band, Band)
        B, H, _, width = kept.shape

        def is_selected(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            place = j - i + band.before
            return (place >= 0) & (place < width) & kept[b, h, i, place.clamp(0, width - 1)]

        if x.query.device.type == "cuda":
            x.prepared["kept_mask"] = list_blocks(is_selected, B, H, x)
        else:
            size, per_head = block_size(x), []
            for of_head in kept.flatten(0, 1):
                target, place = of_head.nonzero().T
                source = target + place - band.before
                per_head.append(edges_in_blocks(target, source, x, size))
            counts = torch.stack(per_head).unflatten(0, (B, H))
            x.prepared["kept_mask"] = mask_of_counts(counts, is_selected, x, size)
    return x.prepared["kept_mask"]


@torch.no_grad()
def kept_in_window(x: AttentionInputs) -> Tensor:
    """Mark the top-k sources in the window of every target, the earlier of equals: [B, H, N, W]."""
    band = x.graph.structure
    if not isinstance(band, Band) or band.dilation != 1:
        raise MissingError("it supports top-k only in windows")
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
    return lambda i, j: mask[i, j]


def elementwise(structure: GraphStructure) -> Contains:
    """Return a test of pairs equal to `structure.contains` that FlexAttention can compile."""
    match structure:
        case Union(parts=parts):
            tests = [elementwise(part) for part in parts]
            return lambda i, j: reduce(or_, [test(i, j) for test in tests])
        case GlobalTokens(tokens=tokens):
            return lambda i, j: reduce(or_, [(i == token) | (j == token) for token in tokens])
    return structure.contains
