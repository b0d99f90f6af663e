"""Check the multiplicity of the eigenvalue 1 in Krause attention.

It is the number of closed communicating classes of the Markov chain of the attention weights:
groups of tokens that can all reach each other, and see no token outside. The code calls them closed
classes."""

from __future__ import annotations

from collections.abc import Iterator

import networkx
import torch
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Claim, ClaimCase, Size
from graphattn.cli.verify.graphs import generator

FEATURES = 3
SAME = 1e-9  # eigenvalues this close to 1 count as 1; weights are of the order of 0.1


def groups(seed: int) -> tuple[ga.TokenGraph, int]:
    """Make separate random digraphs with shuffled tokens and self-loops, and return their
    number."""
    draw = generator(seed)
    sizes = torch.randint(2, 8, (int(torch.randint(1, 6, (), generator=draw)),), generator=draw)
    masks = [torch.rand(n, n, generator=draw) < 0.6 for n in sizes.tolist()]
    mask = torch.block_diag(*masks).bool()
    mask.fill_diagonal_(True)
    order = torch.randperm(len(mask), generator=draw)
    return ga.from_mask(mask[order][:, order]), len(masks)


def weights_of(graph: ga.TokenGraph, seed: int, top_k: int | None) -> Tensor:
    """Return RBF attention weights of random tokens, [E]; rows sum to 1, dropped edges are exactly
    0."""
    draw = generator(seed)
    x = torch.randn(graph.num_tokens, 1, FEATURES, dtype=torch.float64, generator=draw)
    return ga.attention_weights(x, x, graph, sigma=FEATURES**0.5, top_k=top_k)[:, 0]


def draws(size: Size) -> Iterator[tuple[str, ga.TokenGraph, int, Tensor]]:
    """Yield name, graph, number of groups and weights: for all neighbours, and for the nearest
    two."""
    for seed in range(size.draws):
        graph, count = groups(seed)
        for top_k in (None, 2):
            neighbors = "all neighbours" if top_k is None else f"the nearest {top_k}"
            yield f"draw {seed}, {neighbors}", graph, count, weights_of(graph, seed, top_k)


def at_least_the_groups(size: Size) -> Iterator[ClaimCase]:
    """Check that the multiplicity of the eigenvalue 1 is at least the number of groups."""
    for name, graph, count, weight in draws(size):
        yield ClaimCase(name, float(multiplicity(graph, weight) - count))


def exactly_the_closed_classes(size: Size) -> Iterator[ClaimCase]:
    """Check that the multiplicity is the number of closed classes, counted without eigenvalues."""
    for name, graph, _, weight in draws(size):
        found = multiplicity(graph, weight)
        counted = ga.spectral.eigenvalue_one_multiplicity(graph, weight)
        yield ClaimCase(name, -abs(found - counted))


def closed_classes_as_networkx(size: Size) -> Iterator[ClaimCase]:
    """Check the closed classes themselves against networkx."""
    for name, graph, _, weight in draws(size):
        looks = networkx.DiGraph()
        looks.add_nodes_from(range(graph.num_tokens))
        source, target = graph.edge_index[:, weight > 0].tolist()
        looks.add_edges_from(zip(target, source, strict=True))
        expected = {frozenset(group) for group in networkx.attracting_components(looks)}
        classes = ga.spectral.closed_classes(graph, weight)
        found = {frozenset(tokens.tolist()) for tokens in classes}
        yield ClaimCase(name, -float(len(found ^ expected)))


def more_than_groups(size: Size) -> tuple[int, int]:
    """Count the top-k draws with more closed classes than groups, and all top-k draws."""
    more = total = 0
    for seed in range(size.draws):
        graph, count = groups(seed)
        weight = weights_of(graph, seed, 2)
        more += ga.spectral.eigenvalue_one_multiplicity(graph, weight) > count
        total += 1
    return more, total


def multiplicity(graph: ga.TokenGraph, weight: Tensor) -> int:
    """Count the eigenvalues of the attention matrix, [N, N], that are 1."""
    A = torch.zeros(graph.num_tokens, graph.num_tokens, dtype=torch.float64)
    A[graph.edge_index[1], graph.edge_index[0]] = weight
    return int(((torch.linalg.eigvals(A) - 1).abs() < SAME).sum())


CLAIMS = [
    Claim(
        "eigenvalue 1: at least once a group",
        "Krause paper",
        "If tokens form m groups without edges between them, the eigenvalue 1 of the attention "
        "matrix has multiplicity >= m, with top-k and without.",
        at_least_the_groups,
    ),
    Claim(
        "eigenvalue 1: once a closed class",
        "row-stochastic matrices",
        "Its multiplicity is exactly the number of closed communicating classes.",
        exactly_the_closed_classes,
        "equation",
    ),
    Claim(
        "closed classes: as networkx finds",
        "row-stochastic matrices",
        "The closed classes are the attracting components of the graph from targets to sources.",
        closed_classes_as_networkx,
        "equation",
    ),
]
