"""Biases of edges by relative position: learned tables (Swin), T5's buckets, ALiBi's slopes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.edges.offsets import (
    alibi_slopes,
    axes_of_table,
    cells_of,
    offsets_of_table,
    positions_of,
    t5_bucket,
    unlike_a_table,
)
from graphattn.nn.files.config import Configured

KINDS = ("learned", "t5", "alibi")
T5_DEFAULTS = {"num_buckets": 32, "max_distance": 128, "bidirectional": True}


class OffsetBias(Configured, nn.Module):
    r"""Biases by relative position: the bias of an edge depends on the offset of its source.

    .. math::
        b_{ij}^h = T_{h, \, \mathrm{row}(p_j - p_i)}

    The offset of an edge is the position of its source minus that of its target, in tokens: -1 is
    the token before, as in T5's ``memory_position - context_position``. Over a grid it is a pair
    (down, right), in cells. There are three kinds:

    - ``OffsetBias(heads, max_offset)``: a learned number per head and offset from -max_offset to
      max_offset; larger offsets use the outermost one (Shaw et al., 2018). With a pair
      ``max_offset=(down, right)`` it is Swin's table (Liu et al., 2021, Eq. 4), for graphs over a
      grid; edges that touch a class token get 0.
    - :meth:`t5`: learned numbers for buckets of offsets. Buckets of larger offsets are wider
      (Raffel et al., 2020).
    - :meth:`alibi`: a fixed penalty, ``-slope_h |offset|`` (Press et al., 2022). It has no
      parameters.

    The last two work for every length. If the graph has a table of offsets, the result is a table
    with one row per offset, whose size does not depend on the number of edges; the structured
    backend and the kernels read it directly. For other graphs (lists of edges, nearest neighbours,
    two tracks, packed sequences whose tables differ) the result is one number per edge, from the
    positions of its two tokens.

    Args:
        heads: H, the number of heads of the attention layer.
        max_offset: for ``kind="learned"``, the largest offset with its own number. Give two or
            three for offsets along several axes.
        kind: "learned", "t5" or "alibi".
        num_buckets, max_distance, bidirectional: for ``kind="t5"``, as in :meth:`t5`.

    Shapes:
        - **graph**: a TokenGraph with N targets and M sources; or its part of one rank
          (:func:`graphattn.distributed.shard`), whose bias is that of ``shard.graph``, for layers
          over it. `positions` are then those of the tokens of this rank
        - **positions**: integers [N] or [*, N], or a pair for targets and sources, instead of the
          positions of the graph; with several axes [*, N, axes] (keyword)
        - **output**: [offsets, heads] if the graph has a table of offsets and `positions` is None,
          otherwise [E, heads] or [*, E, heads] in the order of ``graph.edge_index``. (It is [1, E,
          heads] if the graph has as many edges as offsets, to tell the two forms apart.)

    Raises:
        ValueError: if an argument is out of range; or if `max_offset` has several axes, but the
            graph is not over a grid and no `positions` are given.

    Example:
        >>> import torch, graphattn as ga
        >>> bias = ga.nn.OffsetBias(4, max_offset=8)
        >>> layer = ga.nn.DotProductAttention(16, heads=4)
        >>> graph = ga.window_path_graph(100, 8, self_loops=True)
        >>> bias(graph).shape, layer(torch.randn(2, 100, 16), graph, edge_bias=bias(graph)).shape
        (torch.Size([17, 4]), torch.Size([2, 100, 16]))
        >>> swin = ga.nn.OffsetBias(4, max_offset=(3, 3))
        >>> swin(ga.grid_window_graph(14, 14, 3)).shape
        torch.Size([49, 4])
    """

    def __init__(
        self,
        heads: int,
        max_offset: int | Sequence[int] | None = None,
        *,
        kind: str = "learned",
        num_buckets: int | None = None,
        max_distance: int | None = None,
        bidirectional: bool | None = None,
    ) -> None:
        super().__init__()
        self.heads = as_int("heads", heads, 1)
        self.kind = as_choice("kind", kind, KINDS)
        self.axes, rows = 1, 0
        of_t5 = {
            "num_buckets": num_buckets,
            "max_distance": max_distance,
            "bidirectional": bidirectional,
        }
        for name, value in {"max_offset": max_offset, **of_t5}.items():
            if value is not None and kind != ("learned" if name == "max_offset" else "t5"):
                raise ValueError(f"{name} must be None with kind={kind!r}, got {value!r}")
        if kind == "learned":
            most = max_offset if isinstance(max_offset, list | tuple) else (max_offset,)
            if max_offset is None or not 1 <= len(most) <= 3:
                raise ValueError(
                    "max_offset must be an integer >= 1, or two or three of them for a grid, got "
                    f"{max_offset!r}"
                )
            self._most = tuple(as_int("max_offset", size, 0) for size in most)
            self.axes = len(self._most)
            rows = math.prod(2 * size + 1 for size in self._most)
        elif kind == "t5":
            self.bidirectional = True if bidirectional is None else bidirectional
            if not isinstance(self.bidirectional, bool):
                raise ValueError(f"bidirectional must be True or False, got {bidirectional!r}")
            least = 4 if self.bidirectional else 2  # a bucket for offset 0, and one for all others
            rows = as_int("num_buckets", 32 if num_buckets is None else num_buckets, least)
            farthest = 128 if max_distance is None else max_distance
            self.num_buckets = rows
            self.max_distance = as_int("max_distance", farthest, rows // least + 1)
        # The name is not "weight", because weight decay should not apply to it, as to an embedding.
        self.table = None if kind == "alibi" else nn.Parameter(torch.empty(rows, self.heads))
        self.reset_parameters()

    @classmethod
    def t5(
        cls,
        heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> Self:
        """Make T5's relative position bias: one learned number per head and bucket of offsets.

        Half of the buckets contain one offset each. The others contain ranges that grow with the
        logarithm of the distance, up to `max_distance`; the last one contains all larger distances.
        The buckets are those of Hugging Face's ``T5Attention``, so its ``relative_attention_bias``
        weights can be copied into ``table``.

        Args:
            heads: H, the number of heads of the attention layer.
            num_buckets: number of rows of the table.
            max_distance: all distances from this one on share the last bucket.
            bidirectional: True for an encoder: half of the buckets are for positive offsets. False
                for a decoder: all are for offsets <= 0.

        Example:
            >>> import graphattn as ga
            >>> bias = ga.nn.OffsetBias.t5(8)
            >>> bias(ga.complete_graph(100)).shape, bias(ga.complete_graph(500)).shape
            (torch.Size([199, 8]), torch.Size([999, 8]))
        """
        return cls(
            heads,
            kind="t5",
            num_buckets=num_buckets,
            max_distance=max_distance,
            bidirectional=bidirectional,
        )

    @classmethod
    def alibi(cls, heads: int) -> Self:
        """Make ALiBi's bias: a penalty that grows linearly with distance, with a slope per head.

        For 2^k heads the slopes are 2^(-8 / H), 2^(-16 / H), ...; for other numbers they are those
        of the next smaller power of two, then every second one of the next larger power, as
        published. A source after its target also gets the penalty of its distance. There are no
        parameters.

        Example:
            >>> import torch, graphattn as ga
            >>> ga.nn.OffsetBias.alibi(2)(ga.causal_window_graph(10, window=3))
            tensor([[-0.1250, -0.0078],
                    [-0.0625, -0.0039],
                    [ 0.0000,  0.0000]])
        """
        return cls(heads, kind="alibi")

    @classmethod
    def for_graph(cls, heads: int, graph: TokenGraph) -> Self:
        """Make a learned table with a number for every offset of a graph.

        Raises:
            ValueError: the graph has no table of offsets (a list of edges, two tracks).

        Example:
            >>> import graphattn as ga
            >>> ga.nn.OffsetBias.for_graph(4, ga.grid_window_graph(14, 14, radius=3))
            OffsetBias(4, max_offset=(3, 3))
        """
        table = axes_of_table(graph)
        if table is None:
            raise ValueError(
                f"graph must have a table of offsets, as a window or a grid has, got {graph}: use "
                "OffsetBias(heads, max_offset) instead"
            )
        most = tuple(max(-first, last, 0) * step for first, last, step in table)
        return cls(heads, most if len(most) > 1 else most[0])

    def reset_parameters(self) -> None:
        """Initialise the table again, with standard deviation 0.02."""
        if self.table is not None:
            nn.init.normal_(self.table, std=0.02)

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` with the defaults of T5 filled in."""
        if config.get("kind") != "t5":
            return config
        given = {name: value for name, value in config.items() if value is not None}
        return {**T5_DEFAULTS, **given}

    def forward(self, graph: TokenGraph | ShardedGraph, *, positions: Any = None) -> Tensor:
        """Return the table of a graph, or the bias of every edge."""
        if isinstance(graph, ShardedGraph):
            return self._of_shard(graph, positions)
        if not isinstance(graph, TokenGraph):
            raise ValueError(
                f"graph must be a TokenGraph, got {type(graph).__name__}: "
                "graphattn.from_edge_index(edge_index, num_targets) makes one"
            )
        offsets = None if positions is not None else offsets_of_table(graph, self.axes)
        if offsets is None:
            return unlike_a_table(self._of_edges(graph, positions), graph)
        bias = self._of_offsets(offsets)
        if len(bias) != graph.num_edges or len(bias) <= 1:
            return bias
        source, target = graph.edge_index
        assert graph.structure is not None
        rows = graph.structure.offset_index(target, source)
        return bias.index_select(0, rows.to(bias.device))[None]

    def _of_shard(self, shard: ShardedGraph, positions: Any) -> Tensor:
        """Return the bias of one rank's part of a graph."""
        if positions is not None:
            more = () if self.axes == 1 else (self.axes,)
            of_target, of_source = positions_of(shard.tokens, positions, more)
            (of_source,) = shard.by_targets.exchange(of_source, dims=[-1 - len(more)])
            bias = self.forward(shard.graph, positions=(of_target, of_source))
            return shard.unlike_a_table(bias)
        table = offsets_of_table(shard.whole, self.axes)
        if table is None:
            return shard.unlike_a_table(self.forward(shard.graph))
        bias = self._of_offsets(table)
        is_clear = shard.is_table(bias) and not shard.is_ambiguous(bias)
        return bias if is_clear else shard.spread(bias)

    def _of_edges(self, graph: TokenGraph, positions: Any) -> Tensor:
        """Return [E, heads] or [*, E, heads], from the positions of the two tokens of each edge."""
        source, target = graph.edge_index
        if self.axes == 1:
            of_target, of_source = positions_of(graph, positions)
            return self._of_offsets((of_source[..., source] - of_target[..., target],))
        if positions is not None:
            of_target, of_source = positions_of(graph, positions, (self.axes,))
            apart = of_source[..., source, :] - of_target[..., target, :]
            return self._of_offsets(apart.unbind(-1))
        cells = cells_of(graph.structure, graph.device)
        if cells is None or cells[0].shape[-1] != self.axes:
            raise ValueError(
                f"graph must be over a grid of {self.axes} axes, because max_offset = "
                f"{self._most}, got {graph}: make the bias with a single max_offset, which counts "
                f"tokens, or give positions= [N, {self.axes}]"
            )
        place, known = cells
        bias = self._of_offsets((place[source] - place[target]).unbind(-1))
        in_grid = (known[source] & known[target])[:, None].to(bias.device)
        return bias.masked_fill(~in_grid, 0)

    def _of_offsets(self, offsets: tuple[Tensor, ...]) -> Tensor:
        """Return the bias of every offset, [..., heads]; `offsets` has one tensor [...] per
        axis."""
        if self.table is None:
            slopes = torch.tensor(
                alibi_slopes(self.heads), dtype=torch.float64, device=offsets[0].device
            )
            distance = offsets[0].abs()[..., None]
            return (slopes * -distance).to(torch.get_default_dtype())
        if self.kind == "t5":
            row = t5_bucket(
                offsets[0], self.num_buckets, self.max_distance, bidirectional=self.bidirectional
            )
        else:
            row = torch.zeros_like(offsets[0])
            for offset, most in zip(offsets, self._most, strict=True):
                row = row * (2 * most + 1) + offset.clamp(-most, most) + most
        return functional.embedding(row.to(self.table.device), self.table)

    def __repr__(self) -> str:
        facts = [f"{self.heads}"]
        if self.kind == "learned":
            most = self._most if self.axes > 1 else self._most[0]
            facts.append(f"max_offset={most}")
        else:
            facts.append(f"kind={self.kind!r}")
        if self.kind == "t5":
            facts += [f"{name}={getattr(self, name)}" for name in T5_DEFAULTS]
        return f"OffsetBias({', '.join(facts)})"
