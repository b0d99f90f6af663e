"""The integer width of a graph's lists of edges: on a CPU, int32 if all numbers fit.

The list of edges takes nearly all the memory of a large graph, and attention over edges reads all
of it, so half the width saves half the memory. Users see int64, as in PyTorch Geometric: lists are
converted when they are read, and the int64 lists are stored if they are small. On other devices,
all lists are int64, because the kernels read int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.kernels.shared.stored import makes_fakes

MOST = torch.iinfo(torch.int32).max  # the most tokens, or edges, of a graph with int32 lists
STORED_WIDE = 1 << 18  # entries up to which a list is also stored in int64, which takes 2 MB more


def are_narrow(device: torch.device, *sizes: int) -> bool:
    """Whether a graph with these numbers of tokens and edges has int32 lists on this device."""
    return device.type == "cpu" and max(sizes) <= MOST


def as_stored(index: Tensor, *sizes: int) -> Tensor:
    """Convert an index of tokens or edges to the width in which a graph stores it.

    It is int32 if the index is on a CPU and all `sizes` (numbers of tokens, edges or places) fit,
    and int64 otherwise. Under torch.compile it is int64, because sizes may be unknown.
    """
    traced = torch.compiler.is_dynamo_compiling() or (
        torch.compiler.is_compiling() and makes_fakes()  # torch.export, without strict=True
    )
    if not traced and are_narrow(index.device, *sizes):
        return index.to(torch.int32)
    return index.long()


def is_stored_wide(index: Tensor) -> bool:
    """Whether a list is small enough to be stored in int64, too."""
    return index.numel() <= STORED_WIDE
