"""Attention by Triton kernels: which calls they can run, and the tables that they read of a graph.

Band kernels process windows, blocks, causal and complete graphs, tile by tile. Edge kernels process
all other graphs, edge by edge. If most edges of a graph are bands (a window with global tokens),
band kernels process these, and edge kernels continue with the other edges of every row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.bands import (
    band_schedule_of,
    bands_and_others,
    bands_of,
    has_bands,
)
from graphattn.graphs.structures.structure import GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.edges.schedule import EdgeSchedule
from graphattn.kernels.shared.launch import why_not_heads
from graphattn.kernels.shared.stored import copied, stores_results
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.merge import are_moderate
from graphattn.ops.edge_cache import cached_by_edges
from graphattn.ops.inputs import flat_masks

if TYPE_CHECKING:
    from graphattn.kernels.bands.inputs import BandInputs
    from graphattn.kernels.edges.inputs import EdgeInputs

LOG2E = math.log2(math.e)
Gradients = tuple[Tensor | None, ...]


def why_not(call: AttentionCall) -> str | None:
    """The reason why no kernel can run a call; None if one can."""
    if call.softcap is not None:
        return "its kernels have no softcap"
    if call.dropout > 0:
        return "its kernels have no dropout"
    return why_not_heads(call.query, call.query.shape[-1], call.value.shape[-1])


def gradients_of_part(
    call: AttentionCall, whole: tuple[Tensor, Tensor], d_whole: tuple[Tensor, Tensor]
) -> Gradients | None:
    """Gradients of the inputs, from results over more sources than those of the graph.

    Args:
        call: attention over the edges of a part.
        whole: output and log-sums over all sources, in float32.
        d_whole: their gradients.

    Returns:
        None for numbers that this form of the gradient is not exact for. To read them waits for
        the device once, which takes less time than the forward pass of the part. Gradients of
        scale and bias are None if they need none.
    """
    from graphattn.kernels.shared.layout import side_by_side

    query, key, value, scale, bias = call.query, call.key, call.value, call.scale, call.bias
    (out, lse), (d_out, d_lse) = whole, d_whole
    with torch.cuda.device_of(query):  # as in `on_its_device`
        kernels = KernelCall(call, shared=False)
        saved = kernels.saved_from(lse)
        sums = lse.masked_fill(lse == -torch.inf, 0), saved.masked_fill(saved == torch.inf, 0)
        if not are_moderate((query, key, value, out, d_out, d_lse), sums):
            return None
        gradients = kernels.backward(
            side_by_side(kernels.flat(out)),
            lse.transpose(-1, -2).contiguous(),
            saved,
            d_out.to(query.dtype),
            d_lse.transpose(-1, -2),
            needs_scale=scale.requires_grad,
            needs_bias=bias is not None and bias.requires_grad,
        )
    return tuple(
        None if x is None or d is None else d.reshape(x.shape)
        for x, d in zip((query, key, value, scale, bias), gradients, strict=True)
    )


class KernelCall:
    """One call of the kernels: tensors, tables, options.

    `shared` says whether query, key and value are one tensor.

    There are three cases:

    - band kernels alone: windows, blocks, causal and complete graphs, also with top_k and with
      biases per offset;
    - band and edge kernels: unions that contain a band, without top_k and bias;
    - edge kernels alone: all other calls.
    """

    def __init__(self, call: AttentionCall, shared: bool) -> None:
        query, key, value, bias, top_k = call.query, call.key, call.value, call.bias, call.top_k
        self.batch, self.shared, per_offset = query.shape[:-3], shared, call.per_offset
        self.scale, self.is_rbf = call.scale, call.score.kernel == "rbf"
        self.valid = flat_masks(call.valid, self.batch)
        query = self.flat(query)
        self.tensors = (query,) * 3 if shared else (query, self.flat(key), self.flat(value))
        self.bands: BandInputs | None = None
        self.edges: EdgeInputs | None = None
        self.offset_rows: Tensor | None = None
        self.is_gaussian = self.has_five_products = False
        self.num_offsets = 0 if bias is None or not per_offset else len(bias)
        if bias is not None and bias.dim() > 2:
            bias = bias.reshape(self.batch.numel(), *bias.shape[-2:])
        structure, device = call.graph.structure, query.device
        if structure is not None and _reads_bands(structure, bias, per_offset):
            self.bands = self._over_bands(band_schedule_of(structure, device), bias)
            if top_k is None or top_k >= self.bands.bands.window:
                self._look_for_one_tensor(structure)
            else:
                from graphattn.kernels.bands.top_k import select as select_within_bands

                self.bands.kept = select_within_bands(self.bands, top_k)
            return
        beside = None
        if structure is not None and bias is None and top_k is None:
            beside = _tables_of_bands_and_others(structure, device)
        if beside is not None:
            self.bands, self.edges = self._over_bands(beside[0]), self._over_edges(beside[1])
            return
        if per_offset:
            assert structure is not None  # biases per offset need offsets
            assert bias is not None
            self.offset_rows = _offset_rows(structure, device)
            bias = bias[self.offset_rows]
        self.edges = self._over_edges(cached_by_edges(call.graph, _tables_of_list), bias)
        if top_k is not None:
            from graphattn.kernels.edges.top_k import select

            self.edges.kept = select(self.edges, top_k)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, N, H, Dv], log-sums [B, H, N], and those to save for the backward pass."""
        from graphattn.kernels.bands.forward import forward as over_bands
        from graphattn.kernels.bands.one_tensor import shared_forward
        from graphattn.kernels.edges.forward import forward as over_edges

        if self.edges is None:
            assert self.bands is not None
            attend = shared_forward if self.is_gaussian else over_bands
            return attend(self.bands)
        if self.bands is None:
            return over_edges(self.edges)
        out, lse, saved = over_bands(self.bands, torch.float32)
        of_bands = lse
        out, lse, _ = over_edges(self.edges, (out, lse))
        # The log-sums that band kernels saved, changed to those over all edges. A row without edges
        # in a band stays empty there.
        return out, lse, torch.where(lse == -torch.inf, saved, saved + (lse - of_bands) * LOG2E)

    def backward(
        self,
        out: Tensor,
        lse: Tensor,
        saved: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        *,
        needs_scale: bool,
        needs_bias: bool,
    ) -> Gradients:
        """Gradients of the inputs; if query, key and value are one tensor, the first is its own."""
        from graphattn.kernels.shared.exponentials import saved_log_sums

        B = self.batch.numel()
        lse, saved, d_lse = (t.reshape(B, *t.shape[-2:]) for t in (lse, saved, d_lse))
        rows = _Rows(self.flat(out), lse, saved, self.flat(d_out), d_lse.transpose(1, 2))
        needs_scale = needs_scale or self.shared
        gradients: Gradients
        if self.edges is None:
            gradients = self._through_bands(rows, needs_scale, needs_bias)
        elif self.bands is None:
            gradients = self._through_edges(rows, needs_scale, needs_bias)
        else:
            of_bands = self._through_bands(rows, needs_scale, False)
            rows = rows._replace(saved=saved_log_sums(lse))
            gradients = (*map(_sum, of_bands, self._through_edges(rows, needs_scale, False)),)
        if self.shared and gradients[1] is not None:
            query, key, value, *others = gradients
            gradients = _sum(_sum(query, key), value), None, None, *others
        return gradients

    def saved_from(self, lse: Tensor) -> Tensor:
        """The log-sums [B, H, N] that :meth:`backward` takes as saved, from natural ones [*, N, H].

        These may be those over more edges than the call has.
        """
        from graphattn.kernels.shared.exponentials import saved_log_sums

        lse = lse.reshape(self.batch.numel(), *lse.shape[-2:]).transpose(1, 2).contiguous()
        return saved_log_sums(lse) if self.bands is None else self.bands.saved_from(lse)

    def _through_bands(self, rows: _Rows, needs_scale: bool, needs_bias: bool) -> Gradients:
        from graphattn.kernels.bands.backward import backward
        from graphattn.kernels.bands.bias_backward import d_table
        from graphattn.kernels.bands.one_tensor import shared_backward

        x, (out, lse, saved, d_out, d_lse) = self.bands, rows
        assert x is not None
        if self.has_five_products:
            d_x, d_scale = shared_backward(x, out, lse, d_out, d_lse)
            return d_x, None, None, d_scale, None
        *gradients, delta = backward(x, out, saved, d_out, d_lse, scale_gradient=needs_scale)
        return *gradients, d_table(x, saved, delta, d_out) if needs_bias else None

    def _through_edges(self, rows: _Rows, needs_scale: bool, needs_bias: bool) -> Gradients:
        from graphattn.kernels.edges.backward import backward

        assert self.edges is not None
        needed = {"scale_gradient": needs_scale, "bias_gradient": needs_bias}
        out, _, saved, d_out, d_lse = rows
        *gradients, d_bias = backward(self.edges, out, saved, d_out, d_lse, **needed)
        if d_bias is not None and self.offset_rows is not None:
            table = d_bias.new_zeros(self.num_offsets, d_bias.shape[1])
            # On a GPU, this sorts first; index_add_ would add in any order.
            d_bias = table.index_put_((self.offset_rows,), d_bias, accumulate=True)
        return *gradients, d_bias

    def _look_for_one_tensor(self, structure: GraphStructure) -> None:
        """Find out whether faster kernels for one tensor can run, forward and backward.

        Their weights need no running maximum, and their gradients five products in place of seven.
        """
        from graphattn.kernels.bands.one_tensor import has_shared_backward, has_shared_forward

        bands = bands_of(structure)
        assert bands is not None
        assert self.bands is not None
        if self.shared and has_shared_forward(self.bands, bands.has_self_loops):
            self.is_gaussian = True
            self.has_five_products = has_shared_backward(self.bands, bands.is_symmetric)

    def _over_bands(self, tables: BandSchedule, table: Tensor | None = None) -> BandInputs:
        from graphattn.kernels.bands.inputs import BandInputs

        return BandInputs(*self.tensors, self.scale, tables, self.is_rbf, table, *self.valid)

    def _over_edges(self, tables: EdgeSchedule, bias: Tensor | None = None) -> EdgeInputs:
        from graphattn.kernels.edges.inputs import EdgeInputs

        return EdgeInputs(*self.tensors, self.scale, tables, self.is_rbf, bias, *self.valid)

    def flat(self, x: Tensor) -> Tensor:
        """x [*, tokens, heads, features] with one batch dimension."""
        return x.reshape(self.batch.numel(), *x.shape[-3:])


class _Rows(NamedTuple):
    """Results of a call and their gradients, with one batch dimension."""

    out: Tensor  # [B, N, H, Dv]
    lse: Tensor  # [B, H, N]
    saved: Tensor  # [B, H, N]
    d_out: Tensor
    d_lse: Tensor  # [B, N, H]


def _reads_bands(structure: GraphStructure, bias: Tensor | None, per_offset: bool) -> bool:
    """Whether band kernels can run the whole call, with its bias if that has one origin."""
    if not has_bands(structure) or (bias is not None and not per_offset):
        return False
    bands = bands_of(structure)
    return bands is not None and (bias is None or bands.origin is not None)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


# Tables are cached. Those of structures are made on the host and copied to the device once.


@stores_results(64)
def _tables_of_bands_and_others(
    structure: GraphStructure, device: torch.device
) -> tuple[BandSchedule, EdgeSchedule] | None:
    parts = bands_and_others(structure)
    if parts is None:
        return None
    bands, others = parts
    sizes = structure.num_targets, structure.num_sources
    return band_schedule_of(bands, device), EdgeSchedule(*sizes, edge_index=copied(others, device))


def _tables_of_list(graph: TokenGraph, listed: Tensor) -> EdgeSchedule:
    kind = {"neighbors" if graph.is_table else "edge_index": listed.long()}
    return EdgeSchedule(graph.num_targets, graph.num_sources, **kind)


@stores_results(64)
def _offset_rows(structure: GraphStructure, device: torch.device) -> Tensor:
    """The row of a table of offsets that every edge reads, [E]."""
    source, target = structure.edges(device)
    return structure.offset_index(target, source)
