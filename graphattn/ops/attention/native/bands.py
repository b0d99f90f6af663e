"""Attention over bands by C++ code: windows, blocks, and batches of them.

The code is `kernels/cpu/bands.cpp`. It reads a table of sequences, which
`graphattn/graphs/structures/bands.py` makes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.graphs.structures.bands import Bands, bands_of
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.grid_blocks import GridBlocks, block_order
from graphattn.graphs.structures.structure import Blocks, GraphStructure
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import TokenView, address, featurewise, packer, view
from graphattn.ops.attention.calls import Inputs
from graphattn.ops.attention.merge import SOUND, are_moderate
from graphattn.ops.attention.structured.chunked import TilePlan
from graphattn.ops.attention.structured.plans import ReorderedPlan
from graphattn.ops.attention.structured.recompute import Gradients, Plan, PlanOptions

STEEP = -32.0  # log-affinities of RBF below which differences are exact, as in `band_forward.h`


class BandsCall(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/bands.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "targets", "sources", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("width", "value_width", "count")),
        ("sequences", ctypes.c_void_p),
        *((name, TokenView) for name in ("query", "key", "value")),
        ("is_rbf", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("top_k", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("table", ctypes.c_void_p),
        ("offsets", ctypes.c_int64),
        ("origin", ctypes.c_int64),
        ("valid_targets", ctypes.c_void_p),
        ("valid_sources", ctypes.c_void_p),
        ("out", TokenView),
        ("lse", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("keeps_outputs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class BandsGradients(ctypes.Structure):
    """Arguments of a call's backward, beside those of the call."""

    _fields_ = (
        ("d_out", TokenView),
        ("d_lse", ctypes.c_void_p),
        *((name, TokenView) for name in ("d_query", "d_key", "d_value")),
        ("d_scale", ctypes.c_void_p),
        ("d_table", ctypes.c_void_p),
    )


CALL, GRADIENTS = packer(BandsCall), packer(BandsGradients)
_LIBRARY = library.library()


def native_tiles(structure: GraphStructure, options: PlanOptions) -> Plan:
    """A plan of bands for the planner of `structured`; that of torch where C++ code has none."""
    slow = TilePlan(options, structure)
    if options.bias == "pairs" or options.drops:
        return slow
    if isinstance(structure, GridBlocks):
        if options.bias is not None:  # its table is over two axes, which bands cannot read
            return slow
        # Tokens are reordered block by block, so that every block is a sequence.
        blocks, tokens, places = block_order(structure, torch.device("cpu"))
        runs = tuple(Blocks(b.count * b.height * b.width, b.height * b.width) for b in blocks)
        return ReorderedPlan(tokens, places, native_tiles(Parts(runs), options))
    bands = bands_of(structure)
    if bands is None or (options.bias is not None and bands.origin is None):
        return slow
    return NativeBandPlan(bands, slow)


@dataclass
class NativeBandPlan(Plan):
    """Attention over a table of sequences; see :class:`~..structured.recompute.Plan`.

    `slow` computes the same in operations that can be differentiated again. A bias is a table of
    offsets.

    Queries, keys and values may have half precision. A few tokens at a time are converted to
    float32, and outputs are rounded once. Gradients need outputs that are not rounded, so with
    `keeps_outputs` (their width) these are saved, too.
    """

    bands: Bands
    slow: TilePlan
    keeps_outputs: int = 0

    @property
    def saved_per_head(self) -> int:
        """2: the largest logit and 1 / sum. With top_k 4: also the least selected and its place."""
        return (2 if self.slow.options.top_k is None else 4) + self.keeps_outputs

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the numbers from which the backward pass computes the weights."""
        query, value, scale = inputs.query, inputs.value, inputs.scale
        B, N, H, _ = query.shape
        out = query.new_empty((B, N, H, value.shape[-1]))
        lse = scale.new_empty((B, N, H))
        saved = scale.new_empty((B, N, H * self.saved_per_head))
        _run(self, inputs, out, lse, saved, None)
        return out, lse, saved

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; the logits of every tile are computed again."""
        query, key, value, scale, table, _ = inputs
        is_covered = self.bands.covers(query.shape[1], key.shape[1])
        new = scale.new_empty if is_covered else scale.new_zeros
        d_query = new(query.shape, dtype=query.dtype)
        # Keys and values collect sums over many targets, so their gradients are not half precision.
        d_key, d_value = new(key.shape), new(value.shape)
        d_scale = scale.new_zeros(scale.shape, dtype=torch.float64)
        d_table = None if table is None else table.new_zeros(table.shape, dtype=torch.float64)
        d_out = featurewise(d_out)
        d_lse = None if d_lse is None else d_lse.contiguous()
        wanted = GRADIENTS.pack(
            *view(d_out), address(d_lse),
            *view(d_query), *view(d_key), *view(d_value),
            d_scale.data_ptr(), address(d_table),
        )  # fmt: skip
        _run(self, inputs, featurewise(out), None, saved.contiguous(), wanted)
        of_table = None if d_table is None or table is None else d_table.to(table.dtype)
        d_key, d_value = d_key.to(key.dtype), d_value.to(value.dtype)
        return d_query, d_key, d_value, d_scale.to(scale.dtype), of_table

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        """Gradients from outputs and log-sums over more edges than the plan has.

        The result is None for numbers that the forward pass leaves to slower code: then the
        backward pass needs the marks that the forward pass makes.
        """
        options, bias = self.slow.options, inputs.bias
        empty = lse == -torch.inf
        if options.top_k is not None or self.keeps_outputs:
            return None
        may_be_steep = options.score == "rbf" and lse.dtype == torch.float32
        if may_be_steep and (bias is not None or bool(((lse < STEEP) & ~empty).any())):
            return None
        sums = lse.masked_fill(empty, 0)
        if not are_moderate((*inputs[:4], out, d_out, d_lse), (sums,)):
            return None
        if bias is not None and bias.numel() and not bool(bias.detach().amax() <= SOUND):
            return None
        # The largest logit and 1 / sum: exp(logit - lse) * 1. Without edges: see `bands.h`.
        saved = torch.stack([lse.masked_fill(empty, torch.inf), (~empty).to(lse.dtype)], dim=-1)
        return self.backward(inputs, out, saved.flatten(-2), d_out, d_lse)

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in operations that can be differentiated any number of times."""
        out, lse = self.slow.by_autograd(in_dtype_of_scale(inputs))
        return out.to(inputs[0].dtype), lse


def in_dtype_of_scale(inputs: Inputs) -> Inputs:
    """Inputs with half precision converted to float32, the dtype of scale and bias."""
    query, key, value = (x.to(inputs.scale.dtype) for x in inputs[:3])
    return Inputs(query, key, value, *inputs[3:])


def _run(
    plan: NativeBandPlan,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor | None,
    saved: Tensor,
    gradients: bytes | None,
) -> None:
    """Run the forward pass, or with `gradients` (packed addresses of them) the backward pass."""
    query, key, value, scale, table, (targets, sources, _) = inputs
    query, key, value = featurewise(query), featurewise(key), featurewise(value)
    options, bands = plan.slow.options, plan.bands
    scale = scale.contiguous()
    table = None if table is None else table.contiguous()
    targets = None if targets is None else targets.contiguous()
    sources = None if sources is None else sources.contiguous()
    B, N, H, D = query.shape
    _, M, kv_heads, value_width = value.shape
    call = CALL.pack(
        B, N, M, H, kv_heads, D, value_width, len(bands.sequences), bands.sequences.data_ptr(),
        *view(query), *view(key), *view(value),
        options.score == "rbf", scale.data_ptr(), options.top_k or 0, options.softcap or 0.0,
        address(table), 0 if table is None else len(table), bands.origin or 0,
        address(targets), address(sources),
        *view(out), address(lse), saved.data_ptr(), plan.keeps_outputs > 0,
        torch.get_num_threads(),
    )  # fmt: skip
    assert _LIBRARY is not None
    is_double = scale.dtype == torch.float64
    if status := _LIBRARY.graphattn_attention_bands(call, gradients, is_double):
        library.check(status)
