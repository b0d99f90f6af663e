"""Windows of the blocks of a causal model, in keys."""

from __future__ import annotations

from typing import Any

from graphattn.graphs.arguments import as_int


def window_of_blocks(window: Any, pattern: Any, depth: int) -> list[int | None]:
    """Return the window of every block, in keys, the token itself included; None for no window.

    Args:
        window: one for all blocks, a pair (short, long) with a `pattern`, or one per block.
        pattern: letters S and L, one per block from the first on, repeated for more blocks; None
            without a pair. Letters beyond the last block are ignored.
        depth: number of blocks.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.
    """
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - {"S", "L"}:
            raise ValueError(
                "window_pattern must be a string of the letters S (short) and L (long), got "
                f"{pattern!r}"
            )
        if not isinstance(window, list | tuple) or len(window) != 2:
            raise ValueError(
                f"window must be a pair (short, long) with window_pattern={pattern!r}, "
                f"got {window!r}"
            )
        short, long = (as_window(one) for one in window)
        return [short if pattern[i % len(pattern)] == "S" else long for i in range(depth)]
    if not isinstance(window, list | tuple):
        return [as_window(window)] * depth
    if len(window) != depth:
        hint = "; a pair (short, long) needs a window_pattern" if len(window) == 2 else ""
        raise ValueError(
            f"window must be one number for all blocks, or a list with one per block ({depth}), "
            f"got {window!r}{hint}"
        )
    return [as_window(one) for one in window]


def as_window(window: Any) -> int | None:
    """Check a window: a number of keys, or None."""
    return None if window is None else as_int("window", window, 1)
