"""Call a model on a batch: padded, or with its sequences packed into one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs import batch as side_by_side
from graphattn.train.checks import described
from graphattn.train.objectives.objective import Batch


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers such as torch.compile and DistributedDataParallel.

    Example:
        >>> import torch
        >>> from graphattn.train.batches.calling import unwrapped
        >>> model = torch.nn.Linear(2, 2)
        >>> unwrapped(torch.compile(model)) is model
        True
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def answers_at(
    model: nn.Module, tokens: Tensor, batch: Batch, where: Tensor, *, packed: bool = False
) -> Tensor:
    """Return a model's answers for some of the tokens of a batch, [n, K], in their order.

    Args:
        model: returns [B, N, K] for tokens [B, N].
        tokens: integers [B, N], the input of the model.
        batch: a batch made by :func:`~graphattn.train.batches.collation.collate_tokens`.
        where: bool [B, N], True at n tokens, none of them padding.
        packed: whether sequences of unequal lengths are packed for the call, [total, K].

    Raises:
        ValueError: if the output of the model has another shape.
    """
    answers, is_packed = call(model, tokens, batch, packed=packed)
    if answers.dim() != (2 if is_packed else 3):
        raise ValueError(
            "model must return a tensor [B, N, K] for tokens [B, N], with K numbers per token, "
            f"got {list(answers.shape)} for tokens {list(tokens.shape)}"
        )
    return answers[where[batch["valid"]] if is_packed else where]


def pooled_answers(model: nn.Module, batch: Batch, *, packed: bool = False) -> Tensor:
    """Return a model's output for every sequence, [B, K], or the mean of its output per token.

    The head of a model is linear, so the mean of the outputs is the head applied to the mean of the
    features.
    """
    answers, is_packed = call(model, batch["tokens"], batch, packed=packed)
    if answers.dim() == 2 and not is_packed:
        return answers
    valid = batch.get("valid")
    if valid is None:
        return answers.mean(1)
    counts = valid.sum(1, keepdim=True)
    if not is_packed:
        return answers.masked_fill(~valid[..., None], 0).sum(1) / counts
    of_sequence = valid.nonzero()[:, 0]
    return (
        answers.new_zeros(len(valid), answers.shape[-1]).index_add(0, of_sequence, answers) / counts
    )


def call(
    model: nn.Module, tokens: Tensor, batch: Batch, *, packed: bool = False
) -> tuple[Tensor, bool]:
    """Return a model's output, and whether its tokens are packed.

    A structure is passed to models that read structures; other models get only the sequence.
    """
    inside = unwrapped(model)
    valid, structure = batch.get("valid"), batch.get("structure")
    if structure is not None and getattr(inside, "structure", False) is not True:
        structure = None
    given = {"positions": batch.get("positions"), "context": batch.get("context")}
    if structure is not None:
        given["positions"] = None  # the structure has its own positions
        given["structure"] = structure
    if not packed or valid is None:
        given["valid"] = valid
        return _answers(model, tokens, given), False
    if given["positions"] is not None:
        given["positions"] = given["positions"][valid]
    given["context"] = _packed_context(inside, given["context"], valid)
    if structure is None:
        given["graph"] = packed_graphs(inside, valid.sum(-1).tolist())
    return _answers(model, tokens[valid], given), True


def packed_graphs(model: Any, lengths: Sequence[int]) -> list[TokenGraph]:
    """Return the graph of every block for packed sequences, without edges between them.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.train.batches.calling import packed_graphs
        >>> model = ga.models.SequenceEncoder(9, 8, depth=2, heads=2)
        >>> [graph.num_edges for graph in packed_graphs(model, [3, 2])]  # 3 * 3 + 2 * 2
        [13, 13]
    """
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


def _answers(model: nn.Module, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    answers: Any = model(tokens, **{k: v for k, v in given.items() if v is not None})
    if not isinstance(answers, Tensor) or not answers.is_floating_point():
        raise ValueError(f"model must return a floating-point tensor, got {described(answers)}")
    return answers


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
