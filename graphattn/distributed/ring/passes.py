"""The two passes of an operation on a ring.

In round d, every rank gets rows from the rank d places before it, computes the part of the
operation over them, and merges it with what it has. So it never stores the rows of more than two
ranks. In the backward pass the rows travel again, and the gradients of its sources travel back.
What a round needs travels while the round before it is computed, and gradients travel back while
the round after it is.
The table :data:`GRADIENTS` says how the gradients of a part are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from graphattn.distributed.exchange import (
    RowExchange,
    Travelling,
    head_token_dim,
    in_places_of,
    rows_of_rounds,
)
from graphattn.distributed.own_first import OwnFirst
from graphattn.distributed.ring.compiled import as_operator, register
from graphattn.distributed.ring.operations import Given, RingOperation, Tensors
from graphattn.distributed.ring.rounds import RingBlock, RingRound
from graphattn.distributed.seen import Run
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.part_gradients import Pairs
from graphattn.ops.backends import Backend


def on_ring(operation: RingOperation, shard: Any, targets: Given, sources: Given) -> Tensors:
    """Return the results [*, N, H, features] of an operation over the sources of all ranks.

    Targets and sources are this rank's tensors [*, tokens, heads, features], or masks [*, tokens].
    """
    layer, tensors = operation.layer, operation.tensors
    parameters = [] if layer is None else [*layer.parameters()]
    if torch.compiler.is_compiling():
        return as_operator(operation, shard, (targets, sources, parameters, tensors))
    rounds = shard.rounds_of_both_ends if operation.both else shard.rounds
    counts = len(targets), len(sources)
    own = [x for x in parameters if x.requires_grad]
    needed, leaves = [*own], [*tensors]
    for i, x in enumerate(tensors):
        if x is not None and x.requires_grad:
            # Parts are differentiated up to here: what a tensor was made of is, only once.
            leaves[i] = x.detach().requires_grad_()
            own.append(leaves[i])
            needed.append(x)
            operation = type(operation)(layer, *leaves)
    results: Tensors = _OnRing.apply(operation, rounds, counts, own, *targets, *sources, *needed)
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


def own_first(
    operation: RingOperation,
    split: OwnFirst,
    targets: Given,
    sources: Given,
    finish: Callable[[Tensors, Tensor | None], Tensors] | None = None,
    dim: int = -3,
    started: Sequence[Travelling] = (),
) -> Tensors:
    """Compute an operation over the sources of this rank while those of other ranks travel.

    autograd differentiates the result. What occurs twice among `sources` travels once.

    Args:
        operation, targets, sources: as in :func:`on_ring`.
        split: the edges of the rank in two parts.
        finish: what makes the result from the operation's own, of all targets (None) or of some.
        dim: the dimension of that which counts the targets.
        started: what travels, if it has been sent.
    """
    own, rest, exchange, rows = split
    sent = [*{id(x): x for x in sources if x is not None}.values()]
    dims = [head_token_dim(x) for x in sent]
    started = started or exchange.start(sent, dims)
    part = operation.part(targets, sources, _block(0, own))
    whole = part if finish is None else finish(part, None)
    arrived = dict(zip(map(id, sent), exchange.context(started, sent, dims), strict=True))
    seen = [None if x is None else arrived[id(x)] for x in sources]
    other = operation.part(_rows(targets, rows), seen, _block(1, rest))
    merged = operation.merge(tuple(_rows(part, rows)), other)
    merged = merged if finish is None else finish(merged, rows)
    return tuple(x.index_copy(dim, rows, y) for x, y in zip(whole, merged, strict=True))


def _block(number: int, graph: TokenGraph) -> RingBlock:
    """Return all edges of a graph as a block."""
    targets, sources = (0, graph.num_targets), (0, graph.num_sources)
    tokens = torch.arange(graph.num_sources, device=graph.device)
    return RingBlock(number, 0, targets, sources, tokens, graph)


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
        own: Given,
        *tensors: Any,
    ) -> Tensors:
        t, s = counts
        whole = forward(operation, rounds, tensors[:t], tensors[t : t + s])
        ctx.operation, ctx.rounds, ctx.counts, ctx.parameters = operation, rounds, counts, own
        ctx.save_for_backward(*tensors[: t + s], *whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *d_whole: Tensor) -> tuple[Any, ...]:
        (t, s), saved = ctx.counts, ctx.saved_tensors
        given, whole = (*saved[: t + s], *ctx.parameters), saved[t + s :]
        needed = ctx.needs_input_grad[4:]
        gradients: Sequence[Any] = backward(
            ctx.operation, ctx.rounds, ctx.counts, given, needed, whole, d_whole
        )
        if torch.is_grad_enabled():
            # With create_graph=True: a second derivative would lack the share of the ring.
            there = [x for x in gradients if x is not None]
            inputs = [x for x in (*d_whole, *whole, *given) if x is not None]
            gradients = in_places_of(gradients, _Once.apply(len(there), *there, *inputs))
        return None, None, None, None, *gradients


def forward(
    operation: RingOperation, rounds: Sequence[RingRound], targets: Given, sources: Given
) -> Tensors:
    """Compute the results of :func:`on_ring`."""
    by_run: dict[int, Tensors] = {}
    for turn, rows in zip(rounds, rows_of_rounds(_exchanges(rounds), sources), strict=True):
        _add_blocks(by_run, operation, turn.blocks, targets, rows)
    return in_order([by_run[run] for run in sorted(by_run)])


@torch.no_grad()
def backward(
    operation: RingOperation,
    rounds: Sequence[RingRound],
    counts: tuple[int, int],
    given: Given,
    needed: Sequence[bool],
    whole: Tensors,
    d_whole: Tensors,
) -> list[Tensor | None]:
    """Return the gradients of all that is `given`: `counts` targets and sources, and parameters.

    None stands for one that is not needed, and for that of a parameter that no result depends on.
    """
    t, s = counts
    targets, sources, parameters = given[:t], given[t : t + s], given[t + s :]
    totals = [
        torch.zeros_like(x) if need and x is not None else None
        for x, need in zip(given[: t + s], needed, strict=False)
    ]
    of_targets, of_sources = totals[:t], totals[t:]
    of_parameters: list[Tensor | None] = [None] * len(parameters)
    arriving = rows_of_rounds(_exchanges(rounds), sources)
    returning: tuple[RowExchange, Tensor] | None = None
    for (exchange, blocks), rows in zip(rounds, arriving, strict=True):
        d_rows, leaving = of_sources, None
        if exchange is not None:
            d_rows, leaving = exchange.room_for_gradients(of_sources)
        for block in blocks:
            of_block = [*_rows(targets, block.targets), *_rows(rows, block.sources), *parameters]
            results = _rows(whole, block.targets), _rows(d_whole, block.targets)
            gradients = _gradients(operation, block, of_block, needed, counts, *results)
            for total, gradient in zip(of_targets, gradients[:t], strict=True):
                _add_rows(total, block.targets, gradient)
            for total, gradient in zip(d_rows, gradients[t : t + s], strict=True):
                _add_rows(total, block.sources, gradient)
            for i, gradient in enumerate(gradients[t + s :]):
                if gradient is not None:
                    total = of_parameters[i]
                    of_parameters[i] = gradient.clone() if total is None else total.add_(gradient)
            del of_block, gradients  # before others are allocated
        rows.clear()
        if returning is not None:
            returning[0].add_returned(returning[1], of_sources)
            returning = None
        if exchange is not None and leaving is not None:
            returning = exchange, exchange.send_back(leaving)
    if returning is not None:
        returning[0].add_returned(returning[1], of_sources)
    return [*totals, *of_parameters]


register(forward, backward)


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


def _exchanges(rounds: Sequence[RingRound]) -> list[RowExchange | None]:
    return [turn.exchange for turn in rounds]


def _rows(tensors: Given, rows: Run | Tensor) -> list[Any]:
    """Take some tokens of every tensor [*, tokens, heads, features] and mask [*, tokens]."""
    taken: list[Any] = []
    for x in tensors:
        if x is None:
            taken.append(None)
            continue
        dim = -1 if x.dtype == torch.bool else -3
        if isinstance(rows, Tensor):
            taken.append(x.index_select(dim, rows))
        else:
            taken.append(x.narrow(dim, rows[0], rows[1] - rows[0]))
    return taken


def _add_rows(total: Tensor | None, rows: Run | Tensor, gradient: Tensor | None) -> None:
    if total is None or gradient is None:
        return
    if isinstance(rows, Tensor):
        total.index_add_(-3, rows, gradient.to(total.dtype))
    else:
        total.narrow(-3, rows[0], rows[1] - rows[0]).add_(gradient)


class PartOfGradient(NamedTuple):
    """A part of an operation whose gradients are wanted, and the results over all sources."""

    operation: RingOperation
    targets: Given
    sources: Given
    block: RingBlock
    whole: Tensors
    d_whole: Tensors


def _why_not_from_results(part: PartOfGradient) -> str | None:
    """The reason why the results over all sources are not enough; None if they are."""
    return part.operation.needs_its_part


def _run_from_results(part: PartOfGradient) -> Pairs:
    """Compute the gradients from the results over all sources; some numbers need the part, too."""
    with torch.enable_grad():
        pairs = part.operation.from_results(*part[1:])
    return _run_again(part) if pairs is None else pairs


def _run_again(part: PartOfGradient) -> Pairs:
    """Compute the results of the part again, and take their gradients from those of the whole."""
    operation, targets, sources, block, whole, d_whole = part
    with torch.enable_grad():
        results = operation.part(targets, sources, block)
    gradients = operation.upstream(tuple(x.detach() for x in results), whole, d_whole)
    return list(zip(results, gradients, strict=True))


# Each row returns tensors that depend on the targets, sources and parameters of a part, each with
# its gradient.
GRADIENTS = (  # fastest first
    Backend("from results", _why_not_from_results, _run_from_results),
    Backend("again", run=_run_again),
)


def _gradients(
    operation: RingOperation,
    block: RingBlock,
    given: list[Any],
    needed: Sequence[bool],
    counts: tuple[int, int],
    whole: list[Any],
    d_whole: list[Any],
) -> list[Tensor | None]:
    """Return the gradients of a part's targets, sources and parameters."""
    t, s = counts
    inputs = [
        x.detach().requires_grad_() if x is not None and need and i < t + s else x
        for i, (x, need) in enumerate(zip(given, needed, strict=True))
    ]
    results = tuple(whole), tuple(d_whole)
    part = PartOfGradient(operation, inputs[:t], inputs[t : t + s], block, *results)
    pairs = next(way for way in GRADIENTS if way.why_not(part) is None)(part)
    pairs = [(y, d) for y, d in pairs if y.requires_grad]
    leaves = [x if need else None for x, need in zip(inputs, needed, strict=True)]
    wanted = [x for x in leaves if x is not None]
    if not pairs or not wanted:
        return [None] * len(inputs)
    outs, gradients = zip(*pairs, strict=True)
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
