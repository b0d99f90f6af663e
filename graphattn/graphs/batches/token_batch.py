"""TokenBatch: a batch of items that each have a graph, made by `collate`."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, KeysView
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice
from graphattn.graphs.conversions.to_libraries import pyg_batch_of_items
from graphattn.graphs.token_graph import TokenGraph

if TYPE_CHECKING:
    from torch_geometric.data import Batch

Kind = Literal["token", "source", "edge", "item"]
# Attributes of a TokenBatch: fields of the items may not have these names.
OWN_NAMES = ("batch", "ptr", "cu_seqlens", "lengths", "source_lengths", "sizes", "graph")


class TokenBatch:
    """A batch of items that each have a graph, as tensors over all their tokens.

    It is made by :func:`~graphattn.collate`. In a packed batch, the tokens of all items are
    concatenated, and fields per token are [N_total, ...]. In a padded batch
    (``collate(..., padding=True)``), they are [B, N, ...], where N is the length of the longest
    item. In both, ``layer(batch.features, batch.graph, valid=batch.valid)`` computes for every item
    the same as for that item alone: :attr:`graph` is one graph over all tokens, without edges
    between items or to padding. Layers and models take padded features [B, N, dim] with this graph.
    Operations, and modules that make biases, take the rows concatenated: ``x.flatten(0, 1)``.

    A field is an attribute and an entry: ``batch.tokens`` is ``batch["tokens"]``. Fields per edge
    are [E_total, ...], in the order of ``graph.edge_index``. Fields per item are stacked to
    [B, ...], or are a list if they are neither numbers nor tensors of one shape.

    Attributes:
        graph: one :class:`TokenGraph` over N_total tokens (packed) or B * N tokens (padded).
        batch: LongTensor, the item of every token of `graph`, as PyG's `batch`.
        lengths: LongTensor [B], the number of tokens of every item (of targets, if targets and
            sources are different tokens).
        source_lengths: LongTensor [B], the number of sources of every item.
        sizes: (targets, sources) of every item, as a tuple of pairs of ints.
        ptr: LongTensor [B + 1], where the tokens of every item begin in the packed order, as PyG's
            `ptr`.
        cu_seqlens: `ptr` as int32, which flash-attention takes together with :attr:`max_seqlen`.
        valid: bool, True where a token is real; None if all tokens are. In a padded batch it is
            [B, N] (a pair for targets and sources if these are different tokens). If the items have
            a field `valid`, or Hugging Face's `attention_mask`, the tokens that it marks as False
            or 0 are not valid either.

    Example:
        >>> import torch, graphattn as ga
        >>> batch = ga.collate(
        ...     [
        ...         {"tokens": torch.tensor([4, 2]), "graph": ga.causal_graph(2), "name": "a"},
        ...         {"tokens": torch.tensor([1, 3, 0]), "graph": ga.causal_graph(3), "name": "b"},
        ...     ]
        ... )
        >>> batch
        TokenBatch(2 items, num_tokens=5, num_edges=9, tokens=[5], name=list)
        >>> batch.positions, batch.cu_seqlens
        (tensor([0, 1, 0, 1, 2]), tensor([0, 2, 5], dtype=torch.int32))
        >>> model = ga.models.SequenceEncoder(vocab_size=5, dim=8, depth=1, heads=2)
        >>> logits = model(batch.tokens, batch.graph)
        >>> [rows.shape for rows in batch.unpack(logits)]
        [torch.Size([2, 5]), torch.Size([3, 5])]
    """

    graph: TokenGraph
    batch: Tensor
    lengths: Tensor
    source_lengths: Tensor
    sizes: tuple[tuple[int, int], ...]
    ptr: Tensor
    cu_seqlens: Tensor
    valid: Tensor | tuple[Tensor | None, Tensor | None] | None

    def __init__(
        self,
        *,
        fields: dict[str, Any],
        kinds: dict[str, Kind],
        graph: TokenGraph,
        sizes: list[tuple[int, int]],
        shape: tuple[int, int] | None = None,
        had_batch_dimension: tuple[str, ...] = (),
    ) -> None:
        self._fields = fields
        self._kinds = kinds
        self.sizes = tuple(sizes)
        self._shape = shape  # (targets, sources) of a padded row; None for a packed batch
        # Names of fields that were [1, ...] in every item, which PyG concatenates, not stacks.
        self._had_batch_dimension = had_batch_dimension
        self.graph = graph
        device = graph.device
        targets = torch.tensor([targets for targets, _ in sizes], dtype=torch.int64)
        self.source_lengths = torch.tensor([n for _, n in sizes], dtype=torch.int64).to(device)
        self.ptr = torch.cat([targets.new_zeros(1), targets.cumsum(0)]).to(device)
        self.cu_seqlens = self.ptr.int()
        rows = targets if shape is None else torch.full_like(targets, shape[0])
        self.batch = torch.arange(len(sizes)).repeat_interleave(rows).to(device)
        self.lengths = targets.to(device)
        self.valid = self._valid_tokens()

    def _valid_tokens(self) -> Tensor | tuple[Tensor | None, Tensor | None] | None:
        names = [n for n in ("valid", "attention_mask") if self._kinds.get(n) == "token"]
        given = self._as_mask(names[0]) if names else None
        if self._shape is None:
            of_targets, of_sources = given, None
        else:
            of_targets, of_sources = (
                torch.arange(most, device=lengths.device) < lengths[:, None]
                for most, lengths in zip(
                    self._shape, (self.lengths, self.source_lengths), strict=True
                )
            )
            if given is not None:
                of_targets = of_targets & given
        if all(targets == sources for targets, sources in self.sizes):
            return of_targets
        return None if of_targets is None and of_sources is None else (of_targets, of_sources)

    def _as_mask(self, name: str) -> Tensor:
        """Convert a field per token that holds booleans, or 0 and 1, to bool."""
        mask = self._fields[name]
        rows = 1 if self._shape is None else 2
        if mask.dim() != rows or not bool(((mask == 0) | (mask == 1)).all()):
            shown = f"{mask.dtype} of shape {list(mask.shape)}"
            raise ValueError(
                f"items must hold {name} as booleans (or 0 and 1), one per token, got {shown}"
                + ("" if mask.dim() != rows else " with numbers other than 0 and 1")
            )
        return mask.bool()

    # Facts.

    def __len__(self) -> int:
        """The number of items B."""
        return len(self.sizes)

    # Not iterable: iteration over items and over names of fields would be equally plausible.
    __iter__ = None

    @property
    def is_padded(self) -> bool:
        """Whether fields per token are [B, N, ...]."""
        return self._shape is not None

    @property
    def max_seqlen(self) -> int:
        """The number of tokens of the longest item, as an int, without waiting for a GPU."""
        return max(targets for targets, _ in self.sizes)

    @property
    def device(self) -> torch.device:
        """Device of :attr:`graph`."""
        return self.graph.device

    @property
    def positions(self) -> Tensor:
        """Positions of all tokens: [N_total], or [B, N] in a padded batch.

        If the items have a field `positions` (or Hugging Face's `position_ids`), it is this field.
        Otherwise it is the positions of the graph, which restart in every item.
        """
        for name in ("positions", "position_ids"):
            if name in self._fields:
                given: Tensor = self._fields[name]
                return given
        positions = self.graph.positions
        return positions if self._shape is None else positions.view(len(self), -1)

    # Fields.

    def keys(self) -> KeysView[str]:
        """The names of the fields."""
        return self._fields.keys()

    def items(self) -> ItemsView[str, Any]:
        """The fields with their names."""
        return self._fields.items()

    def kind(self, name: str) -> Kind:
        """Say whether a field has one entry per "token", "source", "edge" or "item"."""
        self[name]
        return self._kinds[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise TypeError(
                f"a TokenBatch must be indexed by the name of a field, got {name!r}: use unpack(y) "
                "to get the rows of each item"
            )
        if name not in self._fields:
            raise KeyError(
                f"{name!r} is no field of this batch, whose fields are {', '.join(self._fields)}"
            )
        return self._fields[name]

    def __getattr__(self, name: str) -> Any:  # called only for names that are not attributes
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(
            f"{name!r} is neither an attribute nor a field of this TokenBatch: "
            f"its fields are {', '.join(fields)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        is_attribute = name in TokenBatch.__annotations__ or hasattr(TokenBatch, name)
        if name in self.__dict__.get("_fields", {}) and not is_attribute:
            self._fields[name] = value  # used for augmentation in a training loop, for example
        else:
            object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._fields})

    def __repr__(self) -> str:
        graph = repr(self.graph).removeprefix("TokenGraph(").removesuffix(")")
        facts = [f"{len(self)} items", graph.split(", structure=")[0]]
        for name, value in self._fields.items():
            shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            facts.append(f"{name}={shown}")
        return f"TokenBatch({', '.join(facts)})"

    # Separate the items again.

    def unpack(self, y: Tensor, *, per: Kind = "token") -> list[Tensor]:
        """Split a tensor of the batch into one tensor per item, without padding.

        Args:
            y: values per token, [N_total, ...] (padded: [B, N, ...]); per edge, [E_total, ...] in
                the order of ``graph.edge_index``; or per item, [B, ...].
            per: "token", "source", "edge" or "item": what `y` has one entry for. The edges of an
                item are sorted by target, then source.

        Returns:
            A list of views of `y`, one per item: [N_b, ...], [E_b, ...] or [...].

        Raises:
            ValueError: if the shape of `y` does not fit the batch.
        """
        as_choice("per", per, ("token", "source", "edge", "item"))
        side = int(per == "source")
        B = len(self)
        if per in ("token", "source") and self._shape is not None:
            shape = [B, self._shape[side]]
        elif per == "item":
            shape = [B]
        else:
            parts = self.edge_counts() if per == "edge" else [size[side] for size in self.sizes]
            shape = [sum(parts)]
        if not isinstance(y, Tensor) or list(y.shape[: len(shape)]) != shape:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"y must be a tensor of shape [{', '.join(map(str, shape))}, ...] with "
                f"per={per!r}, got {got}"
            )
        if len(shape) == 2:
            return [y[b, : size[side]] for b, size in enumerate(self.sizes)]
        return list(y.unbind()) if per == "item" else list(y.split(parts))

    def edge_counts(self) -> list[int]:
        """Count the edges of every item; on a GPU this waits for the device."""
        begin = self.first_tokens()[:, 1]
        end = torch.tensor([self.graph.num_targets], device=self.device)
        counts: list[int] = self.graph.rowptr[torch.cat([begin, end])].diff().tolist()
        return counts

    def first_tokens(self) -> Tensor:
        """Return, as a LongTensor [B, 2], every item's first source and first target in `graph`."""
        sizes = [self._shape] * len(self) if self._shape is not None else self.sizes
        rows = torch.tensor([(0, 0), *sizes], dtype=torch.int64).cumsum(0)[:-1]
        return rows.flip(1).to(self.device)

    def to_pyg(self) -> Batch:
        """Convert to PyG's ``Batch``, in which each item is a ``Data`` with its edges and fields.

        ``batch.to_pyg().to_data_list()`` returns the items that :func:`~graphattn.collate` was
        given. Edges, and values per edge, are then sorted by target, then source. Numbers are
        tensors. There is no padding.

        Raises:
            ValueError: if targets and sources are different tokens, because a Data has one kind of
                nodes.

        Example:
            >>> import torch, graphattn as ga
            >>> path = torch.tensor([[0, 1], [1, 0]])
            >>> items = [{"x": torch.ones(n, 4), "graph": ga.causal_graph(n)} for n in (2, 3)]
            >>> ga.collate(items).to_pyg()
            DataBatch(x=[5, 4], edge_index=[2, 9], num_nodes=5, batch=[5], ptr=[3])
        """
        columns = {name: self.values_of_items(name) for name in self.keys()}
        rows = self.first_tokens()
        edges = self.unpack(self.graph.edge_index.T, per="edge")
        return pyg_batch_of_items(
            self.sizes,
            [(pairs - first).T.contiguous() for pairs, first in zip(edges, rows, strict=True)],
            [{name: values[b] for name, values in columns.items()} for b in range(len(self))],
        )

    def values_of_items(self, name: str) -> list[Any]:
        """List the values of a field, one per item, with the shape that they had in the item."""
        value, kind = self[name], self._kinds[name]
        if kind != "item":
            return self.unpack(value, per=kind)
        if name in self._had_batch_dimension:
            return list(value.split(1))
        return list(value)

    # Devices.

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> TokenBatch:
        """Return this batch on another device, with its graph and all tensors."""
        device = torch.empty(0, device=device).device
        return self._with_tensors(
            lambda x: x.to(device, non_blocking=non_blocking),
            self.graph.to(device, non_blocking=non_blocking),
        )

    def cuda(
        self, device: torch.device | str | int | None = None, non_blocking: bool = False
    ) -> TokenBatch:
        """Return this batch on a GPU, the current one if None."""
        return self.to("cuda" if device is None else device, non_blocking)

    def cpu(self) -> TokenBatch:
        """Return this batch in main memory."""
        return self.to("cpu")

    def pin_memory(self) -> TokenBatch:
        """Copy to page-locked memory; ``DataLoader(pin_memory=True)`` calls this."""
        return self._with_tensors(Tensor.pin_memory, self.graph.pin_memory())

    def _with_tensors(self, change: Callable[[Tensor], Tensor], graph: TokenGraph) -> TokenBatch:
        changed = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(changed)[name] = graph if name == "graph" else _changed(value, change)
        return changed


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in dicts, lists and tuples; return other values as is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {name: _changed(entry, change) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(entry, change) for entry in value)
    return value


# As for a TokenGraph, `torch.load(path, weights_only=True)` may read a TokenBatch.
torch.serialization.add_safe_globals([TokenBatch])
