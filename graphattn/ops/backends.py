"""Which implementation runs an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from graphattn.graphs.arguments import as_choice
from graphattn.kernels.shared.launch import is_looked_into

BACKENDS = ("reference", "structured", "native", "triton")

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
    """`backend` if there is one of this name; a ValueError otherwise."""
    return as_choice("backend", backend, ("auto", *BACKENDS))


def wanted_backend(backend: str) -> str:
    """What a caller's `backend` argument asks for, the surrounding `use_backend` included."""
    check_backend(backend)
    if backend != "auto":
        return backend
    return _override_when_compiled if torch.compiler.is_compiling() else _override.get()


def choose_backend(backend: str, support: dict[str, str | None], device: torch.device) -> str:
    """The backend to run: the one asked for, or of those that can the one that is fastest.

    "auto" keeps to "reference" inside torch.func and under forward-mode differentiation, which
    look into its steps, and to torch where kernels could only be interpreted.
    """
    wanted = wanted_backend(backend)
    looked_into = is_looked_into()
    if wanted == "auto":
        if looked_into:
            return "reference"
        if device.type == "cuda" and support["triton"] is None:
            return "triton"
        if support.get("native") is None:
            return "native"
        return (
            "structured"
            if torch.compiler.is_compiling() or support["structured"] is None
            else "reference"
        )
    if support[wanted] is not None:
        raise ValueError(f"backend {wanted!r} cannot run this case: {support[wanted]}")
    if wanted in ("native", "triton") and looked_into:
        raise ValueError(
            f"backend {wanted!r} cannot run inside torch.func or under forward-mode "
            'differentiation, which look into the steps of an operation: use backend="reference"'
        )
    return wanted
