"""Groups that stay apart for ever: against all divisions of few tokens, and against simulations."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.spatial.distance import cdist, pdist

import graphattn as ga
from graphattn.dynamics import krause_flow, persistence, persistent_groups


def divisions(tokens):
    """All divisions of a list of tokens into groups."""
    if not tokens:
        yield []
        return
    first, *others = tokens
    for rest in divisions(others):
        yield [[first], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [first, *group], *rest[place + 1 :]]


def hull_distance(a, b):
    """Distance of two convex hulls, by a general solver for the weights of the corners."""
    if a.shape[1] == 1:
        return max(a.min() - b.max(), b.min() - a.max(), 0.0)
    n = len(a)

    def squared(weight):
        way = weight[:n] @ a - weight[n:] @ b
        return way @ way, 2 * np.concatenate([a @ way, -b @ way])

    sums = [
        {"type": "eq", "fun": lambda w: w[:n].sum() - 1},
        {"type": "eq", "fun": lambda w: w[n:].sum() - 1},
    ]
    start = np.concatenate([np.full(n, 1 / n), np.full(len(b), 1 / len(b))])
    found = minimize(squared, start, jac=True, bounds=[(0, 1)] * len(start), constraints=sums,
                     method="SLSQP", options={"ftol": 1e-14, "maxiter": 500})  # fmt: skip
    return float(np.sqrt(max(found.fun, 0.0)))


def is_certified(x, groups, sees, k, known):
    """The two conditions, as they stand in the theorem; `known` remembers pairs of groups."""
    for group in groups:
        for i in group:
            own = sum(bool(sees[i, j]) for j in group)
            if own < k and own < sees[i].sum():
                return False
    for a, b in itertools.combinations(map(tuple, groups), 2):
        if (a, b) not in known:
            widths = [pdist(x[[*g]]).max() if len(g) > 1 else 0.0 for g in (a, b)]
            known[a, b] = hull_distance(x[[*a]], x[[*b]]) > max(widths) + 1e-7
        if not known[a, b]:
            return False
    return True


def as_groups(labels):
    return {frozenset((labels == c).nonzero().flatten().tolist()) for c in labels.unique()}


GRAPHS = {
    "complete": lambda n: None,
    "without self": lambda n: ga.complete_graph(n, self_loops=False),
    "window": lambda n: ga.window_path_graph(n, 2),
    "causal": lambda n: ga.causal_graph(n),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("features", [1, 2, 3])
def test_the_groups_are_the_finest_of_all_certified_divisions(kind, features):
    generator = torch.Generator().manual_seed(features)
    several = 0
    for _ in range(12):
        N, k = 5, int(torch.randint(1, 3, (), generator=generator))
        centres = 4 * torch.randn(3, features, generator=generator, dtype=torch.float64)
        home = torch.randint(3, (N,), generator=generator).sort().values
        x = centres[home] + torch.randn(N, features, generator=generator, dtype=torch.float64)
        graph = GRAPHS[kind](N)
        sees = np.ones((N, N), dtype=bool) if graph is None else graph.to_mask().numpy()
        found = as_groups(persistent_groups(x, k, graph))
        known = {}
        all_certified = [
            {frozenset(group) for group in groups}
            for groups in divisions(list(range(N)))
            if is_certified(x.numpy(), groups, sees, k, known)
        ]
        assert found in all_certified
        finest = max(all_certified, key=len)
        assert found == finest
        assert all(any(a <= b for b in other) for other in all_certified for a in found)
        several += len(found) > 1
    assert several >= (1 if kind == "window" else 2)


def nearest(x, sees, k):
    """Bool [N, N]: the k nearest of the sources that every token sees."""
    distance = np.where(sees, cdist(x, x), np.inf)
    kept = np.argsort(distance, axis=1, kind="stable")[:, :k]
    picked = np.zeros_like(sees)
    np.put_along_axis(picked, kept, True, axis=1)
    return picked & sees


def first_exchange(x, labels, sees, k, steps, seed):
    """Move every token to random convex combinations; the first step at which a token attends to
    another group, or None."""
    generator = np.random.default_rng(seed)
    x = np.array(x)
    for step in range(steps):
        picked = nearest(x, sees, k)
        if (picked & (labels[:, None] != labels[None, :])).any():
            return step
        weight = picked * generator.random(picked.shape) ** 3  # very unequal weights
        h = generator.random((len(x), 1))
        total = weight.sum(axis=1, keepdims=True)
        average = np.where(total > 0, weight @ x / np.where(total > 0, total, 1), x)
        x = (1 - h) * x + h * average
    return None


def random_start(seed):
    """Blobs with between 1 and 6 tokens each, some of them too near, some too small."""
    generator = np.random.default_rng(seed)
    features, k = int(generator.integers(1, 5)), int(generator.integers(1, 5))
    sizes = generator.integers(max(k - 1, 1), k + 4, size=int(generator.integers(2, 6)))
    centres = generator.uniform(1, 12) * generator.standard_normal((len(sizes), features))
    x = np.concatenate([c + generator.uniform(0.05, 1) * generator.standard_normal((n, features))
                        for c, n in zip(centres, sizes, strict=True)])  # fmt: skip
    sees = np.ones((len(x), len(x)), dtype=bool)
    graph = None
    if seed % 3 == 1:  # every token sees most others
        sees = generator.random(sees.shape) < 0.8
        graph = ga.from_mask(torch.from_numpy(sees))
    return x, k, graph, sees


def test_certified_groups_never_exchange_in_300_simulations():
    counts = []
    for seed in range(300):
        x, k, graph, sees = random_start(seed)
        labels = persistent_groups(torch.from_numpy(x), k, graph).numpy()
        counts.append(labels.max() + 1)
        assert first_exchange(x, labels, sees, k, 40, seed) is None, seed
    assert sum(count > 1 for count in counts) >= 75  # the claim is not empty


@pytest.mark.parametrize(
    ("name", "wrong"),
    [  # the distance of tokens for that of hulls; one token too few
        ("_farther", lambda a, b, distance: bool(cdist(a, b).min() > distance)),
        ("_Sources.are_inside", lambda self, group: len(group) >= self.needed[0] - 1),
    ],
)
def test_a_wrong_condition_is_noticed(name, wrong, monkeypatch):
    owner, _, method = name.rpartition(".")
    monkeypatch.setattr(getattr(persistence, owner) if owner else persistence, method, wrong)
    caught = 0
    for seed in range(300):
        x, k, graph, sees = simplex_start(seed) if name == "_farther" else random_start(seed)
        labels = persistent_groups(torch.from_numpy(x), k, graph).numpy()
        caught += first_exchange(x, labels, sees, k, 40, seed) is not None
    assert caught > 0


def simplex_start(seed):
    """Two regular simplices of width 1 in orthogonal spaces, whose corners are more than 1 apart
    although their centres are much nearer."""
    n, height = 8, np.random.default_rng(seed).uniform(0.37, 0.5)
    corner = (np.eye(n) - 1 / n) / np.sqrt(2)
    zero = np.zeros((n, n))
    first = np.hstack([corner, zero, np.zeros((n, 1))])
    second = np.hstack([zero, corner, np.full((n, 1), height)])
    x = np.concatenate([first, second])
    assert pdist(first).max() < 1 + 1e-9 < cdist(first, second).min()
    return x, n, None, np.ones((2 * n, 2 * n), dtype=bool)


def test_tokens_apart_are_not_hulls_apart():
    """A pair of width 1 and a pair above its middle: every token is more than 1 away, but the
    nearest points of the hulls are 0.9 apart."""
    x = torch.tensor([[-0.5, 0.0], [0.5, 0.0], [0.0, 0.9], [0.0, 0.91]])
    assert torch.cdist(x[:2], x[2:]).min() > 1
    assert persistent_groups(x, 2).unique().numel() == 1
    assert persistent_groups(torch.cat([x, x + 50]), 2).tolist() == [0] * 4 + [1] * 4
    x[2:, 1] += 0.2
    assert persistent_groups(x, 2).tolist() == [0, 0, 1, 1]


def test_flows_keep_the_groups():
    x = torch.tensor([[0.0], [0.1], [0.4], [5.0], [5.3], [9.0], [9.2]], dtype=torch.float64)
    labels = persistent_groups(x, 2)
    flow = krause_flow(x, sigma=1.0, top_k=2, steps=500)
    assert flow.num_clusters(tolerance=1e-6) == int(labels.max()) + 1 == 3
    # A causal window in which tokens see too few of their own group certifies less.
    assert persistent_groups(x, 3, ga.causal_window_graph(7, 3)).unique().numel() == 1


@pytest.mark.parametrize("features", [1, 2, 5])
def test_the_distance_of_hulls_is_that_of_a_general_solver(features):
    generator = np.random.default_rng(features)
    for _ in range(40):
        a = generator.standard_normal((6, features))
        b = generator.standard_normal((5, features)) + generator.uniform(0, 4)
        true = hull_distance(a, b)
        assert not persistence._farther(a, b, true * (1 + 1e-5) + 1e-6)
        if true > 1e-3:
            assert persistence._farther(a, b, true * (1 - 1e-4))


def test_offsets_units_order_and_equal_tokens():
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.randn(5, 3, generator=generator, dtype=torch.float64)
    x = centres.repeat_interleave(4, 0) + torch.randn(20, 3, generator=generator).double()
    labels = persistent_groups(x, 3)
    assert labels.bincount().tolist() == [4] * 5
    assert torch.equal(persistent_groups(1e4 + x, 3), labels)
    assert torch.equal(persistent_groups(1e-6 * x, 3), labels)
    order = torch.randperm(20, generator=generator)
    assert as_groups(persistent_groups(x[order], 3)) == {
        frozenset(int((order == i).nonzero()) for i in group) for group in as_groups(labels)
    }
    assert persistent_groups(torch.ones(5, 2), 1).tolist() == [0] * 5
    assert persistent_groups(torch.zeros(1, 2), 3).tolist() == [0]
    assert persistent_groups(torch.tensor([[0.0], [0.0], [1.0], [1.0]]), 2).tolist() == [0, 0, 1, 1]


def test_errors_name_the_argument():
    x = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"points must be a floating-point tensor .* got .*2, 4"):
        persistent_groups(torch.zeros(2, 4, 2), 2)
    with pytest.raises(ValueError, match="points must be finite"):
        persistent_groups(x / 0, 2)
    with pytest.raises(ValueError, match="top_k must be"):
        persistent_groups(x, 0)
    with pytest.raises(ValueError, match="graph"):
        persistent_groups(x, 2, ga.complete_graph(5))
