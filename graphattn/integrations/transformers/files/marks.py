"""The mark of a changed model: a buffer in its files, and a safe method for saving."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from graphattn.integrations.transformers.files.whole_saves import save_pretrained
from graphattn.integrations.transformers.options import VERSION

# transformers warns about unused weights when it loads a model, so a user who loads a changed #
# model without this package sees a warning about the mark.
MARK = "load_with_graphattn_integrations_transformers_from_pretrained"


def mark(model: nn.Module) -> None:
    """Mark a model, so that loading it without this package gives a warning, and saving is atomic.

    `load_state_dict` does not need the mark, so the original weights can still be loaded.
    """
    if MARK not in dict(model.named_buffers(recurse=False)):
        model.register_buffer(MARK, torch.tensor(VERSION))
        model.register_load_state_dict_post_hook(_without_mark)
    # Use a partial: pickle would replace a bound method by that of the class.
    model.save_pretrained = functools.partial(save_pretrained, model)  # type: ignore[assignment]


def is_marked(model: nn.Module) -> bool:
    """Return whether this package has changed a model or a part of it."""
    return any(name.rpartition(".")[2] == MARK for name, _ in model.named_buffers())


def _without_mark(module: nn.Module, keys: Any) -> None:
    missing = [name for name in keys.missing_keys if name.rpartition(".")[2] != MARK]
    keys.missing_keys[:] = missing
