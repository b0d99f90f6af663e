"""Attention over a window, forward, for Hopper: warps share the work by what they do.

It computes what ``band_forward_kernel`` of :mod:`graphattn.kernels.bands.forward` computes, for
windows over one sequence. A program stays on its multiprocessor and takes one tile of targets after
another (a persistent kernel). Of its warps

- one copies tiles of queries, keys and values to shared memory (:func:`copy_tiles`), as far ahead
  as there are buffers. A copy of a tile is one instruction of one thread: the hardware computes the
  addresses, from a tensor map (TMA);
- groups of four attend, each for 64 targets of its own (:func:`attend`). The groups are not in
  step: while one forms products, another computes exponentials. Within a group, weights times
  values of one tile are formed while the weights of the next tile are computed (Shah et al. 2024,
  FlashAttention-3, algorithm 2).

Buffers of keys and values form a ring of STAGES. Each has two barriers (``mbarrier``): `full` is
complete when the bytes of a tile have arrived, `free` when all groups have read it. Tile number n
of a program lies in buffer n % STAGES, and its phase of these barriers is n // STAGES. Queries have
a buffer and two barriers per group.

Logits are scale * a, and the affinity a is q . k, or q . k - ||k||^2 / 2 for RBF attention. What
RBF subtracts is the beginning of the product's sum. It is copied with the keys.
"""

from __future__ import annotations

from functools import cache

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

from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.row_dots import row_dots

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # before 3.9

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # targets of a group of four warps: a product of wgmma has so many rows
COLUMNS = 64
STAGES = 4
GROUPS = {64: 3, 128: 2}  # by width of a head; their sums are in registers
# Registers of a thread: 65536 for all, less those of the four warps of which one copies.
REGISTERS = {64: 160, 128: 232}
REGISTERS_TO_COPY = gl.constexpr(24)
H200 = 132  # multiprocessors


@gluon.jit
def tile_of(i_work, num_tiles, heads):
    """Batch entry, head and tile of a piece of work. Heads vary fastest, as in `heads_first`."""
    i_h = i_work % heads
    i_rest = i_work // heads
    return i_rest // num_tiles, i_h, i_rest % num_tiles


@gluon.jit
def sources_of(i_row, n_rows, band):
    """Return the first source that the targets from `i_row` on see, and the one after the last.

    `band` has the number of tokens, and how many a token sees before and after itself. The first is
    rounded down to a multiple of 4: a bulk copy, also of half squares, begins at a multiple of 16
    bytes.
    """
    n_tokens, n_before, n_after = band
    i_end = gl.minimum(i_row + n_rows, n_tokens) + n_after
    return gl.maximum(i_row - n_before, 0) // 4 * 4, gl.minimum(i_end, n_tokens)


@gluon.jit
def copy_tiles(
    query, key, value, half_square, turns, ring, work, band,
    REPEATS: gl.constexpr, RBF: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of all work of a program, in the order in which they are read."""
    num_work, num_tiles, H = work
    queries, query_full, query_free = turns
    keys, values, half_squares, full, free = ring
    GROUPS: gl.constexpr = queries.shape[0]
    STAGES: gl.constexpr = keys.shape[0]
    COLUMNS: gl.constexpr = keys.shape[1]
    WIDTH: gl.constexpr = keys.shape[2]
    BYTES: gl.constexpr = 2 * (2 * COLUMNS * WIDTH) + (4 * COLUMNS if RBF else 0)
    n_tokens = band[0]
    i_slot = 0
    i_parity = 0
    for i_work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        i_b, i_h, i_tile = tile_of(i_work, num_tiles, H)
        i_key_head = i_h // REPEATS
        i_row = i_tile * (GROUPS * ROWS)
        for i in gl.static_range(GROUPS):
            mbarrier.wait(query_free.index(i), i_parity ^ 1)
            mbarrier.expect(query_full.index(i), 2 * ROWS * WIDTH)
            i_place = i_b * n_tokens + i_row + i * ROWS
            copy_tile(query, [i_place, i_h * WIDTH], query_full.index(i), queries.index(i))
        i_begin, i_end = sources_of(i_row, GROUPS * ROWS, band)
        for i_column in range(i_begin, i_end, COLUMNS):
            i_stage = i_slot % STAGES
            b_full = full.index(i_stage)
            mbarrier.wait(free.index(i_stage), i_slot // STAGES & 1 ^ 1)
            mbarrier.expect(b_full, BYTES)
            i_place = i_b * n_tokens + i_column
            copy_tile(key, [i_place, i_key_head * WIDTH], b_full, keys.index(i_stage))
            copy_tile(value, [i_place, i_key_head * WIDTH], b_full, values.index(i_stage))
            if RBF:
                i_place = (i_b * (H // REPEATS) + i_key_head) * n_tokens + i_column
                copy_tile(half_square, [i_place], b_full, half_squares.index(i_stage))
            i_slot += 1
        i_parity ^= 1


@gluon.jit
def pass_over(ring, i_slot, count):
    """Lets `count` tiles pass that other groups read. Returns the next tile's number."""
    _keys, _values, _half_squares, full, free = ring
    STAGES: gl.constexpr = full.shape[0]
    for _i in range(count):
        # Without the wait, this could arrive in a phase that has begun before.
        mbarrier.wait(full.index(i_slot % STAGES), i_slot // STAGES & 1)
        mbarrier.arrive(free.index(i_slot % STAGES))
        i_slot += 1
    return i_slot


@gluon.jit
def begin_affinities(b_query, ring, i_stage, LOGITS: gl.constexpr, RBF: gl.constexpr):
    """Begins the product with the keys of a buffer: affinities [ROWS, COLUMNS], when it is done."""
    keys, _values, half_squares, _full, _free = ring
    COLUMNS: gl.constexpr = keys.shape[1]
    b_start = gl.zeros([ROWS, COLUMNS], gl.float32, LOGITS)
    if RBF:
        b_half_square = half_squares.index(i_stage).load(gl.SliceLayout(0, LOGITS))
        b_start = b_start - b_half_square[None, :]
    b_key = keys.index(i_stage).permute((1, 0))
    return warpgroup_mma(b_query, b_key, b_start, use_acc=RBF, is_async=True)


@gluon.jit
def only_edges(b_affinity, i_row, i_column, band, LOGITS: gl.constexpr):
    """Affinities with -inf where target i_row + r does not see source i_column + c.

    As in `within_reach`: a target has `n_row` edges from `o_first` on, one unsigned comparison.
    """
    n_tokens, n_before, n_after = band
    o_row = i_row + gl.arange(0, b_affinity.shape[0], gl.SliceLayout(1, LOGITS))
    o_column = i_column + gl.arange(0, b_affinity.shape[1], gl.SliceLayout(0, LOGITS))
    o_first = gl.maximum(o_row - n_before, 0)
    n_row = gl.maximum(gl.minimum(o_row + n_after + 1, n_tokens) - o_first, 0)
    o_place = (o_column[None, :] - o_first[:, None]).to(gl.uint32)
    return gl.where(o_place < n_row.to(gl.uint32)[:, None], b_affinity, float("-inf"))


@gluon.jit
def weigh(b_affinity, b_sum, b_max, i_scale):
    """Weights [ROWS, COLUMNS] of a tile, and the running sums and maxima [ROWS].

    `b_fade` [ROWS] is what the sums so far are multiplied by, because they get a new maximum.
    """
    b_larger = gl.maximum(b_max, gl.max(b_affinity, axis=1))
    b_level = gl.where(b_larger == float("-inf"), 0.0, b_larger) * i_scale
    b_weight = gl.exp2(b_affinity * i_scale - b_level[:, None])
    b_fade = gl.exp2(b_max * i_scale - b_level)
    return b_weight, b_fade, b_sum * b_fade + gl.sum(b_weight, axis=1), b_larger


@gluon.jit
def attend(outputs, p_scale, turns, ring, work, band, RBF: gl.constexpr, GROUP: gl.constexpr):
    """Attends for the targets of one group, [ROWS] of every tile of the program."""
    p_out, p_lse, p_saved, p_again = outputs
    num_work, num_tiles, H = work
    queries, query_full, query_free = turns
    keys, values, _half_squares, full, free = ring
    GROUPS: gl.constexpr = queries.shape[0]
    STAGES: gl.constexpr = keys.shape[0]
    COLUMNS: gl.constexpr = keys.shape[1]
    WIDTH: gl.constexpr = keys.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, LOGITS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    n_tokens, n_before, n_after = band
    i_slot = 0
    i_parity = 0
    for i_work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        i_b, i_h, i_tile = tile_of(i_work, num_tiles, H)
        i_first = i_tile * (GROUPS * ROWS)
        i_row = i_first + GROUP * ROWS
        i_scale = gl.load(p_scale + i_h) * LOG2E
        mbarrier.wait(query_full.index(GROUP), i_parity)
        b_query = queries.index(GROUP).load(QUERIES)
        fence_async_shared()  # between these reads and the next copy to the same place
        mbarrier.arrive(query_free.index(GROUP))
        i_parity ^= 1
        if RBF:
            b_wide = b_query.to(gl.float32)
            b_half_square = gl.convert_layout(0.5 * gl.sum(b_wide * b_wide, axis=1), OF_ROWS)
        else:  # a scale must be positive, as in `band_forward_kernel`
            b_query = (b_query.to(gl.float32) * gl.where(i_scale < 0, -1.0, 1.0)).to(keys.dtype)
            i_scale = gl.abs(i_scale)
            i_scale = gl.where(i_scale == 0, 1e-30, i_scale)

        # Of the tiles of sources that are copied, this group reads those from n_skipped to n_end.
        i_begin, i_end = sources_of(i_first, GROUPS * ROWS, band)
        i_from, i_to = sources_of(i_row, ROWS, band)
        n_all = gl.cdiv(i_end - i_begin, COLUMNS)
        n_skipped = gl.minimum((i_from - i_begin) // COLUMNS, n_all)
        n_end = gl.maximum(gl.cdiv(i_to - i_begin, COLUMNS), n_skipped)
        b_out = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
        b_sum = gl.zeros([ROWS], gl.float32, OF_ROWS)
        b_max = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
        i_slot = pass_over(ring, i_slot, n_skipped)
        if n_skipped < n_end:
            i_column = i_begin + n_skipped * COLUMNS
            i_stage = i_slot % STAGES
            mbarrier.wait(full.index(i_stage), i_slot // STAGES & 1)
            b_product = begin_affinities(b_query, ring, i_stage, LOGITS, RBF)
            b_affinity = warpgroup_mma_wait(0, deps=[b_product])
            b_affinity = only_edges(b_affinity, i_row, i_column, band, LOGITS)
            b_weight, b_fade, b_sum, b_max = weigh(b_affinity, b_sum, b_max, i_scale)
            b_weight = gl.convert_layout(b_weight.to(keys.dtype), WEIGHTS)
            i_slot += 1
            has_next = n_skipped + 1 < n_end
            mbarrier.wait(full.index(i_slot % STAGES), i_slot // STAGES & 1, pred=has_next)
            for i in range(n_skipped + 1, n_end):
                i_before = i_stage
                i_stage = i_slot % STAGES
                i_column += COLUMNS
                b_product = begin_affinities(b_query, ring, i_stage, LOGITS, RBF)
                b_sums = warpgroup_mma(b_weight, values.index(i_before), b_out, is_async=True)
                b_affinity = warpgroup_mma_wait(1, deps=[b_product])
                is_first_seen = i_column >= i_row + ROWS - 1 - n_before
                i_last = i_column + COLUMNS - 1
                if not (is_first_seen & (i_last <= i_row + n_after) & (i_last < n_tokens)):
                    b_affinity = only_edges(b_affinity, i_row, i_column, band, LOGITS)
                b_next, b_fade, b_sum, b_max = weigh(b_affinity, b_sum, b_max, i_scale)
                i_slot += 1
                # This wait is here, because without a branch ptxas moves the next wait, that for
                # the sums, to before the exponentials. They would no longer be computed meanwhile.
                has_next = i + 1 < n_end
                mbarrier.wait(full.index(i_slot % STAGES), i_slot // STAGES & 1, pred=has_next)
                b_out, b_weight = warpgroup_mma_wait(0, deps=[b_sums, b_weight])
                mbarrier.arrive(free.index(i_before))
                b_out = b_out * gl.convert_layout(b_fade, gl.SliceLayout(1, SUMS))[:, None]
                b_weight = gl.convert_layout(b_next.to(keys.dtype), WEIGHTS)
            b_out = warpgroup_mma(b_weight, values.index(i_stage), b_out)
            mbarrier.arrive(free.index(i_stage))
        i_slot = pass_over(ring, i_slot, n_all - n_end)

        # [ROWS]: whether there are no edges; base-2 log-sums
        m_empty = b_sum == 0
        b_saved = b_max * i_scale + gl.log2(b_sum)
        b_true = b_saved
        if RBF:
            b_true = b_saved - i_scale * b_half_square
        o_row = i_row + gl.arange(0, ROWS, OF_ROWS)
        o_number = (i_b * H + i_h).to(gl.int64) * n_tokens + o_row
        m_row = o_row < n_tokens
        gl.store(p_lse + o_number, gl.where(m_empty, float("-inf"), b_true * LN2), mask=m_row)
        gl.store(p_saved + o_number, gl.where(m_empty, float("inf"), b_saved), mask=m_row)
        if i_row < n_tokens:
            b_zero = gl.sum(b_out * 0.0, axis=1)  # NaN if something is NaN or infinite
            i_number = (i_b * gl.cdiv(n_tokens, ROWS) + i_row // ROWS) * H + i_h
            gl.store(p_again + i_number, gl.max((b_zero != 0.0).to(gl.int32), axis=0))
        b_inverse = gl.where(m_empty, 0.0, 1.0 / gl.where(m_empty, 1.0, b_sum))
        b_out = b_out * gl.convert_layout(b_inverse, gl.SliceLayout(1, SUMS))[:, None]
        b_out = gl.convert_layout(b_out.to(p_out.dtype.element_ty), STORED)
        o_row = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
        o_feature = gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))
        p_row = p_out + ((i_b.to(gl.int64) * n_tokens + o_row) * H + i_h) * WIDTH
        gl.store(p_row[:, None] + o_feature[None, :], b_out, mask=(o_row < n_tokens)[:, None])


@gluon.jit(do_not_specialize=["N", "H", "n_before", "n_after", "num_tiles", "num_work"])
def window_forward_kernel(
    query, key, value, half_square, p_out, p_lse, p_saved, p_again, p_scale, N, H, n_before,
    n_after, num_tiles, num_work, REPEATS: gl.constexpr, RBF: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output [B, N, H, D], log-sums [B, H, N] and base-2 log-sums for the backward [B, H, N].

    These are those of `band_forward_kernel`. `p_again` [B, N / 64, H] says which 64 targets have
    sums that are NaN or infinite.
    """
    COLUMNS: gl.constexpr = key.block_type.shape[0]
    WIDTH: gl.constexpr = key.block_type.shape[1]
    queries = gl.allocate_shared_memory(query.dtype, [GROUPS, ROWS, WIDTH], query.layout)
    keys = gl.allocate_shared_memory(key.dtype, [STAGES, COLUMNS, WIDTH], key.layout)
    values = gl.allocate_shared_memory(value.dtype, [STAGES, COLUMNS, WIDTH], value.layout)
    half_squares = keys  # not read
    if RBF:
        half_squares = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], half_square.layout)
    query_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(query_full.index(i), count=1)
        mbarrier.init(query_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()  # so that bulk copies see these barriers
    # Tuples that a kernel makes would turn constants into numbers, so those are not in them.
    work = (num_work, num_tiles, H)
    band = (N, n_before, n_after)
    turns = (queries, query_full, query_free)
    ring = (keys, values, half_squares, full, free)
    outputs = (p_out, p_lse, p_saved, p_again)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (attend, (outputs, p_scale, turns, ring, work, band, RBF, 0)),
                (attend, (outputs, p_scale, turns, ring, work, band, RBF, 1)),
                (attend, (outputs, p_scale, turns, ring, work, band, RBF, 2)),
                (
                    copy_tiles,
                    (query, key, value, half_square, turns, ring, work, band, REPEATS, RBF),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS_TO_COPY],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (outputs, p_scale, turns, ring, work, band, RBF, 0)),
                (attend, (outputs, p_scale, turns, ring, work, band, RBF, 1)),
                (
                    copy_tiles,
                    (query, key, value, half_square, turns, ring, work, band, REPEATS, RBF),
                ),
            ],
            [4, 1],
            [REGISTERS, REGISTERS_TO_COPY],
        )


def forward(
    inputs: BandInputs, dtype: torch.dtype | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Attend as :func:`graphattn.kernels.bands.forward.forward`; `choice` says for which inputs.

    Also returns flags [B, tiles of ROWS targets, H] of tiles whose sums are NaN or infinite. Those
    are to be computed again, carefully.
    """
    x = inputs
    B, N, H, D = x.query.shape
    before, after = x.bands.on_cpu[0, 5:7].clamp(max=N).tolist()
    out = x.query.new_empty((B, N, H, D), dtype=dtype or x.query.dtype)
    lse = x.query.new_empty((B, H, N), dtype=torch.float32)
    saved = torch.empty_like(lse)
    half_squares = row_dots(x.key, x.key, 0.5) if x.rbf else None
    again = torch.empty((B, -(-N // ROWS.value), H), dtype=torch.int32, device=x.query.device)
    num_tiles = -(-N // (GROUPS[D] * ROWS.value))
    launch(
        window_forward_kernel,
        (min(B * H * num_tiles, multiprocessors()),),
        query=_rows(x.query, ROWS.value),
        key=_rows(x.key, COLUMNS),
        value=_rows(x.value, COLUMNS),
        half_square=None if half_squares is None else _numbers(half_squares, COLUMNS),
        p_out=out,
        p_lse=lse,
        p_saved=saved,
        p_again=again,
        p_scale=x.scale,
        N=N,
        H=H,
        n_before=before,
        n_after=after,
        num_tiles=num_tiles,
        num_work=B * H * num_tiles,
        REPEATS=H // x.key.shape[2],
        RBF=x.rbf,
        GROUPS=GROUPS[D],
        STAGES=STAGES,
        REGISTERS=REGISTERS[D],
        num_warps=4,
        num_stages=1,
    )
    return (out, lse, saved), again


def multiprocessors() -> int:
    """How many programs are started: one for every multiprocessor of the current device."""
    return _multiprocessors() if torch.cuda.is_available() else H200


@cache
def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _rows(x: Tensor, rows: int) -> TensorDescriptor:
    """A tensor map of x [B, N, H, D], whose rows are tokens, in tiles of one head."""
    B, N, H, D = x.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, [B * N, H * D], [x.stride(1), 1], [rows, D], layout)


def _numbers(x: Tensor, count: int) -> TensorDescriptor:
    """A tensor map of the numbers of a contiguous float32 tensor, `count` at a time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(x, [x.numel()], [1], [count], layout)
