"""The choice of a backend: one table per engine, asked once per call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from graphattn.graphs.arguments import as_choice
from graphattn.kernels.shared.launch import is_transformed

BACKENDS = ("reference", "structured", "native", "triton")
NAMES = ("auto", *BACKENDS)

_override: ContextVar[str] = ContextVar("graphattn_backend", default="auto")
# The same for torch.compile, which guards global variables and cannot read context variables.
_override_when_compiled = "auto"


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Let ``backend="auto"`` mean `backend` within the block; explicit choices stay.

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
    return as_choice("backend", backend, NAMES)


def wanted_backend(backend: str) -> str:
    """Return the backend that an argument asks for, the surrounding `use_backend` included."""
    if type(backend) is not str or backend not in NAMES:
        check_backend(backend)
    if backend != "auto":
        return backend
    return _override_when_compiled if torch.compiler.is_compiling() else _override.get()


def nothing_against(_: Any) -> None:
    """No reason why a backend could not run a call."""


def always(_: Any) -> bool:
    """Whether "auto" may take a backend: any time."""
    return True


def is_followed() -> bool:
    """Whether a mode of torch, a trace or torch.func wants to see every operation.

    The last is :func:`~graphattn.kernels.shared.launch.is_transformed`, written out: every call of
    a layer asks.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
    )


class Backend(NamedTuple):
    """One way to run an engine's calls: a row of the engine's table, fastest first.

    Attributes:
        name: one of :data:`BACKENDS`.
        why_not: the reason why it cannot run a checked call; None where it can.
        run: runs the call. None in tables of who takes a call that the caller itself runs.
        is_default: whether "auto" may take it for a call that it can run.
    """

    name: str
    why_not: Callable[[Any], str | None] = nothing_against
    run: Callable[[Any], Any] | None = None
    is_default: Callable[[Any], bool] = always

    def __call__(self, call: Any) -> Any:
        """Run a call."""
        assert self.run is not None
        return self.run(call)


Table = tuple[Backend, ...]


def choose(table: Table, call: Any, backend: str) -> Backend:
    """The row of a table that runs a call: the one asked for, or the first that can.

    "auto" keeps to "reference" inside torch.func and under forward-mode differentiation, which
    follow the steps of an operation.

    Raises:
        ValueError: the backend was asked for by name, and cannot.
    """
    wanted = wanted_backend(backend)
    followed = is_transformed()
    for entry in table:
        if wanted == "auto":
            if entry.name == "reference" or (
                not followed and entry.is_default(call) and entry.why_not(call) is None
            ):
                return entry
        elif entry.name == wanted:
            if (reason := entry.why_not(call)) is not None:
                raise refusal(wanted, reason)
            if followed and wanted in ("native", "triton"):
                raise ValueError(
                    f"backend {wanted!r} cannot run inside torch.func or under forward-mode "
                    "differentiation, which look into the steps of an operation: use "
                    'backend="reference"'
                )
            return entry
    raise refusal(wanted, "this operation does not have it")


def support(table: Table, call: Any) -> dict[str, str | None]:
    """Backend -> None where it can run a call, otherwise the reason why not."""
    return {entry.name: entry.why_not(call) for entry in reversed(table)}


def refusal(backend: str, reason: str) -> ValueError:
    """The error of a backend that was asked for by name."""
    return ValueError(f"backend {backend!r} cannot run this case: {reason}")
