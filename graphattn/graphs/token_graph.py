"""TokenGraph, which says which tokens see which: the data structure that all parts share."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import not_a_graph
from graphattn.graphs.conversions.to_libraries import networkx_of, pyg_of, scipy_of
from graphattn.graphs.edges.lists import sorted_edge_list
from graphattn.graphs.edges.storage import StoredGraph
from graphattn.graphs.notebook import graph_html
from graphattn.graphs.orders import reordered
from graphattn.graphs.permutations import Permutations, permuted
from graphattn.graphs.structures.graph_code import (
    HAS_TABLE,
    KINDS,
    PER_SEQUENCE,
    SIZES,
    facts_of,
    structure_of,
)
from graphattn.graphs.structures.graph_code import encode as encode
from graphattn.graphs.targets import targets_of
from graphattn.kernels.shared.stored import makes_fakes as makes_fakes

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from torch_geometric.data import Data, HeteroData


class TokenGraph(StoredGraph):
    """Directed edges from source tokens j to target tokens i; an edge means that i sees j.

    Graphs are made by the builders (:func:`~graphattn.window_path_graph`,
    :func:`~graphattn.from_edge_index`, ...), never by the constructor. Papers write an edge as a
    pair (i, j), with the target first. Here it is the column ``(j, i)`` of :attr:`edge_index`,
    which is PyG's ``source_to_target``.

    A graph is stored in one of three ways: as a structure in closed form (:attr:`structure`), which
    costs O(1) to build; as a table of neighbours (:attr:`neighbors`); or as a list of edges. In the
    first two cases, the edges are listed at the first access to them, and then stored. Every edge
    exists once, and edges are sorted by target, then source. All values per edge are in this order.
    Graphs are immutable, and can be pickled, copied and compared: two graphs are equal (``==``) if
    they have the same sizes, edges and positions.

    On a CPU, lists are stored as int32 if there are fewer than 2^31 tokens and edges. Properties
    and methods return int64, which is converted at each access. Code that often reads large lists
    can read :attr:`compact_edges`, :attr:`compact_rowptr`, :attr:`compact_neighbors` and
    :meth:`compact_csr`, which are not converted.

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
        """Return the rows start .. stop - 1 as a new graph, and the range of sources they see.

        Use it to compute a few rows at a time: for a prompt in chunks, for a shard with its halo,
        or for checkpointing. ``layer(x[start:stop], part, context=x[seen.start : seen.stop])`` are
        the rows start .. stop - 1 of ``layer(x, graph)``. The sources of the new graph are the
        shortest run that contains all sources that these targets see. Targets and sources are
        numbered from 0 again, but have the same positions as in this graph. If this graph is
        structured, so is the new one. For windows, blocks, causal and complete graphs, grids, and
        batches and unions of these, no edge is listed.

        Args:
            start: the first target.
            stop: the target after the last one, start <= stop <= num_targets, as in ``range``.

        Returns:
            The graph `part`, with stop - start targets and len(seen) sources, and `seen`, a range
            of the sources of this graph (``range(0, 0)`` if these targets see no source).

        Raises:
            ValueError: if `start` or `stop` is out of range.

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
        self, permutation: Permutations, *, return_edge_permutation: Literal[False] = False
    ) -> TokenGraph: ...

    @overload
    def permute(
        self, permutation: Permutations, *, return_edge_permutation: Literal[True]
    ) -> tuple[TokenGraph, Tensor]: ...

    def permute(
        self, permutation: Permutations, *, return_edge_permutation: bool = False
    ) -> TokenGraph | tuple[TokenGraph, Tensor]:
        """Return this graph with its tokens numbered in another order.

        Token ``permutation[i]`` of this graph is token i of the new one. So
        ``x[..., permutation, :]`` are the tokens in the new order, and
        ``graph.permute(p).permute(p.argsort())`` has the edges of this graph again. Every token
        has the same position as before: the new :attr:`positions` are
        ``graph.positions[permutation]``. So layers with ``rope=True`` or an
        :class:`~graphattn.nn.OffsetBias` give the same results. The only exception is ``top_k``: of
        sources with equal logits, it selects the one with the smaller index, which may now be
        another token.

        If this graph stores a table of neighbours, so does the new one. Any other graph becomes a
        list of edges, even if it was structured. :attr:`is_causal` is False in the new graph,
        because a token's number is no longer its place in time. :attr:`has_causal_part` does not
        change, so ``update="energy"`` raises an error for a causal graph, as before.

        Args:
            permutation: integers [N] with every token once; in a :func:`~graphattn.batch`, tokens
                must stay within their part. If targets and sources are different tokens, it is a
                pair for targets [N] and sources [M]. (Then permute both `x` and `context` of a
                layer.)
            return_edge_permutation: whether a LongTensor `edges` [E] is returned as well: edge e of
                the new graph is edge ``edges[e]`` of this one. The values per edge of the new graph
                are then ``edge_weight[edges]`` or ``edge_bias[..., edges, :]``.

        Raises:
            ValueError: if `permutation` is not a permutation, or moves a token to another part of a
                batch.

        Example:
            >>> import torch, graphattn as ga
            >>> graph = ga.from_edge_index(torch.tensor([[2, 0, 1], [0, 1, 2]]), num_targets=3)
            >>> other, edges = graph.permute(torch.tensor([2, 0, 1]), return_edge_permutation=True)
            >>> other.edge_index
            tensor([[2, 0, 1],
                    [0, 1, 2]])
            >>> edges, other.positions
            (tensor([2, 0, 1]), tensor([2, 0, 1]))
        """
        graph, edges = permuted(self, permutation, with_edges=return_edge_permutation)
        return (graph, edges) if return_edge_permutation else graph

    def reorder(self, points: Tensor | None = None) -> tuple[TokenGraph, Tensor]:
        """Return this graph with its tokens in an order in which neighbours are near in memory.

        Attention over a list of edges or a table of neighbours is faster if tokens that are read
        together are near each other in memory. The order does not change what it computes;
        :meth:`permute` says this in detail, and what to do with values per edge.

        Without `points`, it is the reverse Cuthill-McKee order, for which every edge counts in both
        directions. It is computed on the host by scipy. A structured graph (see :attr:`structure`)
        is in a good order already, and is returned unchanged. With `points`, it is their order
        along a Hilbert curve, which is faster to compute, on the device of the points. A structured
        graph then becomes a list of edges. In a :func:`~graphattn.batch`, every part is ordered
        separately.

        Args:
            points: coordinates of the tokens, floating-point [N, C] with C >= 1, all in the same
                unit. Only the first 8 coordinates are used. Tokens at equal points stay in their
                order; points with NaN or infinity are last in their part.

        Returns:
            The permuted graph, and the permutation, a LongTensor [N]: token ``order[i]`` of this
            graph is token i of the new one.

        Raises:
            ValueError: if targets and sources are different tokens (use :meth:`permute` with a pair
                of orders); if there is not exactly one point for every token.

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

    # Conversions to the types of other libraries.

    def to_mask(self) -> Tensor:
        """Return a bool tensor [N, M], True where target i sees source j (SDPA's ``attn_mask``)."""
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
        """Convert to PyG's ``EdgeIndex``, or to a ``Data`` or ``HeteroData`` with more content.

        Without arguments, the result is an EdgeIndex with ``sort_order="col"``, which any PyG layer
        takes as `edge_index`. It has only the edges and the numbers of tokens. It does not have
        :attr:`positions`, or the sizes of the parts of a :func:`~graphattn.batch`. With
        `edge_attr` or `edge_weight`, the result is a Data. With `edge_type`, it is a HeteroData. If
        the graph is a batch, it is then a PyG ``Batch``, which has the sizes of the parts and
        ``to_data_list()``. :func:`~graphattn.from_pyg` converts back to a graph with the same
        edges and values, and from a ``Batch`` with the same parts; but structure and causality are
        lost.

        Args:
            edge_type: (source node type, relation, target node type).
            edge_attr: tensor [E, ...] in the order of :attr:`edge_index`.
            edge_weight: tensor [E] in that order.

        Raises:
            ValueError: if `edge_type` is not three strings; if `edge_attr` or `edge_weight` does
                not have one entry per edge; if targets and sources are not equally many, and
                `edge_type` names only one node type, or is None although a Data is needed.

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
        """Convert to a networkx ``DiGraph`` with an edge j -> i for every source j of target i.

        If N = M, the tokens are nodes 0 .. N - 1. Otherwise, the nodes are ``("target", i)`` and
        ``("source", j)``.

        Args:
            edge_weight: tensor [E] in the order of :attr:`edge_index`; it becomes the attribute
                "weight" of the edges.

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
        """Convert to a sparse ``A[source, target]`` [M, N] with ones, or with `edge_weight` [E]."""
        return scipy_of(self, edge_weight)


# A saved graph has only numbers and tensors, so `torch.load(path, weights_only=True)` may read it.
torch.serialization.add_safe_globals([TokenGraph, *KINDS])


def as_token_graph(graph: Any, num_targets: int, num_sources: int) -> TokenGraph:
    """Return `graph` as a TokenGraph, if it fits these numbers of tokens.

    A tensor edge_index or a PyG EdgeIndex is converted.
    """
    if isinstance(graph, TokenGraph):
        if (graph.num_targets, graph.num_sources) != (num_targets, num_sources):
            raise ValueError(
                f"graph has {graph.num_targets} targets and {graph.num_sources} sources, "
                f"but the tensors have {num_targets} targets and {num_sources} sources"
            )
        return graph
    if isinstance(graph, Tensor):
        if graph.dtype == torch.bool or graph.dim() != 2 or graph.shape[0] != 2:
            raise not_a_graph(graph, num_targets, num_sources)
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
    raise not_a_graph(graph, num_targets, num_sources)


def decode(code: Tensor, edge_index: Tensor | None, device: torch.device) -> TokenGraph:
    """Return the graph with the code ``graph.code``, which an operator takes.

    Args:
        code: the result of :func:`encode`.
        edge_index: ``graph.listed``, a list of edges [2, E] or a table of neighbours [N, k], as the
            code says, in int32 or int64; None for a structured graph.
        device: the device of the edges of a structured graph.
    """
    numbers = code.tolist()
    if edge_index is None:
        return _structured(tuple(numbers), device)
    facts = facts_of(numbers)
    facts["neighbors" if numbers[HAS_TABLE] else "edge_index"] = edge_index
    return TokenGraph(**facts)


@lru_cache(maxsize=64)
def _structured(code: tuple[int, ...], device: torch.device) -> TokenGraph:
    """Make a structured graph; the cache avoids listing its edges more than once."""
    facts = facts_of(list(code))
    structure = structure_of(iter(code[SIZES + PER_SEQUENCE * code[SIZES - 1] :]))
    return TokenGraph(
        structure=structure, sizes=facts["sizes"], starts=facts["starts"], device=device
    )
