"""Attention over any edge list by C++ code: a row of edges per target, without gathering edges.

The code is `kernels/cpu/rows.cpp`. This file passes it the addresses of tensors. It also sorts the
edges by source, for the gradients of keys and values.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.edge_order import edges_by_source
from graphattn.kernels.cpu.tensors import TokenView, address, featurewise, packer, view
from graphattn.ops.attention.calls import Inputs
from graphattn.ops.attention.merge import are_moderate
from graphattn.ops.attention.structured.chunked import RowPlan
from graphattn.ops.attention.structured.plans import gathered_rows
from graphattn.ops.attention.structured.recompute import Gradients, Plan, PlanOptions
from graphattn.ops.edge_cache import cached_by_edges

HASHES = 1 << 32  # how many hashes dropout has: they have 32 bits
CACHE = 1 << 21  # bytes that stay in the cache of a core from one row to the next
LONG_ROWS = 64  # edges per row, from which on the order of rows does not matter
SHARED_CACHE = 8 << 20  # bytes that stay in the cache of all cores
PIECE = 512  # bytes of a token that are worth fetching by themselves


class Visits(NamedTuple):
    """The order in which rows are computed. A *visit* is the computation of one row.

    For targets (forward) and for sources (backward) there are two tensors: `order` [N], the token
    of every visit, and `before` [N + 1], how many edges all visits before this one have, by which
    the edges are divided among threads.

    Attributes:
        orders: those of targets and of sources; None if they are no better than that of the list.
        is_scattered: whether rows that follow each other read different tokens.
    """

    orders: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    is_scattered: bool


class RowsCall(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/rows.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "targets", "sources", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("width", "value_width", "table_heads", "at_once")),
        ("is_narrow", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rowptr", "source", "order", "before")),
        *((name, TokenView) for name in ("query", "key", "value")),
        ("is_rbf", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("top_k", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("bias", ctypes.c_void_p),
        ("bias_batch", ctypes.c_int64),
        ("bias_row", ctypes.c_void_p),
        ("valid_targets", ctypes.c_void_p),
        ("valid_sources", ctypes.c_void_p),
        ("dropout", ctypes.c_double),
        ("drop_rows", ctypes.c_void_p),
        ("drop_columns", ctypes.c_void_p),
        ("drop_below", ctypes.c_int64),
        ("out", TokenView),
        ("lse", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class RowsGradients(ctypes.Structure):
    """Arguments of a call's backward, beside those of the call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("colptr", "target", "edge", "order", "before")),
        ("d_out", TokenView),
        ("d_lse", ctypes.c_void_p),
        *((name, TokenView) for name in ("d_query", "d_key", "d_value")),
        ("d_scale", ctypes.c_void_p),
        ("d_bias", ctypes.c_void_p),
        ("d_bias_batch", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("lse", "delta")),
    )


CALL, GRADIENTS = packer(RowsCall), packer(RowsGradients)
_LIBRARY = library.library()


class Edges:
    """The edges of a graph, sorted by target and, when asked for, by source.

    All lists have the integer dtype of the given ones, int32 or int64.
    """

    def __init__(self, rowptr: Tensor, source: Tensor, num_sources: int) -> None:
        self.rowptr, self.source, self.num_sources = rowptr, source, num_sources
        self.was_read = False  # whether a forward pass has read them

    @property
    def is_narrow(self) -> bool:
        """Whether lists have the dtype int32, which takes half the memory of int64."""
        return self.source.dtype == torch.int32

    @cached_property
    def by_source(self) -> tuple[Tensor, Tensor, Tensor]:
        """The edges by source: where every source begins [M + 1], then targets and indices [E]."""
        return edges_by_source(self.rowptr, self.source, self.num_sources)

    @cached_property
    def visits(self) -> Visits:
        """An order in which rows that read the same tokens follow each other.

        These tokens are then still in the cache of a core.
        """
        ends = self.rowptr, self.by_source[0]
        orders = tuple(torch.empty_like(x[1:]) for x in ends)
        found = torch.zeros(2, dtype=torch.int64, device="cpu")
        assert _LIBRARY is not None
        sizes = (ctypes.c_int64(n) for n in (len(self.rowptr) - 1, self.num_sources))
        tensors = self.rowptr, self.source, *self.by_source[:2], *orders, found
        addresses = (ctypes.c_void_p(x.data_ptr()) for x in tensors)
        is_narrow = ctypes.c_int32(self.is_narrow)
        library.check(_LIBRARY.graphattn_order_of_visits(*sizes, *addresses, is_narrow))
        is_better, is_scattered = map(bool, found.tolist())
        if not is_better:
            return Visits(None, is_scattered)
        before = (
            torch.cat([x[:1], x.diff()[order].cumsum(0, dtype=x.dtype)])
            for x, order in zip(ends, orders, strict=True)
        )
        of_targets, of_sources = zip(orders, before, strict=True)
        return Visits((of_targets, of_sources), False)


def edges_of(graph: TokenGraph) -> Edges:
    """The edges of a graph, cached as long as its list of edges lives."""
    return cached_by_edges(graph, _edges)


def _edges(graph: TokenGraph, _: Tensor) -> Edges:
    rowptr, source = graph.compact_csr()
    if rowptr.dtype != source.dtype:
        rowptr, source = rowptr.long(), source.long()
    return Edges(rowptr.contiguous(), source.contiguous(), graph.num_sources)


def native_rows(graph: TokenGraph, options: PlanOptions, index: Tensor | None) -> Plan:
    """A plan of rows for the planner of `structured`."""
    return NativeRowPlan(edges_of(graph), gathered_rows(graph, options, index))


@dataclass
class NativeRowPlan(Plan):
    """Attention over the edges of every target; see :class:`~..structured.recompute.Plan`.

    `slow` computes the same in operations that can be differentiated again.
    """

    edges: Edges
    slow: RowPlan

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the log-sums again."""
        query, value = inputs.query, inputs.value
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1])
        _Call(self, inputs).run(out, lse, None)
        return out, lse, lse

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; the logits of every row are computed again."""
        return self._gradients(inputs, d_out, d_lse, None)

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        """Gradients from outputs and log-sums over more edges than the plan has.

        The result is None with top_k, with dropout, and for numbers that this is not exact for.
        """
        options = self.slow.options
        if options.top_k is not None or options.drops:
            return None
        sums = lse.masked_fill(lse == -torch.inf, 0)
        if not are_moderate((*inputs[:4], out, d_out, d_lse), (sums,)):
            return None
        delta = (out * d_out).sum(-1) - d_lse
        return self._gradients(inputs, d_out, d_lse, (lse.contiguous(), delta.contiguous()))

    def _gradients(
        self,
        inputs: Inputs,
        d_out: Tensor,
        d_lse: Tensor | None,
        whole: tuple[Tensor, Tensor] | None,
    ) -> Gradients:
        """Gradients of the five inputs; `whole`: see `lse` and `delta` in `rows.h`."""
        query, key, value, scale, bias, _ = inputs
        whole_lse, delta = (None, None) if whole is None else whole
        call = _Call(self, inputs, backward=True)
        d_query, d_key, d_value = (x.new_empty(x.shape) for x in (query, key, value))
        d_scale = scale.new_zeros(scale.shape, dtype=torch.float64)
        d_bias = None
        if bias is not None:
            shape = (len(self.edges.source), bias.shape[-1])
            d_bias = bias.new_zeros(shape if bias.dim() == 2 else (len(bias), *shape))
        d_out = featurewise(d_out)
        d_lse = None if d_lse is None else d_lse.contiguous()
        by_source = self.edges.by_source
        wanted = GRADIENTS.pack(
            *(x.data_ptr() for x in by_source), *call.order_of_sources,
            *view(d_out), address(d_lse), *view(d_query), *view(d_key), *view(d_value),
            d_scale.data_ptr(), address(d_bias), _per_sample(d_bias),
            address(whole_lse), address(delta),
        )  # fmt: skip
        call.run(None, None, wanted)
        if d_bias is not None and self.slow.index is not None:
            assert bias is not None
            d_bias = torch.zeros_like(bias).index_add_(0, self.slow.index, d_bias)
        return d_query, d_key, d_value, d_scale.to(scale.dtype), d_bias

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in operations that can be differentiated any number of times."""
        return self.slow.by_autograd(inputs)


class _Call:
    """The arguments of a call, and the tensors that must live as long as it does."""

    def __init__(self, plan: NativeRowPlan, inputs: Inputs, *, backward: bool = False) -> None:
        query, key, value, scale, bias, masks = inputs
        options, edges = plan.slow.options, plan.edges
        query, key, value = (featurewise(x) for x in (query, key, value))
        scale = scale.contiguous()
        bias = None if bias is None else bias.contiguous()
        valid = tuple(None if x is None else x.contiguous() for x in masks[:2])
        # To compute the order takes as long as it saves in one forward pass: not for the first one.
        is_worth = _is_large(key, value, edges) and (backward or edges.was_read)
        orders, is_scattered = edges.visits if is_worth else (None, False)
        edges.was_read = True
        of_targets, self.order_of_sources = (
            (0, 0) if orders is None else tuple(x.data_ptr() for x in orders[side])
            for side in (0, 1)
        )
        index = plan.slow.index
        index = None if index is None else index.to(edges.source.dtype).contiguous()
        dropout = masks.dropout
        hashes: tuple[Tensor, ...] = ()
        of_dropout: tuple[float, int, int, int] = (0.0, 0, 0, 0)
        if dropout is not None:
            hashes = rows, columns = dropout.rows.contiguous(), dropout.columns.contiguous()
            least = min(int(dropout.p * HASHES), HASHES - 1) - (HASHES >> 1)
            of_dropout = dropout.p, rows.data_ptr(), columns.data_ptr(), least
        self.alive = query, key, value, scale, bias, valid, hashes, index
        self.is_double = query.dtype == torch.float64
        B, N, H, D = query.shape
        _, M, kv_heads, value_width = value.shape
        self.arguments = (
            B, N, M, H, kv_heads, D, value_width, H,
            _heads_at_once(key, value) if is_scattered else 0, edges.is_narrow,
            edges.rowptr.data_ptr(), edges.source.data_ptr(), *of_targets,
            *view(query), *view(key), *view(value),
            options.score == "rbf", scale.data_ptr(), options.top_k or 0, options.softcap or 0.0,
            address(bias), _per_sample(bias), address(index), *map(address, valid), *of_dropout,
        )  # fmt: skip

    def run(self, out: Tensor | None, lse: Tensor | None, gradients: bytes | None) -> None:
        """Run the forward pass, or with `gradients` (packed addresses of them) the backward."""
        call = CALL.pack(*self.arguments, *view(out), address(lse), torch.get_num_threads())
        assert _LIBRARY is not None
        if status := _LIBRARY.graphattn_attention_rows(call, gradients, self.is_double):
            library.check(status)


def _bytes_of_head(key: Tensor, value: Tensor) -> int:
    """The bytes of the keys and values of a sample and head."""
    return key.shape[1] * (key.shape[3] + value.shape[3]) * key.element_size()


def _heads_at_once(key: Tensor, value: Tensor) -> int:
    """How many key heads of scattered tokens are read together; 0 for all.

    Fewer heads stay in the cache, where later rows find them.
    """
    of_head, heads = _bytes_of_head(key, value), key.shape[2]
    if heads * of_head <= 2 * SHARED_CACHE:
        return 0
    piece = max(key.shape[3], 1) * key.element_size()
    return max(SHARED_CACHE // max(of_head, 1), -(-PIECE // piece))


def _is_large(key: Tensor, value: Tensor, edges: Edges) -> bool:
    """Whether the keys and values of a sample do not fit into the cache, and rows are short."""
    nbytes = key.shape[2] * _bytes_of_head(key, value)
    return nbytes > CACHE and len(edges.source) <= LONG_ROWS * len(edges.rowptr)


def _per_sample(bias: Tensor | None) -> int:
    """How far the biases of two samples are apart in memory; 0 if all samples share one."""
    return 0 if bias is None or bias.dim() == 2 or len(bias) == 1 else bias.stride(0)
