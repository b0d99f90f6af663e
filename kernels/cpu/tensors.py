"""Tensors as compiled kernels are given them: an address, and how far apart their parts lie."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

# `FLOAT16` and `BFLOAT16` of rows.h; 0 stands for the dtype that a call computes in.
KINDS = {torch.float16: 1, torch.bfloat16: 2}


class TokenView(ctypes.Structure):
    """A tensor [batch, tokens, heads, features] as ``rows.h`` has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


def view(x: Tensor) -> TokenView:
    """x [batch, tokens, heads, features] by its address, features side by side."""
    return TokenView(x.data_ptr(), *x.stride()[:3], KINDS.get(x.dtype, 0))


def address(x: Tensor | None) -> Any:
    """Return the address of x; None where there is none."""
    return None if x is None else x.data_ptr()


def featurewise(x: Tensor) -> Tensor:
    """x with features side by side, as they are in memory; copied where they are not."""
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def as_it_lies(x: Tensor) -> Tensor:
    """x with all its numbers side by side."""
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
