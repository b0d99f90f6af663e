"""New memory that holds NaN, so that a result that nobody writes is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nan_until_written() -> Iterator[None]:
    """Fill new tensors with NaN within the block."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warn)
        torch.utils.deterministic.fill_uninitialized_memory = filled
