"""Layers beside which consensus is compared: do they mix less, and is that enough?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga
from graphattn.ops.attention.logits.score import DotProduct, Score


class Average(ga.nn.DotProductAttention):
    """The average of the projected tokens of a window: all queries are 0."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter in self.query_proj.parameters():
            nn.init.zeros_(parameter.requires_grad_(False))


class SmallGain(ga.nn.DotProductAttention):
    """Attention whose output is multiplied by 0.1, the step size of consensus."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 0.1 * super().forward(*args, **kwargs)


class CausalConvolution(nn.Module):
    """A convolution over the token itself and the two before it."""

    def __init__(self, dim: int, tokens: int = 3) -> None:
        super().__init__()
        self.dim = dim
        self.convolution = nn.Conv1d(dim, dim, tokens)

    def forward(self, x: Tensor, graph: Any, **_: Any) -> Tensor:
        before = self.convolution.kernel_size[0] - 1
        padded = functional.pad(x.transpose(-1, -2), (before, 0))
        return self.convolution(padded).transpose(-1, -2)

    def reset_parameters(self) -> None:
        self.convolution.reset_parameters()


class GaussianWithValues(ga.nn.GaussianKernelAttention):
    """Gaussian kernel attention whose values are projected; queries and keys are not."""

    value_proj: nn.Linear

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.value_proj = nn.Linear(self.dim, self.dim)

    def project(self, x: Tensor, context: Tensor, rotations: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = super().project(x, context, rotations)
        return query, key, self.split(self.value_proj(context), self.heads)


def with_projected_values(model: Any, seed: int) -> nn.Module:
    """Give the layers of Gaussian kernel attention of a model projections of the values."""
    torch.manual_seed(seed)
    for block in model.blocks:
        block.mixer = GaussianWithValues(block.mixer.dim, heads=block.mixer.heads)
    return model


def with_mixers(
    model: ga.models.CausalLM, seed: int, *, kind: type[nn.Module], window: int | None
) -> nn.Module:
    """Make a model as `model`, with layers of another class in all of its blocks."""
    torch.manual_seed(seed)
    config = dict(model.config)
    dim, depth, heads = (config[name] for name in ("dim", "depth", "heads"))
    options = {} if kind is CausalConvolution else {"heads": heads, "rope": True}
    config |= {
        "mixer": [kind(dim, **options) for _ in range(depth)],
        "window": window,
        "mixer_options": None,
    }
    return ga.models.CausalLM(**config)


def with_blocks(
    model: ga.models.CausalLM,
    seed: int,
    *,
    mixer: list[str],
    window: list[int | None],
    options: dict[str, Any],
) -> nn.Module:
    """Make a model as `model`, with another named mixer and window in every block."""
    torch.manual_seed(seed)
    changes = {"mixer": mixer, "window": window, "mixer_options": options}
    return ga.models.CausalLM(**{**model.config, **changes})


class QueryScaled(ga.nn.DotProductAttention):
    """Attention whose queries are divided by sqrt(D), and whose product is not."""

    def project(self, *args: Any) -> tuple[Any, ...]:
        query, key, value = super().project(*args)
        return query / math.sqrt(self.head_dim), key, value

    def score(self) -> Score:
        return DotProduct(1.0)


def with_scaled_queries(model: nn.Module, seed: int = 0) -> nn.Module:
    """Change all attention of a model to :class:`QueryScaled`; weights and config stay the same."""
    for layer in model.modules():
        if type(layer) is ga.nn.DotProductAttention:
            layer.__class__ = QueryScaled
    return model
