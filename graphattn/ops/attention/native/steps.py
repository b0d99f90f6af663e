"""Steps of generation by C++ code: the newest few tokens of texts attend to a cache.

The code is `kernels/cpu/steps.cpp`. A layer runs a step per token, so the part of a call that stays
the same is stored with the cache.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import KINDS, TokenView, address, view
from graphattn.ops.attention.logits.score import Score
from graphattn.ops.backends import why_no_step
from graphattn.ops.inputs import compute_dtype


class StepsCall(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/steps.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("texts", "queries", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("width", "value_width", "room", "first", "held")),
        ("lengths", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        *((name, TokenView) for name in ("query", "key", "value", "new_key", "new_value")),
        ("is_rbf", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("scale_step", ctypes.c_int64),
        ("is_log_sigma", ctypes.c_int64),
        ("same_scale", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("sink", "cosines", "sines")),
        ("turn_batch", ctypes.c_int64),
        ("valid", ctypes.c_void_p),
        ("new_valid", ctypes.c_void_p),
        ("new_valid_step", ctypes.c_int64),
        ("out", TokenView),
        ("lse", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


_LIBRARY = library.library()


class CacheCall:
    """The part of a call that stays the same while a layer's cache keeps its buffers.

    Args:
        layer: whose steps they are.
        key, value: buffers [texts * kv_heads, room, width]; one tensor where values are the keys.
        heads, kv_heads: of the layer.
        dtype: of its queries and new tokens.
    """

    def __init__(
        self,
        layer: object,
        key: Tensor,
        value: Tensor,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
    ) -> None:
        entries, room, width = key.shape
        self.layer = weakref.ref(layer)
        self.key, self.value, self.dtype = key, value, dtype
        self.features = heads * width
        self.is_double = dtype == torch.float64
        self.compute = torch.promote_types(dtype, torch.float32)
        kind = KINDS.get(dtype, 0)
        tokens = TokenView(None, heads * width, heads * width, width, kind)
        new = TokenView(None, kv_heads * width, kv_heads * width, width, kind)
        steps = kv_heads * room * width, width, room * width
        keys, values = (
            TokenView(x.data_ptr(), *steps, KINDS.get(x.dtype, 0)) for x in (key, value)
        )
        self.call = StepsCall(
            texts=entries // kv_heads,
            queries=1,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            value_width=width,
            room=room,
            query=tokens,
            key=keys,
            value=values,
            new_key=new,
            new_value=new,
            out=tokens,
            new_valid_step=1,
        )
        self.reference, self.address = ctypes.byref(self.call), ctypes.addressof(self.call)
        self.query, self.out = self.call.query, self.call.out
        self.new_key, self.new_value = self.call.new_key, self.call.new_value

    def serves(self, layer: object, key: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
        """Whether this call was made for this layer, these buffers and this dtype."""
        same = self.key is key and self.value is value
        return same and self.layer() is layer and self.dtype is dtype

    def fits(self, layer: object, x: Any, buffers: dict[str, Tensor]) -> bool:
        """Whether tokens and a cache fit this call; the size of the batch is not checked."""
        return (
            self.layer() is layer
            and buffers["key"] is self.key
            and type(x) is Tensor
            and x.dtype is self.dtype
            and x.is_cpu
            and x.shape[-1:] == (self.features,)
        )

    def reads(self, *tokens: Tensor | None) -> bool:
        """Whether C++ code can read the results of projections without a copy."""
        return all(
            x is None
            or (x.is_cpu and x.dtype is self.dtype and x.is_contiguous() and not x.is_neg())
            for x in tokens
        )

    def prepare(
        self,
        first: int,
        held: int,
        log_sigma: Tensor | None,
        scale: float,
        top_k: int | None,
        softcap: float | None,
        eps: float,
        sink: Tensor | None,
        angles: tuple[Tensor, Tensor, int] | None,
        valid: Tensor | None,
        valids: Tensor | None,
    ) -> None:
        """Set everything about the next step but its tokens."""
        call, compute = self.call, self.compute
        call.first, call.held, call.threads = first, held, torch.get_num_threads()
        call.top_k, call.softcap, call.eps = top_k or 0, softcap or 0.0, eps
        if log_sigma is None:
            call.is_rbf, call.scale, call.same_scale = 0, None, scale
        else:
            log_sigma = log_sigma.to(compute).contiguous()
            call.is_rbf = call.is_log_sigma = 1
            call.scale, call.scale_step = log_sigma.data_ptr(), log_sigma.numel() > 1
        if sink is not None:
            sink = sink.to(compute).contiguous()
        call.sink = address(sink)
        call.valid, call.new_valid = address(valids), address(valid)
        if angles is None:
            call.cosines = None
        else:
            cosines, sines, place = angles
            hop = place * cosines.stride(0) * cosines.element_size()
            call.cosines, call.sines = cosines.data_ptr() + hop, sines.data_ptr() + hop
        self.alive = log_sigma, sink, angles, valid, valids  # as long as their addresses are used

    def run(self, query: Tensor, key: Tensor, value: Tensor | None) -> Tensor:
        """Compute the rows of the newest tokens of all texts, and add their keys and values.

        All tensors are contiguous and end in heads and features, in any shape; the output has the
        shape of `query`.
        """
        out = torch.empty_like(query)
        self.query.data, self.out.data = query.data_ptr(), out.data_ptr()
        self.new_key.data = key.data_ptr()
        self.new_value.data = None if value is None else value.data_ptr()
        assert _LIBRARY is not None
        status = _LIBRARY.graphattn_attention_steps(self.reference, self.is_double)
        if status:
            library.check(status)
        return out


def why_no_decoding(*tokens: Tensor) -> str | None:
    """The reason why :func:`decode` cannot run with such tensors; None if it can."""
    return next((reason for x in tokens if (reason := why_no_step(x)) is not None), None)


def readable(x: Tensor) -> Tensor:
    """x as C++ code reads it, or a copy: with the features of a token side by side in memory."""
    return x.contiguous().resolve_neg() if x.is_neg() or x.stride(-1) != 1 else x


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: int | list[int],
    score: Score,
    *,
    window: int | None = None,
    top_k: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    seen: Tensor | None = None,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from the newest tokens [B, T, H, D] to caches [B, M, Hk, D]; return out and log-sums.

    `sink` is a tensor [H] in the dtype of computation. `seen`, bool [B, M], marks what the only
    query of a text sees; it sees its last token, or nothing. Log-sums [B, T, H] do not include the
    sink.
    """
    query, key, value = readable(query), readable(key), readable(value)
    B, T, H, D = query.shape
    room, kv_heads, value_width = value.shape[1:]
    compute = compute_dtype(query.dtype)
    out = query.new_empty(B, T, H, value_width)
    lse = query.new_empty(B, T, H, dtype=compute) if need_lse else None
    scale = score.pair_factor(query)
    scale_by_head = scale.contiguous() if isinstance(scale, Tensor) else None
    sink = None if sink is None else sink.contiguous()
    lengths_by_text = None
    if not isinstance(lengths, int):
        lengths_by_text = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    call = StepsCall(
        texts=B,
        queries=T,
        heads=H,
        kv_heads=kv_heads,
        width=D,
        value_width=value_width,
        room=room,
        held=lengths if isinstance(lengths, int) else max(lengths, default=0),
        lengths=address(lengths_by_text),
        window=window or 0,
        query=view(query),
        key=view(key),
        value=view(value),
        is_rbf=score.kernel == "rbf",
        scale=address(scale_by_head),
        scale_step=0 if scale_by_head is None else scale_by_head.numel() > 1,
        same_scale=0.0 if isinstance(scale, Tensor) else scale,
        top_k=top_k or 0,
        softcap=softcap or 0.0,
        sink=address(sink),
        valid=address(seen),
        out=view(out),
        lse=address(lse),
        threads=torch.get_num_threads(),
    )
    assert _LIBRARY is not None
    is_double = compute == torch.float64
    library.check(_LIBRARY.graphattn_attention_steps(ctypes.byref(call), is_double))
    return out, lse
