"""A model with the weights of another library: what is copied, drawn anew, set to 0, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graphattn.models.mixers import KINDS, one_per_block

Model = TypeVar("Model", bound=nn.Module)
MIXING = (".mixer.", ".position_bias.")  # what another mixer need not have, or has more of


def with_weights(
    cls: type[Model],
    arguments: Mapping[str, Any],
    changes: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> Model:
    """A model in evaluation mode, of the dtype and on the device of its `weights`.

    Args:
        cls: its class.
        arguments: all of its constructor, `changes` among them.
        changes: what the caller asked for: without a `mixer` among them nothing stays as drawn, and
            the caller's random numbers go on as if nothing had been drawn.
        weights: under the names of `cls`. Those of projections that a mixer does not have are left
            out, and those of a mixer that are not among them stay as drawn; but a bias is 0 whose
            projection comes without one.

    Raises:
        ValueError: for a weight without a place, or a place without a weight, outside of mixers.
    """
    with torch.random.fork_rng(devices=[], enabled="mixer" not in changes):
        ours = cls(**arguments)
    ours.to(weights["norm.weight"].device, weights["norm.weight"].dtype)
    own = ours.state_dict()
    if surplus := [name for name in weights if name not in own and not _mixes(name)]:
        raise ValueError(
            f"changes must keep the shape of the model, but there is no place for {surplus[0]!r}"
        )
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in weights:
                _copy(name, weights[name], parameter)
            elif not _mixes(name):
                raise ValueError(
                    f"changes must keep the shape of the model, which has no weights for {name!r}"
                )
            elif name.endswith("_proj.bias") and name.removesuffix("bias") + "weight" in weights:
                parameter.zero_()
    return ours.eval()


def _mixes(name: str) -> bool:
    return any(part in name for part in MIXING)


def _copy(name: str, value: Tensor, parameter: nn.Parameter) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"changes must keep the shape of the model: {name!r} is {list(value.shape)} there and "
            f"{list(parameter.shape)} here"
        )
    parameter.copy_(value)


def options_of_mixers(
    config: Any, arguments: Mapping[str, Any], widths: Sequence[float]
) -> dict[str, Any]:
    """Return the options of the mixers: what was given, dropout as in `config`, and Krause's
    bandwidth.

    Args:
        config: of a model of transformers.
        arguments: of our constructor.
        widths: features per head of every block.
    """
    options = dict(arguments.get("mixer_options") or {})
    entries = one_per_block(arguments.get("mixer", "dot"), len(widths))
    taken = {o for entry in entries if isinstance(entry, str) for o in KINDS[entry].options}
    if config.attention_probs_dropout_prob > 0 and "attention_dropout" in taken:
        options.setdefault("attention_dropout", float(config.attention_probs_dropout_prob))
    if "krause" in entries:  # squared distances are twice the products then, and squared lengths
        sigmas = [
            width**0.25 if entry == "krause" else None
            for entry, width in zip(entries, widths, strict=True)
        ]
        options.setdefault("init_sigma", sigmas)
    return options
