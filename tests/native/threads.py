"""Comparison of what is computed on several numbers of threads, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")


def same_on_threads(run: Callable[[], Result], threads: tuple[int, ...] = (1, 2, 3)) -> Result:
    """Assert that `run` returns tensors of the same bits on each number of threads; return them."""
    before, results = torch.get_num_threads(), []
    try:
        for number in threads:
            torch.set_num_threads(number)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(tree_leaves(results[0]), tree_leaves(other), strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    return results[0]
