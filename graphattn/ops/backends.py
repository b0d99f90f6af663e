"""The choice of a backend: one table per engine, asked once per call.

Three functions ask whether compiled code or an operator may run in place of single operations of
torch (and :func:`has_values`, whether Python may depend on numbers). They differ in what they look
for:

- :func:`~graphattn.kernels.shared.launch.is_transformed`: torch.func or forward-mode
  differentiation is active. These differentiate or batch every operation by themselves, so
  compiled code, whose operations they cannot see, is excluded.
- :func:`is_followed`: the above, or a dispatch mode of torch or torch.jit.trace, which look at
  every operation. Compiled code outside of an operator must not run.
- :func:`is_watched`: a dispatch mode, torch.jit.trace or torch.compile is
  active, or tensors have no values ("meta"). The call then runs as one operator of torch.library,
  which they can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from graphattn.graphs.arguments import as_choice
from graphattn.kernels.cpu import library
from graphattn.kernels.shared.launch import is_transformed
from graphattn.kernels.shared.stored import PRE_DISPATCH, makes_fakes
from graphattn.ops.counting import register_formulas

BACKEND_NAMES = ("reference", "structured", "native", "triton", "fused")
NAMES = ("auto", *BACKEND_NAMES)  # what an argument `backend` may be

# Looked up once, because torch.compile cannot trace how a library is loaded.
_WHY_NOT_BUILT = library.why_not()

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


def is_followed() -> bool:
    """Whether a dispatch mode of torch, torch.jit.trace or torch.func must see every operation.

    The last two lines are :func:`~graphattn.kernels.shared.launch.is_transformed`, written out to
    save a function call: every call of a layer asks.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH)
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
    )


def is_watched(like: Tensor) -> bool:
    """Whether a call must run as one operator of torch.library.

    It must under torch.compile and torch.jit.trace, under modes of torch's dispatcher
    (FlopCounterMode, selective checkpointing), which see operators and nothing inside them, and for
    tensors without values (device "meta").
    """
    if torch.compiler.is_compiling():
        return True
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace sees only operators, too
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH):
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return like.device.type == "meta"
    register_formulas()
    return True


def has_values(x: Tensor) -> bool:
    """Whether Python may read the numbers of a tensor and depend on them.

    On other devices than a CPU, to read them would wait for the device. Under torch.compile,
    torch.vmap and traces, or in a fake tensor, there are no numbers to read.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    if is_followed():
        if makes_fakes() or torch._C._get_tracing_state() is not None:
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            if torch._C._functorch.is_batchedtensor(x):
                return False
            x = torch._C._functorch.get_unwrapped(x)
    return not torch._C._functorch.is_legacy_batchedtensor(x)


def is_known_finite(x: Tensor) -> bool:
    """Whether Python can see, in one pass, that all numbers of a tensor are finite.

    False also if only their sum overflows.
    """
    return has_values(x) and math.isfinite(x.detach().sum())


def nothing_against(_: Any) -> None:
    """Return no reason: a backend with this `why_not` can run every call."""


class Backend(NamedTuple):
    """One way to run an engine's calls: a row of the engine's table.

    Attributes:
        name: one of :data:`BACKEND_NAMES`.
        why_not: returns the reason why the backend cannot run a checked call, or None if it can.
        run: runs the call. None in the table of steps, where the caller runs the call.
        is_default: whether "auto" may take the backend for a call that it can run; always if None.
    """

    name: str
    why_not: Callable[[Any], str | None] = nothing_against
    run: Callable[[Any], Any] | None = None
    is_default: Callable[[Any], bool] | None = None

    def __call__(self, call: Any) -> Any:
        """Run a call."""
        assert self.run is not None
        return self.run(call)


Table = tuple[Backend, ...]  # fastest first


def choose(table: Table, call: Any, backend: str) -> Backend:
    """The row of a table that runs a call: the one of this name, or for "auto" the first that can.

    Inside torch.func and under forward-mode differentiation, "auto" takes "reference", because
    these must see every operation.

    Raises:
        ValueError: a backend was asked for by name and cannot run the call.
    """
    wanted, transformed = wanted_backend(backend), is_transformed()
    for row in table:
        # A step by "structured", in a table without `run`, is in single operations of torch.
        is_seen = row.name == "reference" or (row.name == "structured" and row.run is None)
        if row.name == wanted:
            if (reason := row.why_not(call)) is not None:
                raise refusal(wanted, reason)
            if transformed and not is_seen:
                raise ValueError(
                    f"backend {wanted!r} cannot run inside torch.func or under forward-mode "
                    "differentiation, which must see every operation of a call: use "
                    'backend="reference"'
                )
            return row
        if wanted != "auto" or (transformed and row.name != "reference"):
            continue
        if (row.is_default is None or row.is_default(call)) and row.why_not(call) is None:
            return row
    raise refusal(wanted, "this operation does not have it")


def support(table: Table, call: Any) -> dict[str, str | None]:
    """Say for every backend why it cannot run a call; None if it can."""
    return {entry.name: entry.why_not(call) for entry in reversed(table)}


def refusal(backend: str, reason: str) -> ValueError:
    """The error for a backend that was asked for by name and cannot run a call."""
    return ValueError(f"backend {backend!r} cannot run this case: {reason}")


# The conditions under which the C++ code of the CPU can run a call; every engine asks them.


def is_here() -> bool:
    """Whether the library of C++ code was built and can be loaded."""
    return _WHY_NOT_BUILT is None


def why_not_native(like: Tensor) -> str | None:
    """The reason why C++ code cannot run a call with tensors like this one; None if it can."""
    if like.device.type != "cpu":
        return f"it runs on CPUs, not on {like.device.type}"
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        kind = type(like)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"it reads the memory of plain tensors, which a {kind.__name__} is not"
    return _WHY_NOT_BUILT


def why_no_step(like: Tensor, *others: torch.dtype) -> str | None:
    """The reason why C++ code cannot run a step of generation with queries like this one, or None.

    `others` are the dtypes of the cached tensors.
    """
    if like.device.type != "cpu":
        return f"it runs on CPUs, not on {like.device.type}"
    if _WHY_NOT_BUILT is not None:
        return _WHY_NOT_BUILT
    if type(like) is not Tensor and type(like) is not torch.nn.Parameter:
        return f"it reads the memory of plain tensors, which a {type(like).__name__} is not"
    for dtype in others:
        if dtype is not like.dtype and torch.float64 in (dtype, like.dtype):
            return f"it does not mix {like.dtype} and a cache of {dtype}"
    if is_followed():
        return "torch.func, a trace or a mode of torch must see every operation"
    return None


def may_repeat_step(backend: str) -> bool:
    """Whether C++ code may run a step like one that it has run before; asked once per token."""
    return (
        not torch.compiler.is_compiling()
        and wanted_backend(backend) in ("auto", "native")
        and is_here()
        and not is_followed()
    )
