"""Calls whose sizes were seen before: their numbers are kept, and packed with new addresses.

All tensors are contiguous. Filling a structure of ctypes field by field takes as long as the
attention of a few tokens does.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.ops.attention.native.bands import BandsCall, BandsGradients, NativeBandPlan

KINDS = {ctypes.c_int64: "q", ctypes.c_void_p: "P", ctypes.c_double: "d"}


def packer(call: type[ctypes.Structure]) -> struct.Struct:
    """What packs the numbers of a structure, in the order of its fields."""
    return struct.Struct(_format(call))


def _format(call: type[ctypes.Structure]) -> str:
    found = ""
    for _, kind, *_ in call._fields_:
        found += _format(kind) if issubclass(kind, ctypes.Structure) else KINDS[kind]
    return found


BANDS, GRADIENTS = packer(BandsCall), packer(BandsGradients)


def steps_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """What a view of a contiguous tensor [B, N, H, D] says beside its address."""
    _, N, H, D = shape
    return N * H * D, H * D, D, 0


class KnownBands:
    """Attention over one table of sequences, for one set of sizes, options and a dtype.

    Args:
        plan: without masks or biases.
        query, key: shapes [B, N, H, D] and [B, M, Hk, D]; values have that of keys.
        out: the shape in which averages are given.
        dtype: float32 or float64, that of all tensors.
    """

    def __init__(
        self,
        plan: NativeBandPlan,
        query: tuple[int, ...],
        key: tuple[int, ...],
        out: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        (B, N, H, D), (_, M, kv_heads, _) = query, key
        options, bands = plan.slow.options, plan.bands
        assert options.valid == (None, None)
        self.out, self.is_double = out, dtype == torch.float64
        self.sequences = bands.sequences  # its address is kept
        sizes = B, N, M, H, kv_heads, D, D, len(bands.sequences), bands.sequences.data_ptr()
        self.sizes, self.of_query, self.of_key = sizes, steps_of(query), steps_of(key)
        self.heads, self.score, self.softcap = H, options.score == "rbf", options.softcap or 0.0
        self.top_k, self.origin = options.top_k or 0, bands.origin or 0
        self.kept = B * N * H * plan.saved_per_head
        self.saved = self.kept + B * N * H  # log-sums behind the others
        self.is_covered = bands.covers(N, M)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The averages, and what the backward wants to see again."""
        out, saved = query.new_empty(self.out), scale.new_empty(self.saved)
        self._run(query, key, value, scale, out, saved, None)
        return out, saved

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        out: Tensor,
        saved: Tensor,
        d_out: Tensor,
        needs_scale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of queries, keys, values and scales, of the shapes of these."""
        new = torch.empty_like if self.is_covered else torch.zeros_like
        d_query, d_key, d_value = new(query), new(key), new(value)
        if not d_out.is_contiguous() or d_out.is_neg():
            d_out = d_out.contiguous().resolve_neg()
        if needs_scale:
            d_scale = torch.zeros(self.heads, dtype=torch.float64, device=scale.device)
            address = d_scale.data_ptr()
        else:
            unread = (ctypes.c_double * self.heads)()
            address = ctypes.addressof(unread)
        wanted = GRADIENTS.pack(
            d_out.data_ptr(), *self.of_query, 0,
            d_query.data_ptr(), *self.of_query,
            d_key.data_ptr(), *self.of_key,
            d_value.data_ptr(), *self.of_key,
            address, 0,
        )  # fmt: skip
        self._run(query, key, value, scale, out, saved, wanted)
        return d_query, d_key, d_value, d_scale.to(scale.dtype) if needs_scale else None

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        out: Tensor,
        saved: Tensor,
        wanted: bytes | None,
    ) -> None:
        scale = scale.contiguous()
        kept = saved.data_ptr()
        call = BANDS.pack(
            *self.sizes,
            query.data_ptr(), *self.of_query,
            key.data_ptr(), *self.of_key,
            value.data_ptr(), *self.of_key,
            self.score, scale.data_ptr(), self.top_k, self.softcap,
            0, 0, self.origin, 0, 0,
            out.data_ptr(), *self.of_query,
            kept + self.kept * saved.element_size(), kept, False, torch.get_num_threads(),
        )  # fmt: skip
        found = library.library()
        assert found is not None
        status = found.graphattn_attention_bands(call, wanted, self.is_double)
        if status:
            library.check(status)
