"""Attention modules of a Hugging Face model."""

from __future__ import annotations

import functools
import inspect
import re
from types import CodeType
from typing import Any

from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
CROSS = re.compile(r"cross|encoder_attn|EncDecAttention", re.IGNORECASE)


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the attention modules of a model with their names, in the order of the model.

    They are the modules that look up the attention function in transformers' interface, so every
    attention module of a model counts: self-attention of encoder and decoder, cross-attention, and
    that of a vision tower. The argument `layers=` of this package contains indices of this list. A
    replaced module keeps its index.
    """
    return [(name, module) for name, module in model.named_modules() if is_attention(module)]


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention module or a replacement of one."""
    kind: Any = type(module)
    return is_replacement(module) or calls_interface(kind)


def is_replacement(module: nn.Module) -> bool:
    """Return whether a module is a replacement of an attention module."""
    kind: Any = type(module)
    return bool(getattr(kind, "replaces_attention", False))


@functools.cache
def calls_interface(module_class: type[nn.Module]) -> bool:
    """Whether the `forward` of a class, or a function inside it, names the attention interface."""
    forward = inspect.unwrap(module_class.forward)
    code = getattr(forward, "__code__", None)
    return code is not None and names_interface(code)


def names_interface(code: CodeType) -> bool:
    """Whether code, or code inside it, uses the name of the attention interface."""
    return INTERFACE in code.co_names or any(
        names_interface(inner) for inner in code.co_consts if isinstance(inner, CodeType)
    )


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Return whether an attention module reads another sequence, judged by its name."""
    if getattr(module, "is_cross_attention", False) is True:  # GPT-2 has one class for both
        return True
    place = ".".join(name.split(".")[-2:])  # ESM's is "crossattention.self"
    return bool(CROSS.search(type(module).__name__) or CROSS.search(place))
