"""Exchanges between ranks: of keys and values, or whatever rows a layer reads of sources.

All rows travel in one all-to-all before the layer's operation, and their gradients in one after
it; on a ring, in one for every round. These and the other collectives at the end of this file are
functional ones, which torch.compile traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from graphattn.distributed.agreement import agree_on_call
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
        kept = [self._kept_rows(x, dim) for x, dim in zip(tensors, dims, strict=True)]
        if self.total == 0 and self.place is None:
            return kept
        if self.total == 0:  # a rank that owns two runs of tokens may see its own tokens twice
            arrived = [x.narrow(dim, 0, 0) for x, dim in zip(tensors, dims, strict=True)]
        else:
            arrived = self.finish(self.start(tensors, dims), tensors, dims)
        return [self._merged(*rows) for rows in zip(arrived, kept, dims, strict=True)]

    def start(self, tensors: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """Send this rank's rows, and return buffers that :meth:`finish` waits for."""
        if self.total:
            agree_on_call(self.group)
        buffers = []
        for numbers in _in_one_buffer(tensors):
            given = [(tensors[i], dims[i]) for i in numbers]
            dtype = _common_dtype([x for x, _ in given])
            # Without a name for the list, its tensors are freed before others are allocated.
            leaving = torch.cat(
                [_as_rows(x.index_select(dim, self.send), dim).to(dtype) for x, dim in given], dim=1
            )
            buffers.append(self._all_to_all(leaving, self.received, self.sent))
        return buffers

    def finish(
        self, buffers: Sequence[Tensor], tensors: Sequence[Tensor], dims: Sequence[int]
    ) -> list[Tensor]:
        """Return the rows that arrive of every tensor, in the order of their tokens."""
        arrived: dict[int, Tensor] = {}
        for numbers, rows in zip(_in_one_buffer(tensors), buffers, strict=True):
            like, along = [tensors[i] for i in numbers], [dims[i] for i in numbers]
            for i, part in zip(numbers, _parts(_waited(rows), like, along), strict=True):
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

    def add_returned(self, buffer: Tensor, totals: Sequence[Any]) -> None:
        """Send a buffer of :meth:`room_for_gradients` to the owners of its rows.

        The gradients that other ranks send here are added to `totals`.
        """
        wanted = [x for x in totals if x is not None]
        arrived = _waited(self._all_to_all(buffer, self.sent, self.received))
        parts = _parts(arrived, wanted, [-3] * len(wanted))
        for total, gradient in zip(wanted, parts, strict=True):
            total.index_add_(-3, self.send, gradient.to(total.dtype))

    def _kept_rows(self, x: Tensor, dim: int) -> Tensor:
        if isinstance(self.kept, Tensor):
            return x.index_select(dim, self.kept)
        if self.kept == slice(0, x.shape[dim]):
            return x
        return x.narrow(dim, self.kept.start, self.kept.stop - self.kept.start)

    def _all_to_all(self, rows: Tensor, received: tuple[int, ...], sent: tuple[int, ...]) -> Tensor:
        if self.total == 0:
            return rows
        result: Tensor
        if rows.requires_grad and torch.is_grad_enabled():
            result = _Exchanged.apply(rows, received, sent, self.group)
        else:
            result = _exchanged(rows, received, sent, self.group)
        return result

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


class _Exchanged(torch.autograd.Function):
    """An exchange of rows, whose gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: tuple[int, ...], sent: tuple[int, ...], group: Any
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _waited(_exchanged(rows, received, sent, group))

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        return _waited(_exchanged(d_rows, ctx.sent, ctx.received, ctx.group)), None, None, None


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
    on_their_way: list[Tensor] = []
    for number, exchange in enumerate(exchanges):
        rows = there if exchange is None else exchange.finish(on_their_way, there, dims)
        rows = in_places_of(sources, rows)
        following = exchanges[number + 1] if number + 1 < len(exchanges) else None
        on_their_way = [] if following is None else following.start(there, dims)
        yield rows
        rows.clear()  # before others arrive


# Other collectives.


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


def gathered(x: Tensor, dim: int, layout: Layout, rank: int, group: Any) -> Tensor:
    """Return the tensor of all tokens, whose dimension `dim` counts them, from those of all ranks.

    In the backward pass, every rank takes the gradient of its own tokens.
    """
    result: Tensor = _Gathered.apply(x, dim, layout, rank, group)
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, rank: int, group: Any) -> Tensor:
        ctx.dim, ctx.runs = dim, layout.runs(rank)
        sizes = layout.sizes()
        first = x.movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))
        padded[: sizes[rank]] = first
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
        return torch.cat(rows, dim=ctx.dim), None, None, None, None
