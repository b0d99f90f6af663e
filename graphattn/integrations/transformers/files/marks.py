"""The mark of a model that was changed: a buffer that files carry, and saving that knows of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from graphattn.integrations.transformers.files.whole_saves import save_pretrained
from graphattn.integrations.transformers.options import VERSION

# transformers names weights that it has no use for when it loads a model: that is how whoever
# loads a changed model as if it were not hears of it.
MARK = "load_with_graphattn_integrations_transformers_from_pretrained"


def mark(model: nn.Module) -> None:
    """Let loading without this package be heard of, and saving be whole or not at all.

    Weights of the model as it was, without the mark, still fit: `load_state_dict` asks for no mark.
    """
    if MARK not in dict(model.named_buffers(recurse=False)):
        model.register_buffer(MARK, torch.tensor(VERSION))
        model.register_load_state_dict_post_hook(_without_mark)
    # A partial rather than a method, which pickle would take for the class's own.
    model.save_pretrained = functools.partial(save_pretrained, model)  # type: ignore[assignment]


def is_marked(model: nn.Module) -> bool:
    """Whether a model, or a part of it, was changed by this package."""
    return any(name.rpartition(".")[2] == MARK for name, _ in model.named_buffers())


def _without_mark(module: nn.Module, keys: Any) -> None:
    missing = [name for name in keys.missing_keys if name.rpartition(".")[2] != MARK]
    keys.missing_keys[:] = missing
