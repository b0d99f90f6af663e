"""Inputs of the band kernels, checked and laid out once for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.bands.arguments import BandTables, TokenRows
from graphattn.kernels.bands.schedule import BandSchedule, Side
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LOG2E, saved_log_sums
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import as_bytes, side_by_side
from graphattn.kernels.shared.precision import product_precision
from graphattn.kernels.shared.row_dots import half_squares, row_dots
from graphattn.kernels.shared.tuning import Choice


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
        kept: int32 [B, H, N, words], one bit for every pair, set if top-k keeps the pair
            (:func:`graphattn.kernels.bands.top_k.select`); None: every pair is kept.
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

    def half_squares(self) -> Tensor | None:
        """-||k||^2 / 2 in pieces, [B, Hk, M, PIECES]; None where kernels need none, or compute it
        from a centre.

        A matrix product adds them to q . k (:func:`graphattn.kernels.shared.precision.pieces`). If
        threads subtracted them, each would hold some of them in registers, of which the forward
        has none left: ptxas 12.8 then waited after every matrix instruction.

        A tile of keys stays in shared memory, where matrix products read it. If threads read it
        there as well, Triton (3.4 to 3.9) has the next tile copied over it before the product is
        done, on Hopper: ``make emulate`` found that. Besides, many programs read each key, and its
        square is better computed once.
        """
        if self.rbf and not self.is_centered:
            return half_squares(self.key)
        return None

    def saved_from(self, lse: Tensor) -> Tensor:
        """The log-sums that the forward saves for the backward, from natural ones, [B, H, N].

        They may be those over more edges than the bands have: then the backward computes what the
        bands give to the gradients over all of these.
        """
        if not self.rbf or self.is_centered:
            return saved_log_sums(lse)
        # Logits in half precision lack -||q||^2 / 2, and so do their log-sums.
        squares = row_dots(self.query, self.query, 0.5)
        return saved_log_sums(lse, squares * (self.scale * LOG2E.value)[:, None])

    def parts(self, rows: int, columns: int) -> int:
        """Number of parts of the loop over tiles of the other side, 3 or 1.

        3: tiles that need a mask, tiles in which every pair is an edge and which need none, and
        tiles that need a mask again. 1: all tiles get a mask, because no tile is sure to be whole.
        :func:`graphattn.kernels.bands.math.part_borders` computes where the parts begin and end.
        """
        plain = self.valid_source is None and self.valid_target is None
        plain = plain and not self.bands.has_holes and self.kept is None
        return 3 if plain and self.bands.window >= rows + columns - 1 else 1

    def centers(self, side: Side, tiles: Tensor, rows: int) -> Tensor | None:
        """Centers that queries and keys of a tile are measured from, [B, tiles, Hk, D]; None if not
        centred.

        The center of a tile is the key of a source near the tile, no later than what its targets
        see (`BandSchedule.nearby_sources`). Where that source is invalid or not finite, it is the
        last valid and finite one of the sequence before it, or else the next one.
        """
        B, M, Hk, D = self.key.shape
        if not self.is_centered:
            return None
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
        centers = self.key.gather(1, place[..., None, None].expand(-1, -1, Hk, D))
        return torch.where(centers.isfinite(), centers, 0.0)

    @cached_property
    def _common(self) -> dict[str, Any]:
        query, key = self.query, self.key
        return {
            "query": TokenRows.of(query),
            "key": TokenRows.of(key),
            "value": TokenRows.of(self.value),
            "p_scale": self.scale,
            "p_table": self.table,
            "p_valid_target": self.valid_target,
            "p_valid_source": self.valid_source,
            "N": query.shape[1],
            "M": key.shape[1],
            "H": query.shape[2],
            "origin": self.bands.origin or 0,
            "REPEATS": query.shape[2] // key.shape[2],
            "RBF": self.rbf,
            "PRECISION": product_precision(query.dtype),
        }

    def common(self) -> dict[str, Any]:
        """The arguments that all band kernels take, whether they read them or not.

        A pointer is None if there is nothing to read, and Triton compiles a version of the kernel
        without it: `p_table` (biases that are looked up by hop, source minus target), `p_kept`
        (bits of the pairs that top-k has chosen), `p_valid_target` and `p_valid_source` (masks),
        `p_pieces` (`half_squares`) and `p_center` (`centers`). Arguments that are tuples are
        explained in :mod:`graphattn.kernels.bands.arguments`.

        Names in capitals are constants (``tl.constexpr``): Triton compiles another version of the
        kernel for every set of values. Beginnings of names, such as ``b_``, are explained in
        :mod:`graphattn.kernels`. The constants of all calls are:

        - D, DV: features of queries and keys, and of values. BLOCK_D, BLOCK_DV: the same, rounded
          up to the powers of 2 that tiles need. They are WIDTH and BLOCK of `query` and `value`.
        - REPEATS: query heads that share one key head, H / Hk.
        - RBF: affinities are q . k - ||k||^2 / 2; otherwise q . k.
        - HOLES, STRIDED: those of `bands`.
        - PRECISION: how float32 tiles are multiplied (:mod:`graphattn.kernels.shared.precision`).

        Each launch adds its own (:meth:`of_tiles`):

        - ROWS, COLUMNS: targets and sources of a tile, in this order, also where the sources are a
          program's own and it goes over the targets.
        - PARTS: parts of the loop over tiles, 3 or 1 (`parts`).
        - CAREFUL: whether NaN and infinity are kept from tokens that do not see them (`start`).
        - MASKED, of functions that the kernels call: some pairs of this tile may not be edges. In
          three parts, all tiles but those of the middle part are MASKED.
        """
        kept = self.kept
        num_words = 0 if kept is None else kept.shape[-1]
        return self._common | {"p_kept": kept, "num_words": num_words}

    def choose(self, kernel: str) -> Choice:
        """The sizes of the tiles of a kernel, by its name in `tuning`."""
        narrowest = min(self.query.shape[-1], self.value.shape[-1])
        return tuning.choose(kernel, self.query.dtype, self.width, self.bands.window, narrowest)

    def start(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Starts a kernel, and once more for programs whose sums are NaN or infinite.

        A product of tiles multiplies every pair, also pairs that are no edges and have weight 0;
        and 0 * NaN is NaN. It would cost much to clean every tile that needs a mask, and NaN is
        rare. So a program notes in `p_again` [programs] whether its sums are unsound; the second
        launch, with CAREFUL, computes those again, and its other programs end at once.
        """
        grid = (programs,)
        if self.sees_all:
            launch(kernel, grid, p_again=None, CAREFUL=False, **arguments)
            return
        again = torch.empty(grid, dtype=torch.int32, device=self.query.device)
        launch(kernel, grid, p_again=again, CAREFUL=False, **arguments)
        launch(kernel, grid, p_again=again, CAREFUL=True, **(arguments | {"PARTS": 1}))

    @property
    def sees_all(self) -> bool:
        """Whether every target sees all sources of its sequence, so none has to be kept from it."""
        plain = self.valid_source is None and self.valid_target is None and self.kept is None
        return plain and self.bands.is_complete

    def of_tiles(self, side: Side, choice: Choice) -> dict[str, Any]:
        """The arguments about the tiles of one side, in the sizes of a choice."""
        rows = choice.rows if side == "targets" else choice.columns
        tiles = self.bands.tiles(side, rows)
        return {
            "p_center": self.centers(side, tiles, rows),
            "bands": BandTables.of(self.bands, tiles),
            "num_tiles": len(tiles),
            "ROWS": choice.rows,
            "COLUMNS": choice.columns,
            "num_warps": choice.num_warps,
            "num_stages": choice.num_stages,
        }
