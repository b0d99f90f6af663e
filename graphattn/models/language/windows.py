"""How many keys every block of a causal model sees."""

from __future__ import annotations

from typing import Any

from graphattn.graphs.arguments import as_int


def window_of_blocks(window: Any, pattern: Any, depth: int) -> list[int | None]:
    """The window of every block, in keys, the token itself included; None for all before it.

    Args:
        window: one for all blocks, a pair (short, long) with a `pattern`, or one per block.
        pattern: letters S and L, laid over all blocks from the first on and repeated; None without
            a pair. A letter beyond a short model stands for no block.
        depth: number of blocks.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - {"S", "L"}:
            raise ValueError(
                f"window_pattern must be a word of S (short) and L (long), got {pattern!r}"
            )
        if not isinstance(window, list | tuple) or len(window) != 2:
            raise ValueError(
                f"window must be a pair (short, long) with window_pattern={pattern!r}, "
                f"got {window!r}"
            )
        short, long = (as_window(own) for own in window)
        return [short if pattern[i % len(pattern)] == "S" else long for i in range(depth)]
    if not isinstance(window, list | tuple):
        return [as_window(window)] * depth
    if len(window) != depth:
        hint = "; a pair (short, long) needs a window_pattern" if len(window) == 2 else ""
        raise ValueError(
            f"window must be one for all blocks, or one per block ({depth}), got {window!r}{hint}"
        )
    return [as_window(own) for own in window]


def as_window(window: Any) -> int | None:
    """A number of keys, or None."""
    return None if window is None else as_int("window", window, 1)
