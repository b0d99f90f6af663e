"""Properties of the operations on any graph, of any shape: random graphs, batches and inputs."""

from __future__ import annotations

import numpy as np
import oracle_ops as oracle
import pytest
import torch
from cases_ops import consensus_inputs, identity_network, random
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
    poisoned,
    replaced,
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
@given(case=attention_cases(), eps=st.sampled_from([1e-6, 0.5, 10.0]))
def test_eps_takes_its_share_of_the_weights_and_no_more(case: AttentionCase, eps: float):
    """Row sums are sum / (eps + sum) with the sum of the kernel itself."""
    case.arguments.pop("scale", None)
    case.arguments.setdefault("sigma", 1.3)
    _, target = case.graph.edge_index
    zeros = torch.zeros(case.query.shape[:-1], dtype=torch.float64)
    total = zeros.index_add(-2, target, case.weights(eps=eps))
    _, lse = case.output(return_lse=True)
    torch.testing.assert_close(total, lse.exp() / (eps + lse.exp()), **EXACT)


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


@SWEEP
@given(data=data, seed=seeds)
def test_the_order_in_which_edges_are_listed_changes_no_bit(data, seed: int):
    graph = st.one_of(sequences(causal=False), one_rectangle())
    attention = data.draw(attention_cases(graph))
    for case in (attention, data.draw(consensus_cases(sequences(causal=False)))):
        edges = case.graph.edge_index
        order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(seed))
        listed, shuffled = case.output(edges), case.output(edges[:, order])
        assert torch.equal(shuffled, listed)
        torch.testing.assert_close(listed, case.output(), **EXACT)


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


def blind_rows(graph: ga.TokenGraph, target_hit: Tensor, source_hit: Tensor) -> Tensor:
    """Targets that are not hit and look at no source that is."""
    return ~target_hit & ~graph.to_mask()[:, source_hit].any(1)


@SWEEP
@given(case=attention_cases(dtypes=(*FULL, torch.bfloat16)), data=data)
def test_attention_reads_no_token_without_an_edge_to_it(case: AttentionCase, data):
    """Bit by bit, whether that token holds NaN, infinity or another number."""
    graph = case.graph
    target_hit, target_content = poisoned(data.draw, graph.num_targets)
    source_hit, source_content = poisoned(data.draw, graph.num_sources)
    blind = blind_rows(graph, target_hit, source_hit)
    changes = {
        "query": replaced(case.query, target_hit, target_content),
        "key": replaced(case.key, source_hit, source_content),
        "value": replaced(case.value, source_hit, source_content),
    }
    before, lse_before = case.output(return_lse=True)
    after, lse_after = case.output(return_lse=True, **changes)
    assert torch.equal(after[..., blind, :, :], before[..., blind, :, :])
    assert torch.equal(lse_after[..., blind, :], lse_before[..., blind, :])
    weights_before, weights_after = case.weights(), case.weights(
        query=changes["query"], key=changes["key"]
    )  # fmt: skip
    own = blind[graph.edge_index[1]]
    assert torch.equal(weights_after[..., own, :], weights_before[..., own, :])
    # And no gradient either.
    leaves = {name: getattr(case, name).clone().requires_grad_() for name in changes}
    out = case.output(**leaves)[..., blind, :, :].square().sum()
    of_query, of_key, of_value = torch.autograd.grad(out, leaves.values())
    assert (of_query[..., target_hit, :, :] == 0).all()
    assert (of_key[..., source_hit, :, :] == 0).all()
    assert (of_value[..., source_hit, :, :] == 0).all()


@SWEEP
@given(case=consensus_cases(dtypes=(*FULL, torch.bfloat16)), data=data)
def test_consensus_reads_no_token_without_an_edge_to_it(case: ConsensusCase, data):
    """ "energy" moves both ends of an edge; its automatic step is a number of the sequence."""
    graph, (u, v, a, b, network) = case.graph, case.inputs
    target_hit, content = poisoned(data.draw, graph.num_targets)
    source_hit, source_content = target_hit, content
    if u is not v:
        source_hit, source_content = poisoned(data.draw, graph.num_sources)
    blind = blind_rows(graph, target_hit, source_hit)
    if case.update == "energy":
        blind &= ~graph.to_mask()[target_hit].any(0)
    if case.reads_its_whole_sequence:
        sequence = sequence_of(graph)[0]
        blind = ~torch.isin(sequence, sequence[target_hit])
    leaves = [x.clone().requires_grad_() for x in (u, v, a, b)]
    before = case.output(inputs=(*leaves, network))
    changed = (
        replaced(u, target_hit, content),
        replaced(v, source_hit, source_content),
        replaced(a, target_hit, content),
        replaced(b, source_hit, source_content),
    )
    after = case.output(inputs=(*changed, network))
    assert torch.equal(after[..., blind, :, :], before[..., blind, :, :])
    loss = before[..., blind, :, :].square().sum()
    for gradient, hit in zip(
        torch.autograd.grad(loss, leaves), (target_hit, source_hit) * 2, strict=True
    ):
        assert (gradient[..., hit, :, :] == 0).all()


@SWEEP
@given(case=attention_cases(dtypes=(*FULL, torch.bfloat16)), data=data)
def test_what_padding_holds_reaches_no_output_and_no_gradient_of_attention(
    case: AttentionCase, data
):
    valid = valid_mask(data.draw, case.graph)
    contents = [poisoned(data.draw, n)[1] for n in (case.query.shape[-3], case.key.shape[-3])]
    names = ("query", "key", "value")

    def run(spoiled: bool) -> list[Tensor]:
        leaves, strength = {}, next(n for n in ("sigma", "scale") if n in case.arguments)
        for name, side in zip(names, (0, 1, 1), strict=True):
            x = getattr(case, name)
            x = replaced(x, ~valid[side], contents[side]) if spoiled else x.clone()
            leaves[name] = x.requires_grad_()
        leaves[strength] = case.arguments[strength].clone().requires_grad_()
        out, lse = case.output(valid=valid, return_lse=True, **leaves)
        loss = out.double().square().sum() + lse[lse.isfinite()].double().sum()
        return [out, lse, *torch.autograd.grad(loss, leaves.values())]

    clean, spoiled = run(False), run(True)
    assert spoiled[0].isfinite().all()
    for before, after in zip(clean, spoiled, strict=True):
        assert torch.equal(after, before)
    assert all(gradient.isfinite().all() for gradient in spoiled[2:])


@SWEEP
@given(case=consensus_cases(dtypes=(*FULL, torch.bfloat16)), data=data)
def test_what_padding_holds_reaches_no_output_and_no_gradient_of_consensus(
    case: ConsensusCase, data
):
    u, v, a, b, network = case.inputs
    valid = valid_mask(data.draw, case.graph)
    if u is v:
        valid = (valid[0], valid[0])
    contents = [poisoned(data.draw, n)[1] for n in (u.shape[-3], v.shape[-3])]

    def run(spoiled: bool) -> list[Tensor]:
        leaves = []
        for x, side in zip((u, v, a, b), (0, 1) * 2, strict=True):
            x = replaced(x, ~valid[side], contents[side]) if spoiled else x.clone()
            leaves.append(x.requires_grad_())
        parameters = ga.EdgeNetworkParameters(*(x.clone().requires_grad_() for x in network))
        new = case.output(inputs=(*leaves, parameters), valid=valid)
        assert new.isfinite().all()
        new = new[..., valid[0], :, :]
        gradients = torch.autograd.grad(new.double().square().sum(), [*leaves, *parameters])
        return [new, *gradients]

    clean, spoiled = run(False), run(True)
    for before, after in zip(clean, spoiled, strict=True):
        assert torch.equal(after, before)
        assert after.isfinite().all()


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
        case._replace(step_size=1.0)
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


def as_matrix(case: ConsensusCase) -> Tensor:
    """The linear map u -> u' of every head, [H, N D, N D], from the op on the basis vectors."""
    u, _, a, b, network = case.inputs
    N, H, D = u.shape
    basis = torch.eye(N * D, dtype=torch.float64).view(N * D, N, 1, D).expand(-1, -1, H, -1)
    hidden = (x.expand(N * D, *x.shape) for x in (a, b))
    columns = case.output(inputs=(basis, basis, *hidden, network))
    return columns.permute(2, 1, 3, 0).reshape(H, N * D, N * D)


@SWEEP
@given(
    case=consensus_cases(updates=("energy",), steps=("auto",), batches=st.just(())),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_automatic_energy_step_has_its_measured_spectrum_in_0_1(
    case: ConsensusCase, size: float
):
    """u -> u' is symmetric with eigenvalues in [0, 1]: nothing overshoots, nothing grows."""
    _, _, a, b, _ = case.inputs
    inputs = case.inputs._replace(target_hidden=size * a, source_hidden=size * b)
    H = as_matrix(case._replace(inputs=inputs))
    torch.testing.assert_close(H, H.mT, **EXACT)
    spectrum = torch.linalg.eigvalsh(H)
    assert spectrum.min() >= -1e-10
    assert spectrum.max() <= 1 + 1e-10


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
    blocks = as_matrix(case).view(H, N, D, N, D).transpose(2, 3)  # [H, to, from, D, D]
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


@pytest.mark.long
@SWEEP
@given(data=data, seed=seeds)
def test_a_filter_whose_rate_is_below_one_ends_at_the_mean(data, seed: int):
    """Connected graphs: after log(1e-6) / log(omega_1) powers what is left is 1e-6 of the start."""
    graph = data.draw(sequences(6, causal=False).filter(
        lambda g: g.num_tokens > 1 and ga.spectral.fiedler_value(g) > 0.3))  # fmt: skip
    inputs = consensus_inputs(graph, heads=1, features=2, hidden=2, seed=seed)
    inputs = inputs._replace(network=identity_network(1, 2))
    step = ga.spectral.max_step_size(graph)
    omega = 1 - 2 * step * np.linalg.eigvalsh(laplacian_by_hand(graph.to_mask()))[1]
    powers = 1 if omega < 1e-9 else int(np.ceil(np.log(1e-6) / np.log(omega)))
    u = inputs.state
    mean, start = u.mean(0), (u - u.mean(0)).norm()
    for _ in range(powers):
        u = ga.consensus_update(u, u, *inputs[2:4], inputs.network, graph, step)
    assert (u - mean).norm() <= 1.01e-6 * start
