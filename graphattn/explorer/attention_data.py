"""Recorded attention on the page: the weights of layers and heads, of one sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from graphattn.data import Structure
from graphattn.diagnostics import Recording, record
from graphattn.diagnostics.attention.call_statistics import RecordedCall
from graphattn.diagnostics.hidden.evaluating import dropout_off
from graphattn.explorer.packing import Array, SortedEdges, packed, packed_rows, rows_from, rows_of
from graphattn.models import ProteinModel

BYTES = 1_500_000  # of weights and their edges, before they become text
STEPS = 65_535  # a weight is a whole number of these in the page: three digits are right


class LayerWeights(NamedTuple):
    """The edges of one call that have a weight in some head, and the weights, [H, E]."""

    name: str
    rows: SortedEdges
    weights: Array


def record_model(model: nn.Module, inputs: Any) -> Recording:
    """Run a model once, without dropout and gradients, and record its attention."""
    if inputs is None:
        raise ValueError(
            f"inputs must be given for a model ({type(model).__name__}), got None: give what the "
            "model is called with, a tensor, a tuple of arguments or a dict of keyword arguments"
        )
    with dropout_off(model), torch.no_grad(), record(model) as recording:
        if isinstance(model, ProteinModel) and isinstance(inputs, Structure | str):
            model.logits(inputs)
        elif isinstance(inputs, Mapping):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    return recording


def weights_of(
    recording: Recording, num_tokens: int | None
) -> tuple[list[LayerWeights], list[str]]:
    """Take the first sequence of every call among the same tokens; say what is left out."""
    square = [call for call in recording if call.shape[2] == call.shape[3]]
    sizes = Counter(call.shape[2] for call in square)
    N = num_tokens if num_tokens is not None else max(sizes, key=lambda n: sizes[n], default=0)
    chosen = [call for call in square if call.shape[2] == N and not call.signed]
    if not chosen:
        found = sorted({f"{call.shape[2]} x {call.shape[3]}" for call in recording})
        wanted = f"the same {N} tokens" if num_tokens is not None else "the same tokens"
        raise ValueError(
            f"recording must have a call with {wanted} as queries and keys, and weights >= 0, got "
            f"queries x keys: {', '.join(found) or 'none'}. Record a forward pass of these tokens"
        )
    notes = []
    if len(chosen) < len(recording):
        left = len(recording) - len(chosen)
        notes.append(f"Calls with other tokens or negative weights are left out: {left}.")
    if max(call.shape[0] for call in chosen) > 1:
        notes.append("Attention is that of the first sequence of the batch.")
    return [_of_call(call) for call in chosen], notes


def _of_call(call: RecordedCall) -> LayerWeights:
    N = call.shape[2]
    if call.keep == "mean":
        dense = call.mean_over_heads()[:1, None]
    elif call.edges is None:
        dense = call.matrix[:1]
    else:
        rows = rows_of(call.edges)
        weights = call.weights[0].T.float().cpu().numpy()
        used = (weights > 0).any(axis=0)
        return LayerWeights(
            call.name, rows_from(rows.target[used], rows.source[used], N), weights[:, used]
        )
    found = dense[0].float().cpu().numpy()
    target, source = np.nonzero((found > 0).any(axis=0))
    return LayerWeights(call.name, rows_from(target, source, N), found[:, target, source])


def joined(calls: list[LayerWeights]) -> tuple[SortedEdges, bool]:
    """Unite the edges of all calls; is one call enough for them?"""
    N = len(calls[0].rows.rowptr) - 1
    keys = [call.rows.target * N + call.rows.source for call in calls]
    every = np.unique(np.concatenate(keys))
    same = all(len(key) == len(every) for key in keys)
    return rows_from(every // N, every % N, N), same


def attention_data(calls: list[LayerWeights]) -> tuple[list[dict[str, Any]], list[str]]:
    """Pack the weights; of too many, the largest ones of every token and layer."""
    N = len(calls[0].rows.rowptr) - 1
    whole = calls
    size = [2 + 2 * len(call.weights) for call in calls]
    notes = []
    if sum(each * len(c.rows.source) for each, c in zip(size, calls, strict=True)) > BYTES:
        most = BYTES // (N * sum(size))
        if not most:
            heads = sum(len(call.weights) for call in calls)
            raise ValueError(
                f"recording must have fewer weights for one page, got {len(calls)} layers with "
                f"{heads} heads together, of {N} tokens: choose layers by recording.select(text), "
                "or record with keep='mean'"
            )
        calls = [_largest(call, most) for call in whole]
        share = _total(calls) / _total(whole)
        notes.append(
            f"So that the page stays small, it has at most {most} sources of a token per layer, "
            f"those with the largest weight in any head. They hold {share:.1%} of all weight."
        )
    data = [
        {
            "name": call.name,
            "heads": len(call.weights),
            "edges": packed_rows(call.rows),
            "weights": packed((call.weights.clip(0, 1) * STEPS).round(), "<u2"),
            "degrees": None if call is full else packed(np.diff(full.rows.rowptr), "<u2"),
        }
        for call, full in zip(calls, whole, strict=True)
    ]
    return data, notes


def _total(calls: list[LayerWeights]) -> float:
    return sum(float(call.weights.sum()) for call in calls)


def _largest(call: LayerWeights, most: int) -> LayerWeights:
    """Keep the `most` edges of every row whose weight in any head is largest."""
    target = call.rows.target
    order = np.lexsort((-call.weights.max(axis=0), target))
    place = np.arange(len(order)) - call.rows.rowptr[target]  # rows stay where they are
    kept = np.sort(order[place < most])
    N = len(call.rows.rowptr) - 1
    rows = rows_from(target[kept], call.rows.source[kept], N)
    return LayerWeights(call.name, rows, call.weights[:, kept])
