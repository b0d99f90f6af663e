"""RBF attention as fast compiled code, which gathers everything and scatters nothing.

A compiled `index_add` adds the edges atomically, and threads that add to the same row wait for each
other. In this code, a table lists the edges of every target, and each target sums the gathered
values. The backward pass also reads a table with the edges of every source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

import graphattn as ga
from graphattn.bench.cases.inputs import AttentionInputs
from graphattn.bench.contenders.peers import check_memory, compile_once, needs_compiler

PADDED = 1.5  # largest ratio of places to edges for which one table is used


class Table(NamedTuple):
    """Some rows and their edges, [rows, width]; unused places contain 0 and are no edges."""

    rows: Tensor
    ends: Tensor  # the other end of each edge
    edges: Tensor  # index of each edge
    is_edge: Tensor


class Tables(NamedTuple):
    """All rows, in tables of similar degree, so a few wide rows do not widen the others."""

    tables: list[Table]
    place: Tensor  # index of every row in the joined rows of all tables
    num_edges: int

    @property
    def places(self) -> int:
        return sum(table.ends.numel() for table in self.tables)


def tables_of(rows: Tensor, ends: Tensor, num_rows: int) -> Tables:
    """Make tables of the edges between `ends` and `rows`, which may be in any order.

    One table is used if its padding is small. Otherwise, the rows whose degrees lie between two
    neighbouring powers of two share a table. The width of a table is that of its widest row.
    """
    order = rows.argsort(stable=True)
    degree = torch.bincount(rows, minlength=num_rows)
    start = degree.cumsum(0) - degree
    widest = int(degree.max()) if len(rows) else 0
    if num_rows * widest <= PADDED * len(rows):
        classes = torch.zeros_like(degree)
    else:
        classes = degree.clamp(min=1).double().log2().ceil().long()
    tables = []
    for similar in classes.unique():
        members = (classes == similar).nonzero()[:, 0]
        width = max(1, int(degree[members].max()))
        column = torch.arange(width, device=rows.device)
        is_edge = column < degree[members, None]
        edges = order[(start[members, None] + column).clamp(max=len(rows) - 1)]
        edges = edges.where(is_edge, 0)
        tables.append(Table(members, ends[edges], edges, is_edge))
    place = torch.cat([table.rows for table in tables]).argsort()
    return Tables(tables, place, len(rows))


def tables_of_both_ends(graph: ga.TokenGraph) -> tuple[Tables, Tables]:
    source, target = graph.edge_index
    return (
        tables_of(target, source, graph.num_targets),
        tables_of(source, target, graph.num_sources),
    )


def compiled(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by compiled code that gathers, forward and backward."""
    needs_compiler(x.query.device)
    of_targets, of_sources = x.once("tables", lambda: tables_of_both_ends(x.graph))
    check_memory(of_targets.places * float(x.query.shape[-2]), "its weights", x.query)
    return Gathered.apply(x.query, x.key, x.value, x.sigma, of_targets, of_sources)


class Gathered(Function):
    """RBF attention with gathered rows; the backward pass of autograd would scatter."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sigma: float,
        of_targets: Tables,
        of_sources: Tables,
    ) -> Tensor:
        parts, weights = [], []
        for table in of_targets.tables:
            out, weight = compile_once(attend)(
                query, key, value, table.rows, table.ends, table.is_edge, sigma
            )
            parts.append(out)
            weights.append(weight)
        out = in_order(parts, of_targets)
        ctx.save_for_backward(query, key, value, out, *weights)
        ctx.given = sigma, of_targets, of_sources
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        query, key, value, out, *weights = ctx.saved_tensors
        sigma, of_targets, of_sources = ctx.given
        parts = []
        # In the order of the edges, [E, H]. Every edge has one place in one table.
        weight_of, pull_of = (query.new_empty(of_targets.num_edges, query.shape[1]) for _ in "wp")
        for table, weight in zip(of_targets.tables, weights, strict=True):
            d_query, pull = compile_once(d_rows)(
                query, key, value, out, d_out, weight, table.rows, table.ends, sigma
            )
            parts.append(d_query)
            weight_of[table.edges[table.is_edge]] = weight[table.is_edge]
            pull_of[table.edges[table.is_edge]] = pull[table.is_edge]
        pairs = []
        for table in of_sources.tables:
            # If the compiled function gathered these, it would gather them again for every feature.
            no_edge = ~table.is_edge[..., None]
            weight, pull = (
                gathered(of_edge, table.edges).masked_fill_(no_edge, 0.0)
                for of_edge in (weight_of, pull_of)
            )
            pairs.append(
                compile_once(d_sources)(query, key, d_out, weight, pull, table.rows, table.ends)
            )
        d_key, d_value = (in_order(list(part), of_sources) for part in zip(*pairs, strict=True))
        return in_order(parts, of_targets), d_key, d_value, None, None, None


def in_order(parts: list[Tensor], tables: Tables) -> Tensor:
    """Join the rows of all tables in the order of the graph; one table needs no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, tables.place)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    ends: Tensor,
    is_edge: Tensor,
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """Compute outputs [rows, H, D] and weights [rows, width, H]; a row without edges has zeros."""
    difference = query.index_select(0, rows)[:, None] - gathered(key, ends)
    logits = -difference.square().sum(-1) / (2 * sigma**2)
    weight = logits.masked_fill(~is_edge[..., None], -torch.inf).softmax(1)
    weight = weight.masked_fill(~is_edge[..., None], 0.0)
    return (weight[..., None] * gathered(value, ends)).sum(1), weight


def d_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    d_out: Tensor,
    weight: Tensor,
    rows: Tensor,
    ends: Tensor,
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the queries, and those of the logits divided by sigma^2."""
    d_own = d_out.index_select(0, rows)
    along = (gathered(value, ends) * d_own[:, None]).sum(-1)
    mean = (out.index_select(0, rows) * d_own).sum(-1)
    pull = weight * (along - mean[:, None]) / sigma**2
    difference = gathered(key, ends) - query.index_select(0, rows)[:, None]
    return (pull[..., None] * difference).sum(1), pull


def d_sources(
    query: Tensor,
    key: Tensor,
    d_out: Tensor,
    weight: Tensor,
    pull: Tensor,
    rows: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the keys and of the values."""
    difference = gathered(query, ends) - key.index_select(0, rows)[:, None]
    d_key = (pull[..., None] * difference).sum(1)
    return d_key, (weight[..., None] * gathered(d_out, ends)).sum(1)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Gather x at the indices of a table, [rows, width, ...]."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)
