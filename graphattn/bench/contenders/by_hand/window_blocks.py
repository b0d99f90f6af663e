"""Hand-written attention in a window: each block of queries attends to the keys of its windows.

The keys of a block are a view of the padded keys, so nothing is copied before a product. A block of
B queries computes B + W logits per query, and the mask hides about B of them. The hidden share of
the work, B / (B + W), is small for small blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from graphattn.bench.cases.inputs import AttentionInputs, MissingError
from graphattn.bench.contenders.peers import check_memory, only_on_a_cpu
from graphattn.graphs.structures.structure import Band

# Default number of tokens of a block. For 64, 128 and 256, SDPA took 63, 61 and 73 ms forward
# and 194, 227 and 251 ms with the backward pass: 4,096 tokens, a causal window of 256, 8 heads of
# 64, one thread.
BLOCK = 64


class WindowBlocks(NamedTuple):
    """A sequence cut into blocks, and the masks of the blocks; made once per case."""

    band: Band
    number: int
    size: int
    is_outside: Tensor  # [blocks, 1, B, B + W]: pairs that are no edge
    additive: Tensor  # the same mask as 0 and -inf


def of_band(x: AttentionInputs) -> Band:
    """Return the band of the graph; raise a MissingError if the graph is no window."""
    band = x.graph.structure
    if not isinstance(band, Band) or not band.self_loops or band.dilation != 1:
        raise MissingError("it supports only windows whose tokens see themselves")
    if x.query.dim() != 3:
        raise MissingError("it supports only one sequence")
    return band


def blocks_of(x: AttentionInputs) -> WindowBlocks:
    return x.once("blocks", lambda: cut(of_band(x), x))


def cut(
    band: Band, x: AttentionInputs, size: int = BLOCK, left_out: Tensor | None = None
) -> WindowBlocks:
    """Cut the windows of all tokens into blocks, without the tokens `left_out` as sources."""
    N = x.graph.num_targets
    count = -(-N // size)
    target = torch.arange(count * size).view(count, size, 1)
    start = target[:, :1] - band.before
    source = start + torch.arange(size + band.before + band.after)
    is_edge = (source >= target - band.before) & (source <= target + band.after)
    is_edge &= (source >= 0) & (source < N)
    if left_out is not None:
        is_edge &= ~torch.isin(source, left_out)
        is_edge |= torch.isin(target, left_out)  # no empty rows: these would give NaN
    is_edge |= target >= N  # no empty rows in the padding of the last block either
    outside = ~is_edge[:, None]
    additive = torch.zeros(outside.shape, dtype=x.query.dtype)
    return WindowBlocks(band, count, size, outside, additive.masked_fill_(outside, -torch.inf))


def operands(query: Tensor, key: Tensor, value: Tensor, blocks: WindowBlocks) -> tuple[Tensor, ...]:
    """Return queries [blocks, H, B, D], and keys and values [blocks, H, B + W, D]."""
    keys, values = (looked_at(t, blocks).mT for t in (key, value))
    return in_blocks(query, blocks), keys, values


def in_blocks(x: Tensor, blocks: WindowBlocks) -> Tensor:
    """Cut tokens into blocks, [N, H, *] -> [blocks, H, B, *], with zeros beyond the end."""
    filling = blocks.number * blocks.size - len(x)
    filled = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, filling)) if filling else x
    return filled.unflatten(0, (blocks.number, blocks.size)).transpose(1, 2)


def looked_at(of_keys: Tensor, blocks: WindowBlocks) -> Tensor:
    """Return the keys of every block as a view of the padded keys, [N, *] -> [blocks, *, B + W]."""
    before, after = blocks.band.before, blocks.band.after
    last = blocks.number * blocks.size - len(of_keys)
    around = (0, 0) * (of_keys.dim() - 1) + (before, after + last)
    return functional.pad(of_keys, around).unfold(0, blocks.size + before + after, blocks.size)


def by_token(out: Tensor, tokens: int) -> Tensor:
    """Join the blocks of an output, [blocks, H, B, *] -> [N, H, *]."""
    return out.transpose(1, 2).flatten(0, 1)[:tokens]


def blocks_sdpa(x: AttentionInputs) -> Tensor:
    """Compute dot-product attention by one call of SDPA, with the blocks as its batch."""
    only_on_a_cpu(x.query.device)
    blocks = blocks_of(x)
    query, key, value = operands(x.query, x.key, x.value, blocks)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=blocks.additive)
    return by_token(out, len(x.query))


def largest_by_topk(logits: Tensor, k: int) -> Tensor:
    """Find the k-th largest number of every row; unsorted, in a third of the time."""
    return logits.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def largest_by_numpy(logits: Tensor, k: int) -> Tensor:
    """Find the k-th largest number of every row with NumPy, which sorts in vector registers."""
    smaller = logits.shape[-1] - k
    return torch.from_numpy(numpy.sort(logits.numpy(), axis=-1)[..., smaller : smaller + 1])


def blocks_top_k(select: Callable[[Tensor, int], Tensor]) -> Callable[[AttentionInputs], Tensor]:
    """Compute RBF attention in blocks; `select` finds the k-th largest logit of every row."""

    def run(x: AttentionInputs) -> Tensor:
        only_on_a_cpu(x.query.device)
        if x.top_k is None:
            raise MissingError("it supports only top-k")
        blocks = blocks_of(x)
        query, key, value = operands(x.query, x.key, x.value, blocks)
        rows = float(blocks.number) * blocks.size * x.query.shape[1]
        check_memory(rows * key.shape[2], "its blocks of pairs", x.query)
        norm = looked_at(x.key.square().sum(-1), blocks)[..., None, :]
        logits = (query @ key.mT - norm / 2) / x.sigma**2
        logits = logits.masked_fill(blocks.is_outside, -torch.inf)
        if x.top_k < logits.shape[-1]:
            threshold = select(logits.detach(), x.top_k)
            logits = logits.masked_fill(logits.detach() < threshold, -torch.inf)
        return by_token(logits.softmax(-1) @ value, len(x.query))

    return run
