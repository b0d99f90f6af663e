"""Attention over tiles: slices of neighbouring tokens, products, and no edge ever listed.

Fused attention where it can be had. The logits of a few tiles at a time otherwise: for top-k, for
tables of offsets, on other devices, and for the rows that see a NaN or an infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.ops.attention.structured.group import EXTREME, Group
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    all_sound,
    sound,
    zeros_like,
)
from graphattn.ops.attention.structured.tiles import Tiles
from graphattn.ops.attention.structured.workspace import Workspace
from graphattn.ops.inputs import ValidPair

OPERANDS = 1 << 20  # numbers of a group's keys where no logits are stored: four megabytes
LOGITS = 1 << 20  # numbers of a group's logits where they are: the same
ROWS = 128  # targets of a tile whose logits are stored


@dataclass
class TilePlan:
    """Attention over one graph's tiles; see :class:`~.recompute.Plan`. `bias`: table of offsets."""

    tiles: tuple[Tiles, ...]
    score: str
    top_k: int | None
    valid: ValidPair  # [B, N] and [B, M], or None
    finite: bool | None = None  # whether all inputs of the forward were

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the log-sums of the operands, which the backward needs."""
        query, key, value, _, _ = inputs
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse, raw = query.new_empty(query.shape[:-1]), query.new_empty(query.shape[:-1])
        if self._has_empty_tiles:  # nobody else writes their rows
            out.zero_()
            lse.fill_(-torch.inf)
        self.finite = all_sound(query, key, value)
        for group, rows, fused in self._passes(inputs, self.finite):
            group.put((out, lse, raw), group.fused() if fused else group.explicit(), rows)
        return out, lse, raw

    def backward(
        self, inputs: Inputs, out: Tensor, raw: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; every tile is computed again."""
        sums = zeros_like(inputs, covered=not self._has_empty_tiles)
        upstream = d_out.flatten(2), d_lse
        known = all_sound(*inputs[:3]) if self.finite is None else self.finite
        finite = known and all_sound(d_out, d_lse)
        for group, rows, fused in self._passes(inputs, finite, upstream):
            if fused:
                gradients = group.fused_gradients(out, raw, d_out, d_lse, rows)
            else:
                gradients = group.explicit_gradients(d_out, d_lse, rows)
            group.add(sums, gradients, rows)
        return sums

    @property
    def _has_empty_tiles(self) -> bool:
        return any(tiles.columns == 0 for tiles in self.tiles)

    def plainly(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in plain autograd."""
        outs, sums, places = [], [], []
        for group in self._explicit_groups(inputs, all_sound(*inputs[:3])):
            out, lse, _ = group.explicit()
            outs.append(group.tokens(out))
            sums.append(group.tokens(lse[..., None])[..., 0])
            places.append(group.targets())
        back = torch.cat(places).argsort()
        return torch.cat(outs, dim=1)[:, back], torch.cat(sums, dim=1)[:, back]

    # Which way, and in which pieces.

    def _passes(
        self, inputs: Inputs, finite: bool, upstream: tuple[Tensor | None, ...] = ()
    ) -> Iterator[tuple[Group, Tensor | None, bool]]:
        """Groups, which of their rows to take from them (None: all), and whether fused.

        Every row is taken once. Those that see NaN or infinity, or get it from `upstream`
        [B, N, ...], go the explicit way, so the others can be fused with zeros in their place.
        """
        if not self._fusable(inputs):
            for group in self._explicit_groups(inputs, finite):
                yield from _with_care(group, group.careful_rows())
            return
        special = None if finite else self._special_rows(inputs, upstream)
        for group in self._fused_groups(inputs, finite):
            ordinary = None if special is None else ~group.rows_of(special)
            careful = group.careful_rows()
            if careful is None:
                yield group, ordinary, True
                continue
            if ordinary is not None:
                careful = careful & ordinary
            others = ~careful if ordinary is None else ~careful & ordinary
            if bool(others.any()):
                yield group, others, True
            if group.query.dtype != torch.float64:
                wide = group.carefully()
                extreme = wide.careful_rows(EXTREME)
                if extreme is None:
                    yield wide, careful, True
                    continue
                yield wide, careful & ~extreme, True
                careful = careful & extreme
            marked = torch.zeros(inputs[0].shape[:2], dtype=torch.bool, device=careful.device)
            group.mark(marked, careful)
            for small in self._explicit(group.tiles, group.inputs, True):
                yield small.by_differences(), small.rows_of(marked), False
        if special is not None:
            for group in self._explicit_groups(inputs, False):
                rows = group.rows_of(special)
                if bool(rows.any()):
                    yield group.by_differences(), rows, False

    def _fusable(self, inputs: Inputs) -> bool:
        query, _, value, _, table = inputs
        plain = self.top_k is None and table is None
        return plain and query.device.type == "cpu" and 0 not in (*query.shape, *value.shape)

    def _fused_groups(self, inputs: Inputs, finite: bool) -> Iterator[Group]:
        """Groups of what is finite, zeros in place of the rest."""
        query, key, value, scale, table = inputs
        if not finite:
            query, key, value = (x.masked_fill(~sound(x), 0) for x in (query, key, value))
        B, _, H, D = query.shape
        D = max(D, value.shape[-1])
        workspace = Workspace()
        for tiles in self.tiles:
            if tiles.columns:
                for few in tiles.groups(OPERANDS // (B * H * D * tiles.columns)):
                    yield Group(self, few, (query, key, value, scale, table), True, workspace)

    def _explicit_groups(self, inputs: Inputs, finite: bool) -> Iterator[Group]:
        for tiles in self.tiles:
            yield from self._explicit(tiles, inputs, finite)

    def _explicit(self, tiles: Tiles, inputs: Inputs, finite: bool) -> Iterator[Group]:
        """Groups that together are `tiles`, small enough to store their logits."""
        B, _, H, _ = inputs[0].shape
        row = max(B * H * tiles.columns, 1)
        if tiles.rows <= ROWS and row * tiles.rows <= LOGITS:
            smaller = tiles.groups(LOGITS // max(row * tiles.rows, 1))
        else:
            smaller = tiles.pieces(min(max(LOGITS // row, 1), ROWS))
        for few in smaller:
            yield Group(self, few, inputs, finite)

    def _special_rows(self, inputs: Inputs, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """Bool [B, N]: rows that see something that is not finite, or get it from upstream."""
        special = torch.zeros(inputs[0].shape[:2], dtype=torch.bool, device=inputs[0].device)
        for x in upstream:
            if x is not None:
                special |= ~sound(x).all(-1)
        for group in self._explicit_groups(inputs, False):
            group.mark(special, group.rows_that_see_bad())
        return special


def _with_care(group: Group, careful: Tensor | None) -> Iterator[tuple[Group, Tensor | None, bool]]:
    """A group with its logits stored, its careful rows in float64, extreme ones by differences."""
    yield group, None if careful is None else ~careful, False
    if careful is None:
        return
    wide = group.carefully()
    extreme = careful if wide.differences else wide.careful_rows(EXTREME)
    if extreme is not None:
        yield group.by_differences(), careful & extreme, False
        careful = careful & ~extreme
    yield wide, careful, False
