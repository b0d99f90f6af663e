"""The marks of a changed model in its files and those of its adapters, and a safe save method."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from graphattn.integrations.transformers.files.whole_saves import save_pretrained
from graphattn.integrations.transformers.options import VERSION

# transformers warns about unused weights when it loads a model, so a user who loads a changed
# model without this package sees a warning about the mark.
MARK = "load_with_graphattn_integrations_transformers_from_pretrained"
# peft warns about settings of adapters that it does not know, and ignores them. Adapter files do
# not contain the changes of the model below, so the warning is right for every model.
ADAPTER_MARK = "change_the_model_with_graphattn_integrations_transformers_before_loading_adapters"


def mark(model: nn.Module) -> None:
    """Mark a model, so that loading it without this package gives a warning, and saving is atomic.

    `load_state_dict` does not need the mark, so the original weights can still be loaded.
    """
    if MARK not in dict(model.named_buffers(recurse=False)):
        model.register_buffer(MARK, torch.tensor(VERSION))
        model.register_load_state_dict_post_hook(_without_mark)
        model.register_state_dict_pre_hook(_mark_adapters)
    # Use a partial: pickle would replace a bound method by that of the class.
    model.save_pretrained = functools.partial(save_pretrained, model)  # type: ignore[assignment]


def is_marked(model: nn.Module) -> bool:
    """Return whether this package has changed a model or a part of it."""
    return any(name.rpartition(".")[2] == MARK for name, _ in model.named_buffers())


def _without_mark(module: nn.Module, keys: Any) -> None:
    missing = [name for name in keys.missing_keys if name.rpartition(".")[2] != MARK]
    keys.missing_keys[:] = missing


def _mark_adapters(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Mark the settings of the adapters of a model, which peft writes after it reads the weights.

    peft gives a model no other sign that its adapters are being saved.
    """
    configs = getattr(module, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        config.to_dict = functools.partial(_marked_settings, config)


def _marked_settings(config: Any) -> dict[str, Any]:
    vars(config).pop("to_dict", None)  # another model, which was not changed, may share the object
    return {**type(config).to_dict(config), ADAPTER_MARK: VERSION}
