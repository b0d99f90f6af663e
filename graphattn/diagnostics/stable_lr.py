"""The largest learning rate at which an optimizer's own next step still lowers the loss."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from graphattn.diagnostics.arguments import as_model
from graphattn.graphs.arguments import as_choice, as_float, as_int

Method = Literal["hvp", "finite_difference"]
Gradients = list[Tensor | None]
RandomState = tuple[Tensor, dict[int, Tensor]]


@dataclass(frozen=True)
class StableLearningRate:
    """The maximum stable learning rate of every recorded step."""

    #: alpha_max of every step; 0 if the step goes uphill, infinite if the curvature is not positive
    values: tuple[float, ...]
    lr: float  #: the learning rate of the optimizer's first parameter group

    @property
    def median(self) -> float:
        """The median of the values that are not infinite, as in the paper.

        It is infinite if all values are, and NaN if a loss or a gradient was not finite.
        """
        finite = [value for value in self.values if value != math.inf]
        if any(map(math.isnan, finite)):
            return math.nan
        return statistics.median(finite) if finite else math.inf

    def share_stable(self, lr: float | None = None) -> float:
        """The share of steps, from 0 to 1, whose alpha_max is greater than `lr`.

        `lr` None stands for the optimizer's learning rate. An infinite alpha_max counts as
        greater; NaN does not.
        """
        lr = self.lr if lr is None else as_float("lr", lr, positive=False)
        return sum(value > lr for value in self.values) / len(self.values)

    def __str__(self) -> str:
        finite = sorted(value for value in self.values if value < math.inf) or [math.inf]
        low, high = (finite[math.ceil(share * len(finite)) - 1] for share in (0.25, 0.75))
        unlimited = self.values.count(math.inf)
        return (
            f"maximum stable learning rate: median {self.median:.3g} "
            f"(quartiles {low:.3g} .. {high:.3g}) over {len(self.values)} step"
            + "s" * (len(self.values) != 1)
            + ", "
            + (f"{unlimited} of them without a limit, " if unlimited else "")
            + f"{self.share_stable():.0%} of them stable at lr = {self.lr:g}"
        )


def max_stable_lr(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    method: Method = "hvp",
    max_norm: float | None = 1.0,
    state_batches: int = 5,
    warmup_steps: int = 5,
    steps: int = 25,
    epsilon: float = 1e-4,
) -> StableLearningRate:
    r"""The maximum stable learning rate along the optimizer's own steps.

    .. math::
        \alpha_{\max} = \frac{-2 \langle \nabla L, u \rangle}{\langle u, \nabla^2 L \, u \rangle}

    where u is the optimizer's step per unit of learning rate, :math:`\theta' = \theta + \alpha u`.
    Up to second order, every learning rate below :math:`\alpha_{\max}` lowers the loss of the batch
    (Stabilizing Transformer Training Through Consensus, Eq. 17-19). :math:`\alpha_{\max}` is 0 if
    the step goes uphill (:math:`\langle \nabla L, u \rangle \geq 0`), and otherwise infinite if the
    curvature along it is not positive (:math:`\langle u, \nabla^2 L \, u \rangle \leq 0`). Under
    plain gradient descent it is never below 2 / lambda_max of the Hessian.

    u is measured on the optimizer itself: a copy of it (:func:`copy.deepcopy`), with its present
    state, makes its step on float64 copies of the parameters, and the change of the parameters is
    divided by the learning rate. Decoupled weight decay is thus part of u (for AdamW it is
    -weight_decay * theta per unit of learning rate). If parameter groups have different learning
    rates, alpha_max is a learning rate of the first group, and the other groups' learning rates
    scale in proportion.

    The defaults are the protocol of the paper's Section 5.2.1. Gradients are clipped to norm 1
    before the optimizer gets them (the slope :math:`\langle \nabla L, u \rangle` uses the unclipped
    gradient of the loss). The first 5 batches only update the optimizer's moments, while the
    parameters do not change, so that for a new optimizer the bias correction continues from step 6.
    Then 5 steps are made without recording and 25 with recording, each on its own batch. The
    moments are the optimizer's own running means. The paper says that "m is the average gradient
    over the 5 batches"; this is read as the bias-corrected mean. With the plain average instead,
    "bias correction from step 6" would divide by 1 - beta^6 once more, and u would be several times
    too small.

    Args:
        model: the model; it runs in the mode (training or evaluation) that it is in. Its
            parameters, gradients and buffers and torch's random number generators are restored
            afterwards (a generator that you made yourself is not).
        loss_fn: ``loss_fn(model, batch)`` returns a scalar that depends on the optimizer's
            parameters.
        optimizer: any torch optimizer that steps without a closure; it is not changed. A new
            optimizer follows the paper; one in the middle of training starts from its own moments
            and step count.
        batches: the first state_batches + warmup_steps + steps of them are used, in order.
        method: how the curvature is computed. "hvp" differentiates twice (the loss must allow it:
            torch's fused attention does not, graphattn's layers do); "finite_difference" takes
            central differences of gradients (Eq. 20).
        max_norm: gradients are clipped to this L2 norm; None for no clipping.
        state_batches: number of batches that only update the optimizer's state.
        warmup_steps: number of steps that are made before the first recorded one.
        steps: number of recorded steps.
        epsilon: the step size of Eq. 20, for u scaled to a root mean square of 1 (about the value
            that Adam's u has). The paper's 1e-4 is for float32. If the gradient changes strongly
            within that distance, or positive and negative curvatures nearly cancel, float64 with
            1e-6 is more accurate.

    Returns:
        A :class:`StableLearningRate` with the value of every step, their median and the share of
        stable steps; ``print`` shows it as one line.

    Raises:
        ValueError: if an argument has a wrong type or value, `batches` has too few batches, the
            learning rate is not positive, or the loss is not a scalar; the message names the
            argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> x, y = torch.eye(3), torch.tensor([[1.0], [2.0], [3.0]])
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> loss_fn = lambda model, batch: (model(batch) - y).square().sum() / 2  # Hessian: I
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> rates = ga.diagnostics.max_stable_lr(model, loss_fn, sgd, [x] * 35, max_norm=None)
        >>> round(rates.median, 4), rates.share_stable()
        (2.0, 1.0)
    """
    as_choice("method", method, ("hvp", "finite_difference"))
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be a torch Optimizer, got {type(optimizer).__name__}")
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be callable, got {type(loss_fn).__name__}")
    if max_norm is not None:
        max_norm = as_float("max_norm", max_norm, positive=True)
    epsilon = as_float("epsilon", epsilon, positive=True)
    state_batches = as_int("state_batches", state_batches, 0)
    unrecorded = state_batches + as_int("warmup_steps", warmup_steps, 0)
    total = unrecorded + as_int("steps", steps, 1)

    twin = TwinOptimizer(optimizer, max_norm)
    loss = BatchLoss(as_model(model), loss_fn, twin.parameters)
    values: list[float] = []
    with left_as_found(model, twin.parameters):
        iterator = iter(batches)
        for done in range(total):
            try:
                batch = next(iterator)
            except StopIteration:
                raise ValueError(
                    f"batches must yield {total} batches (state_batches + warmup_steps + steps), "
                    f"got {done}"
                ) from None
            if done < state_batches:
                twin.step(loss.gradient(batch))
                twin.stay()
                continue
            if done < unrecorded:
                twin.step(loss.gradient(batch))
            else:
                slope, curvature = slope_and_curvature(loss, batch, twin.step, method, epsilon)
                values.append(alpha_max(slope, curvature))
            twin.write()
    return StableLearningRate(tuple(values), twin.lr)


def alpha_max(slope: float, curvature: float) -> float:
    """The maximum stable learning rate of one step: Eq. 18, with its special cases."""
    if not (math.isfinite(slope) and math.isfinite(curvature)):
        return math.nan
    if slope >= 0:
        return 0.0
    return math.inf if curvature <= 0 else -2 * slope / curvature


# The step of the optimizer.


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


# Slope and curvature of the loss along that step.


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


# What a measurement must leave as it was.


@contextmanager
def left_as_found(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Restore parameters, buffers and random number generators, also after an exception.

    Inside the context, parameters may be given other data (``parameter.data = ...``). The original
    tensors are then not written to, and the same memory is restored.
    """
    original = [parameter.data for parameter in parameters]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    state = random_state(parameters)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, original, strict=True):
            parameter.data = data
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        set_random_state(state)


def random_state(parameters: Sequence[Tensor]) -> RandomState:
    """State of torch's random number generators, on the CPU and on the parameters' GPUs."""
    gpus = {p.device.index or 0 for p in parameters if p.device.type == "cuda"}
    return torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}


def set_random_state(state: RandomState) -> None:
    """Restore a state that :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    for gpu, of_gpu in state[1].items():
        torch.cuda.set_rng_state(of_gpu, gpu)
