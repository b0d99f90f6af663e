"""Layers with their learned weights switched off."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from graphattn.diagnostics.attention.record import is_attention_layer

_NORMS = (nn.LayerNorm, nn.RMSNorm)
_NORM_NAME = re.compile("(RMS|Layer)Norm")
#: how transformers calls the linear maps of attention
_OF_TRANSFORMERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    *("q_lin", "k_lin", "v_lin", "out_lin"),
    *("query", "key", "value", "attention.output.dense"),
    *("query_global", "key_global", "value_global"),
)


def disabled_parameters(
    model: nn.Module, layers: dict[str, nn.Module], projections: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return substitutes for the parameters of `layers`, by their names in the model.

    Attention projections become the identity, norms plain, other linear maps 0 (the perceptron),
    bandwidths and sinks what they were at the start; embeddings stay.
    """
    found: dict[str, Tensor] = {}
    has_attention = False
    for layer_name, layer in layers.items():
        for inner, module in layer.named_modules():
            name = f"{layer_name}.{inner}".strip(".")
            own = dict(module.named_parameters(prefix=name, recurse=False))
            if not own or isinstance(module, nn.Embedding):
                continue
            if is_norm(module):
                found |= _filled(own, 0.0 if _adds_one(module) else 1.0)
            elif isinstance(module, nn.MultiheadAttention):
                found |= _projections_in_one(name, own)
            elif isinstance(module, nn.Linear):
                is_projection = is_attention_projection(model, layer, name, projections)
                has_attention |= is_projection
                found |= _identity(name, own) if is_projection else _filled(own, 0.0)
            elif is_attention_layer(module) and set(own) <= _at_start(name, module).keys():
                for key, number in _at_start(name, module).items():
                    if key in own:
                        found[key] = torch.full_like(own[key], number)
            else:
                raise ValueError(
                    "weights='disabled' knows no parameter-free form of "
                    f"{type(module).__name__} ({name!r})"
                )
    if not has_attention:
        raise ValueError(
            "projections must say how the names of the attention's linear maps end: the layers "
            "hold neither attention of graphattn.nn nor torch.nn.MultiheadAttention, and no "
            f"linear map ends in one of {projections}"
        )
    return found


def _at_start(name: str, layer: nn.Module) -> dict[str, float]:
    """Return an attention layer's own parameters as they are before training, by name."""
    found = {f"{name}.sink".strip("."): 0.0}
    init_sigma: Any = getattr(layer, "init_sigma", None)
    if init_sigma is not None:
        found[f"{name}.log_sigma".strip(".")] = math.log(init_sigma)
    return found


def without_normalization(layers: dict[str, nn.Module]) -> list[RemovableHandle]:
    """Hooks by which the norms of `layers` pass their input on."""
    norms = {m for layer in layers.values() for m in layer.modules() if is_norm(m)}
    return [norm.register_forward_hook(_pass_on) for norm in norms]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, torch's or one that a model brings along."""
    return isinstance(module, _NORMS) or bool(_NORM_NAME.search(type(module).__name__))


def _adds_one(norm: nn.Module) -> bool:
    """Whether a norm scales by 1 + weight, as Gemma's do: at weight 0 they scale by 1."""
    return type(norm).__name__.startswith("Gemma")


def is_attention_projection(
    model: nn.Module, layer: nn.Module, name: str, projections: tuple[str, ...]
) -> bool:
    """Whether the linear map of this name in the model is a projection of attention."""
    if type(layer).__module__.startswith("transformers."):
        projections = (*projections, *_OF_TRANSFORMERS)
    return name.endswith(projections) or _belongs_to_attention(model, name)


def _pass_on(_: nn.Module, args: tuple[Tensor, ...], __: Any) -> Tensor:
    return args[0]


def _belongs_to_attention(model: nn.Module, name: str) -> bool:
    """Whether a linear map is a projection of a layer whose attention is known."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention) or is_attention_layer(parent)


def _filled(own: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Weights of one number, biases 0."""
    return {
        name: torch.full_like(value, weight if name.endswith("weight") else 0.0)
        for name, value in own.items()
    }


def _identity(name: str, own: dict[str, Tensor], copies: int = 1) -> dict[str, Tensor]:
    """The identity, so many times below each other, and biases of 0."""
    found = {}
    for key, value in own.items():
        found[key] = torch.zeros_like(value)
        if value.dim() == 2:
            rows, columns = value.shape
            if rows != copies * columns:
                raise ValueError(
                    "weights='disabled' needs square projections, whose parameter-free form is the "
                    f"identity, got {name!r} of shape {list(value.shape)}"
                )
            found[key].view(copies, columns, columns).diagonal(dim1=-2, dim2=-1).fill_(1)
    return found


def _projections_in_one(name: str, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value projections of torch's MultiheadAttention, which lie in one matrix."""
    known = {f"{name}.in_proj_weight".strip("."), f"{name}.in_proj_bias".strip(".")}
    if not set(own) <= known:
        raise ValueError(
            "weights='disabled' needs query, key and value projections of one width in "
            f"MultiheadAttention, without bias_k and bias_v, got {name!r} with {sorted(own)}"
        )
    return _identity(name, own, copies=3)
