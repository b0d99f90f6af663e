"""Conductance and Cheeger's inequality against all cuts of small graphs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_digraph, weights_by_hand

import graphattn as ga
from graphattn.spectral import cheeger, cheeger_bounds, conductance


def conductance_by_hand(W, inside):
    cut = W[inside][:, ~inside].sum()
    volume = min(W[inside].sum(), W[~inside].sum())
    return cut / volume if cut > 0 else 0.0


def least_conductance(W):
    """Find the least conductance over every group of tokens that holds token 0.

    The other groups are their complements.
    """
    N = len(W)
    return min(
        conductance_by_hand(W, np.array((True, *rest)))
        for rest in itertools.product((False, True), repeat=N - 1)
        if not all(rest)
    )


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(num_tokens=st.integers(2, 9), seed=st.integers(0, 2**32 - 1), density=st.floats(0.1, 1))
def test_the_least_conductance_and_the_sweep_cut_lie_between_the_bounds(num_tokens, seed, density):
    graph, edge_weight, _ = random_digraph(num_tokens, seed, density)
    W = weights_by_hand(graph, edge_weight)
    lower, upper, cut, of_cut = cheeger_bounds(graph, edge_weight)
    least = least_conductance(W)
    assert lower <= least * (1 + 1e-9)
    assert least <= of_cut * (1 + 1e-9)
    assert of_cut <= upper * (1 + 1e-9)
    assert of_cut == pytest.approx(conductance_by_hand(W, cut.numpy()), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(num_tokens=st.integers(2, 9), seed=st.integers(0, 2**32 - 1), density=st.floats(0.1, 1))
def test_conductance_is_the_definition_and_that_of_the_complement(num_tokens, seed, density):
    graph, edge_weight, rng = random_digraph(num_tokens, seed, density)
    inside = rng.random(num_tokens) < 0.5
    inside[0], inside[-1] = True, False
    members = torch.from_numpy(inside)
    ours = conductance(graph, members, edge_weight)
    expected = conductance_by_hand(weights_by_hand(graph, edge_weight), inside)
    assert ours == pytest.approx(expected, rel=1e-12)
    assert conductance(graph, ~members, edge_weight) == ours
    assert 0 <= ours <= 1 + 1e-12


def test_the_bounds_are_those_of_the_normalised_eigenvalue():
    graph, edge_weight, _ = random_digraph(30, 3, 0.2)
    L = ga.spectral.laplacian(graph, edge_weight, normalization="symmetric").toarray()
    second = np.linalg.eigvalsh(L)[1]
    bounds = cheeger_bounds(graph, edge_weight)
    assert bounds.lower == pytest.approx(second / 2, rel=1e-9)
    assert bounds.upper == pytest.approx(math.sqrt(2 * second), rel=1e-9)


def test_a_path_is_cut_in_the_middle():
    for N in (10, 3000):
        bounds = cheeger_bounds(ga.window_path_graph(N, 2))
        assert bounds.sweep_cut.sum() == N // 2
        assert (bounds.sweep_cut.diff() != 0).sum() == 1
        weight_of_half = (4 * N - 6) / 2  # both ends have two and one neighbours less
        assert bounds.conductance == pytest.approx(3 / weight_of_half, rel=1e-12)


def test_two_rooms_with_a_door_are_found_whatever_the_order_of_their_tokens():
    rooms = ga.union(ga.block_window_graph(40, 20), ga.window_path_graph(40, 1))
    names = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    cut = cheeger_bounds(ga.from_edge_index(names[rooms.edge_index], 40)).sweep_cut
    first = torch.zeros(40, dtype=torch.bool)
    first[names[:20]] = True
    assert torch.equal(cut, first) or torch.equal(cut, ~first)


ROUTES = {
    "dense": {},
    "elimination": {"DENSE": 0},
    "wide": {"DENSE": 0, "WIDE": 0},
    "wide, given up": {"DENSE": 0, "WIDE": 0, "BRIEFLY": (20, 1)},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_the_same_bounds(route, monkeypatch):
    for attribute, value in ROUTES[route].items():
        monkeypatch.setattr(cheeger, attribute, value)
    for graph in (ga.grid_window_graph(20, 15, 1), ga.longformer_graph(300, 2, (0,))):
        generator = torch.Generator().manual_seed(0)
        edge_weight = 0.1 + torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)
        L = ga.spectral.laplacian(graph, edge_weight, normalization="symmetric").toarray()
        second = np.linalg.eigvalsh(L)[1]
        bounds = cheeger_bounds(graph, edge_weight)
        assert bounds.lower == pytest.approx(second / 2, rel=1e-8)
        assert bounds.lower <= bounds.conductance <= bounds.upper


def test_disconnected_graphs_have_a_group_without_links_outside():
    lower, upper, cut, of_cut = cheeger_bounds(ga.block_window_graph(7, 3))
    assert (lower, upper, of_cut) == (0.0, 0.0, 0.0)
    assert cut.tolist() == [True] * 3 + [False] * 4
    isolated = ga.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 3)
    assert cheeger_bounds(isolated).conductance == 0.0
    assert conductance(isolated, torch.tensor([False, False, True])) == 0.0  # no weight at all


def test_bad_groups_are_refused():
    graph = ga.complete_graph(4)
    for members in (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)):
        with pytest.raises(
            ValueError,
            match=r"members must be True for some tokens and .* others, got True for [04] of 4",
        ):
            conductance(graph, members)
    with pytest.raises(ValueError, match=r"members must be a bool tensor \[4\], got torch.int64"):
        conductance(graph, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"members must be a bool tensor \[4\], got list"):
        conductance(graph, [True, False, True, False])
    with pytest.raises(ValueError, match=r"members must have shape \[4\], got \[3\]"):
        conductance(graph, torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="graph must have at least 2 tokens, got 1"):
        cheeger_bounds(ga.complete_graph(1))
    with pytest.raises(ValueError, match=r"edge_weight must have shape \[16\]"):
        cheeger_bounds(graph, torch.ones(3))


@pytest.mark.parametrize("dense", [1000, 0])
@pytest.mark.parametrize("kind", ["path", "clusters"])
def test_cuts_of_tiny_weights_lie_between_the_bounds(kind, dense, monkeypatch):
    # A weight of 1e-20 or less has no digit in a sum with a weight of 1.
    monkeypatch.setattr(cheeger, "DENSE", dense)
    if kind == "path":
        cases = [[1.0, 1e-8, 1.0, 1e-20], [1e-40, 1.0, 1e-30, 1.0, 1e-35, 1e-10]]
        weights = [np.diag(w, 1) + np.diag(w, -1) for w in map(np.array, cases)]
    else:  # Kernel weights of two clusters six bandwidths apart, and an outlier.
        rng = np.random.default_rng(0)
        points = [
            np.append(np.repeat([0, 6], [3, 4]) + rng.normal(size=7), 20.0) for _ in range(10)
        ]
        weights = [np.exp(-((x[:, None] - x) ** 2) / 2) for x in points]
    for W in weights:
        W = W * (1 - np.eye(len(W)))
        graph = ga.from_mask(torch.from_numpy(W > 0))
        source, target = graph.edge_index
        lower, upper, cut, of_cut = cheeger_bounds(graph, torch.from_numpy(W)[target, source])
        least = least_conductance(W)
        assert lower <= least * (1 + 1e-9)
        assert least <= of_cut * (1 + 1e-9)
        assert of_cut <= upper
        assert of_cut == pytest.approx(conductance_by_hand(W, cut.numpy()), rel=1e-12)


def test_the_bounds_tell_two_weak_ties_apart():
    # Three groups: the weaker tie is the bottleneck, though both are far below rounding.
    W = np.kron(np.eye(3), np.ones((4, 4)))
    W[3, 4] = W[4, 3] = 1e-20
    W[7, 8] = W[8, 7] = 1e-24
    W *= 1 - np.eye(12)
    graph = ga.from_mask(torch.from_numpy(W > 0))
    source, target = graph.edge_index
    bounds = cheeger_bounds(graph, torch.from_numpy(W)[target, source])
    assert bounds.sweep_cut.nonzero().flatten().tolist() == [8, 9, 10, 11]
    assert bounds.conductance == pytest.approx(1e-24 / 12, rel=1e-12)
    assert bounds.lower <= bounds.conductance <= bounds.upper < 1e-11
