"""Which plan a graph takes, and the call that runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.bands import has_bands
from graphattn.graphs.composites import Parts, Union
from graphattn.graphs.grid_blocks import GridBlocks, block_order
from graphattn.graphs.sections import Section
from graphattn.graphs.structure import Band, Blocks, Complete, GlobalTokens, Structure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.structured.contiguous import TilePlan
from graphattn.ops.attention.structured.modifiers import NONE, Modifiers
from graphattn.ops.attention.structured.parts import (
    GlobalTokensPlan,
    LaterRowsPlan,
    PartsPlan,
    ReorderedPlan,
)
from graphattn.ops.attention.structured.recompute import Inputs, Plan, Recomputed
from graphattn.ops.attention.structured.rows import RowPlan, TablePlan
from graphattn.ops.attention.structured.tiles import Tiles, tiles_of, tiles_of_blocks
from graphattn.ops.dropout import dropout_of_call
from graphattn.ops.inputs import ValidPair, clear_invalid
from graphattn.ops.memory import keep_freed_memory

SHORT = 128  # tokens


class Kernels(NamedTuple):
    """What makes plans of a kind.

    Attributes:
        rows: (graph, score, top_k, valid, modifiers, index of a table or None).
        tiles: (structure, its tiles, score, top_k, valid, modifiers); by name, whether there is a
            `table` of biases, and whether it is one of all `pairs`.
    """

    rows: Callable[[TokenGraph, str, int | None, ValidPair, Modifiers, Tensor | None], Plan]
    tiles: Callable[..., Plan]


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
    return run(plan, inputs, query.shape[:-3])


def run(plan: Plan, inputs: Inputs, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """What a plan makes of its inputs, with the leading dimensions that they had."""
    out, lse = Recomputed.apply(plan, *inputs)
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


def plan_call(
    inputs: Inputs,
    graph: TokenGraph,
    *,
    score: str,
    per_offset: bool,
    top_k: int | None,
    valid: ValidPair,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    kernels: Kernels | None = None,
) -> tuple[Inputs, Plan]:
    """Inputs with one leading dimension and zeros in place of invalid tokens, and their plan.

    `kernels` make the plans; those of this package if None.
    """
    kernels = OPERATIONS if kernels is None else kernels
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
    dropped = None if seed is None else dropout_of_call(dropout, seed, query, graph)
    modifiers = Modifiers(softcap, dropped)
    if bias is not None and not per_offset and _is_dense(graph):
        samples = len(bias) if bias.dim() == 3 else 1
        bias = bias.reshape(samples, graph.num_targets, graph.num_sources, bias.shape[-1])
    flat_inputs = flat(query, valid[0]), flat(key, valid[1]), flat(value, valid[1]), scale, bias
    if graph.structure is not None and (bias is None or per_offset or bias.dim() == 4):
        table, pairs = bias is not None, bias is not None and bias.dim() == 4
        options = score, top_k, masks, kernels, modifiers
        return flat_inputs, _plan(
            graph.structure, flat_inputs[0], *options, table=table, pairs=pairs
        )
    return flat_inputs, kernels.rows(graph, score, top_k, masks, modifiers, None)


def gathered_rows(
    graph: TokenGraph,
    score: str,
    top_k: int | None,
    valid: ValidPair,
    modifiers: Modifiers,
    index: Tensor | None,
) -> Plan:
    """A plan that gathers the sources of a few rows at a time."""
    rows = RowPlan(*graph.csr(), score, top_k, valid, modifiers)
    return rows if index is None else TablePlan(rows, index)


def tile_plan(
    structure: Structure,
    tiles: tuple[Tiles, ...],
    score: str,
    top_k: int | None,
    valid: ValidPair,
    modifiers: Modifiers,
    *,
    table: bool,
    pairs: bool,
) -> Plan:
    """A plan that goes over a few tiles at a time."""
    del structure, table, pairs  # tiles say it all
    return TilePlan(tiles, score, top_k, valid, modifiers)


OPERATIONS = Kernels(gathered_rows, tile_plan)  # of torch


def _is_dense(graph: TokenGraph) -> bool:
    """Whether biases per edge are those of all pairs, in their order."""
    return isinstance(graph.structure, Complete) and graph.num_edges > 0


def _plan(
    structure: Structure,
    like: Tensor,
    score: str,
    top_k: int | None,
    valid: ValidPair,
    kernels: Kernels,
    modifiers: Modifiers = NONE,
    *,
    table: bool = False,
    pairs: bool = False,
) -> Plan:
    """Tiles where there are some, parts where that is better, rows otherwise.

    `like` [B, ...] says how large a batch is and where it lies.
    """
    of_target, of_source = valid
    stored = top_k is not None or table or modifiers.any  # logits are; a tile's should be few
    if not stored and like.device.type == "cpu" and (whole := _causal_beyond(structure)):
        return _plan_of_later_rows(whole, structure.num_targets, like, score, valid, kernels)
    tiles = tiles_of(structure, 64 if stored else 128, 32 if score == "dot" else 1)
    if tiles is not None:
        return kernels.tiles(
            structure, tiles, score, top_k, valid, modifiers, table=table, pairs=pairs
        )
    if isinstance(structure, GridBlocks):
        return _plan_of_blocks(
            structure, like, score, top_k, valid, kernels, modifiers, table=table
        )
    apart = top_k is None and not table  # whether rows may be put together from parts
    if isinstance(structure, Parts) and any(_is_fast(part, apart) for part in structure.parts):
        parts: list[tuple[Plan, slice, slice]] = []
        for k, part in enumerate(structure.parts):
            t, s = (slice(*ptr[k : k + 2]) for ptr in (structure.target_ptr, structure.source_ptr))
            own = (
                None if of_target is None else of_target[:, t],
                None if of_source is None else of_source[:, s],
            )
            options = score, top_k, own, kernels, modifiers.some(t, s)
            parts.append((_plan(part, like, *options, table=table), t, s))
        return PartsPlan(parts)
    if apart and (found := _global_tokens(structure)):
        return _plan_of_global_tokens(found, like, score, valid, kernels, modifiers)
    graph, index = _kept(structure, like.device), None
    if table:
        source, target = graph.edge_index
        index = structure.offset_index(target, source)
    return kernels.rows(graph, score, top_k, valid, modifiers, index)


def _is_fast(structure: Structure, apart: bool) -> bool:
    """Whether there is something better than gathered rows."""
    if isinstance(structure, Parts):
        return any(_is_fast(part, apart) for part in structure.parts)
    if isinstance(structure, GridBlocks) or has_bands(structure):
        return True
    return apart and _global_tokens(structure) is not None


def _plan_of_blocks(
    grid: GridBlocks,
    like: Tensor,
    score: str,
    top_k: int | None,
    valid: ValidPair,
    kernels: Kernels,
    modifiers: Modifiers,
    *,
    table: bool,
) -> Plan:
    """Tokens block by block, which makes every block a tile."""
    blocks, tokens, places = block_order(grid, like.device)
    of_target, of_source = (None if mask is None else mask[:, tokens] for mask in valid)
    tiles = tiles_of_blocks(grid, blocks)
    options = score, top_k, (of_target, of_source), modifiers.some(tokens, tokens)
    if table:  # of hops down and right, which only tiles of the grid know
        return ReorderedPlan(tokens, places, TilePlan(tiles, *options))
    runs = tuple(Blocks(b.count * b.height * b.width, b.height * b.width) for b in blocks)
    plan = kernels.tiles(Parts(runs), tiles, *options, table=False, pairs=False)
    return ReorderedPlan(tokens, places, plan)


def _causal_beyond(structure: Structure) -> Band | None:
    """The causal sequence of which a section is all rows but the first, which are few.

    Its fused attention is up to 1.8 times as fast as that of tiles with masks (measured on a CPU),
    and costs the rows that are left out: no more than an eighth of the work.
    """
    match structure:
        case Section(Band(N, before, 0, 1, True), start, stop, 0, seen) if before >= N - 1:
            if 0 < start <= (stop - start) // 2 and seen == stop:
                return Band(stop, stop - 1, 0)
    return None


def _plan_of_later_rows(
    whole: Band, count: int, like: Tensor, score: str, valid: ValidPair, kernels: Kernels
) -> Plan:
    """Rows that are left out, all but the last `count`, are invalid targets."""
    skipped = whole.num_tokens - count
    mask = torch.zeros(len(like), whole.num_tokens, dtype=torch.bool, device=like.device)
    mask[:, skipped:] = True if valid[0] is None else valid[0]
    return LaterRowsPlan(_plan(whole, like, score, None, (mask, valid[1]), kernels), skipped)


class _Hubs(NamedTuple):
    """Global tokens, numbered as targets and as sources, and the tiles beside them."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    rest: Structure


def _global_tokens(structure: Structure) -> _Hubs | None:
    """The tokens that see everyone, and the tiles beside them; short sequences are not worth it."""
    if not isinstance(structure, Union) or structure.num_targets < SHORT:
        return None
    tokens = [part for part in structure.parts if _are_global(part)]
    others = [part for part in structure.parts if not _are_global(part)]
    one_each = len(tokens) == len(others) == 1
    if not one_each or not has_bands(others[0]):
        return None
    match tokens[0]:
        case GlobalTokens(tokens=found):
            return _Hubs(found, found, others[0])
        case Section(GlobalTokens(tokens=found), start, stop, first, last):
            own = tuple(i - start for i in found if start <= i < stop)
            return _Hubs(own, tuple(j - first for j in found if first <= j < last), others[0])
    return None


def _are_global(part: Structure) -> bool:
    return isinstance(part.whole if isinstance(part, Section) else part, GlobalTokens)


def _plan_of_global_tokens(
    hubs: _Hubs, like: Tensor, score: str, valid: ValidPair, kernels: Kernels, modifiers: Modifiers
) -> Plan:
    """Near edges are those of `rest` without the global tokens at either end."""
    targets, sources = (torch.tensor(x, dtype=torch.int64, device=like.device) for x in hubs[:2])
    N, M = hubs.rest.num_targets, hubs.rest.num_sources
    others = []
    for count, tokens, mask in ((N, targets, valid[0]), (M, sources, valid[1])):
        other = torch.ones(len(like), count, dtype=torch.bool, device=like.device)
        other[:, tokens] = False
        others.append(other if mask is None else mask & other)
    of_target, of_source = valid
    far = others[0], None if of_source is None else of_source[:, sources]
    own = None if of_target is None else of_target[:, targets], of_source
    beside = modifiers.some(slice(None), sources), modifiers.some(targets, slice(None))
    return GlobalTokensPlan(
        targets,
        sources,
        _plan(hubs.rest, like, score, None, (others[0], others[1]), kernels, modifiers),
        _plan(Complete(N, len(sources)), like, score, None, far, kernels, beside[0]),
        _plan(Complete(len(targets), M), like, score, None, own, kernels, beside[1]),
    )


@lru_cache(maxsize=32)
def _kept(structure: Structure, device: torch.device) -> TokenGraph:
    """The graph of a structure without tiles: it lists its edges once and keeps them."""
    return TokenGraph(structure=structure, device=device)
