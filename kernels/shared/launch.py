"""One way to start a kernel, so that launches can also be recorded and checked without a device."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Run = TypeVar("Run", bound=Callable[..., Any])


def is_interpreted() -> bool:
    """Whether kernels are interpreted on a CPU, slowly, to test them (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256  # features of a head
# The first compute capability of NVIDIA's GPUs with matrix instructions for bfloat16 and tf32.
LEAST_CAPABILITY = (8, 0)
MOST_PROGRAMS = 2**31 - 1  # of a launch, along the first axis of its grid
# A constant, because torch.compile may trace functions that need it, and cannot trace find_spec.
HAS_TRITON = find_spec("triton") is not None


def why_not_on(x: Tensor) -> str | None:
    """The reason why no kernel takes tensors like this one; None where some may."""
    if x.device.type != "cuda" and not is_interpreted() and _receiver is None:
        return f"its kernels run on CUDA and HIP devices, not on {x.device.type}"
    if not HAS_TRITON:
        return "the package triton is not installed"
    if x.device.type == "cuda" and torch.version.hip is None:
        numbers = capability(x.device)
        if numbers is not None and numbers < LEAST_CAPABILITY:
            least, has = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, numbers))
            return f"its kernels need compute capability {least} or more, and {x.device} has {has}"
    if x.dtype not in DTYPES:
        name = str(x.dtype).removeprefix("torch.")
        return f"its kernels take float32, float16 and bfloat16, not {name}"
    return None


_capabilities: dict[torch.device, tuple[int, int]] = {}


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, such as (9, 0), which is asked once.

    It is None for the device of fake tensors, if there is no such device.
    """
    numbers = _capabilities.get(device)
    if numbers is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        numbers = properties.major, properties.minor
        if not torch.compiler.is_compiling():
            _capabilities[device] = numbers
    return numbers


def why_not_heads(x: Tensor, *widths: int) -> str | None:
    """Return why kernels refuse heads of `widths` features (x's own by default), x [*, H, D]."""
    if (reason := why_not_on(x)) is not None:
        return reason
    for width in widths or (x.shape[-1],):
        if not 1 <= width <= WIDEST:
            return f"its kernels take heads of 1 to {WIDEST} features, not of {width}"
    if x.shape[-2] == 0:
        return "its kernels take one head or more, not none"
    return None


def untraced(run: Run) -> Run:
    """The function `run`, hidden from torch.compile if that is tracing the caller.

    A decorator would do the same, but importing the library would then import the whole compiler.
    """
    if not torch.compiler.is_compiling():
        return run
    disabled: Run = torch.compiler.disable(run)
    return disabled


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active for the code that runs now."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def on_its_device(run: Run) -> Run:
    """Let the device of the first argument, a tensor, be the current one while the function runs.

    Kernels start on the current device, and their tiles are chosen for it. Tensors may be on
    another one. On a CPU nothing changes.
    """

    @functools.wraps(run)
    def on_device(first: Tensor, /, *others: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first):
            return run(first, *others, **named)

    decorated: Any = on_device
    return decorated


class Launch(NamedTuple):
    """A kernel, its arguments and its options."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    # By name: tensors (None: the kernel is compiled without), numbers, tuples of both such as
    # `Heads`, and the constants (tl.constexpr).
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler, by its own names."""
        # fp_fusion is passed, because an environment variable may change Triton's default.
        named = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fp_fusion,
        }
        if self.max_registers is not None:  # compilers for other GPUs than NVIDIA's do not know it
            named["maxnreg"] = self.max_registers
        return named


class Heads(NamedTuple):
    """Features of tokens by head, as kernels take them: one argument in place of three.

    Element [b, n, h, f] lies at ``p + (b * N + n) * stride_n + h * stride_h + f`` if `x` is laid
    out as :func:`graphattn.kernels.shared.layout.side_by_side` returns tensors.
    """

    p: Tensor
    stride_n: int
    stride_h: int

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        """The argument for a tensor `x` [B, N, H, D]."""
        return cls(x, x.stride(1), x.stride(2))


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of a kernel, also those in tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_in(argument)
        elif hasattr(argument, "block_shape"):  # Triton's TensorDescriptor
            yield argument.base


# Not a context variable: on GPUs autograd runs backwards in a thread of its own.
_receiver: Callable[[Launch], None] | None = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int,
    num_stages: int,
    fp_fusion: bool = True,
    max_registers: int | None = None,
    **arguments: Any,
) -> None:
    """Starts a kernel on the device of its tensors; within :func:`recording` it is only recorded.

    Without `fp_fusion`, products are rounded before they are added. Kernels that compare sums need
    that: with fused multiply-adds, threads that share a sum may hold different last bits of it.
    `max_registers` bounds the registers of a thread, so that more programs fit on a multiprocessor.

    Raises:
        ValueError: the grid has more programs than a device can start.
    """
    if math.prod(grid) > MOST_PROGRAMS:
        name = getattr(kernel, "__name__", kernel)
        raise ValueError(
            f"{name} must have at most 2^31 - 1 = {MOST_PROGRAMS:,} programs, got "
            f"{math.prod(grid):,}: split the batch, or the heads, into several calls"
        )
    one = Launch(kernel, grid, arguments, num_warps, num_stages, fp_fusion, max_registers)
    if _receiver is not None:
        _receiver(one)
    elif 0 not in grid:
        tensor = next(tensors_in(arguments.values()))
        with torch.cuda.device_of(tensor):  # Triton starts kernels on the current device
            kernel[grid](**arguments, **one.options)


@contextmanager
def redirected(receive: Callable[[Launch], None] | None) -> Iterator[None]:
    """Hand launches within the block to a function, which stands in for the device.

    Without one (None) they go to the device, also within another block.
    """
    global _receiver
    before, _receiver = _receiver, receive
    try:
        yield
    finally:
        _receiver = before


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches within the block, in the list that is returned, instead of running them.

    Tensors may be on "meta". So kernels are compiled ahead of time with exactly the arguments that
    the library starts them with.
    """
    recorded: list[Launch] = []
    with redirected(recorded.append):
        yield recorded
