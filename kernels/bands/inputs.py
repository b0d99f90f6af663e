"""Inputs of the band kernels, checked and laid out once for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from graphattn.kernels.bands.schedule import BandSchedule, Side
from graphattn.kernels.shared.layout import as_bytes, side_by_side
from graphattn.kernels.shared.precision import product_precision

# With so many tiles of targets looking at every source, half squares are better computed once.
SEEN_OFTEN = 8


@dataclass
class BandInputs:
    """Attention over bands: tensors, bands and options.

    Args:
        query: [B, N, H, D], float32, float16 or bfloat16.
        key: [B, M, Hk, D]; Hk divides H.
        value: [B, M, Hk, Dv].
        scale: [H], float32.
        bands: over N targets and M sources.
        rbf: logits -scale ||q - k||^2 / 2 instead of scale q . k.
        table: [offsets, H], float32, added to the logits: row ``source - target + bands.origin``.
        valid_target, valid_source: bool [B, N] and [B, M]; None: all are.
        kept: bits of the pairs that count, from :func:`graphattn.kernels.bands.top_k.select`; None:
            all do.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    bands: BandSchedule
    rbf: bool
    table: Tensor | None = None
    valid_target: Tensor | None = None
    valid_source: Tensor | None = None
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        self.query, self.key, self.value = map(side_by_side, (self.query, self.key, self.value))
        self.scale = self.scale.to(torch.float32).contiguous()
        if self.table is not None:
            self.table = self.table.to(torch.float32).contiguous()
        one_mask = self.valid_target is self.valid_source
        self.valid_target, self.valid_source = map(as_bytes, (self.valid_target, self.valid_source))
        if one_mask:
            self.valid_source = self.valid_target

    @property
    def width(self) -> int:
        """The wider of the features of keys and values."""
        return max(self.query.shape[-1], self.value.shape[-1])

    @property
    def is_centered(self) -> bool:
        """Whether distances are measured around a centre.

        In float32 q . k - ||k||^2 / 2 loses digits where tokens share a large offset. Products of
        half-precision numbers are exact in float32, whose rounding is far below their own.
        """
        return self.rbf and self.query.dtype == torch.float32

    def stores_half_squares(self, rows: int) -> bool:
        """Whether ||k||^2 / 2 is computed beforehand, not by every tile that looks at a key."""
        return self.rbf and not self.is_centered and self.bands.window >= SEEN_OFTEN * rows

    def parts(self, rows: int, columns: int) -> int:
        """Number of parts: 3 where whole tiles may be seen by all rows, and need no mask; otherwise
        1.
        """
        plain = self.valid_source is None and self.valid_target is None
        plain = plain and not self.bands.has_holes and self.kept is None
        return 3 if plain and self.bands.window >= rows + columns - 1 else 1

    def centers(self, side: Side, tiles: Tensor, rows: int) -> Tensor:
        """Centers that the keys of every tile are measured from, [B, tiles, Hk, D]; any if not
        centred.

        A token of the tile's own slice that lies in no row's future; where that one is invalid or
        not finite, the last good one of its sequence before it, or else the next.
        """
        B, M, Hk, D = self.key.shape
        if not self.is_centered:
            return self.scale
        if 0 in (B, M, len(tiles)):
            return self.key.new_zeros(B, len(tiles), Hk, D)
        good = self.key.sum((-1, -2)).isfinite()
        if self.valid_source is not None:
            good &= self.valid_source != 0
        place = torch.arange(M, device=good.device).expand(B, M)
        near, starts = self.bands.nearby_sources(side, rows)
        latest = torch.where(good, place, -1).cummax(1).values[:, near]
        next_good = torch.where(good, place, M - 1).flip(1).cummin(1).values.flip(1)[:, near]
        place = torch.where(latest < starts, next_good, latest)
        found = self.key.gather(1, place[..., None, None].expand(-1, -1, Hk, D))
        return torch.where(found.isfinite(), found, 0.0)

    @cached_property
    def _common(self) -> dict[str, Any]:
        query, key, value = self.query, self.key, self.value
        D, DV, Hk = query.shape[-1], value.shape[-1], key.shape[-2]
        return {
            "p_query": query,
            "p_key": key,
            "p_value": value,
            "p_scale": self.scale,
            "p_table": self.scale if self.table is None else self.table,
            "p_valid_target": self.scale if self.valid_target is None else self.valid_target,
            "p_valid_source": self.scale if self.valid_source is None else self.valid_source,
            "p_sequences": self.bands.sequences,
            "N": query.shape[1],
            "M": key.shape[1],
            "H": query.shape[2],
            "origin": self.bands.origin or 0,
            "stride_qn": query.stride(1),
            "stride_qh": query.stride(2),
            "stride_kn": key.stride(1),
            "stride_kh": key.stride(2),
            "stride_vn": value.stride(1),
            "stride_vh": value.stride(2),
            "REPEATS": query.shape[2] // Hk,
            "D": D,
            "DV": DV,
            "BLOCK_D": max(triton.next_power_of_2(D), 16),
            "BLOCK_DV": max(triton.next_power_of_2(DV), 16),
            "RBF": self.rbf,
            "CENTERED": self.is_centered,
            "TABLE": self.table is not None,
            "VALID": self.valid_source is not None,
            "VALID_TARGET": self.valid_target is not None,
            "HOLES": self.bands.has_holes,
            "STRIDED": self.bands.is_strided,
            "PRECISION": product_precision(query.dtype),
        }

    def common(self) -> dict[str, Any]:
        """The arguments that all band kernels take, whether they look at them or not."""
        kept = self.kept
        return self._common | {
            "p_kept": self.scale if kept is None else kept,
            "num_words": 0 if kept is None else kept.shape[-1],
            "KEPT": kept is not None,
        }
