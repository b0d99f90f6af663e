"""FlexAttention, compiled: the mask is the graph's own, its blocks are listed once per case.

On a CPU it has a forward pass only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from graphattn.bench.cases.inputs import AttentionInputs, ForwardOnlyError, MissingError
from graphattn.bench.contenders.fused_attention import by_head, by_token, dense_mask
from graphattn.bench.contenders.peers import needs_compiler
from graphattn.graphs.structures.composites import Union
from graphattn.graphs.structures.structure import Band, GlobalTokens, GraphStructure

Contains = Callable[..., Tensor]  # whether (target, source) are edges, or of (batch, head) too
ROWS = 256  # of targets whose windows of keys are gathered at a time: 134 MB for 8 heads of 64
FEW_SOURCES = 64  # fewer per target than these are found in smaller blocks (see `block_size`)


def flex_dot(x: AttentionInputs) -> Tensor:
    """FlexAttention of the dot product."""
    return by_token(compiled(dot_product)(*operands(x), block_mask(x)), x)


def flex_rbf(x: AttentionInputs) -> Tensor:
    """FlexAttention of the Gaussian kernel, as a dot product with a bias of the keys."""
    return by_distance(x, block_mask)


def flex_kept(x: AttentionInputs) -> Tensor:
    """Attend over the top-k sources of every target, which are chosen once, before the clock."""
    return by_distance(x, kept_mask)


def by_distance(x: AttentionInputs, mask: Callable[[AttentionInputs], Any]) -> Tensor:
    """FlexAttention of the Gaussian kernel with a mask of that kind."""
    query, key, value = operands(x)
    # Compiled by itself: the gradient of a bias that is computed in the same graph as the
    # attention may get lost without a word (pytorch/pytorch#162228).
    bias = compiled(key_bias)(key, x.sigma)
    return by_token(compiled(biased)(query, key, value, bias, mask(x), x.sigma), x)


def operands(x: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, N, D]; on a CPU tensors that need no gradients, as FlexAttention wants them there."""
    query, key, value = by_head(x)
    if x.query.device.type == "cuda":
        return query, key, value
    if torch.is_grad_enabled():
        raise ForwardOnlyError("FlexAttention has no backward pass on a CPU")
    needs_compiler(x.query.device)
    return query.detach(), key.detach(), value.detach()


def dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attend by dot products with the scale 1 / sqrt(D)."""
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


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the sizes of one case: FlexAttention is not fused without that."""
    return torch.compile(function, dynamic=False)


# Masks.


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
    """The blocks with a pair in `mask`, of each of so many sequences and heads; None: of all."""
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled it holds all pairs: 34 GB of distances for 65,536 tokens.
    create = compiled(create_block_mask)
    N, M = x.graph.num_targets, x.graph.num_sources
    return create(mask, batch, heads, N, M, device=x.query.device)


def block_size(x: AttentionInputs) -> int:
    """Return the fastest block size on a CPU, of 128 (FlexAttention's own choice), 64 and 32.

    Measured: 4,096 tokens, 8 heads of 64, one thread. 98, 69 and 90 ms for a causal window of 256
    tokens, 80, 59 and 33 ms for a window of 17.
    """
    return 32 if x.graph.num_edges < FEW_SOURCES * x.graph.num_targets else 64


def edges_in_blocks(target: Tensor, source: Tensor, x: AttentionInputs, size: int) -> Tensor:
    """[rows of blocks, columns of blocks]: how many edges lie in each."""
    rows, columns = (-(-n // size) for n in (x.graph.num_targets, x.graph.num_sources))
    block = target // size * columns + source // size
    return torch.bincount(block, minlength=rows * columns).view(rows, columns)


def mask_of_counts(counts: Tensor, mask: Contains, x: AttentionInputs, size: int) -> Any:
    """A mask of blocks [B, H, rows, columns] with so many pairs of `mask`: no pair is looked at."""
    from torch.nn.attention.flex_attention import BlockMask

    full = counts == size * size  # needs no mask

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
    """The blocks of a window in which every target keeps its top-k sources."""
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
    """bool [B, H, N, window]: which sources of its window a target keeps, by distance in float32.

    Of equally near ones the first. Sources stand in their order, some rows of targets at a time.
    """
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
    """Return a test of pairs by the dense mask of a list of edges."""
    return lambda i, j: mask[i, j]


def elementwise(structure: GraphStructure) -> Contains:
    """`structure.contains` in arithmetic that FlexAttention compiles, which searches no lists."""
    match structure:
        case Union(parts=parts):
            tests = [elementwise(part) for part in parts]
            return lambda i, j: reduce(or_, [test(i, j) for test in tests])
        case GlobalTokens(tokens=tokens):
            return lambda i, j: reduce(or_, [(i == token) | (j == token) for token in tokens])
    return structure.contains
