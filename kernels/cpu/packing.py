"""Structures of C++ packed in one go, and what contiguous tensors say beside their address."""

from __future__ import annotations

import ctypes
import struct

KINDS = {ctypes.c_int64: "q", ctypes.c_void_p: "P", ctypes.c_double: "d"}


def packer(call: type[ctypes.Structure]) -> struct.Struct:
    """Return a packer of the numbers of a structure, in the order of its fields."""
    return struct.Struct(_format(call))


def _format(call: type[ctypes.Structure]) -> str:
    found = ""
    for _, kind, *_ in call._fields_:
        found += _format(kind) if issubclass(kind, ctypes.Structure) else KINDS[kind]
    return found


def steps_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the fields of a view of a contiguous tensor [B, N, H, D] beside its address."""
    _, N, H, D = shape
    return N * H * D, H * D, D, 0
