"""Storage of a graph's edges: in closed form, as a table of neighbours, or as a list."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from graphattn.graphs.edges.index_width import are_narrow, as_stored, is_stored_wide
from graphattn.graphs.edges.lists import (
    edges_of_rows,
    edges_of_structure,
    order_by_source,
    sorted_edge_list,
)
from graphattn.graphs.edges.stored_values import usable_for_training
from graphattn.graphs.structures.composites import Parts, Section
from graphattn.graphs.structures.graph_code import encode
from graphattn.graphs.structures.structure import Device, GraphStructure
from graphattn.kernels.shared.stored import (
    NOT_STORED,
    OnStream,
    as_entry,
    kept_for_training,
    makes_fakes,
    may_store,
)

T = TypeVar("T")
# A graph that is made from another one has the class of that one.
G = TypeVar("G", bound="StoredGraph")
MOST_DERIVED = 32  # results that a graph stores for operations
INDICES = ("_edge_index", "_neighbors", "_rowptr", "_transpose_permutation")


class StoredGraph:
    """The stored edges between targets and sources, and everything that is derived from them.

    Users have a :class:`~graphattn.TokenGraph`, which adds the methods that make other graphs and
    convert to other libraries. Functions that need only the edges take this base class.
    """

    def __init__(
        self,
        *,
        structure: GraphStructure | None = None,
        edge_index: Tensor | None = None,
        neighbors: Tensor | None = None,
        num_targets: int | None = None,
        num_sources: int | None = None,
        sizes: tuple[tuple[int, int], ...] | None = None,
        is_causal: bool = False,
        has_causal_part: bool | None = None,
        device: Device = None,
        starts: tuple[tuple[int, int], ...] | None = None,
        positions: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        listed = edge_index if neighbors is None else neighbors
        if structure is not None:
            num_targets, num_sources = structure.num_targets, structure.num_sources
            is_causal, has_causal_part = structure.is_causal, structure.has_causal_part
        elif listed is None or num_targets is None or num_sources is None:
            raise ValueError(
                "TokenGraph() must not be called directly: make graphs by a builder, such as "
                "graphattn.from_edge_index"
            )
        else:
            device = listed.device
        assert num_targets is not None
        assert num_sources is not None
        if neighbors is not None and (
            neighbors.dtype not in (torch.int64, torch.int32)
            or neighbors.dim() != 2
            or len(neighbors) != num_targets
        ):  # The entries are not checked, because reading them would wait for the device.
            raise ValueError(
                f"neighbors must be an int64 tensor [{num_targets}, k] (num_targets = "
                f"{num_targets}), got {neighbors.dtype} of shape {list(neighbors.shape)}"
            )
        self._num_targets = num_targets
        self._num_sources = num_sources
        self._structure = structure
        self._is_causal = is_causal
        self._has_causal_part = is_causal if has_causal_part is None else has_causal_part
        self._device = torch.device("cpu" if device is None else device)
        self._sizes = sizes or ((num_targets, num_sources),)
        self._starts = _starts_of(starts or ((0, 0),) * len(self._sizes), self._sizes)
        # In a trace, lists and symbolic sizes stand for those of later calls.
        is_symbolic = isinstance(num_targets, torch.SymInt) or isinstance(num_sources, torch.SymInt)
        is_jitted = (
            not torch.compiler.is_dynamo_compiling() and torch._C._get_tracing_state() is not None
        )
        self._is_constant = not (makes_fakes() or is_jitted) or not (
            is_symbolic or listed is not None or positions is not None
        )
        with self.storing():
            if neighbors is not None:
                neighbors = usable_for_training(self._as_stored(neighbors, neighbors.numel()))
            if edge_index is not None:
                edge_index = usable_for_training(self._as_stored(edge_index, edge_index.shape[1]))
            self._neighbors, self._edge_index = neighbors, edge_index
            # Positions that do not just count the tokens, as after `permute`. Those of the sources
            # are None if they are the same as those of the targets.
            of_targets, of_sources = positions or (None, None)
            if of_sources is of_targets:
                of_sources = None
            self._own_positions = usable_for_training(of_targets)
            self._own_source_positions = usable_for_training(of_sources)
        self._forget()
        with self.storing():
            self._code = encode(self)

    def _forget(self) -> None:
        """Drop everything that can be derived again."""
        if self._structure is not None or self._neighbors is not None:
            self._edge_index = None
        self._rowptr: Tensor | None = None
        # Small lists in int64, each with its version and that of the list it was converted from.
        # The version of a tensor changes when somebody writes into it.
        self._wide: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._points_backward: bool | None = None
        self.warned_backward = False  # whether the warning about backward edges was given already
        self._positions = self._own_positions
        self._source_positions = self._own_source_positions
        self._transposed: Self | None = None
        self._transpose_permutation: Tensor | None = None
        self._derived: dict[Any, Any] = {}
        # On a GPU: the attributes that were derived or copied, and the stream that did it.
        on_gpu = self._device.type == "cuda"
        self._on_streams: dict[str, OnStream[Any]] | None = {} if on_gpu else None

    def storing(self) -> AbstractContextManager[object]:
        """Context in which to make what is stored for this graph; see :func:`kept_for_training`.

        :func:`~graphattn.kernels.shared.stored.may_store` says inside whether it may be stored.
        """
        return kept_for_training(self._device, is_constant=self._is_constant)

    def _as_stored(self, index: Tensor, count: int) -> Tensor:
        """Convert a list with `count` edges, or places of edges, to the width that is stored."""
        return as_stored(index, self._num_targets, self._num_sources, count)

    def _widened(self, name: str, stored: Tensor) -> Tensor:
        """Return a stored list in int64, as users see it; store the result if it is small."""
        if stored.dtype == torch.int64:
            return stored
        if torch.compiler.is_dynamo_compiling():  # storing the result would cause a recompilation
            return stored.long()
        kept = self._wide.get(name)
        # Equal versions mean that nobody has written into the lists since the conversion.
        if kept is not None and kept[0] == (stored._version, kept[1]._version):
            return kept[1]
        with self.storing():
            wide = stored.long()
            if is_stored_wide(stored) and may_store(self._device):
                self._wide[name] = (stored._version, wide._version), wide
        return wide

    def _store(self, name: str, made: T) -> T:
        """Store a value as an attribute, if it may be read later, and return it."""
        if torch.compiler.is_dynamo_compiling():
            setattr(self, name, made)
        elif may_store(self._device):
            setattr(self, name, made)
            if self._on_streams is not None:
                self._on_streams[name] = OnStream(made, self._device)
        return made

    def _stored(self, name: str, make: Callable[[], T]) -> T:
        """Return an attribute; if it is None, make it and store it."""
        value: T | None = getattr(self, name)
        if value is None:
            with self.storing():
                return self._store(name, make())
        if self._on_streams is not None:
            self._await(name)
        return value

    def _await(self, name: str) -> None:
        """Let the current stream of a GPU wait for the one that made or copied an attribute."""
        if torch.compiler.is_compiling():  # which would compile anew for other attributes
            return
        if self._on_streams is not None and name in self._on_streams:
            self._on_streams[name].read()

    # Sizes and facts.

    def fits(self, like: Tensor, num_targets: int, num_sources: int) -> bool:
        """Whether the graph has these sizes and is on the device of the tensor `like`."""
        return (
            self._num_targets == num_targets
            and self._num_sources == num_sources
            and self._device == like.device
        )

    @property
    def num_targets(self) -> int:
        """N, the number of targets."""
        return self._num_targets

    @property
    def num_sources(self) -> int:
        """M, the number of sources; it equals N unless the graph is bipartite."""
        return self._num_sources

    @property
    def num_tokens(self) -> int:
        """N, if there are as many targets as sources; otherwise reading it raises ValueError."""
        if self._num_targets != self._num_sources:
            raise ValueError(
                f"num_tokens is undefined, because this graph has {self._num_targets} targets and "
                f"{self._num_sources} sources: use num_targets or num_sources"
            )
        return self._num_targets

    @property
    def num_edges(self) -> int:
        """E, the number of edges; they are counted without being listed.

        For a table of neighbours on a GPU, this waits for the device.
        """
        if self._edge_index is not None:
            return self._edge_index.shape[1]
        with self.storing():
            if self._neighbors is not None:
                return int((cast(Tensor, self.compact_neighbors) >= 0).sum())
            return cast(GraphStructure, self._structure).num_edges()

    @property
    def structure(self) -> GraphStructure | None:
        """The structure of the graph in closed form; None if it stores an edge list or a table."""
        return self._structure

    @property
    def neighbors(self) -> Tensor | None:
        """LongTensor [N, k], the sources of every target in ascending order.

        None if the graph does not store a table of neighbours. If a target has fewer than k
        sources, its row begins with -1. :func:`~graphattn.knn_graph` makes such graphs. Their size
        is known without reading a tensor, so on a GPU neither building them nor attention over them
        waits for the device (the kernels read the table). :attr:`num_edges`, :attr:`edge_index`,
        ``==``, ``repr`` and the methods ``to_*`` count or list the edges, and do wait.

        Example:
            >>> import torch, graphattn as ga
            >>> x = torch.tensor([[0.0], [1.0], [3.0], [3.5]])
            >>> ga.knn_graph(x, k=2).neighbors
            tensor([[1, 2],
                    [0, 2],
                    [1, 3],
                    [1, 2]])
            >>> ga.knn_graph(x, k=2, within=ga.causal_graph(4)).neighbors  # only what came before
            tensor([[-1, -1],
                    [-1,  0],
                    [ 0,  1],
                    [ 1,  2]])
        """
        neighbors = self.compact_neighbors
        return None if neighbors is None else self._widened("neighbors", neighbors)

    @property
    def is_table(self) -> bool:
        """Whether the graph stores a table of neighbours, :attr:`neighbors`."""
        return self._neighbors is not None

    @property
    def is_causal(self) -> bool:
        """Whether the graph was constructed such that no target sees a source after it.

        This follows from the structure. A graph made from a list of edges is never causal, even if
        all its edges point backward, because it is not known whether the numbers of its tokens are
        an order in time.
        """
        return self._is_causal

    @property
    def has_causal_part(self) -> bool:
        """Whether the graph, or at least one graph of a batch, is causal by construction.

        It does not change when the tokens are numbered in another order (:meth:`permute`), because
        every token still sees the same tokens.
        """
        return self._has_causal_part

    @property
    def points_backward(self) -> bool:
        """Whether a list or table has only edges with j <= i, at least one of them with j < i.

        It is computed once. For a structured graph it is False.
        """
        if self._points_backward is None:
            if self._structure is not None:
                return False
            with self.storing():
                gap = self.compact_edges.diff(dim=0)
                self._points_backward = bool((gap >= 0).all() and (gap > 0).any())
        return self._points_backward

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(targets, sources) of every graph of a :func:`~graphattn.batch`; one pair otherwise."""
        return self._sizes

    @property
    def starts(self) -> tuple[tuple[int, int], ...]:
        """Positions of the first target and the first source of every graph in :attr:`sizes`.

        They are 0, except in graphs with `past` and in graphs that :meth:`targets` returned.
        """
        return self._starts

    @property
    def has_same_tokens(self) -> bool:
        """Whether targets and sources are the same tokens.

        It is True if every sequence has as many targets as sources, and both begin at the same
        position.
        """
        pairs = (*self._sizes, *self._starts)
        return all(of_targets == of_sources for of_targets, of_sources in pairs)

    @property
    def batch(self) -> Tensor:
        """LongTensor [N], the graph of a :func:`~graphattn.batch` to which every target belongs.

        It is PyG's batch vector, computed at each call, and 0 for a single graph.

        Example:
            >>> import graphattn as ga
            >>> ga.batch([ga.causal_graph(2), ga.causal_graph(3)]).batch
            tensor([0, 0, 1, 1, 1])
        """
        sizes = torch.tensor([targets for targets, _ in self._sizes], device=self._device)
        part = torch.arange(len(sizes), device=self._device)
        return part.repeat_interleave(sizes, output_size=self._num_targets)

    @property
    def rank_of_part(self) -> tuple[int, int]:
        """The rank and the number of ranks, if this is a part of a graph on several ranks."""
        return 0, 1

    def maximum_per_sequence(self, values: Tensor) -> Tensor:
        """Return the maximum over the targets of every sequence, once for each of them, [*, N, H].

        Args:
            values: numbers of every target, [*, N, H].

        Example:
            >>> import torch, graphattn as ga
            >>> graph = ga.batch([ga.causal_graph(2), ga.causal_graph(3)])
            >>> graph.maximum_per_sequence(torch.tensor([[1], [2], [5], [4], [3]])).flatten()
            tensor([2, 2, 5, 5, 5])
        """
        if values.shape[-2] == 0:
            return values
        pieces = values.split([targets for targets, _ in self._sizes], dim=-2)
        return torch.cat(
            [p.amax(-2, keepdim=True).expand_as(p) if p.shape[-2] else p for p in pieces], dim=-2
        )

    @property
    def device(self) -> torch.device:
        """The device of edges and positions, even if they are not listed yet."""
        return self._device

    @property
    def code(self) -> Tensor:
        """Sizes and structure as an int64 tensor on the CPU, which a custom operator takes."""
        return self._code

    @property
    def listed(self) -> Tensor | None:
        """The stored table of neighbours or list of edges; None for a structured graph.

        A custom operator takes it together with :attr:`code`, which says which of the two it is. It
        is int32 on a CPU if all numbers fit, and int64 otherwise.
        """
        if self._structure is not None:
            return None
        if self._on_streams is not None:
            self._await("_edge_index" if self._neighbors is None else "_neighbors")
        return self._edge_index if self._neighbors is None else self._neighbors

    # Edges.

    @property
    def edge_index(self) -> Tensor:
        """LongTensor [2, E]: row 0 = source j, row 1 = target i; sorted by target, then source.

        For a large graph on a CPU, every access makes a new tensor, so read it once.
        """
        return self._widened("edge_index", self.compact_edges)

    def csr(self) -> tuple[Tensor, Tensor]:
        """``(rowptr [N + 1], source [E])``: target i sees ``source[rowptr[i]:rowptr[i + 1]]``."""
        return self.rowptr, self.edge_index[0]

    @property
    def rowptr(self) -> Tensor:
        """LongTensor [N + 1]: the first edge of every target, and E at the end."""
        return self._widened("rowptr", self.compact_rowptr)

    @property
    def compact_edges(self) -> Tensor:
        """:attr:`edge_index` as it is stored: int32 on a CPU if all numbers fit, otherwise int64.

        Do not write into it. ``index_select``, ``index_add`` and ``x[index]`` take int32 indices;
        ``gather`` and ``scatter`` do not. Products of int32 indices may overflow.

        Example:
            >>> import graphattn as ga
            >>> ga.causal_graph(2).compact_edges
            tensor([[0, 0, 1],
                    [0, 1, 1]], dtype=torch.int32)
        """
        return self._stored("_edge_index", self._list_edges)

    def _list_edges(self) -> Tensor:
        neighbors = self.compact_neighbors
        if neighbors is not None:
            edges = edges_of_rows(neighbors, is_sorted=True)
        else:
            edges = edges_of_structure(cast(GraphStructure, self._structure), self._device)
        return self._as_stored(edges, edges.shape[1])

    @property
    def compact_rowptr(self) -> Tensor:
        """:attr:`rowptr`, with the dtype of :attr:`compact_edges`."""
        return self._stored("_rowptr", self._count_edges)

    def _count_edges(self) -> Tensor:
        degree = self.in_degree()
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        if self._device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
            rowptr = self._as_stored(rowptr, int(rowptr[-1]))
        return rowptr

    @property
    def compact_neighbors(self) -> Tensor | None:
        """:attr:`neighbors` as stored: int32 on a CPU if all numbers fit, otherwise int64."""
        if self._on_streams is not None:
            self._await("_neighbors")
        return self._neighbors

    def compact_csr(self) -> tuple[Tensor, Tensor]:
        """:meth:`csr`, with the dtype of :attr:`compact_edges`."""
        # Detached, because a plain view holds the list. What is stored as long as the list lives
        # (`graphattn/ops/edge_cache.py`) must not hold it, or neither is ever freed.
        return self.compact_rowptr, self.compact_edges[0].detach()

    def in_degree(self) -> Tensor:
        """Count the sources of every target; LongTensor [N]."""
        with self.storing():
            if self._structure is not None and self._edge_index is None:
                return self._structure.in_degree(self._device)
            neighbors = self.compact_neighbors
            if neighbors is not None:
                return (neighbors >= 0).sum(dim=1)
            return torch.bincount(self.compact_edges[1], minlength=self._num_targets)

    def transpose(self) -> Self:
        """Return the graph with sources and targets exchanged.

        :meth:`transpose_permutation` says which edge is which.
        """
        return self._stored("_transposed", self._make_transposed)

    def _make_transposed(self) -> Self:
        flipped = None if self._structure is None else self._structure.transpose()
        edge_index = None
        if flipped is None:
            edge_index = self.compact_edges.flip(0)[:, self._order_by_source()]
        transposed = type(self)(
            structure=flipped,
            edge_index=edge_index,
            num_targets=self._num_sources,
            num_sources=self._num_targets,
            sizes=tuple((sources, targets) for targets, sources in self._sizes),
            starts=tuple((source, target) for target, source in self._starts),
            positions=self.own_positions and self.own_positions[::-1],
            device=self._device,
        )
        transposed._transposed = self
        return transposed

    def transpose_permutation(self) -> Tensor:
        """Return a LongTensor [E]: edge e of ``transpose()`` is edge ``permutation[e]`` here.

        So ``weights[graph.transpose_permutation()]`` are weights per edge in the order of
        ``graph.transpose().edge_index``.
        """
        return self._widened("transpose_permutation", self._order_by_source())

    def _order_by_source(self) -> Tensor:
        def make() -> Tensor:
            order = order_by_source(*self.compact_csr(), self._num_sources)
            return self._as_stored(order, len(order))

        return self._stored("_transpose_permutation", make)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, and store the result under `key`, for example a plan of an operation.

        If the list or table of edges was changed in place, the result is computed again. Copies and
        files do not contain stored results. If there are too many results, all are deleted.
        """
        listed, results = self.listed, self._derived
        key = key, None if listed is None else listed._version
        # One lookup only, because another thread may clear the dict between two lookups.
        result: T = results.get(key, NOT_STORED)
        if result is NOT_STORED:
            with self.storing():
                result = make()
                if not may_store(self._device):
                    return result
                if len(results) >= MOST_DERIVED:
                    results.clear()
                results[key] = as_entry(result, self._device)
        elif isinstance(result, OnStream):
            result = result.read()
        return result

    # Positions.

    @property
    def positions(self) -> Tensor:
        """LongTensor [N], the position of every target in its own sequence; rotary layers read it.

        After :meth:`permute` it is the position that the token had before.
        """
        return self._stored("_positions", lambda: self._counted(0))

    @property
    def source_positions(self) -> Tensor:
        """LongTensor [M], the position of every source; `positions` if they are the targets."""
        if self._source_positions is None and (
            self._own_positions is not None or self.has_same_tokens
        ):
            return self.positions
        return self._stored("_source_positions", lambda: self._counted(1))

    @property
    def own_positions(self) -> tuple[Tensor, Tensor] | None:
        """Positions of targets and sources after :meth:`permute`; None if they count the tokens."""
        return None if self._own_positions is None else (self.positions, self.source_positions)

    def has_positions_of(self, other: StoredGraph) -> bool:
        """Whether the tokens have the same positions as in a graph of the same sizes and starts."""
        if self._own_positions is None and other._own_positions is None:
            return True
        return torch.equal(self.positions, other.positions) and torch.equal(
            self.source_positions, other.source_positions
        )

    def _counted(self, side: int) -> Tensor:
        """Count the positions of targets (side 0) or sources (side 1) in every sequence."""
        runs = zip(self._starts, self._sizes, strict=True)
        runs_of_side = [(start[side], start[side] + size[side]) for start, size in runs]
        return torch.cat([torch.arange(*run, device=self._device) for run in runs_of_side])

    # Devices, comparison, pickling.

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Return this graph on another device; if it is there already, return the same object."""
        device = torch.empty(0, device=device).device  # "cuda" means the current CUDA device
        if device == self._device:
            return self
        return self._with_tensors(lambda x: x.to(device, non_blocking=non_blocking), device)

    def cuda(
        self, device: torch.device | str | int | None = None, non_blocking: bool = False
    ) -> Self:
        """Return this graph on a GPU, the current one if None."""
        return self.to("cuda" if device is None else device, non_blocking)

    def cpu(self) -> Self:
        """Return this graph in main memory."""
        return self.to("cpu")

    def pin_memory(self) -> Self:
        """Copy the graph's tensors to page-locked memory; a DataLoader calls this."""
        return self._with_tensors(Tensor.pin_memory, self._device)

    def _with_tensors(self, change: Callable[[Tensor], Tensor], device: torch.device) -> Self:
        for name in self._on_streams or ():
            self._await(name)
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__)
        changed._device = device
        changed._transposed = None
        changed._wide, changed._derived = {}, {}
        changed._on_streams = {} if device.type == "cuda" else None
        has_tensors = self.listed is not None or self._own_positions is not None
        changed._is_constant = self._is_constant and not (makes_fakes() and has_tensors)
        for name, value in list(vars(changed).items()):
            if isinstance(value, Tensor) and name != "_code":
                if name not in INDICES:
                    new = change(value)
                elif device.type == "cpu":
                    # Convert before the copy, which may be asynchronous and finish later.
                    new = change(self._narrowed(value, device))
                else:
                    new = change(value).long()
                setattr(changed, name, new)
                if changed._on_streams is not None and may_store(device):
                    changed._on_streams[name] = OnStream(new, device)
        return changed

    def _narrowed(self, index: Tensor, device: torch.device) -> Tensor:
        """Convert a list that will be copied to a CPU to int32, if all its numbers fit."""
        listed = self.listed if self._edge_index is None else self._edge_index
        count = index.numel() if listed is None else listed.numel()
        sizes = self._num_targets, self._num_sources, count
        return index.to(torch.int32) if are_narrow(device, *sizes) else index

    def __getstate__(self) -> dict[str, Any]:
        small = object.__new__(type(self))
        small.__dict__.update(self.__dict__)
        small._forget()
        state = dict(small.__dict__)
        for name in ("_code", "_is_constant"):  # These are computed when the graph is loaded.
            del state[name]
        # The device is saved as an empty tensor, so that `torch.load(map_location=...)` changes it.
        state["_device"] = torch.empty(0, device=self._device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check the edges of a file, which may come from anybody, and derive everything else."""
        edge_index, neighbors = state["_edge_index"], state["_neighbors"]
        num_targets, num_sources = state["_num_targets"], state["_num_sources"]
        if edge_index is not None and not edge_index.is_meta:
            edge_index = sorted_edge_list(
                edge_index, num_targets, num_sources, return_permutation=False
            )[0]
        if neighbors is not None and not neighbors.is_meta:
            outside = (neighbors < -1) | (neighbors >= num_sources)
            if outside.any():
                raise ValueError(
                    "neighbors must hold -1 (no source) or sources, 0 .. num_sources - 1 = "
                    f"{num_sources - 1}, got {int(neighbors[outside][0])}"
                )
        device = state["_device"]
        self.__init__(  # type: ignore[misc]
            structure=state["_structure"],
            edge_index=edge_index,
            neighbors=neighbors,
            num_targets=num_targets,
            num_sources=num_sources,
            sizes=state["_sizes"],
            starts=state.get("_starts"),
            positions=_saved_positions(state),
            is_causal=state["_is_causal"],
            has_causal_part=state["_has_causal_part"],
            device=device.device if isinstance(device, Tensor) else device,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredGraph):
            return NotImplemented
        if self is other:
            return True
        if (self._sizes, self._starts) != (other._sizes, other._starts):
            return False
        if self.num_edges != other.num_edges:
            return False
        other = other.to(self._device)
        if not self.has_positions_of(other):
            return False
        if self._structure is not None and self._structure == other._structure:
            return True
        edges, others = self.compact_edges, other.compact_edges
        if edges.dtype != others.dtype:
            edges, others = edges.long(), others.long()
        return torch.equal(edges, others)

    def __hash__(self) -> int:
        return hash((self._num_targets, self._num_sources, self.num_edges, self._sizes))

    def __repr__(self) -> str:
        if self._num_targets == self._num_sources:
            facts = [f"num_tokens={self._num_targets}"]
        else:
            facts = [f"num_targets={self._num_targets}", f"num_sources={self._num_sources}"]
        facts.append(f"num_edges={self.num_edges}")
        if self._structure is not None:
            facts.append(f"structure={_structure_name(self._structure)}")
        if self._device.type != "cpu":
            facts.append(f"device={str(self._device)!r}")
        return f"TokenGraph({', '.join(facts)})"


def _starts_of(
    starts: tuple[tuple[int, int], ...], sizes: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Return the positions of first tokens; 0 if a sequence has no target, or no source."""
    if not any(map(any, starts)):
        return starts
    return tuple(
        (target if n else 0, source if m else 0)
        for (target, source), (n, m) in zip(starts, sizes, strict=True)
    )


def _saved_positions(state: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Check and return saved positions; None if there are none, as in files of older versions."""
    of_targets = state.get("_own_positions")
    if of_targets is None:
        return None
    of_sources = state.get("_own_source_positions")
    of_sources = of_targets if of_sources is None else of_sources
    for places, name in ((of_targets, "targets"), (of_sources, "sources")):
        count = state[f"_num_{name}"]
        if places.dtype != torch.int64 or places.shape != (count,):
            raise ValueError(
                f"positions of {name} must be an int64 tensor [{count}], got {places.dtype} of "
                f"shape {list(places.shape)}"
            )
    return of_targets, of_sources


def _structure_name(structure: GraphStructure) -> str:
    if isinstance(structure, Parts) and len(structure.parts) > 3:
        return f"Parts of {len(structure.parts)}"
    whole = (structure.whole,) if isinstance(structure, Section) else ()
    inner = ", ".join(map(_structure_name, getattr(structure, "parts", whole)))
    name = type(structure).__name__
    return f"{name}({inner})" if inner else name
