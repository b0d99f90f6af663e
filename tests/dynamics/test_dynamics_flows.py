"""One consensus or several: the two claims of Krause Synchronization Transformers, in numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.dynamics import consensus_flow, krause_flow


def groups(num_groups, size, *, gap=4.0, width=1.0, features=1, seed=0):
    """Groups `gap` apart on a line, each within a cube of side `width`."""
    generator = torch.Generator().manual_seed(seed)
    home = torch.arange(num_groups).repeat_interleave(size)
    x = width * torch.rand(num_groups * size, features, generator=generator, dtype=torch.float64)
    x[:, 0] += (gap + width) * home
    return x, home


def hegselmann_krause(x, radius, steps, h):
    """The model of bounded confidence, opinion by opinion."""
    z = [list(p) for p in x]
    for _ in range(steps):
        new = []
        for p in z:
            near = [q for q in z if math.dist(p, q) <= radius]
            mean = [sum(c) / len(near) for c in zip(*near, strict=True)]
            new.append([a + h * (m - a) for a, m in zip(p, mean, strict=True)])
        z = new
    return np.array(z)


@pytest.mark.parametrize("features", [1, 2])
@pytest.mark.parametrize("step_size", [0.3, 1.0])
def test_bounded_confidence_is_the_model_of_krause(features, step_size):
    generator = torch.Generator().manual_seed(features)
    x = torch.rand(30, features, generator=generator, dtype=torch.float64)
    flow = krause_flow(x, radius=0.17, steps=8, step_size=step_size)
    expected = hegselmann_krause(x.tolist(), 0.17, 8, step_size)
    np.testing.assert_allclose(flow.states[-1].numpy(), expected, rtol=1e-12, atol=1e-13)


def test_softmax_flow_is_the_euler_step_written_out():
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flow, z = consensus_flow(x, ga.complete_graph(9), steps=5, step_size=0.4), x.clone()
    for _ in range(5):
        weights = (z @ z.T / math.sqrt(2)).softmax(dim=1)
        z = z + 0.4 * (weights @ z - z)
    torch.testing.assert_close(flow.states[-1], z, rtol=1e-12, atol=1e-13)


def test_nearest_neighbour_flow_is_the_euler_step_written_out():
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flow, z = krause_flow(x, sigma=0.6, top_k=4, steps=3, step_size=0.5), x.clone()
    for _ in range(3):
        distance = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distance.topk(4, dim=1, largest=False)
        weights = (-(nearest.values**2) / (2 * 0.36)).softmax(dim=1)
        z = z + 0.5 * ((weights[..., None] * z[nearest.indices]).sum(dim=1) - z)
    torch.testing.assert_close(flow.states[-1], z, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("features", [1, 2, 5])
def test_global_softmax_attention_collapses_to_a_single_consensus(seed, features):
    x = torch.randn(40, features, generator=torch.Generator().manual_seed(seed)).double()
    flow = consensus_flow(x, ga.complete_graph(40), steps=300)
    assert flow.num_clusters(0) > 10
    assert flow.num_clusters(-1) == 1
    assert flow.spread[-1] < 1e-6 * flow.spread[0]


def test_the_hull_of_global_attention_shrinks_by_its_smallest_weight():
    """Every range shrinks at least by 1 - h N min a_ij, as for any positive averaging."""
    x = torch.randn(15, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    h, graph = 0.5, ga.complete_graph(15)
    flow = consensus_flow(x, graph, steps=30, step_size=h)
    for z, after in zip(flow.states[:-1], flow.states[1:], strict=True):
        smallest = ga.attention_weights(z[:, None], z[:, None], graph).min()
        before, now = (s.amax(0) - s.amin(0) for s in (z, after))
        assert (now <= (1 - h * 15 * smallest) * before + 1e-13).all()


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    num_groups=st.integers(1, 5),
    size=st.integers(2, 12),
    features=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    step_size=st.sampled_from([0.5, 1.0]),
)
def test_groups_out_of_reach_stay_apart_and_each_becomes_one(
    num_groups, size, features, seed, step_size
):
    """Confidence covers a group and not the gap: exactly one cluster per group, at its mean."""
    x, home = groups(num_groups, size, features=features, seed=seed)
    radius = 1.01 * math.sqrt(features)  # the diagonal of the cube; the gap is 4
    flow = krause_flow(x, radius=radius, steps=60, step_size=step_size)
    assert flow.num_clusters(tolerance=1e-6) == num_groups
    for g in range(num_groups):
        ends = flow.states[-1][home == g]
        torch.testing.assert_close(ends, x[home == g].mean(0).expand_as(ends))


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_top_k_keeps_at_least_as_many_clusters_as_groups_where_softmax_keeps_one(num_groups):
    x, home = groups(num_groups, 12, gap=2.0, width=0.5)
    flow = krause_flow(x, sigma=1.0, top_k=8, steps=400)
    assert flow.num_clusters() >= num_groups
    for g in range(num_groups):  # nobody ever left the hull of its group
        of_group = flow.states[:, home == g, 0]
        assert of_group.min() >= x[home == g].min() - 1e-12
        assert of_group.max() <= x[home == g].max() + 1e-12
    centred = (x - x.mean()) / x.std()
    assert consensus_flow(centred, ga.complete_graph(len(x)), steps=400).num_clusters() == 1


def strangers(z, home, graph, k):
    """How many of the k nearest that a token listens to are of another group."""
    mask = graph.to_mask()
    distance = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance.masked_fill(~mask, math.inf).topk(k, dim=1, largest=False)
    return int(((home[nearest.indices] != home[:, None]) & nearest.values.isfinite()).sum())


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    num_groups=st.integers(2, 4),
    size=st.integers(2, 9),
    features=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    k_of_size=st.floats(0.01, 1),
    sigma=st.sampled_from([0.1, 1.0, 10.0]),
    by_tokens=st.booleans(),
)
def test_groups_farther_apart_than_wide_never_exchange_a_token(
    num_groups, size, features, seed, k_of_size, sigma, by_tokens
):
    """Hulls farther apart than the larger diameter d; or tokens, than sqrt(2) d. As tight as it is
    drawn: the condition holds with a thousandth to spare."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_groups, size, features, generator=generator, dtype=torch.float64)
    x[..., 0] -= x[..., 0].amin(dim=1, keepdim=True)
    widest = max(float(torch.pdist(of_group).max()) for of_group in x)
    end = 0.0
    for of_group in x:  # side by side: planes between them are `gap` apart, so hulls are too
        of_group[:, 0] += end
        end = float(of_group[:, 0].max()) + 1.001 * widest
    home = torch.arange(num_groups).repeat_interleave(size)
    if by_tokens:  # closer, until it is tokens that are just far enough from each other
        for g in range(1, num_groups):
            others, of_group = x[:g].reshape(-1, features), x[g]
            for shift in torch.linspace(2 * widest, 0, 400, dtype=torch.float64):
                moved = of_group - shift * torch.eye(features, dtype=torch.float64)[0]
                if torch.cdist(others, moved).min() > 1.001 * math.sqrt(2) * widest:
                    x[g] = moved
                    break
            else:
                x[g, :, 0] += 3 * g * widest
    x = x.reshape(-1, features)
    k = max(1, round(k_of_size * size))
    everyone = ga.complete_graph(len(x))
    flow = krause_flow(x, sigma=sigma, top_k=k, steps=25, step_size=1.0)
    for z in flow.states:
        assert strangers(z, home, everyone, k) == 0
    for g in range(num_groups):
        of_group, start = flow.states[:, home == g], x[home == g]
        assert (of_group.amin(1) >= start.amin(0) - 1e-12).all()
        assert (of_group.amax(1) <= start.amax(0) + 1e-12).all()


def test_a_window_in_which_a_token_sees_too_few_of_its_group_merges_two_groups():
    """Four and four tokens, k = 3, far apart: at the border, a window of 1 shows two and one."""
    x = torch.cat([torch.linspace(0, 0.3, 4), torch.linspace(1, 1.3, 4)]).double()[:, None]
    near = ga.window_path_graph(8, window=1, self_loops=True)
    assert krause_flow(x, near, sigma=0.5, top_k=3, steps=250).num_clusters() == 1
    assert krause_flow(x, sigma=0.5, top_k=3, steps=100).num_clusters() >= 2


def test_tokens_farther_apart_than_their_groups_are_wide_is_not_enough():
    """A ring around the axis of a simplex: tokens 1.001 apart, groups 1 wide, hulls nearer."""
    x, turn = torch.zeros(52, 15, dtype=torch.float64), torch.arange(40) * 2 * math.pi / 40
    x[:12, :12] = (torch.eye(12) - 1 / 12) / math.sqrt(2)
    x[12:, 12], x[12:, 13] = 0.499 * turn.cos(), 0.499 * turn.sin()
    x[12:, 14] = math.sqrt(1.001**2 - 0.499**2 - float(x[0].square().sum()))
    home = torch.arange(52) >= 12
    distance = torch.cdist(x, x)
    assert float(distance[~home][:, home].min()) == pytest.approx(1.001)
    assert float(distance[~home][:, ~home].max()) == pytest.approx(1)
    assert float(distance[home][:, home].max()) == pytest.approx(0.998)
    everyone = ga.complete_graph(52)
    flow = krause_flow(x, sigma=0.16, top_k=3, steps=500)
    assert strangers(x, home, everyone, 3) == 0
    assert strangers(flow.states[-1], home, everyone, 3) == 24


def test_a_ring_closes_in_on_a_group_that_was_out_of_reach():
    """Confidence 0.5, tokens 1 apart: hulls must be apart, not tokens."""
    turn = torch.arange(40, dtype=torch.float64) * 2 * math.pi / 40
    ring = torch.stack([turn.cos(), turn.sin()], dim=1)
    x = torch.cat([ring, torch.zeros(4, 2, dtype=torch.float64)])
    assert krause_flow(x, radius=0.5, steps=200, step_size=1.0).num_clusters() == 1


def test_without_truncation_the_kernel_collapses_in_the_end_too():
    """The tails of exp(-d^2 / 2 sigma^2) couple everybody: bounds, not distances, keep groups."""
    x, _ = groups(3, 8, gap=1.5, width=0.5)
    assert krause_flow(x, sigma=0.8, top_k=6, steps=400).num_clusters() >= 3
    assert krause_flow(x, sigma=0.8, steps=400).num_clusters() == 1


def test_a_wider_confidence_leaves_fewer_clusters():
    """Hegselmann and Krause: about 1 / (2 radius) opinions of uniform ones, and consensus in the
    end. (Fewer is not a theorem for every draw, so take radii far apart.)"""
    x = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
    left = [
        krause_flow(x, radius=r, steps=60, step_size=1.0).num_clusters() for r in (0.03, 0.1, 0.4)
    ]
    assert left[0] > left[1] > left[2] == 1
    assert 3 <= left[1] <= 5


def test_a_window_limits_who_is_near():
    """Along a path, only neighbours in the window can meet: equal values far away do not."""
    x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.0], [0.1]], dtype=torch.float64)
    graph = ga.block_window_graph(6, 2)
    flow = krause_flow(x, graph, sigma=1.0, steps=100)
    ends = flow.states[-1].flatten()
    torch.testing.assert_close(ends[0::2], ends[1::2])
    torch.testing.assert_close(ends[[0, 2, 4]], torch.tensor([0.05, 5.05, 0.05]).double())


@pytest.mark.parametrize(
    "flow",
    [
        lambda x: consensus_flow(x, ga.complete_graph(len(x)), steps=4),
        lambda x: krause_flow(x, radius=1.0, steps=4),
        lambda x: krause_flow(x, radius=1.0, sigma=0.5, steps=4),
        lambda x: krause_flow(x, sigma=0.5, top_k=3, steps=4),
    ],
)
def test_particles_stay_in_their_hull_and_renaming_them_renames_the_flow(flow):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    states = flow(x).states
    assert (states.amax(1) <= x.amax(0) + 1e-12).all()
    assert (states.amin(1) >= x.amin(0) - 1e-12).all()
    place = torch.randperm(20, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(flow(x[place]).states, states[:, place], rtol=1e-9, atol=1e-11)


def test_a_particle_that_sees_nobody_stays():
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    x = torch.randn(4, 2, dtype=torch.float64)
    for flow in (
        consensus_flow(x, ga.from_mask(mask), steps=3),
        krause_flow(x, ga.from_mask(mask), sigma=1.0, steps=3),
    ):
        assert (flow.states[:, 1] == x[1]).all()
        assert (flow.states[-1, 0] != x[0]).all()


X = torch.randn(4, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: krause_flow(X, steps=1), "radius or sigma must be given"),
        (
            lambda: krause_flow(X, radius=1.0, top_k=2, steps=1),
            "graph and top_k must be None if radius is given, .* got graph=None and top_k=2",
        ),
        (
            lambda: krause_flow(X, ga.complete_graph(4), radius=1.0, steps=1),
            "graph and top_k must be None if radius is given",
        ),
        (lambda: krause_flow(X, radius=0.0, steps=1), "radius must be a finite number > 0"),
        (lambda: krause_flow(X, sigma=-1.0, steps=1), "sigma must be a finite number > 0"),
        (lambda: krause_flow(X, sigma=1.0, top_k=0, steps=1), "top_k must be >= 1"),
        (lambda: krause_flow(X, sigma=1.0, steps=1, step_size=1.5), "step_size must be <= 1"),
        (lambda: consensus_flow(X, ga.complete_graph(5), steps=1), "graph has 5 targets"),
        (lambda: consensus_flow(X, ga.complete_graph(4), steps=-1), "steps must be >= 0"),
        (
            lambda: consensus_flow(X, ga.complete_graph(4), steps=1, step_size=0.0),
            "step_size must be a finite number > 0",
        ),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
