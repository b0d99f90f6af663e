"""Dropout of attention weights: a hash says which edges, the same on every backend."""

from functools import partial

import pytest
import torch
from cases_ops import BACKENDS, FEW, GRAPHS, SIGMA, attend, qkv, random, valid_tokens
from oracle_ops import attention
from torch.utils.checkpoint import checkpoint

import graphattn as ga
from graphattn.ops.dropout import draw_seed, dropout_of_call, keeps

TIGHT = {"rtol": 1e-11, "atol": 1e-12}
LONG = {  # what is done in parts, in several tiles, or in pieces of them
    "longformer": lambda: ga.longformer_graph(150, 3, (0, 70)),
    "batch of longformers": lambda: ga.batch([ga.longformer_graph(n, 2, (0,)) for n in (140, 9)]),
    "window": lambda: ga.window_path_graph(150, 4, self_loops=True),
    "causal": lambda: ga.causal_graph(150),
    "dilated": lambda: ga.dilated_window_graph(150, 2, 7),
    "blocks of two sizes": lambda: ga.block_window_graph(150, 16, shift=5),
    "batch of unequal windows": lambda: ga.batch(
        [ga.causal_window_graph(n, 5) for n in (40, 7, 40, 63)]
    ),
}


def seeded(number=5):
    return torch.Generator().manual_seed(number)


def drawn(graph, batch, heads, p, generator):
    """Find which pairs are dropped, bool [B, N, M, H]: the definition in Python's whole numbers."""
    seed = int(draw_seed(generator, torch.device("cpu")))
    low, high = (1 << 32) - 1, (1 << 64) - 1

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & high
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & high
        return z ^ (z >> 31)

    def following(state, number):
        return mix((state + (number + 1) * 0x9E3779B97F4A7C15) & high)

    start = following(0, seed)
    dropped = torch.zeros(batch, graph.num_targets, graph.num_sources, heads, dtype=torch.bool)
    limit = min(int(p * 2**32), low) - 2**31
    columns = [following(~start & high, j) & low for j in range(graph.num_sources)]
    for b in range(batch):
        for h in range(heads):
            for i in range(graph.num_targets):
                row = following(following(following(start, b), h), i)
                for j, column in enumerate(columns):
                    x = ((row & low) ^ column) * 0x85EBCA6B & low
                    x = (x ^ (x >> 15)) * ((row >> 32) | 1) & low
                    dropped[b, i, j, h] = (x - 2**32 if x >= 2**31 else x) < limit
    return dropped


# Which edges are dropped, and what is left.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", SIGMA)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_edges_of_the_definition_are_dropped_after_the_softmax(name, score, backend):
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2, 1), heads=4, kv_heads=2, value_features=2)
    dropped = drawn(graph, 2, 4, 0.4, seeded()).unflatten(0, (2, 1))
    for options in ({}, {"top_k": 2}):
        found, lse = attend(
            score, q, k, v, graph, dropout=0.4, generator=seeded(), sink=0.2, return_lse=True,
            backend=backend, **options,
        )  # fmt: skip
        expected = attention(
            q, k, v, graph.to_mask(), sink=0.2, dropped=dropped, dropout=0.4,
            **options, **SIGMA[score],
        )  # fmt: skip
        # that of all edges
        torch.testing.assert_close((found, lse), expected[:2], **TIGHT)


OPTIONS = {
    "plain": {},
    "top 3": {"top_k": 3},
    "softcap": {"softcap": 0.8},
    "padding": {"valid": True},
    "a bias per edge, top 3": {"edge_bias": True, "top_k": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [*FEW, *LONG])
def test_both_backends_drop_the_same_forward_and_backward(name, options):
    graph = (GRAPHS | LONG)[name]()
    given = dict(OPTIONS[options])
    tensors = [x.requires_grad_() for x in qkv(graph, batch=(2,), kv_heads=1)]
    if given.get("valid"):
        given["valid"] = valid_tokens(2, graph.num_targets)
    if given.get("edge_bias"):
        given["edge_bias"] = random(graph.num_edges, 2, seed=3)
    d_out, found = None, {}
    for backend in BACKENDS:
        out, lse = ga.dot_product_attention(
            *tensors, graph, dropout=0.3, generator=seeded(), return_lse=True, backend=backend,
            **given,
        )  # fmt: skip
        lse = lse.masked_fill(lse == -torch.inf, 0)
        d_out = random(*out.shape, seed=8) if d_out is None else d_out
        loss = (out * d_out).sum() + lse.sin().sum()
        found[backend] = out, lse, *torch.autograd.grad(loss, tensors)
    for backend in BACKENDS[1:]:
        torch.testing.assert_close(found[backend], found["reference"], **TIGHT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives(backend):
    graph = ga.causal_window_graph(6, 3)
    inputs = [x.requires_grad_() for x in qkv(graph, heads=1)]
    run = partial(ga.dot_product_attention, graph=graph, dropout=0.4, backend=backend)
    assert torch.autograd.gradgradcheck(lambda *x: run(*x, generator=seeded()), inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FEW, "longformer", "path"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_value_of_a_dropped_edge_is_not_read(backend, name, dtype):
    """A source that holds NaN reaches the rows that keep it, forward and backward, and no other."""
    graph = (GRAPHS | LONG)[name]() if name != "longformer" else LONG[name]()
    q, k, v = qkv(graph, dtype=dtype)
    run = partial(ga.dot_product_attention, graph=graph, dropout=0.5, backend=backend)
    bad = graph.num_sources // 2
    dropped = drawn(graph, 1, 2, 0.5, seeded())[0]
    sees = (graph.to_mask()[:, bad, None] & ~dropped[:, bad]).any(-1)
    assert sees.any() or not graph.to_mask()[:, bad].any()
    clean = run(q, k, v, generator=seeded())
    v = v.clone()
    v[bad] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = run(*leaves, generator=seeded())
    seen = graph.to_mask()[:, bad, None] & ~dropped[:, bad]  # by a head
    torch.testing.assert_close(out[~seen], clean[~seen], rtol=1e-2, atol=1e-3)
    assert out[seen].isnan().all()
    if backend == "structured":  # in plain autograd rows that nobody asks for send back 0 * NaN
        gradients = torch.autograd.grad(out[~sees].float().sum(), leaves)
        assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_that_holds_nan_is_never_read(backend):
    graph = ga.causal_graph(12)
    valid = valid_tokens(2, 12)
    tensors = [x.masked_fill(~valid[..., None, None], torch.nan) for x in qkv(graph, batch=(2,))]
    leaves = [x.requires_grad_() for x in tensors]
    out = ga.dot_product_attention(
        *leaves, graph, valid=valid, dropout=0.3, generator=seeded(), backend=backend
    )
    assert out[valid].isfinite().all()
    for gradient in torch.autograd.grad(out[valid].sum(), leaves):
        assert gradient.isfinite().all()


# The numbers of the hash.


def mask_of(p=0.3, seed=1, batch=2, heads=3, n=256, m=320):
    query, graph = torch.empty(batch, n, heads, 0), ga.bipartite_complete_graph(n, m)
    dropout = dropout_of_call(p, torch.tensor(seed), query, graph)
    rows = dropout.rows.transpose(1, 2)[..., None]
    return ~keeps(p, rows, dropout.columns)  # [B, H, N, M]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2, 2**61 + 1])
def test_every_head_row_and_column_drops_its_share(p, seed):
    """Sums of independent draws: within five standard deviations, and spread as they should."""
    drops = mask_of(p, seed).double()
    for dims in ((0, 1, 2, 3), (2, 3), (0, 1, 3), (0, 1, 2), (3,), (2,)):
        sums = drops.sum(dims).flatten()
        count = drops.numel() / sums.numel()
        z = (sums - count * p) / (count * p * (1 - p)) ** 0.5
        assert z.abs().max() < 5.5
        if len(z) > 100:  # the variance of a sample's variance is 2 / n
            assert abs(float(z.square().mean()) - 1) < 5 * (2 / len(z)) ** 0.5


def correlation(a, b):
    """Correlate two masks of the same share, in standard deviations of the estimate."""
    a, b = (x.double() - x.double().mean() for x in (a, b))
    return float((a * b).mean() / (a.std() * b.std()) * a.numel() ** 0.5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbouring_edges_heads_entries_and_seeds_know_nothing_of_each_other(p):
    drops = mask_of(p, seed=7)
    for step in (1, 2, 3, 4, 8, 16, 64, 128):
        assert abs(correlation(drops[..., step:], drops[..., :-step])) < 5
        assert abs(correlation(drops[:, :, step:], drops[:, :, :-step])) < 5
        assert abs(correlation(drops[:, :, step:, step:], drops[:, :, :-step, :-step])) < 5
    assert abs(correlation(drops[:, 1:], drops[:, :-1])) < 5
    assert abs(correlation(drops[1:], drops[:-1])) < 5
    for other in (6, 8, 7 + 2**32, 7 + 2**40, -8):
        assert abs(correlation(drops, mask_of(p, seed=other))) < 5
    square = drops[..., :256]
    assert abs(correlation(square, square.mT)) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_four_edges_between_two_targets_and_two_sources_are_independent(p):
    """Rows and columns are hashed apart: what joins them must not let three edges tell a fourth."""
    drops = mask_of(p, seed=11, batch=4, heads=4).double() - p
    for i, j in ((1, 1), (2, 5), (7, 32), (64, 128)):
        corners = drops[..., i:, j:] * drops[..., :-i, j:] * drops[..., i:, :-j]
        corners = corners * drops[..., :-i, :-j]
        variance = (p * (1 - p)) ** 4
        assert abs(float(corners.mean() * corners.numel() ** 0.5)) < 5 * variance**0.5


def test_two_rows_whose_words_agree_in_part_still_differ():
    """Among a million rows some share their low words."""
    graph = ga.bipartite_complete_graph(1, 4096)
    columns = dropout_of_call(0.5, torch.tensor(3), torch.empty(1, 1, 1), graph).columns
    words = torch.randint(1 << 31, (40,), generator=seeded(0))
    rows = (words[1:] << 32) | words[0]
    drops = keeps(0.5, rows[:, None], columns)
    for one, two in zip(drops[1:], drops[:-1], strict=True):
        assert abs(correlation(one, two)) < 5


# Seeds.


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seed_brings_a_draw_back_and_every_call_draws_anew(backend):
    graph = ga.causal_graph(40)
    run = partial(ga.dot_product_attention, *qkv(graph), graph, dropout=0.2, backend=backend)
    torch.manual_seed(3)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(run(), first)
    assert torch.equal(run(), second)
    assert torch.equal(run(generator=seeded(9)), run(generator=seeded(9)))
    assert not torch.equal(run(generator=seeded(9)), run(generator=seeded(10)))


def test_no_dropout_draws_nothing():
    graph = ga.causal_graph(5)
    q, k, v = qkv(graph)
    before = torch.get_rng_state()
    plain = ga.dot_product_attention(q, k, v, graph)
    assert torch.equal(ga.dot_product_attention(q, k, v, graph, dropout=0.0), plain)
    assert torch.equal(torch.get_rng_state(), before)
    generator = seeded()
    ga.dot_product_attention(q, k, v, graph, dropout=0.1, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)  # the generator's own numbers
    ga.dot_product_attention(q, k, v, graph, dropout=0.1)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_drops_the_same_again(backend, reentrant):
    graph = ga.window_path_graph(60, 4)
    leaves = [x.requires_grad_() for x in qkv(graph)]
    run = partial(ga.dot_product_attention, graph=graph, dropout=0.4, backend=backend)
    torch.manual_seed(0)
    plain = run(*leaves)
    torch.manual_seed(0)
    again = checkpoint(run, *leaves, use_reentrant=reentrant)
    assert torch.equal(plain, again)
    for a, b in zip(
        torch.autograd.grad(plain.sin().sum(), leaves),
        _gradients(again.sin().sum(), leaves),
        strict=True,
    ):
        assert torch.equal(a, b)


def _gradients(loss, leaves):
    """Compute gradients by backward(), which is all that reentrant checkpointing knows."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves]


# What is refused.


@pytest.mark.parametrize("dropout", [1.0, 1.5, -0.1, float("nan"), "0.1", True])
def test_shares_that_are_refused(dropout):
    graph = ga.complete_graph(3)
    q, k, v = qkv(graph)
    with pytest.raises(ValueError, match="dropout must be"):
        ga.dot_product_attention(q, k, v, graph, dropout=dropout)


def test_a_generator_is_torchs():
    graph = ga.complete_graph(3)
    q, k, v = qkv(graph)
    with pytest.raises(ValueError, match=r"generator must be a torch.Generator or None, got int"):
        ga.dot_product_attention(q, k, v, graph, dropout=0.1, generator=3)


def test_triton_refuses_it_by_name_and_says_so_before():
    graph, (q, k, v) = ga.complete_graph(3), qkv(ga.complete_graph(3))
    reason = "its kernels have no dropout"
    for op in ("rbf_attention", "dot_product_attention"):
        support = ga.backends(op, graph, q, dropout=0.1)
        assert support["triton"] == reason
    with pytest.raises(ValueError, match=f"'triton' cannot run this case: {reason}"):
        ga.dot_product_attention(q, k, v, graph, dropout=0.1, backend="triton")
    with pytest.raises(ValueError, match="dropout is no option of consensus_update"):
        ga.backends("consensus_update", graph, q, dropout=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_operation_drops_what_the_seed_says(backend):
    graph = ga.causal_graph(12)
    tensors = qkv(graph, batch=(2,))
    run = partial(ga.dot_product_attention, graph=graph, dropout=0.4, backend=backend)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: run(*x), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    found = compiled(*tensors)
    torch.manual_seed(1)
    torch.testing.assert_close(found, run(*tensors), **TIGHT)
    assert not torch.equal(compiled(*tensors), found)
