"""Checks of arguments that the functions of dynamics share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_points


def as_tokens(name: str, x: Any) -> Tensor:
    """Check that `x` is finite and floating-point, [N, C] with N, C >= 1; convert to >= float32."""
    x = as_points(name, x)
    if 0 in x.shape:
        raise ValueError(
            f"{name} must have at least one token and one feature, got shape {list(x.shape)}"
        )
    finite = x.isfinite().all(dim=1)
    if not finite.all():
        i = int(finite.logical_not().nonzero()[0])
        raise ValueError(f"{name} must be finite, got {name}[{i}] = {x[i].tolist()}")
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def as_labels(name: str, labels: Any, num_tokens: int | None = None) -> Tensor:
    """Check labels, and renumber them 0, 1, ... in the order of their values; [N] on the CPU."""
    if not isinstance(labels, Tensor):
        try:
            labels = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{name} must be a tensor with one integer per token, got {type(labels).__name__}"
            ) from None
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"{name} must be a tensor [N] of integers, one per token, "
            f"got {labels.dtype} of shape {list(labels.shape)}"
        )
    if len(labels) == 0 or (num_tokens is not None and len(labels) != num_tokens):
        allowed = "at least one entry" if num_tokens is None else f"{num_tokens} entries"
        raise ValueError(f"{name} must have {allowed}, one per token, got {len(labels)}")
    return labels.detach().cpu().unique(return_inverse=True)[1]


def contingency(rows: Tensor, columns: Tensor) -> Tensor:
    """Count the tokens with each pair of (row, column) labels, int64 [rows, columns]."""
    num_rows, num_columns = int(rows.max()) + 1, int(columns.max()) + 1
    pair = rows * num_columns + columns
    return torch.bincount(pair, minlength=num_rows * num_columns).view(num_rows, num_columns)


def need_scikit_learn() -> None:
    """Raise an ImportError that says what to install if scikit-learn is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ImportError(
            "silhouettes and KMeans need scikit-learn: install it with pip install "
            "'graphattn[clusters]'"
        ) from None
