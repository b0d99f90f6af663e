"""Rotary positions (RoPE) in one pass of compiled code, `kernels/cpu/rotary.cpp`."""

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


class RotateCall(ctypes.Structure):
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


ROTATE = packer(RotateCall)
ANGLE_DTYPES = (torch.float32, torch.float64)  # cosines and sines have one of these


def can_rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    """Whether compiled code can rotate features x [*, N, H, D] in this call.

    It cannot where torch must see every operation (:func:`~graphattn.ops.backends.is_followed`).
    """
    if torch.compiler.is_compiling() or is_followed() or not is_here():
        return False
    lead = cosines.shape[:-3]
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cpu
        and cosines.is_cpu
        and x.layout is torch.strided
        and cosines.dtype is (x.dtype if x.dtype in ANGLE_DTYPES else torch.float32)
        and (x.dtype in ANGLE_DTYPES or x.dtype in KINDS)
        and cosines.shape == sines.shape
        and cosines.dtype is sines.dtype
        and cosines.shape[-3:] == (*x.shape[-3:-2], 1, x.shape[-1] / 2)
        and (not lead or lead == x.shape[:-3])
        and not (torch.is_grad_enabled() and (cosines.requires_grad or sines.requires_grad))
    )


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool = False) -> Tensor:
    """Rotate features [*, N, H, D] by compiled code, or rotate them back.

    The caller has asked :func:`can_rotate`.

    Args:
        x: in float32, float64 or half precision.
        cosines, sines: [N, 1, D / 2] or [*, N, 1, D / 2], in float32 for half precision.
        back: whether to rotate in the opposite direction.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        found: Tensor = _Rotated.apply(x, cosines, sines, back)
        return found
    return _rotated(x, cosines, sines, back)


class _Rotated(torch.autograd.Function):
    """Rotation whose gradient is the rotation back, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
        ctx.back = back
        ctx.save_for_backward(cosines, sines)
        return _rotated(x, cosines, sines, back)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        # With is_grads_batched=True, d_out is a batched tensor, whose memory cannot be read.
        if is_followed() or torch._C._functorch.is_legacy_batchedtensor(d_out):
            return rotate_by_torch(d_out, cosines, sines if ctx.back else -sines), None, None, None
        return rotate(d_out, cosines, sines, back=not ctx.back), None, None, None


def rotate_by_torch(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate features [*, N, H, D] by operations of torch, with the same bits as compiled code."""
    a, b = x.to(cosines.dtype).chunk(2, dim=-1)
    # Products are not fused with sums, so that compiled code gives the same bits.
    rotated = torch.cat([a * cosines - b * sines, b * cosines + a * sines], dim=-1)
    return rotated.to(x.dtype)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    N, H, D = x.shape[-3:]
    by_batch = featurewise(x.reshape(-1, N, H, D) if x.numel() else x.new_empty(0, N, H, D))
    # Resized in place, not viewed: callers may change the result in place.
    out = x.new_empty(by_batch.shape)
    cosines, sines = cosines.contiguous(), sines.contiguous()
    angles = N * (D // 2) if cosines.dim() > 3 else 0, D // 2
    call = RotateCall(
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


class KnownRotation:
    """Rotation of contiguous queries and keys, of known sizes and at known positions.

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
        """Return the rotated query and key as new tensors; None for a key that is None."""
        rotated = torch.empty_like(query), None if key is None else torch.empty_like(key)
        self._run(query, key, *rotated, is_back=False)
        return rotated

    def back(self, query: Tensor, key: Tensor | None) -> None:
        """Rotate both tensors back, in place."""
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
        call = ROTATE.pack(
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
