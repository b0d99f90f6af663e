"""Least work of any implementation, as (operations, bytes) of one pass."""

from __future__ import annotations

from collections.abc import Callable

import graphattn as ga

Size = dict[str, int]
Work = tuple[float, float]
Count = Callable[[Size, int, bool], Work]  # of a size, bytes per number, with the backward pass


def unknown(size: Size, itemsize: int, backward: bool) -> Work:
    """Return that no bound is known."""
    return 0.0, 0.0


def attention(edges: Callable[[Size], int], *, tensors: int = 4, listed: bool = False) -> Count:
    """Two products per edge and head; queries, keys, values and outputs moved once.

    The backward pass has five products more, and twice the tensors: the same again and the
    gradient of the output are read, one gradient per input is written. `tensors` is 2 where query,
    key and value are one.

    Edges that are `listed` are read too, 4 bytes each, once forward and twice backward (by target
    and by source). That is all that memory must deliver: a key or value that several targets look
    at is counted once, as if a cache held every tensor, and a gather as if it ran at the speed of
    a copy. Where edges go to sources anywhere and tensors are larger than the cache, it is a bound
    that no gather can come near.
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
    """The product xi -> r D of every edge and head; state and hidden vectors moved once.

    The backward pass reads them again, with one gradient, and writes two: 5/2 in all at least.
    """
    edges = size["batch"] * ga.window_path_graph(size["tokens"], size["window"]).num_edges
    tokens = size["batch"] * size["tokens"]
    moved = 1.0 * itemsize * tokens * (2 * size["dim"] + 2 * size["heads"] * size["edge_hidden"])
    flops = 2.0 * edges * size["edge_hidden"] * size["rank"] * size["dim"]
    return (3.5 * flops, 2.5 * moved) if backward else (flops, moved)


def consensus_layer(size: Size, itemsize: int, backward: bool) -> Work:
    """Count the products of a consensus layer: its two projections and the first layer included.

    Tokens, outputs and weights are moved once; hidden vectors may stay where they are made. The
    backward pass has two products for each of the layer's projections, and reads the weights and
    writes their gradients.
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

    The other work of a search, which is large, is not counted. Points are float32, but the bound
    uses the speed of bfloat16 on a GPU: products in bfloat16 can find candidates there, if the
    final distances are exact.
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
