"""The largest learning rate at which an optimizer's own next step still lowers the loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.learning_rate.curvature import BatchLoss, Method, slope_and_curvature
from graphattn.diagnostics.learning_rate.restore import left_as_found
from graphattn.diagnostics.learning_rate.twin_optimizer import TwinOptimizer
from graphattn.graphs.arguments import as_choice, as_float, as_int


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
        >>> found = ga.diagnostics.max_stable_lr(model, loss_fn, sgd, [x] * 35, max_norm=None)
        >>> round(found.median, 4), found.share_stable()
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
        for done, batch in _numbered(batches, total):
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


def _numbered(batches: Iterable[Any], total: int) -> Iterator[tuple[int, Any]]:
    """The first `total` batches and their numbers."""
    iterator = iter(batches)
    for done in range(total):
        try:
            yield done, next(iterator)
        except StopIteration:
            raise ValueError(
                f"batches must yield {total} batches (state_batches + warmup_steps + steps), "
                f"got {done}"
            ) from None
