"""Layers with their learned weights disabled."""

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
#: names of the linear maps of attention in transformers
_OF_TRANSFORMERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    *("q_lin", "k_lin", "v_lin", "out_lin"),
    *("query", "key", "value", "attention.output.dense"),
    *("query_global", "key_global", "value_global"),
)


def disabled_parameters(
    model: nn.Module, layers: dict[str, nn.Module], projections: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return replacements for the parameters of `layers`, by their names in the model.

    Attention projections become the identity. Norms get the scale 1 and the shift 0. Other linear
    maps (the MLP) become 0. Bandwidths and sinks get their initial values. Embeddings do not
    change.
    """
    replacements: dict[str, Tensor] = {}
    has_attention = False
    for layer_name, layer in layers.items():
        for inner, module in layer.named_modules():
            name = f"{layer_name}.{inner}".strip(".")
            parameters = dict(module.named_parameters(prefix=name, recurse=False))
            if not parameters or isinstance(module, nn.Embedding):
                continue
            if is_norm(module):
                replacements |= _filled(parameters, 0.0 if _adds_one(module) else 1.0)
            elif isinstance(module, nn.MultiheadAttention):
                replacements |= _projections_in_one(name, parameters)
            elif isinstance(module, nn.Linear):
                is_projection = is_attention_projection(model, layer, name, projections)
                has_attention |= is_projection
                replacements |= (
                    _identity(name, parameters) if is_projection else _filled(parameters, 0.0)
                )
            elif is_attention_layer(module) and set(parameters) <= _at_start(name, module).keys():
                for key, number in _at_start(name, module).items():
                    if key in parameters:
                        replacements[key] = torch.full_like(parameters[key], number)
            else:
                raise ValueError(
                    "weights must be 'enabled' for layers without a form without parameters, such "
                    f"as {type(module).__name__} ({name!r}), got 'disabled'"
                )
    if not has_attention:
        raise ValueError(
            "projections must be the ends of the names of the attention's linear maps, such as "
            "('query', 'key'), because the layers have neither attention of graphattn.nn nor "
            f"torch.nn.MultiheadAttention, got {projections}, which match no linear map"
        )
    return replacements


def _at_start(name: str, layer: nn.Module) -> dict[str, float]:
    """Return the initial values of an attention layer's own parameters, by name."""
    initial = {f"{name}.sink".strip("."): 0.0}
    init_sigma: Any = getattr(layer, "init_sigma", None)
    if init_sigma is not None:
        initial[f"{name}.log_sigma".strip(".")] = math.log(init_sigma)
    return initial


def without_normalization(layers: dict[str, nn.Module]) -> list[RemovableHandle]:
    """Add hooks with which the norms of `layers` return their inputs."""
    norms = {m for layer in layers.values() for m in layer.modules() if is_norm(m)}
    return [norm.register_forward_hook(_return_input) for norm in norms]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class or its name."""
    return isinstance(module, _NORMS) or bool(_NORM_NAME.search(type(module).__name__))


def _adds_one(norm: nn.Module) -> bool:
    """Whether a norm scales by 1 + weight, as in Gemma, so that weight 0 means scale 1."""
    return type(norm).__name__.startswith("Gemma")


def is_attention_projection(
    model: nn.Module, layer: nn.Module, name: str, projections: tuple[str, ...]
) -> bool:
    """Whether the linear map of this name in the model is a projection of attention."""
    if type(layer).__module__.startswith("transformers."):
        projections = (*projections, *_OF_TRANSFORMERS)
    return name.endswith(projections) or _belongs_to_attention(model, name)


def _return_input(_: nn.Module, args: tuple[Tensor, ...], __: Any) -> Tensor:
    return args[0]


def _belongs_to_attention(model: nn.Module, name: str) -> bool:
    """Whether a linear map is a projection of an attention layer of graphattn or torch."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention) or is_attention_layer(parent)


def _filled(parameters: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Fill weights with one number, and biases with 0."""
    return {
        name: torch.full_like(value, weight if name.endswith("weight") else 0.0)
        for name, value in parameters.items()
    }


def _identity(name: str, parameters: dict[str, Tensor], copies: int = 1) -> dict[str, Tensor]:
    """Return `copies` identity matrices below each other, and biases of 0."""
    replacements = {}
    for key, value in parameters.items():
        replacements[key] = torch.zeros_like(value)
        if value.dim() == 2:
            rows, columns = value.shape
            if rows != copies * columns:
                raise ValueError(
                    "weights must be 'enabled' unless projections are square, so that they can be "
                    f"replaced by the identity, got 'disabled' with {name!r} of shape "
                    f"{list(value.shape)}"
                )
            replacements[key].view(copies, columns, columns).diagonal(dim1=-2, dim2=-1).fill_(1)
    return replacements


def _projections_in_one(name: str, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the replacement of the projections of MultiheadAttention, which are one matrix."""
    known = {f"{name}.in_proj_weight".strip("."), f"{name}.in_proj_bias".strip(".")}
    if not set(parameters) <= known:
        raise ValueError(
            "weights must be 'enabled' unless the query, key and value projections of "
            "MultiheadAttention have the same width, without bias_k and bias_v, got 'disabled' "
            f"with {name!r}, which has {sorted(parameters)}"
        )
    return _identity(name, parameters, copies=3)
