"""Tensors as compiled kernels are given them: an address, and how far apart their parts lie.

The arguments of a call are a structure of C++. To fill a ctypes structure field by field takes as
long as the attention of a few tokens, so :func:`packer` packs all fields in one go.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

# `FLOAT16` and `BFLOAT16` of rows.h; 0 stands for the dtype that a call computes in.
KINDS = {torch.float16: 1, torch.bfloat16: 2}
CODES = {ctypes.c_int64: "q", ctypes.c_void_p: "P", ctypes.c_double: "d"}  # those of `struct`


class TokenView(ctypes.Structure):
    """A tensor [batch, tokens, heads, features] as ``rows.h`` has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


NO_VIEW = 0, 0, 0, 0, 0  # the fields of a view that is not there


def packer(call: type[ctypes.Structure]) -> struct.Struct:
    """Return a packer of the numbers of a structure, in the order of its fields."""
    return struct.Struct(_codes(call))


def _codes(call: type[ctypes.Structure]) -> str:
    codes = ""
    for _, kind, *_ in call._fields_:
        codes += _codes(kind) if issubclass(kind, ctypes.Structure) else CODES[kind]
    return codes


def view(x: Tensor | None) -> tuple[int, int, int, int, int]:
    """Return the fields of a :class:`TokenView` of x, whose features lie side by side."""
    if x is None:
        return NO_VIEW
    batch, token, head, _ = x.stride()
    return x.data_ptr(), batch, token, head, KINDS.get(x.dtype, 0)


def address(x: Tensor | None) -> int:
    """Return the address of x; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def featurewise(x: Tensor) -> Tensor:
    """x with features side by side, as they are in memory; copied where they are not."""
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def as_it_lies(x: Tensor) -> Tensor:
    """x with all its numbers side by side."""
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
