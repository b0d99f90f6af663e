"""The choice of a plan for a graph, and the plans that combine others.

Tiles for windows and blocks, rows of edges elsewhere. Batches of several sequences and windows with
global tokens get a plan for each of their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphattn.graphs.structures.bands import has_bands
from graphattn.graphs.structures.composites import Parts, Section, Union
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.structure import Band, Complete, GlobalTokens, GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.stored import kept_for_training
from graphattn.ops.attention.calls import AttentionCall, Inputs
from graphattn.ops.attention.merge import merged
from graphattn.ops.attention.structured.chunked import RowPlan, TilePlan
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Plan,
    PlanOptions,
    differentiable,
    flattened,
    run,
    unused_rows,
    zeros_like,
)
from graphattn.ops.attention.structured.whole import WholePlan, suits
from graphattn.ops.inputs import keep_freed_memory

SHORT = 128  # tokens: in shorter sequences, global tokens are not computed apart


class Kernels(NamedTuple):
    """The two functions that make the plans of an implementation.

    Attributes:
        rows: from (graph, options, index) to a plan of rows; `index` [E] is the row of a table of
            biases that every edge reads, or None.
        tiles: from (structure, options) to a plan of tiles.
    """

    rows: Callable[[TokenGraph, PlanOptions, Tensor | None], Plan]
    tiles: Callable[[GraphStructure, PlanOptions], Plan]


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]: every target averages the values it sees."""
    plan, inputs = plan_of(call), call.inputs()
    if call.score.kernel is None and torch.is_grad_enabled():
        # Only autograd knows which tensors a score of your own holds.
        return differentiable(plan, inputs)
    return run(plan, inputs)


def gradients_of_part(
    call: AttentionCall,
    whole: tuple[Tensor, Tensor],
    d_whole: tuple[Tensor, Tensor],
    kernels: Kernels | None = None,
) -> Gradients | None:
    """Gradients of the inputs, from results over more sources than those of the graph.

    Args:
        call: attention over the edges of a part.
        whole: output and log-sums over all sources.
        d_whole: their gradients.
        kernels: those of :func:`plan_of`.

    Returns:
        None if the plan starts from log-sums of its own, or for numbers that this is not exact for.
    """
    inputs = flattened(call.inputs())
    B, batch = len(inputs.query), call.query.dim() - 3
    results = (x.reshape(B, *x.shape[batch:]) for x in (*whole, *d_whole))
    gradients = plan_of(call, kernels).backward_from_log_sums(inputs, *results)
    if gradients is None:
        return None
    d_query, d_key, d_value, d_scale, d_bias = gradients
    return (
        d_query.reshape(call.query.shape),
        d_key.reshape(call.key.shape),
        d_value.reshape(call.value.shape),
        d_scale,
        None if d_bias is None or call.bias is None else d_bias.reshape(call.bias.shape),
    )


def plan_of(call: AttentionCall, kernels: Kernels | None = None) -> Plan:
    """The plan of a call and of all others with its graph and options; the graph keeps it.

    `kernels` make the plans; if None, those in operations of torch.
    """
    keep_freed_memory()
    kernels, graph, bias = OPERATIONS if kernels is None else kernels, call.graph, call.bias
    options = PlanOptions(
        call.score.kernel or call.score,
        call.top_k,
        call.softcap,
        None if bias is None else "offsets" if call.per_offset else _owner_of_bias(graph),
        call.dropout > 0,
    )
    if call.score.kernel is None:
        return _new_plan(graph, options, kernels)
    return graph.derived((kernels, options), lambda: _new_plan(graph, options, kernels))


def _new_plan(graph: TokenGraph, options: PlanOptions, kernels: Kernels) -> Plan:
    if options.top_k is not None and options.top_k >= _most_sources(graph):
        options = options._replace(top_k=None)
    if graph.structure is None or options.bias == "edges":
        return kernels.rows(graph, options, None)
    return _plan(graph.structure, graph.device, options, kernels)


def _most_sources(graph: TokenGraph) -> int:
    """The largest number of sources that a target has."""
    if graph.num_targets == 0:
        return 1 << 62  # no target, so any number is right
    return graph.derived("most sources", lambda: int(graph.in_degree().max()))


def gathered_rows(graph: TokenGraph, options: PlanOptions, index: Tensor | None) -> RowPlan:
    """A plan that gathers the sources of a few rows at a time."""
    return RowPlan(options, *graph.compact_csr(), index)


def tile_plan(structure: GraphStructure, options: PlanOptions) -> TilePlan:
    """A plan that goes over a few tiles at a time."""
    return TilePlan(options, structure)


OPERATIONS = Kernels(gathered_rows, tile_plan)  # plans in operations of torch


def _owner_of_bias(graph: TokenGraph) -> Literal["edges", "pairs"]:
    """The owner of the rows of a bias per edge; in a complete graph, every pair is an edge."""
    is_complete = isinstance(graph.structure, Complete) and graph.num_edges > 0
    return "pairs" if is_complete else "edges"


def _plan(
    structure: GraphStructure, device: torch.device, options: PlanOptions, kernels: Kernels
) -> Plan:
    """A plan of tiles if the graph has tiles, of parts if that is faster, of rows otherwise."""
    if isinstance(structure, GridBlocks) or has_bands(structure):
        plan = kernels.tiles(structure, options)
        if device.type != "cpu" or not suits(structure, options):
            return plan
        return WholePlan(plan, options, kernels is not OPERATIONS, isinstance(structure, Band))
    # Whether a row may be merged from parts.
    apart = options.top_k is None and options.bias is None
    if isinstance(structure, Parts) and any(_is_fast(part, apart) for part in structure.parts):
        parts: list[tuple[Plan, slice, slice]] = []
        for k, part in enumerate(structure.parts):
            t, s = (slice(*ptr[k : k + 2]) for ptr in (structure.target_ptr, structure.source_ptr))
            parts.append((_plan(part, device, options, kernels), t, s))
        return PartsPlan(parts)
    if apart and (hubs := _global_tokens(structure)):
        targets, sources = (torch.tensor(x, dtype=torch.int64, device=device) for x in hubs[:2])
        near, far = hubs.rest, Complete(hubs.rest.num_targets, len(sources))
        whole = Complete(len(targets), hubs.rest.num_sources)
        plans = (_plan(edges, device, options, kernels) for edges in (near, far, whole))
        return GlobalTokensPlan(targets, sources, *plans)
    graph, index = _graph_of(structure, device), None
    if options.bias == "offsets":
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
        case GlobalTokens(tokens=places):
            return _Hubs(places, places, others[0])
        case Section(GlobalTokens(tokens=places), start, stop, first, last):
            targets = tuple(i - start for i in places if start <= i < stop)
            return _Hubs(targets, tuple(j - first for j in places if first <= j < last), others[0])
    return None


def _are_global(part: GraphStructure) -> bool:
    return isinstance(part.whole if isinstance(part, Section) else part, GlobalTokens)


@lru_cache(maxsize=32)
def _graph_of(structure: GraphStructure, device: torch.device) -> TokenGraph:
    """The graph of a structure without tiles, cached because it lists its edges."""
    with kept_for_training(device):
        return TokenGraph(structure=structure, device=device)


# Plans that combine others.

Result = tuple[Tensor, Tensor]


@dataclass
class PartsPlan(Plan):
    """Attention over several sequences: one plan for each, with its targets and sources.

    A bias, if there is one, is a table that all sequences share.
    """

    parts: list[tuple[Plan, slice, slice]]

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        results = [plan.forward(_part(inputs, t, s)) for plan, t, s in self.parts]
        outs, sums, saved = zip(*results, strict=True)
        most = max(x.shape[-1] for x in saved)
        padded = [pad(x, (0, most - x.shape[-1])) for x in saved]
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1), torch.cat(padded, dim=1)

    @property
    def saved_per_head(self) -> int:
        """The largest number that a part saves; the others are padded to it."""
        return max(plan.saved_per_head for plan, _, _ in self.parts)

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        sums = zeros_like(inputs)
        for plan, t, s in self.parts:
            of_part = saved[:, t, : out.shape[2] * plan.saved_per_head]
            of_rows = out[:, t], of_part, d_out[:, t], None if d_lse is None else d_lse[:, t]
            _add(_some(sums, t, s), plan.backward(_part(inputs, t, s), *of_rows))
        return sums

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        results = [plan.by_autograd(_part(inputs, t, s)) for plan, t, s in self.parts]
        outs, sums = zip(*results, strict=True)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


@dataclass
class ReorderedPlan(Plan):
    """Attention over reordered tokens, in whose order the sources of a target are neighbours.

    Targets and sources are the same tokens. A bias, if there is one, is a table that does not
    depend on the order.
    """

    tokens: Tensor  # [N], the token at every place
    places: Tensor  # [N], the place of every token
    ordered: Plan

    @property
    def saved_per_head(self) -> int:
        return self.ordered.saved_per_head

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, saved = self.ordered.forward(self._in_order(inputs))
        return self._back(out), self._back(lse), self._back(saved)

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        out, saved, d_out = (x.index_select(1, self.tokens) for x in (out, saved, d_out))
        d_lse = None if d_lse is None else d_lse.index_select(1, self.tokens)
        gradients = self.ordered.backward(self._in_order(inputs), out, saved, d_out, d_lse)
        d_query, d_key, d_value = (self._back(x) for x in gradients[:3])
        return d_query, d_key, d_value, *gradients[3:]

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = self.ordered.by_autograd(self._in_order(inputs))
        return self._back(out), self._back(lse)

    def _in_order(self, inputs: Inputs) -> Inputs:
        query, key, value = (x.index_select(1, self.tokens) for x in inputs[:3])
        masks = inputs.masks.some(self.tokens, self.tokens)
        return Inputs(query, key, value, inputs.scale, inputs.bias, masks)

    def _back(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.places)


@dataclass
class GlobalTokensPlan(Plan):
    """Attention with global tokens, which see all tokens and are seen by all tokens.

    The edges are three disjoint sets:

    - `near`: edges between tokens that are not global;
    - `far`: a token that is not global sees the global tokens;
    - `whole`: a global token sees all tokens.

    The rows of the first two are the same, and their results are merged by their log-sums.

    `tokens` are the indices of the global tokens as targets, `sources` those as sources. They
    differ in a section of a graph, where some global tokens may be sources and not targets.
    """

    tokens: Tensor
    sources: Tensor
    near: Plan
    far: Plan
    whole: Plan

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        results = [plan.forward(seen)[:2] for plan, seen in self._with_inputs(inputs)]
        out, lse = self._merged(*results)
        return out, lse, lse

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self._merged(*(plan.by_autograd(seen) for plan, seen in self._with_inputs(inputs)))

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Differentiate out = sum_p share_p out_p, share_p = exp(lse_p - lse), p = near and far."""
        tokens, sums = self.tokens, zeros_like(inputs)
        query, key, value, scale, _ = sums
        *parts, (_, seen) = self._with_inputs(inputs)
        part, _, part_saved = self.whole.forward(seen)
        d_rows = d_out.index_select(1, tokens)
        d_sums = None if d_lse is None else d_lse.index_select(1, tokens)
        gradients = self.whole.backward(seen, part, part_saved, d_rows, d_sums)
        query.index_add_(1, tokens, gradients[0])
        _add(sums[1:], gradients[1:])
        d_out = d_out.index_fill(1, tokens, 0)
        lse = saved.masked_fill(saved == -torch.inf, 0)
        unused = unused_rows(d_out, d_lse)
        for plan, seen in parts:
            part, part_lse, part_saved = plan.forward(seen)
            share = (part_lse - lse).exp().masked_fill(unused, 0)
            d_part = (d_out * (part - out)).sum(-1)
            d_part = share * (d_part if d_lse is None else d_part + d_lse)
            d_part = d_part.index_fill(1, tokens, 0).masked_fill(unused, 0)
            gradients = plan.backward(seen, part, part_saved, share[..., None] * d_out, d_part)
            if plan is self.near:
                _add(sums, gradients)
                continue
            query += gradients[0]
            key.index_add_(1, self.sources, gradients[1])
            value.index_add_(1, self.sources, gradients[2])
            scale += gradients[3]
        return sums

    def _merged(self, near: Result, far: Result, whole: Result) -> Result:
        out, lse = merged((near[0], far[0]), (near[1], far[1]))
        return out.index_copy(1, self.tokens, whole[0]), lse.index_copy(1, self.tokens, whole[1])

    def _with_inputs(self, inputs: Inputs) -> list[tuple[Plan, Inputs]]:
        """The three plans, each with what it sees."""
        query, key, value, scale, bias, masks = inputs
        local = _without(masks.targets, query, self.tokens)
        near = masks._replace(targets=local, sources=_without(masks.sources, key, self.sources))
        far = masks._replace(targets=local).some(slice(None), self.sources)
        whole = masks.some(self.tokens, slice(None))
        global_key, global_value = (x.index_select(1, self.sources) for x in (key, value))
        of_tokens = query.index_select(1, self.tokens)
        return [
            (self.near, Inputs(query, key, value, scale, bias, near)),
            (self.far, Inputs(query, global_key, global_value, scale, bias, far)),
            (self.whole, Inputs(of_tokens, key, value, scale, bias, whole)),
        ]


def _without(mask: Tensor | None, like: Tensor, tokens: Tensor) -> Tensor:
    """The mask, [B, N], without some tokens; `like` [B, N, H, D] tells its shape if it is None."""
    if mask is None:
        mask = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    return mask.index_fill(1, tokens, False)


def _part(inputs: Inputs, targets: slice, sources: slice) -> Inputs:
    """The inputs of one sequence, as views."""
    return Inputs(*_some(inputs[:5], targets, sources), inputs.masks.some(targets, sources))


def _some(tensors: Gradients, targets: slice, sources: slice) -> Gradients:
    """The tensors of one sequence, or their gradients, as views."""
    query, key, value, scale, bias = tensors
    return query[:, targets], key[:, sources], value[:, sources], scale, bias


def _add(sums: tuple[Tensor | None, ...], parts: tuple[Tensor | None, ...]) -> None:
    """sums += parts, in place."""
    for total, part in zip(sums, parts, strict=True):
        if total is not None and part is not None:
            total += part
