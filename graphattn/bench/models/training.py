"""Steps of training: what the benchmark times of a model in place of a backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-5  # small, because all steps use the same data


class ModelInTraining(NamedTuple):
    """A model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer


def in_training(model: nn.Module, device: torch.device, dtype: torch.dtype) -> ModelInTraining:
    """Move a model to the device, and give it a fused AdamW."""
    # `capturable` stores the number of steps on the GPU, so the host need not wait.
    optimizer = torch.optim.AdamW(
        model.to(device, dtype).parameters(), lr=LEARNING_RATE, fused=True,
        capturable=device.type == "cuda",
    )  # fmt: skip
    return ModelInTraining(model, optimizer)


class TrainingRun:
    """A contender whose forward and backward pass is one step of training."""

    def training(self, x: Any) -> ModelInTraining:
        """Return the model of this contender among the inputs of a case."""
        raise NotImplementedError

    def loss(self, x: Any) -> Tensor:
        """Compute the loss of a step."""
        raise NotImplementedError

    def step(self, x: Any) -> None:
        """Run a training step: forward pass, backward pass, AdamW; then free the gradients."""
        optimizer = self.training(x).optimizer
        self.loss(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def held(self, x: Any) -> float:
        """Return the bytes of weights and optimizer state; the first step makes the latter."""
        model, optimizer = self.training(x)
        numbers = [t for state in optimizer.state.values() for t in state.values()]
        tensors = [*model.parameters(), *(t for t in numbers if isinstance(t, Tensor))]
        return float(sum(t.nbytes for t in tensors))
