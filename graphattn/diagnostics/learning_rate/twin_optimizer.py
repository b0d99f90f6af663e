"""A copy of an optimizer that steps on copies of the parameters."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

Gradients = list[Tensor | None]


class TwinOptimizer:
    """A copy of any optimizer, which makes steps without changing the optimizer or the model.

    The parameters and the state of the copy are float64. The step is found as a difference of
    parameters divided by the learning rate, and with float32 parameters and a learning rate of
    1e-6 the rounding error would be larger than this difference.
    """

    def __init__(self, optimizer: Optimizer, max_norm: float | None) -> None:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "optimizer must step without a closure, got LBFGS, which evaluates the loss itself"
            )
        # The model's parameters in the optimizer's order, without frozen ones, which never change.
        self.parameters: list[nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if not self.parameters:
            raise ValueError(
                "optimizer must have at least one parameter that requires a gradient, got none"
            )
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
                # The number of steps done is not a value per parameter; its dtype is not changed.
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    state[name] = value.double()
        self._before = [c.detach().clone() for c in self._copies]

    def step(self, gradients: Gradients) -> list[Tensor]:
        """Make one step with clipped gradients; return each parameter's change / learning rate."""
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
        """Undo the last step for the parameters; the optimizer's state remains updated."""
        for copied, before in zip(self._copies, self._before, strict=True):
            copied.data.copy_(before)

    def write(self) -> None:
        """Give the model's parameters the values of the copies, in new memory."""
        for parameter, copied in zip(self.parameters, self._copies, strict=True):
            parameter.data = copied.detach().to(parameter.dtype, copy=True)
