"""A few equal tiles at a time: their tensors cut out of the whole, and put back."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from graphattn.graphs.structure import Band
from graphattn.ops.attention.structured import explicit, fused
from graphattn.ops.attention.structured.modifiers import Modifiers
from graphattn.ops.attention.structured.operands import (
    Differences,
    Operands,
    dot_operands,
    rbf_operands,
)
from graphattn.ops.attention.structured.recompute import Gradients, Inputs
from graphattn.ops.attention.structured.tiles import Tiles
from graphattn.ops.attention.structured.workspace import Workspace
from graphattn.ops.dropout import Kept, keeps
from graphattn.ops.inputs import ValidPair

SEVERAL = 16  # sources whose mean is a centre
EXTREME = 1e8  # of float32 numbers computed in float64
# How large products may be, in units of logits, before rounding them costs more than 1e-5 (float32)
# or 1e-12 (float64) of a weight.
SPREAD = {torch.float32: 64.0, torch.float64: 4096.0}
# And when they are what a dot product is: rounding them costs the forward the same, but a backward
# that computes them again, in another order, must not find other weights.
STEEP = {torch.float32: 1e4, torch.float64: 1e12}


class Options(Protocol):
    """What a plan says about all its groups."""

    score: str
    top_k: int | None
    valid: ValidPair
    modifiers: Modifiers


class Group:
    """Queries [G, H, n, D], keys and values [G, H, m, D] of G = batch x tiles tiles.

    Invalid targets and rows without an edge are "dead": output 0, log-sum -inf, no gradient.
    """

    def __init__(
        self,
        options: Options,
        tiles: Tiles,
        inputs: Inputs,
        finite: bool,
        workspace: Workspace | None = None,
    ) -> None:
        self.inputs, self.workspace = inputs, workspace
        query, key, value, self.scale, self.table = inputs
        self.options, self.tiles, self.finite = options, tiles, finite
        self.careful = self.differences = False
        self._found_places: dict[int, Tensor] = {}
        self.kv_heads, self.repeats = key.shape[2], query.shape[2] // key.shape[2]
        self.query = self._rows(query)
        self.key, self.value = (
            self._columns(x).repeat_interleave(self.repeats, dim=1)
            if self.repeats > 1
            else self._columns(x)
            for x in (key, value)
        )

    # Which pairs are edges.

    @cached_property
    def edges(self) -> Tensor | None:
        """Bool [n, m], the same in every tile; None: all."""
        return self.tiles.allowed(self.query.device)

    @cached_property
    def valid_columns(self) -> Tensor | None:
        """Bool [G, 1, 1, m]; None: all."""
        of_source = self.options.valid[1]
        if of_source is None:
            return None
        return self._columns(of_source[..., None, None]).transpose(-1, -2)

    @cached_property
    def allowed(self) -> Tensor | None:
        """Bool, broadcastable to [G, H, n, m]: edges between valid tokens; None: all."""
        if self.edges is None or self.valid_columns is None:
            return self.valid_columns if self.edges is None else self.edges
        return self.edges & self.valid_columns

    @cached_property
    def dead(self) -> Tensor | None:
        """Bool, broadcastable to [G, H, n]; None: no row."""
        empty: Tensor | None
        if self.tiles.columns == 0:
            return torch.ones_like(self.query[..., 0], dtype=torch.bool)
        if self.tiles.is_whole_causal:
            columns = self.valid_columns
            empty = None if columns is None else columns[:, :, 0].cumsum(-1) == 0
        else:
            empty = None if self.allowed is None else ~self.allowed.any(-1)
        of_target = self.options.valid[0]
        if of_target is None:
            return empty if empty is not None and bool(empty.any()) else None
        invalid = ~self._rows(of_target[..., None, None])[..., 0]
        return invalid if empty is None else invalid | empty

    def rows_that_see(self, marked: Tensor) -> Tensor:
        """Bool [G, 1, n]: rows with an edge to a source of bool [B, M]."""
        seen = self._columns_of(marked)
        return (seen if self.allowed is None else seen & self.allowed).any(-1)

    def rows_that_read(self, marked: Tensor) -> Tensor:
        """Bool [G, 1, n]: rows with an edge whose entry of the table is in bool [offsets].

        Or whose own bias is in bool [1 or B, N, M].
        """
        if marked.dim() == 3:
            read = self._pairs(marked)[:, None]
        else:
            read = marked[self.tiles.offsets(self.query.device)]
        read = read if self.allowed is None else read & self.allowed
        return read.any(-1).expand(len(self.query), 1, -1)

    def rows_that_keep(self, marked: Tensor) -> Tensor:
        """Bool [G, 1, n]: rows where top-k keeps an edge to a source of bool [B, M]."""
        scores, exact = self._scores(self.query)
        keep = explicit.keep_best(
            explicit.logits_of(scores, self._bias()),
            self.allowed,
            self.options.top_k,
            self.finite,
            exact,
        )
        if self.kept is not None:
            keep = self.kept.among(keep)
        seen = self._columns_of(marked)
        return (seen if keep is None else (seen & keep).any(1, keepdim=True)).any(-1)

    @cached_property
    def kept(self) -> Kept | None:
        """Which pairs dropout leaves, [G, H, n, m]; None: there is no dropout."""
        dropout = self.options.modifiers.dropout
        if dropout is None:
            return None
        rows = self._rows(dropout.rows[..., None])
        columns = self._columns(dropout.columns.expand(len(self.inputs[0]), -1)[..., None, None])
        return Kept(dropout.p, keeps(dropout.p, rows, columns.mT))

    def _columns_of(self, marked: Tensor) -> Tensor:
        """Bool [G, 1, n, m] of bool [B, M]."""
        return self._columns(marked[..., None, None]).mT.expand(-1, -1, self.tiles.rows, -1)

    def rows_of(self, marked: Tensor) -> Tensor:
        """Bool [G, 1, n], this group's part of bool [B, N]."""
        return self._rows(marked[..., None, None])[..., 0]

    # What happens inside.

    @cached_property
    def operands(self) -> Operands:
        """Of this group's queries and keys."""
        return self._products(self.query)

    def _products(self, query: Tensor) -> Operands:
        if self.options.score == "dot":
            softcap = self.options.modifiers.softcap
            return dot_operands(query, self.key, self.scale, self.workspace, softcap)
        return rbf_operands(query, self.key, self.scale, self.center, self.workspace)

    def _scores(self, query: Tensor) -> tuple[Operands | Differences, explicit.Exact | None]:
        """What gives logits, and what judges near ties; differences do so themselves."""
        if self.differences:
            return Differences(query, self.key, self.scale[:, None, None]), None
        operands = self.operands if query is self.query else self._products(query)
        return operands, explicit.Exact(operands, self.query, self.key, self._bias())

    @property
    def limits(self) -> dict[torch.dtype, float]:
        """How large products may be."""
        return STEEP if self.options.score == "dot" else SPREAD

    def careful_rows(self, limit: float | None = None) -> Tensor | None:
        """Bool [G, 1, n]: rows of which products would lose digits; None: no row.

        Those with a query and a source so large, for RBF measured from the centre in units of
        sigma, that rounding their product changes weights. What a row does not see does not count.
        """
        if 0 in (*self.query.shape, *self.key.shape):
            return None
        if limit is None:
            limit = self.limits[self.query.dtype]
        of_query, of_key = (x.amax(1, keepdim=True) for x in self.operands.sizes)
        if bool(2 * (of_query.amax(-1) * of_key.amax(-1)).sqrt().max() <= limit):
            return None
        if self.tiles.is_whole_causal:
            usable = self.valid_columns
            seen = of_key if usable is None else of_key.masked_fill(~usable[:, :, 0], 0)
            largest = seen.cummax(-1).values
        else:
            pairs = of_key[..., None, :].expand(-1, -1, self.tiles.rows, -1)
            if self.allowed is not None:
                pairs = pairs.masked_fill(~self.allowed, 0)
            largest = pairs.amax(-1)
        rows = ~(2 * (of_query * largest).sqrt() <= limit)
        rows = rows if self.dead is None else rows & ~self.dead
        return rows if bool(rows.any()) else None

    def carefully(self) -> Group:
        """The same group in float64."""
        group = self._in_float64()
        if self.options.score == "rbf":
            group.__dict__["center"] = self.center.double()
        return group

    def by_differences(self) -> Group:
        """The same group in float64, with RBF logits from differences."""
        group = self._in_float64()
        group.differences = self.options.score == "rbf"
        return group

    def _in_float64(self) -> Group:
        group = copy(self)
        group.careful, group.workspace = True, None
        for name in ("operands", "center"):
            group.__dict__.pop(name, None)
        for name in ("query", "key", "value", "scale"):
            group.__dict__[name] = getattr(self, name).double()
        group.table = None if self.table is None else self.table.double()
        return group

    @cached_property
    def center(self) -> Tensor:
        """What RBF operands are measured from, [G, H, 1, D].

        A source that every row sees, or the mean of several: what only some see would change bits
        of the others. 0 where there is none; careful rows go to float64 then, as from any centre.
        """
        usable = self.valid_columns
        if self.tiles.columns == 0:
            return self.key.new_zeros(())
        if isinstance(self.tiles.structure, Band):
            if usable is None:
                first, count = self.tiles.common_columns
                if count == 0:
                    return torch.zeros_like(self.key[..., :1, :])
                few = self.key[..., first : first + min(count, SEVERAL), :]
                return few.detach().mean(-2, keepdim=True)
            place = usable.int().argmax(-1, keepdim=True)
            if not self.tiles.is_whole_causal:  # where the first that is valid is seen by all
                assert self.allowed is not None
                seen = self.allowed if self.dead is None else self.allowed | self.dead[..., None]
                usable = seen.all(-2, keepdim=True)
                place = usable.int().argmax(-1, keepdim=True)
            found = self.key.take_along_dim(place, dim=-2)
            return found.masked_fill(~usable.take_along_dim(place, dim=-1), 0).detach()
        if usable is None:
            return self.key.detach().mean(-2, keepdim=True)
        weight = usable.transpose(-1, -2)
        total = self.key.detach().masked_fill(~weight, 0).sum(-2, keepdim=True)
        return total / weight.sum(-2, keepdim=True).clamp(min=1)

    def fused(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output [G, H, n, Dv], true log-sums [G, H, n], log-sums of the operands."""
        out, raw = fused.forward(self.operands, self.value, *self._fused_mask())
        return self._results(self.operands, out, raw)

    def explicit(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with the logits stored."""
        scores, exact = self._scores(self.query)
        options = self.allowed, self._bias(), self.options.top_k, self.finite, exact
        found = explicit.forward(scores, self.value, *options, kept=self.kept)
        return self._results(scores, *found)

    def _results(
        self, scores: Operands | Differences, out: Tensor, raw: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = scores.true_lse(raw)
        if self.dead is None:
            return out, lse, raw
        out = out.masked_fill(self.dead[..., None], 0)
        return out, lse.masked_fill(self.dead, -torch.inf), raw

    def _fused_mask(self) -> tuple[Tensor | None, bool]:
        """Which pairs are allowed, [G or 1, 1, n or 1, m], and whether causally at that."""
        if self.tiles.is_whole_causal:
            return self.valid_columns, True
        return self.allowed, False

    def _bias(self) -> Tensor | None:
        """The table's entry of every pair, [H, n, m]; their own [1 or B, H, n, m] where dense."""
        if self.table is None:
            return None
        if self.table.dim() == 4:
            return self._pairs(self.table).permute(0, 3, 1, 2)
        return self.table[self.tiles.offsets(self.query.device)].permute(2, 0, 1)

    def fused_gradients(
        self,
        out: Tensor,
        raw: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        rows: Tensor | None = None,
    ) -> Gradients:
        """Gradients of this group's query, key, value, of the scale and (none) of the table.

        What comes in is that of all tokens, [B, N, ...]; only the marked `rows` [G, 1, n] count.
        """
        quiet = self._quiet(rows)
        d_out, d_lse = self._upstream(d_out, d_lse)
        if self.careful:  # the saved output is rounded, and its error would meet distant keys
            out, raw = fused.forward(self.operands, self.value, *self._fused_mask())
            if self.dead is not None:
                out = out.masked_fill(self.dead[..., None], 0)
        else:
            out, raw = self._rows(out), self._rows(raw[..., None])[..., 0]
        # exp(logit - inf) = 0: whatever else a quiet row holds adds zeros, and how numbers lie in
        # memory, by which products round, does not depend on which rows are quiet.
        raw = raw.contiguous() if quiet is None else raw.contiguous().masked_fill(quiet, torch.inf)
        d_query, d_key, d_value, *sums = fused.backward(
            self.operands, self.value, *self._fused_mask(), out, raw, d_out, d_lse
        )
        d_query, d_key, d_scale = self.operands.gradients(d_query, d_key, *sums)
        return d_query, d_key, d_value, d_scale, None

    def explicit_gradients(
        self, d_out: Tensor, d_lse: Tensor | None, rows: Tensor | None = None
    ) -> Gradients:
        """The same with the logits stored."""
        quiet, allowed, query = self._quiet(rows), self.allowed, self.query
        d_out, d_lse = self._upstream(d_out, d_lse)
        if quiet is not None:
            allowed = ~quiet[..., None] if allowed is None else allowed & ~quiet[..., None]
            if not self.finite:  # 0 * NaN is NaN
                query = query.masked_fill(quiet[..., None], 0)
                d_out = d_out.masked_fill(quiet[..., None], 0)
                d_lse = None if d_lse is None else d_lse.masked_fill(quiet, 0)
        scores, exact = self._scores(query)
        options = allowed, self._bias(), self.options.top_k, self.finite, exact
        pulled, d_value, d_logits = explicit.backward(
            scores, self.value, *options, d_out, d_lse, kept=self.kept
        )
        d_table = None
        if self.table is not None and self.table.dim() == 4:
            d_table = d_logits.permute(0, 2, 3, 1)
            d_table = d_table if len(self.table) > 1 else d_table.sum(0, keepdim=True)
        elif self.table is not None:
            places = self.tiles.offsets(self.query.device).flatten()
            per_pair = d_logits.sum(0).flatten(1).T.to(self.table.dtype)
            d_table = torch.zeros_like(self.table).index_add_(0, places, per_pair)
        d_query, d_key, d_scale = pulled
        return d_query, d_key, d_value, d_scale, d_table

    def _pairs(self, dense: Tensor) -> Tensor:
        """This single tile's part of what is known of all pairs, [1 or B, N, M, ...]: a view."""
        t = self.tiles
        return dense[:, t.target : t.target + t.rows, t.source : t.source + t.columns]

    def _quiet(self, rows: Tensor | None) -> Tensor | None:
        """Bool, broadcastable to [G, H, n]: rows that take no part in a backward; None: no row."""
        if rows is None:
            return self.dead
        return ~rows if self.dead is None else ~rows | self.dead

    def _upstream(self, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """This group's part of the gradients that come in."""
        d_out = self._rows(d_out).to(self.query)
        return d_out, None if d_lse is None else self._rows(d_lse[..., None])[..., 0].to(d_out)

    # Cutting out and putting back.

    def _rows(self, x: Tensor) -> Tensor:
        """The targets' part of x [B, N, H, D]."""
        return self._cut(x, 0, self.tiles.rows)

    def _columns(self, x: Tensor) -> Tensor:
        """The sources' part of x [B, M, H, D]."""
        return self._cut(x, 1, self.tiles.columns)

    def _cut(self, x: Tensor, side: int, length: int) -> Tensor:
        """[B, N, H, D] -> [B * tiles, H, length, D]."""
        t = self.tiles
        if t.starts is not None:
            tiles = x.index_select(1, self._places(side, length)).unflatten(1, (t.count, length))
            return tiles.transpose(2, 3).flatten(0, 1)
        start, step = (t.target, t.source)[side], t.step[side]
        if t.count == 1:
            return _run(x, start, length, t.stride).transpose(1, 2)
        run = _run(x, start, (t.count - 1) * step + length, t.stride)
        return run.unfold(1, length, step).transpose(-1, -2).flatten(0, 1)

    def _add_to_sources(self, into: Tensor, x: Tensor) -> None:
        """Adds x [B * tiles, H, m, D] to the sources that the tiles share."""
        t, length = self.tiles, self.tiles.columns
        if t.starts is not None:
            into.index_add_(1, self._places(1, length), self.tokens(x).to(into.dtype))
            return
        step = t.step[1]
        if t.count == 1:
            _run(into, t.source, length, t.stride).add_(x.transpose(1, 2))
            return
        x = x.unflatten(0, (len(into), t.count)).transpose(-1, -2)  # [B, count, H, D, m]
        for first in range(0, length, step):  # what neighbouring tiles share is added one by one
            width = min(step, length - first)
            start = t.source + first * t.stride
            run = _run(into, start, (t.count - 1) * step + width, t.stride)
            run.unfold(1, width, step).add_(x[..., first : first + width])

    def _places(self, side: int, length: int) -> Tensor:
        """Which tokens irregular tiles hold, [tiles * length]."""
        if side not in self._found_places:
            assert self.tiles.starts is not None
            starts = torch.tensor([start[side] for start in self.tiles.starts])
            places = (starts[:, None] + torch.arange(length) * self.tiles.stride).flatten()
            self._found_places[side] = places.to(self.inputs[0].device)
        return self._found_places[side]

    def targets(self) -> Tensor:
        """Which targets the tiles hold, [tiles * n], in their order."""
        t = self.tiles
        if t.starts is not None:
            return self._places(0, t.rows)
        first = torch.arange(t.count * t.rows, device=self.inputs[0].device)
        return t.target + first * t.stride

    def tokens(self, x: Tensor) -> Tensor:
        """[B * tiles, H, n, D] -> [B, tiles * n, H, D]."""
        split = x.unflatten(0, (len(self.inputs[0]), self.tiles.count))
        return split.permute(0, 1, 3, 2, 4).flatten(1, 2)

    def put(
        self,
        whole: tuple[Tensor, ...],
        part: tuple[Tensor, ...],
        rows: Tensor | None = None,
    ) -> None:
        """Writes what belongs to targets into the whole; only the marked `rows` [G, 1, n]."""
        t = self.tiles
        for into, new in zip(whole, part, strict=True):
            new = self.tokens(new if new.dim() == 4 else new[..., None])
            new = new.flatten(2) if into.dim() == 3 else new
            if t.starts is None:
                place = _run(into, t.target, t.count * t.rows, t.stride)
            else:
                place = into.index_select(1, self._places(0, t.rows))
            if rows is not None:
                marked = self.tokens(rows[..., None])
                new = torch.where(marked if new.dim() == 4 else marked[..., 0], new, place)
            if t.starts is None:
                place.copy_(new)
            else:
                into.index_copy_(1, self._places(0, t.rows), new.to(into.dtype))

    def mark(self, marked: Tensor, rows: Tensor) -> None:
        """Sets bool [B, N] where `rows` [G, 1, n] are."""
        places = self.targets()
        both = marked.index_select(1, places) | self.tokens(rows[..., None])[..., 0, 0]
        marked.index_copy_(1, places, both)

    def add(self, sums: Gradients, part: Gradients, rows: Tensor | None = None) -> None:
        """Adds this group's gradients to those of the inputs; the query's is only its own."""
        d_query, d_key, d_value, d_scale, d_table = part
        into_query, into_key, into_value, into_scale, into_table = sums
        self.put((into_query,), (d_query,), rows)
        for into, new in ((into_key, d_key), (into_value, d_value)):
            if self.repeats > 1:
                new = new.unflatten(1, (self.kv_heads, -1)).sum(2)
            self._add_to_sources(into, new)
        into_scale += d_scale
        if into_table is not None and d_table is not None:
            place = self._pairs(into_table) if into_table.dim() == 4 else into_table
            place += d_table


def _run(x: Tensor, start: int, length: int, stride: int) -> Tensor:
    """`length` tokens of x [B, N, H, D], `stride` apart."""
    return x[:, start : start + (length - 1) * stride + 1 : stride] if length else x[:, :0]
