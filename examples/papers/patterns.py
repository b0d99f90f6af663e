"""Attention patterns, and models whose layers use one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from rates import Arm
from torch import nn

import graphattn as ga
from graphattn.train.runs.choices import tokens_of_image


def _longformer(n: int, window: int, parts: int) -> ga.TokenGraph:
    return ga.longformer_graph(n, window, sorted({n * part // parts for part in range(parts)}))


PATTERNS: dict[str, Callable[[int], ga.TokenGraph]] = {
    "global": ga.complete_graph,
    "blocks of 8": lambda n: ga.block_window_graph(n, 8),
    "blocks of 16": lambda n: ga.block_window_graph(n, 16),
    "blocks of 32": lambda n: ga.block_window_graph(n, 32),
    "window 2": lambda n: ga.window_path_graph(n, 2, self_loops=True),
    "window 8": lambda n: ga.window_path_graph(n, 8, self_loops=True),
    "window 16": lambda n: ga.window_path_graph(n, 16, self_loops=True),
    "dilated window": lambda n: ga.dilated_window_graph(n, 8, 4),
    "longformer, 1 global": lambda n: _longformer(n, 7, 1),
    "longformer, 4 global": lambda n: _longformer(n, 4, 4),
    "bigbird": lambda n: ga.bigbird_graph(n, 3, 8, [0], 0),
    "random": lambda n: ga.bigbird_graph(n, 1, 13, [], 0),
}


@cache
def graph_of(pattern: str, tokens: int) -> ga.TokenGraph:
    return PATTERNS[pattern](tokens)


def over(model: Any, seed: int, *, pattern: str) -> nn.Module:
    """Let all blocks of a model use a pattern; image models ask for graphs by the image size."""

    def graphs(size: Any = None) -> list[ga.TokenGraph]:
        tokens = size if isinstance(size, int) else tokens_of_image(model)
        return [graph_of(pattern, tokens)] * len(model.blocks)

    model.graphs = graphs
    return model


ARMS = {name: Arm("dot", change=partial(over, pattern=name)) for name in PATTERNS}
