"""A copy of an optimizer that steps on copies of the parameters."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

Gradients = list[Tensor | None]


class TwinOptimizer:
    """Lets an optimizer of any kind make its steps without touching it or the model.

    Its parameters and state are float64: a step of learning rate 1e-6 would drown in the rounding
    of float32 parameters when the difference is divided by the learning rate again.
    """

    def __init__(self, optimizer: Optimizer, max_norm: float | None) -> None:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "optimizer must step without a closure, got LBFGS, which evaluates the loss itself"
            )
        # Parameters of the model, in the optimizer's order; frozen ones do not move.
        self.parameters: list[nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if not self.parameters:
            raise ValueError("optimizer must hold parameters that require gradients, got none")
        self.max_norm = max_norm
        self.lr = float(optimizer.param_groups[0].get("lr", 0.0))
        if not self.lr > 0:
            raise ValueError(f"optimizer must have a learning rate > 0, got lr = {self.lr}")
        self._copies = [
            nn.Parameter(p.detach().to(torch.float64, copy=True)) for p in self.parameters
        ]
        # With the copies in the memo, groups and state refer to them instead of to the model.
        memo = {id(p): c for p, c in zip(self.parameters, self._copies, strict=True)}
        self._optimizer = copy.deepcopy(optimizer, memo)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                # The count of steps is not a number per parameter and keeps its dtype.
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    state[name] = value.double()
        self._before = [c.detach().clone() for c in self._copies]

    def step(self, gradients: Gradients) -> list[Tensor]:
        """One step on clipped gradients; u of every parameter, per unit of learning rate."""
        scale = 1.0
        if self.max_norm is not None:
            given = [g for g in gradients if g is not None]
            norm = torch.stack([g.double().norm().cpu() for g in given]).norm()
            scale = min(1.0, self.max_norm / float(norm)) if norm > 0 else 1.0
        for copied, before, gradient in zip(self._copies, self._before, gradients, strict=True):
            before.copy_(copied.detach())
            copied.grad = None if gradient is None else gradient.detach().double() * scale
        self._optimizer.step()
        return [
            (c.detach() - b).div_(self.lr) for c, b in zip(self._copies, self._before, strict=True)
        ]

    def stay(self) -> None:
        """Take the last step back, of the parameters alone: the optimizer's state has moved."""
        for copied, before in zip(self._copies, self._before, strict=True):
            copied.data.copy_(before)

    def write(self) -> None:
        """Give the model's parameters the values of the copies, in memory of their own."""
        for parameter, copied in zip(self.parameters, self._copies, strict=True):
            parameter.data = copied.detach().to(parameter.dtype, copy=True)
