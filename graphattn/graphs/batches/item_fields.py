"""The items of a batch, and the kind of each of their fields: per token, source, edge or item."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from graphattn.graphs.batches.token_batch import OWN_NAMES, Kind
from graphattn.graphs.conversions.from_libraries import from_edge_index
from graphattn.graphs.token_graph import TokenGraph

TOKEN_NAMES = frozenset(
    {
        "tokens", "input_ids", "token_type_ids", "attention_mask", "position_ids",
        "features", "x", "pos", "positions", "valid",
    }
)  # fmt: skip
SOURCE_NAMES = frozenset({"context"})
GRAPH_NAMES = ("graph", "edge_index")


class Item:
    """One item: its fields without its graph, and its number of tokens if a Data knows it."""

    def __init__(self, place: int, given: Any) -> None:
        self.place, self.data = place, None
        self.num_tokens: int | None = None
        if _is_pyg(given):
            self.data, self.fields = given, _fields_of_data(place, given)
            if any(name in given for name in ("num_nodes", "x", "pos")):
                self.num_tokens = given.num_nodes
        elif isinstance(given, Mapping):
            self.fields = dict(given)
        else:
            raise ValueError(
                f"items must hold dicts or PyG's Data, got a {type(given).__name__} as "
                f"items[{place}]" + _advice(given)
            )
        for name in self.fields:
            if not isinstance(name, str):
                raise ValueError(
                    f"items[{place}] must have strings as names of fields, got {name!r}"
                )
            if name in OWN_NAMES and name != "graph":
                raise ValueError(
                    f"items[{place}] has a field {name!r}, but a TokenBatch has an attribute of "
                    "that name: give the field another name"
                )
        graphs = [self.fields.pop(name, None) for name in GRAPH_NAMES]
        if None not in graphs:
            raise ValueError(
                f"items[{place}] must have either a graph or an edge_index, but has both: remove "
                "one of them"
            )
        self.graph = graphs[0] if graphs[1] is None else graphs[1]

    def label(self, name: str) -> str:
        return f"items[{self.place}]" + (f".{name}" if self.data is not None else f"[{name!r}]")


def _advice(given: Any) -> str:
    if isinstance(given, TokenGraph):
        return ": graphattn.batch joins graphs alone"
    if isinstance(given, tuple | list):
        return ": name its parts, as in {'features': x, 'graph': graph, 'target': y}"
    return ""


def _is_pyg(given: Any) -> bool:
    """Whether `given` is a PyG Data. If PyG is not imported, there can be no such object."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(given, module.BaseData)


def _fields_of_data(place: int, data: Any) -> dict[str, Any]:
    kind = type(data).__name__
    if hasattr(data, "edge_types"):
        raise ValueError(
            f"items must hold dicts or PyG's Data, got a {kind} as items[{place}]: make a dict "
            "from one of its edge types, with 'graph': graphattn.from_pyg(data, edge_type)"
        )
    if hasattr(data, "ptr") and hasattr(data, "to_data_list"):
        raise ValueError(
            f"items must hold single Data objects, got a {kind} as items[{place}]: its "
            "to_data_list() returns them (graphattn.from_pyg(batch) returns only its graph)"
        )
    fields = dict(data.to_dict())
    fields.pop("num_nodes", None)
    return fields


def read_items(items: Iterable[Any]) -> list[Item]:
    if _is_pyg(items) or isinstance(items, Mapping | Tensor | TokenGraph | str):
        more = ": its to_data_list() returns them" if hasattr(items, "to_data_list") else ""
        raise ValueError(f"items must be a list of items, got a {type(items).__name__}{more}")
    if not isinstance(items, Iterable):
        raise ValueError(f"items must be a list of dicts or Data, got {type(items).__name__}")
    read = [Item(place, given) for place, given in enumerate(items)]
    if not read:
        raise ValueError("items must hold at least one item, got none")
    first = read[0]
    for item in read[1:]:
        if (item.data is None) != (first.data is None):
            kinds = ["a dict" if each.data is None else "a Data" for each in (first, item)]
            raise ValueError(
                f"items must be all dicts or all Data, got {kinds[0]} as items[0] and "
                f"{kinds[1]} as items[{item.place}]"
            )
        if differing := sorted(first.fields.keys() ^ item.fields.keys()):
            name = differing[0]
            has, lacks = (0, item.place) if name in first.fields else (item.place, 0)
            raise ValueError(
                f"items must all have the same fields, but items[{has}] has {name!r} and "
                f"items[{lacks}] does not"
            )
    return read


def declared_kinds(items: list[Item], **names: Iterable[str]) -> dict[str, Kind]:
    """Return the kind of every field that the caller names, after checking the names."""
    declared: dict[str, Kind] = {}
    for kind, given in names.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ValueError(
                f"{kind}_fields must be a tuple or list of names of fields, such as ({given!r},), "
                f"got {given!r}"
            )
        for name in given:
            if name not in items[0].fields:
                known = ", ".join(map(repr, items[0].fields)) or "none"
                raise ValueError(
                    f"{kind}_fields must be names of fields of the items ({known}), got {name!r}"
                )
            if declared.setdefault(name, cast(Kind, kind)) != kind:
                raise ValueError(
                    f"{kind}_fields and {declared[name]}_fields both name {name!r}: a field has "
                    "one kind, so remove it from one of them"
                )
    return declared


class Columns:
    """The fields of all items, one list of values for each name, and the graphs of the items.

    Attributes:
        values: the values of every field, by name.
        graphs: the graph of every item.
        sizes: the (targets, sources) of every graph.
        kinds: the kind of every field.
    """

    def __init__(
        self,
        items: list[Item],
        declared: dict[str, Kind],
        build: Callable[[int], TokenGraph] | None,
    ) -> None:
        """Make the graphs by `build`, from numbers of tokens, if the items have none."""
        if build is not None and not callable(build):
            raise ValueError(
                "graph must be a function of the number of tokens, such as graphattn.complete_graph"
                f" or lambda n: graphattn.window_path_graph(n, 2), got a {type(build).__name__}"
            )
        self.items, self.declared = items, declared
        self.values = {
            name: _as_tensors([item.fields[name] for item in items]) for name in items[0].fields
        }
        self.graphs: list[TokenGraph] = []
        # For an item with an `edge_index`, the permutation that sorted it.
        self._orders: list[Tensor | None] = []
        for item in items:
            graph, order = self._graph_of(item, build)
            self.graphs.append(graph)
            self._orders.append(order)
        self.sizes = [(graph.num_targets, graph.num_sources) for graph in self.graphs]
        self.kinds = {name: self._kind(name) for name in self.values}
        for name, kind in self.kinds.items():
            if kind != "item":
                self._check_rows(name, kind)
            if kind == "edge":  # in the order of the edges of the graphs
                self.values[name] = [
                    value if order is None else value[order.to(value.device)]
                    for value, order in zip(self.values[name], self._orders, strict=True)
                ]

    def _graph_of(
        self, item: Item, build: Callable[[int], TokenGraph] | None
    ) -> tuple[TokenGraph, Tensor | None]:
        if item.graph is None and build is None:
            raise ValueError(
                f"items[{item.place}] has no graph under 'graph' or 'edge_index': give "
                "graph=, a function of the number of tokens, such as graphattn.complete_graph"
            )
        if item.graph is not None and build is not None:
            raise ValueError(
                f"graph must be None if items have graphs, but items[{item.place}] has a graph "
                "and graph= is given: remove one of the two"
            )
        if isinstance(item.graph, TokenGraph):
            return item.graph, None
        num_tokens = self._num_tokens(item)
        if build is None:
            try:
                return from_edge_index(item.graph, num_tokens, return_permutation=True)
            except ValueError as error:
                raise ValueError(f"{item.label('edge_index')}: {error}") from None
        graph = build(num_tokens)
        if not isinstance(graph, TokenGraph) or graph.num_targets != num_tokens:
            raise ValueError(
                f"graph must make a TokenGraph of {num_tokens} tokens for "
                f"items[{item.place}], got {graph!r}"
            )
        return graph, None

    def _num_tokens(self, item: Item) -> int:
        """Count the tokens of an item that has no TokenGraph."""
        if item.num_tokens is not None:
            return item.num_tokens
        for name, values in self.values.items():
            value = values[item.place]
            if self._kind_by_name(name) == "token" and isinstance(value, Tensor) and value.dim():
                return len(value)
        raise ValueError(
            f"items[{item.place}] has an unknown number of tokens, because it has no field "
            f"{', '.join(sorted(TOKEN_NAMES))}: name a field with one entry per token by "
            "token_fields="
        )

    def _kind(self, name: str) -> Kind:
        """Return the kind of a field, by its name or, if that says nothing, by its length."""
        kind = self._kind_by_name(name) or self._kind_by_length(name)
        if kind != "item" or name not in self.declared:
            self._refuse_indices(name)
        return kind

    def _kind_by_name(self, name: str) -> Kind | None:
        if name in self.declared:
            return self.declared[name]
        if name in TOKEN_NAMES:
            return "token"
        if name in SOURCE_NAMES:
            return "source"
        return "edge" if name.startswith("edge_") else None

    def _kind_by_length(self, name: str) -> Kind:
        values = self.values[name]
        if not all(isinstance(value, Tensor) and value.dim() for value in values):
            return "item"
        bipartite = any(n != m for n, m in self.sizes)
        fits: list[set[Kind]] = []
        for value, graph, (n, m) in zip(values, self.graphs, self.sizes, strict=True):
            lengths: dict[Kind, int] = {"token": n, "edge": graph.num_edges}
            if bipartite:
                lengths["source"] = m
            fits.append({kind for kind, length in lengths.items() if length == len(value)})
        in_all = set.intersection(*fits)
        if len(in_all) == 1:
            return in_all.pop()
        if in_all:
            one, two = sorted(in_all)[:2]
            raise ValueError(
                f"{name} is ambiguous: in every item its length is the number of {one} entries and "
                f"of {two} entries. Say which is meant by {one}_fields=({name!r},) or "
                f"{two}_fields=({name!r},)"
            )
        fitting = [place for place, kinds in enumerate(fits) if kinds]
        if not fitting or all(
            len(values[place]) == 1 and self.items[place].data is not None for place in fitting
        ):  # In PyG, [1, ...] is one value per item, even if the item has a single node.
            return "item"
        meant = min(fits[fitting[0]])
        other = next(place for place, kinds in enumerate(fits) if meant not in kinds)
        raise ValueError(
            f"{name} has one entry per {meant} in items[{fitting[0]}], but not in items[{other}], "
            f"where its shape is {list(values[other].shape)}: give its kind by "
            f"{meant}_fields=({name!r},) or item_fields=({name!r},)"
        )

    def _refuse_indices(self, name: str) -> None:
        """Raise ValueError for fields that hold indices of nodes.

        PyG adds the number of nodes before an item to such fields. Here they are not changed, so
        joining them would give wrong indices.
        """
        for item in self.items:
            value = item.fields[name]
            if item.data is None or not isinstance(value, Tensor):
                continue
            step = item.data.__inc__(name, value)
            if bool(step.any() if isinstance(step, Tensor) else step != 0):
                raise ValueError(
                    f"{item.label(name)} holds indices of nodes, which PyG would shift from item "
                    f"to item: with item_fields=({name!r},) the indices of each item stay unchanged"
                )

    def _check_rows(self, name: str, kind: Kind) -> None:
        """Check a field per token, source or edge.

        All its values must be tensors [rows of the item, ...] of one dtype, on one device, and
        equal in the dimensions after the first.
        """
        values = self.values[name]
        for item, value, graph, (n, m) in zip(
            self.items, values, self.graphs, self.sizes, strict=True
        ):
            rows = n if kind == "token" else m if kind == "source" else graph.num_edges
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{item.label(name)} must be a tensor of shape [{rows}, ...] with one entry "
                    f"per {kind} of its graph, got {got}: if it is one value per item, say "
                    f"item_fields=({name!r},)"
                )
            _check_alike(name, values[0], value, item.place, 1)

    def per_item(self, name: str, joined: set[str]) -> Any:
        """Join a field per item: stack numbers and tensors of one shape, or else return a list."""
        values = self.values[name]
        if all(isinstance(value, bool | int | float) for value in values):
            return torch.tensor(values)
        first = values[0]
        if not all(isinstance(value, Tensor) and value.shape == first.shape for value in values):
            return values
        for place, value in enumerate(values):
            _check_alike(name, first, value, place, 0)
        data = self.items[0].data
        if data is None or first.shape[:1] != (1,) or data.__cat_dim__(name, first) != 0:
            return torch.stack(values)
        joined.add(name)
        return torch.cat(values)


def _check_alike(name: str, first: Tensor, value: Tensor, place: int, skip: int) -> None:
    for what, a, b in (
        ("shape after the first dimension", list(first.shape[skip:]), list(value.shape[skip:])),
        ("dtype", first.dtype, value.dtype),
        ("device", first.device, value.device),
    ):
        if a != b:
            raise ValueError(
                f"{name} must have the same {what} in all items, got {a} in items[0] and {b} in "
                f"items[{place}]"
            )


def _as_tensors(values: list[Any]) -> list[Any]:
    """Convert numpy arrays and lists of numbers to tensors; return other values unchanged."""
    values = [
        torch.tensor(value) if type(value).__module__ == "numpy" and _is_numeric(value) else value
        for value in values
    ]
    if not all(isinstance(value, list) and _holds_numbers(value) for value in values):
        return values
    try:
        tensors = [torch.tensor(value) for value in values]
    except (TypeError, ValueError):  # rows of different lengths, or strings among the numbers
        return values
    # An empty list has no dtype of its own: torch.tensor([]) is always float32.
    dtypes = {tensor.dtype for tensor in tensors if tensor.numel()}
    if not dtypes:
        return tensors
    dtype = reduce(torch.promote_types, dtypes)
    return [tensor.to(dtype) for tensor in tensors]


def _is_numeric(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) in tuple("biufc")


def _holds_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, bool | int | float | list)
