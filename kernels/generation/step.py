"""Generation, one token: a cache takes in its key and value, and it attends to its window.

One launch does both. A program takes one query head of one text. It holds the query, and goes over
the rows of the cache from the oldest to the newest. For the new token it uses the key and value
that were passed in, and does not read the cache, where another program may be writing them. RBF
logits are computed from differences, as in :mod:`graphattn.kernels.edges`, and so do not lose
digits if all tokens share an offset.

Without `top_k`, every slot of a tile has a running maximum of its own, and slots are merged at the
end. With `top_k`, the ranks of the whole window are held (logits as integers in the same order),
and the k-th largest is found by halving an interval
(:mod:`graphattn.kernels.shared.ordered_integers`). Of tokens that equal it, the oldest are kept.
Values of tokens that are not kept are not read.

A window is not split over programs. One multiprocessor takes 64 bytes a clock from the L2 cache,
127 GB/s, so a split could only save time if a window is long. A window of 256 bfloat16 tokens of 64
features has 64 KiB of keys and values, which takes 0.5 us. That is less than the start of a second
launch (2 us and more), which a split needs; with `top_k` it needs a third one. At 4096 tokens it is
8 us for 8 programs, of which a split would save about half. With 132 pairs of text and head or
more, there is a program for every multiprocessor, and a split saves nothing.
(This is arithmetic, not measured.)

Some arguments of the kernel may be None. Then there is no such option:

- p_log_sigma: logits are -||q - k||^2 / (2 sigma^2); otherwise scale q . k.
- p_values: values have a cache of their own; otherwise keys and values are one.
- top_k: so many tokens are kept; otherwise all.
- p_valids: the cache has a mask of valid tokens. p_valid: it says whether the new token is valid;
  otherwise it is.
- eps: it is added to the sum of exponentials. p_sink: that of a sink's logit is added, too.

Constants: REPEATS, D, BLOCK_D and SLOTS are those of
:meth:`graphattn.kernels.edges.inputs.EdgeInputs.common`, of one row, which is the window. CHUNKS
are the tiles of SLOTS tokens in a window, rounded up to a power of 2 (with `top_k`; otherwise 1).
SIGMAS are the numbers in `p_log_sigma`, one for each head or one for all, and STAGES the loads in
flight.

The beginnings of names are explained in :mod:`graphattn.kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LOG2E, level_of
from graphattn.kernels.shared.launch import Heads, launch
from graphattn.kernels.shared.layout import as_bytes, entry_of, load_rows, pointer_to
from graphattn.kernels.shared.ordered_integers import NO_EDGE, largest, logit_of, rank_of
from graphattn.kernels.shared.programs import heads_first


@triton.jit
def load_slots(p_valid, i_slot, first, held, room, SLOTS: tl.constexpr):
    """The next tokens, from the oldest on: places, masks of old ones and of the new one; [SLOTS].

    Token `i_slot` of the window lies at place first + i_slot of the cache, modulo `room`. The mask
    of old tokens has those that are valid; `p_valid` may be None.
    """
    o_slot = i_slot + tl.arange(0, SLOTS)
    o_place = first + o_slot
    o_place = tl.where(o_place >= room, o_place - room, o_place)
    m_old = o_slot < held - 1
    if p_valid is not None:
        m_old = m_old & (tl.load(p_valid + o_place, mask=m_old, other=0) != 0)
    return o_place.to(tl.int64), m_old, o_slot == held - 1


@triton.jit
def load_logits(
    b_query, b_new, i_scale, p_keys, o_place, m_old, m_new, D: tl.constexpr, RBF: tl.constexpr
):  # fmt: skip
    """Keys [SLOTS, BLOCK_D] and logits [SLOTS] of the next tokens.

    The new token's key `b_new` [BLOCK_D] is put into its slot, so that its logit is computed by the
    same instructions as all others, and equal keys have equal logits. Logits of slots that are
    neither old nor new are arbitrary.
    """
    b_key = load_rows(p_keys, o_place, m_old, D, D)
    b_key = tl.where(m_new[:, None], b_new[None, :], b_key)
    if RBF:
        b_apart = b_key - b_query[None, :]
        b_affinity = tl.sum(b_apart * b_apart, axis=1)
    else:
        b_affinity = tl.sum(b_key * b_query[None, :], axis=1)
    return b_key, b_affinity * i_scale


@triton.jit(do_not_specialize=["H", "first", "held", "room", "top_k"])
def window_step_kernel(
    query, key, value, p_valid, p_keys, p_values, p_valids, p_out, p_log_sigma, p_sink,
    scale, eps, H, first, held, room, top_k,
    REPEATS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr,
    SIGMAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output [B, H, D]; the caches [B * Hk, room, D] (and [B, room]) hold the new token, too."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    RBF: tl.constexpr = p_log_sigma is not None
    SHARED: tl.constexpr = p_values is None
    i_b, i_h, _i_tile = heads_first(1, H)
    i_key_head = i_h // REPEATS
    p_query = pointer_to(query, i_b, i_h)
    p_key, p_value = pointer_to(key, i_b, i_key_head), pointer_to(value, i_b, i_key_head)
    i_row = (i_b * (H // REPEATS) + i_key_head) * room
    p_keys += i_row * D
    p_values = p_keys if SHARED else p_values + i_row * D
    p_valids = entry_of(p_valids, i_b, room)
    o_feature = tl.arange(0, BLOCK_D)
    m_feature = o_feature < D

    # [BLOCK_D]; the new key and value are rounded to the dtype of the cache, as if read from it
    b_query = tl.load(p_query + o_feature, mask=m_feature, other=0.0).to(tl.float32)
    b_new_key = tl.load(p_key + o_feature, mask=m_feature, other=0.0)
    b_new_key = b_new_key.to(p_keys.dtype.element_ty)
    b_new_value = tl.load(p_value + o_feature, mask=m_feature, other=0.0)
    b_new_value = b_new_value.to(p_values.dtype.element_ty)
    i_newest = first + held - 1
    i_newest = tl.where(i_newest >= room, i_newest - room, i_newest).to(tl.int64)
    if i_h % REPEATS == 0:
        tl.store(p_keys + i_newest * D + o_feature, b_new_key, mask=m_feature)
        if not SHARED:
            tl.store(p_values + i_newest * D + o_feature, b_new_value, mask=m_feature)
    b_new_key, b_new_value = b_new_key.to(tl.float32), b_new_value.to(tl.float32)
    i_end = held  # how many tokens are gone over: none if the new token is padding
    if p_valids is not None:
        i_valid = tl.full([], 1, tl.uint8)
        if p_valid is not None:
            i_valid = tl.load(p_valid + i_b)
        if i_h == 0:
            tl.store(p_valids + i_newest, i_valid)
        i_end = tl.where(i_valid != 0, held, 0)
    i_scale = scale
    if RBF:
        i_log_sigma = tl.load(p_log_sigma + i_h % SIGMAS).to(tl.float32)
        i_scale = tl.exp(i_log_sigma * -2.0) * -0.5

    # [SLOTS, BLOCK_D]
    b_out = tl.zeros([SLOTS, BLOCK_D], tl.float32)
    if top_k is not None:
        o_chunk = tl.arange(0, CHUNKS)[:, None]
        # [CHUNKS, SLOTS]
        b_ranks = tl.full([CHUNKS, SLOTS], NO_EDGE, tl.int32)
        for i_slot in tl.range(0, i_end, SLOTS, num_stages=STAGES):
            o_place, m_old, m_new = load_slots(p_valids, i_slot, first, held, room, SLOTS)
            _, b_logit = load_logits(
                b_query, b_new_key, i_scale, p_keys, o_place, m_old, m_new, D, RBF
            )
            b_rank = tl.where(m_old | m_new, rank_of(b_logit), NO_EDGE)
            b_ranks = tl.where(o_chunk == i_slot // SLOTS, b_rank[None, :], b_ranks)
        # One row of all tokens, [1, tokens] and [tokens]
        m_kept = largest(tl.reshape(b_ranks, [1, CHUNKS * SLOTS]), top_k)
        m_kept = tl.reshape(m_kept, [CHUNKS * SLOTS])
        b_row = tl.reshape(b_ranks, [CHUNKS * SLOTS])
        b_row = tl.where(m_kept, logit_of(b_row), float("-inf"))
        i_level = level_of(tl.max(b_row, axis=0)) * LOG2E
        b_row = tl.exp2(b_row * LOG2E - i_level)
        i_sum = tl.sum(b_row, axis=0)
        # [CHUNKS, SLOTS]; weights are never negative, so -1 marks tokens whose value is not read
        b_weights = tl.reshape(tl.where(m_kept, b_row, -1.0), [CHUNKS, SLOTS])
        for i_slot in tl.range(0, i_end, SLOTS, num_stages=STAGES):
            o_place, m_old, m_new = load_slots(p_valids, i_slot, first, held, room, SLOTS)
            # [SLOTS]
            b_weight = tl.sum(tl.where(o_chunk == i_slot // SLOTS, b_weights, 0.0), axis=0)
            m_read = b_weight != -1.0
            # [SLOTS, BLOCK_D]
            b_value = load_rows(p_values, o_place, m_old & m_read, D, D)
            b_value = tl.where((m_new & m_read)[:, None], b_new_value[None, :], b_value)
            b_out = tl.fma(tl.where(m_read, b_weight, 0.0)[:, None], b_value, b_out)
        b_out = tl.sum(b_out, axis=0)
    else:
        b_max = tl.full([SLOTS], float("-inf"), tl.float32)
        b_sum = tl.zeros([SLOTS], tl.float32)
        for i_slot in tl.range(0, i_end, SLOTS, num_stages=STAGES):
            o_place, m_old, m_new = load_slots(p_valids, i_slot, first, held, room, SLOTS)
            b_key, b_logit = load_logits(
                b_query, b_new_key, i_scale, p_keys, o_place, m_old, m_new, D, RBF
            )
            # [SLOTS, BLOCK_D]
            b_value = b_key
            if not SHARED:
                b_value = load_rows(p_values, o_place, m_old, D, D)
                b_value = tl.where(m_new[:, None], b_new_value[None, :], b_value)
            # [SLOTS]
            b_logit = tl.where(m_old | m_new, b_logit * LOG2E, float("-inf"))
            b_larger = tl.maximum(b_max, b_logit)
            b_level = level_of(b_larger)
            b_weight, b_fade = tl.exp2(b_logit - b_level), tl.exp2(b_max - b_level)
            b_sum = b_sum * b_fade + b_weight
            # [SLOTS, BLOCK_D]
            b_out = b_out * b_fade[:, None] + b_weight[:, None] * b_value
            b_max = b_larger
        i_level = level_of(tl.max(b_max, axis=0))
        b_share = tl.exp2(b_max - i_level)
        i_sum = tl.sum(b_sum * b_share, axis=0)
        b_out = tl.sum(b_out * b_share[:, None], axis=0)
    i_total = i_sum
    if eps is not None:
        i_total += eps * tl.exp2(tl.minimum(0.0 - i_level, 126.0))
    if p_sink is not None:
        i_sink = tl.load(p_sink + i_h).to(tl.float32) * LOG2E
        i_total += tl.exp2(tl.minimum(i_sink - i_level, 126.0))
    b_out = tl.where(i_sum == 0, 0.0, b_out / tl.where(i_sum == 0, 1.0, i_total))
    p_out += (i_b * H + i_h) * D
    tl.store(p_out + o_feature, b_out.to(p_out.dtype.element_ty), mask=m_feature)


def window_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    first: int,
    held: int,
    window: int,
    log_sigma: Tensor | None,
    scale: float = 1.0,
    top_k: int | None = None,
    eps: float = 0.0,
    sink: Tensor | None = None,
    valid: Tensor | None = None,
    valids: Tensor | None = None,
) -> Tensor:
    """The output of a new token, [B, H, D]; its key and value are written into the caches.

    Args:
        query: [B, H, D], float32, float16 or bfloat16.
        key, value: [B, Hk, D], of the new token; Hk divides H.
        keys, values: [B * Hk, room, D], contiguous, written in place; may be one tensor, if `key`
            and `value` are. They are ring buffers: the oldest token is at place `first`, and the
            new one will be `held` - 1 places after it, modulo `room`.
        first: the place of the oldest token that is seen.
        held: how many tokens are seen, with the new one.
        window: how many may be seen at most; the kernel is compiled for this number.
        log_sigma: [H] or [1], for logits -||q - k||^2 / (2 sigma^2); None: scale q . k.
        top_k: how many sources every head keeps: those with the largest logits, and of equal ones
            the oldest. The window must then be at most `tuning.HELD_TOKENS`. None: all are kept.
        eps: >= 0, added to the sum of exponentials.
        sink: [H], logits that join that sum; None: none.
        valid: bool [B], whether the new tokens are real; None: they are.
        valids: bool [B, room], contiguous, which old tokens are real; written in place. Needed
            with `valid`. None: all are.
    """
    B, H, D = query.shape
    room = keys.shape[1]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty(B, H, D)
    choice = tuning.choose_for_edges("window_step", D, window)
    selects = top_k is not None and top_k < window
    launch(
        window_step_kernel,
        (B * H,),
        query=Heads.of(query[None]),
        key=Heads.of(key[None]),
        value=Heads.of(value[None]),
        p_valid=as_bytes(valid),
        p_keys=keys,
        p_values=None if values is keys else values,
        p_valids=as_bytes(valids),
        p_out=out,
        p_log_sigma=log_sigma,
        p_sink=sink,
        scale=scale,
        eps=eps or None,
        H=H,
        first=first,
        held=held,
        room=room,
        top_k=top_k if selects else None,
        REPEATS=H // key.shape[1],
        D=D,
        SLOTS=choice.columns,
        CHUNKS=tuning.power_of_2(triton.cdiv(window, choice.columns)) if selects else 1,
        SIGMAS=1 if log_sigma is None else log_sigma.numel(),
        STAGES=choice.num_stages,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        fp_fusion=not selects,  # equal keys must have equal logits, whichever lanes add them up
    )
    return out
