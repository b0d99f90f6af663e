"""Models whose head may be their embedding: one weight under two names, which stay one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from graphattn.models.token_model import TokenModel


class TiedModel(TokenModel):
    """A model of tokens whose head's weight is the embedding, where that was asked for.

    Attributes:
        tie_weights: whether it was.
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
        """Moved to or from the device "meta", a parameter of two names would become two."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Refuse two weights in the place of one, of which one would be lost."""
        names = f"{prefix}embedding.weight", f"{prefix}head.weight"
        given = [state_dict[name] for name in names if name in state_dict]
        if self.tie_weights and len(given) == 2 and not _are_equal(*given):
            errors: list[str] = others[-1]
            errors.append(
                f"{names[1]} must be {names[0]} in a model with tie_weights=True, got two weights "
                "that differ: make the model with tie_weights=False"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


def _tie_again(model: TiedModel, _: Any) -> None:
    """After a state dict was loaded; with ``assign=True`` a parameter of two names becomes two."""
    model._tie()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; on the device "meta" there are none."""
    if a.shape != b.shape or a.is_meta or b.is_meta or a.data_ptr() == b.data_ptr():
        return a.shape == b.shape
    b = b.to(a.device)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
