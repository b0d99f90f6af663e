"""Whole language models of transformers, with attention in a window by graphattn and by SDPA.

The model is a Llama with random weights: grouped heads, rotary positions, gated feed-forward blocks
and no output head. All compared forms have the same weights. The unchanged model
attends to all earlier tokens. A Mistral has a sliding window, which SDPA reads as a dense mask. Two
more have graphattn as their attention implementation, with dot products and with Krause attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphattn.bench.cases.inputs import MissingError

VOCABULARY = 1000
WINDOW, KRAUSE, ALL, SLIDING = "dot", "krause", "all before", "sliding"


@dataclass(frozen=True)
class LanguageInputs:
    """Tokens [1, N], and models that share their weights, by the kind of their attention."""

    tokens: Tensor
    models: dict[str, Any]
    window: int
    layers: int


def language_inputs(
    size: dict[str, int], device: torch.device, dtype: torch.dtype
) -> LanguageInputs:
    models = _models(size)
    for model in models.values():
        model.to(device, dtype).train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, size["tokens"]), generator=generator)
    return LanguageInputs(tokens.to(device), models, size["window"], size["layers"])


def _models(size: dict[str, int]) -> dict[str, Any]:
    try:
        from transformers import LlamaConfig, LlamaModel, MistralConfig, MistralModel

        from graphattn.integrations.transformers import configure
    except ImportError:
        raise MissingError("transformers is not installed") from None
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": size["dim"],
        "intermediate_size": 8 * size["dim"] // 3,
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "max_position_embeddings": size["tokens"],
        "attn_implementation": "sdpa",
        "use_cache": False,
        "rms_norm_eps": 1e-6,
    }

    def llama() -> Any:
        return LlamaModel(LlamaConfig(**shape))

    makers: dict[str, Callable[[], Any]] = {
        **dict.fromkeys((WINDOW, KRAUSE, ALL), llama),
        SLIDING: lambda: MistralModel(MistralConfig(**shape, sliding_window=size["window"])),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {name: make() for name, make in makers.items()}
    for name, model in models.items():
        if name != WINDOW:
            model.load_state_dict(models[WINDOW].state_dict(keep_vars=True), assign=True)
    configure(models[WINDOW], window=size["window"])
    configure(models[KRAUSE], "krause", window=size["window"], top_k=size["top_k"])
    return models


@dataclass(frozen=True)
class LanguageRun:
    """A contender that is one of the models; it returns the last hidden states [1, N, dim]."""

    name: str

    def __call__(self, x: LanguageInputs) -> Tensor:
        out: Tensor = x.models[self.name](input_ids=x.tokens).last_hidden_state
        return out


def in_float64(x: LanguageInputs) -> tuple[Tensor, list[Tensor]]:
    """Compute the state of the last token, and the gradients of its sum, in float64.

    After L layers it depends only on the last L (window - 1) + 1 tokens, read by eager attention.
    """
    model = copy.deepcopy(x.models[SLIDING]).double()
    model.set_attn_implementation("eager")
    N = x.tokens.shape[1]
    first = max(0, N - x.layers * (x.window - 1) - 1)
    places = torch.arange(first, N, device=x.tokens.device)[None]
    out = model(input_ids=x.tokens[:, first:], position_ids=places).last_hidden_state[:, -1]
    return out.detach(), list(torch.autograd.grad(out.sum(), list(model.parameters())))
