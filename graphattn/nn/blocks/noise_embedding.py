"""Embed a number per sequence or token, such as its noise level, as a vector for blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_float, as_int
from graphattn.nn.files.config import Configured


class NoiseEmbedding(Configured, nn.Module):
    r"""Embed a noise level as a vector: waves of many frequencies, then a perceptron with SiLU.

    .. math::
        c = \mathrm{silu}\big(W_2 \, \mathrm{silu}(W_1 \phi(\sigma) + b_1) + b_2\big), \qquad
        \phi(\sigma) = [\cos(\omega_0 \sigma), \dots, \sin(\omega_0 \sigma), \dots], \quad
        \omega_k = P^{-k / (F / 2)}

    This is the condition of SEDD's backbone (Lou et al., 2024), which the consensus paper uses
    (Appendix E.1). The waves are those of diffusion models of images, with the cosines first. Pass
    the result as `condition` to a :class:`~graphattn.nn.PreNormBlock` made with ``condition_dim``.

    Args:
        dim: width of the vector (128 in SEDD).
        features: F, the number of waves; it must be even.
        max_period: P. The slowest wave has a period of about 2 pi P.

    Shapes:
        - **noise_level**: floating-point [*]
        - **output**: [*, dim]

    Raises:
        ValueError: if `features` is odd, if a number is out of range, or if `noise_level` is not a
            floating-point tensor.

    Example:
        >>> import torch, graphattn as ga
        >>> noise = ga.nn.NoiseEmbedding(8)
        >>> noise(torch.tensor([0.01, 0.5, 6.9])).shape
        torch.Size([3, 8])
    """

    def __init__(self, dim: int, *, features: int = 256, max_period: float = 10000.0) -> None:
        super().__init__()
        self.dim = as_int("dim", dim, 1)
        self.features = as_int("features", features, 2)
        if self.features % 2:
            raise ValueError(f"features must be even, got {features}")
        self.max_period = as_float("max_period", max_period, positive=True)
        self.mlp = nn.Sequential(
            nn.Linear(self.features, self.dim), nn.SiLU(), nn.Linear(self.dim, self.dim)
        )

    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        for part in self.mlp:
            if isinstance(part, nn.Linear):
                part.reset_parameters()

    def forward(self, noise_level: Tensor) -> Tensor:
        """Return the vector of every noise level, [*, dim]."""
        if not isinstance(noise_level, Tensor) or not noise_level.is_floating_point():
            got = getattr(noise_level, "dtype", type(noise_level).__name__)
            raise ValueError(f"noise_level must be a floating-point tensor, got {got}")
        dtype = next(self.mlp.parameters()).dtype
        waves = self.waves(noise_level.to(torch.promote_types(noise_level.dtype, dtype)))
        return nn.functional.silu(self.mlp(waves.to(dtype)))

    def waves(self, noise_level: Tensor) -> Tensor:
        """Return cosines and sines of the levels, [*, features], in float32 or float64."""
        level = noise_level.to(torch.promote_types(noise_level.dtype, torch.float32))
        half = self.features // 2
        order = torch.arange(half, dtype=level.dtype, device=level.device)
        angle = level.unsqueeze(-1) * torch.exp(order * (-math.log(self.max_period) / half))
        return torch.cat([angle.cos(), angle.sin()], -1)

    def __repr__(self) -> str:
        return f"NoiseEmbedding({self.features} waves -> {self.dim})"
