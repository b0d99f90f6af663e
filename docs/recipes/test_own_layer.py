"""Is cosine attention what it claims to be? Tests for a layer of your own."""

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

import graphattn as ga


class Cosine(ga.Score):
    def __init__(self, scale):
        self.scale = scale  # [heads]

    def edges(self, query, key):  # [..., heads, features] -> [..., heads]
        return self.scale * cosine_similarity(query, key, dim=-1)


class CosineAttention(ga.nn.DotProductAttention):
    def __init__(self, dim, heads, **options):
        super().__init__(dim, heads, **options)
        self.log_scale = nn.Parameter(torch.full((heads,), 2.3))

    def score(self):
        return Cosine(self.log_scale.exp())


torch.manual_seed(0)
LAYER = CosineAttention(32, heads=4, rope=True).double().eval()
GRAPH = ga.causal_window_graph(40, window=6)  # a token sees itself and the five before it
X = torch.randn(40, 32, dtype=torch.float64)


def test_the_score_is_consistent():
    ga.check_score(Cosine(torch.full((4,), 10.0)), heads=4, head_dim=8)


def test_rows_are_averages():
    """And 1 is an eigenvalue as often as there are closed classes of tokens."""
    certificate = ga.spectral.certify(LAYER, X, GRAPH)
    assert certificate.sound, certificate  # None if no theorem applies


def test_no_token_reads_the_future_or_beyond_its_window():
    reads = torch.func.jacrev(lambda x: LAYER(x, GRAPH).sum(-1))(X).abs().sum(-1)  # [40, 40]
    assert torch.equal(reads > 0, GRAPH.to_mask())


def test_the_fast_path_equals_messages():
    fast = LAYER(X, GRAPH)
    with ga.use_backend("reference"):  # one message per edge
        torch.testing.assert_close(fast, LAYER(X, GRAPH))


def test_the_gradient_is_the_derivative():
    few = ga.causal_window_graph(5, window=3)
    x = X[:5].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LAYER(x, few), x)


def test_steps_of_generation_equal_the_whole():
    cache = LAYER.init_cache(1, 6)
    with torch.no_grad():
        steps = [LAYER.step(row[None], cache)[0] for row in X]
    torch.testing.assert_close(torch.stack(steps), LAYER(X, GRAPH))
