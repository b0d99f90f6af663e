"""Compiled code of nearest neighbours: what rounding may exchange is kept, and float64 decides."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from threads import same_on_threads

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.neighbors import edges_within, nearest, squared_distances

pytestmark = pytest.mark.every_case


@pytest.fixture(autouse=True)
def every_build(native: ctypes.CDLL, monkeypatch):
    monkeypatch.setattr(library, "library", lambda: native)


def nearest_by_float64(x, k, source=None):
    """Find the k nearest sources by float64 of all differences; ties stand in order of index."""
    a, b = x.double(), (x if source is None else source).double()
    squared = (a[:, None] - b).square().sum(2)
    if source is None:
        squared.fill_diagonal_(math.inf)
    return squared.sort(dim=1, stable=True).indices[:, :k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 6, 7, 13, 100])
def test_the_nearest_are_those_of_float64(dtype, width):
    """Less than a vector, a block, a panel and a tile of points; lists that are thinned out."""
    generator = torch.Generator().manual_seed(width)
    for count in (2, 7, 16, 25, 33, 400):
        x = torch.randn(count, width, generator=generator, dtype=dtype)
        source = torch.randn(count + 9, width, generator=generator, dtype=dtype)
        for to_self, other in ((True, x), (False, source)):
            expected = nearest_by_float64(x, count - 1, None if to_self else source)
            for k in (1, count // 2 or 1, count - 1):
                assert torch.equal(nearest(x, other, k, to_self, False), expected[:, :k])


@pytest.mark.parametrize("width", [3, 12])
def test_float64_decides_among_points_that_rounded_distances_cannot_tell(width):
    """Hundreds of sources at distances that differ by less than float32 knows: lists overflow."""
    generator = torch.Generator().manual_seed(0)
    source = torch.nn.functional.normalize(torch.randn(900, width, generator=generator), dim=1)
    x = 1e-4 * torch.randn(40, width, generator=generator)
    assert torch.equal(nearest(x, source, 5, False, False), nearest_by_float64(x, 5, source))


@pytest.mark.parametrize("width", [1, 4, 9])
def test_ties_stand_by_index_and_who_is_not_finite_is_no_neighbour(width):
    points = torch.zeros(6, width)
    points[:, 0] = torch.tensor([0.0, 1.0, 0.0, 2.0, math.nan, math.inf])
    without = nearest(points, points, 4, True, False)
    none = [-1] * 4
    expected = [[2, 1, 3, -1], [0, 2, 3, -1], [0, 1, 3, -1], [1, 0, 2, -1], none, none]
    assert without.tolist() == expected
    # Oneself is first, even after an equal point, where it may be.
    assert nearest(points, points, 3, True, True)[2].tolist() == [2, 0, 1]
    assert nearest(points, points, 3, False, False)[2].tolist() == [0, 2, 1]
    assert nearest(points, points, 4, True, False, 1.0)[0].tolist() == [2, 1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_edges_within_a_radius_are_those_of_float64(dtype, width):
    generator = torch.Generator().manual_seed(width)
    for count in (1, 2, 17, 300):
        x = torch.randn(count, width, generator=generator, dtype=dtype)
        squared = (x.double()[:, None] - x.double()).square().sum(2)
        for reach in (0.0, 0.25, 9.0, 1e12):
            inside = squared <= reach
            for self_loops in (True, False):
                inside.fill_diagonal_(self_loops)
                edges = edges_within(x, x, reach, True, self_loops)
                assert torch.equal(edges, inside.nonzero().T.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 13, 64])
def test_squared_distances_are_those_of_float64(dtype, width):
    generator = torch.Generator().manual_seed(width)
    a, b = (torch.randn(9, width, generator=generator, dtype=dtype) for _ in range(2))
    row, column = (torch.randint(9, (3000,), generator=generator) for _ in range(2))
    column[::5] = -1
    squared = squared_distances(a, b, row, column)
    gap = a.double()[row] - b.double()[column]
    expected = gap.square()
    if width <= 3:  # one after the other, to the last bit
        expected = sum(expected[:, 1:].unbind(1), expected[:, 0])
        assert torch.equal(squared[column >= 0], expected[column >= 0])
    else:
        expected = expected.sum(1)
        torch.testing.assert_close(squared[column >= 0], expected[column >= 0], rtol=1e-14, atol=0)
    assert (squared[column < 0] == math.inf).all()


@pytest.mark.parametrize("width", [3, 16, 70])
def test_any_number_of_threads_finds_the_same(width):
    x = torch.randn(700, width, generator=torch.Generator().manual_seed(width))
    index, _ = same_on_threads(lambda: ga.knn(x, 9), (1, 3))
    distance = torch.cdist(x.double(), x.double()).fill_diagonal_(math.inf)
    assert torch.equal(index, distance.sort(stable=True).indices[:, :9])
