"""The two passes of an operation on a ring.

In round d, every rank gets rows from the rank d places before it, computes the part of the
operation over them, and merges it with what it has. So it never stores the rows of more than two
ranks. In the backward pass the rows travel again, and the gradients of its sources travel back.
Softmax attention computes them from the results over all sources
(`ops/attention/part_gradients.py` says where). Dropout, top-k, scores of your own and everything
else compute each part again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange, head_token_dim, in_places_of
from graphattn.distributed.ring.operations import Given, RingOperation, Tensors
from graphattn.distributed.ring.rounds import RingBlock, RingRound
from graphattn.distributed.seen import Run
from graphattn.ops.attention.candidates import Candidates, candidates_by_score, merge_top_k
from graphattn.ops.attention.logits.score import Score


def best_on_ring(
    score: Score,
    k: int,
    rounds: Sequence[RingRound],
    targets: Given,
    sources: Given,
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
    by_run: dict[int, Candidates] = {}
    for turn, rows in _arriving(rounds, sources):
        for block in turn.blocks:
            (query, of_targets), (key, of_sources) = (
                _rows(targets, block.targets),
                _rows(rows, block.sources),
            )
            logits, place = candidates_by_score(
                query, key, block.graph, k, score, valid=(of_targets, of_sources)
            )
            index = place
            if len(block.tokens):
                index = torch.where(place < 0, place, block.tokens[place.clamp(min=0)])
            best = logits, index
            if (earlier := by_run.get(block.run)) is not None:
                best = merge_top_k([earlier, best], k)
            by_run[block.run] = best
    return torch.cat([by_run[run][1] for run in sorted(by_run)], dim=-3)


def on_ring(
    operation: RingOperation,
    rounds: Sequence[RingRound],
    targets: Given,
    sources: Given,
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


def over_own_sources(
    operation: RingOperation, rounds: Sequence[RingRound], targets: Given, sources: Given
) -> Tensors:
    """Compute an operation over the sources of this rank only; autograd differentiates it.

    The arguments are those of :func:`on_ring`.
    """
    by_run: dict[int, Tensors] = {}
    _add_blocks(by_run, operation, rounds[0].blocks, targets, sources)
    return in_order([by_run[run] for run in sorted(by_run)])


def _add_blocks(
    by_run: dict[int, Tensors],
    operation: RingOperation,
    blocks: Sequence[RingBlock],
    targets: Given,
    sources: Given,
) -> None:
    """Merge the results over some blocks with earlier ones of the same runs of targets."""
    for block in blocks:
        part = operation.part(_rows(targets, block.targets), _rows(sources, block.sources), block)
        if (earlier := by_run.get(block.run)) is not None:
            part = operation.merge(earlier, part)
        by_run[block.run] = part


def in_order(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate the results of targets one after another."""
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(results, dim=-3) for results in zip(*parts, strict=True))


class _OnRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: RingOperation,
        rounds: Sequence[RingRound],
        counts: tuple[int, int],
        *tensors: Any,
    ) -> Tensors:
        t, s = counts
        targets, sources = tensors[:t], tensors[t : t + s]
        by_run: dict[int, Tensors] = {}
        for turn, rows in _arriving(rounds, sources):
            _add_blocks(by_run, operation, turn.blocks, targets, rows)
        whole = in_order([by_run[run] for run in sorted(by_run)])
        ctx.operation, ctx.rounds, ctx.counts = operation, rounds, counts
        ctx.parameters = tensors[t + s :]
        ctx.save_for_backward(*targets, *sources, *whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *d_whole: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = _OnRing.gradients(ctx, d_whole)
        if not torch.is_grad_enabled():
            return gradients
        # With create_graph=True: a second derivative would lack the share of the ring.
        given = [x for x in gradients if x is not None]
        inputs = [x for x in (*d_whole, *ctx.saved_tensors, *ctx.parameters) if x is not None]
        return tuple(in_places_of(gradients, _Once.apply(len(given), *given, *inputs)))

    @staticmethod
    def gradients(ctx: Any, d_whole: Tensors) -> tuple[Any, ...]:
        counts = t, s = ctx.counts
        saved = ctx.saved_tensors
        targets, sources, whole = saved[:t], saved[t : t + s], saved[t + s :]
        needed = ctx.needs_input_grad[3:]
        totals = [
            torch.zeros_like(x) if need and x is not None else None
            for x, need in zip([*targets, *sources, *ctx.parameters], needed, strict=True)
        ]
        of_targets, of_sources, of_parameters = totals[:t], totals[t : t + s], totals[t + s :]
        for turn, rows in _arriving(ctx.rounds, sources):
            d_rows, leaving = of_sources, None
            if turn.exchange is not None:
                d_rows, leaving = _zeros_to_return(turn.exchange, of_sources)
            for block in turn.blocks:
                given = [*_rows(targets, block.targets), *_rows(rows, block.sources)]
                given += ctx.parameters
                results = _rows(whole, block.targets), _rows(d_whole, block.targets)
                gradients = _gradients(ctx.operation, block, given, needed, counts, *results)
                for total, gradient in zip(of_targets, gradients[:t], strict=True):
                    _add_rows(total, block.targets, gradient)
                for total, gradient in zip(d_rows, gradients[t : t + s], strict=True):
                    _add_rows(total, block.sources, gradient)
                for total, gradient in zip(of_parameters, gradients[t + s :], strict=True):
                    if total is not None and gradient is not None:
                        total += gradient
                del given, gradients  # before others are allocated
            rows.clear()
            if turn.exchange is not None and leaving is not None:
                _add_returned(turn.exchange, leaving, of_sources)
        return None, None, None, *totals


class _Once(torch.autograd.Function):
    """Gradients that depend on other tensors, and cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensors:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            "rows that are exchanged on a ring have no second derivative: make the shard with "
            "exchange='rows'"
        )


def _arriving(rounds: Sequence[RingRound], sources: Given) -> Iterator[tuple[RingRound, list[Any]]]:
    """Yield every round and its rows; those of the next round are on their way by then.

    A list of rows is emptied when the next one is asked for.
    """
    there = [x for x in sources if x is not None]
    dims = [head_token_dim(x) for x in there]

    def start(turn: RingRound) -> list[Tensor] | None:
        return None if turn.exchange is None else turn.exchange.start(there, dims)

    on_their_way = start(rounds[0])
    for number, turn in enumerate(rounds):
        arrived = there
        if turn.exchange is not None and on_their_way is not None:
            arrived = turn.exchange.finish(on_their_way, there, dims)
        rows = in_places_of(sources, arrived)
        on_their_way = start(rounds[number + 1]) if number + 1 < len(rounds) else None
        yield turn, rows
        rows.clear()  # before others arrive


def _rows(tensors: Given, rows: Run | Tensor) -> list[Any]:
    """Take some tokens of every tensor."""

    def taken(x: Tensor) -> Tensor:
        if isinstance(rows, Tensor):
            return x.index_select(head_token_dim(x), rows)
        return x.narrow(head_token_dim(x), rows[0], rows[1] - rows[0])

    return [None if x is None else taken(x) for x in tensors]


def _zeros_to_return(exchange: RowExchange, totals: Given) -> tuple[list[Any], Tensor | None]:
    """Make room for the gradients of the rows of a round: 0 for every row, in one buffer.

    Returns:
        Parts of the buffer in the shapes of the rows, or None where no total is wanted; and the
        buffer.
    """
    wanted = [x for x in totals if x is not None]
    if not wanted:
        return list(totals), None
    buffer, parts = exchange.room_for_gradients(wanted, [-3] * len(wanted))
    return in_places_of(totals, parts), buffer


def _add_returned(exchange: RowExchange, leaving: Tensor, totals: Given) -> None:
    """Send the gradients of the rows of a round home, and add those that come home."""
    wanted = [x for x in totals if x is not None]
    for total, home in zip(
        wanted, exchange.returned(leaving, wanted, [-3] * len(wanted)), strict=True
    ):
        _add_rows(total, exchange.send, home)


def _add_rows(total: Tensor | None, rows: Run | Tensor, gradient: Tensor | None) -> None:
    if total is None or gradient is None:
        return
    if isinstance(rows, Tensor):
        total.index_add_(-3, rows, gradient.to(total.dtype))
    else:
        total.narrow(-3, rows[0], rows[1] - rows[0]).add_(gradient)


def _gradients(
    operation: RingOperation,
    block: RingBlock,
    given: list[Any],
    needed: Sequence[bool],
    counts: tuple[int, int],
    whole: list[Any],
    d_whole: list[Any],
) -> list[Tensor | None]:
    """Return the gradients of a part's targets, sources and parameters.

    The part is computed again, unless its operation needs the results over all sources only.
    """
    t, s = counts
    inputs = [
        x.detach().requires_grad_() if x is not None and need and i < t + s else x
        for i, (x, need) in enumerate(zip(given, needed, strict=True))
    ]
    own = inputs[:t], inputs[t : t + s], block
    with torch.enable_grad():
        pairs = operation.pulled(*own, tuple(whole), tuple(d_whole))
        part = () if pairs is not None else operation.part(*own)
    if pairs is None:
        upstream = operation.upstream(tuple(x.detach() for x in part), tuple(whole), tuple(d_whole))
        pairs = list(zip(part, upstream, strict=True))
    results = [(y, d) for y, d in pairs if y.requires_grad]
    leaves = [x if need else None for x, need in zip(inputs, needed, strict=True)]
    wanted = [x for x in leaves if x is not None]
    if not results or not wanted:
        return [None] * len(inputs)
    outs, gradients = zip(*results, strict=True)
    if block.run == 0:  # once is enough
        _check_leaves(outs, wanted)
    return in_places_of(leaves, torch.autograd.grad(outs, wanted, gradients, allow_unused=True))


def _check_leaves(outs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Refuse a tensor that the results depend on and whose gradient would be lost."""
    leaves = [x for x in outs if x.grad_fn is None]
    nodes, seen = [x.grad_fn for x in outs], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        nodes += [following for following, _ in node.next_functions]
    for leaf in leaves:
        if not any(leaf is x for x in known):
            raise ValueError(
                "score must depend on parameters of its layer only if rows are exchanged on a "
                f"ring, got another tensor of shape {list(leaf.shape)} that requires a gradient: "
                "register it in the layer, or make the shard with exchange='rows'"
            )
