"""A graph whose tokens are divided among the ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from graphattn.distributed.collectives import gathered, maximum_over_ranks
from graphattn.distributed.exchange import RowExchange
from graphattn.distributed.layout import Layout
from graphattn.distributed.local_graph import (
    LocalPart,
    Runs,
    among_context,
    as_local,
    exchange_of,
    needed_of_both_ends,
    needed_of_targets,
    rows_of_targets,
    sequences_of,
)
from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import ValidPair

Side = Literal["targets", "sources", "edges"]
SIDES = ("targets", "sources", "edges")


class ShardedGraph:
    """One rank's part of a graph, and what this rank must exchange with the others.

    :func:`shard` makes it. Layers take it in the place of a graph, with the tokens of this rank.

    Attributes:
        whole: the graph of all tokens.
        rank, ranks: the place of this rank in the group, and the size of the group.
        group: the process group; None if there is only one rank.
    """

    def __init__(self, whole: TokenGraph, rank: int, ranks: int, group: Any) -> None:
        self.whole, self.rank, self.ranks, self.group = whole, rank, ranks, group
        self._targets = Layout(whole.num_targets, ranks)
        self._sources = Layout(whole.num_sources, ranks)

    # What this rank owns.

    @property
    def num_targets(self) -> int:
        """The number of targets of this rank: ``x`` has so many tokens."""
        return self._targets.size(self.rank)

    @property
    def num_sources(self) -> int:
        """The number of sources of this rank: a ``context`` has so many tokens."""
        return self._sources.size(self.rank)

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self.whole.device

    @cached_property
    def tokens(self) -> TokenGraph:
        """The targets and sources of this rank, without any edges; for their positions."""
        (targets,), (sources,) = self._targets.runs(self.rank), self._sources.runs(self.rank)
        of_targets = self.whole.positions[targets.start : targets.stop]
        of_sources = self.whole.source_positions[sources.start : sources.stop]
        if self.whole.has_same_tokens:
            of_sources = of_targets
        return TokenGraph(
            edge_index=torch.empty((2, 0), dtype=torch.int64, device=self.device),
            num_targets=len(targets),
            num_sources=len(sources),
            # Different starts, unless targets and sources are the same tokens.
            starts=((0, 0),) if self.whole.has_same_tokens else ((0, 1),),
            positions=(of_targets, of_sources),
        )

    @property
    def positions(self) -> Tensor:
        """LongTensor, the positions of the targets of this rank."""
        return self.tokens.positions

    @property
    def source_positions(self) -> Tensor:
        """LongTensor, the positions of the sources of this rank."""
        return self.tokens.source_positions

    # What this rank computes.

    @property
    def graph(self) -> TokenGraph:
        """The edges of the targets of this rank.

        Their sources are all tokens that these targets see, in ascending order, whichever rank they
        are on. Values per edge are in the order of ``shard.graph.edge_index``.
        """
        return self.by_targets.graph

    @cached_property
    def by_targets(self) -> LocalPart:
        """The graph of this rank's targets, and the exchange that fetches their sources."""
        (run,) = self._targets.runs(self.rank)
        needed = [needed_of_targets(self.whole, self._targets, r) for r in range(self.ranks)]
        exchange, context = self._exchange(needed)
        graph = as_local(rows_of_targets(self.whole, run, context), self.rank, self.ranks)
        return LocalPart(graph, exchange, slice(0, graph.num_targets))

    @cached_property
    def by_both_ends(self) -> LocalPart:
        """The graph of all edges that touch a token of this rank, for layers that move both ends.

        Its tokens are those of this rank and all that share an edge with them.
        """
        layout, own = self._targets, self._targets.tokens(self.rank)
        needed = []
        for rank in range(self.ranks):
            runs = needed_of_both_ends(self.whole, layout, rank)
            needed.append(_with(runs, layout, rank))
        exchange, context = self._exchange(needed)
        among = among_context(self.whole, own, context)
        graph = as_local(among, self.rank, self.ranks)
        graph._points_backward = self.whole.points_backward
        first = int(torch.searchsorted(context, own[:1]))
        graph.own = slice(first, first + len(own))
        graph.sequence = sequences_of(self.whole, context)
        graph.sequences = len(self.whole.sizes)
        if self.ranks > 1:
            graph.over_ranks = lambda x: maximum_over_ranks(x, self.group)
        return LocalPart(graph, exchange, graph.own)

    def _exchange(self, needed: list[Runs]) -> tuple[RowExchange, Tensor]:
        return exchange_of(needed, self._sources, self.rank, self.group, self.device)

    # Tokens and values of this rank.

    @overload
    def split(self, tensor: Tensor, /, *, of: Side = ..., dim: int | None = ...) -> Tensor: ...

    @overload
    def split(
        self, *tensors: Tensor | None, of: Side = ..., dim: int | None = ...
    ) -> tuple[Tensor | None, ...]: ...

    def split(self, *tensors: Any, of: Side = "targets", dim: int | None = None) -> Any:
        """Return this rank's rows of tensors with the rows of all tokens.

        Args:
            tensors: the tokens are counted by dimension -2 of floating-point tensors ([*, N, dim]),
                and by the last dimension of others ([*, N], such as masks, positions and
                classes). None stays None.
            of: "targets"; "sources" for a context; or "edges" for values per edge, [E, F] or
                [*, E, F], which become those of ``shard.graph``.
            dim: the dimension that counts the tokens, if it is another one.

        Returns:
            One tensor for one, otherwise a tuple. They share memory with the given tensors.

        Raises:
            ValueError: if a tensor has another number of tokens.
        """
        first, last = self._bounds(as_choice("of", of, SIDES))
        count = self._whole_count(of)
        parts = []
        for number, x in enumerate(tensors):
            if x is None:
                parts.append(None)
                continue
            along = _token_dim(x) if dim is None else dim
            if x.shape[along] != count:
                raise ValueError(
                    f"tensors[{number}] must have {count} {of} in dimension {along}, got shape "
                    f"{list(x.shape)}"
                )
            parts.append(x.narrow(along, first, last - first))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def gather(self, tensor: Tensor, *, of: Side = "targets", dim: int | None = None) -> Tensor:
        """Return the rows of all ranks, in the order of the whole graph, on every rank.

        Every rank is expected to compute the same from the result. So in the backward pass, a rank
        takes the gradient of its own rows from its own computation, and nothing travels.

        Args:
            tensor: this rank's rows; see :meth:`split` for the dimension that counts them.
            of: "targets" or "sources".
            dim: the dimension that counts the tokens, if it is another one.

        Raises:
            ValueError: if `tensor` does not have the rows of this rank.
        """
        layout = self._targets if as_choice("of", of, SIDES[:2]) == "targets" else self._sources
        along = _token_dim(tensor) if dim is None else dim
        own = layout.size(self.rank)
        if tensor.shape[along] != own:
            raise ValueError(
                f"tensor must have {own} {of} in dimension {along} on rank {self.rank}, got shape "
                f"{list(tensor.shape)}"
            )
        if self.ranks == 1:
            return tensor
        return gathered(tensor, along % tensor.dim(), layout.sizes(), self.rank, self.group)

    def _bounds(self, of: str) -> tuple[int, int]:
        (run,) = (self._sources if of == "sources" else self._targets).runs(self.rank)
        if of != "edges":
            return run.start, run.stop
        before, _ = self.whole.targets(0, run.start)
        first = before.num_edges
        return first, first + self.graph.num_edges

    def _whole_count(self, of: str) -> int:
        if of == "edges":
            return self.whole.num_edges
        return self.whole.num_sources if of == "sources" else self.whole.num_targets

    # For layers.

    def fetch(
        self, tensors: Sequence[Tensor], dims: Sequence[int], valid: ValidPair
    ) -> tuple[TokenGraph, list[Tensor], ValidPair]:
        """Fetch what the targets of this rank see of other ranks.

        Args:
            tensors: the sources of this rank, such as keys and values. A tensor that occurs twice
                travels once.
            dims: the dimension of every tensor that counts the tokens, from the end.
            valid: masks of this rank's targets and sources, or None.

        Returns:
            The graph of this rank's targets, the tensors of all its sources, and the masks.
        """
        graph, exchange, _ = self.by_targets
        of_targets, of_sources = valid
        masks = [] if of_sources is None else [of_sources]
        once = list({id(x): (x, dim) for x, dim in zip(tensors, dims, strict=True)}.values())
        sent = [x for x, _ in once]
        found = exchange(*sent, *masks, dims=[*(dim for _, dim in once), *[-1] * len(masks)])
        by_id = {id(x): y for x, y in zip(sent, found, strict=False)}
        mask = found[-1] if masks else None
        return graph, [by_id[id(x)] for x in tensors], (of_targets, mask)

    # Values per edge.

    @cached_property
    def _offset_rows(self) -> Tensor:
        """The row of the whole graph's table of offsets for every edge of ``shard.graph``."""
        (run,) = self._targets.runs(self.rank)
        part, _ = self.whole.targets(run.start, run.stop)
        assert part.structure is not None
        source, target = part.edge_index
        return part.structure.offset_index(target, source)

    def edge_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias in the form that ``shard.graph`` takes.

        A table per offset becomes one value per edge where the local graph has no such table.
        """
        whole = self.whole.structure
        if bias is None or whole is None or self.graph.structure is not None:
            return bias
        if bias.dim() != 2 or len(bias) != whole.num_offsets or len(bias) == self.graph.num_edges:
            return bias
        return bias.index_select(0, self._offset_rows)

    def check_tokens(self, name: str, x: Any, count: int) -> None:
        """Check that a tensor [*, count, dim] has the tokens of this rank."""
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-2] != count:
            raise ValueError(
                f"{name} must have the {count} tokens of rank {self.rank} of {self.ranks}, got "
                f"shape {list(x.shape)}: shard.split(x) gives them"
            )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ShardedGraph belongs to a process group, and cannot be copied or pickled: copy the "
            "graph, and call graphattn.distributed.shard again"
        )

    def __repr__(self) -> str:
        return (
            f"ShardedGraph(rank={self.rank} of {self.ranks}, num_targets={self.num_targets}, "
            f"num_sources={self.num_sources}, whole={self.whole})"
        )


def _with(runs: Runs, layout: Layout, rank: int) -> Runs:
    """Return runs with the tokens of a rank."""
    from graphattn.distributed.seen import joined

    return joined([*runs, *((run.start, run.stop) for run in layout.runs(rank))])


def _token_dim(x: Tensor) -> int:
    return -2 if x.is_floating_point() and x.dim() >= 2 else -1


def shard(graph: TokenGraph, group: Any = None) -> ShardedGraph:
    """Divide the tokens of a graph among the ranks of a process group.

    Every rank calls it with an equal graph. The ranks get runs of consecutive tokens, which differ
    in length by one token at most. Rows of other ranks that the targets of a rank see are sent to
    it when a layer runs, and no others.

    Args:
        graph: the graph of all tokens.
        group: a one-dimensional :class:`torch.distributed.DeviceMesh`, such as ``mesh["cp"]``, or a
            process group; the default group if None.

    Returns:
        A :class:`ShardedGraph`, which layers take in the place of a graph.

    Raises:
        ValueError: if there are more ranks than targets, or an argument has another type.

    Example:
        A script for ``torchrun --nproc-per-node 4 script.py``::

            import torch, torch.distributed as dist, graphattn as ga

            dist.init_process_group("gloo")
            graph, x = ga.causal_window_graph(4096, window=256), torch.randn(4096, 64)
            layer = ga.nn.DotProductAttention(64, heads=4, rope=True)
            shard = ga.distributed.shard(graph)
            y = shard.gather(layer(shard.split(x), shard))  # equals layer(x, graph)
    """
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    process_group, rank, ranks = _group_of(group)
    if ranks > graph.num_targets:
        raise ValueError(
            f"graph must have at least one target per rank, got {graph.num_targets} targets and "
            f"{ranks} ranks"
        )
    return ShardedGraph(graph, rank, ranks, process_group if ranks > 1 else None)


def _group_of(group: Any) -> tuple[Any, int, int]:
    """Return the process group of an argument, and the rank and the number of ranks in it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group needs an initialised process group: call "
            "torch.distributed.init_process_group() first, in a script that torchrun starts"
        )
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh of one dimension, such as mesh['cp'], got {group}"
            )
        group = group.get_group()
    elif group is None:
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a DeviceMesh, a process group or None, got {type(group).__name__}"
        )
    return group, dist.get_rank(group), dist.get_world_size(group)


__all__ = ["ShardedGraph", "shard"]
