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

    values: tuple[float, ...]  #: alpha_max per step: 0 uphill, infinite without curvature
    lr: float  #: the optimizer's learning rate (of its first group)

    @property
    def median(self) -> float:
        """The median of the values that are not infinite, as the paper takes it.

        Infinite if all are; NaN if a loss or gradient was not finite.
        """
        finite = [value for value in self.values if value != math.inf]
        if any(map(math.isnan, finite)):
            return math.nan
        return statistics.median(finite) if finite else math.inf

    def share_stable(self, lr: float | None = None) -> float:
        """The share of steps, in 0 .. 1, whose alpha_max lies above `lr` (the optimizer's if None).

        Infinite ones do, those that are NaN do not.
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

    with u the step per unit of learning rate, :math:`\theta' = \theta + \alpha u`: up to second
    order, the loss of the batch falls for every learning rate below (Stabilizing Transformer
    Training Through Consensus, Eq. 17-19). It is 0 where the step goes uphill
    (:math:`\langle \nabla L, u \rangle \geq 0`) and infinite where it meets no curvature
    (:math:`\langle u, \nabla^2 L \, u \rangle \leq 0`). Under plain gradient descent it is never
    below 2 / lambda_max of the Hessian.

    u is what the optimizer does: a copy of it (:func:`copy.deepcopy`), with whatever state it has,
    makes its step on copies of the parameters, in float64, and the difference is divided by the
    learning rate. Decoupled weight decay is thus part of u (AdamW: -weight_decay * theta, per unit
    of learning rate). Where groups differ in learning rate, alpha_max is in units of the first
    group's, the others scaled in proportion.

    The defaults are the protocol of the paper's Section 5.2.1: gradients are clipped to norm 1
    before the optimizer sees them (the slope :math:`\langle \nabla L, u \rangle` is that of the
    loss itself, unclipped); 5 batches warm the optimizer's moments while the parameters stay, so
    that bias correction counts on from step 6 (for a new optimizer); 5 steps are taken
    unrecorded, then 25 recorded, each on its own batch. The moments are warmed by the optimizer's
    own running means. Where the paper says that "m is the average gradient over the 5 batches",
    that is read as the bias-corrected mean: with the bare average in its place, "bias
    correction from step 6" would divide by 1 - beta^6 once more, and u would come out several
    times too small.

    Args:
        model: left as it was found: parameters, gradients, buffers, and torch's random numbers
            (a generator of your own goes on). It runs in the mode it is in.
        loss_fn: ``loss_fn(model, batch)``, a scalar that the optimizer's parameters enter.
        optimizer: any of torch's that steps without a closure; left as it was found. A new one
            follows the paper; one in the midst of training keeps its moments and its count.
        batches: state_batches + warmup_steps + steps of them are taken from it, in order.
        method: how curvature is found. "hvp" differentiates twice (the loss must allow it: torch's
            fused attention does not, graphattn's layers do); "finite_difference" takes central
            differences of gradients (Eq. 20).
        max_norm: gradients are clipped to this L2 norm; None for no clipping.
        state_batches: batches that only warm the optimizer's state.
        warmup_steps: steps taken before the first one recorded.
        steps: steps recorded.
        epsilon: of Eq. 20, for u scaled to a root mean square of 1 (about what Adam's is). The
            paper's 1e-4 is for float32; where a step is bent more than once on that length, or
            curvatures nearly cancel, float64 with 1e-6 is closer.

    Returns:
        A :class:`StableLearningRate`: values per step, median, share of stable steps; it prints as
        a line.

    Raises:
        ValueError: names the argument, its value and what is allowed; if `batches` run out, the
            learning rate is 0, or the loss is no scalar.

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
    """Eq. 18 and its cases."""
    if not (math.isfinite(slope) and math.isfinite(curvature)):
        return math.nan
    if slope >= 0:
        return 0.0
    return math.inf if curvature <= 0 else -2 * slope / curvature


def _numbered(batches: Iterable[Any], total: int) -> Iterator[tuple[int, Any]]:
    """The first `total` batches and their numbers."""
    found = iter(batches)
    for done in range(total):
        try:
            yield done, next(found)
        except StopIteration:
            raise ValueError(
                f"batches must give {total} batches (state_batches + warmup_steps + steps), "
                f"got {done}"
            ) from None
