"""Attention by fused kernels: which cases they take, and the way from a graph to their tables."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs.bands import bands_of, has_bands
from graphattn.graphs.structure import Structure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.launch import is_interpreted
from graphattn.ops.inputs import ValidPair

if TYPE_CHECKING:
    from graphattn.kernels.band_tables import BandTables

WIDEST = 256  # features of a head
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Asked once: torch.compile may trace what asks, and cannot trace the search for a module.
HAS_TRITON = find_spec("triton") is not None


def why_not(
    graph: TokenGraph,
    query: Tensor,
    value_width: int | None = None,
    *,
    top_k: int | None = None,
    per_edge: bool = False,
) -> str | None:
    """The reason why no kernel takes a case; None where one does."""
    if query.device.type != "cuda" and not is_interpreted():
        return f"its kernels run on CUDA and HIP devices, not on {query.device.type}"
    if not HAS_TRITON:
        return "the package triton is not installed"
    if query.dtype not in DTYPES:
        name = str(query.dtype).removeprefix("torch.")
        return f"its kernels take float32, float16 and bfloat16, not {name}"
    for width in (query.shape[-1], query.shape[-1] if value_width is None else value_width):
        if not 1 <= width <= WIDEST:
            return f"its kernels take heads of 1 to {WIDEST} features, not of {width}"
    if query.shape[-2] == 0:
        return "its kernels take one head or more, not none"
    if graph.structure is None or not has_bands(graph.structure):
        return "its kernels take windows, blocks, causal and complete graphs, and batches of them"
    if top_k is not None:
        return "it has no kernel for top_k yet"
    if per_edge:
        return "its kernels take edge_bias as a table of offsets, not per edge"
    return None


class Call:
    """One call of the kernels: tensors, tables, options.

    `inputs` are query [*, N, H, D], key [*, M, Hk, D], value [*, M, Hk, Dv], scale [H] and a table
    of offsets [offsets, H] or None; `shared` says that the first three are one tensor.
    """

    def __init__(
        self,
        inputs: tuple[Any, ...],
        graph: TokenGraph,
        score: str,
        valid: ValidPair,
        shared: bool,
    ) -> None:
        from graphattn.kernels.band_inputs import BandInputs

        query, key, value, scale, table = inputs
        batch = query.shape[:-3]
        self.batch = batch.numel()
        assert graph.structure is not None
        bands = bands_of(graph.structure)
        assert bands is not None
        of_target, of_source = (
            None if mask is None else mask.expand(*batch, -1).reshape(self.batch, mask.shape[-1])
            for mask in valid
        )
        if valid[0] is valid[1]:
            of_target = of_source
        flat = query.reshape(self.batch, *query.shape[-3:])
        self.inputs = BandInputs(
            flat,
            flat if shared else key.reshape(self.batch, *key.shape[-3:]),
            flat if shared else value.reshape(self.batch, *value.shape[-3:]),
            scale,
            _tables(graph.structure, query.device),
            score == "rbf",
            table,
            of_target,
            of_source,
        )
        self.bands, self.shared = bands, shared

    @property
    def _is_gaussian(self) -> bool:
        """One tensor, and weights that need no running maximum."""
        from graphattn.kernels.gaussian import has_shared_forward

        return self.shared and has_shared_forward(self.inputs, self.bands.has_self_loops)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, N, H, Dv], log-sums [B, H, N], and log-sums for the backward [B, H, N]."""
        from graphattn.kernels import band, gaussian

        return (
            gaussian.shared_forward(self.inputs) if self._is_gaussian else band.forward(self.inputs)
        )

    def backward(
        self,
        out: Tensor,
        lse: Tensor,
        saved: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        *,
        needs_scale: bool,
        needs_table: bool,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs; of one tensor that is all three, the whole one first."""
        from graphattn.kernels import band_backward, band_table, gaussian

        x = self.inputs
        out, d_out = (t.reshape(self.batch, *t.shape[-3:]) for t in (out, d_out))
        lse, saved, d_lse = (t.reshape(self.batch, *t.shape[-2:]) for t in (lse, saved, d_lse))
        d_lse = d_lse.transpose(1, 2)
        if self._is_gaussian and gaussian.has_shared_backward(x, self.bands.is_symmetric):
            d_x, d_scale = gaussian.shared_backward(x, out, lse, d_out, d_lse)
            return d_x, None, None, d_scale, None
        *found, d_scale, delta = band_backward.backward(
            x, out, saved, d_out, d_lse, scale_gradient=needs_scale or self.shared
        )
        d_table = band_table.d_table(x, saved, delta, d_out) if needs_table else None
        if self.shared:
            found = [found[0] + found[1] + found[2], None, None]
        return *found, d_scale, d_table


@lru_cache(maxsize=64)
def _tables(structure: Structure, device: torch.device) -> BandTables:
    """Kept: they are made on the host and copied to the device once per graph."""
    from graphattn.kernels.band_tables import BandTables

    bands = bands_of(structure)
    assert bands is not None
    return BandTables(bands.sequences, device, origin=bands.origin)
