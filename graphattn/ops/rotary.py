"""Rotary positions (RoPE) in one pass of compiled code, `kernels/cpu/rotary.cpp`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import (
    KINDS,
    NO_VIEW,
    TokenView,
    featurewise,
    packer,
    view,
)
from graphattn.ops.backends import is_followed, is_here


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


CALL = packer(RotateCall)
_LIBRARY = library.library()
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
    rotated: Tensor = _rotated((x,), cosines, sines, back)[0]
    return rotated


def rotate_both(x: Tensor, other: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`rotate` of two tensors that differ at most in the number of heads, in one call.

    The caller has asked :func:`can_rotate` for both, and compared their samples and tokens.
    """
    return _rotated((x, other), cosines, sines, False)


def _rotated(tensors: tuple[Tensor, ...], cosines: Tensor, sines: Tensor, back: bool) -> Any:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Rotated.apply(cosines, sines, back, *tensors)
    return _run(tensors, cosines, sines, back)


class _Rotated(torch.autograd.Function):
    """Rotation whose gradient is the rotation back, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, cosines: Tensor, sines: Tensor, back: bool, *tensors: Tensor) -> Any:
        ctx.back = back
        ctx.save_for_backward(cosines, sines)
        return _run(tensors, cosines, sines, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        # With is_grads_batched=True, gradients are batched tensors, whose memory cannot be read.
        if is_followed() or torch._C._functorch.is_legacy_batchedtensor(gradients[0]):
            turned = (rotate_by_torch(x, cosines, sines if ctx.back else -sines) for x in gradients)
        else:
            turned = _rotated(gradients, cosines, sines, not ctx.back)
        return None, None, None, *turned


def rotate_by_torch(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate features [*, N, H, D] by operations of torch, with the same bits as compiled code."""
    a, b = x.to(cosines.dtype).chunk(2, dim=-1)
    # Products are not fused with sums, so that compiled code gives the same bits.
    rotated = torch.cat([a * cosines - b * sines, b * cosines + a * sines], dim=-1)
    return rotated.to(x.dtype)


def _run(
    tensors: tuple[Tensor, ...], cosines: Tensor, sines: Tensor, back: bool
) -> tuple[Tensor, ...]:
    """Rotate one or two tensors in one call of C++ code."""
    N, _, D = tensors[0].shape[-3:]
    by_batch, results = [], []
    for x in tensors:
        lead = (-1 if x.numel() else 0, *x.shape[-3:])
        by_batch.append(featurewise(x if x.dim() == 4 else x.reshape(lead)))
        results.append(x.new_empty(x.shape))
    views = [(*view(x), *_as_batch(out, x.shape)) for x, out in zip(by_batch, results, strict=True)]
    heads = by_batch[1].shape[2] if len(tensors) > 1 else 0
    cosines, sines = cosines.contiguous(), sines.contiguous()
    call = CALL.pack(
        *by_batch[0].shape, *views[0], heads, *(views[1] if heads else 2 * NO_VIEW),
        cosines.data_ptr(), sines.data_ptr(),
        N * (D // 2) if cosines.dim() > 3 else 0, D // 2, back, torch.get_num_threads(),
    )  # fmt: skip
    assert _LIBRARY is not None
    library.check(_LIBRARY.graphattn_turn(call, cosines.dtype == torch.float64))
    return tuple(results)


def _as_batch(x: Tensor, shape: torch.Size) -> tuple[int, int, int, int, int]:
    """The fields of a view of contiguous x, as if it had this shape [B, N, H, D]."""
    _, N, H, D = shape
    return x.data_ptr(), N * H * D, H * D, D, KINDS.get(x.dtype, 0)
