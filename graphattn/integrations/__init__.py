"""Plug-ins: token graphs inside models of other libraries.

`graphattn.integrations.transformers` for Hugging Face's models, `graphattn.integrations.torch` for
PyTorch's own attention modules. Each is imported on first use, together with that library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphattn.integrations import torch as torch
    from graphattn.integrations import transformers as transformers

__all__ = ["torch", "transformers"]


if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return import_module(f"graphattn.integrations.{name}")
        raise AttributeError(f"module 'graphattn.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
