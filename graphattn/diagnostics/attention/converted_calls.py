"""Operands of the attention that :mod:`graphattn.integrations` puts into other models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.diagnostics.attention.operands import Operands
from graphattn.diagnostics.attention.same_tokens import are_parts_of_one
from graphattn.diagnostics.hidden.evaluating import dropout_off


def converted_functions() -> dict[Any, Callable[..., Operands]]:
    """Return the attention functions that converted modules call, with readers of their operands.

    These functions go through ``torch.overrides.wrap_torch_function``, so a mode sees them. A
    reader gets the function, its output and its arguments. If a file of integrations has not been
    imported, no model can have its modules, and it is skipped.
    """
    package = "graphattn.integrations."
    readers: dict[Any, Callable[..., Operands]] = {}
    if module := sys.modules.get(package + "torch.multihead"):
        readers[module.attend] = _of_torch
    if module := sys.modules.get(package + "transformers.conversion.mixers"):
        readers[module.ReplacedAttention.attend] = _of_mixer
    if module := sys.modules.get(package + "transformers.shortcut.layer"):
        readers[module.KrauseShortcut.attend] = _of_shortcut
    return readers


def _of_torch(
    attend: Any,
    output: tuple[Tensor, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: list[Any],
    sigma: float | Tensor | None,
    top_k: int | None,
    dropout: float,
    need_weights: bool,
) -> Operands:
    """Return the operands of ``graphattn.integrations.torch.multihead.attend``."""
    B = len(q)
    weights = attend(q, k, v, seen, sigma, top_k, 0.0, True)[1]
    allowed = []
    for mask in seen:  # one for all heads, or one per head
        valid = mask.valid if mask.valid is not None else q.new_ones(B, k.shape[1]).bool()
        edges = valid.new_ones(1, mask.graph.num_edges, 1)
        pairs = mask.dense(edges, B)
        allowed.append(pairs if mask.packed else pairs & valid[:, None, None])
    return Operands(
        output[0],
        weights=weights,
        mask=torch.cat(allowed, dim=1),
        same_tokens=are_parts_of_one(q, k) or None,
    )


def _of_mixer(
    attend: Any,
    output: Tensor,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    call: Any,
) -> Operands:
    """Return the operands of a mixer in a model of transformers, with values [B, Hk, K, D]."""
    with dropout_off(module):  # Weights are computed without dropout.
        weights = attend(module, query, key, _one_hot(value, 2), hidden, call)
    return Operands(output, weights=weights.transpose(1, 2), mask=mask_of_sketch(call.mask))


def _of_shortcut(
    attend: Any,
    output: Tensor,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    past: int | Tensor,
    dropout: float,
) -> Operands:
    """Return the operands of ``KrauseShortcut.attend``.

    Its values are [B, K, Hk, D], and its output is [B, Q, H * D].
    """
    weights = attend(module, query, key, _one_hot(value, 1), mask, past, 0.0)
    weights = weights.unflatten(-1, (query.shape[2], -1)).transpose(1, 2)
    masks = sys.modules["graphattn.integrations.transformers.shortcut.masks"]
    if mask is None or masks.is_sketch(mask):
        allowed = mask_of_sketch(mask)
    else:
        call = masks.ShortcutCall(*query.shape[:2], key.shape[1], int(past), 1)
        allowed = masks.dense(mask, call)[:, None]
    return Operands(output, weights=weights, mask=allowed)


def _one_hot(value: Tensor, keys: int) -> Tensor:
    """Make values whose weighted average is the weights: 1 at the place of their own key, else 0.

    So the same code works for windows, packed texts and steps with a cache.
    """
    K = value.shape[keys]
    eye = torch.eye(K, dtype=value.dtype, device=value.device)
    eye = eye if keys == 2 else eye[:, None]
    return eye.expand(*value.shape[:-1], K)


def mask_of_sketch(mask: Tensor | None) -> Tensor | None:
    """Convert a mask of "graphattn" in its short form to a mask of keys; return others as is."""
    masks = sys.modules["graphattn.integrations.transformers.masks.mask_function"]
    if mask is None or not masks.is_sketch(mask):
        return mask
    valid: Tensor | None = masks.read_sketch(mask)[1]
    return None if valid is None else valid[:, None, None]
