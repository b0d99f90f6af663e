"""The choice of a plan for a graph, and the call that runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.bands import has_bands
from graphattn.graphs.structures.composites import Parts, Union
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.sections import Section
from graphattn.graphs.structures.structure import Complete, GlobalTokens, GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.stored import kept_for_training
from graphattn.ops.attention.logits.score import Kernel, Score
from graphattn.ops.attention.structured.chunked import RowPlan, TilePlan
from graphattn.ops.attention.structured.options import PlanOptions
from graphattn.ops.attention.structured.parts import GlobalTokensPlan, PartsPlan
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    Plan,
    Recomputed,
    backward_from_log_sums,
)
from graphattn.ops.dropout import dropout_of_call
from graphattn.ops.inputs import ValidPair, clear_invalid, may_be_differentiated
from graphattn.ops.memory import keep_freed_memory

SHORT = 128  # tokens: in shorter sequences, global tokens are not computed apart


class Kernels(NamedTuple):
    """The two functions that make the plans of an implementation.

    Attributes:
        rows: from (graph, options, index) to a plan of rows; `index` [E] is the row of a table of
            biases that every edge reads, or None.
        tiles: from (structure, options) to a plan of tiles; the keywords `table` and `pairs` say
            whether there is a table of biases, and whether there is a bias for every pair.
    """

    rows: Callable[[TokenGraph, PlanOptions, Tensor | None], Plan]
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
    if isinstance(options["score"], Score) and torch.is_grad_enabled():
        # Only autograd knows which tensors a score of your own holds.
        out, lse = plan.by_autograd(inputs)
        return out.view(*query.shape[:-3], *out.shape[1:]), lse.view(query.shape[:-1])
    return run(plan, inputs, query.shape[:-3])


def gradients_of_part(
    inputs: Inputs,
    graph: TokenGraph,
    whole: tuple[Tensor, Tensor],
    d_whole: tuple[Tensor, Tensor],
    **options: Any,
) -> Gradients | None:
    """Gradients of the five inputs, from results over more sources than those of the graph.

    Args:
        inputs: query, key and value in the compute dtype, scale and bias, as in :func:`attend`.
        graph: the edges of a part.
        whole: output and log-sums over all sources.
        d_whole: their gradients.
        options: those of :func:`plan_call`.

    Returns:
        None if the plan starts from log-sums of its own, or for numbers that this is not exact for.
    """
    flat_inputs, plan = plan_call(inputs, graph, **options)
    B, batch = len(flat_inputs[0]), inputs[0].dim() - 3
    results = (x.reshape(B, *x.shape[batch:]) for x in (*whole, *d_whole))
    found = backward_from_log_sums(plan, flat_inputs, *results)
    if found is None:
        return None
    shaped: Any = (
        None if x is None or d is None else d.reshape(x.shape)
        for x, d in zip(inputs, found, strict=True)
    )
    return (*shaped,)


def run(plan: Plan, inputs: Inputs, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """Run a plan on its inputs, and restore their leading dimensions."""
    if may_be_differentiated(inputs):
        out, lse = Recomputed.apply(plan, *inputs)
    else:
        out, lse, _ = plan.forward(inputs)
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


def plan_call(
    inputs: Inputs,
    graph: TokenGraph,
    *,
    score: Kernel | Score,
    per_offset: bool,
    top_k: int | None,
    valid: ValidPair,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    kernels: Kernels | None = None,
) -> tuple[Inputs, Plan]:
    """Inputs with one leading dimension and zeros in place of invalid tokens, and their plan.

    `kernels` make the plans; if None, those in operations of torch.
    """
    kernels = OPERATIONS if kernels is None else kernels
    keep_freed_memory()
    query, key, value, scale, bias = inputs
    batch = query.shape[:-3]
    B = batch.numel()

    def flat(x: Tensor, mask: Tensor | None) -> Tensor:
        x = clear_invalid(x, mask)
        return x if len(batch) == 1 else x.reshape(B, *x.shape[-3:])

    def flat_mask(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.expand(*batch, -1).reshape(B, mask.shape[-1])

    masks = flat_mask(valid[0]), flat_mask(valid[1])
    if bias is not None and bias.dim() > 2:
        bias = bias.reshape(B, *bias.shape[-2:])
    dropped = None if seed is None else dropout_of_call(dropout, seed, query, graph)
    options = PlanOptions(score, top_k, masks, softcap, dropped)
    if bias is not None and not per_offset and _is_dense(graph):
        samples = len(bias) if bias.dim() == 3 else 1
        bias = bias.reshape(samples, graph.num_targets, graph.num_sources, bias.shape[-1])
    flat_inputs = flat(query, valid[0]), flat(key, valid[1]), flat(value, valid[1]), scale, bias
    of_bias = None if bias is None else (per_offset, bias.dim())

    def make() -> Plan:
        fewer = None if top_k is None or top_k >= _most_sources(graph) else top_k
        own = options._replace(top_k=fewer)
        if graph.structure is None or not (bias is None or per_offset or bias.dim() == 4):
            return kernels.rows(graph, own, None)
        table, pairs = bias is not None, bias is not None and bias.dim() == 4
        return _plan(graph.structure, flat_inputs[0], own, kernels, table=table, pairs=pairs)

    if masks != (None, None) or dropped is not None or isinstance(score, Score):
        return flat_inputs, make()
    return flat_inputs, graph.derived((kernels, score, top_k, softcap, B, of_bias), make)


def _most_sources(graph: TokenGraph) -> int:
    """The largest number of sources that a target has."""
    if graph.num_targets == 0:
        return 1 << 62  # no target, so any number is right
    return graph.derived("most sources", lambda: int(graph.in_degree().max()))


def gathered_rows(graph: TokenGraph, options: PlanOptions, index: Tensor | None) -> RowPlan:
    """A plan that gathers the sources of a few rows at a time."""
    return RowPlan(options, *graph.compact_csr(), index)


def tile_plan(
    structure: GraphStructure, options: PlanOptions, *, table: bool, pairs: bool
) -> TilePlan:
    """A plan that goes over a few tiles at a time."""
    del table, pairs  # the shape of the bias says the same
    return TilePlan(options, structure)


OPERATIONS = Kernels(gathered_rows, tile_plan)  # plans in operations of torch


def _is_dense(graph: TokenGraph) -> bool:
    """Whether every pair is an edge, so that biases per edge are those of all pairs, in order."""
    return isinstance(graph.structure, Complete) and graph.num_edges > 0


def _plan(
    structure: GraphStructure,
    like: Tensor,
    options: PlanOptions,
    kernels: Kernels,
    *,
    table: bool = False,
    pairs: bool = False,
) -> Plan:
    """A plan of tiles if the graph has tiles, of parts if that is faster, of rows otherwise.

    `like` [B, ...] is a tensor with the batch size and device of the call.
    """
    if isinstance(structure, GridBlocks) or has_bands(structure):
        return kernels.tiles(structure, options, table=table, pairs=pairs)
    apart = options.top_k is None and not table  # whether a row may be merged from parts
    if isinstance(structure, Parts) and any(_is_fast(part, apart) for part in structure.parts):
        parts: list[tuple[Plan, slice, slice]] = []
        for k, part in enumerate(structure.parts):
            t, s = (slice(*ptr[k : k + 2]) for ptr in (structure.target_ptr, structure.source_ptr))
            parts.append((_plan(part, like, options.some(t, s), kernels, table=table), t, s))
        return PartsPlan(parts)
    if apart and (found := _global_tokens(structure)):
        return _plan_of_global_tokens(found, like, options, kernels)
    graph, index = _graph_of(structure, like.device), None
    if table:
        source, target = graph.edge_index
        index = structure.offset_index(target, source).to(graph.compact_edges.dtype)
    return kernels.rows(graph, options, index)


def _is_fast(structure: GraphStructure, apart: bool) -> bool:
    """Whether a structure has a faster plan than gathered rows."""
    if isinstance(structure, Parts):
        return any(_is_fast(part, apart) for part in structure.parts)
    if isinstance(structure, GridBlocks) or has_bands(structure):
        return True
    return apart and _global_tokens(structure) is not None


class _Hubs(NamedTuple):
    """Global tokens, by their indices as targets and as sources, and the rest of the graph."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]
    rest: GraphStructure


def _global_tokens(structure: GraphStructure) -> _Hubs | None:
    """The global tokens of a graph, and the rest; None if there are none, or few tokens."""
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


def _are_global(part: GraphStructure) -> bool:
    return isinstance(part.whole if isinstance(part, Section) else part, GlobalTokens)


def _plan_of_global_tokens(
    hubs: _Hubs, like: Tensor, options: PlanOptions, kernels: Kernels
) -> Plan:
    """A plan that computes three sets of edges apart; see :class:`GlobalTokensPlan`."""
    targets, sources = (torch.tensor(x, dtype=torch.int64, device=like.device) for x in hubs[:2])
    N, M = hubs.rest.num_targets, hubs.rest.num_sources
    others = []
    for count, tokens in ((N, targets), (M, sources)):
        other = torch.ones(len(like), count, dtype=torch.bool, device=like.device)
        other[:, tokens] = False
        others.append(other)
    near = options.among(others[0], others[1])
    far = options.among(others[0], None).some(slice(None), sources)
    own = options.some(targets, slice(None))
    return GlobalTokensPlan(
        targets,
        sources,
        _plan(hubs.rest, like, near, kernels),
        _plan(Complete(N, len(sources)), like, far, kernels),
        _plan(Complete(len(targets), M), like, own, kernels),
    )


@lru_cache(maxsize=32)
def _graph_of(structure: GraphStructure, device: torch.device) -> TokenGraph:
    """The graph of a structure without tiles, cached because it lists its edges."""
    with kept_for_training(device):
        return TokenGraph(structure=structure, device=device)
