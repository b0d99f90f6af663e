"""The iteration of Attention Clusters, Eq. 1-3, against loops in numpy written from the paper."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.dynamics import Trajectory, participation_ratio, simulate, standardize


def cloud(num_tokens, num_features, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_features, generator=generator, dtype=torch.float64).to(dtype)


def numpy_simulation(x, mask, steps, *, logits, keep=lambda x: x, value=lambda x: x):
    """Token by token: softmax over the sources, Eq. 2 feature by feature, Eq. 3."""
    states = [np.array(x, dtype=np.float64)]
    num_tokens, num_features = states[0].shape
    for _ in range(steps):
        x = states[-1]
        z = np.zeros_like(x)
        for i in range(num_tokens):
            sources = [j for j in range(num_tokens) if mask[i][j]]
            if not sources:
                continue
            scores = [logits(i, x[i], x[j]) for j in sources]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            for weight, j in zip(weights, sources, strict=True):
                z[i] += weight / sum(weights) * value(x[j])
        new = keep(x).copy()
        for f in range(num_features):
            mean = sum(z[:, f]) / num_tokens
            deviation = math.sqrt(sum((z[:, f] - mean) ** 2) / num_tokens)
            new[:, f] = new[:, f] + (z[:, f] - mean) / deviation
        states.append(new)
    return np.stack(states)


def check(x, graph, steps, *, by_hand, **options):
    """A simulation with these options is the loop, given what it differs in by hand."""
    expected = numpy_simulation(x.numpy(), graph.to_mask(), steps, **by_hand)
    states = simulate(x, graph, steps=steps, **options).states
    np.testing.assert_allclose(states.numpy(), expected, rtol=1e-9, atol=1e-11)


GRAPHS = {
    "global": lambda n: ga.complete_graph(n),
    "blocks": lambda n: ga.block_window_graph(n, 5),
    "window": lambda n: ga.window_path_graph(n, 2, self_loops=True),
    "no self-loops": lambda n: ga.window_path_graph(n, 1),
    "causal": lambda n: ga.causal_window_graph(n, 4),
    "longformer": lambda n: ga.longformer_graph(n, 2, [0, 7]),
    "bigbird": lambda n: ga.bigbird_graph(n, 1, 2, [3], seed=1),
    "edge list": lambda n: ga.from_edge_index(ga.longformer_graph(n, 2, [4]).edge_index, n),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("scaling", ["sdp", "sq"])
def test_the_iteration_is_the_paper_s_loop(kind, scaling):
    by_hand = {"logits": lambda i, a, b: float(a @ b) / math.sqrt(3)}
    check(cloud(13, 3), GRAPHS[kind](13), 4, by_hand=by_hand, scaling=scaling)


@pytest.mark.parametrize(
    ("kind", "hubs"), [("global", ()), ("window", ()), ("longformer", (0, 7)), ("bigbird", (3,))]
)
def test_scaling_in_place_shrinks_everything_and_scales_what_global_tokens_ask_twice(kind, hubs):
    """softmax(X X^T / d) on X / sqrt(d), X <- X / sqrt(d) + Zhat; x_0 . x_j / d^1.5 for hubs."""
    by_hand = {
        "logits": lambda i, a, b: float(a @ b) / (3**1.5 if i in hubs else 3),
        "keep": lambda x: x / math.sqrt(3),
        "value": lambda v: v / math.sqrt(3),
    }
    check(cloud(13, 3), GRAPHS[kind](13), 4, by_hand=by_hand, scaling="sq_inplace")


@pytest.mark.parametrize("options", [{}, {"border": "shift"}, {"dilation": 2, "causal": True}])
def test_the_class_token_of_a_grid_is_a_global_token(options):
    graph = ga.grid_window_graph(3, 4, 1, class_token=True, **options)
    by_hand = {
        "logits": lambda i, a, b: float(a @ b) / (2**1.5 if i == 0 else 2),
        "keep": lambda x: x / math.sqrt(2),
    }
    check(cloud(13, 2), graph, 3, by_hand=by_hand, scaling="sq_inplace")


@pytest.mark.parametrize("sigma", [None, 0.7])
def test_distances_may_be_the_score(sigma):
    width = math.sqrt(3) if sigma is None else sigma
    by_hand = {"logits": lambda i, a, b: -((a - b) ** 2).sum() / 2 / width**2}
    check(cloud(13, 3), GRAPHS["longformer"](13), 4, by_hand=by_hand, score="rbf", sigma=sigma)


@pytest.mark.parametrize("kind", GRAPHS)
def test_products_of_features_may_be_the_score(kind):
    """Weights phi(x_i) . phi(x_j) without a softmax: their logarithm is the logit."""

    def phi(x):
        return np.where(x > 0, x + 1, np.exp(x))

    by_hand = {"logits": lambda i, a, b: math.log((phi(a) * phi(b)).sum())}
    check(cloud(13, 3), GRAPHS[kind](13), 4, by_hand=by_hand, score="linear")


def test_features_far_below_0_do_not_vanish():
    x = cloud(9, 3, dtype=torch.float32) - 150.0
    ours = simulate(x, ga.complete_graph(9), steps=1, score="linear").updates
    wide = simulate(x.double(), ga.complete_graph(9), steps=1, score="linear").updates
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(ours.double(), wide, rtol=1e-3, atol=1e-3)
    x[0] += 152  # keys of the others are 0 beside this one, and their queries still have a sum
    one = simulate(x, ga.complete_graph(9), steps=1, score="linear").updates
    assert one.isfinite().all()


def test_leaders_of_linear_attention_receive_the_largest_weights():
    x, graph = cloud(13, 3), ga.longformer_graph(13, 2, [0])
    trajectory = simulate(x, graph, steps=2, score="linear")
    state = trajectory.states[-2]
    phi = torch.where(state > 0, state + 1, state.exp())
    weight = (phi @ phi.T) * graph.to_mask()
    weight = weight / weight.sum(1, keepdim=True)
    labels = torch.arange(13) % 2
    leaders = ga.dynamics.leader_tokens(trajectory, labels=labels)
    for c in range(2):
        received = weight[labels == c].mean(0)
        assert int(leaders.tokens[c]) == int(received.argmax())


def test_top_k_keeps_the_sources_of_largest_score():
    x, graph = cloud(12, 2), ga.complete_graph(12)
    score = (x @ x.T / math.sqrt(2)).numpy()
    kept = torch.zeros(12, 12, dtype=torch.bool)
    for i in range(12):
        kept[i, sorted(range(12), key=lambda j: -score[i, j])[:3]] = True
    ours = simulate(x, graph, steps=1, top_k=3).states
    torch.testing.assert_close(ours, simulate(x, ga.from_mask(kept), steps=1).states)


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(2, 40),
    num_features=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(sorted(GRAPHS)),
)
def test_scaling_the_query_is_scaling_the_product(num_tokens, num_features, seed, kind):
    """The erratum: (q / sqrt d) . k = (q . k) / sqrt d, so the two are one operator."""
    num_tokens = max(num_tokens, 8)
    x, graph = cloud(num_tokens, num_features, seed), GRAPHS[kind](num_tokens)
    a, b = (simulate(x, graph, steps=3, scaling=s).states for s in ("sdp", "sq"))
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("score", ["dot", "rbf"])
@pytest.mark.parametrize("kind", ["global", "blocks", "longformer", "edge list"])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6])
def test_a_constant_feature_gets_no_update(score, kind, constant):
    x = cloud(50, 3)
    x[:, 1] = constant
    trajectory = simulate(x, GRAPHS[kind](50), steps=5, score=score)
    assert (trajectory.updates[:, :, 1] == 0).all()
    assert (trajectory.states[:, :, 1] == constant).all()
    assert trajectory.updates[:, :, [0, 2]].isfinite().all()
    assert (trajectory.updates[:, :, 0].square().mean(dim=1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_rounding_is_not_blown_up_to_variance_one(value):
    """The mean of n equal numbers may differ from them, and attention may round one of them."""
    for n in range(2, 100):
        x = torch.full((n, 1), value, dtype=torch.float64)
        assert (standardize(x) == 0).all()
        x[0] = np.nextafter(value, 2 * value)
        assert (standardize(x) == 0).all()
    two = torch.tensor([[value], [value * (1 + 1e-12)]], dtype=torch.float64)
    assert standardize(two).abs().min() > 0.99  # small, but no rounding


def test_equal_tokens_never_move():
    x = torch.full((9, 4), 0.3, dtype=torch.float64)
    trajectory = simulate(x, ga.complete_graph(9), steps=3)
    assert (trajectory.states == x).all()
    assert trajectory.spectra.abs().max() < 1e-30


def test_a_token_that_sees_nobody_averages_to_zero():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    by_hand = {"logits": lambda i, a, b: float(a @ b) / math.sqrt(2)}
    check(cloud(6, 2) + 5, ga.from_mask(mask), 2, by_hand=by_hand)


def test_updates_are_standardised_and_add_up_to_the_states():
    trajectory = simulate(cloud(30, 4), ga.complete_graph(30), steps=6)
    assert trajectory.updates.mean(dim=1).abs().max() < 1e-14
    assert (trajectory.updates.var(dim=1, correction=0) - 1).abs().max() < 1e-12
    torch.testing.assert_close(trajectory.states[0] + trajectory.updates.sum(0),
                               trajectory.states[-1])  # fmt: skip


def test_spectra_are_numpy_s_of_the_population_covariance():
    trajectory = simulate(cloud(25, 5), ga.block_window_graph(25, 8), steps=3)
    for state, spectrum in zip(trajectory.states, trajectory.spectra, strict=True):
        expected = np.linalg.svd(np.cov(state.numpy().T, ddof=0))[1]
        np.testing.assert_allclose(spectrum.numpy(), expected, rtol=1e-10, atol=1e-12)
    share = trajectory.spectra[:, 0] / trajectory.spectra.sum(1)
    torch.testing.assert_close(trajectory.leading_share, share)
    torch.testing.assert_close(
        trajectory.participation_ratio, participation_ratio(trajectory.spectra)
    )
    assert trajectory.max_abs.tolist() == [float(s.abs().max()) for s in trajectory.states]


def test_scaling_in_place_keeps_x_bounded_where_the_others_grow():
    """|X| <= sqrt(d) / (sqrt(d) - 1) max |Zhat| in the limit; |Zhat| <= sqrt(N - 1)."""
    x, graph = standardize(cloud(200, 4)), ga.complete_graph(200)
    runs = {s: simulate(x, graph, steps=60, scaling=s) for s in ("sdp", "sq_inplace")}
    bound = 2 * float(runs["sq_inplace"].updates.abs().max()) + float(x.abs().max()) / 2**60
    assert float(runs["sq_inplace"].max_abs[-1]) <= bound
    assert float(runs["sq_inplace"].max_abs[30:].max()) < 6
    assert float(runs["sdp"].max_abs[-1]) > 25


def test_float64_stays_float64_and_half_precision_is_computed_in_float32():
    graph = ga.complete_graph(10)
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        trajectory = simulate(cloud(10, 2, dtype=dtype), graph, steps=2)
        assert trajectory.states.dtype == trajectory.updates.dtype == expected
        assert trajectory.spectra.dtype == torch.float64


def test_shapes_without_steps_and_with_a_raw_edge_index():
    x = cloud(8, 3)
    none = simulate(x, ga.complete_graph(8), steps=0)
    assert (none.states.shape, none.updates.shape, none.spectra.shape) == (
        (1, 8, 3), (0, 8, 3), (1, 3))  # fmt: skip
    assert none.num_steps == 0
    raw = simulate(x, ga.window_path_graph(8, 2).edge_index, steps=2)
    ours = simulate(x, ga.window_path_graph(8, 2), steps=2)
    torch.testing.assert_close(raw.states, ours.states)
    assert isinstance(raw, Trajectory)
    assert repr(ours).startswith("Trajectory(steps=2, tokens=8, features=3, score='dot'")


def test_the_caller_s_tensor_and_gradient_stay_as_they_were():
    x = cloud(8, 3).requires_grad_()
    before = x.detach().clone()
    assert not simulate(x, ga.complete_graph(8), steps=2, scaling="sq_inplace").states.requires_grad
    assert torch.equal(x, before)


def test_a_progress_bar_changes_nothing_and_is_silent_unless_asked_for(capsys):
    x, graph = cloud(8, 3), ga.complete_graph(8)
    quiet = simulate(x, graph, steps=2)
    assert capsys.readouterr().out == ""
    loud = simulate(x, graph, steps=2, progress=True)
    assert torch.equal(quiet.states, loud.states)
    assert "simulating" in capsys.readouterr().out


def test_a_long_window_forms_nothing_of_size_n_by_n():
    """16,384 tokens squared would be 2 GB in float64."""
    resource = pytest.importorskip("resource")
    x = cloud(16_384, 2)
    simulate(x[:64], ga.window_path_graph(64, 8), steps=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    simulate(x, ga.longformer_graph(16_384, 16, [0]), steps=2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB on Linux
    assert grown < 400_000


GRAPH = ga.complete_graph(4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: simulate(x.tolist(), GRAPH, steps=1), r"x must be a tensor .*got list"),
        (lambda x: simulate(x[0], GRAPH, steps=1), r"x must be a floating-point tensor"),
        (lambda x: simulate(x[:, :0], GRAPH, steps=1), "at least one token and one feature"),
        (lambda x: simulate(x / 0, GRAPH, steps=1), r"x must be finite, got x\[0\]"),
        (lambda x: simulate(x, ga.complete_graph(5), steps=1), "graph has 5 targets"),
        (lambda x: simulate(x, GRAPH, steps=-1), "steps must be >= 0, got -1"),
        (lambda x: simulate(x, GRAPH, steps=1, score="cos"), "score must be one of 'dot', 'rbf'"),
        (lambda x: simulate(x, GRAPH, steps=1, score="linear", top_k=2), "top_k must be None with"),
        (
            lambda x: simulate(x, GRAPH, steps=1, score="linear", scaling="sq"),
            "scaling must be 'sdp' with score='linear', which has no scale, got 'sq'",
        ),
        (lambda x: simulate(x, GRAPH, steps=1, scaling="in"), "scaling must be one of 'sdp', 'sq'"),
        (
            lambda x: simulate(x, GRAPH, steps=1, sigma=1.0),
            "sigma must be None unless score='rbf', got 1.0",
        ),
        (
            lambda x: simulate(x, GRAPH, steps=1, score="rbf", scaling="sq"),
            "scaling must be 'sdp' with score='rbf', whose scale is sigma, got 'sq'",
        ),
        (lambda x: simulate(x, GRAPH, steps=1, score="rbf", sigma=0.0), "sigma must be a finite"),
        (lambda x: simulate(x, GRAPH, steps=1, top_k=0), "top_k must be >= 1"),
        (
            lambda x: simulate(x, ga.batch([ga.complete_graph(2)] * 2), steps=1),
            "graph must be one sequence, got a batch of 2",
        ),
        (lambda x: standardize(x.long()), "x must be a floating-point tensor"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call(torch.arange(8.0).view(4, 2))
