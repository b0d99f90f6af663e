"""Move the hooks of a module to the module that replaces it."""

from __future__ import annotations

from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the hooks of one module to another, with their options."""
    for name in HOOKS:
        if name in vars(old):
            getattr(new, name).update(getattr(old, name))
    new._is_full_backward_hook = old._is_full_backward_hook
