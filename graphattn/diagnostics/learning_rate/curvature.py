"""Slope and curvature of a loss along a direction that depends on its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graphattn.diagnostics.learning_rate.restore import random_state, set_random_state
from graphattn.diagnostics.learning_rate.twin_optimizer import Gradients

Method = Literal["hvp", "finite_difference"]


class BatchLoss:
    """The loss of a batch and its gradient in some parameters of the model."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        parameters: list[nn.Parameter],
    ) -> None:
        self.model, self.loss_fn, self.parameters = model, loss_fn, parameters

    def gradient(self, batch: Any, *, create_graph: bool = False) -> Gradients:
        """The gradient of each parameter; None for one that the loss does not depend on."""
        with torch.enable_grad():
            loss = self.loss_fn(self.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"loss_fn must return a scalar tensor that depends on the parameters, got {got}"
                )
            gradients: Gradients = list(
                torch.autograd.grad(
                    loss.reshape(()), self.parameters, create_graph=create_graph, allow_unused=True
                )
            )
        if all(g is None for g in gradients):
            raise ValueError(
                "the result of loss_fn must depend on the optimizer's parameters, but it does not"
            )
        return gradients


def slope_and_curvature(
    loss: BatchLoss,
    batch: Any,
    direction: Callable[[Gradients], list[Tensor]],
    method: Method,
    epsilon: float,
) -> tuple[float, float]:
    """<g, u> and <u, H u> for u = direction(g), summed in float64."""
    if method == "hvp":
        gradients = loss.gradient(batch, create_graph=True)
        u = direction([None if g is None else g.detach() for g in gradients])
        return dot(gradients, u), curvature_by_autograd(loss.parameters, gradients, u)
    # Every evaluation draws the same dropout, so that only the parameters make a difference.
    start = random_state(loss.parameters)
    gradients = loss.gradient(batch)
    u = direction(gradients)
    return dot(gradients, u), curvature_by_differences(loss, batch, u, epsilon, start)


def curvature_by_autograd(
    parameters: list[nn.Parameter],
    gradients: Gradients,
    u: list[Tensor],
    *,
    retain_graph: bool = False,
) -> float:
    """<u, H u>, where H u is the gradient of <g, u>."""
    known = [(g, v) for g, v in zip(gradients, u, strict=True) if g is not None and g.requires_grad]
    if not known:
        return 0.0  # The loss is linear in its parameters.
    _check_differentiable_twice([g for g, _ in known])
    try:
        product = torch.autograd.grad(
            [g for g, _ in known],
            parameters,
            grad_outputs=[v.to(g.dtype) for g, v in known],
            allow_unused=True,
            retain_graph=retain_graph,
        )
    except RuntimeError as error:
        error.add_note(
            "method='hvp' differentiates the loss twice; use method='finite_difference', which "
            "needs first derivatives only"
        )
        raise
    return dot(list(product), u)


def _check_differentiable_twice(gradients: list[Tensor]) -> None:
    """Refuse gradients that pass through a `once_differentiable` function.

    torch raises an error for the second derivative of such a function only if this derivative
    itself is asked for. If only derivatives in the parameters are asked for, torch leaves it out,
    and the curvature would be wrong without any error.
    """
    pending = [g.grad_fn for g in gradients]
    visited = set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError(
                "loss_fn calls a function whose gradient cannot be differentiated again "
                "(once_differentiable): use method='finite_difference'"
            )
        pending += [previous for previous, _ in node.next_functions]


def curvature_by_differences(
    loss: BatchLoss, batch: Any, u: list[Tensor], epsilon: float, start: Any
) -> float:
    """<u, H u> with H v = [g(theta + epsilon v) - g(theta - epsilon v)] / (2 epsilon), Eq. 20."""
    count = sum(v.numel() for v in u)
    scale = math.sqrt(sum(float(v.square().sum()) for v in u) / count)
    if scale == 0 or not math.isfinite(scale):
        return scale
    original = [p.data for p in loss.parameters]
    slopes = []
    try:
        for sign in (1, -1):
            for parameter, value, v in zip(loss.parameters, original, u, strict=True):
                shifted = value.double() + v * (sign * epsilon / scale)
                parameter.data = shifted.to(parameter.dtype)
            set_random_state(start)
            slopes.append(dot(loss.gradient(batch), u))
    finally:
        for parameter, value in zip(loss.parameters, original, strict=True):
            parameter.data = value
    return (slopes[0] - slopes[1]) / (2 * epsilon) * scale


def dot(gradients: Gradients, u: list[Tensor]) -> float:
    """The inner product over all parameters, summed in float64."""
    return sum(
        float((g.detach().double() * v).sum())
        for g, v in zip(gradients, u, strict=True)
        if g is not None
    )
