"""Edges sorted by counting: every build, long rows and short ones, against a sort by torch."""

from __future__ import annotations

import builds
import pytest
import torch

from graphattn.graphs.edges import lists as edge_lists
from graphattn.kernels.cpu import edge_order, library

if library.why_not() is not None:
    pytest.skip(str(library.why_not()), allow_module_level=True)


def drawn(targets: int, sources: int, share: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    pairs = (torch.rand(targets, sources, generator=generator) < share).nonzero().flip(1).T
    return pairs[:, torch.randperm(pairs.shape[1], generator=generator)]


# Rows of 23 to 26 edges stand on both sides of what is sorted by insertion.
SIZES = [(1, 1), (5, 24), (5, 25), (3, 2000), (2000, 3), (300, 300), (1, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize(("targets", "sources"), SIZES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("dtype", edge_order.DTYPES)
def test_it_is_a_stable_sort_by_torch(
    targets: int, sources: int, share: float, dtype: torch.dtype
) -> None:
    given = drawn(targets, sources, share, seed=targets + sources)
    by_source = given[0].argsort(stable=True)
    expected = by_source[given[1][by_source].argsort(stable=True)]
    for edges in (given, given.T.contiguous().T):
        result = edge_order.sorted_edges(edges.to(dtype), targets, sources, permutation=True)
        assert not isinstance(result, edge_order.Wrong)
        assert result[1] is not None
        assert torch.equal(result[1], expected)
        assert torch.equal(result[0].long(), given[:, expected])
        alone = edge_order.sorted_edges(edges.to(dtype), targets, sources, permutation=False)
        assert not isinstance(alone, edge_order.Wrong)
        assert alone[1] is None
        assert torch.equal(alone[0], result[0])


@pytest.mark.parametrize("dtype", edge_order.DTYPES)
def test_edges_by_source_are_the_transposed_list(dtype: torch.dtype) -> None:
    for targets, sources, share in ((40, 30, 0.3), (1, 5, 1.0), (5, 1, 0.5), (0, 3, 0), (3, 0, 0)):
        edges, _ = edge_lists.sorted_edge_list(drawn(targets, sources, share, 0), targets, sources)
        degree = torch.bincount(edges[1], minlength=targets)
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)]).to(dtype)
        result = edge_order.edges_by_source(rowptr, edges[0].to(dtype), sources)
        assert {x.dtype for x in result} == {dtype}
        colptr, target, edge = result
        order = edges[0].argsort(stable=True)
        assert torch.equal(edge.long(), order)
        assert torch.equal(target.long(), edges[1][order].long())
        assert torch.equal(colptr.diff().long(), torch.bincount(edges[0], minlength=sources))
        assert colptr[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("build", library.BUILDS)
def test_every_build_sorts(build: str) -> None:
    builds.run_with(
        build,
        """
import torch
import graphattn as ga
assert ga.from_edge_index(torch.tensor([[0], [0]]), 1).num_edges == 1
generator = torch.Generator().manual_seed(0)
number = torch.randperm(300 * 200, generator=generator)[:9000]
edges = torch.stack([number % 300, number // 300])
graph, order = ga.from_edge_index(edges, 200, 300, return_permutation=True)
assert torch.equal(order, number.argsort())
assert torch.equal(graph.edge_index, edges[:, order])
assert torch.equal(graph.transpose_permutation(), graph.edge_index[0].argsort(stable=True))
""",
    )
