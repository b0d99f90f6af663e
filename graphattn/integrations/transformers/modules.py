"""Which modules of a Hugging Face model are its attention."""

from __future__ import annotations

import inspect
import re
from types import CodeType
from typing import Any

from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what transformers' attention modules call by this name
CROSS = re.compile(r"cross|encoder_attn|EncDecAttention", re.IGNORECASE)


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a model that call transformers' attention interface, with their names.

    They come in the order of ``model.named_modules()``, which is that of the layers; `layers=` of
    the functions of this package counts them from 0.
    """
    return [(name, module) for name, module in model.named_modules() if _calls_interface(module)]


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether an attention module reads another sequence, by its names."""
    return bool(CROSS.search(type(module).__name__) or CROSS.search(name.rpartition(".")[2]))


def _calls_interface(module: nn.Module) -> bool:
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return isinstance(code, CodeType) and INTERFACE in code.co_names
