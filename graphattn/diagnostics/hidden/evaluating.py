"""How a model runs while its hidden states are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def dropout_off(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, after which every part is as it was."""
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients or torch's fused layers, which hooks cannot enter."""
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with dropout_off(model), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
