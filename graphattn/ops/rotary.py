"""Features turned by positions in one pass of compiled code, `kernels/cpu/rotary.cpp`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.packing import packer, steps_of
from graphattn.kernels.cpu.tensors import KINDS, TokenView, featurewise, view
from graphattn.ops.backends import is_followed
from graphattn.ops.compiled_code import is_here


class TurnCall(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/rotary.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "width")),
        *((name, TokenView) for name in ("x", "out")),
        ("other_heads", ctypes.c_int64),
        *((name, TokenView) for name in ("other", "other_out")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("angle_batch", "angle_token")),
        *((name, ctypes.c_int64) for name in ("is_back", "threads")),
    )


TURN = packer(TurnCall)
WHOLE = (torch.float32, torch.float64)  # dtypes that angles have, too


def can_turn(x: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    """Whether compiled code turns features [*, N, H, D], and nobody looks into how it does."""
    if torch.compiler.is_compiling() or is_followed() or not is_here():
        return False
    lead = cosines.shape[:-3]
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cpu
        and cosines.is_cpu
        and x.layout is torch.strided
        and cosines.dtype is (x.dtype if x.dtype in WHOLE else torch.float32)
        and (x.dtype in WHOLE or x.dtype in KINDS)
        and cosines.shape == sines.shape
        and cosines.dtype is sines.dtype
        and cosines.shape[-3:] == (*x.shape[-3:-2], 1, x.shape[-1] / 2)
        and (not lead or lead == x.shape[:-3])
        and not (torch.is_grad_enabled() and (cosines.requires_grad or sines.requires_grad))
    )


def turn(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool = False) -> Tensor:
    """Features [*, N, H, D] turned, or turned back, by compiled code; :func:`can_turn` is asked.

    Args:
        x: in float32, float64 or half precision.
        cosines, sines: [N, 1, D / 2] or [*, N, 1, D / 2], in float32 for half precision.
        back: whether to turn the other way round.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        found: Tensor = _Turned.apply(x, cosines, sines, back)
        return found
    return _turned(x, cosines, sines, back)


class _Turned(torch.autograd.Function):
    """Rotation whose gradient is the rotation back, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
        ctx.back = back
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines, back)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        # Gradients of many directions at once (is_grads_batched=True) have no memory of their own.
        if is_followed() or torch._C._functorch.is_legacy_batchedtensor(d_out):
            return turned_by_torch(d_out, cosines, sines if ctx.back else -sines), None, None, None
        return turn(d_out, cosines, sines, back=not ctx.back), None, None, None


def turned_by_torch(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Features turned by operations of torch, with the same bits."""
    first, second = x.to(cosines.dtype).chunk(2, dim=-1)
    # Products that are not fused with sums: steps by compiled code have the same bits.
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(x.dtype)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    N, H, D = x.shape[-3:]
    by_batch = featurewise(x.reshape(-1, N, H, D) if x.numel() else x.new_empty(0, N, H, D))
    # Resized in place: a view could not be changed in place by those who get it.
    out = x.new_empty(by_batch.shape)
    cosines, sines = cosines.contiguous(), sines.contiguous()
    angles = N * (D // 2) if cosines.dim() > 3 else 0, D // 2
    call = TurnCall(
        *by_batch.shape,
        view(by_batch),
        view(out),
        0,
        TokenView(),
        TokenView(),
        cosines.data_ptr(),
        sines.data_ptr(),
        *angles,
        back,
        torch.get_num_threads(),
    )
    found = library.library()
    assert found is not None
    library.check(found.graphattn_turn(ctypes.byref(call), cosines.dtype == torch.float64))
    return out.resize_(x.shape)


class KnownTurn:
    """Turns of contiguous queries and keys of sizes that were seen before, at the same positions.

    Args:
        query, key: shapes [B, N, H, D] and [B, N, Hk, D].
        rotation: cosines and sines [N, 1, D / 2] in the dtype of both.
    """

    def __init__(
        self, query: tuple[int, ...], key: tuple[int, ...], rotation: tuple[Tensor, Tensor]
    ) -> None:
        B, N, H, D = query
        self.cosines, self.sines = (x.contiguous() for x in rotation)
        self.sizes, self.kv_heads = (B, N, H, D), key[-2]
        self.of_query, self.of_key = steps_of(query), steps_of(key)
        self.angles = self.cosines.data_ptr(), self.sines.data_ptr(), 0, D // 2
        self.is_double = self.cosines.dtype == torch.float64

    def __call__(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """New tensors of the shapes of both; no key, no result for it."""
        turned = torch.empty_like(query), None if key is None else torch.empty_like(key)
        self._run(query, key, *turned, is_back=False)
        return turned

    def back(self, query: Tensor, key: Tensor | None) -> None:
        """Turn both tensors back in place."""
        self._run(query, key, query, key, is_back=True)

    def _run(
        self,
        query: Tensor,
        key: Tensor | None,
        out: Tensor,
        other: Tensor | None,
        *,
        is_back: bool,
    ) -> None:
        from_key, to_key, kv_heads = 0, 0, 0
        if key is not None and other is not None:
            from_key, to_key, kv_heads = key.data_ptr(), other.data_ptr(), self.kv_heads
        call = TURN.pack(
            *self.sizes,
            query.data_ptr(), *self.of_query,
            out.data_ptr(), *self.of_query,
            kv_heads,
            from_key, *self.of_key,
            to_key, *self.of_key,
            *self.angles, is_back, torch.get_num_threads(),
        )  # fmt: skip
        found = library.library()
        assert found is not None
        status = found.graphattn_turn(call, self.is_double)
        if status:
            library.check(status)
