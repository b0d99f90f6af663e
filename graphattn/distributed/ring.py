"""Operations over the sources of all ranks, with those of one rank at a time.

In round d, every rank gets rows from the rank d places before it, computes the part of the
operation over them, and merges it with what it has. So it never stores the rows of more than two
ranks. In the backward pass the rows travel again, each part is computed again, and the gradients
of its sources travel back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.api import score_attention
from graphattn.ops.attention.candidates import Candidates, candidates_by_score, merge_top_k
from graphattn.ops.attention.logits.score import Score
from graphattn.ops.attention.merge import merged
from graphattn.ops.inputs import compute_dtype, full_precision, repeat_heads
from graphattn.ops.linear_attention.api import linear_attention_sums

Tensors = tuple[Tensor, ...]
OptionalTensors = Sequence[Tensor | None]


class Block(NamedTuple):
    """The edges from some of the rows that arrive in a round to some of a rank's targets.

    Attributes:
        number: the number of the block among all blocks of the rank.
        targets: a range of this rank's targets.
        sources: a range of the rows of the round, or a LongTensor.
        tokens: LongTensor, the tokens of these rows, in ascending order.
        graph: the edges.
    """

    number: int
    targets: range
    sources: range | Tensor
    tokens: Tensor
    graph: TokenGraph


class Round(NamedTuple):
    """One round: the rows that travel, and the blocks of edges that are then computed.

    The exchange of the first round is None: a rank has its own rows.
    """

    exchange: RowExchange | None
    blocks: tuple[Block, ...]


class RingOperation(Protocol):
    """An operation that can be computed in parts, each over some of the sources.

    All tensors of targets and sources have the shape [*, tokens, heads, features], and masks
    [*, tokens]; some may be None.
    """

    def part(self, targets: OptionalTensors, sources: OptionalTensors, block: Block) -> Tensors:
        """Compute the results over a block, each [*, N, H, features]; they are differentiated."""

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        """Merge the results over some blocks with those over another."""

    def upstream(self, part: Tensors, whole: Tensors, d_whole: Tensors) -> Tensors:
        """Return the gradients of the results of a part, from those of the whole."""


class Sums:
    """Numerators and denominators of linear attention; the parts add up."""

    def part(self, targets: OptionalTensors, sources: OptionalTensors, block: Block) -> Tensors:
        query, turned_query, of_targets = targets
        key, value, turned_key, of_sources = sources
        assert query is not None
        assert key is not None
        assert value is not None
        rotated = None
        if turned_query is not None and turned_key is not None:
            rotated = turned_query, turned_key
        return linear_attention_sums(
            query, key, value, block.graph, rotated=rotated, valid=(of_targets, of_sources)
        )

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        return tuple(x + y for x, y in zip(whole, part, strict=True))

    def upstream(self, part: Tensors, whole: Tensors, d_whole: Tensors) -> Tensors:
        return d_whole


class Averages:
    """Softmax attention; its parts are merged by their log-sums.

    Args:
        score: makes the score. It is called for every part.
        options: further arguments of :func:`~graphattn.score_attention`.
        dropout: the share of edges that is dropped, and the seed of that.
    """

    def __init__(
        self,
        score: Callable[[], Score],
        *,
        dropout: tuple[float, int] = (0.0, 0),
        **options: Any,
    ) -> None:
        self.score, self.options, self.dropout = score, options, dropout

    def part(self, targets: OptionalTensors, sources: OptionalTensors, block: Block) -> Tensors:
        (query, of_targets), (key, value, of_sources) = targets, sources
        assert query is not None
        assert key is not None
        assert value is not None
        p, seed = self.dropout
        dropped = {}
        if p:
            generator = torch.Generator().manual_seed(seed + block.number)
            dropped = {"dropout": p, "generator": generator}
        out, lse = score_attention(
            query,
            key,
            value,
            block.graph,
            self.score(),
            valid=(of_targets, of_sources),
            return_lse=True,
            **self.options,
            **dropped,
        )
        return out.to(lse.dtype), lse[..., None]

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        outs, sums = zip(whole, part, strict=True)
        outs = [x.masked_fill(s == -torch.inf, 0) for x, s in zip(outs, sums, strict=True)]
        out, lse = merged(outs, [x[..., 0] for x in sums])
        return out, lse[..., None]

    def upstream(self, part: Tensors, whole: Tensors, d_whole: Tensors) -> Tensors:
        (out, lse), (whole_out, whole_lse), (d_out, d_lse) = part, whole, d_whole
        share = (lse - whole_lse).exp().masked_fill(lse == -torch.inf, 0)
        out = out.masked_fill(lse == -torch.inf, 0)
        change = (d_out * (out - whole_out)).sum(-1, keepdim=True)
        return share * d_out, share * (change + d_lse)


class SelectedAverages(Averages):
    """Softmax attention over sources that are selected already, per target and head.

    Args:
        score: makes the score.
        index: LongTensor [*, N, H, k], the tokens that every row selects; -1 for none.
    """

    def __init__(self, score: Callable[[], Score], index: Tensor) -> None:
        super().__init__(score)
        self.index = index

    def part(self, targets: OptionalTensors, sources: OptionalTensors, block: Block) -> Tensors:
        (query, _), (key, value, _) = targets, sources
        assert query is not None
        assert key is not None
        assert value is not None
        heads = query.shape[-2]
        dtype = compute_dtype(query.dtype)
        index = self.index[..., block.targets.start : block.targets.stop, :, :]
        place = torch.searchsorted(block.tokens, index.clamp(min=0))
        place = place.clamp(max=max(len(block.tokens) - 1, 0))
        found = (index >= 0) & (block.tokens[place] == index) if len(block.tokens) else index < -1
        with full_precision(query.device):
            score = self.score().ready(heads, query)
            keys, values = (
                _rows_of_heads(repeat_heads(x.to(dtype), heads), place, found) for x in (key, value)
            )
            logits = score.edges(
                query.to(dtype)[..., None, :, :], keys.transpose(-2, -3)
            ).transpose(-1, -2)
            logits = logits.masked_fill(~found, -torch.inf)
            empty = ~found.any(-1, keepdim=True)
            lse = logits.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
            weights = (logits - lse).exp().masked_fill(~found, 0)
            out = (weights[..., None] * values).sum(-2)
        return out, lse.masked_fill(empty, -torch.inf)


def _rows_of_heads(x: Tensor, place: Tensor, found: Tensor) -> Tensor:
    """Gather x [*, M, H, D] at `place` [*, N, H, k], and 0 where not `found`: [*, N, H, k, D]."""
    if x.shape[-3] == 0:
        return x.new_zeros(*place.shape, x.shape[-1])
    by_head = x.transpose(-2, -3)  # [*, H, M, D]
    index = place.transpose(-2, -3).flatten(-2)[..., None].expand(*x.shape[:-3], -1, -1, x.shape[-1])
    rows = by_head.gather(-2, index).unflatten(-2, (place.shape[-3], place.shape[-1]))
    return rows.transpose(-3, -4).masked_fill(~found[..., None], 0)


def best_on_ring(
    score: Score,
    k: int,
    rounds: Sequence[Round],
    targets: OptionalTensors,
    sources: OptionalTensors,
) -> Tensor:
    """Return the k best sources of every target and head, on whatever rank they are.

    Only keys travel. Every rank keeps the k best candidates of the rounds so far.

    Args:
        score: gives the logits.
        k: how many sources a row selects.
        rounds: this rank's rounds.
        targets: this rank's queries [*, N, H, D], and a mask or None.
        sources: this rank's keys [*, M, Hk, D], and a mask or None.

    Returns:
        LongTensor [*, N, H, k], tokens of the whole graph; -1 where a row has fewer sources.
    """
    by_run: dict[range, Candidates] = {}
    for turn, rows in _arriving(rounds, sources):
        for block in turn.blocks:
            (query, of_targets), (key, of_sources) = (
                _rows(targets, block.targets),
                _rows(rows, block.sources),
            )
            assert query is not None
            assert key is not None
            logits, place = candidates_by_score(
                query, key, block.graph, k, score, valid=(of_targets, of_sources)
            )
            index = place
            if len(block.tokens):
                index = torch.where(place < 0, place, block.tokens[place.clamp(min=0)])
            best = logits, index
            if (earlier := by_run.get(block.targets)) is not None:
                best = merge_top_k([earlier, best], k)
            by_run[block.targets] = best
    runs = sorted(by_run, key=lambda run: run.start)
    return torch.cat([by_run[run][1] for run in runs], dim=-3)


def on_ring(
    operation: RingOperation,
    rounds: Sequence[Round],
    targets: OptionalTensors,
    sources: OptionalTensors,
    parameters: Sequence[Tensor],
) -> Tensors:
    """Compute an operation over the sources of all ranks, one rank at a time.

    Args:
        operation: what is computed.
        rounds: this rank's rounds; all ranks have equally many.
        targets, sources: this rank's tensors, [*, tokens, heads, features], or masks [*, tokens].
        parameters: all other tensors that the operation differentiates, such as bandwidths.

    Returns:
        The results over all sources, [*, N, H, features].
    """
    counts = len(targets), len(sources)
    results: Tensors = _OnRing.apply(
        operation, rounds, counts, *targets, *sources, *(x for x in parameters if x.requires_grad)
    )
    return results


class _OnRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: RingOperation,
        rounds: Sequence[Round],
        counts: tuple[int, int],
        *tensors: Tensor | None,
    ) -> Tensors:
        t, s = counts
        targets, sources = tensors[:t], tensors[t : t + s]
        by_run: dict[range, Tensors] = {}
        for turn, rows in _arriving(rounds, sources):
            for block in turn.blocks:
                given = _rows(targets, block.targets), _rows(rows, block.sources)
                part = operation.part(*given, block)
                if (earlier := by_run.get(block.targets)) is not None:
                    part = operation.merge(earlier, part)
                by_run[block.targets] = part
        parts = [by_run[run] for run in sorted(by_run, key=lambda run: run.start)]
        whole = parts[0]
        if len(parts) > 1:
            whole = tuple(torch.cat(results, dim=-3) for results in zip(*parts, strict=True))
        ctx.operation, ctx.rounds, ctx.counts = operation, rounds, counts
        ctx.parameters = tensors[t + s :]
        ctx.save_for_backward(*targets, *sources, *whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *d_whole: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        counts = t, s = ctx.counts
        saved = ctx.saved_tensors
        targets, sources, whole = saved[:t], saved[t : t + s], saved[t + s :]
        needed = ctx.needs_input_grad[3:]
        totals = [
            torch.zeros_like(x) if need and x is not None else None
            for x, need in zip([*targets, *sources, *ctx.parameters], needed, strict=True)
        ]
        of_targets, of_sources, of_parameters = totals[:t], totals[t : t + s], totals[t + s :]
        travelling = [i for i, total in enumerate(of_sources) if total is not None]
        for turn, rows in _arriving(ctx.rounds, sources):
            d_rows = [None if of_sources[i] is None else torch.zeros_like(x) for i, x in enumerate(rows)]
            for block in turn.blocks:
                given = [*_rows(targets, block.targets), *_rows(rows, block.sources)]
                given += ctx.parameters
                results = _rows(whole, block.targets), _rows(d_whole, block.targets)
                found = _gradients(ctx.operation, block, given, needed, counts, *results)
                for total, gradient in zip(of_targets, found[:t], strict=True):
                    _add_rows(total, block.targets, gradient)
                for total, gradient in zip(d_rows, found[t : t + s], strict=True):
                    _add_rows(total, block.sources, gradient)
                for total, gradient in zip(of_parameters, found[t + s :], strict=True):
                    if total is not None and gradient is not None:
                        total += gradient
            home = [d_rows[i] for i in travelling]
            places: Any = range(0, 0)
            if turn.exchange is not None:
                home = turn.exchange.returned(home, [-3] * len(home))
                places = turn.exchange.send
            else:
                places = range(home[0].shape[-3]) if home else places
            for i, gradient in zip(travelling, home, strict=True):
                _add_rows(of_sources[i], places, gradient)
        return None, None, None, *totals


def _arriving(
    rounds: Sequence[Round], sources: OptionalTensors
) -> Iterator[tuple[Round, list[Tensor | None]]]:
    """Yield every round and its rows; those of the next round are on their way by then."""
    there = [x for x in sources if x is not None]
    dims = [_dim(x) for x in there]

    def start(turn: Round) -> list[Tensor] | None:
        return None if turn.exchange is None else turn.exchange.start(there, dims)

    on_their_way = start(rounds[0])
    for number, turn in enumerate(rounds):
        arrived = there
        if turn.exchange is not None and on_their_way is not None:
            arrived = turn.exchange.finish(on_their_way, there, dims)
        if number + 1 < len(rounds):
            on_their_way = start(rounds[number + 1])
        rows = iter(arrived)
        yield turn, [None if x is None else next(rows) for x in sources]


def _dim(x: Tensor) -> int:
    return -1 if x.dtype == torch.bool else -3


def _rows(tensors: OptionalTensors, rows: range | Tensor) -> list[Tensor | None]:
    """Take some tokens of every tensor."""
    found: list[Tensor | None] = []
    for x in tensors:
        if x is None:
            found.append(None)
        elif isinstance(rows, Tensor):
            found.append(x.index_select(_dim(x), rows))
        else:
            found.append(x.narrow(_dim(x), rows.start, len(rows)))
    return found


def _add_rows(total: Tensor | None, rows: range | Tensor, gradient: Tensor | None) -> None:
    if total is None or gradient is None:
        return
    if isinstance(rows, Tensor):
        total.index_add_(-3, rows, gradient)
    else:
        total.narrow(-3, rows.start, len(rows)).add_(gradient)


def _gradients(
    operation: RingOperation,
    block: Block,
    given: list[Tensor | None],
    needed: Sequence[bool],
    counts: tuple[int, int],
    whole: list[Any],
    d_whole: list[Any],
) -> list[Tensor | None]:
    """Compute a part again, and return the gradients of its targets, sources and parameters."""
    t, s = counts
    inputs = [
        x.detach().requires_grad_() if x is not None and need and i < t + s else x
        for i, (x, need) in enumerate(zip(given, needed, strict=True))
    ]
    with torch.enable_grad():
        part = operation.part(inputs[:t], inputs[t : t + s], block)
    upstream = operation.upstream(
        tuple(x.detach() for x in part), tuple(whole), tuple(d_whole)
    )
    results = [(y, d) for y, d in zip(part, upstream, strict=True) if y.requires_grad]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if x is not None and need]
    if not results or not wanted:
        return [None] * len(inputs)
    outs, gradients = zip(*results, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, gradients, allow_unused=True))
    return [
        next(found) if x is not None and need else None
        for x, need in zip(inputs, needed, strict=True)
    ]
