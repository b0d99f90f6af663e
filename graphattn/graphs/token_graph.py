"""TokenGraph: who talks to whom. The one data structure that passes between the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.conversions.to_libraries import networkx_of, pyg_of, scipy_of
from graphattn.graphs.edges.keeping import kept_for_training as kept_for_training
from graphattn.graphs.edges.keeping import makes_fakes as makes_fakes
from graphattn.graphs.edges.lists import sorted_edge_list
from graphattn.graphs.edges.storage import HeldGraph
from graphattn.graphs.notebook import graph_html
from graphattn.graphs.orders import reordered
from graphattn.graphs.permutations import order_of_edges, permuted
from graphattn.graphs.structures.graph_code import KINDS
from graphattn.graphs.targets import targets_of

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from torch_geometric.data import Data, HeteroData


class TokenGraph(HeldGraph):
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
        """Return this graph with its tokens numbered in another order.

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
        return reordered(self, points)

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
        return networkx_of(self, edge_weight)

    def to_scipy(self, edge_weight: Tensor | None = None) -> scipy.sparse.csr_array:
        """Sparse ``A[source, target]`` [M, N] of ones, or of `edge_weight` [E]."""
        return scipy_of(self, edge_weight)


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
        if hasattr(graph, "sparse_size"):  # an EdgeIndex may know its sizes
            known = graph.sparse_size()
            if known[0] not in (None, num_sources) or known[1] not in (None, num_targets):
                raise ValueError(
                    f"graph has sparse_size {tuple(known)} (sources, targets), but the tensors "
                    f"have {num_sources} sources and {num_targets} targets"
                )
        edges, _ = sorted_edge_list(graph, num_targets, num_sources, return_permutation=False)
        return TokenGraph(
            edge_index=edges, num_targets=int(num_targets), num_sources=int(num_sources)
        )
    raise ValueError(
        "graph must be a TokenGraph, an edge_index tensor [2, E] or a PyG EdgeIndex, "
        f"got {type(graph).__name__}"
    )
