"""What no implementation can avoid: (operations, bytes) of one forward pass, in float32."""

from __future__ import annotations

from collections.abc import Callable

import graphattn as ga

Size = dict[str, int]
Work = tuple[float, float]


def attention(edges: Callable[[Size], int]) -> Callable[[Size], Work]:
    """Two products per edge and head; queries, keys, values and outputs moved once."""

    def work(size: Size) -> Work:
        width = size["heads"] * size["features"]
        return 4.0 * edges(size) * width, 4.0 * 4 * size["tokens"] * width

    return work


def consensus(size: Size) -> Work:
    """The product xi -> r D of every edge and head; state and hidden vectors moved once."""
    edges = size["batch"] * ga.window_path_graph(size["tokens"], size["window"]).num_edges
    tokens = size["batch"] * size["tokens"]
    moved = tokens * (2 * size["dim"] + 2 * size["heads"] * size["edge_hidden"])
    return 2.0 * edges * size["edge_hidden"] * size["rank"] * size["dim"], 4.0 * moved


def neighbors(size: Size) -> Work:
    """A product per pair."""
    return 2.0 * size["tokens"] ** 2 * size["features"], 0.0


def edges(size: Size) -> Work:
    """Two indices of eight bytes per edge, written once."""
    return 0.0, 16.0 * ga.window_path_graph(size["tokens"], size["window"]).num_edges


def stream_step(size: Size) -> Work:
    """Four projections, and two products with the keys and values of a window."""
    weights, window = 4 * size["dim"] ** 2, 2 * size["window"] * size["dim"]
    return 2.0 * (weights + window), 4.0 * (weights + window)
