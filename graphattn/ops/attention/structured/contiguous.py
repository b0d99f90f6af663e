"""Attention over tiles: slices of neighbouring tokens, products, and no edge ever listed.

Fused attention where it can be had. The logits of a few tiles at a time otherwise: for top-k, for
tables of offsets, on other devices, and for the rows that see a NaN or an infinity. These are taken
by themselves, and nothing that a row does not see decides how the row is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.ops.attention.structured.group import EXTREME, STEEP, Group
from graphattn.ops.attention.structured.modifiers import NONE, Modifiers
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    all_sound,
    cleaned,
    extent,
    laid_out,
    largest,
    silent,
    sound,
    sound_entries,
    zeros_like,
)
from graphattn.ops.attention.structured.tiles import Tiles
from graphattn.ops.attention.structured.workspace import Workspace
from graphattn.ops.inputs import ValidPair

OPERANDS = 1 << 20  # numbers of a group's keys where no logits are stored: four megabytes
LOGITS = 1 << 20  # numbers of a group's logits where they are: the same
ROWS = 128  # targets of a tile whose logits are stored

Pass = tuple[Group, Tensor | None, bool]  # a group, which of its rows, whether fused


@dataclass
class TilePlan:
    """Attention over one graph's tiles; see :class:`~.recompute.Plan`.

    `bias` is a table of offsets; over a complete graph, one tile, it may be that of every pair,
    [1 or B, N, M, H].
    """

    tiles: tuple[Tiles, ...]
    score: str
    top_k: int | None
    valid: ValidPair  # [B, N] and [B, M], or None
    modifiers: Modifiers = NONE
    finite: bool | None = None  # whether all inputs of the forward were
    tame: bool | None = None  # whether no product of queries and keys can be large

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the log-sums of the operands, which the backward needs."""
        inputs = _laid_out(inputs)
        query, _, value, _, _ = inputs
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse, raw = query.new_empty(query.shape[:-1]), query.new_empty(query.shape[:-1])
        if self._has_empty_tiles:  # nobody else writes their rows
            out.zero_()
            lse.fill_(-torch.inf)
        self._look_at(inputs)
        for group, rows, fused in self._passes(inputs, bool(self.finite)):
            group.put((out, lse, raw), group.fused() if fused else group.explicit(), rows)
        return out, lse, raw

    def backward(
        self, inputs: Inputs, out: Tensor, raw: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; every tile is computed again."""
        inputs = _laid_out(inputs)
        out, raw, d_out = (laid_out(x) for x in (out, raw, d_out))
        d_lse = None if d_lse is None else laid_out(d_lse)
        if self.finite is None:
            self._look_at(inputs)
        limit = largest(inputs[3])
        finite = bool(self.finite) and all_sound(limit, d_out, d_lse)
        sums = zeros_like(inputs, covered=finite and not self._has_empty_tiles)
        ordinary, quiet = (out, raw, d_out, d_lse), None
        if finite:
            passes = self._passes(inputs, True)
        else:
            special = self._special_rows(inputs) | ~sound(d_out, limit).flatten(2).all(-1)
            if d_lse is not None:
                special |= ~sound(d_lse, limit).all(-1)
            quiet = silent(d_out, d_lse).all(-1)
            passes = self._passes(inputs, False, special)
            hidden = special[..., None]
            ordinary = (
                out.masked_fill(hidden[..., None], 0),
                raw.masked_fill(hidden, 0),
                d_out.masked_fill(hidden[..., None], 0),
                None if d_lse is None else d_lse.masked_fill(hidden, 0),
            )
        for group, rows, fused in passes:
            if fused:
                gradients = group.fused_gradients(*ordinary, rows)
            elif group.finite or quiet is None or rows is None:
                gradients = group.explicit_gradients(*ordinary[2:], rows)
            else:
                rows = rows & ~group.rows_of(quiet)
                gradients = group.explicit_gradients(d_out, d_lse, rows)
            group.add(sums, gradients, rows)
        return sums

    def plainly(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in plain autograd."""
        query, _, value, _, _ = inputs
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        lse = query.new_full(query.shape[:-1], -torch.inf)
        self._look_at(inputs)
        for group, rows, _ in self._passes(inputs, bool(self.finite), fusable=False):
            group.put((out, lse), group.explicit()[:2], rows)
        return out, lse

    @property
    def _has_empty_tiles(self) -> bool:
        return any(tiles.columns == 0 for tiles in self.tiles)

    def _look_at(self, inputs: Inputs) -> None:
        """What there is in the inputs, so that the usual case need not look at every tile."""
        *tensors, scale, table = inputs
        limit = largest(scale)
        of_query, of_key, of_value = (extent(x) for x in tensors)
        self.finite = all(bool(x <= limit) for x in (of_query, of_key, of_value))
        if table is not None:
            self.finite = self.finite and bool(sound_entries(table, limit).all())
        self.tame = False
        if self.finite and self.score == "dot" and scale.numel():
            products = of_query * of_key * tensors[0].shape[-1] * scale.detach().abs().amax()
            self.tame = bool(products <= STEEP[scale.dtype])

    # Which way, and in which pieces.

    def _passes(
        self,
        inputs: Inputs,
        finite: bool,
        special: Tensor | None = None,
        *,
        fusable: bool = True,
    ) -> Iterator[Pass]:
        """Groups, which of their rows to take from them (None: all), and whether fused.

        Every row is taken once. Those that see what is not sound, and other `special` ones
        [B, N], come last and by differences. The others are computed with zeros in place of all
        that, in the very way they would be without it: so it changes no bit of them.
        """
        clean = inputs if finite else _cleaned(inputs)
        if not finite and special is None:
            special = self._special_rows(inputs)
        yield from self._ordinary_passes(clean, special, fusable=fusable)
        if special is None:
            return
        for group in self._explicit_groups(inputs, False):
            rows = group.rows_of(special)
            if bool(rows.any()):
                yield group.by_differences(), rows, False

    def _ordinary_passes(
        self, inputs: Inputs, special: Tensor | None, *, fusable: bool = True
    ) -> Iterator[Pass]:
        """Those of rows that see what is sound: all but `special` ones."""
        fused, rbf = fusable and self._fusable(inputs), self.score == "rbf"
        groups = self._fused_groups(inputs) if fused else self._explicit_groups(inputs, True)
        for group in groups:
            rows = None if special is None else ~group.rows_of(special)
            careful = None if self.tame or not (fused or rbf) else group.careful_rows()
            if careful is None:
                yield group, rows, fused
                continue
            if rows is not None:
                careful = careful & rows
            others = ~careful if rows is None else ~careful & rows
            if bool(others.any()):
                yield group, others, fused
            if rbf and group.query.dtype != torch.float64:
                wide = group.carefully()
                extreme = wide.careful_rows(EXTREME)
                mild = careful if extreme is None else careful & ~extreme
                if bool(mild.any()):
                    yield wide, mild, fused
                if extreme is None:
                    continue
                careful = careful & extreme
            marked = torch.zeros(inputs[0].shape[:2], dtype=torch.bool, device=careful.device)
            group.mark(marked, careful)
            for small in self._explicit(group.tiles, group.inputs, True):
                yield small.by_differences(), small.rows_of(marked), False

    def _special_rows(self, inputs: Inputs) -> Tensor:
        """Bool [B, N]: rows that see something that is not sound, or hold it themselves.

        With top-k or dropout, a value is seen by the rows that keep it.
        """
        query, key, value, scale, table = inputs
        limit = largest(scale)
        of_query, of_key, of_value = (
            ~sound(x, limit).flatten(2).all(-1) for x in (query, key, value)
        )
        chooses = self.top_k is not None or self.modifiers.dropout is not None
        if not chooses:
            of_key = of_key | of_value
        clean = _cleaned(inputs)
        special = of_query
        for group in self._explicit_groups(clean, True):
            group.mark(special, group.rows_that_see(of_key))
            if table is not None:
                group.mark(special, group.rows_that_read(~sound_entries(table, limit).all(-1)))
        if chooses and bool(of_value.any()):
            for group, rows, _ in self._ordinary_passes(clean, special.clone()):
                kept = group.rows_that_keep(of_value)
                group.mark(special, kept if rows is None else kept & rows)
        return special

    def _fusable(self, inputs: Inputs) -> bool:
        query, _, value, _, table = inputs
        plain = self.top_k is None and table is None and not self.modifiers.any
        return plain and query.device.type == "cpu" and 0 not in (*query.shape, *value.shape)

    def _fused_groups(self, inputs: Inputs) -> Iterator[Group]:
        """Groups of what is sound."""
        query, _, value, _, _ = inputs
        B, _, H, D = query.shape
        D = max(D, value.shape[-1])
        workspace = Workspace()
        for tiles in self.tiles:
            if tiles.columns:
                for few in tiles.groups(OPERANDS // (B * H * D * tiles.columns)):
                    yield Group(self, few, inputs, True, workspace)

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


def _laid_out(inputs: Inputs) -> Inputs:
    query, key, value, scale, table = inputs
    return laid_out(query), laid_out(key), laid_out(value), scale, table


def _cleaned(inputs: Inputs) -> Inputs:
    """Zeros in place of what is not sound."""
    query, key, value, scale, table = inputs
    limit = largest(scale)
    query, key, value = (cleaned(x, limit) for x in (query, key, value))
    if table is not None:
        table = table.masked_fill(~sound_entries(table, limit), 0)
    return query, key, value, scale, table
