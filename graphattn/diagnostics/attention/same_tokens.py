"""Whether a call of attention has the same tokens as queries and as keys."""

from __future__ import annotations

import re

from torch import Tensor, nn

# As graphattn.integrations.transformers.conversion.modules, which is not for this folder to import.
_CROSS = re.compile(r"cross|encoder_attn|EncDecAttention", re.IGNORECASE)
# Where attention to another sequence is called so, and all other attention is self-attention.
_NAMES_CROSS = (
    "transformers.",
    "transformers_modules.",  # code that comes with a checkpoint
    "graphattn.integrations.transformers.",
    "graphattn.integrations.torch.timm",
)
_SELF = re.compile(r"self_?att", re.IGNORECASE)


def is_same_tensor(query: Tensor, key: Tensor) -> bool:
    """Whether two tensors are one, or the same view of one."""
    return query is key or (
        query.device == key.device
        and query.shape == key.shape
        and query.stride() == key.stride()
        and query.data_ptr() == key.data_ptr() != 0
    )


def are_parts_of_one(query: Tensor, key: Tensor) -> bool:
    """Whether queries and keys lie in one memory: one projection of one sequence gave both."""
    memory = query.untyped_storage().data_ptr()
    return query.device == key.device and memory == key.untyped_storage().data_ptr() != 0


def by_name(name: str, module: nn.Module | None) -> bool | None:
    """Decide by the names of an attention module: True for self-attention; None for nothing."""
    kinds = [kind.__name__ for kind in type(module).__mro__] if module is not None else []
    place = ".".join(name.split(".")[-2:])  # ESM's is "crossattention.self"
    if getattr(module, "is_cross_attention", False) is True:  # GPT-2 has one class for both
        return False
    if _CROSS.search(place) or (kinds and _CROSS.search(kinds[0])):
        return False
    known = any(kind.__module__.startswith(_NAMES_CROSS) for kind in type(module).__mro__)
    return True if known or any(map(_SELF.search, [place, *kinds])) else None
