"""Call a model for diffusion: with the noise level if it takes one, and without dropout."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.diagnostics.hidden.evaluating import dropout_off
from graphattn.models.proteins.source_tracks import LETTERS
from graphattn.train.batches import unwrapped
from graphattn.train.checks import described

Denoiser = Callable[..., Any]


def takes_noise_level(model: Denoiser) -> bool:
    """Return whether `model` takes a `noise_level`.

    A model of this library takes one if its `noise_dim` is not None; any other callable if it has
    an argument of that name. Wrappers around the model, such as torch.compile's, are removed first.
    """
    model = unwrapped(model)
    if hasattr(model, "noise_dim"):
        return model.noise_dim is not None
    try:
        named = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # builtins have no signature
        return False
    return "noise_level" in named.parameters


def call(model: Denoiser, tokens: Tensor, noise_level: Tensor, **given: Any) -> Tensor:
    """Return logits [*, N, vocab_size] for `tokens` [*, N] at a noise level [*] or [*, N].

    Arguments in `given` that are None are not passed.
    """
    arguments = {name: value for name, value in given.items() if value is not None}
    if takes_noise_level(model):
        arguments["noise_level"] = noise_level
    return logits_of(model(tokens, **arguments), tokens, "model")


def logits_of(output: Any, tokens: Tensor, name: str) -> Tensor:
    """Return logits [*, N, vocab_size] from an output: a tensor, an object with `logits`, or a dict
    of source tracks, in which those of the letters count."""
    if isinstance(output, dict) and LETTERS in output:
        output = output[LETTERS]
    logits = getattr(output, "logits", output)
    is_floating = isinstance(logits, Tensor) and logits.is_floating_point()
    if not is_floating or logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"{name} must return floating-point logits [{', '.join(map(str, tokens.shape))}, "
            f"vocab_size] for tokens of shape {list(tokens.shape)}, got {described(logits)}"
        )
    return logits


def without_dropout(model: Any) -> contextlib.AbstractContextManager[None]:
    """Set a model, if it is a module, to evaluation mode, and restore its mode afterwards."""
    return dropout_off(model) if isinstance(model, nn.Module) else contextlib.nullcontext()


def check_generator(generator: Any) -> None:
    """Raise a ValueError unless it is a generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator must be a torch.Generator or None, got {type(generator).__name__}"
        )
