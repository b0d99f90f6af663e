"""What no implementation can avoid: (operations, bytes) of one pass over so many numbers."""

from __future__ import annotations

from collections.abc import Callable

import graphattn as ga

Size = dict[str, int]
Work = tuple[float, float]
Count = Callable[[Size, int, bool], Work]  # of a size, bytes per number, with the backward pass


def unknown(size: Size, itemsize: int, backward: bool) -> Work:
    """Nothing is known, so nothing is divided by it."""
    return 0.0, 0.0


def attention(edges: Callable[[Size], int], *, tensors: int = 4) -> Count:
    """Two products per edge and head; queries, keys, values and outputs moved once.

    The backward pass has five products more, and twice the tensors: the same again and the
    gradient of the output are read, one gradient per input is written. `tensors` is 2 where query,
    key and value are one.
    """

    def work(size: Size, itemsize: int, backward: bool) -> Work:
        width = size.get("batch", 1) * size["heads"] * size["features"]
        flops, moved = 4.0 * edges(size) * width, 1.0 * itemsize * tensors * size["tokens"] * width
        return (3.5 * flops, 3.0 * moved) if backward else (flops, moved)

    return work


def consensus(size: Size, itemsize: int, backward: bool) -> Work:
    """The product xi -> r D of every edge and head; state and hidden vectors moved once.

    The backward pass reads them again, with one gradient, and writes two: 5/2 in all at least.
    """
    edges = size["batch"] * ga.window_path_graph(size["tokens"], size["window"]).num_edges
    tokens = size["batch"] * size["tokens"]
    moved = 1.0 * itemsize * tokens * (2 * size["dim"] + 2 * size["heads"] * size["edge_hidden"])
    flops = 2.0 * edges * size["edge_hidden"] * size["rank"] * size["dim"]
    return (3.5 * flops, 2.5 * moved) if backward else (flops, moved)


def neighbors(size: Size, itemsize: int, backward: bool) -> Work:
    """A product per pair."""
    return 2.0 * size["tokens"] ** 2 * size["features"], 0.0


def edges(size: Size, itemsize: int, backward: bool) -> Work:
    """Two indices of eight bytes per edge, written once."""
    return 0.0, 16.0 * ga.window_path_graph(size["tokens"], size["window"]).num_edges


def stream_step(size: Size, itemsize: int, backward: bool) -> Work:
    """Four projections, and two products with the keys and values of a window."""
    weights, window = 4 * size["dim"] ** 2, 2 * size["window"] * size["dim"]
    return 2.0 * (weights + window), 1.0 * itemsize * (weights + window)
