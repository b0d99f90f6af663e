"""Inputs that the kernel for Hopper takes, and whether it is asked for.

No GPU has run it: what is known of it comes from the compiler and from the emulator of compiled
kernels. So it must be asked for, by the environment variable ``GRAPHATTN_GLUON=1``.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import is_interpreted

if TYPE_CHECKING:
    from graphattn.kernels.bands.inputs import BandInputs

VARIABLE = "GRAPHATTN_GLUON"
WIDTHS = (64, 128)
OLDEST = (3, 6)  # version of Triton


def is_chosen(inputs: BandInputs) -> bool:
    """Whether the kernel for Hopper computes these inputs."""
    return os.environ.get(VARIABLE) == "1" and why_not(inputs) is None


def why_not(inputs: BandInputs) -> str | None:
    """Return the reason why the kernel for Hopper does not take these inputs; None if it does."""
    x, bands = inputs, inputs.bands
    widths = {x.query.shape[-1], x.value.shape[-1]}
    if tuning.architecture() != "sm_90" or is_interpreted():
        return f"it is for sm_90, not for {tuning.architecture()}"
    if not has_gluon():
        return "it needs Triton 3.6 or newer, with Gluon for Hopper"
    if x.query.dtype == torch.float32:
        return "it takes bfloat16 and float16, not float32"
    if len(widths) > 1 or not widths <= set(WIDTHS):
        return f"it takes heads of 64 or 128 features, not of {sorted(widths)}"
    if any(option is not None for option in (x.table, x.valid_target, x.valid_source, x.kept)):
        return "it takes no table of biases, mask or top-k"
    if bands.window < tuning.NARROW or bands.has_holes or not _is_one_sequence(inputs):
        return f"it takes one window of {tuning.NARROW} or more sources, without holes"
    if x.rbf and x.key.shape[1] % 4:
        return (
            "half squares of a head begin at a multiple of 16 bytes: it takes 4, 8, 12, ... tokens"
        )
    if not all(map(_fits_tensor_maps, (x.query, x.key, x.value))):
        return "a row of a tensor map is one token, with all heads side by side"
    return None


@cache
def has_gluon() -> bool:
    """Whether Triton has what the kernel is written in. It was compiled with 3.6 and 3.9."""
    try:
        import triton
        from triton.experimental.gluon.language import warp_specialize
        from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
    except ImportError:
        return False
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= OLDEST and all((warp_specialize, mbarrier, tma, warpgroup_mma))


def _is_one_sequence(inputs: BandInputs) -> bool:
    """Whether all tokens are one sequence, in their order, that sees itself."""
    N = inputs.query.shape[1]
    rows = inputs.bands.on_cpu[:, :5].tolist()
    return rows == [[0, N, 0, N, 1]] and inputs.key.shape[1] == N > 0


def _fits_tensor_maps(x: torch.Tensor) -> bool:
    """Whether x [B, N, H, D] is a matrix [B * N, H * D] whose rows begin at multiples of 16 bytes.

    Places in it have 32 bits.
    """
    aligned = (x.storage_offset() | x.stride(1)) * x.element_size() % 16 == 0
    side_by_side = x.shape[2] == 1 or x.stride(2) == x.shape[3]
    return aligned and side_by_side and 0 < x.shape[0] * x.shape[1] < 2**31
