"""A score of somebody's own runs on every backend that can, and is refused elsewhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases_ops import GRAPHS, qkv, random, sides, valid_tokens
from torch import Tensor
from torch.nn import functional

import graphattn as ga


class Laplacian(ga.Score):
    """The Laplacian kernel exp(-|q - k| / s): one method, and all pairs by broadcasting."""

    def __init__(self, bandwidth: Tensor | float) -> None:
        self.bandwidth = bandwidth

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return -(query - key).norm(dim=-1) / self.bandwidth


class Cosine(ga.Score):
    """Cosine attention, with all pairs as a product of matrices."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return self.scale * functional.cosine_similarity(query, key, dim=-1)

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = (functional.normalize(x, dim=-1) for x in (query, key))
        return self.scale[:, None, None] * (query @ key.mT)


OWN = {"laplacian": Laplacian, "cosine": Cosine}
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def by_loop(score: str, query: Tensor, key: Tensor, value: Tensor, graph: ga.TokenGraph, s: Tensor):
    """Softmax attention, target by target and head by head, from the formulas on paper."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    sources, targets = graph.edge_index
    for i in range(graph.num_targets):
        seen = sources[targets == i]
        if not len(seen):
            continue
        for h in range(query.shape[-2]):
            q = query[..., i, h, None, :]
            k, v = (x[..., seen, h * x.shape[-2] // query.shape[-2], :] for x in (key, value))
            if score == "laplacian":
                logits = -((q - k) ** 2).sum(-1).sqrt() / s[h]
            else:
                lengths = (q**2).sum(-1).sqrt() * (k**2).sum(-1).sqrt()
                logits = s[h] * (q * k).sum(-1) / lengths
            out[..., i, h, :] = (logits.softmax(-1)[..., None] * v).sum(-2)
    return out


@pytest.mark.parametrize("backend", ["auto", "reference", "structured"])
@pytest.mark.parametrize("score", OWN)
@pytest.mark.parametrize("graph_name", GRAPHS)
def test_values_are_those_of_a_plain_loop(graph_name: str, score: str, backend: str) -> None:
    graph = GRAPHS[graph_name]()
    query, key, value = qkv(graph)
    s = torch.linspace(0.5, 2, query.shape[-2], dtype=query.dtype)
    found = ga.score_attention(query, key, value, graph, OWN[score](s), backend=backend)
    torch.testing.assert_close(found, by_loop(score, query, key, value, graph, s), **EXACT)


OPTIONS = {
    "top 2": {"top_k": 2},
    "softcap, sink, eps": {"softcap": 0.8, "sink": 0.3, "eps": 0.2},
    "padded": {"valid": True},
    "biased": {"edge_bias": True},
    "dropped": {"dropout": 0.4},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("score", OWN)
@pytest.mark.parametrize("graph_name", GRAPHS)
def test_structured_is_the_reference_with_every_option(
    graph_name: str, score: str, options: str
) -> None:
    """Values, log-sums and all gradients, that of the score's own tensor too."""
    graph = GRAPHS[graph_name]()
    query, key, value = qkv(graph)
    given = dict(OPTIONS[options])
    if "valid" in given:
        N, M = sides(graph)
        given["valid"] = valid_tokens(N), valid_tokens(M, seed=1)
    if "edge_bias" in given:
        given["edge_bias"] = random(graph.num_edges, query.shape[-2], seed=9)
    s = torch.linspace(0.5, 2, query.shape[-2], dtype=query.dtype)

    def run(backend: str) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (query, key, value, s)]
        generator = torch.Generator().manual_seed(4)
        out, lse = ga.score_attention(
            *inputs[:3],
            graph,
            OWN[score](inputs[3]),
            backend=backend,
            generator=generator,
            return_lse=True,
            **given,
        )
        weights = random(*out.shape, seed=3)
        loss = (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        return [out, lse, *torch.autograd.grad(loss, inputs)]

    torch.testing.assert_close(run("structured"), run("reference"), **EXACT)


@pytest.mark.parametrize("kernel", ["dot", "rbf"])
def test_the_shipped_scores_stated_by_somebody_give_what_the_operations_give(kernel: str) -> None:
    """A subclass that overrides `edges` is a score of its own, which compiled code must not run."""

    class Restated(ga.DotProduct if kernel == "dot" else ga.GaussianKernel):  # type: ignore[misc]
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            return 2 * super().edges(query, key)

    graph = GRAPHS["causal window"]()
    query, key, value = qkv(graph)
    if kernel == "dot":
        expected = ga.dot_product_attention(query, key, value, graph, scale=0.6)
        score = Restated(0.3)
    else:
        expected = ga.rbf_attention(query, key, value, graph, 2**0.5)
        score = Restated(2.0)
    assert score.kernel is None
    for backend in ("auto", "structured", "reference"):
        found = ga.score_attention(query, key, value, graph, score, backend=backend)
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("backend", ["auto", "reference", "structured", "native"])
def test_shipped_scores_are_the_operations_bit_by_bit(backend: str) -> None:
    graph = GRAPHS["path with self loops"]()
    query, key, value = qkv(graph)
    if ga.backends("rbf_attention", graph, query).get(backend, None) is not None:
        pytest.skip(f"{backend} does not run here")
    found = ga.score_attention(query, key, value, graph, ga.DotProduct(), backend=backend)
    assert torch.equal(found, ga.dot_product_attention(query, key, value, graph, backend=backend))
    found = ga.score_attention(query, key, value, graph, ga.GaussianKernel(1.5), backend=backend)
    assert torch.equal(found, ga.rbf_attention(query, key, value, graph, 1.5, backend=backend))


def test_a_gaussian_kernel_can_be_capped_on_every_backend() -> None:
    graph = GRAPHS["causal"]()
    query, key, value = qkv(graph)
    score, expected = ga.GaussianKernel(1.5), []
    for backend in ("reference", "structured", "auto"):
        q = query.clone().requires_grad_()
        out = ga.score_attention(q, key, value, graph, score, softcap=0.5, backend=backend)
        expected.append((out, *torch.autograd.grad(out.square().sum(), q)))
    for found in expected[1:]:
        torch.testing.assert_close(found, expected[0], **EXACT)
    distance = (query[..., 3, :, :] - key[..., :, :1, :][..., 0, :, :]).square().sum(-1)
    assert bool(distance.max() > 0)  # logits differ from 0, so that a cap of 0.5 counts
    assert not torch.allclose(expected[0][0], ga.rbf_attention(query, key, value, graph, 1.5))


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_compiled_code_refuses_it_and_says_why(backend: str) -> None:
    graph = GRAPHS["path"]()
    query, key, value = qkv(graph)
    with pytest.raises(ValueError, match=rf"backend '{backend}' cannot run.*not the score Lapla"):
        ga.score_attention(query, key, value, graph, Laplacian(1.0), backend=backend)


def test_weights_are_those_of_the_operation() -> None:
    graph = GRAPHS["union"]()
    query, key, value = qkv(graph)
    weights = ga.attention_weights(query, key, graph, score=Laplacian(0.7), top_k=2, eps=0.1)
    out = ga.score_attention(query, key, value, graph, Laplacian(0.7), top_k=2, eps=0.1)
    source, target = graph.edge_index
    heads = query.shape[-2] // key.shape[-2]
    message = weights[..., None] * value.repeat_interleave(heads, -2).index_select(-3, source)
    found = torch.zeros_like(out).index_add(-3, target, message)
    torch.testing.assert_close(found, out, **EXACT)


def test_what_is_outside_of_edges_reaches_nothing() -> None:
    """NaN at a token that no kept row sees: neither outputs nor gradients know of it."""
    graph = ga.causal_window_graph(30, 4)
    query, key, value = (random(30, 2, 4, seed=seed) for seed in range(3))
    for x in (query, key, value):
        x[25] = torch.nan
    query.requires_grad_()
    for backend in ("reference", "structured"):
        out = ga.score_attention(query, key, value, graph, Laplacian(1.0), backend=backend)
        assert out[:25].isfinite().all()
        (gradient,) = torch.autograd.grad(out[:25].sum(), query)
        assert gradient[:25].isfinite().all()


def test_memory_of_a_window_is_that_of_a_few_tiles() -> None:
    """All pairs of 4,096 tokens were 64 GB of features."""
    n = 4096
    query, key, value = (random(n, 1, 16, seed=s, dtype=torch.float32) for s in range(3))
    graph = ga.causal_window_graph(n, 32)
    query.requires_grad_()
    most = 0

    class Watching(Laplacian):
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            nonlocal most
            most = max(most, (query - key).numel())
            return super().edges(query, key)

    ga.score_attention(
        query, key, value, graph, Watching(1.0), backend="structured"
    ).sum().backward()
    assert 0 < most <= 1 << 22  # 16 MB of float32


@pytest.mark.long
def test_it_can_be_differentiated_twice_and_looked_into() -> None:
    graph = ga.causal_window_graph(7, 3)
    query, key, value = (random(7, 2, 3, seed=s).requires_grad_() for s in range(3))
    s = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)

    def run(query: Tensor, key: Tensor, value: Tensor, s: Tensor) -> Tensor:
        return ga.score_attention(query, key, value, graph, Laplacian(s), backend="structured")

    assert torch.autograd.gradcheck(run, (query, key, value, s))
    assert torch.autograd.gradgradcheck(run, (query, key, value, s))
    batch = torch.stack([query, 2 * query]).detach()
    mapped = torch.func.vmap(lambda q: ga.score_attention(q, key, value, graph, Laplacian(s)))(
        batch
    )
    torch.testing.assert_close(mapped[1], run(2 * query, key, value, s), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(dtype: torch.dtype) -> None:
    graph = GRAPHS["complete"]()
    query, key, value = (x.to(dtype) for x in qkv(graph))
    found = ga.score_attention(query, key, value, graph, Laplacian(0.5), backend="structured")
    wide = ga.score_attention(*(x.float() for x in (query, key, value)), graph, Laplacian(0.5))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wide.to(dtype), rtol=0, atol=0)


def test_scores_can_be_copied_pickled_and_shown() -> None:
    score = ga.GaussianKernel(torch.tensor([1.0, 2.0]))
    graph = GRAPHS["path"]()
    query, key, _ = qkv(graph)
    expected = ga.score_attention(query, key, key, graph, score)
    for other in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert torch.equal(ga.score_attention(query, key, key, graph, other), expected)
    assert repr(score) == "GaussianKernel(sigma=[1.0, 2.0])"
    assert repr(ga.DotProduct(0.5)) == "DotProduct(scale=0.5)"
    assert repr(Laplacian(1.0)) == "Laplacian()"


# Errors.


def test_what_is_no_score_is_refused_by_name() -> None:
    graph = GRAPHS["path"]()
    query, key, value = qkv(graph)
    with pytest.raises(ValueError, match=r"score must be a graphattn\.Score.*got the str 'rbf'"):
        ga.score_attention(query, key, value, graph, "rbf")
    with pytest.raises(ValueError, match="sigma or log_sigma must be given"):
        ga.GaussianKernel()
    with pytest.raises(ValueError, match="sigma must be > 0 and finite"):
        ga.score_attention(query, key, value, graph, ga.GaussianKernel(-1.0))
    with pytest.raises(ValueError, match="scale must be finite, got inf"):
        ga.score_attention(query, key, value, graph, ga.DotProduct(float("inf")))
    with pytest.raises(ValueError, match="give score or sigma, not both"):
        ga.attention_weights(query, key, graph, score=ga.DotProduct(), sigma=1.0)
    patched = ga.DotProduct()
    patched.edges = lambda query, key: (query - key).sum(-1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"edges as methods of its class.*write a subclass"):
        ga.score_attention(query, key, value, graph, patched)
    with pytest.raises(NotImplementedError, match=r"Score must have edges\(query, key\)"):
        ga.score_attention(query, key, value, graph, ga.Score())


@pytest.mark.parametrize("backend", ["reference", "structured"])
def test_logits_of_another_shape_are_refused_by_name(backend: str) -> None:
    class Forgets(ga.Score):
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            return query * key

    class Wrong(Laplacian):
        def pairs(self, query: Tensor, key: Tensor) -> Tensor:
            return query @ key.mT[..., 1:]

    graph = GRAPHS["complete"]()
    query, key, value = qkv(graph)
    with pytest.raises(
        ValueError, match=r"Forgets\.(edges|pairs)\(\) must give .* logits of shape"
    ):
        ga.score_attention(query, key, value, graph, Forgets(), backend=backend)
    if backend == "structured":
        with pytest.raises(ValueError, match=r"Wrong\.pairs\(\) must give floating-point logits"):
            ga.score_attention(query, key, value, graph, Wrong(1.0), backend=backend)


def test_several_queries_read_one_key_head_of_another_set_of_tokens() -> None:
    graph = ga.bipartite_complete_graph(5, 3)
    query, key, value = random(5, 2, 4, seed=0), random(3, 1, 4, seed=1), random(3, 1, 2, seed=2)
    s = torch.tensor([0.5, 1.5], dtype=torch.float64)
    found = ga.score_attention(query, key, value, graph, Laplacian(s))
    torch.testing.assert_close(found, by_loop("laplacian", query, key, value, graph, s), **EXACT)
