"""The entries of the compiled kernels' library that are there for tests, called with tensors."""

from __future__ import annotations

import ctypes

import torch

from graphattn.kernels.cpu import library

NAMES = {torch.float32: "float", torch.float64: "double"}


def loaded(native: ctypes.CDLL | None = None) -> ctypes.CDLL:
    """A library: the given one, or this process' own, which must be there."""
    native = native or library.library()
    assert native is not None, library.why_not()
    return native


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor, which the caller must keep alive."""
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def has_openmp() -> bool:
    """Whether this process' own library uses several threads."""
    return bool(loaded().graphattn_has_openmp())


def exp(x: torch.Tensor, threads: int = 1, native: ctypes.CDLL | None = None) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    entry = getattr(loaded(native), f"graphattn_exp_{NAMES[x.dtype]}")
    library.check(entry(at(x), at(y), ctypes.c_int64(len(x)), ctypes.c_int32(threads)))
    return y


def activations(x: torch.Tensor, native: ctypes.CDLL | None = None) -> torch.Tensor:
    """The GELU of x, its derivative, the softplus and its derivative, [4, count]."""
    results = x.new_full((4, len(x)), torch.nan)
    entry = getattr(loaded(native), f"graphattn_activations_{NAMES[x.dtype]}")
    library.check(entry(at(x), at(results), ctypes.c_int64(len(x))))
    return results


def lanes(dtype: torch.dtype, native: ctypes.CDLL | None = None) -> int:
    """How many numbers a vector holds."""
    return loaded(native).graphattn_vector_bytes() // dtype.itemsize


def reduce(x: torch.Tensor, native: ctypes.CDLL | None = None) -> torch.Tensor:
    """The sum and the largest of one vector."""
    assert len(x) == lanes(x.dtype, native)
    result = x.new_full((2,), torch.nan)
    entry = getattr(loaded(native), f"graphattn_reduce_{NAMES[x.dtype]}")
    library.check(entry(at(x), at(result)))
    return result


def workers(
    tasks: int, threads: int, microseconds: int = 0, native: ctypes.CDLL | None = None
) -> list[int]:
    """List, for each task, the number of the worker that did it."""
    worker = torch.full((tasks,), -1, dtype=torch.int32)
    library.check(
        loaded(native).graphattn_workers(
            at(worker), ctypes.c_int64(tasks), ctypes.c_int32(threads), microseconds
        )
    )
    return worker.tolist()


def allocate(
    nbytes: int, tasks: int = 1, threads: int = 1, native: ctypes.CDLL | None = None
) -> None:
    """Every task asks for some bytes."""
    library.check(
        loaded(native).graphattn_allocate(
            ctypes.c_int64(nbytes), ctypes.c_int64(tasks), ctypes.c_int32(threads)
        )
    )
