"""Which implementation runs an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from graphattn.graphs.arguments import as_choice

BACKENDS = ("auto", "reference", "structured", "triton")
_NOT_YET = "is not implemented yet: every operation runs on backend 'reference' for now"

_override: ContextVar[str] = ContextVar("graphattn_backend", default="auto")


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, ``backend="auto"`` means `backend`; explicit choices stay.

    Example:
        >>> import graphattn as ga
        >>> with ga.use_backend("reference"):
        ...     pass  # every layer and operation runs its readable message-passing form
    """
    check_backend(backend)
    token = _override.set(backend)
    try:
        yield
    finally:
        _override.reset(token)


def check_backend(backend: str) -> str:
    """`backend` if it can run; a ValueError with the reason otherwise."""
    as_choice("backend", backend, BACKENDS)
    if backend in ("structured", "triton"):
        raise ValueError(f"backend {backend!r} {_NOT_YET}")
    return backend


def wanted_backend(backend: str) -> str:
    """What a caller's `backend` argument asks for, the surrounding `use_backend` included."""
    check_backend(backend)
    return _override.get() if backend == "auto" else backend
