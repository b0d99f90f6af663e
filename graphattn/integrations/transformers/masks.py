"""The mask function that belongs to "graphattn", and how it tells attention what it knows.

transformers builds a mask once per forward and hands it to every layer. A mask that is a plain band
of offsets (causal, sliding window, bidirectional), perhaps with padding, needs no N x N tensor: it
becomes a *sketch*, an int8 tensor [B, P, 1, n] that holds which of the n keys are real, and whose
second size P says which band it is (the table below numbers them). Shapes survive what masks go
through on their way, copies, ``contiguous()``, checkpointing, other devices, where an attribute of
the tensor would be lost; and int8 is what no other mask is. Everything else is a dense boolean
mask, exact by transformers' own construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from graphattn.integrations.transformers.bands import EVERYTHING, FAR, Band, band_of
from graphattn.integrations.transformers.options import has_places


class Plain(NamedTuple):
    """What a sketch says: a band, and whether any key is padding."""

    band: Band
    padded: bool


PLAIN: list[Plain] = []  # a sketch with P = 1 + i means PLAIN[i]


def graph_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
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
    """Return None for all-causal or all-seeing masks, a sketch for plain ones, or a dense mask.

    The interface is that of ``transformers.masking_utils.sdpa_mask``. Query q stands at position
    ``q_offset + q`` and key k at ``kv_offset + k``. Sketches end with the key at the position of
    the last query: what a static cache holds beyond is cut off.
    """
    plain = allow_is_causal_skip or allow_is_bidirectional_skip
    compiling = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor) and not compiling:
        q_offset = int(q_offset)  # a static cache's own counter, which moves on: read it at once
    if isinstance(q_offset, int):
        num_keys = q_offset + q_length - kv_offset
        band = band_of(mask_function) if plain and q_length > 1 and num_keys >= q_length else None
        if band is not None and (
            num_keys == kv_length or (num_keys < kv_length and not band.after)
        ):
            padding = _padding(attention_mask, kv_offset, num_keys, device)
            return _sketch(band, padding, batch_size, q_length, num_keys, kv_length, device)
    elif q_length > 1 and has_places(config):
        raise NotImplementedError(
            "a window or graph of configure() needs to know where queries stand, which a static "
            "cache does not tell inside torch.compile: run the prompt outside of it (as generate() "
            "does), or use a dynamic cache"
        )
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and q_length == 1,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )
    if mask is None or compiling or not isinstance(q_offset, int):
        return mask
    num_keys = q_offset + q_length - kv_offset
    if 1 < q_length <= num_keys < kv_length and not mask[..., num_keys:].any():
        return mask[..., :num_keys]  # room of a static cache: the last key is the last query's
    return mask


def _padding(
    attention_mask: Tensor | None, kv_offset: int, num_keys: int, device: Any
) -> Tensor | None:
    """Which keys are real, bool [B, n]; None where all are."""
    if attention_mask is None:
        return None
    real = attention_mask[:, kv_offset : kv_offset + num_keys].to(device=device, dtype=torch.bool)
    if real.shape[1] < num_keys:  # as transformers reads a mask that is too short
        real = torch.nn.functional.pad(real, (0, num_keys - real.shape[1]))
    return real if torch.compiler.is_compiling() or not real.all() else None


def _sketch(
    band: Band,
    padding: Tensor | None,
    batch_size: int,
    q_length: int,
    num_keys: int,
    kv_length: int,
    device: Any,
) -> Tensor | None:
    band = Band(*(FAR if reach >= num_keys - 1 else reach for reach in band))
    seen_by_all = band == EVERYTHING or (band == Band(FAR, 0) and q_length == num_keys)
    if padding is None and seen_by_all and num_keys == kv_length:
        return None  # attention knows this mask from whether its module is causal
    number = _number(Plain(band, padding is not None))
    if padding is None:
        padding = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    sketch = padding.to(torch.int8)[:, None, None, :]
    return sketch.expand(batch_size, number, 1, num_keys)


def _number(plain: Plain) -> int:
    if plain not in PLAIN:
        PLAIN.append(plain)
    return 1 + PLAIN.index(plain)


def is_sketch(mask: Tensor | None) -> bool:
    """Whether a mask is a sketch, an int8 tensor whose shape says what it is."""
    return mask is not None and mask.dtype == torch.int8


def read_sketch(sketch: Tensor) -> tuple[Band, Tensor | None, int]:
    """Return the band, the real keys (bool [B, n], or None for all), and n."""
    number = sketch.shape[1]
    if sketch.dim() != 4 or sketch.shape[2] != 1 or not 1 <= number <= len(PLAIN):
        raise ValueError(
            f"attention_mask of dtype int8 must come from graphattn's own mask function, got shape "
            f"{list(sketch.shape)}; give a bool mask (True: is seen) or a float mask (is added)"
        )
    band, padded = PLAIN[number - 1]
    return band, (sketch[:, 0, 0].bool() if padded else None), sketch.shape[-1]
