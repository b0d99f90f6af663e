"""Kernels that put the parts of split rows together, always in one order.

`graphattn.kernels.edges.schedule` says which rows are split. Names are explained in
:mod:`graphattn.kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.edges.schedule import Rows
from graphattn.kernels.shared.exponentials import LN2, LOG2E, level_of
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.programs import heads_first

PARTS = 16  # of a split row, read at a time


class Averages(NamedTuple):
    """Outputs over some edges, and their log-sums, as kernels take them."""

    p_out: Tensor
    p_lse: Tensor


def new_parts(rows: Rows, like: Tensor, *sizes: int) -> Tensor | None:
    """A float32 tensor [B, parts, ...] for the parts of split rows; None if no row is split.

    `sizes` are B and those after the parts.
    """
    if not rows.num_parts:
        return None
    return like.new_empty((sizes[0], rows.num_parts, *sizes[1:]), dtype=torch.float32)


@triton.jit
def split_of_program(p_split, num_split, heads):
    """Return the split row that a program takes (a row of `Rows.split`).

    These are batch, head, the number of the row (-1: there is none), the number of its first part,
    and the number of its parts.
    """
    i_b, i_h, i_split = heads_first(num_split, heads)
    p_row = p_split + 3 * i_split
    return i_b, i_h, tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2).to(tl.int32)


@triton.jit(do_not_specialize=["N", "H", "num_split", "num_parts"])
def merge_averages_kernel(
    part, start, p_out, p_lse, p_saved, p_split, N, H, num_split, num_parts,
    D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Output [B, N, H, D], log-sums and base-2 log-sums [B, H, N] of split rows, from their parts.

    `part` and `start` are the same as those of
    :func:`graphattn.kernels.edges.forward.edges_forward_kernel`.
    """
    i_b, i_h, i_row, i_first, i_count = split_of_program(p_split, num_split, H)
    if i_row >= 0:
        BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
        o_feature = tl.arange(0, BLOCK_D)
        m_feature = o_feature < D
        i_number = (i_b * H + i_h) * N + i_row
        o_number = ((i_b * N + i_row) * H + i_h) * D + o_feature
        b_out = tl.zeros([BLOCK_D], tl.float32)
        i_max = float("-inf")
        i_sum = 0.0
        if start is not None:
            i_max = tl.load(start.p_lse + i_number) * LOG2E
            i_sum = tl.where(i_max == float("-inf"), 0.0, 1.0)
            b_out = tl.load(start.p_out + o_number, mask=m_feature, other=0.0).to(tl.float32)
        for i_part in range(0, i_count, PARTS):
            o_part = i_part + tl.arange(0, PARTS)
            m_part = o_part < i_count
            o_part = (i_b * num_parts + i_first + o_part) * H + i_h
            # [PARTS]
            b_lse = tl.load(part.p_lse + o_part, mask=m_part, other=float("-inf"))
            i_larger = tl.maximum(i_max, tl.max(b_lse, axis=0))
            i_level = level_of(i_larger)
            b_weight = tl.exp2(b_lse - i_level)
            i_fade = tl.exp2(i_max - i_level)
            i_sum = i_sum * i_fade + tl.sum(b_weight, axis=0)
            # [PARTS, BLOCK_D], then [BLOCK_D]
            p_tile = part.p_out + (o_part * D)[:, None] + o_feature[None, :]
            b_part = tl.load(p_tile, mask=m_part[:, None] & m_feature[None, :], other=0.0)
            b_out = b_out * i_fade + tl.sum(b_weight[:, None] * b_part, axis=0)
            i_max = i_larger
        i_empty = i_sum == 0
        i_lse = tl.where(i_empty, float("-inf"), i_max + tl.log2(i_sum))
        b_out = tl.where(i_empty, 0.0, b_out / tl.where(i_empty, 1.0, i_sum))
        tl.store(p_out + o_number, b_out.to(p_out.dtype.element_ty), mask=m_feature)
        tl.store(p_lse + i_number, i_lse * LN2)
        tl.store(p_saved + i_number, tl.where(i_empty, float("inf"), i_lse))


@triton.jit(do_not_specialize=["N", "H", "num_split", "num_parts"])
def add_parts_kernel(
    p_part, p_sum, p_split, N, H, num_split, num_parts,
    D: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr = False,
):  # fmt: skip
    """sum [B, N, H, D] of split rows, from the sums of their parts [B, parts, H, D]. With ADD, they
    are added to what `p_sum` holds."""
    i_b, i_h, i_row, i_first, i_count = split_of_program(p_split, num_split, H)
    if i_row >= 0:
        BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
        o_feature = tl.arange(0, BLOCK_D)
        m_feature = o_feature < D
        b_sum = tl.zeros([BLOCK_D], tl.float32)
        for i_part in range(0, i_count, PARTS):
            o_part = i_part + tl.arange(0, PARTS)
            p_tile = p_part + (((i_b * num_parts + i_first + o_part) * H + i_h) * D)[:, None]
            m_tile = (o_part < i_count)[:, None] & m_feature[None, :]
            b_part = tl.load(p_tile + o_feature[None, :], mask=m_tile, other=0.0)
            b_sum += tl.sum(b_part, axis=0)
        p_row = p_sum + ((i_b * N + i_row) * H + i_h) * D + o_feature
        if ADD:
            b_sum += tl.load(p_row, mask=m_feature, other=0.0)
        tl.store(p_row, b_sum.to(p_sum.dtype.element_ty), mask=m_feature)


def launch_over_split(kernel: Any, rows: Rows, result: Tensor, **arguments: Any) -> None:
    """Starts a kernel that puts the parts of split rows together, in `result` [B, rows, heads, D].

    `arguments` are those that only this kernel takes. Without split rows nothing is started.
    """
    B, N, H, D = result.shape
    if not rows.num_parts:
        return
    launch(
        kernel,
        (B * H * len(rows.split),),
        **arguments,
        p_split=rows.split,
        N=N,
        H=H,
        num_split=len(rows.split),
        num_parts=rows.num_parts,
        D=D,
        PARTS=PARTS,
        num_warps=4,
        num_stages=1,
    )
