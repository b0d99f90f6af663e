"""Remove wrappers around a Hugging Face model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

INSIDE = ("_orig_mod", "module", "get_base_model")  # torch.compile; DDP, FSDP, DeepSpeed; peft


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside torch.compile, DDP, FSDP, DeepSpeed or PEFT.

    Raises:
        ValueError: if there is none.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from graphattn.integrations.transformers.wrapped import unwrapped
        >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> unwrapped(torch.compile(model)) is model
        True
    """
    inside = model
    while not isinstance(inside, PreTrainedModel):
        inner = _inner(inside)
        if inner is None:
            raise ValueError(
                "model must be a model of transformers that uses its attention interface (it can "
                "be compiled, have adapters of peft, or be wrapped in DDP or FSDP), got "
                f"{type(model)}; for nn.MultiheadAttention in modules of PyTorch use "
                "graphattn.integrations.torch.convert"
            )
        inside = inner
    return inside


def _inner(model: Any) -> Any:
    for name in INSIDE:
        inner = getattr(model, name, None)
        if name == "get_base_model" and callable(inner):
            inner = inner()
        if isinstance(inner, nn.Module) and inner is not model:
            return inner
    return None
