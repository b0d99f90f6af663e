"""Properties of the operations on any graph, of any shape: random graphs, batches and inputs."""

from __future__ import annotations

import numpy as np
import oracle_ops as oracle
import pytest
import torch
from cases_ops import as_matrix, consensus_inputs, identity_network, random
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_ops import (
    CAUSAL,
    AttentionCase,
    ConsensusCase,
    attention_cases,
    coins,
    consensus_cases,
    one_rectangle,
    seeds,
    sequence_of,
    sequences,
)
from torch import Tensor

import graphattn as ga

pytestmark = pytest.mark.filterwarnings("ignore:all edges of this edge list point backward")

SWEEP = settings(max_examples=30, deadline=None, derandomize=True)
EXACT = {"rtol": 1e-10, "atol": 1e-10}
FULL = (torch.float64, torch.float32)
# |sum of the weights - 1|: rounding every weight to bfloat16 moves each by at most 2^-9 of itself.
SLACK = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
data = st.data()


def valid_mask(draw, graph: ga.TokenGraph, share: float = 0.7) -> tuple[Tensor, Tensor]:
    """(targets, sources); the same tokens where these are one set."""
    of_target = coins(graph.num_targets, seed=draw(seeds), share=share)
    if graph.num_targets == graph.num_sources and draw(st.booleans()):
        return of_target, of_target
    return of_target, coins(graph.num_sources, seed=draw(seeds), share=share)


# Attention: weights, hulls, isometries.


@SWEEP
@given(case=attention_cases(dtypes=(*FULL, torch.bfloat16)), data=data)
def test_weights_are_nonnegative_and_sum_to_one_or_to_exactly_zero(case: AttentionCase, data):
    graph, valid = case.graph, None
    live = torch.ones(graph.num_edges, dtype=torch.bool)
    source, target = graph.edge_index
    if data.draw(st.booleans()):
        valid = valid_mask(data.draw, graph)
        live = valid[0][target] & valid[1][source]
    weights = case.weights(valid=valid)
    assert weights.dtype == case.query.dtype
    weights = weights.double()
    assert (weights >= 0).all()
    assert (weights[..., ~live, :] == 0).all()
    zeros = torch.zeros(graph.num_targets)
    count = zeros.index_add(0, target, live.float())
    total = torch.zeros(*case.query.shape[:-1], dtype=torch.float64).index_add(-2, target, weights)
    assert (total[..., count == 0, :] == 0).all()
    error = (total[..., count > 0, :] - 1).abs()
    assert (error <= SLACK[case.query.dtype]).all()
    if case.arguments["top_k"] is not None:
        kept = torch.zeros_like(total).index_add(-2, target, (weights > 0).double())
        assert (kept <= count.clamp(max=case.arguments["top_k"])[:, None]).all()


@SWEEP
@given(
    case=attention_cases(dtypes=(*FULL, torch.bfloat16)), data=data, eps=st.sampled_from([0.0, 0.3])
)
def test_outputs_lie_in_the_convex_hull_of_the_values_a_target_sees(
    case: AttentionCase, data, eps: float
):
    """Outputs lie in the convex hull of the values a target sees, and of 0 if eps takes a share.

    That is checked coordinate by coordinate and along random directions.
    """
    graph, dtype = case.graph, case.query.dtype
    valid = valid_mask(data.draw, graph, share=0.9)
    more = {"eps": eps} if "sigma" in case.arguments else {}
    out = case.output(valid=valid, **more).double()
    heads, width = case.query.shape[-2], case.value.shape[-1]
    value = case.value.double().repeat_interleave(heads // case.value.shape[-2], dim=-2)
    directions = torch.cat(
        [torch.eye(width, dtype=torch.float64), random(3, width, seed=data.draw(seeds))]
    )
    along, own = value @ directions.T, out @ directions.T
    slack = SLACK[dtype] * (1 + directions.abs() @ value.abs().flatten(0, -2).amax(0))
    mask = graph.to_mask() & valid[0][:, None] & valid[1]
    for i in range(graph.num_targets):
        if not mask[i].any():
            assert (out[..., i, :, :] == 0).all()
            continue
        seen = along[..., mask[i], :, :]
        low, high = seen.amin(-3), seen.amax(-3)
        if more.get("eps"):
            low, high = low.clamp(max=0), high.clamp(min=0)
        assert (own[..., i, :, :] >= low - slack).all()
        assert (own[..., i, :, :] <= high + slack).all()


@SWEEP
@given(case=attention_cases(scores=("rbf",)), data=data, eps=st.sampled_from([0.0, 0.1]))
def test_rbf_sees_no_rotation_reflection_or_translation_of_any_sequence(
    case: AttentionCase, data, eps: float
):
    """Every sequence of a batch may move by itself; queries and keys move together."""
    features, seed = case.query.shape[-1], data.draw(seeds)
    turn = torch.linalg.qr(random(features, features, seed=seed)).Q
    size = data.draw(st.sampled_from([1.0, 100.0]))
    shifts = size * random(len(case.graph.sizes), 1, features, seed=seed + 1)
    of_target, of_source = sequence_of(case.graph)
    query = (case.query + shifts[of_target]) @ turn
    key = (case.key + shifts[of_source]) @ turn
    loose = {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(case.weights(query=query, key=key), case.weights(), **loose)
    there, lse_there = case.output(query=query, key=key, eps=eps, return_lse=True)
    here, lse = case.output(eps=eps, return_lse=True)
    torch.testing.assert_close(there, here, **loose)
    torch.testing.assert_close(lse_there, lse, **loose)


# Names of tokens, order of edges, batches.


@SWEEP
@given(case=attention_cases(st.one_of(sequences(), one_rectangle())), seed=seeds)
def test_renaming_tokens_renames_the_outputs_of_attention(case: AttentionCase, seed: int):
    mask = case.graph.to_mask()
    generator = torch.Generator().manual_seed(seed)
    of_target, of_source = (torch.randperm(n, generator=generator) for n in mask.shape)
    renamed = case.output(
        ga.from_mask(mask[of_target][:, of_source]),
        query=case.query[..., of_target, :, :],
        key=case.key[..., of_source, :, :],
        value=case.value[..., of_source, :, :],
    )
    torch.testing.assert_close(renamed, case.output()[..., of_target, :, :], **EXACT)


@SWEEP
@given(data=data, seed=seeds)
def test_renaming_tokens_renames_the_outputs_of_consensus(data, seed: int):
    update = data.draw(st.sampled_from(["energy", "target", "towards another track"]))
    rectangular = update == "towards another track"
    graph = one_rectangle() if rectangular else sequences(causal=False)
    case = data.draw(consensus_cases(graph, updates=("target" if rectangular else update,)))
    mask = case.graph.to_mask()
    generator = torch.Generator().manual_seed(seed)
    of_target, of_source = (torch.randperm(n, generator=generator) for n in mask.shape)
    if case.inputs.state is case.inputs.neighbor_state:  # one set of tokens
        of_source = of_target
    u, v, a, b, network = case.inputs
    renamed = case.output(
        ga.from_mask(mask[of_target][:, of_source]),
        (u[..., of_target, :, :], v[..., of_source, :, :], a[..., of_target, :, :],
         b[..., of_source, :, :], network),
    )  # fmt: skip
    torch.testing.assert_close(renamed, case.output()[..., of_target, :, :], **EXACT)


@pytest.mark.long
@SWEEP
@given(data=data)
def test_a_sequence_in_a_batch_of_random_lengths_equals_the_sequence_alone(data):
    def pieces(x: Tensor, side: int) -> tuple[Tensor, ...]:
        return x.split([(g.num_targets, g.num_sources)[side] for g in parts], dim=-3)

    parts = data.draw(st.lists(st.one_of(sequences(), one_rectangle()), min_size=1, max_size=4))
    case = data.draw(attention_cases(st.just(ga.batch(parts))))
    alone = [
        case.output(part, query=q, key=k, value=v)
        for part, q, k, v in zip(
            parts, pieces(case.query, 0), pieces(case.key, 1), pieces(case.value, 1), strict=True
        )
    ]
    torch.testing.assert_close(case.output(), torch.cat(alone, dim=-3), **EXACT)

    update = data.draw(st.sampled_from(["energy", "target"]))
    if update == "energy":
        parts = data.draw(st.lists(sequences(causal=False), min_size=1, max_size=4))
    case = data.draw(consensus_cases(st.just(ga.batch(parts)), updates=(update,)))
    u, v, a, b, network = case.inputs
    alone = [
        case.output(part, (*own, network))
        for part, *own in zip(
            parts, pieces(u, 0), pieces(v, 1), pieces(a, 0), pieces(b, 1), strict=True
        )
    ]
    torch.testing.assert_close(case.output(), torch.cat(alone, dim=-3), **EXACT)


# What a token must not see.


# Consensus: fixed points, descent, spectra.


@SWEEP
@given(case=consensus_cases(dtypes=(*FULL, torch.bfloat16), steps=(0.05, 3.0, "auto")), seed=seeds)
def test_a_constant_in_every_sequence_stays_to_the_last_bit(case: ConsensusCase, seed: int):
    u, v, a, b, network = case.inputs
    values = random(len(case.graph.sizes), *u.shape[-2:], seed=seed, dtype=u.dtype)
    of_target, of_source = sequence_of(case.graph)
    state, other = values[of_target].expand_as(u), values[of_source].expand_as(v)
    assert torch.equal(case.output(inputs=(state, other, a, b, network)), state)


@SWEEP
@given(case=consensus_cases(updates=("energy",), batches=st.just(())), share=st.floats(0.05, 1.95))
def test_energy_falls_on_any_graph_with_any_edge_network(case: ConsensusCase, share: float):
    """Energy falls by the automatic step and by any step below 2 / lambda_max of its Hessian."""
    mask, u = case.graph.to_mask(), case.inputs.state
    R, _, _ = oracle.edge_matrices(*case.inputs[2:], mask)
    before = oracle.energy(u, R, mask)
    automatic = case._replace(step_size="auto").output()
    hessian = torch.eye(u.shape[0] * u.shape[2], dtype=torch.float64) - as_matrix(
        case.inputs, case.graph, 1.0
    )
    steepest = torch.linalg.eigvalsh(hessian).amax().item()
    for after in (
        automatic,
        case._replace(step_size=share / steepest).output() if steepest > 1e-12 else automatic,
    ):
        after = oracle.energy(after, R, mask)
        if before > 1e-9:
            assert after < before
        else:  # nobody sees another
            assert after <= before + 1e-12


@SWEEP
@given(
    parts=st.lists(
        st.builds(lambda build, n, w: build(n, w), st.sampled_from([*CAUSAL.values()]),
                  st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=2),
    data=data,
)  # fmt: skip
def test_the_automatic_target_step_is_causal_with_its_measured_spectrum_in_0_1(parts, data):
    """Block triangular, with symmetric blocks on the diagonal: their eigenvalues are the map's."""
    graph = ga.batch(parts) if len(parts) > 1 else parts[0]
    case = data.draw(
        consensus_cases(st.just(graph), updates=("target",), steps=("auto",),
                        batches=st.just(()))
    )  # fmt: skip
    N, H, D = case.inputs.state.shape
    own = as_matrix(case.inputs, graph, "auto", update="target")
    blocks = own.view(H, N, D, N, D).transpose(2, 3)  # [H, to, from, D, D]
    unseen = ~(graph.to_mask() | torch.eye(N, dtype=torch.bool))
    assert (blocks[:, unseen] == 0).all()
    assert (blocks[:, torch.ones(N, N, dtype=torch.bool).triu(1)] == 0).all()
    diagonal = torch.stack([blocks[:, i, i] for i in range(N)])
    torch.testing.assert_close(diagonal, diagonal.mT, **EXACT)
    spectrum = torch.linalg.eigvalsh(diagonal)
    assert spectrum.min() >= -1e-12
    assert spectrum.max() <= 1 + 1e-12


# R = alpha I: Laplacian smoothing, and the filter of Section 4.


def scalar_network(case_seed: int, heads: int, features: int, alpha: float, how: str):
    """R = alpha I on every edge: beta = softplus(-1e9) = 0, or Lambda without rows."""
    network = identity_network(heads, features)
    bias = torch.full((heads,), alpha, dtype=torch.float64).expm1().log()
    network = network._replace(alpha_bias=bias)
    if how == "no rows of Lambda":  # beta is what it likes
        return network._replace(
            beta=random(heads, 2, seed=case_seed), beta_bias=random(heads, seed=case_seed + 1)
        )
    return network._replace(
        shear=random(*network.shear.shape, seed=case_seed),
        shear_bias=random(*network.shear_bias.shape, seed=case_seed + 1),
    )


SCALAR = st.sampled_from(["no beta", "no rows of Lambda"])


@SWEEP
@given(
    n=st.integers(1, 8),
    self_loops=st.booleans(),
    heads=st.integers(1, 3),
    features=st.integers(1, 3),
    alpha=st.floats(0.01, 5),
    step=st.floats(1e-3, 1),
    how=SCALAR,
    seed=seeds,
)
def test_a_step_on_the_complete_graph_with_scalar_matrices_is_laplacian_smoothing(
    n, self_loops, heads, features, alpha, step, how, seed
):
    """u' = u - 2 eta alpha L u with L = N I - 1 1^T; half of it where only targets move."""
    graph = ga.complete_graph(n, self_loops=self_loops)
    inputs = consensus_inputs(graph, heads=heads, features=features, hidden=2, seed=seed)
    inputs = inputs._replace(network=scalar_network(seed, heads, features, alpha, how))
    L = n * torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64)
    smoothing = torch.einsum("ij,jhd->ihd", L, inputs.state)
    for update, factor in (("energy", 2), ("target", 1)):
        new = ga.consensus_update(*inputs, graph, step, update=update)
        expected = inputs.state - factor * step * alpha * smoothing
        torch.testing.assert_close(new, expected, **EXACT)
    if n > 1 and how == "no beta":  # eta = 1 / (2 max_i d_i): alpha cancels
        degree = 2 * (n - 1)  # in and out, to the others: a self-loop exerts no force
        new = ga.consensus_update(*inputs, graph, "auto")
        torch.testing.assert_close(new, inputs.state - smoothing / degree, **EXACT)


def laplacian_by_hand(mask: Tensor) -> np.ndarray:
    """D - W of the symmetrised weights W = (A + A^T) / 2."""
    A = mask.double().numpy()
    W = (A + A.T) / 2
    return np.diag(W.sum(1)) - W


@SWEEP
@given(
    graph=sequences(8, causal=False),
    alpha=st.floats(0.1, 3),
    share=st.floats(0.1, 1),
    how=SCALAR,
    seed=seeds,
)
def test_powers_of_the_filter_reach_the_mean_at_the_rate_of_the_fiedler_value(
    graph, alpha, share, how, seed
):
    """||H^n u - mean|| <= omega_1^n ||u - mean|| for H = I - 2 eta L_sym, with R = alpha I.

    omega_1 = 1 - 2 eta lambda_1, any step that does not oscillate; equal on the Fiedler vector.
    """
    n, L = graph.num_tokens, alpha * laplacian_by_hand(graph.to_mask())
    _, vectors = np.linalg.eigh(L)
    fiedler = alpha * ga.spectral.fiedler_value(graph)
    step = share * min(ga.spectral.max_step_size(graph) / alpha, 1.0)
    omega = 1 - 2 * step * fiedler if n > 1 else 0.0
    inputs = consensus_inputs(graph, heads=2, features=2, hidden=2, seed=seed)
    network = scalar_network(seed, 2, 2, alpha, how)
    slowest = torch.from_numpy(vectors[:, min(1, n - 1)].copy())
    for u, tight in ((inputs.state, False), (slowest[:, None, None].expand(n, 2, 2), n > 1)):
        mean, start = u.mean(0), (u - u.mean(0)).norm().item()
        for power in range(1, 25):
            u = ga.consensus_update(
                u, u, inputs.target_hidden, inputs.source_hidden, network, graph, step
            )
            torch.testing.assert_close(u.mean(0), mean, **EXACT)
            left = (u - mean).norm().item()
            assert left <= omega**power * start + 1e-12
            if tight:
                assert left == pytest.approx(omega**power * start, rel=1e-9, abs=1e-12)
