"""Check the multiplicity of the eigenvalue 1 in Krause attention.

It is the number of closed communicating classes of the Markov chain of the attention weights:
groups of tokens that can all reach each other, and see no token outside. The code calls them closed
classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import networkx
import torch
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Size, claim
from graphattn.cli.verify.graphs import generator

FEATURES = 3
SAME = 1e-9  # eigenvalues this close to 1 count as 1; weights are of the order of 0.1


def groups(seed: int) -> tuple[ga.TokenGraph, int]:
    """Make separate random digraphs with shuffled tokens and self-loops, and count them."""
    draw = generator(seed)
    sizes = torch.randint(2, 8, (int(torch.randint(1, 6, (), generator=draw)),), generator=draw)
    masks = [torch.rand(n, n, generator=draw) < 0.6 for n in sizes.tolist()]
    mask = torch.block_diag(*masks).bool()
    mask.fill_diagonal_(True)
    order = torch.randperm(len(mask), generator=draw)
    return ga.from_mask(mask[order][:, order]), len(masks)


def weights_of(graph: ga.TokenGraph, seed: int, top_k: int | None) -> Tensor:
    """Return RBF attention weights of random tokens, [E]; dropped edges are exactly 0."""
    draw = generator(seed)
    x = torch.randn(graph.num_tokens, 1, FEATURES, dtype=torch.float64, generator=draw)
    return ga.attention_weights(x, x, graph, sigma=FEATURES**0.5, top_k=top_k)[:, 0]


class RandomGroups(NamedTuple):
    """Tokens in groups without edges between them, and attention weights [E]."""

    name: str
    graph: ga.TokenGraph
    num_groups: int
    weight: Tensor

    @property
    def multiplicity(self) -> int:
        """The number of eigenvalues of the attention matrix, [N, N], that are 1."""
        A = torch.zeros(self.graph.num_tokens, self.graph.num_tokens, dtype=torch.float64)
        A[self.graph.edge_index[1], self.graph.edge_index[0]] = self.weight
        return int(((torch.linalg.eigvals(A) - 1).abs() < SAME).sum())


def random_groups(size: Size) -> Iterator[RandomGroups]:
    """Yield groups with weights of all neighbours, and with those of the nearest two."""
    for seed in range(size.draws):
        graph, count = groups(seed)
        for top_k, neighbors in ((None, "all neighbours"), (2, "the nearest 2")):
            weight = weights_of(graph, seed, top_k)
            yield RandomGroups(f"draw {seed}, {neighbors}", graph, count, weight)


@claim("eigenvalue 1: at least once a group", "Krause paper", random_groups)
def at_least_the_groups(case: RandomGroups) -> tuple[float, float]:
    """The eigenvalue 1 of the attention matrix has multiplicity >= m if tokens form m groups
    without edges between them, with top-k and without."""
    return float(case.multiplicity - case.num_groups), 0.0


@claim("eigenvalue 1: once a closed class", "row-stochastic matrices", random_groups, "equation")
def exactly_the_closed_classes(case: RandomGroups) -> tuple[float, float]:
    """The multiplicity of the eigenvalue 1 is exactly the number of closed communicating
    classes."""
    counted = ga.spectral.eigenvalue_one_multiplicity(case.graph, case.weight)
    return -float(abs(case.multiplicity - counted)), 0.0


@claim("closed classes: as networkx finds", "row-stochastic matrices", random_groups, "equation")
def closed_classes_as_networkx(case: RandomGroups) -> tuple[float, float]:
    """The closed classes are the attracting components of the graph from targets to sources."""
    chain = networkx.DiGraph()
    chain.add_nodes_from(range(case.graph.num_tokens))
    source, target = case.graph.edge_index[:, case.weight > 0].tolist()
    chain.add_edges_from(zip(target, source, strict=True))
    expected = {frozenset(group) for group in networkx.attracting_components(chain)}
    classes = ga.spectral.closed_classes(case.graph, case.weight)
    return -float(len({frozenset(tokens.tolist()) for tokens in classes} ^ expected)), 0.0


def more_than_groups(size: Size) -> tuple[int, int]:
    top_k = list(random_groups(size))[1::2]
    more = [
        ga.spectral.eigenvalue_one_multiplicity(case.graph, case.weight) > case.num_groups
        for case in top_k
    ]
    return sum(more), len(more)
