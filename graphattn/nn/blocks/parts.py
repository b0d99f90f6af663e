"""Parts of a block beside its mixer: norms, activations, and a linear map that starts at 0."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_choice

Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "relu2"]


def make_norm(norm: Norm, dim: int, *, affine: bool = True, bias: bool = True) -> nn.Module:
    """Make the norm with this name."""
    if as_choice("norm", norm, ("layer", "rms")) == "layer":
        return nn.LayerNorm(dim, elementwise_affine=affine, bias=bias)
    return nn.RMSNorm(dim, elementwise_affine=affine)


def make_activation(activation: Activation) -> nn.Module:
    """Make the activation with this name."""
    return (
        nn.GELU() if as_choice("activation", activation, ("gelu", "relu2")) == "gelu" else ReLU2()
    )


class ReLU2(nn.Module):
    """The square of ReLU (Primer, So et al., 2021).

    Example:
        >>> import torch
        >>> from graphattn.nn.blocks.parts import ReLU2
        >>> ReLU2()(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x)^2, element by element."""
        return torch.relu(x).square()


def zero_linear(in_features: int, out_features: int) -> nn.Linear:
    """Make a linear map whose weights and biases are 0, without drawing random numbers."""
    device = torch.get_default_device()  # skip_init would ignore the default device
    made: nn.Linear = nn.utils.skip_init(nn.Linear, in_features, out_features, device=device)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made
