"""Finding the blocks of a model, the layout of their states, and their real tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Layers = type[nn.Module] | Sequence[str] | Sequence[type[nn.Module]] | None

_ATTENTION = re.compile("attention|attn|mixer", re.IGNORECASE)
#: arguments that say which tokens are real, and whether real tokens are True (or 1) in them
_MASKS = {
    "valid": True,
    "attention_mask": True,
    "src_key_padding_mask": False,
    "key_padding_mask": False,
}
#: the same for the sequence of a decoder, if an encoder has another sequence
_DECODER_MASKS = {"tgt_key_padding_mask": False, "decoder_attention_mask": True}


def choose_layers(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """Return the names and modules of the chosen layers."""
    named = dict(model.named_modules())
    if layers is None:
        transformer = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        chosen = {
            name: module
            for name, module in named.items()
            if isinstance(module, transformer)
            or all(isinstance(getattr(module, part, None), nn.Module) for part in ("mixer", "mlp"))
        }
        chosen = chosen or _list_of_blocks(model, "")
        if not chosen:
            raise ValueError(
                "layers must be given as names or types, because the model has no block of "
                "graphattn, no transformer layer of torch, and no list of modules with attention, "
                "got None"
            )
        return chosen
    requested: list[Any] = [layers] if isinstance(layers, type | str) else list(layers)
    names = [entry for entry in requested if isinstance(entry, str)]
    types = tuple(entry for entry in requested if isinstance(entry, type))
    if not requested or len(names) + len(types) < len(requested):
        raise ValueError(f"layers must be names or types of modules, got {layers!r}")
    if unknown := [name for name in names if name not in named]:
        raise ValueError(f"layers must be names of model.named_modules(), got {unknown[0]!r}")
    chosen = {n: module for n, module in named.items() if n in names or isinstance(module, types)}
    if not chosen:
        raise ValueError(f"layers must be types of modules in the model, got {layers!r}")
    return chosen


def _list_of_blocks(model: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Find the outermost lists of modules with attention, such as ``layers`` or ``h``."""
    blocks: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        path = f"{prefix}.{name}".strip(".")
        entries = dict(child.named_children())
        kinds = {type(entry) for entry in entries.values()}
        alike = isinstance(child, nn.ModuleList) or (
            isinstance(child, nn.Sequential) and len(kinds) == 1
        )
        if entries and alike and any(map(holds_attention, entries.values())):
            blocks |= {f"{path}.{key}": entry for key, entry in entries.items()}
        else:
            blocks |= _list_of_blocks(child, path)
    if not blocks and not prefix and isinstance(model, nn.Sequential | nn.ModuleList):
        blocks = dict(model.named_children())
        if len({type(entry) for entry in blocks.values()}) > 1 or not all(
            map(holds_attention, blocks.values())
        ):
            return {}
    return blocks


def holds_attention(module: nn.Module) -> bool:
    """Whether a module, or one inside it, has a name like attention."""
    return any(
        _ATTENTION.search(type(part).__name__) or _ATTENTION.search(name.rpartition(".")[2])
        for name, part in module.named_modules()
    )


@dataclass(frozen=True)
class BlockLayout:
    """The layout of the states of a block, and which of their tokens are real."""

    name: str
    tokens_first: bool = False  #: whether states are [N, B, C]
    real: Tensor | None = None  #: the real tokens, bool [B, N] or [N]; None: all are real

    def batch_first(self, x: Tensor) -> Tensor:
        """Transpose states to [B, N, C] or [N, C]."""
        return x.transpose(0, 1) if self.tokens_first and x.dim() == 3 else x

    def tokens_of(self, x: Tensor, name: str | None = None) -> list[Tensor]:
        """Select the real tokens [n, C] of every sequence."""
        x = self.batch_first(x)
        x = x[None] if x.dim() == 2 else x
        if self.real is None:
            return list(x)
        real = torch.atleast_2d(self.real).to(x.device)
        if real.shape != x.shape[:2]:
            raise ValueError(
                f"layers must have states that fit the mask of the call, {list(real.shape)}, but "
                f"{self.name if name is None else name!r} has states of shape {list(x.shape)}: "
                "choose other layers by name"
            )
        return [tokens[is_real] for tokens, is_real in zip(x, real, strict=True)]


def layouts(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
) -> dict[str, BlockLayout]:
    """Determine the layout of every block's states in this call of the model."""
    given, names = _arguments(model, inputs, keywords)
    config = getattr(model, "config", None)
    two = getattr(config, "is_encoder_decoder", False) is True
    two = two or any(mask in names for mask in _DECODER_MASKS)
    block_layouts = {}
    for name in blocks:
        if not _decodes(model, name):
            masks = _MASKS
        elif two:
            masks = _DECODER_MASKS
        else:  # One mask is for both sequences, except masks of the source.
            masks = {mask: says for mask, says in _MASKS.items() if not mask.startswith("src_")}
        block_layouts[name] = BlockLayout(name, _tokens_first(model, name), _real(masks, given))
    return block_layouts


def _arguments(
    model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return the arguments of a call by name, and all names that the model takes."""
    signature = inspect.signature(model.forward)
    try:
        given = dict(signature.bind_partial(*inputs, **keywords).arguments)
    except TypeError:  # The call of the model will raise the error.
        return {}, set()
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given, set(signature.parameters) | set(given)


def _real(masks: dict[str, bool], given: dict[str, Any]) -> Tensor | None:
    """Return the real tokens by the masks of a call, bool [B, N]; None if there is no mask."""
    for name, says_real in masks.items():
        mask = given.get(name)
        if not isinstance(mask, Tensor) or mask.dim() not in (1, 2):
            continue
        real = mask.bool() if says_real else mask == 0
        if not real.any(dim=-1).all():
            place = int((~real.any(dim=-1)).nonzero()[0]) if real.dim() == 2 else 0
            raise ValueError(
                f"{name} must have at least one real token in every sequence, but sequence "
                f"{place} has none"
            )
        return real
    return None


def _path(model: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """List the modules from the model down to a module, each with the name of the next one."""
    path, module = [], model
    for child in filter(None, name.split(".")):
        path.append((module, child))
        module = module.get_submodule(child)
    return [*path, (module, "")]


def _decodes(model: nn.Module, name: str) -> bool:
    """Whether a block belongs to the decoder of a model with an encoder and a decoder."""
    path = _path(model, name)
    for module, child in path:
        if child in ("encoder", "decoder") and all(
            isinstance(getattr(module, side, None), nn.Module) for side in ("encoder", "decoder")
        ):
            return child == "decoder"
    decoders = (nn.TransformerDecoder, nn.TransformerDecoderLayer)
    return any(isinstance(module, decoders) for module, _ in path)


def _tokens_first(model: nn.Module, name: str) -> bool:
    """Whether a block, or torch's layer around it, takes states as [N, B, C]."""
    path = _path(model, name)
    for module, child in reversed(path):
        if isinstance(module, nn.Transformer):
            return not module.batch_first
        layer = module
        if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            layer = next(iter(module.layers.children()), module)
        if child and not isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            continue
        attention = getattr(layer, "self_attn", layer)
        if isinstance(attention, nn.MultiheadAttention):
            return not attention.batch_first
    return False
