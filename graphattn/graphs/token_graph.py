"""TokenGraph: who talks to whom. The one data structure that passes between the parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from graphattn.graphs.composites import Parts
from graphattn.graphs.edge_lists import edges_of_rows, order_by_source, sorted_edge_list
from graphattn.graphs.encoding import KINDS, encode
from graphattn.graphs.index_width import are_narrow, as_held, is_kept_wide
from graphattn.graphs.listing import edges_of_structure
from graphattn.graphs.notebook import graph_html
from graphattn.graphs.sections import Section
from graphattn.graphs.structure import Device, Structure

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from torch_geometric.data import Data, HeteroData

T = TypeVar("T")
MOST_DERIVED = 32  # results that a graph keeps for others
NOT_KEPT: Any = object()  # None is a result
INDICES = ("_edge_index", "_neighbors", "_rowptr", "_transpose_permutation")


class TokenGraph:
    """Directed edges from source tokens j to target tokens i: target i looks at source j.

    Made by the builders (:func:`~graphattn.window_path_graph`, :func:`~graphattn.from_edge_index`,
    ...), never by hand. Papers write an edge as a pair (i, j), the token that updates first; here
    that pair is the column ``(j, i)`` of :attr:`edge_index`, PyG's ``source_to_target``.

    A graph is held in one of three ways: by what is known of it in closed form
    (:attr:`structure`), which costs O(1) to build; by a table of neighbours (:attr:`neighbors`); or
    by its list of edges. In the first two the edges are listed when somebody first asks for them,
    and kept. Edges are a set, sorted by target, then source; every per-edge value follows that
    order. Graphs are immutable, pickle, copy and compare (``==``: the same sizes, edges and
    positions).

    On a CPU lists are held in 32 bits while there are less than 2^31 tokens and edges, and what
    properties and methods return is int64, widened when it is asked for. Code that reads large
    lists often takes :attr:`compact_edges` and the others of that name as they are held.

    Example:
        >>> import graphattn as ga
        >>> graph = ga.window_path_graph(num_tokens=4, window=1)
        >>> graph
        TokenGraph(num_tokens=4, num_edges=6, structure=Band)
        >>> graph.edge_index
        tensor([[1, 0, 2, 1, 3, 2],
                [0, 1, 1, 2, 2, 3]])
    """

    def __init__(
        self,
        *,
        structure: Structure | None = None,
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
        self._transposed: TokenGraph | None = None
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
        """What is made once, kept under its name."""
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
        return cast(Structure, self._structure).num_edges()

    @property
    def structure(self) -> Structure | None:
        """What is known of the graph in closed form; None for a plain edge list or table."""
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
        """Where the edges and positions lie, or will lie once they are asked for."""
        return self._device

    @property
    def code(self) -> Tensor:
        """Sizes and structure as numbers, int64 on the CPU: how a graph enters an operator."""
        return self._code

    @property
    def listed(self) -> Tensor | None:
        """What :attr:`code` does not hold, as it is: a table of neighbours, or a list of edges.

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
                    edges = edges_of_structure(cast(Structure, self._structure), self._device)
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

    def transpose(self) -> TokenGraph:
        """The graph with sources and targets exchanged; see :meth:`transpose_permutation`."""
        if self._transposed is None:
            flipped = None if self._structure is None else self._structure.transpose()
            edge_index = None
            if flipped is None:
                edge_index = self.compact_edges.flip(0)[:, self._order_by_source()]
            transposed = TokenGraph(
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

    def targets(self, start: int, stop: int) -> tuple[TokenGraph, range]:
        """The rows start .. stop - 1 as a graph of their own, and the range of sources they see.

        For computation by rows: prefill in chunks, a halo of a shard, checkpointing of a few rows
        at a time. Targets are numbered from 0 again, and so are sources, from the first of the
        shortest run that holds all that these targets see. Positions stay those of this graph
        (they restart in every sequence of a :func:`~graphattn.batch`, as before), and a structured
        graph stays structured: no edge is listed for windows, blocks, causal and complete graphs,
        grids, batches and unions of them. ``layer(x[start:stop], part, context=x[seen.start :
        seen.stop])`` is rows start .. stop - 1 of ``layer(x, graph)``.

        Args:
            start: the first target.
            stop: the target after the last one, start <= stop <= num_targets, as in ``range``.

        Returns:
            The graph, with stop - start targets and len(seen) sources, and `seen`, a range of the
            sources of this graph (``range(0, 0)`` where nobody is seen).

        Raises:
            ValueError: for arguments out of range.

        Example:
            >>> import torch, graphattn as ga
            >>> graph = ga.causal_window_graph(1000, window=4)
            >>> part, seen = graph.targets(600, 700)
            >>> part
            TokenGraph(num_targets=100, num_sources=103, num_edges=400, structure=Section(Band))
            >>> seen
            range(597, 700)
            >>> part.positions[:2], part.source_positions[:2]
            (tensor([600, 601]), tensor([597, 598]))
            >>> layer, x = ga.nn.KrauseAttention(8, heads=2, rope=True), torch.randn(1000, 8)
            >>> rows = layer(x[600:700], part, context=x[seen.start : seen.stop])
            >>> torch.allclose(rows, layer(x, graph)[600:700], atol=1e-6)
            True
        """
        from graphattn.graphs.targets import targets_of

        return targets_of(self, start, stop)

    # Other orders of tokens.

    @overload
    def permute(
        self,
        permutation: Tensor | tuple[Tensor, Tensor],
        *,
        return_edge_permutation: Literal[False] = False,
    ) -> TokenGraph: ...

    @overload
    def permute(
        self,
        permutation: Tensor | tuple[Tensor, Tensor],
        *,
        return_edge_permutation: Literal[True],
    ) -> tuple[TokenGraph, Tensor]: ...

    def permute(
        self,
        permutation: Tensor | tuple[Tensor, Tensor],
        *,
        return_edge_permutation: bool = False,
    ) -> TokenGraph | tuple[TokenGraph, Tensor]:
        """The same edges between the same tokens, which are numbered in another order.

        Token ``permutation[i]`` of this graph is token i of the new one, so ``x[...,
        permutation, :]`` are the tokens in the new order, and ``graph.permute(p).permute(
        p.argsort())`` is this graph again. Positions travel with their tokens: the new
        :attr:`positions` are ``graph.positions[permutation]``, and layers with ``rope=True`` or an
        :class:`~graphattn.nn.OffsetBias` give what they gave. A layer that keeps the ``top_k`` of
        what a token sees prefers the smaller index among equals, which is then another token.

        A table of neighbours stays one; any other graph becomes a list of edges, also one whose
        structure was known. It is not :attr:`is_causal`, since a token's number no longer says when
        it came; but :attr:`has_causal_part` stays, and ``update="energy"`` is refused as before.

        Args:
            permutation: integers [N], every token once and within its own part of a
                :func:`~graphattn.batch`; a pair for targets [N] and sources [M] where these are
                different tokens. (Layers then take both, as `x` and as `context`.)
            return_edge_permutation: also return a LongTensor [E]: edge e of the new graph is edge
                ``edges[e]`` of this one. Values of edges follow as ``edge_weight[edges]`` or
                ``edge_bias[..., edges, :]``.

        Raises:
            ValueError: if it is not a permutation, or moves a token to another part of a batch.

        Example:
            >>> import torch, graphattn as ga
            >>> graph = ga.from_edge_index(torch.tensor([[2, 0, 1], [0, 1, 2]]), num_targets=3)
            >>> moved, edges = graph.permute(torch.tensor([2, 0, 1]), return_edge_permutation=True)
            >>> moved.edge_index
            tensor([[2, 0, 1],
                    [0, 1, 2]])
            >>> edges, moved.positions
            (tensor([2, 0, 1]), tensor([2, 0, 1]))
        """
        from graphattn.graphs.permutations import order_of_edges, permuted

        moved, edges = permuted(self, permutation)
        if not return_edge_permutation:
            return moved
        return moved, order_of_edges(self, permutation) if edges is None else edges

    def reorder(self, points: Tensor | None = None) -> tuple[TokenGraph, Tensor]:
        """The graph with its tokens in an order in which neighbours lie near in memory.

        Attention over a list of edges or a table of neighbours reads tokens where they lie, and is
        faster when those that are read together lie together. What it computes does not change:
        see :meth:`permute`, also for the values of edges.

        Without points it is the reverse Cuthill-McKee order of the edges, taken in both
        directions, found on the host by scipy. A graph whose structure is known
        (:attr:`structure`) is in good order already and comes back as it is. With points it is the
        order in which a Hilbert curve meets them, faster to find and on the device of the points;
        a structured graph becomes a list of edges then. Tokens stay in their own part of a
        :func:`~graphattn.batch`, and their order depends on that part alone.

        Args:
            points: where the tokens are, floating-point [N, C] with C >= 1, all coordinates in one
                unit. The first 8 coordinates count. Points in one place keep their order; those
                holding NaN or infinity come last in their part.

        Returns:
            The permuted graph, and the permutation, a LongTensor [N]: token ``order[i]`` of this
            graph is token i of the new one.

        Raises:
            ValueError: if targets and sources are different tokens (use :meth:`permute` with a pair
                of orders); if there is not one point for every token.

        References:
            A. George, J. W. H. Liu (1981), Computer Solution of Large Sparse Positive Definite
            Systems, chapter 4; D. Hilbert (1891), Mathematische Annalen 38, 459-460.

        Example:
            >>> import torch, graphattn as ga
            >>> points, x = torch.rand(500, 3), torch.randn(2, 500, 16)
            >>> graph = ga.knn_graph(points, k=8)
            >>> ordered, order = graph.reorder(points)
            >>> layer = ga.nn.GaussianKernelAttention(16, heads=2, rope=True)
            >>> y = layer(x[:, order], ordered)[:, order.argsort()]
            >>> torch.allclose(y, layer(x, graph), atol=1e-5)
            True
        """
        from graphattn.graphs.orders import reordered

        return reordered(self, points)

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
        """Of targets and of sources after :meth:`permute`; None where both just count up."""
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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenGraph:
        """The same graph on another device (itself where it is there already)."""
        device = torch.empty(0, device=device).device  # "cuda" means the current one
        if device == self._device:
            return self
        return self._with_tensors(lambda x: x.to(device, non_blocking=non_blocking), device)

    def pin_memory(self) -> TokenGraph:
        """A copy whose listed edges lie in page-locked memory, as a DataLoader asks for it."""
        return self._with_tensors(Tensor.pin_memory, self._device)

    def _with_tensors(self, change: Callable[[Tensor], Tensor], device: torch.device) -> TokenGraph:
        changed = object.__new__(TokenGraph)
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
        small = object.__new__(TokenGraph)
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
        if not isinstance(other, TokenGraph):
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

    def _repr_html_(self) -> str:
        return graph_html(self)

    # The ecosystem's own types.

    def to_mask(self) -> Tensor:
        """Bool tensor [N, M], True where target i sees source j (SDPA's ``attn_mask``)."""
        mask = torch.zeros(
            (self._num_targets, self._num_sources), dtype=torch.bool, device=self._device
        )
        mask[self.compact_edges[1], self.compact_edges[0]] = True
        return mask

    @overload
    def to_pyg(
        self, edge_type: None = None, *, edge_attr: None = None, edge_weight: None = None
    ) -> Tensor: ...

    @overload
    def to_pyg(
        self,
        edge_type: None = None,
        *,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Data: ...

    @overload
    def to_pyg(
        self,
        edge_type: tuple[str, str, str],
        *,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> HeteroData: ...

    def to_pyg(
        self,
        edge_type: tuple[str, str, str] | None = None,
        *,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor | Data | HeteroData:
        """PyG's ``EdgeIndex``, or its ``Data`` or ``HeteroData`` where there is more to hold.

        The EdgeIndex has ``sort_order="col"``; any PyG layer takes it as `edge_index`. It holds
        edges and sizes only: the borders of a :func:`~graphattn.batch`, and with them positions
        that restart, are in :attr:`sizes` alone, and positions after :meth:`permute` in
        :attr:`positions`. With values of edges comes a Data; with an edge
        type a HeteroData of two kinds of nodes. Those of a batch are a PyG ``Batch`` of them, with
        its borders and ``to_data_list()``. :func:`~graphattn.from_pyg` leads back to the same
        edges and values, and from a ``Batch`` to the same borders; what is known of their structure
        and causality stays behind.

        Args:
            edge_type: (source node type, relation, target node type).
            edge_attr: tensor [E, ...] in the order of :attr:`edge_index`.
            edge_weight: tensor [E] in that order.

        Raises:
            ValueError: if `edge_type` is not three strings, or names one node type for sources and
                targets that are not equally many; if `edge_attr` or `edge_weight` is not one entry
                per edge; if a Data is asked for targets and sources that are not equally many.

        Example:
            >>> import torch, graphattn as ga
            >>> reads = ("dna", "read_by", "protein")
            >>> data = ga.bipartite_complete_graph(num_targets=2, num_sources=5).to_pyg(reads)
            >>> data["protein"].num_nodes, data[reads].edge_index.shape
            (2, torch.Size([2, 10]))
            >>> ga.causal_graph(2).to_pyg(edge_weight=torch.tensor([1.0, 0.25, 0.75]))
            Data(edge_index=[2, 3], num_nodes=2, edge_weight=[3])
        """
        from graphattn.graphs.export import pyg_of

        return pyg_of(self, edge_type, edge_attr, edge_weight)

    def to_networkx(self, edge_weight: Tensor | None = None) -> networkx.DiGraph:
        """A networkx ``DiGraph`` with an edge j -> i for every source j of target i.

        The tokens of a square graph are nodes 0 .. N-1. A bipartite graph (N != M) has nodes
        ``("target", i)`` and ``("source", j)`` instead.

        Args:
            edge_weight: tensor [E] in the order of :attr:`edge_index`, the edges' attribute
                "weight", as networkx calls it.

        Example:
            >>> import torch, graphattn as ga
            >>> graph = ga.causal_graph(2)
            >>> other = graph.to_networkx(torch.tensor([1.0, 0.25, 0.75]))
            >>> list(other.edges(data="weight"))
            [(0, 0, 1.0), (0, 1, 0.25), (1, 1, 0.75)]
            >>> ga.from_networkx(other, edge_weight="weight")[1]
            tensor([1.0000, 0.2500, 0.7500])
        """
        from graphattn.graphs.export import networkx_of

        return networkx_of(self, edge_weight)

    def to_scipy(self, edge_weight: Tensor | None = None) -> scipy.sparse.csr_array:
        """Sparse ``A[source, target]`` [M, N] of ones, or of `edge_weight` [E]."""
        from graphattn.graphs.export import scipy_of

        return scipy_of(self, edge_weight)


def kept_for_training() -> AbstractContextManager[object]:
    """What is derived within and kept can be used by autograd later, also in inference mode.

    And outside of torch.func, if it is made within.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    if torch._C._functorch.maybe_current_level() is not None:
        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


def makes_fakes() -> bool:
    """Whether tensors that are made now are fake ones, without memory: no graph keeps these."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def usable_for_training(x: Tensor | None) -> Tensor | None:
    """x, or a copy if it was made in inference mode: autograd cannot save such a tensor."""
    if x is None or torch.compiler.is_compiling() or not x.is_inference():
        return x  # torch.compile knows no inference tensors
    return x.clone()


def _check_neighbors(table: Tensor, num_targets: int) -> None:
    """Its shape and dtype: what it holds is not read, that would wait for its device."""
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
    """0 where there is no first token."""
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
    """Of a file that may be anybody's, or of a version that knew none."""
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


def _structure_name(structure: Structure) -> str:
    if isinstance(structure, Parts) and len(structure.parts) > 3:
        return f"Parts of {len(structure.parts)}"
    parts = (
        (structure.whole,) if isinstance(structure, Section) else getattr(structure, "parts", ())
    )
    inner = ", ".join(_structure_name(part) for part in parts)
    name = type(structure).__name__
    return f"{name}({inner})" if inner else name


# A saved graph is numbers and tensors: `torch.load(path, weights_only=True)` may read it.
torch.serialization.add_safe_globals([TokenGraph, *KINDS])


def as_token_graph(graph: Any, num_targets: int, num_sources: int) -> TokenGraph:
    """`graph` itself, or a TokenGraph of a raw edge_index / PyG EdgeIndex; sizes must agree."""
    if isinstance(graph, TokenGraph):
        if (graph.num_targets, graph.num_sources) != (num_targets, num_sources):
            raise ValueError(
                f"graph has {graph.num_targets} targets and {graph.num_sources} sources, "
                f"but the tensors have {num_targets} and {num_sources}"
            )
        return graph
    if isinstance(graph, Tensor):
        if graph.dtype == torch.bool:
            raise ValueError(
                "graph must be a TokenGraph or an edge_index tensor of shape [2, E], got a bool "
                f"tensor of shape {list(graph.shape)}: use graphattn.from_mask(mask)"
            )
        from graphattn.graphs.convert import from_edge_index

        if hasattr(graph, "sparse_size"):  # an EdgeIndex may know its sizes
            known = graph.sparse_size()
            if known[0] not in (None, num_sources) or known[1] not in (None, num_targets):
                raise ValueError(
                    f"graph has sparse_size {tuple(known)} (sources, targets), but the tensors "
                    f"have {num_sources} sources and {num_targets} targets"
                )
        return from_edge_index(graph, num_targets, num_sources)
    raise ValueError(
        "graph must be a TokenGraph, an edge_index tensor [2, E] or a PyG EdgeIndex, "
        f"got {type(graph).__name__}"
    )
