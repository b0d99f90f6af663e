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
from graphattn.graphs.structures.structure import Band, Complete, GlobalTokens, GraphStructure
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
    backward_from_log_sums,
    differentiable,
    flattened,
    run,
)
from graphattn.ops.attention.structured.whole import WholePlan, suits
from graphattn.ops.dropout import dropout_of_call
from graphattn.ops.inputs import ValidPair, clear_invalid, flat_masks
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
    inputs = query, key, value, scale, bias
    inputs, plan = plan_call(inputs, graph, flat=False, **options)
    if isinstance(options["score"], Score) and torch.is_grad_enabled():
        # Only autograd knows which tensors a score of your own holds.
        return differentiable(plan, inputs)
    return run(plan, inputs)


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
    flat: bool = True,
) -> tuple[Inputs, Plan]:
    """Inputs with zeros in place of invalid tokens, and their plan.

    If `flat`, the inputs have one leading dimension. `kernels` make the plans; if None, those in
    operations of torch.
    """
    kernels = OPERATIONS if kernels is None else kernels
    keep_freed_memory()
    query, key, value, scale, bias = inputs
    batch = query.shape[:-3]
    B = batch.numel()
    of_bias = None
    masks: ValidPair = (None, None)
    if bias is not None:
        if bias.dim() > 2:
            bias = bias.reshape(B, *bias.shape[-2:])
        if not per_offset and _is_dense(graph):
            samples = len(bias) if bias.dim() == 3 else 1
            bias = bias.reshape(samples, graph.num_targets, graph.num_sources, bias.shape[-1])
        of_bias = per_offset, bias.dim()
    if valid != (None, None):
        masks = flat_masks(valid, batch)
        query = clear_invalid(query, valid[0])
        key, value = clear_invalid(key, valid[1]), clear_invalid(value, valid[1])

    def make() -> Plan:
        fewer = None if top_k is None or top_k >= _most_sources(graph) else top_k
        dropped = None if seed is None else dropout_of_call(dropout, seed, query, graph)
        options = PlanOptions(score, fewer, masks, softcap, dropped)
        if graph.structure is None or not (bias is None or per_offset or bias.dim() == 4):
            return kernels.rows(graph, options, None)
        table, pairs = bias is not None, bias is not None and bias.dim() == 4
        like = query.new_empty(B)
        return _plan(graph.structure, like, options, kernels, table=table, pairs=pairs)

    if masks == (None, None) and seed is None and not isinstance(score, Score):
        plan = graph.derived((kernels, score, top_k, softcap, B, of_bias), make)
    else:
        plan = make()
    inputs = query, key, value, scale, bias
    return flattened(inputs) if flat else inputs, plan


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
        plan = kernels.tiles(structure, options, table=table, pairs=pairs)
        if table or pairs or like.device.type != "cpu" or not suits(structure, options):
            return plan
        return WholePlan(plan, options, kernels is not OPERATIONS, isinstance(structure, Band))
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
