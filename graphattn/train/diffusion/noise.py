"""Noise schedules: how many tokens the forward process has masked at a time."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float
from graphattn.near_names import did_you_mean


class Noise(abc.ABC):
    r"""A noise schedule: the total noise sigma(t), which grows with the time t in [0, 1].

    In the absorbing process a token is masked by time t with probability
    :math:`1 - e^{-\sigma(t)}`, independently of all others.

    Example:
        >>> import torch, graphattn as ga
        >>> noise = ga.train.LogLinearNoise()
        >>> isinstance(noise, ga.train.Noise), bool(noise.total(torch.tensor(0.9)) > 2)
        (True, True)
    """

    @abc.abstractmethod
    def total(self, t: Tensor) -> Tensor:
        """Return the total noise sigma(t), with the shape and dtype of `t`."""

    @abc.abstractmethod
    def rate(self, t: Tensor) -> Tensor:
        """Return the derivative of sigma by time, d sigma / dt."""

    def mask_probability(self, t: Tensor) -> Tensor:
        """Return the probability that a token is masked by time t, 1 - exp(-sigma(t))."""
        return -torch.expm1(-self.total(t))

    def weight(self, t: Tensor) -> Tensor:
        """Return the weight of a masked token at time t, rate / (exp(sigma) - 1)."""
        return self.rate(t) / torch.expm1(self.total(t))

    def range(self) -> tuple[float, float]:
        """Return sigma(0) and sigma(1)."""
        first, last = self.total(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
        return first, last


class LogLinearNoise(Noise):
    r"""A share of masked tokens that grows evenly with time (SEDD's "log-linear" noise).

    .. math::
        \sigma(t) = -\log(1 - (1 - \epsilon)\, t), \qquad
        1 - e^{-\sigma(t)} = (1 - \epsilon)\, t, \qquad
        \frac{\sigma'(t)}{e^{\sigma(t)} - 1} = \frac1t

    Source: Lou et al. 2024, *Discrete Diffusion Modeling by Estimating the Ratios of the Data
    Distribution* (SEDD), log-linear noise.

    Args:
        eps: the share of tokens that is not masked at t = 1, in (0, 1).

    Raises:
        ValueError: if `eps` is out of range.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.train.LogLinearNoise().mask_probability(torch.tensor([0.0, 0.5, 1.0]))
        tensor([0.0000, 0.4995, 0.9990])
    """

    def __init__(self, eps: float = 1e-3) -> None:
        self.eps = as_float("eps", eps, positive=True)
        if self.eps >= 1:
            raise ValueError(f"eps must be in (0, 1), got {self.eps}")

    def total(self, t: Tensor) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * t)

    def rate(self, t: Tensor) -> Tensor:
        return (1 - self.eps) / (1 - (1 - self.eps) * t)

    def mask_probability(self, t: Tensor) -> Tensor:
        return (1 - self.eps) * t

    def weight(self, t: Tensor) -> Tensor:
        return 1 / t

    def __repr__(self) -> str:
        return f"LogLinearNoise(eps={self.eps})"


class GeometricNoise(Noise):
    r"""A total noise that grows exponentially with time.

    .. math::
        \sigma(t) = \sigma_{\min}^{1 - t} \, \sigma_{\max}^{t}, \qquad
        \sigma'(t) = \sigma(t) \log \frac{\sigma_{\max}}{\sigma_{\min}}

    The consensus paper trains its text models with a geometric schedule (Appendix E.1).
    Source: Lou et al. 2024 (SEDD), geometric noise; the range is that of its published
    configuration.

    Args:
        sigma_min: the noise at t = 0, > 0.
        sigma_max: the noise at t = 1, above `sigma_min`; the share exp(-sigma_max) of the tokens is
            then not masked.

    Raises:
        ValueError: if `sigma_max` is not above `sigma_min`, or one is not above 0.

    Example:
        >>> import torch, graphattn as ga
        >>> noise = ga.train.GeometricNoise(sigma_min=0.01, sigma_max=16.0)
        >>> noise.total(torch.tensor([0.0, 0.5, 1.0]))
        tensor([1.0000e-02, 4.0000e-01, 1.6000e+01])
    """

    def __init__(self, sigma_min: float = 1e-4, sigma_max: float = 20.0) -> None:
        self.sigma_min = as_float("sigma_min", sigma_min, positive=True)
        self.sigma_max = as_float("sigma_max", sigma_max, positive=True)
        if self.sigma_max <= self.sigma_min:
            raise ValueError(
                f"sigma_max must be above sigma_min, {self.sigma_min}, got {self.sigma_max}"
            )
        self._log_ratio = math.log(self.sigma_max / self.sigma_min)

    def total(self, t: Tensor) -> Tensor:
        return self.sigma_min * torch.exp(t * self._log_ratio)

    def rate(self, t: Tensor) -> Tensor:
        return self.total(t) * self._log_ratio

    def __repr__(self) -> str:
        return f"GeometricNoise(sigma_min={self.sigma_min}, sigma_max={self.sigma_max})"


SCHEDULES: dict[str, type[Noise]] = {"log-linear": LogLinearNoise, "geometric": GeometricNoise}


def as_noise(noise: Any, options: Mapping[str, Any] | None = None) -> Noise:
    """Return a schedule from its name and `options`, or the given schedule."""
    if isinstance(noise, Noise):
        if options:
            raise ValueError(
                f"noise_options must be None if noise is a schedule itself, got {dict(options)}"
            )
        return noise
    if not isinstance(noise, str) or noise not in SCHEDULES:
        raise ValueError(
            f"noise must be one of {', '.join(map(repr, SCHEDULES))}, or an instance of Noise, got "
            f"{noise!r}{did_you_mean(noise, SCHEDULES)}"
        )
    try:
        return SCHEDULES[noise](**(options or {}))
    except TypeError:
        allowed = {"log-linear": "eps", "geometric": "sigma_min and sigma_max"}[noise]
        raise ValueError(
            f"noise_options for noise={noise!r} must be a dict with {allowed}, got {options!r}"
        ) from None
