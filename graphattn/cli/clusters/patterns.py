"""`--pattern`: who sees whom."""

from __future__ import annotations

from typing import NamedTuple

import graphattn as ga


class Pattern(NamedTuple):
    """A graph, and what its name means."""

    name: str
    meaning: str
    graph: ga.TokenGraph


def parse_pattern(text: str, num_tokens: int, *, is_image: bool) -> Pattern:
    """``global``, ``block:128``, ``window:128`` or ``longformer:512`` over so many tokens."""
    kind, _, size = text.partition(":")
    if kind == "global" and not size:
        meaning = "every token sees every token"
        return Pattern(text, meaning, ga.complete_graph(num_tokens))
    least = {"block": 1, "window": 2, "longformer": 2}.get(kind)
    if least is None or not (size.isascii() and size.isdigit()) or int(size) < least:
        raise ValueError(
            "--pattern must be global, block:SIZE, window:SIZE or longformer:SIZE with SIZE in "
            f"tokens (2 or more; block: 1 or more), got {text!r}"
        )
    width = min(int(size), 2 * num_tokens)  # beyond that nothing changes
    if kind == "block":
        meaning = f"blocks of {size} tokens that do not overlap, in the order of the file"
        return Pattern(text, meaning, ga.block_window_graph(num_tokens, width))
    each_side = width // 2
    meaning = f"{int(size) // 2} tokens on each side (a window of {size})"
    if kind == "window":
        graph = ga.window_path_graph(num_tokens, each_side, self_loops=True)
        return Pattern(text, meaning, graph)
    # The paper's choice: the middle pixel of an image, the first row of a table (Sections 3.3).
    token = num_tokens // 2 if is_image else 0
    meaning += f", and token {token} sees and is seen by all"
    return Pattern(text, meaning, ga.longformer_graph(num_tokens, each_side, [token]))
