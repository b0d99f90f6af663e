"""Least work of any implementation, as (operations, bytes) of one pass."""

from __future__ import annotations

from collections.abc import Callable

import graphattn as ga

Size = dict[str, int]
Work = tuple[float, float]
Count = Callable[[Size, int, bool], Work]  # of a size, bytes per number, with the backward pass


def unknown(size: Size, itemsize: int, backward: bool) -> Work:
    return 0.0, 0.0


def attention(edges: Callable[[Size], int], *, tensors: int = 4, listed: bool = False) -> Count:
    """Two products per edge and head; queries, keys, values and outputs moved once.

    Backward: five products more, and twice the tensors. `tensors` is 2 where query, key and value
    are one. Edges that are `listed` are read, 4 bytes each, once forward and twice backward. A key
    or value that several targets look at is counted once, as if a cache held every tensor: where
    edges go anywhere and tensors are larger than the cache, no gather can come near this bound.
    """

    def work(size: Size, itemsize: int, backward: bool) -> Work:
        width = size.get("batch", 1) * size["heads"] * size["features"]
        tokens = size["tokens"] + size.get("sources", size["tokens"])  # half of the tensors each
        flops, moved = 4.0 * edges(size) * width, 0.5 * itemsize * tensors * tokens * width
        if listed:
            moved += 4.0 * edges(size)
        return (3.5 * flops, 3.0 * moved) if backward else (flops, moved)

    return work


def consensus(size: Size, itemsize: int, backward: bool) -> Work:
    """The product xi -> r D of every edge; states and hidden vectors moved once, backward 5/2."""
    edges = size["batch"] * ga.window_path_graph(size["tokens"], size["window"]).num_edges
    tokens = size["batch"] * size["tokens"]
    moved = 1.0 * itemsize * tokens * (2 * size["dim"] + 2 * size["heads"] * size["edge_hidden"])
    flops = 2.0 * edges * size["edge_hidden"] * size["rank"] * size["dim"]
    return (3.5 * flops, 2.5 * moved) if backward else (flops, moved)


def consensus_layer(size: Size, itemsize: int, backward: bool) -> Work:
    """Count the products of a layer, with tokens, outputs and weights moved once.

    Backward: two products per projection; weights are read and their gradients written.
    """
    step, _ = consensus(size, itemsize, backward)
    tokens, dim = size["batch"] * size["tokens"], size["dim"]
    weights = 2 * dim * (dim + size["edge_hidden"]) + size["rank"] * dim * size["edge_hidden"]
    projections = 4.0 * tokens * dim * (dim + size["edge_hidden"])
    moved = 1.0 * itemsize * (2 * tokens * dim + weights)
    if backward:
        return step + 3 * projections, moved + itemsize * (3.0 * tokens * dim + 2 * weights)
    return step + projections, moved


def neighbors(size: Size, itemsize: int, backward: bool) -> Work:
    """Count a product per pair, reading points, and writing an index and a distance per neighbour.

    Points are float32, but products in bfloat16 can find candidates on a GPU.
    """
    moved = size["tokens"] * (4.0 * size["features"] + 12.0 * size["k"])
    return 2.0 * size["tokens"] ** 2 * size["features"], moved


def edges(size: Size, itemsize: int, backward: bool) -> Work:
    """Two indices of eight bytes per edge, written once."""
    return 0.0, 16.0 * ga.window_path_graph(size["tokens"], size["window"]).num_edges


def stream_step(size: Size, itemsize: int, backward: bool) -> Work:
    """Four projections, and two products with the keys and values of every text's window."""
    texts, weights = size.get("batch", 1), 4 * size["dim"] ** 2
    windows = texts * 2 * size["window"] * size["dim"]
    return 2.0 * (texts * weights + windows), 1.0 * itemsize * (weights + windows)
