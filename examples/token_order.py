"""Gain of an order of tokens: attention over neighbours, before and after graph.reorder().

Neighbouring points of a cloud, atoms or shuffled pixels can be far apart in memory. This example
computes attention over the same graph in four orders of the tokens: the given order, a random
order, an order by the edges (reverse Cuthill-McKee), and the order along a Hilbert curve through
the points. Outputs and gradients are compared after the permutation is undone.

    python examples/token_order.py                            # random points, a shuffled image
    python examples/token_order.py --structure complex.cif    # and the atoms of a structure
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import graphattn as ga

HEADS, WIDTH = 8, 64


class Tokens(NamedTuple):
    """Tokens with positions in space, and their graph."""

    name: str
    points: Tensor  # [N, C]
    graph: ga.TokenGraph


class Order(NamedTuple):
    """The graph with its tokens in one order, and the permutation from the given order."""

    name: str
    graph: ga.TokenGraph
    order: Tensor
    seconds: float  # time to find the order


def random_points(count: int, generator: torch.Generator) -> Tokens:
    """Draw random points in a cube, with a graph of the 16 nearest neighbours."""
    points = torch.rand(count, 3, generator=generator)
    return Tokens(f"{count} random points, 16 nearest", points, ga.knn_graph(points, 16))


def shuffled_image(side: int, generator: torch.Generator) -> Tokens:
    """Make an image with its pixels in random order, and windows of 5 x 5 pixels."""
    shuffle = torch.randperm(side * side, generator=generator)
    axis = torch.arange(float(side))
    pixels = torch.cartesian_prod(axis, axis)[shuffle]
    graph = ga.neighborhood_graph((side, side), 5).permute(shuffle)
    return Tokens(f"{side} x {side} shuffled pixels, windows of 5 x 5", pixels, graph)


def atoms_of(path: str, copies: int) -> Tokens:
    """Load the atoms of a structure, with a graph of the 16 nearest neighbours.

    Copies of the structure are placed side by side in space, to have more atoms.
    """
    from biotite.structure.io import load_structure

    atoms = load_structure(path, model=1) if path.endswith(".pdb") else load_structure(path)
    if atoms.coord.ndim == 3:
        atoms = atoms[0]
    one = torch.from_numpy(atoms.coord)
    length = float((one.amax(dim=0) - one.amin(dim=0)).max())
    shift = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:copies, None] * length
    points = (one + shift).flatten(0, 1)
    name = f"{len(points)} atoms of {copies} x {len(one)}, 16 nearest"
    return Tokens(name, points, ga.knn_graph(points, 16))


def orders_of(tokens: Tokens, generator: torch.Generator) -> Iterator[Order]:
    """Yield the given order, a random order, and two orders that reorder() makes from it."""
    count = tokens.graph.num_tokens
    yield Order("as it came", tokens.graph, torch.arange(count), 0)
    shuffle = torch.randperm(count, generator=generator)
    shuffled = tokens.graph.permute(shuffle)
    yield Order("shuffled", shuffled, shuffle, 0)
    for name, points in (("reorder()", None), ("reorder(points)", tokens.points[shuffle])):
        start = time.perf_counter()
        graph, order = shuffled.reorder(points)
        yield Order(name, graph, shuffle[order], time.perf_counter() - start)


class Pass:
    """RBF attention over the tokens in one order, forward only or forward and backward."""

    def __init__(self, own: Order, inputs: Tensor, gradient: Tensor) -> None:
        self.own = own
        self.inputs = [x[:, own.order].clone().requires_grad_() for x in inputs]
        self.gradient = gradient[:, own.order]

    @torch.no_grad()
    def forward(self) -> Tensor:
        return ga.rbf_attention(*self.inputs, self.own.graph, WIDTH**0.5)

    def both(self) -> list[Tensor]:
        """Return the output and the gradients of query, key and value, in the given order."""
        out = ga.rbf_attention(*self.inputs, self.own.graph, WIDTH**0.5)
        found = [out.detach(), *torch.autograd.grad(out, self.inputs, self.gradient)]
        back = self.own.order.argsort()
        return [x[:, back] for x in found]


def distance_apart(graph: ga.TokenGraph) -> float:
    """Compute the median distance between the positions of source and target of an edge."""
    source, target = graph.edge_index
    return float((source - target).abs().double().median())


def measure(tokens: Tokens, *, rounds: int = 7, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Measure the forward pass, and forward and backward pass, in milliseconds, in every order.

    Each number is the smallest one of `rounds` rounds. Every round runs all orders, so that other
    work on the machine affects all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1, tokens.graph.num_tokens, HEADS, WIDTH)
    inputs = torch.randn(3, *shape, generator=generator)
    gradient = torch.randn(shape, generator=generator)
    passes = [Pass(own, inputs, gradient) for own in orders_of(tokens, generator)]
    expected = passes[0].both()
    for one in passes:
        for a, b in zip(one.both(), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    times: dict[str, list[list[float]]] = {one.own.name: [[], []] for one in passes}
    for _ in range(rounds):
        for one in passes:
            for kept, run in zip(times[one.own.name], (one.forward, one.both), strict=True):
                start = time.process_time()
                run()
                kept.append(time.process_time() - start)
    print(f"\n{tokens.name}, {HEADS} heads of {WIDTH}")
    print(f"{'order':18}{'ends apart':>12}{'forward':>12}{'both':>12}{'to find it':>12}")
    found = {}
    for one in passes:
        name, graph, _, seconds = one.own
        forward, both = (1e3 * min(kept) for kept in times[name])
        found[name] = forward, both
        print(
            f"{name:18}{distance_apart(graph):12.0f}{forward:9.1f} ms{both:9.1f} ms"
            f"{1e3 * seconds:9.0f} ms"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--structure", help="a PDB or mmCIF file")
    parser.add_argument("--copies", type=int, default=1, help="of the structure, up to 27")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    measure(random_points(chosen.tokens, generator))
    measure(shuffled_image(round(chosen.tokens**0.5), generator))
    if chosen.structure:
        measure(atoms_of(chosen.structure, chosen.copies))


if __name__ == "__main__":
    main()
