"""Hand-written attention in a window with global tokens: sliding chunks, as in Longformer.

The code has three parts. Chunks of queries attend to the keys around them, by a kernel of SDPA. All
queries attend to the few global keys. Global queries attend to all keys. The results of the first
two parts are merged by their log-sums. The backward pass of each of these parts gets the merged
output and the merged log-sum, so its weights are the final weights of the whole row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from graphattn.bench.cases.inputs import AttentionInputs, MissingError
from graphattn.bench.contenders.by_hand.window_blocks import (
    WindowBlocks,
    by_token,
    cut,
    in_blocks,
    operands,
)
from graphattn.bench.contenders.peers import only_on_a_cpu
from graphattn.graphs.structures.composites import Union
from graphattn.graphs.structures.structure import Band, GlobalTokens

# Number of tokens of a chunk. For 64, 128 and 256, both passes took 603, 472 and 478 ms: 4,096
# tokens, 256 on each side, 4 global tokens, 8 heads of 64, one thread.
CHUNK = 128
aten = torch.ops.aten
attend = aten._scaled_dot_product_flash_attention_for_cpu
d_attend = aten._scaled_dot_product_flash_attention_for_cpu_backward


class Chunks(NamedTuple):
    """A window cut into blocks without the global sources, and the global tokens; made once."""

    blocks: WindowBlocks
    tokens: Tensor  # [G]


def cut_chunks(x: AttentionInputs) -> Chunks:
    structure = x.graph.structure
    match structure.parts if isinstance(structure, Union) else ():
        case GlobalTokens(tokens=tokens), Band(self_loops=True, dilation=1) as band:
            everyone = torch.tensor(tokens)
            return Chunks(cut(band, x, CHUNK, everyone), everyone)
    raise MissingError("it supports only windows with global tokens")


def chunks_of(x: AttentionInputs) -> Chunks:
    return x.once("chunks", lambda: cut_chunks(x))


def chunks_dot(x: AttentionInputs) -> Tensor:
    only_on_a_cpu(x.query.device)
    return Chunked.apply(x.query, x.key, x.value, x.query.shape[-1] ** -0.5, chunks_of(x))


def chunks_rbf(x: AttentionInputs) -> Tensor:
    """Compute RBF attention as a dot product; one more feature is 1 in q and -|k|^2 / 2 in k."""
    only_on_a_cpu(x.query.device)
    chunks, D = chunks_of(x), x.query.shape[-1]
    query = pad(x.query, (0, 1), value=1.0)
    key = torch.cat([x.key, -x.key.square().sum(-1, keepdim=True) / 2], -1)
    out: Tensor = Chunked.apply(query, key, pad(x.value, (0, 1)), x.sigma**-2, chunks)
    return out[..., :D]


class Chunked(Function):
    """Attention in chunks; the scores of the global keys and the log-sums are saved."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, chunks: Chunks
    ) -> Tensor:
        blocks, tokens = chunks
        q, k, v = operands(query, key, value, blocks)
        near, log_near = attend(q, k, v, attn_mask=blocks.additive, scale=scale)
        near, log_near = (by_token(t, len(query)) for t in (near, log_near))
        scores = at_global_keys(query, key, tokens) * scale
        log_sum = torch.logaddexp(log_near, scores.logsumexp(-1))
        far = times_global(weights(scores, log_sum), value, tokens)
        out = torch.addcmul(far, near, (log_near - log_sum).exp_()[..., None])
        of_rows, log_rows = attend(*rows_of(query, key, value, tokens), scale=scale)
        out[tokens] = of_rows[0].transpose(0, 1)
        ctx.save_for_backward(query, key, value, out, log_sum, scores, of_rows, log_rows)
        ctx.given = scale, chunks
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        query, key, value, out, log_sum, scores, of_rows, log_rows = ctx.saved_tensors
        scale, (blocks, tokens) = ctx.given
        d_rest = d_out.index_fill(0, tokens, 0.0)  # the global rows are a separate part
        parts = d_attend(
            in_blocks(d_rest, blocks),
            *operands(query, key, value, blocks),
            in_blocks(out, blocks),
            in_blocks(log_sum, blocks),
            *(0.0, False),
            attn_mask=blocks.additive,
            scale=scale,
        )
        d_query = by_token(parts[0], len(query))
        d_key, d_value = (added_up(t, blocks, len(key)) for t in parts[1:])

        weight = weights(scores, log_sum)
        pull = at_global_keys(d_rest, value, tokens) - (out * d_rest).sum(-1, keepdim=True)
        pull *= weight * scale
        d_query += times_global(pull, key, tokens)
        d_key[tokens] += at_global_tokens(pull, query)
        d_value[tokens] += at_global_tokens(weight, d_rest)

        d_rows = d_out[tokens].transpose(0, 1)[None]
        rows = rows_of(query, key, value, tokens)
        parts = d_attend(d_rows, *rows, of_rows, log_rows, 0.0, False, scale=scale)
        d_own, d_keys, d_values = (t[0].transpose(0, 1) for t in parts)
        d_query[tokens] += d_own
        return d_query, d_key.add_(d_keys), d_value.add_(d_values), None, None


def added_up(parts: Tensor, blocks: WindowBlocks, tokens: int) -> Tensor:
    """Add the gradients of the keys of all blocks, [blocks, H, B + W, D] -> [N, H, D]."""
    C, H, _, D = parts.shape
    places = parts.split(blocks.size, dim=2)
    total = parts.new_zeros(C + len(places) - 1, blocks.size, H, D)
    for first, part in enumerate(places):
        total[first : first + C, : part.shape[2]] += part.transpose(1, 2)
    return total.flatten(0, 1).narrow(0, blocks.band.before, tokens)


def rows_of(
    query: Tensor, key: Tensor, value: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the global queries, and all keys and values, [1, H, *, D]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (query[tokens], key, value))
    return q, k, v


def at_global_keys(of_queries: Tensor, of_keys: Tensor, tokens: Tensor) -> Tensor:
    """Compute the inner products of all rows with those of the global tokens, [N, H, G]."""
    return torch.einsum("nhd,ghd->nhg", of_queries, of_keys[tokens])


def times_global(factors: Tensor, of_keys: Tensor, tokens: Tensor) -> Tensor:
    """Sum the rows of the global tokens with factors [N, H, G]; the result is [N, H, D]."""
    return torch.einsum("nhg,ghd->nhd", factors, of_keys[tokens])


def at_global_tokens(factors: Tensor, of_queries: Tensor) -> Tensor:
    """Sum the rows of all queries with factors [N, H, G]; the result is [G, H, D]."""
    return torch.einsum("nhg,nhd->ghd", factors, of_queries)


def weights(scores: Tensor, log_sum: Tensor) -> Tensor:
    """Compute the weights of the global keys, [N, H, G]."""
    return (scores - log_sum[..., None]).exp_()
