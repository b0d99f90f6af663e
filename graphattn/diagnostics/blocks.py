"""The blocks of a model, and which of their tokens are real."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Layers = type[nn.Module] | Sequence[str] | Sequence[type[nn.Module]] | None

_ATTENTION = re.compile("attention|attn|mixer", re.IGNORECASE)
#: arguments that say which tokens are real, and whether True or 1 says so
_MASKS = {
    "valid": True,
    "attention_mask": True,
    "src_key_padding_mask": False,
    "key_padding_mask": False,
}


def choose_layers(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """Name and module of every layer that is looked at."""
    named = dict(model.named_modules())
    if layers is None:
        transformer = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        found = {
            name: module
            for name, module in named.items()
            if isinstance(module, transformer)
            or all(isinstance(getattr(module, part, None), nn.Module) for part in ("mixer", "mlp"))
        }
        found = found or _list_of_blocks(model, "")
        if not found:
            raise ValueError(
                "layers must be given (names or types): the model has no block of graphattn, no "
                "transformer layer of torch, and no list of modules that hold attention"
            )
        return found
    wanted: list[Any] = [layers] if isinstance(layers, type | str) else list(layers)
    names = [entry for entry in wanted if isinstance(entry, str)]
    types = tuple(entry for entry in wanted if isinstance(entry, type))
    if not wanted or len(names) + len(types) < len(wanted):
        raise ValueError(f"layers must be names or types of modules, got {layers!r}")
    if unknown := [name for name in names if name not in named]:
        raise ValueError(f"layers must be names of model.named_modules(), got {unknown[0]!r}")
    found = {n: module for n, module in named.items() if n in names or isinstance(module, types)}
    if not found:
        raise ValueError(f"layers must be types that the model holds, got {layers!r}")
    return found


def _list_of_blocks(model: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """The outermost lists of modules that hold attention: ``layers``, ``h``, ``encoder.layer``."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        path = f"{prefix}.{name}".strip(".")
        entries = dict(child.named_children())
        kinds = {type(entry) for entry in entries.values()}
        alike = isinstance(child, nn.ModuleList) or (
            isinstance(child, nn.Sequential) and len(kinds) == 1
        )
        if entries and alike and any(map(holds_attention, entries.values())):
            found |= {f"{path}.{key}": entry for key, entry in entries.items()}
        else:
            found |= _list_of_blocks(child, path)
    if not found and not prefix and isinstance(model, nn.Sequential | nn.ModuleList):
        found = dict(model.named_children())
        if len({type(entry) for entry in found.values()}) > 1 or not all(
            map(holds_attention, found.values())
        ):
            return {}
    return found


def holds_attention(module: nn.Module) -> bool:
    """Whether a module, or one inside it, is called attention."""
    return any(
        _ATTENTION.search(type(part).__name__) or _ATTENTION.search(name.rpartition(".")[2])
        for name, part in module.named_modules()
    )


def real_tokens(
    model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> Tensor | None:
    """Bool [B, N], what a call of the model says of padding; None where it says nothing."""
    try:
        given = inspect.signature(model.forward).bind_partial(*inputs, **keywords).arguments
    except TypeError:  # the call itself says what is wrong
        return None
    for name, says_real in _MASKS.items():
        mask = given.get(name, given.get("kwargs", {}).get(name))
        if not isinstance(mask, Tensor) or mask.dim() not in (1, 2):
            continue
        real = mask.bool() if says_real else mask == 0
        if not real.any(dim=-1).all():
            raise ValueError(f"{name} must leave a real token in every sequence")
        return real
    return None


def tokens_of(x: Tensor, real: Tensor | None, name: str) -> list[Tensor]:
    """The real tokens [n, C] of every sequence of the states [B, N, C] or [N, C] of a layer."""
    x = x[None] if x.dim() == 2 else x
    if real is None:
        return list(x)
    real = torch.atleast_2d(real).to(x.device)
    if real.shape != x.shape[:2]:
        raise ValueError(
            f"layers must have the tokens that the call's mask is for, {list(real.shape)}, but "
            f"{name!r} has states of shape {list(x.shape)}: choose some by name"
        )
    return [tokens[own] for tokens, own in zip(x, real, strict=True)]
