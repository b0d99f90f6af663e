"""Call a model on a batch: padded, or with its sequences packed into one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs import batch as side_by_side
from graphattn.train.checks import described
from graphattn.train.objectives.objective import Batch


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers such as torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def device_of(model: Any, *others: Any) -> torch.device:
    """Return the device of a model's parameters, or of the first of `others` that has one."""
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return next((other.device for other in others if other is not None), torch.device("cpu"))


def outputs_at(
    model: nn.Module, tokens: Tensor, batch: Batch, where: Tensor, *, packed: bool = False
) -> Tensor:
    """Return a model's outputs for the n tokens of a batch that are True in `where`, [n, K].

    If `packed`, sequences of unequal lengths are packed for the call.
    """
    outputs, is_packed = call(model, tokens, batch, packed=packed)
    if outputs.dim() != (2 if is_packed else 3):
        raise ValueError(
            "model must return a tensor [B, N, K] for tokens [B, N], with K numbers per token, "
            f"got {list(outputs.shape)} for tokens {list(tokens.shape)}"
        )
    return outputs[where[batch["valid"]] if is_packed else where]


def pooled_outputs(model: nn.Module, batch: Batch, *, packed: bool = False) -> Tensor:
    """Return a model's output for every sequence, [B, K], or the mean of its output per token.

    The head of a model is linear, so the mean of the outputs is the head applied to the mean of the
    features.
    """
    outputs, is_packed = call(model, batch["tokens"], batch, packed=packed)
    if outputs.dim() == 2 and not is_packed:
        return outputs
    valid = batch.get("valid")
    if valid is None:
        return outputs.mean(1)
    if is_packed:
        nothing = outputs.new_zeros(len(valid), outputs.shape[-1])
        total = nothing.index_add(0, valid.nonzero()[:, 0], outputs)
    else:
        total = outputs.masked_fill(~valid[..., None], 0).sum(1)
    return total / valid.sum(1, keepdim=True)


def call(
    model: nn.Module, tokens: Tensor, batch: Batch, *, packed: bool = False
) -> tuple[Tensor, bool]:
    """Return a model's output, and whether its tokens are packed.

    A structure is passed to models that read structures; other models get only the sequence.
    """
    inside, valid = unwrapped(model), batch.get("valid")
    given = {name: batch.get(name) for name in ("positions", "context", "structure")}
    if getattr(inside, "structure", False) is not True:
        given["structure"] = None
    if given["structure"] is not None:
        given["positions"] = None  # the structure has its own positions
    is_packed = packed and valid is not None
    if not packed or valid is None:
        given["valid"] = valid
    else:
        tokens = tokens[valid]
        if given["positions"] is not None:
            given["positions"] = given["positions"][valid]
        given["context"] = _packed_context(inside, given["context"], valid)
        if given["structure"] is None:
            given["graph"] = packed_graphs(inside, valid.sum(-1).tolist())
    outputs = model(tokens, **{k: v for k, v in given.items() if v is not None})
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        raise ValueError(f"model must return a floating-point tensor, got {described(outputs)}")
    return outputs, is_packed


def packed_graphs(model: Any, lengths: Sequence[int]) -> list[TokenGraph]:
    """Return the graph of every block for packed sequences, without edges between them."""
    if not hasattr(model, "graphs"):
        raise ValueError(
            "packed must be False for a model without a method graphs(num_tokens), got True for a "
            f"{type(model).__name__}"
        )
    graphs_of = {length: model.graphs(length) for length in set(lengths)}
    made: dict[tuple[int, ...], TokenGraph] = {}
    joined = []
    for graphs in zip(*(graphs_of[length] for length in lengths), strict=True):
        key = tuple(map(id, graphs))
        if key not in made:
            made[key] = side_by_side(graphs)
        joined.append(made[key])
    return joined


def _packed_context(model: Any, context: Any, valid: Tensor) -> dict[str, Tensor] | None:
    if context is None:
        return None
    known = getattr(model, "context", {})
    packed = {}
    for name, track in context.items():
        if isinstance(known, Mapping) and known.get(name) == "sequence":
            raise ValueError(
                f"packed must be False with context[{name!r}], because it is another chain, which "
                "needs padded rows, got True"
            )
        packed[name] = track[valid]
    return packed
