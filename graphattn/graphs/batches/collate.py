"""Joining items of a dataset into one batch, either packed or padded to one length."""

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
    """Join items that each have a graph into one batch.

    Give it to a DataLoader: ``DataLoader(data, collate_fn=ga.collate)``. Each item is a PyG
    ``Data``, or a dict with a graph under "graph" (or an edge list under "edge_index") and any
    other fields. The graphs become one graph, as in :func:`~graphattn.batch`: if all of them are
    structured, it is structured, too. Each field becomes one tensor or one list, by its kind:

    - **per token**: the fields `tokens`, `input_ids`, `token_type_ids`, `attention_mask`,
      `position_ids`, `features`, `x`, `pos`, `positions` and `valid`, and any other tensor whose
      first dimension is the number of tokens in every item. They are concatenated to
      [N_total, ...].
    - **per edge**: fields whose names begin with `edge_`, and any other tensor whose first
      dimension is the number of edges in every item. They become [E_total, ...], in the order of
      the batch's ``graph.edge_index``. In an item, the values are in the order of the edges of its
      graph, or of its `edge_index`, and are sorted together with those edges.
    - **per source**: if targets and sources of the graphs are different tokens, the field
      `context`, and any other tensor whose first dimension is the number of sources in every item.
      They are concatenated to [M_total, ...].
    - **per item**: everything else. Numbers, and tensors of one shape, are stacked to [B, ...]
      (tensors [1, ...] of a Data are concatenated, as PyG does). Other values become a list.

    Lists of numbers and numpy arrays count as tensors. If the length of a field fits two kinds, or
    fits a kind in some items only, an error asks for its kind. Give the kind by `token_fields`,
    `source_fields`, `edge_fields` or `item_fields`, for example with
    ``collate_fn=functools.partial(ga.collate, item_fields=("target",))``.

    Args:
        items: dicts, or Data objects, that all have the same fields.
        graph: a function that makes the graph of an item from its number of tokens, if the items
            have no graphs.
        padding: whether fields per token are padded to [B, N, ...], with ``batch.valid`` [B, N],
            instead of concatenated to [N_total, ...].
        padding_value: the value in padding: one number, or a dict with a number for some fields,
            such as ``{"target": -100}``; the other fields then have 0.
        token_fields: names of fields that have one entry per token.
        source_fields: names of fields that have one entry per source.
        edge_fields: names of fields that have one entry per edge.
        item_fields: names of fields that have one value per item.

    Raises:
        ValueError: if there are no items, dicts are mixed with Data, items have different fields,
            an item has no graph (or has one although `graph` is given), the length of a field does
            not fit its graph, the shapes or dtypes of a field differ, or its kind is ambiguous.

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
    checked_items = read_items(items)
    declared = declared_kinds(
        checked_items, token=token_fields, source=source_fields, edge=edge_fields, item=item_fields
    )
    columns = Columns(checked_items, declared, graph)
    graphs, sizes, kinds = columns.graphs, columns.sizes, columns.kinds
    shape = (max(n for n, _ in sizes), max(m for _, m in sizes)) if padding else None
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
                f"padding_value must have names of fields per token ({', '.join(rows)}) as keys, "
                f"got {name!r}"
            )
        if not isinstance(value, bool | int | float):
            raise ValueError(
                f"padding_value must be a number, or a dict with a number per field, got {value!r}"
            )
    if not padding and any(given.values()):
        raise ValueError(
            f"padding_value must be 0 with padding=False, got {padding_value!r}; set padding=True "
            "to use it"
        )
    # A field that is read as a mask must be False in padding.
    return {**given, **{name: 0 for name in ("valid", "attention_mask") if name in rows}}


def _padded(name: str, values: list[Tensor], rows: int, fill: float) -> Tensor:
    """Pad tensors [N_b, ...] to one tensor [B, rows, ...]."""
    first = values[0]
    try:
        filled = first.new_full((), fill)
    except (RuntimeError, OverflowError):
        filled = None
    exact = first.is_floating_point() or first.is_complex()
    if filled is None or not (exact or filled.item() == fill):
        raise ValueError(
            f"padding_value of {name} must be a number that {first.dtype}, the dtype of {name}, "
            f"can represent, got {fill!r}"
        )
    out = first.new_full((len(values), rows, *first.shape[1:]), fill)
    for b, value in enumerate(values):
        out[b, : len(value)] = value
    return out


def _rows_of(graphs: list[TokenGraph], num_targets: int, num_sources: int) -> TokenGraph:
    """Join the graphs of B padded rows: every row holds one item and then padding without edges.

    A row counts as one sequence, so the positions in padding continue those of the item.
    """
    parts: list[TokenGraph] = []
    sizes: list[tuple[int, int]] = []
    starts: list[tuple[int, int]] = []
    for graph in graphs:
        missing = num_targets - graph.num_targets, num_sources - graph.num_sources
        parts.append(graph)
        if any(missing):
            parts.append(_graph_of_padding(graphs, *missing))
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
    """Return the positions in padded rows: those of the item, then the next numbers for padding."""
    sides: list[list[Tensor]] = [[], []]
    for graph in graphs:
        for side, rows in enumerate((num_targets, num_sources)):
            positions = graph.source_positions if side else graph.positions
            first = graph.starts[0][side] + len(positions) if len(graph.sizes) == 1 else 0
            padding = torch.arange(first, first + rows - len(positions), device=positions.device)
            sides[side] += [positions, padding]
    of_targets, of_sources = map(torch.cat, sides)
    return of_targets, of_targets if torch.equal(of_targets, of_sources) else of_sources


def _graph_of_padding(graphs: list[TokenGraph], num_targets: int, num_sources: int) -> TokenGraph:
    """Return a graph without edges, stored in the form of `graphs`: structure, table or list."""
    device = graphs[0].device
    if all(graph.structure is not None for graph in graphs):
        if num_targets == num_sources:
            return TokenGraph(structure=no_edges(num_targets), device=device)
        unconnected = Parts((Complete(num_targets, 0), Complete(0, num_sources)))
        return TokenGraph(structure=unconnected, sizes=((num_targets, num_sources),), device=device)
    if all(graph.is_table for graph in graphs):
        table = torch.full((num_targets, 1), -1, dtype=torch.int64, device=device)
        return TokenGraph(neighbors=table, num_targets=num_targets, num_sources=num_sources)
    edges = torch.empty((2, 0), dtype=torch.int64, device=device)
    return TokenGraph(edge_index=edges, num_targets=num_targets, num_sources=num_sources)
