"""Sizes of tiles: small tables, one line per kernel, dtype and width of a head.

Not yet measured on a GPU: these sizes were chosen by registers, shared memory and instructions of
kernels compiled ahead of time (docs/benchmarks). Another choice can be tried without editing::

    from graphattn.kernels import tuning
    with tuning.override(forward=tuning.Choice(rows=64, columns=64, num_warps=4, num_stages=2)):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch


class Choice(NamedTuple):
    """Targets and sources of a tile, warps of a program, and loads in flight."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# By width of a head, up to: half precision, then float32.
HALF: dict[str, dict[int, Choice]] = {
    "forward": {64: Choice(128, 64, 8, 3), 128: Choice(128, 32, 8, 2), 256: Choice(64, 32, 8, 2)},
    "d_query": {64: Choice(128, 64, 8, 2), 128: Choice(64, 32, 4, 2), 256: Choice(32, 32, 4, 1)},
    "d_source": {64: Choice(32, 128, 8, 2), 128: Choice(16, 128, 8, 1), 256: Choice(16, 32, 8, 1)},
    "shared_forward": {
        64: Choice(128, 64, 8, 3), 128: Choice(128, 32, 8, 2), 256: Choice(64, 32, 8, 2),
    },
    "shared_backward": {
        64: Choice(128, 32, 8, 2), 128: Choice(64, 32, 8, 2), 256: Choice(32, 32, 4, 1),
    },
    "d_table": {64: Choice(64, 64, 8, 1), 128: Choice(64, 64, 8, 1), 256: Choice(32, 32, 4, 1)},
}  # fmt: skip
SINGLE: dict[str, dict[int, Choice]] = {
    kernel: {64: Choice(32, 32, 4, 2), 128: Choice(32, 32, 4, 1), 256: Choice(16, 32, 4, 1)}
    for kernel in HALF
}
# Windows narrower than this have more borders than inside: smaller tiles waste less.
NARROW = 64
OF_NARROW = {"rows": 64, "columns": 32}

_override: ContextVar[dict[str, Choice]] = ContextVar("graphattn_tuning", default={})  # noqa: B039


def choose(kernel: str, dtype: torch.dtype, width: int, window: int) -> Choice:
    """For heads of `width` features and at most `window` sources a target.

    Example:
        >>> import torch
        >>> from graphattn.kernels import tuning
        >>> tuning.choose("forward", torch.bfloat16, 64, 4096).rows
        128
        >>> with tuning.override(forward=tuning.Choice(32, 32, 2, 1)):
        ...     tuning.choose("forward", torch.bfloat16, 64, 4096).rows
        32
    """
    if kernel in _override.get():
        return _override.get()[kernel]
    table = (SINGLE if dtype == torch.float32 else HALF)[kernel]
    choice = next(choice for widest, choice in table.items() if width <= widest)
    if window < NARROW and kernel != "d_table":
        rows, columns = OF_NARROW["rows"], OF_NARROW["columns"]
        if kernel == "d_source":
            rows, columns = columns, rows
        choice = choice._replace(
            rows=min(choice.rows, rows), columns=min(choice.columns, columns), num_warps=4
        )
    return choice


@contextmanager
def override(**choices: Choice) -> Iterator[None]:
    """Within the block the named kernels take these sizes.

    Raises:
        ValueError: for a kernel that does not exist, or sizes that are no powers of two from 16 on.
    """
    for kernel, choice in choices.items():
        if kernel not in HALF:
            raise ValueError(f"kernels are {', '.join(HALF)}; got {kernel!r}")
        for size in choice[:2]:
            if size < 16 or size & (size - 1):
                raise ValueError(f"rows and columns of {kernel} must be powers of 2 >= 16: {size}")
    token = _override.set({**_override.get(), **choices})
    try:
        yield
    finally:
        _override.reset(token)
