"""Models whose head can share its weight with the embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from graphattn.models.token_model import TokenModel


class TiedModel(TokenModel):
    """A model of tokens whose head shares its weight with the embedding, if `tie_weights` is set.

    Attributes:
        tie_weights: whether the two share one weight.
    """

    tie_weights: bool = False

    def _keep_tied(self, tie_weights: bool) -> None:
        """Tie the weights in a constructor, when `embedding` and `head` are there."""
        self.tie_weights = tie_weights
        self._tie()
        self.register_load_state_dict_post_hook(_tie_again)

    def _tie(self) -> None:
        if self.tie_weights:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` and tie the weights again: moving to or from the device "meta" separates
        them."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Raise an error if the state dict has two different weights, since one would be lost."""
        names = f"{prefix}embedding.weight", f"{prefix}head.weight"
        given = [state_dict[name] for name in names if name in state_dict]
        if self.tie_weights and len(given) == 2 and not _are_equal(*given):
            errors: list[str] = others[-1]
            errors.append(
                f"{names[1]} must be equal to {names[0]} in a model with tie_weights=True, got two "
                "different weights: make the model with tie_weights=False"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


def _tie_again(model: TiedModel, _: Any) -> None:
    """Tie the weights again after a state dict was loaded: ``assign=True`` separates them."""
    model._tie()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; tensors on the device "meta" have no values."""
    if a.shape != b.shape or a.is_meta or b.is_meta or a.data_ptr() == b.data_ptr():
        return a.shape == b.shape
    b = b.to(a.device)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
