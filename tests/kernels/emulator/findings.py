"""Mistakes that the emulator noticed: each kind of mistake, at which instruction, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Findings:
    """Mistakes of a launch, counted by kind and instruction.

    Example:
        >>> findings = Findings(lambda: "st.shared.b32 [%r1], %r2")
        >>> findings.add("shared memory: race")
        >>> print(findings)
        shared memory: race, 1 times at st.shared.b32 [%r1], %r2
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.remarks: Counter[str] = Counter()  # what is odd, and no mistake
        self._where = where

    def add(self, kind: str) -> None:
        """Note a mistake of the instruction that is executed now."""
        self.counts[kind, self._where()] += 1

    def remark(self, kind: str) -> None:
        """Note something that is no mistake."""
        self.remarks[kind] += 1

    def clear(self) -> None:
        """Forget everything, before another launch."""
        self.counts.clear()
        self.remarks.clear()

    def __str__(self) -> str:
        lines = [
            f"{kind}, {count} times at {where}" for (kind, where), count in self.counts.items()
        ]
        return "\n".join(lines) or "none"
