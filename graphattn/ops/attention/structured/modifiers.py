"""What changes weights between the score and the average: a cap on logits, and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from graphattn.ops.dropout import Dropout


class Modifiers(NamedTuple):
    """Options of a call that need its logits or weights, which fused attention never forms."""

    softcap: float | None = None
    dropout: Dropout | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.softcap is not None or self.dropout is not None

    def some(self, targets: Any, sources: Any) -> Modifiers:
        """Those of some targets and sources: slices, or tensors of their numbers."""
        if self.dropout is None:
            return self
        return Modifiers(self.softcap, self.dropout.some(targets, sources))


NONE = Modifiers()
