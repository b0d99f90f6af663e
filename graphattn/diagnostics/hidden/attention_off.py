"""Blocks without what their attention brings."""

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
    """Inside, the attention of these blocks brings 0 to every token.

    Attention layers of ours and of torch return 0 as a whole. Anybody else's attention call returns
    0, and that of what :mod:`graphattn.integrations` put there (a shortcut beside it, too); and so
    does a linear map that is fed nothing but zeros: the output projection, whose bias would be left
    otherwise.

    Raises:
        ValueError: at the end, if a block ran in which no attention was seen.
    """
    watcher = _Silencer(model, blocks)
    with ExitStack() as stack:
        for name, block in blocks.items():
            for part in block.modules():
                if is_attention_layer(part) or isinstance(part, nn.MultiheadAttention):
                    hook = part.register_forward_hook(watcher.silence_layer(name))
                elif isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
                    hook = part.register_forward_hook(_nothing_of_nothing)
                else:
                    continue
                stack.callback(hook.remove)
        stack.enter_context(watching(watcher))
        yield
    if loud := [name for name in blocks if name not in watcher.silenced]:
        raise ValueError(
            f"attention must be seen to be disabled, but none was seen in {loud[0]!r}, a "
            f"{type(blocks[loud[0]]).__name__}"
        )


class _Silencer(Watcher):
    """Answers the calls inside some blocks with zeros."""

    reads = False

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        super().__init__(model)
        self.blocks = {id(block): name for name, block in blocks.items()}
        self.silenced: set[str] = set()

    def is_own(self, module: nn.Module) -> bool:
        return is_attention_layer(module) or isinstance(module, nn.MultiheadAttention)

    def answer(self, output: Tensor, name: str) -> Tensor:
        running = {id(module) for module in self.stack}
        inside = [  # a shortcut speaks after the layer that it belongs to has left
            block
            for number, block in self.blocks.items()
            if number in running or f"{name}.".startswith(f"{block}.")
        ]
        self.silenced.update(inside)
        return torch.zeros_like(output) if inside else output

    def silence_layer(self, block: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            self.silenced.add(block)
            if isinstance(output, tuple):
                return (torch.zeros_like(output[0]), *output[1:])
            return torch.zeros_like(output)

        return hook


def _nothing_of_nothing(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    return None if args[0].any() else torch.zeros_like(output)
