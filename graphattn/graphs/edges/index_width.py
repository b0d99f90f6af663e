"""How wide the numbers in a graph's lists are: 32 bits on a CPU wherever they fit.

Lists of edges are nearly all that a large graph holds, and what attention over edges reads first:
half the width is half the memory. Users see int64, as PyTorch Geometric has it: lists are widened
when they are asked for, and the wide ones kept if they are small. On other devices lists are int64
throughout, since that is what kernels read there.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = torch.iinfo(torch.int32).max  # tokens, or edges, of a graph whose lists are narrow
KEPT_WIDE = 1 << 18  # numbers of a list that is kept in both widths: two megabytes more


def are_narrow(device: torch.device, *sizes: int) -> bool:
    """Whether a graph with so many tokens and edges has lists of 32 bits there."""
    return device.type == "cpu" and max(sizes) <= MOST


def as_held(index: Tensor, *sizes: int) -> Tensor:
    """An index as a graph holds it, a copy in int32 where it lies on a CPU and all `sizes` fit.

    What torch.compile traces is int64: sizes may be unknown there.

    Args:
        index: numbers of tokens, of edges, or of places in a list of edges.
        sizes: how many of each of these there are.

    Example:
        >>> import torch
        >>> from graphattn.graphs.edges.index_width import as_held
        >>> as_held(torch.tensor([2, 0]), 3).dtype, as_held(torch.tensor([2, 0]), 2**40).dtype
        (torch.int32, torch.int64)
    """
    if not torch.compiler.is_compiling() and are_narrow(index.device, *sizes):
        return index.to(torch.int32)
    return index.long()


def is_kept_wide(index: Tensor) -> bool:
    """Whether a list is small enough to be kept in both widths."""
    return index.numel() <= KEPT_WIDE
