"""Number of operations of training a language model: by the usual formula, and exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.cost import flops
from graphattn.graphs.arguments import as_int


class TrainingOperations(NamedTuple):
    """Operations per token of a forward and a backward pass, two per multiply-add.

    Attributes:
        by_formula: counted as if every window were full.
        exact: only the edges of the graphs are counted.

    Example:
        >>> import graphattn as ga
        >>> model = ga.models.CausalLM(50, dim=16, depth=2, heads=2, window=4)
        >>> counted = ga.diagnostics.training_operations(model, 100)
        >>> counted.by_formula > counted.exact  # the first tokens have fewer keys
        True
    """

    by_formula: float
    exact: float


def training_operations(model: Any, num_tokens: int) -> TrainingOperations:
    r"""Operations of training a language model, per token of texts with `num_tokens` tokens.

    The formula is nanochat's, which the GKA paper (Table 8) uses: six operations per weight of the
    linear maps, including the head but not the embedding, and
    :math:`12 \, \mathrm{dim} \sum_l W_l` for the windows W_l of all layers, as if every window were
    full. At the beginning of a text windows are not full, so the exact number is lower: it is three
    times the operations of a forward pass (:func:`graphattn.diagnostics.flops`), which counts the
    edges of the graphs.

    Args:
        model: a :class:`~graphattn.models.CausalLM`. On the device "meta" nothing is computed and
            no memory is used for its weights.
        num_tokens: N, the length of a text. A window that is longer than N, or None, counts as N
            keys.

    Raises:
        ValueError: if the model has consensus layers (the formula has no term for them), or if it
            is not a :class:`~graphattn.models.CausalLM`.

    Source:
        *Projection-Free Transformers via Gaussian Kernel Attention*, Table 8: 2.4143e9 for
        GKA and 3.0042e9 for the baseline.

    Example:
        >>> import torch, graphattn as ga
        >>> with torch.device("meta"):
        ...     model = ga.models.CausalLM.from_preset("gka-d20")
        >>> counted = ga.diagnostics.training_operations(model, 2048)
        >>> print(f"{counted.by_formula:.5e} {counted.exact:.3e}")
        2.41435e+09 2.277e+09
    """
    model = as_model(model)
    if not isinstance(getattr(model, "windows", None), list):
        raise ValueError(f"model must be a CausalLM, got {type(model).__name__}")
    if any(hasattr(part, "edge_net") for part in model.modules()):
        raise ValueError(
            "model must have no consensus layers: the formula has no term for them; use "
            "graphattn.diagnostics.flops to count a forward pass"
        )
    num_tokens = as_int("num_tokens", num_tokens, 1)
    device = model.embedding.weight.device
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    keys = sum(min(window or num_tokens, num_tokens) for window in model.windows)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return TrainingOperations(
        by_formula=float(6 * weights + 12 * model.embedding.embedding_dim * keys),
        exact=3 * flops(model, tokens) / num_tokens,
    )
