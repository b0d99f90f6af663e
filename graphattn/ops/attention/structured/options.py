"""The options of a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from graphattn.ops.attention.logits.score import Kernel, Score
from graphattn.ops.dropout import Dropout
from graphattn.ops.inputs import ValidPair


class PlanOptions(NamedTuple):
    """Options of a plan beside its graph.

    Attributes:
        score: the name of a score that compiled code knows, or a score of your own.
        valid: bool [B, N] and [B, M], or None.
        softcap: a bound of the logits of dot products.
    """

    score: Kernel | Score
    top_k: int | None
    valid: ValidPair
    softcap: float | None = None
    dropout: Dropout | None = None

    def some(self, targets: Any, sources: Any) -> PlanOptions:
        """Restrict the options to some targets and sources, given as slices or index tensors."""
        of_target, of_source = self.valid
        valid = _at(of_target, targets), _at(of_source, sources)
        dropout = None if self.dropout is None else self.dropout.some(targets, sources)
        return self._replace(valid=valid, dropout=dropout)

    def among(self, targets: Tensor, sources: Tensor | None) -> PlanOptions:
        """Mark as valid only tokens that these masks mark, too: bool [B, N] and [B, M], or None."""
        of_target, of_source = self.valid
        return self._replace(valid=(_both(targets, of_target), _both(sources, of_source)))


def _at(mask: Tensor | None, tokens: Any) -> Tensor | None:
    return None if mask is None else mask[:, tokens]


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a & b
