"""A graph's edges as they are held: in closed form, as a table of neighbours, or as a list."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from graphattn.graphs.edges.index_width import are_narrow, as_held, is_kept_wide
from graphattn.graphs.edges.keeping import kept_for_training, makes_fakes, usable_for_training
from graphattn.graphs.edges.listing import edges_of_structure
from graphattn.graphs.edges.lists import edges_of_rows, order_by_source, sorted_edge_list
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.graph_code import encode
from graphattn.graphs.structures.sections import Section
from graphattn.graphs.structures.structure import Device, GraphStructure

T = TypeVar("T")
G = TypeVar("G", bound="HeldGraph")  # a new graph is of the class of the one that it is made of
MOST_DERIVED = 32  # results that a graph keeps for others
NOT_KEPT: Any = object()  # None is a result
INDICES = ("_edge_index", "_neighbors", "_rowptr", "_transpose_permutation")


class HeldGraph:
    """Edges between targets and sources, how they are held, and what follows from that alone.

    :class:`~graphattn.TokenGraph` is what everybody has; it adds what makes other graphs and other
    libraries' types. Functions that need no more than the edges take this class.
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
            raise ValueError("a TokenGraph is made by a builder, such as graphattn.from_edge_index")
        else:
            device = listed.device
        assert num_targets is not None
        assert num_sources is not None
        if neighbors is not None:
            _check_neighbors(neighbors, num_targets)
        self._num_targets = num_targets
        self._num_sources = num_sources
        self._structure = structure
        self._is_causal = is_causal
        self._has_causal_part = is_causal if has_causal_part is None else has_causal_part
        self._device = torch.device("cpu" if device is None else device)
        self._sizes = sizes or ((num_targets, num_sources),)
        self._starts = _starts_of(starts or ((0, 0),) * len(self._sizes), self._sizes)
        with kept_for_training():
            if neighbors is not None:
                neighbors = usable_for_training(self._as_held(neighbors, neighbors.numel()))
            if edge_index is not None:
                edge_index = usable_for_training(self._as_held(edge_index, edge_index.shape[1]))
            self._neighbors, self._edge_index = neighbors, edge_index
            # Of targets and of sources where they do not count up, as after `permute`; the second
            # is None where both are one.
            of_targets, of_sources = _own_positions(positions)
            self._own_positions = usable_for_training(of_targets)
            self._own_source_positions = usable_for_training(of_sources)
        self._forget()
        with kept_for_training():
            self._code = encode(self)

    def _forget(self) -> None:
        """Drop everything that can be derived again."""
        if self._structure is not None or self._neighbors is not None:
            self._edge_index = None
        self._rowptr: Tensor | None = None
        # Small lists in int64, with the versions that they and what they were made of had then.
        self._wide: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._points_backward: bool | None = None
        self.warned_backward = False  # whether its user was told what that may mean
        self._positions = self._own_positions
        self._source_positions = self._own_source_positions
        self._transposed: Self | None = None
        self._transpose_permutation: Tensor | None = None
        self._derived: dict[Any, Any] = {}

    def _as_held(self, index: Tensor, count: int) -> Tensor:
        """A list of so many edges, or places for them, in the width that it is held in."""
        return as_held(index, self._num_targets, self._num_sources, count)

    def _widened(self, name: str, held: Tensor) -> Tensor:
        """A list as its user sees it: in int64, and kept if it is small."""
        if held.dtype == torch.int64:
            return held
        if torch.compiler.is_compiling():  # what is kept would be a reason to compile again
            return held.long()
        found = self._wide.get(name)
        if found is not None and found[0] == (held._version, found[1]._version):  # nobody wrote
            return found[1]
        with kept_for_training():
            wide = held.long()
        # Under a mode, such as that of fake tensors, it may be something else than a tensor.
        if is_kept_wide(held) and torch._C._len_torch_dispatch_stack() == 0:
            self._wide[name] = (held._version, wide._version), wide
        return wide

    def _kept(self, name: str, made: T) -> T:
        """Keep a value that is made once under a name."""
        if not makes_fakes():
            setattr(self, name, made)
        return made

    # Sizes and facts.

    @property
    def num_targets(self) -> int:
        """N, the number of tokens that update."""
        return self._num_targets

    @property
    def num_sources(self) -> int:
        """M, the number of tokens that are looked at; N unless the graph is bipartite."""
        return self._num_sources

    @property
    def num_tokens(self) -> int:
        """N of a graph whose targets and sources are equally many; ValueError otherwise."""
        if self._num_targets != self._num_sources:
            raise ValueError(
                f"num_tokens: this graph has {self._num_targets} targets and "
                f"{self._num_sources} sources; use num_targets, num_sources"
            )
        return self._num_targets

    @property
    def num_edges(self) -> int:
        """E, counted without listing edges.

        A table of neighbours is counted where it lies: on a GPU that waits for it.
        """
        if self._edge_index is not None:
            return self._edge_index.shape[1]
        if self._neighbors is not None:
            return int((self._neighbors >= 0).sum())
        return cast(GraphStructure, self._structure).num_edges()

    @property
    def structure(self) -> GraphStructure | None:
        """Structure of the graph in closed form, if it is known; None for a plain edge list or
        table.
        """
        return self._structure

    @property
    def neighbors(self) -> Tensor | None:
        """LongTensor [N, k]: what every target sees, in ascending order; None in other graphs.

        Where there are fewer than k sources, -1 stands first. :func:`~graphattn.knn_graph` makes
        such graphs: their size is known without looking at a tensor, so on a GPU neither building
        them nor attending over them (kernels read the table) waits for the device. What counts or
        lists edges does: :attr:`num_edges`, :attr:`edge_index`, ``==``, ``repr`` and the ``to_*``
        of other libraries.

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
        return None if self._neighbors is None else self._widened("neighbors", self._neighbors)

    @property
    def is_table(self) -> bool:
        """Whether the graph is held as a table of neighbours, :attr:`neighbors`."""
        return self._neighbors is not None

    @property
    def is_causal(self) -> bool:
        """Whether no target sees a source after it, by construction.

        Known from the structure. A foreign edge list is never causal by itself, even where all
        its edges happen to point backward: "after" is then a matter of reading.
        """
        return self._is_causal

    @property
    def has_causal_part(self) -> bool:
        """Whether the graph, or some graph of a batch, is causal by construction.

        So it stays when tokens get other numbers (:meth:`permute`): who saw the past alone still
        does.
        """
        return self._has_causal_part

    @property
    def points_backward(self) -> bool:
        """Whether a graph that is not causal by construction still has only edges j <= i, some <.

        Counted once, for plain edge lists and tables only.
        """
        if self._points_backward is None:
            if self._structure is not None:
                return False
            gap = self.compact_edges.diff(dim=0)
            self._points_backward = bool((gap >= 0).all() and (gap > 0).any())
        return self._points_backward

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(targets, sources) of every graph in a :func:`~graphattn.batch`; one pair otherwise."""
        return self._sizes

    @property
    def starts(self) -> tuple[tuple[int, int], ...]:
        """Positions of the first target and the first source of every graph in :attr:`sizes`.

        Zeros, but for graphs with a past and for the rows that :meth:`targets` cuts out of others.
        """
        return self._starts

    @property
    def has_same_tokens(self) -> bool:
        """Whether its sources are its targets: in every sequence as many, from one position on."""
        pairs = (*self._sizes, *self._starts)
        return all(of_targets == of_sources for of_targets, of_sources in pairs)

    @property
    def batch(self) -> Tensor:
        """LongTensor [N]: the graph of a :func:`~graphattn.batch` that every target belongs to.

        PyG's batch vector, made anew on each call; zeros for a single graph.

        Example:
            >>> import graphattn as ga
            >>> ga.batch([ga.causal_graph(2), ga.causal_graph(3)]).batch
            tensor([0, 0, 1, 1, 1])
        """
        sizes = torch.tensor([targets for targets, _ in self._sizes], device=self._device)
        part = torch.arange(len(sizes), device=self._device)
        return part.repeat_interleave(sizes, output_size=self._num_targets)

    @property
    def device(self) -> torch.device:
        """Device of the edges and positions, also before they are listed."""
        return self._device

    @property
    def code(self) -> Tensor:
        """Sizes and structure as numbers, int64 on the CPU: how a graph enters an operator."""
        return self._code

    @property
    def listed(self) -> Tensor | None:
        """Tensor that lists the part of the graph that :attr:`code` does not hold: a table of
        neighbours, or a list of edges.

        None for a structured graph. It enters an operator beside `code`, which says what it is,
        and has the width that it is held in: int32 on a CPU where numbers fit, int64 elsewhere.
        """
        if self._structure is not None:
            return None
        return self._edge_index if self._neighbors is None else self._neighbors

    # Edges.

    @property
    def edge_index(self) -> Tensor:
        """LongTensor [2, E]: row 0 = source j, row 1 = target i; sorted by target, then source.

        Of a large graph it is made anew whenever it is asked for: read it once.
        """
        return self._widened("edge_index", self.compact_edges)

    def csr(self) -> tuple[Tensor, Tensor]:
        """``(rowptr [N + 1], source [E])``: target i sees ``source[rowptr[i]:rowptr[i + 1]]``."""
        return self.rowptr, self.edge_index[0]

    @property
    def rowptr(self) -> Tensor:
        """LongTensor [N + 1]: where the edges of every target begin."""
        return self._widened("rowptr", self.compact_rowptr)

    @property
    def compact_edges(self) -> Tensor:
        """:attr:`edge_index` as it is held, in int32 on a CPU where numbers fit: for reading only.

        Indices of int32 do in ``index_select``, ``index_add`` and ``x[index]``, but not in
        ``gather`` and ``scatter``; and their products may overflow.

        Example:
            >>> import graphattn as ga
            >>> ga.causal_graph(2).compact_edges
            tensor([[0, 0, 1],
                    [0, 1, 1]], dtype=torch.int32)
        """
        if self._edge_index is None:
            with kept_for_training():
                if self._neighbors is not None:
                    edges = edges_of_rows(self._neighbors, is_sorted=True)
                else:
                    edges = edges_of_structure(cast(GraphStructure, self._structure), self._device)
                return self._kept("_edge_index", self._as_held(edges, edges.shape[1]))
        return self._edge_index

    @property
    def compact_rowptr(self) -> Tensor:
        """:attr:`rowptr`, as wide as :attr:`compact_edges`."""
        if self._rowptr is None:
            with kept_for_training():
                degree = self.in_degree()
                rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
                if self._device.type == "cpu" and not torch.compiler.is_compiling():
                    rowptr = self._as_held(rowptr, int(rowptr[-1]))
                return self._kept("_rowptr", rowptr)
        return self._rowptr

    @property
    def compact_neighbors(self) -> Tensor | None:
        """:attr:`neighbors` as they are held, as wide as :attr:`compact_edges`."""
        return self._neighbors

    def compact_csr(self) -> tuple[Tensor, Tensor]:
        """:meth:`csr` as it is held, as wide as :attr:`compact_edges`."""
        return self.compact_rowptr, self.compact_edges[0]

    def in_degree(self) -> Tensor:
        """LongTensor [N]: how many sources every target sees."""
        if self._structure is not None and self._edge_index is None:
            return self._structure.in_degree(self._device)
        if self._neighbors is not None:
            return (self._neighbors >= 0).sum(dim=1)
        return torch.bincount(self.compact_edges[1], minlength=self._num_targets)

    def transpose(self) -> Self:
        """The graph with sources and targets exchanged; see :meth:`transpose_permutation`."""
        if self._transposed is None:
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
            return self._kept("_transposed", transposed)
        return self._transposed

    def transpose_permutation(self) -> Tensor:
        """LongTensor [E]: edge e of ``transpose()`` is edge ``permutation[e]`` of this graph.

        Per-edge values follow: ``weights[graph.transpose_permutation()]`` belongs to
        ``graph.transpose().edge_index``.
        """
        return self._widened("transpose_permutation", self._order_by_source())

    def _order_by_source(self) -> Tensor:
        if self._transpose_permutation is None:
            with kept_for_training():
                order = order_by_source(*self.compact_csr(), self._num_sources)
                return self._kept("_transpose_permutation", self._as_held(order, len(order)))
        return self._transpose_permutation

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, kept under `key` as long as the graph lives: plans of operations, say.

        What lists the edges may be changed in place by somebody: then it is made anew. Copies and
        files do not have it, and no more than a few are kept.
        """
        listed, found = self.listed, self._derived
        key = key, None if listed is None else listed._version
        result: T = found.get(key, NOT_KEPT)  # asked once: another thread may clear in between
        if result is NOT_KEPT:
            with kept_for_training():
                result = make()
            # Under capture a tensor is filled only when the CUDA graph is replayed.
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return result
            if makes_fakes():
                return result
            if len(found) >= MOST_DERIVED:
                found.clear()
            found[key] = result
        return result

    # Positions.

    @property
    def positions(self) -> Tensor:
        """LongTensor [N]: the place of every target in its own sequence; rotary layers read it.

        After :meth:`permute` it is the place that the token had before.
        """
        if self._positions is None:
            with kept_for_training():
                return self._kept("_positions", self._counted(0))
        return self._positions

    @property
    def source_positions(self) -> Tensor:
        """LongTensor [M]: the same for the sources; `positions` unless the graph is bipartite."""
        if self._source_positions is None:
            if self._own_positions is not None or self.has_same_tokens:
                return self.positions
            with kept_for_training():
                return self._kept("_source_positions", self._counted(1))
        return self._source_positions

    @property
    def own_positions(self) -> tuple[Tensor, Tensor] | None:
        """Positions of targets and of sources after :meth:`permute`; None where both just count
        up.
        """
        return None if self._own_positions is None else (self.positions, self.source_positions)

    def _counted(self, side: int) -> Tensor:
        """Up from the start of every sequence, on the side of targets (0) or of sources."""
        runs = zip(self._starts, self._sizes, strict=True)
        return torch.cat(
            [
                torch.arange(start[side], start[side] + size[side], device=self._device)
                for start, size in runs
            ]
        )

    # Devices, comparison, pickling.

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return this graph on another device (itself where it is there already)."""
        device = torch.empty(0, device=device).device  # "cuda" means the current one
        if device == self._device:
            return self
        return self._with_tensors(lambda x: x.to(device, non_blocking=non_blocking), device)

    def pin_memory(self) -> Self:
        """A copy whose listed edges lie in page-locked memory, as a DataLoader asks for it."""
        return self._with_tensors(Tensor.pin_memory, self._device)

    def _with_tensors(self, change: Callable[[Tensor], Tensor], device: torch.device) -> Self:
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__)
        changed._device = device
        changed._transposed = None
        changed._wide, changed._derived = {}, {}
        for name, value in vars(changed).items():
            if isinstance(value, Tensor) and name != "_code":
                if name not in INDICES:
                    moved = change(value)
                elif device.type == "cpu":  # narrow first: it may arrive later than this returns
                    moved = change(self._narrowed(value, device))
                else:
                    moved = change(value).long()
                setattr(changed, name, moved)
        return changed

    def _narrowed(self, index: Tensor, device: torch.device) -> Tensor:
        """A list that is about to move to a CPU."""
        listed = self.listed if self._edge_index is None else self._edge_index
        count = index.numel() if listed is None else listed.numel()
        sizes = self._num_targets, self._num_sources, count
        return index.to(torch.int32) if are_narrow(device, *sizes) else index

    def __getstate__(self) -> dict[str, Any]:
        small = object.__new__(type(self))
        small.__dict__.update(self.__dict__)
        small._forget()
        state = dict(small.__dict__)
        del state["_code"]  # follows from the rest
        # A device that `torch.load(map_location=...)` moves, as it moves the edges.
        state["_device"] = torch.empty(0, device=self._device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read the facts and the edges, and derive the rest: a file may be anybody's."""
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
                    "neighbors must hold sources, -1 (none) or 0 .. num_sources - 1 = "
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
        if not isinstance(other, HeldGraph):
            return NotImplemented
        if self is other:
            return True
        if (self._num_targets, self._num_sources, self._sizes, self._starts) != (
            other._num_targets,
            other._num_sources,
            other._sizes,
            other._starts,
        ) or self.num_edges != other.num_edges:
            return False
        other = other.to(self._device)
        if (self._own_positions is not None or other._own_positions is not None) and not (
            torch.equal(self.positions, other.positions)
            and torch.equal(self.source_positions, other.source_positions)
        ):
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


def _check_neighbors(table: Tensor, num_targets: int) -> None:
    """Check the shape and dtype of a table of neighbors: what it holds is not read, that would wait
    for its device.
    """
    if (
        table.dtype not in (torch.int64, torch.int32)
        or table.dim() != 2
        or len(table) != num_targets
    ):
        raise ValueError(
            f"neighbors must be an int64 tensor [{num_targets}, k] (num_targets = {num_targets}), "
            f"got {table.dtype} of shape {list(table.shape)}"
        )


def _starts_of(
    starts: tuple[tuple[int, int], ...], sizes: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Return the positions of first tokens, 0 where there is none."""
    if not any(map(any, starts)):
        return starts
    return tuple(
        (target if n else 0, source if m else 0)
        for (target, source), (n, m) in zip(starts, sizes, strict=True)
    )


def _own_positions(
    positions: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None] | tuple[None, None]:
    """None for those of sources where they are those of targets."""
    if positions is None:
        return None, None
    of_targets, of_sources = positions
    return of_targets, None if of_sources is of_targets else of_sources


def _saved_positions(state: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return saved positions, checked; None where a file of an earlier version has none."""
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
    parts = (
        (structure.whole,) if isinstance(structure, Section) else getattr(structure, "parts", ())
    )
    inner = ", ".join(_structure_name(part) for part in parts)
    name = type(structure).__name__
    return f"{name}({inner})" if inner else name
