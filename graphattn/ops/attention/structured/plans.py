"""Which plan a graph takes, and the call that runs it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.bands import has_bands
from graphattn.graphs.composites import Parts, Union
from graphattn.graphs.structure import Complete, GlobalTokens, Structure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.structured.contiguous import TilePlan
from graphattn.ops.attention.structured.parts import GlobalTokensPlan, PartsPlan
from graphattn.ops.attention.structured.recompute import Inputs, Plan, Recomputed
from graphattn.ops.attention.structured.rows import RowPlan, TablePlan
from graphattn.ops.attention.structured.tiles import tiles_of
from graphattn.ops.inputs import ValidPair, clear_invalid
from graphattn.ops.memory import keep_freed_memory

SHORT = 128  # tokens


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    *,
    scale: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]: every target averages the values it sees.

    `bias` is [E, H], per edge, [*, E, H], per sample and edge, or with the option `per_offset`
    [offsets, H]; the other options are those of :func:`plan_call`.
    """
    inputs, plan = plan_call((query, key, value, scale, bias), graph, **options)
    out, lse = Recomputed.apply(plan, *inputs)
    batch = query.shape[:-3]
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


def plan_call(
    inputs: Inputs,
    graph: TokenGraph,
    *,
    score: str,
    per_offset: bool,
    top_k: int | None,
    valid: ValidPair,
) -> tuple[Inputs, Plan]:
    """Inputs with one leading dimension and zeros in place of invalid tokens, and their plan."""
    keep_freed_memory()
    query, key, value, scale, bias = inputs
    batch = query.shape[:-3]
    B = batch.numel()

    def flat(x: Tensor, mask: Tensor | None) -> Tensor:
        return clear_invalid(x, mask).reshape(B, *x.shape[-3:])

    def flat_mask(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.expand(*batch, -1).reshape(B, mask.shape[-1])

    if top_k is not None and graph.num_targets and top_k >= int(graph.in_degree().max()):
        top_k = None
    masks = flat_mask(valid[0]), flat_mask(valid[1])
    if bias is not None and bias.dim() > 2:
        bias = bias.reshape(B, *bias.shape[-2:])
    if bias is not None and not per_offset and _is_dense(graph):
        samples = len(bias) if bias.dim() == 3 else 1
        bias = bias.reshape(samples, graph.num_targets, graph.num_sources, bias.shape[-1])
    flat_inputs = flat(query, valid[0]), flat(key, valid[1]), flat(value, valid[1]), scale, bias
    if graph.structure is not None and (bias is None or per_offset or bias.dim() == 4):
        table = bias is not None
        return flat_inputs, _plan(graph.structure, flat_inputs[0], score, top_k, masks, table=table)
    return flat_inputs, RowPlan(*graph.csr(), score, top_k, masks)


def _is_dense(graph: TokenGraph) -> bool:
    """Whether biases per edge are those of all pairs, in their order."""
    return isinstance(graph.structure, Complete) and graph.num_edges > 0


def _plan(
    structure: Structure,
    like: Tensor,
    score: str,
    top_k: int | None,
    valid: ValidPair,
    *,
    table: bool = False,
) -> Plan:
    """Tiles where there are some, parts where that is better, rows otherwise.

    `like` [B, ...] says how large a batch is and where it lies.
    """
    of_target, of_source = valid
    stored = top_k is not None or table  # logits are, and a tile's should be few
    tiles = tiles_of(structure, 64 if stored else 128, 32 if score == "dot" else 1)
    if tiles is not None:
        return TilePlan(tiles, score, top_k, valid)
    apart = top_k is None and not table  # whether rows may be put together from parts
    if isinstance(structure, Parts) and any(_is_fast(part, apart) for part in structure.parts):
        parts: list[tuple[Plan, slice, slice]] = []
        for k, part in enumerate(structure.parts):
            t, s = (slice(*ptr[k : k + 2]) for ptr in (structure.target_ptr, structure.source_ptr))
            own = (
                None if of_target is None else of_target[:, t],
                None if of_source is None else of_source[:, s],
            )
            parts.append((_plan(part, like, score, top_k, own, table=table), t, s))
        return PartsPlan(parts)
    if apart and (found := _global_tokens(structure)):
        return _plan_of_global_tokens(*found, like, score, valid)
    graph = _kept(structure, like.device)
    rows = RowPlan(*graph.csr(), score, top_k, valid)
    if not table:
        return rows
    source, target = graph.edge_index
    return TablePlan(rows, structure.offset_index(target, source))


def _is_fast(structure: Structure, apart: bool) -> bool:
    """Whether there is something better than gathered rows."""
    if isinstance(structure, Parts):
        return any(_is_fast(part, apart) for part in structure.parts)
    return has_bands(structure) or (apart and _global_tokens(structure) is not None)


def _global_tokens(structure: Structure) -> tuple[tuple[int, ...], Structure] | None:
    """The tokens that see everyone, and the tiles beside them; short sequences are not worth it."""
    if not isinstance(structure, Union) or structure.num_targets < SHORT:
        return None
    tokens = [part.tokens for part in structure.parts if isinstance(part, GlobalTokens)]
    others = [part for part in structure.parts if not isinstance(part, GlobalTokens)]
    one_each = len(tokens) == len(others) == 1
    return (tokens[0], others[0]) if one_each and has_bands(others[0]) else None


def _plan_of_global_tokens(
    tokens: tuple[int, ...], rest: Structure, like: Tensor, score: str, valid: ValidPair
) -> Plan:
    """Near edges are those of `rest` without the global tokens at either end."""
    N, g = rest.num_targets, torch.tensor(tokens, device=like.device)
    other = torch.ones(len(like), N, dtype=torch.bool, device=like.device)
    other[:, g] = False
    of_target, of_source = valid
    others = (
        other if of_target is None else of_target & other,
        other if of_source is None else of_source & other,
    )
    far = others[0], None if of_source is None else of_source[:, g]
    own = None if of_target is None else of_target[:, g], of_source
    return GlobalTokensPlan(
        g,
        _plan(rest, like, score, None, others),
        _plan(Complete(N, len(tokens)), like, score, None, far),
        _plan(Complete(len(tokens), N), like, score, None, own),
    )


@lru_cache(maxsize=32)
def _kept(structure: Structure, device: torch.device) -> TokenGraph:
    """The graph of a structure without tiles: it lists its edges once and keeps them."""
    return TokenGraph(structure=structure, device=device)
