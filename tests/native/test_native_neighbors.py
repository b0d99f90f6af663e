"""Compiled code of nearest neighbours: what rounding may exchange is kept, and float64 decides."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.neighbors import SmallestOfRows, squared_distances

pytestmark = pytest.mark.every_case


@pytest.fixture(autouse=True)
def every_build(native: ctypes.CDLL, monkeypatch):
    monkeypatch.setattr(library, "library", lambda: native)


def scanned(numbers, slack, k, room, pieces):
    """A matrix given in pieces of so many columns."""
    smallest = SmallestOfRows(slack, k, room)
    for first in range(0, numbers.shape[1], pieces):
        some = numbers[:, first : first + pieces]
        smallest.take(some, first, is_last=first + pieces >= numbers.shape[1])
    return smallest


def columns_of(smallest):
    return [row[: int(n)].tolist() for row, n in zip(smallest.column, smallest.count, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 7, 64, 65, 1000])
@pytest.mark.parametrize("pieces", [9, 64, 513])
def test_all_within_the_slack_of_the_kth_smallest_are_kept(dtype, columns, pieces):
    generator = torch.Generator().manual_seed(columns)
    numbers = torch.randn(33, columns, generator=generator, dtype=dtype)
    slack = 0.02 * torch.rand(33, generator=generator, dtype=dtype)
    for k in (1, 5):
        found = scanned(numbers, slack, k, 8 * k + 32, pieces)
        assert found.has_all
        limit = np.sort(numbers.numpy(), axis=1)[:, min(k, columns) - 1] + slack.numpy()
        if columns < k:
            limit[:] = np.inf
        expected = [
            np.flatnonzero(row <= own).tolist() for row, own in zip(numbers, limit, strict=True)
        ]
        assert columns_of(found) == expected


def test_oneself_may_be_first_or_out_of_reach():
    numbers = torch.arange(40.0).flip(0).repeat(3, 1)
    numbers[0, 3], numbers[1, 39] = -math.inf, math.inf
    found = scanned(numbers, torch.zeros(3), 2, 10, 16)
    assert columns_of(found) == [[3, 39], [37, 38], [38, 39]]


def test_rows_with_too_many_near_the_kth_smallest_are_told():
    numbers = torch.stack([torch.zeros(200), torch.arange(200.0)])
    found = scanned(numbers, torch.zeros(2), 3, 20, 64)
    assert not found.has_all
    assert int(found.count[0]) == -1
    assert found.column[1, :3].tolist() == [0, 1, 2]  # the other row is none the worse


def test_a_view_of_wider_rows_is_read_as_it_is():
    wide = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    view, slack = wide[:, 10:77], torch.zeros(5)
    found, copied = (scanned(x, slack, 4, 40, 200) for x in (view, view.contiguous()))
    expected = np.sort(np.argsort(view.numpy(), axis=1)[:, :4], axis=1).tolist()
    assert columns_of(found) == columns_of(copied) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 13, 64])
def test_squared_distances_are_those_of_float64(dtype, width):
    generator = torch.Generator().manual_seed(width)
    a, b = (torch.randn(9, width, generator=generator, dtype=dtype) for _ in range(2))
    row, column = (torch.randint(9, (3000,), generator=generator) for _ in range(2))
    column[::5] = -1
    found = squared_distances(a, b, row, column)
    gap = a.double()[row] - b.double()[column]
    expected = gap.square()
    if width <= 3:  # one after the other, to the last bit
        expected = sum(expected[:, 1:].unbind(1), expected[:, 0])
        assert torch.equal(found[column >= 0], expected[column >= 0])
    else:
        expected = expected.sum(1)
        torch.testing.assert_close(found[column >= 0], expected[column >= 0], rtol=1e-14, atol=0)
    assert (found[column < 0] == math.inf).all()


def test_exact_distances_decide_ties_by_index_and_leave_out_who_is_no_neighbour():
    points = torch.tensor([[0.0], [1.0], [0.0], [2.0]])
    smallest = scanned(torch.zeros(4, 4), torch.zeros(4), 3, 20, 4)
    without = smallest.nearest(points, points, 0, False)
    assert without.tolist() == [[2, 1, 3], [0, 2, 3], [0, 1, 3], [1, 0, 2]]
    # Of a row that is itself, first, even after an equal point; and of other points.
    assert smallest.nearest(points, points, 0, True)[2].tolist() == [2, 0, 1]
    assert smallest.nearest(points, points, None, False)[2].tolist() == [0, 2, 1]
    far = torch.tensor([[0.0], [math.inf], [math.nan], [2.0]])
    assert smallest.nearest(points, far, None, False)[0].tolist() == [0, 3, -1]


@pytest.mark.parametrize("width", [3, 16, 70])
def test_the_nearest_are_those_of_float64_for_any_number_of_threads(width):
    x = torch.randn(700, width, generator=torch.Generator().manual_seed(width))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(ga.knn(x, 9))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    distance = torch.cdist(x.double(), x.double()).fill_diagonal_(math.inf)
    assert torch.equal(found[0][0], distance.sort(stable=True).indices[:, :9])
