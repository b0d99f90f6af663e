"""Helpers that tests of generation share: layers that have steps, and a text sent through one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from nn_by_hand import Case
from torch import Tensor

import graphattn as ga

STEPPING = [
    Case("DotProductAttention", {"kv_heads": 2, "rope": True}),
    Case("DotProductAttention", {"value_projection": False, "top_k": 2}),
    Case("KrauseAttention", {"top_k": 3, "kv_heads": 2, "rope": True}),
    Case("GaussianKernelAttention", {"rope": True, "normalize": True, "eps": 0.1}),
    Case("SelfConsensus", {"edge_hidden": 6, "update": "target", "rope": "isometric"}),
    Case("SelfConsensus", {"edge_hidden": 6, "update": "target", "step_size": "auto"}),
    Case("DotProductAttention", {"qk_norm": True, "kv_heads": 2, "rope": True}),
    Case("GaussianKernelAttention", {"top_k": 3, "eps": 0.1, "rope": True}),
    Case("DotProductAttention", {"scaling": "sq_inplace", "kv_heads": 2, "rope": True}),
]


def causal(num_tokens: int, window: int | None) -> ga.TokenGraph:
    if window is None:
        return ga.causal_graph(num_tokens)
    return ga.causal_window_graph(num_tokens, window)


def stream(
    layer: Any,
    x: Tensor,
    cache: Any,
    pieces: Sequence[int] | None = None,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
    dims: int = 1,
) -> Tensor:
    """Outputs of x [*, T, dim] in pieces of these lengths, 1 for a single token; dims=0: [*, T]."""
    outputs, t = [], 0
    for n in pieces or [1] * x.shape[-1 - dims]:
        here: Any = t if n == 1 else slice(t, t + n)
        y = layer.step(
            x.select(-1 - dims, t) if n == 1 else x.narrow(-1 - dims, t, n),
            cache,
            valid=None if valid is None else valid[..., here],
            positions=None if positions is None else positions[..., here],
        )
        outputs.append(y.unsqueeze(-2) if n == 1 else y)
        t += n
    return torch.cat(outputs, dim=-2)


def random_pieces(total: int, rng: random.Random, most: int = 13) -> list[int]:
    pieces: list[int] = []
    while sum(pieces) < total:
        pieces.append(min(rng.choice([1, 1, 1, 2, 3, 5, most]), total - sum(pieces)))
    return pieces


def poisoned(cache: Any) -> Any:
    """Room that was never written holds NaN: whoever reads it shows."""
    for buffer in cache.buffers.values():
        buffer.fill_(torch.nan)
    return cache
