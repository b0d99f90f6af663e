"""Items of a dataset as one batch: packed one after the other, or padded to one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.batches.item_fields import Columns, declared_kinds, read_items
from graphattn.graphs.batches.token_batch import Kind, TokenBatch
from graphattn.graphs.builders.combine import batch
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.structure import Complete, no_edges
from graphattn.graphs.token_graph import TokenGraph


def collate(
    items: Iterable[Any],
    *,
    graph: Callable[[int], TokenGraph] | None = None,
    padding: bool = False,
    padding_value: float | Mapping[str, float] = 0,
    token_fields: Iterable[str] = (),
    source_fields: Iterable[str] = (),
    edge_fields: Iterable[str] = (),
    item_fields: Iterable[str] = (),
) -> TokenBatch:
    """Items with graphs of their own as one batch: ``DataLoader(data, collate_fn=ga.collate)``.

    Each item is a dict, with a graph under "graph" (or an edge list under "edge_index") and any
    other fields, or a PyG ``Data``. Their graphs become one, as by :func:`~graphattn.batch`
    (structured ones stay structured), and their fields one tensor or list each:

    - **per token**: `tokens`, `input_ids`, `token_type_ids`, `attention_mask`, `position_ids`,
      `features`, `x`, `pos`, `positions`, `valid` by name, and any other tensor whose first
      dimension is the item's number of tokens in every item: one after the other, [N_total, ...];
    - **per edge**: names that begin with `edge_`, and any other tensor whose first dimension is the
      item's number of edges in every item: [E_total, ...] in the order of the batch's
      ``graph.edge_index``. They belong to the edges of the item's graph, or of its `edge_index`
      as that stands there: both are sorted together;
    - **per source**: `context` by name, and likewise by length, where targets and sources of the
      graphs are different tokens: [M_total, ...];
    - **per item**: everything else. Numbers and tensors of one shape are stacked, [B, ...] (of a
      Data, tensors [1, ...] are joined, as PyG does); others come as a list.

    Lists of numbers and numpy's arrays count as tensors. What the rules leave open, two of these by
    length, or one that not all items agree on, is refused: say it by `token_fields` and so on
    (``collate_fn=functools.partial(ga.collate, item_fields=("target",))``).

    Args:
        items: dicts, or Data, with the same names in all of them.
        graph: makes the graph of an item from its number of tokens, where items have none.
        padding: fields per token as [B, N, ...] beside ``batch.valid``, in place of [N_total, ...].
        padding_value: what stands in padding: one number, or one per field, ``{"target": -100}``,
            and 0 in the others.
        token_fields: names of fields that have one entry per token.
        source_fields: names of fields that have one entry per source.
        edge_fields: names of fields that have one entry per edge.
        item_fields: names of fields that have one value per item.

    Raises:
        ValueError: if there are no items, dicts are mixed with Data, names differ, an item has no
            graph (or has one beside `graph`), a length does not fit its graph, shapes or dtypes of
            a field differ, or its kind stays open.

    Example:
        >>> import functools, torch, graphattn as ga
        >>> texts = [{"tokens": [7, 8, 9], "label": 0}, {"tokens": [5, 6], "label": 1}]
        >>> near = functools.partial(ga.collate, graph=lambda n: ga.window_path_graph(n, 2))
        >>> loader = torch.utils.data.DataLoader(texts, batch_size=2, collate_fn=near)
        >>> batch = next(iter(loader))
        >>> batch.tokens, batch.label, batch.graph
        (tensor([7, 8, 9, 5, 6]), tensor([0, 1]),
         TokenGraph(num_tokens=5, num_edges=8, structure=Parts(Band, Band)))
        >>> padded = near(texts, padding=True)
        >>> padded.tokens, padded.valid
        (tensor([[7, 8, 9],
                [5, 6, 0]]), tensor([[ True,  True,  True],
                [ True,  True, False]]))
    """
    found = read_items(items)
    declared = declared_kinds(
        found, token=token_fields, source=source_fields, edge=edge_fields, item=item_fields
    )
    columns = Columns(found, declared)
    graphs, orders = columns.graphs(graph)
    sizes = [(own.num_targets, own.num_sources) for own in graphs]
    kinds = columns.kinds(graphs, sizes)
    for name, kind in kinds.items():
        if kind != "item":
            columns.check_rows(name, kind, graphs, sizes)
        if kind == "edge":
            columns.sort_edges(name, orders)
    shape = None
    if padding:
        shape = (max(n for n, _ in sizes), max(m for _, m in sizes))
    fill = _fill_values(padding_value, kinds, bool(padding))
    joined: set[str] = set()
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        values = columns.values[name]
        if kind == "item":
            fields[name] = columns.per_item(name, joined)
        elif kind == "edge" or shape is None:
            fields[name] = torch.cat(values)
        else:
            fields[name] = _padded(name, values, shape[kind == "source"], fill.get(name, 0))
    return TokenBatch(
        fields=fields,
        kinds=kinds,
        graph=batch(graphs) if shape is None else _rows_of(graphs, *shape),
        sizes=sizes,
        shape=shape,
        had_batch_dimension=tuple(sorted(joined)),
    )


def _fill_values(padding_value: Any, kinds: dict[str, Kind], padding: bool) -> dict[str, float]:
    """Return the padding value of every field per token or source."""
    rows = [name for name, kind in kinds.items() if kind in ("token", "source")]
    given = (
        padding_value if isinstance(padding_value, Mapping) else dict.fromkeys(rows, padding_value)
    )
    for name, value in given.items():
        if name not in rows:
            raise ValueError(
                f"padding_value must name fields per token ({', '.join(rows)}), got {name!r}"
            )
        if not isinstance(value, bool | int | float):
            raise ValueError(f"padding_value must be a number, or one per field, got {value!r}")
    if not padding and any(given.values()):
        raise ValueError(f"padding_value needs padding=True, got {padding_value!r} without it")
    # What is read as a mask is False in padding.
    return {**given, **{name: 0 for name in ("valid", "attention_mask") if name in rows}}


def _padded(name: str, values: list[Tensor], rows: int, fill: float) -> Tensor:
    """[B, rows, ...] of tensors [N_b, ...]."""
    first = values[0]
    try:
        filled = first.new_full((), fill)
    except (RuntimeError, OverflowError):
        filled = None
    exact = first.is_floating_point() or first.is_complex()
    if filled is None or not (exact or filled.item() == fill):
        raise ValueError(
            f"padding_value of {name} must be a number of its dtype {first.dtype}, got {fill!r}"
        )
    out = first.new_full((len(values), rows, *first.shape[1:]), fill)
    for b, value in enumerate(values):
        out[b, : len(value)] = value
    return out


def _rows_of(graphs: list[TokenGraph], num_targets: int, num_sources: int) -> TokenGraph:
    """One graph over B rows of tokens: every item's at the start of its own, padding without edges.

    A row counts as one part, so that positions count on through padding.
    """
    parts: list[TokenGraph] = []
    sizes: list[tuple[int, int]] = []
    starts: list[tuple[int, int]] = []
    for graph in graphs:
        missing = num_targets - graph.num_targets, num_sources - graph.num_sources
        parts.append(graph)
        if any(missing):
            parts.append(_nothing(graphs, *missing))
        if len(graph.sizes) == 1:
            sizes.append((num_targets, num_sources))
            starts += graph.starts
        else:  # the item is a batch itself
            sizes += [*graph.sizes, *([missing] if any(missing) else [])]
            starts += [*graph.starts, *([(0, 0)] if any(missing) else [])]
    packed = batch(parts)
    listed = packed.structure is None and not packed.is_table
    return TokenGraph(
        structure=packed.structure,
        edge_index=packed.compact_edges if listed else None,
        neighbors=packed.compact_neighbors,
        num_targets=packed.num_targets,
        num_sources=packed.num_sources,
        sizes=tuple(sizes),
        starts=tuple(starts),
        is_causal=all(graph.is_causal for graph in graphs),
        has_causal_part=any(graph.has_causal_part for graph in graphs),
        device=packed.device,
        positions=packed.own_positions and _positions_of_rows(graphs, num_targets, num_sources),
    )


def _positions_of_rows(
    graphs: list[TokenGraph], num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor]:
    """Return the positions of every item, and then of its padding, which counts on."""
    sides: list[list[Tensor]] = [[], []]
    for graph in graphs:
        for side, rows in enumerate((num_targets, num_sources)):
            own = graph.source_positions if side else graph.positions
            first = graph.starts[0][side] + len(own) if len(graph.sizes) == 1 else 0
            padding = torch.arange(first, first + rows - len(own), device=own.device)
            sides[side] += [own, padding]
    of_targets, of_sources = map(torch.cat, sides)
    return of_targets, of_targets if torch.equal(of_targets, of_sources) else of_sources


def _nothing(graphs: list[TokenGraph], num_targets: int, num_sources: int) -> TokenGraph:
    """Tokens without edges, held as `graphs` are: by structure, table or list."""
    device = graphs[0].device
    if all(graph.structure is not None for graph in graphs):
        if num_targets == num_sources:
            return TokenGraph(structure=no_edges(num_targets), device=device)
        apart = Parts((Complete(num_targets, 0), Complete(0, num_sources)))
        return TokenGraph(structure=apart, sizes=((num_targets, num_sources),), device=device)
    if all(graph.is_table for graph in graphs):
        table = torch.full((num_targets, 1), -1, dtype=torch.int64, device=device)
        return TokenGraph(neighbors=table, num_targets=num_targets, num_sources=num_sources)
    edges = torch.empty((2, 0), dtype=torch.int64, device=device)
    return TokenGraph(edge_index=edges, num_targets=num_targets, num_sources=num_sources)
