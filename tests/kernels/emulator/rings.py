"""A small kernel whose warps share the work, as those for Hopper do: a product of two matrices.

One warp copies tiles of the factors into a ring of buffers; four warps add their products. It needs
Triton's Gluon.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphattn.kernels.shared.launch import launch

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # before 3.9
TILE = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def copy_factors(left, right, lefts, rights, full, free, count):
    for i in range(count):
        i_stage = i % STAGES
        mbarrier.wait(free.index(i_stage), i // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(i_stage), 2 * 2 * TILE * TILE)
        i_row = gl.program_id(0) * TILE
        copy_tile(left, [i_row, i * TILE], full.index(i_stage), lefts.index(i_stage))
        copy_tile(right, [i * TILE, 0], full.index(i_stage), rights.index(i_stage))


@gluon.jit
def add_products(p_out, lefts, rights, full, free, count):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    b_sum = gl.zeros([TILE, TILE], gl.float32, SUMS)
    for i in range(count):
        i_stage = i % STAGES
        mbarrier.wait(full.index(i_stage), i // STAGES & 1)
        b_left, b_right = lefts.index(i_stage), rights.index(i_stage)
        b_product = warpgroup_mma(b_left, b_right, b_sum, is_async=True)
        b_sum = warpgroup_mma_wait(0, deps=[b_product])
        mbarrier.arrive(free.index(i_stage))
    o_row = gl.program_id(0) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
    o_column = gl.arange(0, TILE, gl.SliceLayout(0, SUMS))
    gl.store(p_out + o_row[:, None] * TILE + o_column[None, :], b_sum)


@gluon.jit
def ring_kernel(left, right, p_out, count):
    """p_out [rows, TILE] = left [rows, count * TILE] @ right."""
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES, TILE, TILE], left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [STAGES, TILE, TILE], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()  # so that bulk copies see these barriers
    gl.warp_specialize(
        [
            (add_products, (p_out, lefts, rights, full, free, count)),
            (copy_factors, (left, right, lefts, rights, full, free, count)),
        ],
        [1],
        [24],
    )


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [rows, K] @ right [K, 64] in float32; rows and K are multiples of 64."""
    tile = TILE.value
    out = torch.empty(len(left), tile)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    factors = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tile, tile], layout)
        for x in (left, right)
    )
    launch(
        ring_kernel,
        (len(left) // tile,),
        **dict(zip(("left", "right"), factors, strict=True)),
        p_out=out,
        count=len(right) // tile,
        num_warps=4,
        num_stages=1,
    )
    return out
