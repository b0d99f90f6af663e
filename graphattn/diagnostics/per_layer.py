"""One row of numbers per layer of a model, and the layers' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PerLayer(NamedTuple):
    """One row of numbers per layer, and the names of the layers in the model.

    Example:
        >>> import graphattn as ga
        >>> layer = ga.nn.GaussianKernelAttention(8, heads=2)
        >>> values, names = ga.diagnostics.bandwidths(layer)
    """

    values: Tensor  #: [layers, heads], or [layers]
    names: tuple[str, ...]  #: as in ``model.named_modules()``, in the order of `values`


def per_layer(rows: Sequence[tuple[str, Tensor]]) -> PerLayer:
    """Stack the (name, [heads]) of every layer; rows of layers with fewer heads end in NaN."""
    widest = max(len(row) for _, row in rows)
    values = rows[0][1].new_full((len(rows), widest), torch.nan)
    for i, (_, row) in enumerate(rows):
        values[i, : len(row)] = row
    return PerLayer(values, tuple(name for name, _ in rows))
