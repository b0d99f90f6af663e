"""Load weights of another library into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graphattn.models.mixers import KINDS, one_per_block

Model = TypeVar("Model", bound=nn.Module)
MIXING = (
    ".mixer.",
    ".position_bias.",
)  # parameters that another mixer may lack, or have in addition


def with_weights(
    cls: type[Model],
    arguments: Mapping[str, Any],
    changes: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> Model:
    """Make a model in evaluation mode, with the dtype and device of its `weights`.

    Args:
        cls: class of the model.
        arguments: all arguments of its constructor, including `changes`.
        changes: arguments that the caller has set. Without a `mixer` among them, all parameters
            come from `weights`, and the state of the random number generator does not change.
        weights: weights under the names of `cls`. Those of projections that a mixer does not have
            are ignored. Parameters of a mixer without a weight keep their random values, but a bias
            becomes 0 if its projection has a weight and no bias.

    Raises:
        ValueError: if, outside of mixers, a weight has no parameter, or a parameter has no weight.
    """
    with torch.random.fork_rng(devices=[], enabled="mixer" not in changes):
        ours = cls(**arguments)
    ours.to(weights["norm.weight"].device, weights["norm.weight"].dtype)
    parameters = ours.state_dict()
    if surplus := [name for name in weights if name not in parameters and not _mixes(name)]:
        raise ValueError(
            "changes must keep the shape of the model, but with them it has no parameter for the "
            f"weight {surplus[0]!r}"
        )
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in weights:
                _copy(name, weights[name], parameter)
            elif not _mixes(name):
                raise ValueError(
                    "changes must keep the shape of the model, but the loaded weights have none "
                    f"for the parameter {name!r}"
                )
            elif name.endswith("_proj.bias") and name.removesuffix("bias") + "weight" in weights:
                parameter.zero_()
    return ours.eval()


def _mixes(name: str) -> bool:
    return any(part in name for part in MIXING)


def _copy(name: str, value: Tensor, parameter: nn.Parameter) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"changes must keep the shape of the model: the loaded weight {name!r} has shape "
            f"{list(value.shape)}, the parameter has {list(parameter.shape)}"
        )
    parameter.copy_(value)


def options_of_mixers(
    config: Any, arguments: Mapping[str, Any], widths: Sequence[float]
) -> dict[str, Any]:
    """Return the options of the mixers: those given, dropout of `config`, and Krause's bandwidth.

    Args:
        config: the config of a model of transformers.
        arguments: arguments of our constructor.
        widths: number of features per head, for every block.
    """
    options = dict(arguments.get("mixer_options") or {})
    entries = one_per_block(arguments.get("mixer", "dot"), len(widths))
    taken = {o for entry in entries if isinstance(entry, str) for o in KINDS[entry].options}
    if config.attention_probs_dropout_prob > 0 and "attention_dropout" in taken:
        options.setdefault("attention_dropout", float(config.attention_probs_dropout_prob))
    if "krause" in entries:  # so that -|q - k|^2 / (2 sigma^2) contains q k / sqrt(D)
        sigmas = [
            width**0.25 if entry == "krause" else None
            for entry, width in zip(entries, widths, strict=True)
        ]
        options.setdefault("init_sigma", sigmas)
    return options
