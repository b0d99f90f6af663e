"""Blocks with their attention disabled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.diagnostics.attention.calls import Watcher, watching
from graphattn.diagnostics.attention.record import is_attention_layer


@contextmanager
def without_attention(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[None]:
    """Disable the attention of these blocks inside the context, so that it adds 0 to every token.

    Attention layers of graphattn and torch return 0. All other attention calls return 0, including
    those of :mod:`graphattn.integrations` and its shortcuts. A linear map whose input is 0 also
    returns 0, because otherwise the bias of the output projection would be left.

    Raises:
        ValueError: at the end of the context, if no attention was observed in a block.
    """
    watcher = _AttentionDisabler(model, blocks)
    with ExitStack() as stack:
        for name, block in blocks.items():
            for part in block.modules():
                if is_attention_layer(part) or isinstance(part, nn.MultiheadAttention):
                    hook = part.register_forward_hook(watcher.disable_layer(name))
                elif isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
                    hook = part.register_forward_hook(_zero_of_zero)
                else:
                    continue
                stack.callback(hook.remove)
        stack.enter_context(watching(watcher))
        yield
    if enabled := [name for name in blocks if name not in watcher.disabled]:
        raise ValueError(
            "every block must make a known call of attention, which can be disabled, but none was "
            f"observed in {enabled[0]!r}, a {type(blocks[enabled[0]]).__name__}"
        )


class _AttentionDisabler(Watcher):
    """A watcher that replaces the outputs of attention calls in some blocks by zeros."""

    needs_operands = False

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        super().__init__(model)
        self.blocks = {id(block): name for name, block in blocks.items()}
        self.disabled: set[str] = set()

    def is_recorded_by_hooks(self, module: nn.Module) -> bool:
        return is_attention_layer(module) or isinstance(module, nn.MultiheadAttention)

    def replace_output(self, output: Tensor, name: str) -> Tensor:
        running = {id(module) for module in self.running}
        # A shortcut is called after its layer, so it is found by its name.
        inside = [
            block
            for number, block in self.blocks.items()
            if number in running or f"{name}.".startswith(f"{block}.")
        ]
        self.disabled.update(inside)
        return torch.zeros_like(output) if inside else output

    def disable_layer(self, block: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            self.disabled.add(block)
            if isinstance(output, tuple):
                return (torch.zeros_like(output[0]), *output[1:])
            return torch.zeros_like(output)

        return hook


def _zero_of_zero(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    return None if args[0].any() else torch.zeros_like(output)
