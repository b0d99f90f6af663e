"""Krause flows with a value matrix, on the sphere and on the torus, in plain loops."""

import math
import re

import pytest
import torch
from scipy.stats import wasserstein_distance

import graphattn as ga
from graphattn.dynamics import krause_flow

VALUES = {"identity": None, "general": torch.tensor([[0.9, -0.6], [0.4, 0.7]]).double()}


def start(num_points: int, C: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_points, C, generator=torch.Generator().manual_seed(seed)).double()


def around(a: float, b: float) -> float:
    """The shorter way from angle a to angle b."""
    return math.atan2(math.sin(b - a), math.cos(b - a))


def steps_by_loops(x, manifold, value, seen_by, weight, steps, h):
    """`seen_by(distances)` lists the sources of a target; `weight(distance)` is not normalised."""
    z = [list(p) for p in x.tolist()]
    V = torch.eye(len(z[0])).tolist() if value is None else value.tolist()
    for _ in range(steps):
        new = []
        for p in z:
            ways = [
                [around(a, b) if manifold == "torus" else b - a for a, b in zip(p, q, strict=True)]
                for q in z
            ]
            distances = [math.hypot(*way) for way in ways]
            seen = seen_by(distances)
            weights = [weight(distances[j]) for j in seen]
            of = z if manifold == "sphere" else ways
            pull = [
                sum(w * of[j][c] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                for c in range(len(p))
            ]
            pull = [sum(v * y for v, y in zip(row, pull, strict=True)) for row in V]
            if manifold == "sphere":
                along = sum(a * b for a, b in zip(p, pull, strict=True))
                pull = [a - along * b for a, b in zip(pull, p, strict=True)]
            moved = [a + h * b for a, b in zip(p, pull, strict=True)]
            if manifold == "sphere":
                moved = [a / math.hypot(*moved) for a in moved]
            if manifold == "torus":
                moved = [around(0, a) for a in moved]
            new.append(moved)
        z = new
    return torch.tensor(z, dtype=torch.float64)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("manifold", ["euclidean", "sphere", "torus"])
def test_a_flow_is_its_steps_written_out(manifold, value):
    x, V = start(11), VALUES[value]
    if manifold == "sphere":
        x = torch.nn.functional.normalize(x, dim=1)

    def gaussian(distance):
        return math.exp(-(distance**2) / (2 * 0.7**2))

    def nearest(distances):
        return sorted(range(11), key=distances.__getitem__)[:4]

    def within(distances):
        return [j for j in range(11) if distances[j] <= 0.9]

    cases = [
        ({"sigma": 0.7}, lambda _: range(11), gaussian),
        ({"sigma": 0.7, "top_k": 4}, nearest, gaussian),
        ({"radius": 0.9, "sigma": 0.7}, within, gaussian),
        ({"radius": 0.9}, within, lambda _: 1.0),
    ]
    for options, seen_by, weight in cases:
        flow = krause_flow(x, **options, value=V, manifold=manifold, steps=4, step_size=0.3)
        by_hand = steps_by_loops(x, manifold, V, seen_by, weight, 4, 0.3)
        apart = flow.states[-1] - by_hand
        if manifold == "torus":  # -pi and pi are one angle
            apart = torch.sin(apart / 2)
        assert float(apart.abs().max()) < 1e-12


def test_particles_over_a_graph_on_the_torus_see_its_sources_alone():
    x, graph = start(9, 1), ga.window_path_graph(9, 2, self_loops=True)
    flow = krause_flow(x, graph, sigma=0.5, manifold="torus", steps=1, step_size=1.0)
    way = torch.tensor([[around(a, b) for b in x[:, 0].tolist()] for a in x[:, 0].tolist()])
    weight = torch.exp(-(way.double() ** 2) / 0.5).masked_fill(~graph.to_mask(), 0)
    expected = x[:, 0] + (weight * way).sum(1) / weight.sum(1)
    torch.testing.assert_close(flow.states[-1][:, 0].sin(), expected.sin(), atol=1e-6, rtol=0)
    alone = ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 9)
    stays = krause_flow(x, alone, sigma=0.5, manifold="torus", steps=3).states
    torch.testing.assert_close(stays[0].sin(), stays[-1].sin())


@pytest.mark.parametrize("manifold", ["euclidean", "sphere", "torus"])
def test_a_particle_that_sees_nobody_stays(manifold):
    x = torch.nn.functional.normalize(start(3), dim=1)
    graph = ga.from_edge_index(torch.tensor([[1], [0]]), 3)
    V = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    states = krause_flow(x, graph, sigma=1.0, value=V, manifold=manifold, steps=5).states
    torch.testing.assert_close(states[-1][1:], states[0][1:])
    assert float((states[-1][0] - states[0][0]).abs().max()) > 0.01


def test_unit_vectors_in_half_precision_are_on_the_sphere():
    x = torch.nn.functional.normalize(start(9), dim=1).bfloat16()
    flow = krause_flow(x, sigma=0.5, manifold="sphere", steps=3)
    torch.testing.assert_close(flow.states.norm(dim=-1), torch.ones(4, 9))


def test_groups_on_the_circle_and_across_the_end_of_angles_become_points():
    angles = torch.cat([c + 0.2 * torch.rand(10, 1).double() for c in (-3.24, -1.0, 1.0)])
    flow = krause_flow(angles, radius=0.6, manifold="torus", steps=60)
    assert flow.num_clusters() == 3
    circle = torch.cat([angles.cos(), angles.sin()], dim=1)
    flow = krause_flow(circle, radius=0.6, manifold="sphere", steps=60)
    assert flow.num_clusters() == 3
    torch.testing.assert_close(flow.states.norm(dim=-1), torch.ones(61, 30, dtype=torch.float64))


def test_a_negative_value_pushes_particles_of_the_sphere_apart():
    generator = torch.Generator().manual_seed(0)
    near = torch.tensor([0.0, 0.0, 1.0]) + 0.1 * torch.randn(20, 3, generator=generator)
    x = torch.nn.functional.normalize(near.double(), dim=1)
    flow = krause_flow(x, sigma=1.0, value=-torch.eye(3), manifold="sphere", steps=400)
    assert float(flow.spread[-1]) > 0.9 > 0.2 > float(flow.spread[0])


def test_many_particles_approach_the_mean_field_limit():
    """The distance to the flow of 4,000 particles falls about as 1 / sqrt(N)."""

    def flow_of(num_particles, seed):
        x = torch.rand(num_particles, 1, generator=torch.Generator().manual_seed(seed)).double()
        return krause_flow(x, radius=0.3, sigma=0.2, steps=5).states[-1][:, 0].numpy()

    limit = flow_of(4000, 999)
    distance = {
        n: sum(wasserstein_distance(flow_of(n, seed), limit) for seed in range(20)) / 20
        for n in (50, 200, 800)
    }
    assert 1.4 < distance[50] / distance[200] < 2.8
    assert 1.4 < distance[200] / distance[800] < 2.8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"manifold": "ball"}, "manifold must be"),
        ({"manifold": "sphere"}, "x must be unit vectors with manifold='sphere', got x["),
        ({"value": torch.eye(3)}, "value must be None or a matrix of shape [2, 2], got [3, 3]"),
        ({"value": 1.0}, "value must be None or a matrix of shape [2, 2], got float"),
    ],
)
def test_bad_input_is_named(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        krause_flow(3 * start(5), sigma=1.0, steps=1, **options)
