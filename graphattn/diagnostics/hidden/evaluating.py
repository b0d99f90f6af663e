"""Contexts in which a model runs for measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def dropout_off(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode, and restore the mode of every part afterwards."""
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, without gradients and without torch's fused layers.

    Hooks do not run inside fused layers.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with dropout_off(model), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
