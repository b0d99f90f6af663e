"""The option `--pattern`: which tokens see which."""

from __future__ import annotations

from typing import NamedTuple

import graphattn as ga
from graphattn.cli.demo.sample import printable
from graphattn.plain_tables import counted


class Pattern(NamedTuple):
    """A graph, its name, and the meaning of the name."""

    name: str
    meaning: str
    graph: ga.TokenGraph


def parse_pattern(
    text: str, num_tokens: int, *, is_image: bool, global_tokens: str | None = None
) -> Pattern:
    """Make the graph of ``global``, ``block:128``, ``window:128`` or ``longformer:512``."""
    kind, _, size = text.partition(":")
    if global_tokens is not None and kind != "longformer":
        raise ValueError(
            "--global-tokens can only be used with --pattern longformer:SIZE, got --pattern "
            f"{text!r}"
        )
    if kind == "global" and not size:
        meaning = "every token sees every token"
        return Pattern(text, meaning, ga.complete_graph(num_tokens))
    least = {"block": 1, "window": 2, "longformer": 2}.get(kind)
    if least is None or not (size.isascii() and size.isdigit()) or int(size) < least:
        raise ValueError(
            "--pattern must be global, block:SIZE, window:SIZE or longformer:SIZE with SIZE in "
            f"tokens (2 or more; block: 1 or more), got {text!r}"
        )
    width = min(int(size), 2 * num_tokens)  # larger numbers give the same graph
    if kind == "block":
        meaning = (
            f"blocks of {counted(int(size), 'token')} that do not overlap, in the order of the file"
        )
        return Pattern(text, meaning, ga.block_window_graph(num_tokens, width))
    each_side = width // 2
    meaning = f"{counted(int(size) // 2, 'token')} on each side (a window of {size})"
    if kind == "window":
        graph = ga.window_path_graph(num_tokens, each_side, self_loops=True)
        return Pattern(text, meaning, graph)
    # The paper's choice: the middle pixel of an image, the first row of a table (Section 3.3).
    tokens = parse_tokens(global_tokens or ("middle" if is_image else "first"), num_tokens)
    if len(tokens) == 1:
        meaning += f", and token {tokens[0]} sees and is seen by all"
    else:
        meaning += f", and tokens {', '.join(map(str, tokens))} see and are seen by all"
    return Pattern(text, meaning, ga.longformer_graph(num_tokens, each_side, tokens))


def parse_tokens(text: str, num_tokens: int) -> list[int]:
    """Parse ``first,last`` or ``0,7,-1``; negative token numbers count from the end."""
    words = {"first": 0, "middle": num_tokens // 2, "last": num_tokens - 1}
    tokens = set()
    for part in text.split(","):
        word = part.strip().lower()
        try:
            token = words[word] if word in words else int(word)
        except ValueError:
            token = num_tokens
        if not -num_tokens <= token < num_tokens:
            raise ValueError(
                f"--global-tokens must be numbers from {-num_tokens} to {num_tokens - 1}, or "
                f"first, middle, last, separated by commas, got {printable(text)!r}"
            )
        tokens.add(token % num_tokens)
    return sorted(tokens)
