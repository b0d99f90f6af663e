"""Exchanges between ranks: of keys and values, or whatever rows a layer reads of sources.

All rows travel in one all-to-all before the layer's operation, and their gradients in one after
it; on a ring, in one for every round. What is computed between :meth:`RowExchange.start` and
:meth:`RowExchange.finish` is computed while rows travel, and its backward pass while gradients do.
These and the other collectives at the end of this file are functional ones, which torch.compile
traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from graphattn.distributed.agreement import OpenFacts, agree_in_graph, agree_on_call, facts_in_graph
from graphattn.distributed.layout import Layout


@dataclass(frozen=True)
class RowExchange:
    """Rows that one rank sends to and receives from every other rank.

    The rows that a rank receives come in the order of their tokens. With its own rows in the place
    where they belong, they are the *context*: all tokens that its targets see.

    Attributes:
        group: the process group; None if there is only one rank.
        send: LongTensor, its own rows that others need, by receiver, then by token.
        sent: how many rows each rank gets, one number per rank.
        received: how many rows come from each rank.
        total: how many rows all ranks send together. If 0, nobody calls a collective.
        kept: its own rows in the context, a slice or a LongTensor; none by default.
        place: LongTensor, the rows of the context in [received rows, own rows]. None if the first
            `before` received rows, its own rows, and the other received rows are the context.
        before: how many received rows come before its own.
    """

    group: Any
    send: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    total: int
    kept: slice | Tensor = field(default_factory=lambda: slice(0))
    place: Tensor | None = None
    before: int = 0

    @classmethod
    def of_lists(
        cls,
        send: Sequence[Tensor],
        received: Sequence[int],
        total: int,
        *,
        group: Any,
        device: torch.device,
        **context: Any,
    ) -> Self:
        """Make an exchange from the rows that each rank gets, and how many come from each rank."""
        rows, sent = torch.cat([*send]).to(device), tuple(map(len, send))
        return cls(group, rows, sent, tuple(received), total, **context)

    def __call__(self, *tensors: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Return the context of tensors with this rank's tokens.

        Args:
            tensors: on one device. All ranks pass equal shapes and dtypes, up to the number of
                tokens. Those of floating-point numbers travel in the widest dtype of them.
            dims: the dimension of every tensor that counts the tokens, from the end: -2 for
                [*, N, dim], -3 for [*, N, heads, D], -1 for masks [*, N].
        """
        started = self.start(tensors, dims) if self.total else []
        return self.context(started, tensors, dims)

    def context(
        self, started: Sequence[Travelling], tensors: Sequence[Tensor], dims: Sequence[int]
    ) -> list[Tensor]:
        """Return the context of tensors whose rows have been sent by :meth:`start`."""
        kept = [self._kept_rows(x, dim) for x, dim in zip(tensors, dims, strict=True)]
        if self.total == 0 and self.place is None:
            return kept
        if self.total == 0:  # a rank that owns two runs of tokens may see its own tokens twice
            arrived = [x.narrow(dim, 0, 0) for x, dim in zip(tensors, dims, strict=True)]
        else:
            arrived = self.finish(started, tensors, dims)
        return [self._merged(*rows) for rows in zip(arrived, kept, dims, strict=True)]

    def start(
        self, tensors: Sequence[Tensor], dims: Sequence[int], *, are_rows: bool = False
    ) -> list[Travelling]:
        """Send this rank's rows, and return what :meth:`finish` waits for.

        If they `are_rows`, the tensors have only what is to be sent, in the order of `send`.
        """
        if self.total:
            agree_on_call(self.group)
        started = []
        for numbers in _in_one_buffer(tensors):
            given = [(tensors[i], dims[i]) for i in numbers]
            dtype = _common_dtype([x for x, _ in given])
            # Without a name for the list, its tensors are freed before others are allocated.
            leaving = torch.cat(
                [
                    _as_rows(x if are_rows else x.index_select(dim, self.send), dim).to(dtype)
                    for x, dim in given
                ],
                dim=1,
            )
            started.append(self._sent(leaving))
        return started

    def finish(
        self, started: Sequence[Travelling], tensors: Sequence[Tensor], dims: Sequence[int]
    ) -> list[Tensor]:
        """Return the rows that arrive of every tensor, in the order of their tokens."""
        arrived: dict[int, Tensor] = {}
        for numbers, travelling in zip(_in_one_buffer(tensors), started, strict=True):
            like, along = [tensors[i] for i in numbers], [dims[i] for i in numbers]
            for i, part in zip(numbers, _parts(_arrived(travelling), like, along), strict=True):
                arrived[i] = part.to(tensors[i].dtype)
        return [arrived[i] for i in range(len(tensors))]

    def room_for_gradients(self, totals: Sequence[Any]) -> tuple[list[Any], Tensor | None]:
        """Return zeros for the gradients of the rows that arrived, and the buffer that they are in.

        `totals` are the gradients of this rank's rows, [*, tokens, heads, features], or None where
        none is wanted. Each gets a view of the buffer in the shape of the rows that arrived.
        """
        wanted = [x for x in totals if x is not None]
        if not wanted:
            return list(totals), None
        dims = [-3] * len(wanted)
        width = sum(_numbers_of_row(x, -3) for x in wanted)
        buffer = wanted[0].new_zeros((sum(self.received), width), dtype=_common_dtype(wanted))
        return in_places_of(totals, _parts(buffer, wanted, dims)), buffer

    def send_back(self, buffer: Tensor) -> Tensor:
        """Send a buffer of :meth:`room_for_gradients` to the owners of its rows.

        :meth:`add_returned` waits for the result.
        """
        if self.total == 0:
            return buffer
        return _exchanged(buffer, self.sent, self.received, self.group)

    def add_returned(self, returned: Tensor, totals: Sequence[Any]) -> None:
        """Add the gradients that other ranks have sent back to `totals`."""
        wanted = [x for x in totals if x is not None]
        parts = _parts(_waited(returned), wanted, [-3] * len(wanted))
        for total, gradient in zip(wanted, parts, strict=True):
            total.index_add_(-3, self.send, gradient.to(total.dtype))

    def _kept_rows(self, x: Tensor, dim: int) -> Tensor:
        if isinstance(self.kept, Tensor):
            return x.index_select(dim, self.kept)
        if self.kept == slice(0, x.shape[dim]):
            return x
        return x.narrow(dim, self.kept.start, self.kept.stop - self.kept.start)

    def _sent(self, rows: Tensor) -> Travelling:
        if self.total == 0:
            return Travelling(rows)
        needs_gradient = rows.requires_grad and torch.is_grad_enabled()
        there = self.received, self.sent, self.group
        if torch.compiler.is_compiling():
            facts = facts_in_graph()
            if needs_gradient:
                return Travelling(_Exchanged.apply(rows, *there, facts))
            agree_in_graph(rows, facts, self.group)
        elif needs_gradient:
            trip = Trip(*there)
            return Travelling(_Departed.apply(rows, trip), trip)
        return Travelling(_exchanged(rows, *there))

    def _merged(self, others: Tensor, kept: Tensor, dim: int) -> Tensor:
        if self.place is not None:
            return torch.cat([others, kept], dim).index_select(dim, self.place)
        count = others.shape[dim]
        first = others.narrow(dim, 0, self.before)
        last = others.narrow(dim, self.before, count - self.before)
        return torch.cat([first, kept, last], dim)


def _exchanged(
    rows: Tensor, received: tuple[int, ...], sent: tuple[int, ...], group: Any
) -> Tensor:
    """Send rows to all ranks and receive others; the result may be on its way still."""
    from torch.distributed import _functional_collectives as functional

    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(rows):
        raise ValueError(  # torch would not wait for them
            "torch.vmap cannot be used over a graph that is divided among ranks: give the batch as "
            "leading dimensions of x, [*, N, dim]"
        )
    result: Tensor = functional.all_to_all_single(
        rows.contiguous(), list(received), list(sent), group
    )
    return result


@dataclass(eq=False)
class Trip:
    """The way of rows that need a gradient, to other ranks and back.

    Attributes:
        received, sent: how many rows come from each rank, and go to it.
        group: the process group.
        returned: the gradients of the rows that were sent, which may be on their way still.
    """

    received: tuple[int, ...]
    sent: tuple[int, ...]
    group: Any
    returned: Tensor | None = None


class Travelling(NamedTuple):
    """Rows that arrive later; with a trip if their gradients travel back while others are computed.

    Until then `rows` must not be read.
    """

    rows: Tensor
    trip: Trip | None = None


class _Departed(torch.autograd.Function):
    """Sends rows. Its backward pass waits for their gradients, which :class:`_Arrived` sends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        ctx.trip = trip
        travelling = _exchanged(rows, trip.received, trip.sent, trip.group)
        # A plain tensor, because it is the input of another function.
        return travelling.elem if isinstance(travelling, AsyncCollectiveTensor) else travelling

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        returned, ctx.trip.returned = ctx.trip.returned, None
        return _waited(returned), None


class _Arrived(torch.autograd.Function):
    """Waits for rows. Its backward pass sends their gradients, and does not wait.

    autograd computes what was called last first: so the gradients travel while those of whatever
    was computed between both functions are computed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        from torch.distributed import _functional_collectives as functional

        ctx.trip = trip
        arrived: Tensor = functional.wait_tensor(rows)
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.trip.sent, ctx.trip.received, ctx.trip.group
        if torch.is_grad_enabled():  # with create_graph=True
            ctx.trip.returned = _Exchanged.apply(d_rows, *back, None)
        else:
            ctx.trip.returned = _exchanged(d_rows, *back)
        # There is one gradient per row that arrived; those that are returned have another shape.
        return d_rows.new_zeros(()).expand_as(d_rows), None


def _arrived(travelling: Travelling) -> Tensor:
    """Return rows when they are there."""
    if travelling.trip is None:
        return _waited(travelling.rows)
    rows: Tensor = _Arrived.apply(*travelling)
    return rows


class _Exchanged(torch.autograd.Function):
    """An exchange of rows, whose gradients travel back; nothing else is computed meanwhile.

    torch.compile traces it, and it can be differentiated twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        received: tuple[int, ...],
        sent: tuple[int, ...],
        group: Any,
        facts: OpenFacts | None,
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        if facts is not None:
            rows = rows.clone()  # an input must not be changed
            agree_in_graph(rows, facts, group)
        return _waited(_exchanged(rows, received, sent, group))

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        d_sent = _waited(_exchanged(d_rows, ctx.sent, ctx.received, ctx.group))
        return d_sent, None, None, None, None


def _waited(x: Tensor) -> Tensor:
    """Return the result of a collective when it is there, as a plain tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def _in_one_buffer(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors that travel together: numbers and masks; integers of their own."""
    floats = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.dtype == torch.bool]
    others = [i for i in range(len(tensors)) if i not in floats]
    return [group for group in (floats, *([i] for i in others)) if group]


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the widest dtype; masks travel as the numbers 0 and 1."""
    dtypes = [x.dtype for x in tensors if x.dtype != torch.bool] or [torch.uint8]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _as_rows(x: Tensor, dim: int) -> Tensor:
    """Reshape x to one row of numbers per token, [tokens, numbers]."""
    first = x.movedim(dim, 0)
    return first.reshape(first.shape[0], math.prod(first.shape[1:]))


def head_token_dim(x: Tensor) -> int:
    """Return the dimension that counts the tokens: of a mask [*, N], or of [*, N, H, D]."""
    return -1 if x.dtype == torch.bool else -3


def in_places_of(tensors: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """Return one result for each tensor that is there, and None for each that is missing."""
    rest = iter(results)
    return [None if x is None else next(rest) for x in tensors]


def _numbers_of_row(x: Tensor, dim: int) -> int:
    return math.prod(x.movedim(dim, 0).shape[1:])


def _parts(rows: Tensor, tensors: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Split rows of numbers into those of several tensors, in their shapes."""
    widths = [_numbers_of_row(x, dim) for x, dim in zip(tensors, dims, strict=True)]
    parts = zip(rows.split(widths, dim=1), tensors, dims, strict=True)
    return [_from_rows(*part) for part in parts]


def _from_rows(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """Reshape rows of numbers to the shape of `like`, with another number of tokens."""
    shape = like.movedim(dim, 0).shape[1:]
    return rows.reshape(rows.shape[0], *shape).movedim(0, dim)


def rows_of_rounds(
    exchanges: Sequence[RowExchange | None], sources: Sequence[Any]
) -> Iterator[list[Any]]:
    """Yield the rows of every round of a ring; those of the next round are on their way by then.

    A list of rows is emptied when the next one is asked for. There is one exchange per round, None
    for the round with this rank's rows. `sources` are these, [*, tokens, heads, features], or
    masks, or None.
    """
    there = [x for x in sources if x is not None]
    dims = [head_token_dim(x) for x in there]
    on_their_way: list[Travelling] = []
    for number, exchange in enumerate(exchanges):
        rows = there if exchange is None else exchange.finish(on_their_way, there, dims)
        rows = in_places_of(sources, rows)
        following = exchanges[number + 1] if number + 1 < len(exchanges) else None
        on_their_way = [] if following is None else following.start(there, dims)
        yield rows
        rows.clear()  # before others arrive


# Other collectives.


def counts_of_all_ranks(counts: Tensor, group: Any) -> Tensor:
    """Return the counts [n] of every rank, [ranks, n]; without a group, of this one only."""
    if group is None:
        return counts[None]
    gather = _functional("all_gather_single", "all_gather_tensor")
    return _waited(gather(counts[None].contiguous(), 0, group))


def maximum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the elementwise maximum of a tensor over all ranks, on every rank.

    Its gradient goes to the ranks that have the maximum, as that of ``torch.amax``; the ranks add
    up their gradients.
    """
    gather = _functional("all_gather_single_autograd", "all_gather_tensor_autograd")
    whole: Tensor = gather(x.contiguous()[None], 0, group)
    return whole.view(group.size(), *x.shape).amax(0)


def of_every_rank(x: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks, which have one shape, [ranks, ...]."""
    gather = _functional("all_gather_single", "all_gather_tensor")
    whole: Tensor = gather(x.contiguous(), 0, group)
    return whole.view(group.size(), *x.shape)


def of_first_rank(drawn: Tensor, group: Any) -> Tensor:
    """Return what the first rank of a group has drawn, bools or integers, on every rank.

    All ranks draw, so that their generators move on alike, also where a gradient checkpoint draws
    again.
    """
    if group is None:
        return drawn
    from torch.distributed import _functional_collectives as functional

    is_mask = drawn.dtype == torch.bool
    first: Tensor = functional.broadcast(drawn.to(torch.uint8) if is_mask else drawn, 0, group)
    return first.to(drawn.dtype)


def _functional(name: str, older_name: str) -> Callable[..., Any]:
    """Return a functional collective by its name, or by the one that it had before torch 2.13."""
    from torch.distributed import _functional_collectives as functional

    collective: Callable[..., Any] = getattr(functional, name, None) or getattr(
        functional, older_name
    )
    return collective


def gathered(
    x: Tensor, dim: int, layout: Layout, rank: int, group: Any, facts: OpenFacts
) -> Tensor:
    """Return the tensor of all tokens, whose dimension `dim` counts them, from those of all ranks.

    In the backward pass, every rank takes the gradient of its own tokens. If torch.compile traces,
    the ranks compare `facts` when the compiled function runs.
    """
    result: Tensor = _Gathered.apply(x, dim, layout, rank, group, facts)
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, layout: Layout, rank: int, group: Any, facts: OpenFacts
    ) -> Tensor:
        ctx.dim, ctx.runs = dim, layout.runs(rank)
        sizes = layout.sizes()
        first = x.movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))
        padded[: sizes[rank]] = first
        if torch.compiler.is_compiling():
            agree_in_graph(padded, facts, group)
        gather = _functional("all_gather_single", "all_gather_tensor")
        arrived = gather(padded, 0, group).chunk(layout.ranks)
        whole = padded.new_empty((layout.num_tokens, *first.shape[1:]))
        for other, rows in enumerate(arrived):
            start = 0
            for run in layout.runs(other):
                whole[run.start : run.stop] = rows[start : start + len(run)]
                start += len(run)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor | None, ...]:
        rows = [d_whole.narrow(ctx.dim, run.start, len(run)) for run in ctx.runs]
        return torch.cat(rows, dim=ctx.dim), None, None, None, None, None
