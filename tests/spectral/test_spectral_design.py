"""The smallest window and the smallest top-k, against trying every one."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.spectral import (
    cycle_fiedler_value,
    design,
    fiedler_value,
    suggest_top_k,
    window_for_fiedler,
    window_for_mixing,
)


def path_spectrum(num_tokens, window):
    hops = np.abs(np.subtract.outer(np.arange(num_tokens), np.arange(num_tokens)))
    W = ((hops > 0) & (hops <= window)).astype(float)
    return np.linalg.eigvalsh(np.diag(W.sum(axis=1)) - W)


SPECTRA = {N: [path_spectrum(N, w) for w in range(1, N)] for N in (2, 3, 4, 7, 16, 25)}


# The Fiedler value.


@settings(max_examples=60, deadline=None)
@given(num_tokens=st.sampled_from(sorted(SPECTRA)), share=st.floats(1e-3, 0.999))
def test_window_for_fiedler_is_the_first_of_all_windows(num_tokens, share):
    target = share * num_tokens
    values = [spectrum[1] for spectrum in SPECTRA[num_tokens]]
    expected = next(w for w, value in enumerate(values, start=1) if value >= target * (1 - 1e-9))
    assert window_for_fiedler(num_tokens, target) == expected


def test_the_bounds_leave_few_windows_to_try(monkeypatch):
    """Remark 4.2: lambda_1 within a factor of 2, so the window within its cube root."""
    tried = []

    def recorded(graph):
        tried.append(graph.structure.before)
        return fiedler_value(graph)

    monkeypatch.setattr(design, "fiedler_value", recorded)
    window = window_for_fiedler(4000, 0.025)
    assert 45 < window < 55  # (3 N^2 / (40 pi^2))^(1/3) = 49.5
    assert len(tried) <= 3
    assert max(tried) <= 2 ** (1 / 3) * min(tried) + 2


def test_the_cycle_of_remark_4_1_needs_no_wider_window():
    """lambda_1(P_N^w) <= lambda_1(C_2N^w) (Eq. 34)."""
    for N in (40, 300):
        for target in (0.01, 0.1, 1.0):
            window = window_for_fiedler(N, target)
            assert cycle_fiedler_value(2 * N, window) >= target * (1 - 1e-9)


def test_more_than_the_complete_graph_is_refused():
    assert window_for_fiedler(8, 8) == 7
    with pytest.raises(ValueError, match=r"target must be <= 8, the Fiedler value .*, got 8\.1"):
        window_for_fiedler(8, 8.1)
    with pytest.raises(ValueError, match=r"target must be <= 0, .* of 1 tokens, got 1e-09"):
        window_for_fiedler(1, 1e-9)


# Mixing.


def rate(spectrum, step_size, most):
    """The factor of the slowest mode; `most` is the largest number of neighbours of a token."""
    eta = {"auto": 1 / (4 * most), "largest": 1 / (2 * spectrum[-1])}.get(step_size, step_size)
    return np.abs(1 - 2 * eta * spectrum[1:]).max()


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.sampled_from(sorted(SPECTRA)),
    depth=st.integers(1, 40),
    tolerance=st.floats(1e-4, 0.95),
    step_size=st.one_of(st.sampled_from(["auto", "largest"]), st.floats(1e-3, 0.5)),
)
def test_window_for_mixing_is_the_first_of_all_windows(num_tokens, depth, tolerance, step_size):
    fits = [
        rate(spectrum, step_size, min(2 * w, num_tokens - 1)) ** depth <= tolerance * (1 + 1e-7)
        for w, spectrum in enumerate(SPECTRA[num_tokens], start=1)
    ]
    if not any(fits):
        with pytest.raises(ValueError, match=r"some window mixes|even the complete graph"):
            window_for_mixing(num_tokens, depth, tolerance, step_size=step_size)
        return
    window = window_for_mixing(num_tokens, depth, tolerance, step_size=step_size)
    assert window == 1 + fits.index(True)


def test_the_ratio_of_the_ends_grows_with_the_window():
    """lambda_1 of a path grows with its window, relative to lambda_max and to its neighbours.

    Bisection relies on it with the steps "largest" and "auto".
    """
    for N in (*range(2, 41), 120):
        spectra = [path_spectrum(N, w) for w in range(1, N)]
        ratios = [s[1] / s[-1] for s in spectra]
        assert all(b > a * (1 - 1e-12) for a, b in pairwise(ratios))
        ratios = [s[1] / min(2 * w, N - 1) for w, s in enumerate(spectra, start=1)]
        assert all(b > a * (1 - 1e-12) for a, b in pairwise(ratios))


def with_even_matrices(num_features):
    """A consensus layer that only takes its step, with R = log(2) I on every edge."""
    layer = ga.nn.SelfConsensus(num_features, heads=1, step_size="auto").double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.edge_net.beta_bias.fill_(-1e9)  # beta = softplus(-1e9) = 0
        layer.source_proj.weight.copy_(torch.eye(num_features))
        layer.output_proj.weight.copy_(torch.eye(num_features))
    return layer


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("depth", "tolerance"), [(6, 0.1), (3, 0.7)])
def test_steps_of_a_layer_leave_what_was_promised(depth, tolerance, backend):
    N = 40
    window = window_for_mixing(N, depth, tolerance)
    layer = with_even_matrices(N)
    layer.backend = backend
    for w, mixes in ((window, True), (window - 1, False)):
        graph, x = ga.window_path_graph(N, w), torch.eye(N, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(depth):
                x = layer(x, graph)
        # The columns of x are what becomes of every unit vector: the worst of all signals.
        left = torch.linalg.matrix_norm(x - 1 / N, ord=2)
        assert (left <= tolerance * (1 + 1e-9)) == mixes


def test_automatic_steps_that_are_too_few_are_refused():
    with pytest.raises(ValueError, match=r"tolerance must be >= 0\.0787 for 3 .* got 0\.05; take"):
        window_for_mixing(8, 3, 0.05)
    assert window_for_mixing(8, 3, 0.08) == 7
    assert window_for_mixing(8, 3, 0.05, step_size="largest") <= 7


def test_a_fixed_step_that_is_too_large_or_too_small_is_refused():
    with pytest.raises(ValueError, match=r"got 0\.001: even the complete graph is too slow"):
        window_for_mixing(8, 1, 0.1, step_size=0.001)
    with pytest.raises(ValueError, match=r"got 2: window 1 is the first .* oscillates"):
        window_for_mixing(8, 3, 0.1, step_size=2.0)


def test_one_token_has_nothing_to_mix():
    assert window_for_mixing(1, 1, 0.5) == 1


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="num_tokens must be >= 1, got 0"):
        window_for_fiedler(0, 1.0)
    with pytest.raises(ValueError, match="target must be a finite number > 0, got 0"):
        window_for_fiedler(5, 0)
    with pytest.raises(ValueError, match="depth must be >= 1, got 0"):
        window_for_mixing(5, 0, 0.1)
    with pytest.raises(ValueError, match=r"tolerance must be between 0 and 1 .*, got 1\.0"):
        window_for_mixing(5, 1, 1)
    with pytest.raises(
        ValueError, match=r"step_size must be .auto., .largest. or .*, got 'learned'"
    ):
        window_for_mixing(5, 1, 0.1, step_size="learned")
    with pytest.raises(ValueError, match="step_size must be a finite number > 0, got -1"):
        window_for_mixing(5, 1, 0.1, step_size=-1)


# Top-k.


def top_k_by_trying(query, key, graph, sigma, mass, quantile):
    """Every k in turn; every row a loop. query [N, H, D], key [M, H, D], sigma [H]."""
    shares = []  # per row, the share that the k nearest keep, k = 1, 2, ...
    rowptr, source = graph.csr()
    for i in range(graph.num_targets):
        sources = source[rowptr[i] : rowptr[i + 1]]
        if len(sources) == 0:
            continue
        for h in range(query.shape[1]):
            squared = ((query[i, h] - key[sources, h]) ** 2).sum(-1).sort().values
            weight = torch.exp(-squared / (2 * sigma[h] ** 2))
            shares.append((weight.cumsum(0) / weight.sum()).tolist())
    for k in range(1, max(map(len, shares)) + 1):
        kept = [share[min(k, len(share)) - 1] >= mass for share in shares]
        if sum(kept) >= quantile * len(kept):
            return k
    raise AssertionError


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sigma=st.floats(0.3, 5),
    mass=st.floats(0.05, 0.98),
    quantile=st.floats(0.05, 0.999),
)
def test_suggested_top_k_is_the_first_that_meets_the_criterion(seed, sigma, mass, quantile):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 7, generator=generator) < 0.6
    mask[0], mask[1] = False, True  # a target without a source, one with all
    graph = ga.from_mask(mask)
    query = torch.randn(9, 2, 3, generator=generator, dtype=torch.float64)
    key = torch.randn(7, 2, 3, generator=generator, dtype=torch.float64)
    bandwidth = torch.tensor([sigma, 2 * sigma], dtype=torch.float64)
    expected = top_k_by_trying(query, key, graph, bandwidth, mass, quantile)
    ours = suggest_top_k(query, key, graph, bandwidth, mass=mass, quantile=quantile)
    assert ours == expected


def test_batches_grouped_heads_and_offsets_count_as_they_should():
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 30, 4, 5, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 30, 2, 5, generator=generator, dtype=torch.float64)
    graph = ga.window_path_graph(30, 6)
    k = suggest_top_k(query, key, graph, 1.0)
    spread = key.repeat_interleave(2, dim=-2)
    assert suggest_top_k(query, spread, graph, 1.0) == k
    assert suggest_top_k(query + 1e6, key + 1e6, graph, 1.0) == k
    both = ga.batch([graph, graph])
    assert suggest_top_k(query.flatten(0, 1), spread.flatten(0, 1), both, 1.0) == k
    assert suggest_top_k(query, key, graph.edge_index, 1.0) == k


def test_far_tokens_do_not_underflow():
    x = torch.tensor([[0.0], [1e6], [1e6 + 1]])
    assert suggest_top_k(x[:1], x[1:], ga.bipartite_complete_graph(1, 2), 1e3) == 2
    assert suggest_top_k(x[:1], x[1:], ga.bipartite_complete_graph(1, 2), 1.0) == 1


def test_bad_top_k_arguments_are_refused():
    x, graph = torch.zeros(4, 2), ga.complete_graph(4)
    for name, bad in (("mass", 0), ("mass", 1.0), ("quantile", 0), ("quantile", 1.5)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            suggest_top_k(x, x, graph, 1.0, **{name: bad})
    for sigma in (0.0, -1.0, math.nan, torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match="sigma must be"):
            suggest_top_k(x[:, None].expand(4, 2, 2), x[:, None].expand(4, 2, 2), graph, sigma)
    with pytest.raises(ValueError, match=r"query must be a floating-point tensor .* torch.int64"):
        suggest_top_k(x.long(), x, graph, 1.0)
    with pytest.raises(
        ValueError, match=r"key must have the same batch dimensions and features as query"
    ):
        suggest_top_k(x, torch.zeros(4, 3), graph, 1.0)
    with pytest.raises(
        ValueError,
        match=r"key must have a number of heads that divides the 1 heads of query, got 2",
    ):
        suggest_top_k(x, torch.zeros(4, 2, 2), graph, 1.0)
    with pytest.raises(ValueError, match="graph has 4 targets and 4 sources"):
        suggest_top_k(torch.zeros(5, 2), torch.zeros(5, 2), graph, 1.0)
    with pytest.raises(ValueError, match=r"query and key must be finite .* target 0 to source 1"):
        suggest_top_k(x, torch.tensor([[0.0, 0], [math.nan, 0], [0, 0], [0, 0]]), graph, 1.0)
    with pytest.raises(ValueError, match="graph must have at least one edge"):
        suggest_top_k(x, x, ga.from_mask(torch.zeros(4, 4, dtype=torch.bool)), 1.0)
