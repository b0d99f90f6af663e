"""The side from which a structure is drawn."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated_to_principal_axes(x: Tensor) -> Tensor:
    """Rotate positions [N, 3] to their principal axes.

    The longest direction is horizontal, the second vertical, and the third points to the viewer.
    The positions are not mirrored, so helices remain right-handed. The first residue lies in the
    lower left quarter. Nothing is rotated if no residue has a position.
    """
    known = x[x.isfinite().all(dim=1)]
    if not len(known):
        return x
    x, known = x - known.mean(dim=0), known - known.mean(dim=0)
    _, axes = torch.linalg.eigh(known.T @ known)
    axes = axes.flip(1)  # eigh sorts in ascending order; the longest direction comes first here.
    for k in (0, 1):
        if float(known[0] @ axes[:, k]) > 0:
            axes[:, k] = -axes[:, k]
    if float(torch.linalg.det(axes)) < 0:
        axes[:, 2] = -axes[:, 2]
    return x @ axes
