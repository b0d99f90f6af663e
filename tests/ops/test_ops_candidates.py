"""Top-k over parts by their best candidates is top-k in one pass, ties and all."""

import pytest
import torch
from cases_ops import random, random_mask
from torch import Tensor

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-12}
CUTS = [(0, 4), (4, 5), (5, 5), (5, 13)]  # shards of the sources, an empty one among them
STRENGTHS = pytest.mark.parametrize("strength", [{}, {"sigma": 1.3}], ids=["dot", "rbf"])


def integers(*shape: int, seed: int) -> Tensor:
    """Few different numbers: ties everywhere, across parts too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).double()


def in_parts(q, k, v, mask, top_k, order=1, valid=None, **strength):
    """Candidates of every shard, the best of all, averages where values are, and their merge."""
    found = []
    for a, b in CUTS[::order]:
        pair = None if valid is None else (None, valid[..., a:b])
        graph = ga.from_mask(mask[:, a:b]) if b > a else ga.from_edge_index(
            torch.zeros(2, 0, dtype=torch.long), len(mask), 0
        )  # fmt: skip
        found.append(
            ga.top_k_candidates(
                q, k[..., a:b, :, :], graph, top_k, first_source=a, valid=pair, **strength
            )
        )
    best = ga.merge_top_k(found, top_k)
    averages = [
        ga.attend_candidates(*best, v[..., a:b, :, :], first_source=a) for a, b in CUTS[::order]
    ]
    return best, ga.merge_attention(averages)


def in_one_pass(q, k, v, mask, top_k, **options):
    operation = ga.rbf_attention if "sigma" in options else ga.dot_product_attention
    return operation(q, k, v, ga.from_mask(mask), top_k=top_k, return_lse=True, **options)


@STRENGTHS
@pytest.mark.parametrize("top_k", [1, 3, 20])
@pytest.mark.parametrize("numbers", [random, integers], ids=["random", "ties"])
@pytest.mark.parametrize("order", [1, -1])
def test_shards_of_the_sources_give_what_one_pass_gives(strength, top_k, numbers, order):
    mask = random_mask(7, 13, 0.6, seed=4)
    mask[2] = False
    q, k = numbers(2, 7, 4, 2, seed=1), numbers(2, 13, 2, 2, seed=2)
    v = random(2, 13, 2, 3, seed=3)
    (_, index), (out, lse) = in_parts(q, k, v, mask, top_k, order, **strength)
    expected = in_one_pass(q, k, v, mask, top_k, **strength)
    torch.testing.assert_close((out, lse), expected, **EXACT)
    # Which sources were kept, by the weights of one pass.
    weights = ga.attention_weights(q, k, ga.from_mask(mask), top_k=top_k, **strength)
    kept = torch.zeros(2, 7, 4, 14, dtype=torch.bool).scatter_(-1, index % 14, True)[..., :13]
    dense = torch.zeros(2, 7, 13, 4, dtype=torch.bool)
    dense[:, mask] = weights > 0
    assert torch.equal(kept, dense.transpose(-1, -2))


def test_parts_may_share_sources_if_they_share_no_edge():
    mask, owner = random_mask(7, 13, 0.6, seed=4), random_mask(7, 13, 0.5, seed=5)
    q, k, v = random(7, 4, 2, seed=1), random(13, 2, 2, seed=2), random(13, 2, 3, seed=3)
    found = [
        ga.top_k_candidates(q, k, ga.from_mask(part), 3, sigma=1.3)
        for part in (mask & owner, mask & ~owner)
    ]
    out, lse = ga.attend_candidates(*ga.merge_top_k(found, 3), v)
    expected = in_one_pass(q, k, v, mask, 3, sigma=1.3)
    torch.testing.assert_close((out, lse), expected, **EXACT)


@STRENGTHS
def test_gradients_are_those_of_one_pass(strength):
    mask = random_mask(7, 13, 0.6, seed=4)
    mask[2] = False
    tensors = [random(n, h, 2, seed=s).requires_grad_() for s, (n, h) in
               enumerate(((7, 4), (13, 2), (13, 2)))]  # fmt: skip
    direction, other = random(7, 4, 2, seed=8), random(7, 4, seed=9)
    results = []
    for out, lse in (
        in_parts(*tensors, mask, 3, **strength)[1],
        in_one_pass(*tensors, mask, 3, **strength),
    ):
        total = (out * direction).sum() + (torch.where(lse.isfinite(), lse, 0) * other).sum()
        results.append(torch.autograd.grad(total, tensors))
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, **EXACT)


def test_what_is_not_valid_is_no_candidate_and_not_read():
    valid = torch.rand(2, 13, generator=torch.Generator().manual_seed(0)) < 0.6
    mask = torch.ones(7, 13, dtype=torch.bool)
    q, k, v = random(2, 7, 4, 2, seed=1), random(2, 13, 2, 2, seed=2), random(2, 13, 2, 3, seed=3)
    k, v = (x.masked_fill(~valid[..., None, None], torch.nan) for x in (k, v))
    _, (out, lse) = in_parts(q, k, v, mask, 3, valid=valid, sigma=1.3)
    expected = in_one_pass(q, k, v, mask, 3, valid=(None, valid), sigma=1.3)
    torch.testing.assert_close((out, lse), expected, **EXACT)


def test_half_precision_is_computed_in_float32():
    mask = random_mask(7, 13, 0.6, seed=4)
    tensors = [random(n, 2, 4, seed=n + s, dtype=torch.bfloat16) for s, n in enumerate((7, 13, 13))]
    (logits, _), (out, lse) = in_parts(*tensors, mask, 3, sigma=1.3)
    assert logits.dtype == lse.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    expected, _ = in_one_pass(*(x.float() for x in tensors), mask, 3, sigma=1.3)
    assert (out - expected).abs().max() <= 0.02 * expected.abs().max()


def test_chunks_of_a_cache_decode_with_top_k():
    """A cache that stands in two places."""
    query, key, value = (random(2, n, 4, 16, seed=n) for n in (1, 900, 901))
    value = value[:, :900]
    found = [
        ga.top_k_candidates(query, key[:, a:b], ga.bipartite_complete_graph(1, b - a), 20,
                            sigma=4.0, first_source=a)
        for a, b in ((0, 512), (512, 900))
    ]  # fmt: skip
    out, _ = ga.attend_candidates(*ga.merge_top_k(found, 20), value)
    expected = ga.decode_attention(query, key, value, 900, sigma=4.0, top_k=20)
    torch.testing.assert_close(out, expected, **EXACT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ga.merge_top_k([], 2), "parts must hold at least one pair"),
        (lambda: ga.merge_top_k([torch.ones(3)], 2), r"parts\[0\] must be a pair"),
        (lambda: ga.merge_top_k([(torch.ones(3, 2, 4), torch.ones(3, 2, 4))], 2), "int64 index"),
        (
            lambda: ga.merge_top_k([(torch.ones(3, 2, 4), torch.ones(3, 2, 5).long())], 2),
            r"parts\[0\] must be of one shape .*\[3, 2, 4\] .* \[3, 2, 5\]",
        ),
        (
            lambda: ga.merge_top_k(
                [(torch.ones(n, 2, 4), torch.ones(n, 2, 4).long()) for n in (3, 5)], 2
            ),
            r"parts\[1\] must have the rows of parts\[0\], \[3, 2\], got \[5, 2\]",
        ),
        (
            lambda: ga.merge_top_k([(torch.ones(3, 2, 4), torch.ones(3, 2, 4).long())], 0),
            "k must be >= 1, got 0",
        ),
        (
            lambda: ga.attend_candidates(
                torch.ones(3, 2, 4), torch.ones(3, 2, 4).long(), torch.ones(5, 3, 4)
            ),
            r"value must be .*heads that divide 2, got \[5, 3, 4\]",
        ),
        (
            lambda: ga.top_k_candidates(
                torch.ones(3, 2, 4), torch.ones(3, 2, 4), ga.causal_graph(3), 2, sigma=1.0, scale=1
            ),
            "not both: 1.0, 1",
        ),
        (
            lambda: ga.top_k_candidates(
                torch.ones(3, 2, 4), torch.ones(3, 2, 4), ga.causal_graph(3), 2, first_source=-1
            ),
            "first_source must be >= 0, got -1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_empty_batch_and_too_few_candidates():
    q, k, v = torch.randn(0, 3, 4, 8), torch.randn(0, 5, 2, 8), torch.randn(0, 5, 2, 8)
    found = ga.top_k_candidates(q, k, ga.bipartite_complete_graph(3, 5), 2)
    out, lse = ga.attend_candidates(*found, v)
    assert (out.shape, lse.shape) == ((0, 3, 4, 8), (0, 3, 4))
    part = ga.top_k_candidates(
        torch.randn(3, 2, 8), torch.randn(5, 2, 8), ga.bipartite_complete_graph(3, 5), 1
    )
    with pytest.raises(ValueError, match=r"parts\[0\] must hold at least k = 3 candidates"):
        ga.merge_top_k([part], 3)
