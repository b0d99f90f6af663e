"""Detection of self-attention, in which queries and keys are the same tokens."""

from __future__ import annotations

import re

from torch import Tensor, nn

# The same pattern is in graphattn.integrations.transformers.conversion.modules, which this folder
# may not import.
_CROSS = re.compile(r"cross|encoder_attn|EncDecAttention", re.IGNORECASE)
# Packages in which all attention is self-attention unless its name matches the pattern.
_NAMES_CROSS = (
    "transformers.",
    "transformers_modules.",  # code that is part of a checkpoint
    "graphattn.integrations.transformers.",
    "graphattn.integrations.torch.timm",
)
_SELF = re.compile(r"self_?att", re.IGNORECASE)


def is_same_tensor(query: Tensor, key: Tensor) -> bool:
    """Whether two tensors are the same object, or the same view of one tensor."""
    return query is key or (
        query.device == key.device
        and query.shape == key.shape
        and query.stride() == key.stride()
        and query.data_ptr() == key.data_ptr() != 0
    )


def are_parts_of_one(query: Tensor, key: Tensor) -> bool:
    """Whether queries and keys share memory, because one projection of a sequence made both."""
    memory = query.untyped_storage().data_ptr()
    return query.device == key.device and memory == key.untyped_storage().data_ptr() != 0


def by_name(name: str, module: nn.Module | None) -> bool | None:
    """Decide by names whether an attention module is self-attention; None if names do not say."""
    kinds = [kind.__name__ for kind in type(module).__mro__] if module is not None else []
    place = ".".join(name.split(".")[-2:])  # for example, "crossattention.self" in ESM
    if getattr(module, "is_cross_attention", False) is True:  # GPT-2 has one class for both kinds.
        return False
    if _CROSS.search(place) or (kinds and _CROSS.search(kinds[0])):
        return False
    known = any(kind.__module__.startswith(_NAMES_CROSS) for kind in type(module).__mro__)
    return True if known or any(map(_SELF.search, [place, *kinds])) else None
