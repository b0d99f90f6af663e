"""The mask function of the implementation "graphattn", and the form of its masks.

transformers builds a mask once per forward pass and passes it to every layer. A mask that is a
plain band of offsets (causal, sliding window, bidirectional), perhaps with padding, needs no N x N
tensor: it becomes a *sketch*, an int8 tensor [B, P, R, n]. Its contents say which of the n keys are
    real, and its sizes P and R say which band it is. Shapes survive copies, ``contiguous()``,
    checkpointing, other devices and other processes, where an attribute of the tensor or a separate
    table would be lost. No mask of transformers has dtype int8. Everything else is a dense boolean
    mask, made by transformers itself.

| size | says |
|---|---|
| P = 1 | the band has no end |
| P = 2 + w | it ends w tokens before the query, and as many after it if it is not causal |
| R = 2 or 3 | causal, and every key is real |
| R = 4 or 5 | causal, and some keys are padding |
| R = 6 or 7 | both sides, and every key is real |
| R = 8 or 9 | both sides, and some keys are padding |
| R + 8 | a layer may have more keys: empty places of a static cache if causal, else keys to see |

Of the two values of R, the one that differs from the number of queries is used, so that an int8
mask of a user (with one row per query, or one row for all) is never read as a sketch.

A dense mask of a static cache has one row more than queries. It says which places are filled. If a
layer has more keys than its mask, and the mask does not allow for it, :func:`fitted` raises an
error: the newest keys would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from graphattn.integrations.transformers.masks.bands import EVERYTHING, FAR, MaskBand, band_of
from graphattn.integrations.transformers.options import has_places

MORE = 8  # added to R if a layer may have more keys than its sketch


def graph_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return a sketch for a plain mask, or a dense mask; None if a single query sees everything.

    The interface is that of ``transformers.masking_utils.sdpa_mask``. Query q has the position
    ``q_offset + q`` and key k has ``kv_offset + k``. A sketch ends with the key at the position of
    the last query; later places of a static cache are cut off.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        # Counters of a static cache, which change later: read them now.
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    if attention_mask is not None:
        attention_mask = attention_mask.to(torch.bool)
    num_keys = None  # number of keys up to that of the last query
    if isinstance(q_offset, int) and isinstance(kv_offset, int):
        num_keys = q_offset + q_length - kv_offset
    elif q_length > 1 and has_places(config):
        raise NotImplementedError(
            "a window or graph of configure() needs the positions of queries, which a static "
            "cache does not have inside torch.compile: run the prompt without torch.compile (as "
            "generate() does), or use a dynamic cache"
        )
    if q_length > 1 and (allow_is_causal_skip or allow_is_bidirectional_skip):
        whole = band_of(mask_function)
        band = None if whole is None else _placed(whole, num_keys, q_length, kv_length, config)
        if band is not None:
            n = kv_length if num_keys is None or band == EVERYTHING else num_keys
            padding = _padding(attention_mask, kv_offset, n, device)
            # Even a full causal mask is a sketch, not None, because it says how many keys it has.
            more = n < kv_length or (whole == EVERYTHING and padding is None)
            return _sketch(band, padding, batch_size, q_length, n, more, device)
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        # One query sees all keys, unless a static cache has empty places after it.
        allow_is_causal_skip=allow_is_causal_skip and q_length == 1 and num_keys == kv_length,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and q_length == 1,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )
    if mask is None or compiling or num_keys is None:
        return mask
    if 1 < q_length <= num_keys < kv_length and not mask[..., num_keys:].any():
        filled = torch.arange(kv_length, device=mask.device) < num_keys
        return torch.cat([mask, filled.expand(*mask.shape[:2], 1, -1)], dim=2)
    return mask


def _placed(
    band: MaskBand, num_keys: int | None, q_length: int, kv_length: int, config: Any
) -> MaskBand | None:
    """Return the band for a sketch, for queries that are the last of the keys, or None."""
    if num_keys is not None and q_length <= num_keys <= kv_length:
        short = MaskBand(*(FAR if reach >= num_keys - 1 else reach for reach in band))
        if num_keys == kv_length:
            return short if short.after in (0, short.before) else None
        if band.after == 0:
            return short
    # If everything is seen, as in cross-attention, only a window needs positions.
    return band if band == EVERYTHING and not has_places(config) else None


def _padding(
    attention_mask: Tensor | None, kv_offset: Any, num_keys: int, device: Any
) -> Tensor | None:
    """Return which keys are real, bool [B, n]; None if all are."""
    if attention_mask is None:
        return None
    real = attention_mask[:, kv_offset : kv_offset + num_keys].to(device)
    if real.shape[1] < num_keys:  # as in transformers, for a mask that is too short
        real = torch.nn.functional.pad(real, (0, num_keys - real.shape[1]))
    return real if torch.compiler.is_compiling() or not real.all() else None


def _sketch(
    band: MaskBand,
    padding: Tensor | None,
    batch_size: int,
    q_length: int,
    num_keys: int,
    more: bool,
    device: Any,
) -> Tensor:
    """Make the sketch of a band, by the table above."""
    padded = padding is not None
    if padding is None:
        padding = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    ends = 1 if band.before == FAR else 2 + band.before
    kind = 2 + 2 * padded + 4 * (band.after != 0) + MORE * more
    rows = kind + (kind == q_length)
    return padding.to(torch.int8)[:, None, None, :].expand(batch_size, ends, rows, num_keys)


def is_sketch(mask: Tensor | None) -> bool:
    """Return whether a mask is a sketch, an int8 tensor."""
    return mask is not None and mask.dtype == torch.int8


def read_sketch(
    sketch: Tensor, num_targets: int | None = None
) -> tuple[MaskBand, Tensor | None, int]:
    """Return the band, the real keys (bool [B, n], or None for all), and n.

    The number of queries distinguishes other int8 masks, which are refused, from a sketch.
    """
    shape = sketch.shape
    if sketch.dim() != 4 or not 2 <= shape[2] <= 9 + MORE or shape[2] == num_targets:
        raise ValueError(
            "attention_mask of dtype int8 must come from graphattn's own mask function, got shape "
            f"{list(shape)}: pass a bool mask (True: is seen) or a float mask (is added)"
        )
    before = FAR if shape[1] == 1 else shape[1] - 2
    kind = (shape[2] - 2) % MORE // 2 + 1
    band = MaskBand(before, 0 if kind <= 2 else before)
    return band, (sketch[:, 0, 0].bool() if kind in (2, 4) else None), shape[3]


def fitted(mask: Tensor | None, num_targets: int, num_keys: int) -> Tensor | None:
    """Return the mask of one call with `num_keys` keys, without the empty places of a static cache.

    It raises a ValueError if the mask has another number of keys, unless the places after them are
    empty, or every key is seen.
    """
    if mask is None:
        return None
    n = mask.shape[-1]
    if is_sketch(mask):
        band, _, _ = read_sketch(mask, num_targets)
        more = mask.shape[2] >= 2 + MORE
        if more and band == EVERYTHING:
            return mask[..., :1].expand(*mask.shape[:3], num_keys)
        if n < num_keys if more else n == num_keys:
            return mask
    elif n == num_keys:
        return without_empty_places(mask, num_targets)
    raise ValueError(
        f"attention_mask must have {num_keys} keys, the number of keys of this call, got "
        f"{n}: layers of a cache (past_key_values) must hold equally many tokens, and "
        "attention_mask must cover the tokens of the cache and the new ones"
    )


def without_empty_places(mask: Tensor, num_targets: int) -> Tensor:
    """Remove the last row of a dense mask of a static cache, and the places that it calls empty."""
    if mask.dim() != 4 or mask.dtype != torch.bool or mask.shape[2] != num_targets + 1:
        return mask
    filled = int(mask[0, 0, -1].sum())
    return mask[:, :, :-1, :filled] if num_targets <= filled < mask.shape[-1] else mask
