"""Which implementation runs an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from graphattn.graphs.arguments import as_choice

BACKENDS = ("reference", "structured", "triton")
NOT_YET = "not implemented yet"

_override: ContextVar[str] = ContextVar("graphattn_backend", default="auto")
# The same for torch.compile, which guards global variables and cannot read context variables.
_override_when_compiled = "auto"


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, ``backend="auto"`` means `backend`; explicit choices stay.

    It holds for the current thread or task (a context variable), not for threads started inside.

    Example:
        >>> import graphattn as ga
        >>> with ga.use_backend("reference"):
        ...     pass  # every layer and operation runs its readable message-passing form
    """
    global _override_when_compiled
    check_backend(backend)
    token, before = _override.set(backend), _override_when_compiled
    _override_when_compiled = backend
    try:
        yield
    finally:
        _override.reset(token)
        _override_when_compiled = before


def check_backend(backend: str) -> str:
    """`backend` if it is one that can run something; a ValueError otherwise."""
    as_choice("backend", backend, ("auto", *BACKENDS))
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run: {NOT_YET}")
    return backend


def wanted_backend(backend: str) -> str:
    """What a caller's `backend` argument asks for, the surrounding `use_backend` included."""
    check_backend(backend)
    if backend != "auto":
        return backend
    return _override_when_compiled if torch.compiler.is_compiling() else _override.get()


def choose_backend(backend: str, support: dict[str, str | None]) -> str:
    """The backend to run: the one asked for, or of those that can the one that is fastest.

    "auto" keeps to "reference" inside torch.func and under forward-mode differentiation, which
    look into its steps.
    """
    wanted = wanted_backend(backend)
    if wanted == "auto":
        if torch.compiler.is_compiling():
            return "structured"
        transformed = torch._C._functorch.maybe_current_level() is not None
        forward_mode = torch.autograd.forward_ad._current_level >= 0
        able = support["structured"] is None
        return "structured" if able and not transformed and not forward_mode else "reference"
    if support[wanted] is not None:
        raise ValueError(f"backend {wanted!r} cannot run this case: {support[wanted]}")
    return wanted
