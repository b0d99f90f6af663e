"""A score with a mistake is told which method is wrong, and one without passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga
from graphattn.ops.attention.candidates import candidates_by_score


class Good(ga.Score):
    """Cosine attention with a scale per head, an offset that a module computes, and pairs."""

    def __init__(self) -> None:
        self.log_scale = torch.zeros(3, requires_grad=True)
        self.parts = {"offset": nn.Linear(4, 1)}

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        offset = self.parts["offset"](key)[..., 0]
        return self.log_scale.exp() * functional.cosine_similarity(query, key, dim=-1) + offset

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        offset = self.parts["offset"](key)[..., None, :, 0]
        query, key = (functional.normalize(x, dim=-1) for x in (query, key))
        return self.log_scale.exp()[:, None, None] * (query @ key.mT) + offset


class Laplacian(ga.Score):
    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return -(query - key).norm(dim=-1)


class Straight(ga.Score):
    """A step with a derivative of its own choice, which is right to have."""

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        rounded = query + (query.round() - query).detach()
        return (rounded * key).sum(-1)


class KeysOnly(ga.Score):
    """Logits that do not depend on the query need no gradient to it."""

    def edges(self, query: Tensor, key: Tensor) -> Tensor:
        return key.sum(-1) + 0 * query.detach().sum(-1)


RIGHT = {
    "own": Good,
    "laplacian": Laplacian,
    "straight through": Straight,
    "keys": KeysOnly,
    "dot": ga.DotProduct,
    "dot, learned": lambda: ga.DotProduct(torch.ones(3, requires_grad=True)),
    "rbf": lambda: ga.GaussianKernel(2.0),
    "rbf, learned": lambda: ga.GaussianKernel(log_sigma=torch.zeros(3, requires_grad=True)),
    "double": lambda: ga.DotProduct(torch.ones(3, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_score_passes_and_stays_as_it_is(name: str) -> None:
    score = RIGHT[name]()
    state = torch.random.get_rng_state()
    assert ga.check_score(score, heads=3, head_dim=4) is None
    assert torch.equal(torch.random.get_rng_state(), state)
    for value in vars(score).values():
        assert not isinstance(value, Tensor) or value.grad is None


def product(query: Tensor, key: Tensor) -> Tensor:
    return (query * key).sum(-1)


class Learned(ga.Score):
    def __init__(self):
        self.scale = torch.full((3,), 2.0, requires_grad=True)


class ChangesItself(ga.Score):
    def __init__(self):
        self.scale = torch.ones(3)

    def edges(self, query, key):
        self.scale += 1
        return self.scale * product(query, key)


class MixedPairs(Laplacian):
    """Right, except for what a NaN of one key does to the others."""

    def pairs(self, query, key):
        return ga.Score.pairs(self, query, key) + 0 * key.sum((-2, -1))[:, None, None]


class OverTheBatch(ga.Score):
    def edges(self, query, key):
        logits = product(query, key)
        return logits - logits.mean(0, keepdim=True) if logits.dim() == 3 else logits


def score_of(name, edges=None, pairs=None, base: type[ga.Score] = ga.Score) -> type[ga.Score]:
    """A class of scores with these methods."""
    methods = {"edges": edges, "pairs": pairs}
    return type(name, (base,), {name: x for name, x in methods.items() if x is not None})


OutOfRange = score_of("OutOfRange", lambda _, q, k: q[..., 9] * k[..., 9])
OtherHeads = score_of("OtherHeads", lambda _, q, k: torch.ones(5) * product(q, k))
OneArgument = score_of("OneArgument", lambda _, q: q.sum(-1))

WRONG = [
    (
        score_of("NoSum", lambda _, q, k: q * k),
        r"NoSum\.edges\(\) must give .*logits of shape \[5, 3\].* got .*\[5, 3, 4\]",
    ),
    (
        score_of("OneNumber", lambda *_: 1.0),
        r"OneNumber\.edges\(\) must give .*\[5, 3\].*got float",
    ),
    (
        score_of("Booleans", lambda _, q, k: product(q, k) > 0),
        r"Booleans\.edges\(\) must give floating-point .*got torch\.bool",
    ),
    (OutOfRange, r"OutOfRange\.edges\(\) must give .*\[5, 3\].*IndexError"),
    (OtherHeads, r"OtherHeads\.edges\(\) must give .*\[5, 3\].*RuntimeError"),
    (OneArgument, r"OneArgument\.edges\(\) must give .*TypeError"),
    (
        score_of("WrongPairs", pairs=lambda _, q, k: (q @ k.mT).mT, base=Laplacian),
        r"WrongPairs\.pairs\(\) must give .*\[3, 3, 4\].*got .*\[3, 4, 3\]",
    ),
    (
        score_of("OtherPairs", pairs=lambda _, q, k: q @ k.mT, base=Laplacian),
        r"OtherPairs\.pairs\(\) must give the logits of edges\(\)",
    ),
    (MixedPairs, r"MixedPairs\.pairs\(\) must give logits that depend on their own"),
    (
        score_of("InPlace", lambda _, q, k: product(q.mul_(2), k)),
        r"InPlace\.edges\(\) must not change query in place",
    ),
    (ChangesItself, r"ChangesItself\.edges\(\) must not change scale in place"),
    (
        score_of("Random", lambda _, q, k: functional.dropout(product(q, k), 0.5)),
        r"Random\.edges\(\) must give the same logits in every call",
    ),
    (  # the logits of an edge depend on the other edges of the call
        score_of("Centred", lambda _, q, k: product(q, k) - product(q, k).mean(-2, keepdim=True)),
        r"Centred\.edges\(\) must give logits that depend on their own",
    ),
    (OverTheBatch, r"OverTheBatch\.edges\(\) must give logits that depend on their own"),
    (
        score_of("Detached", lambda s, q, k: s.scale.detach() * product(q, k), base=Learned),
        r"Detached\.edges\(\) must give gradients to scale",
    ),
    (
        score_of("ByItem", lambda s, q, k: s.scale[0].item() * product(q, k), base=Learned),
        r"ByItem\.edges\(\) must give gradients to scale",
    ),
    (
        score_of("KeyDetached", lambda _, q, k: product(q, k.detach())),
        r"KeyDetached\.edges\(\) must give gradients to key",
    ),
    (
        score_of("Rounded", lambda _, q, k: product(q.round(), k)),
        r"Rounded\.edges\(\) must give gradients to query",
    ),
    (
        score_of("HalfDetached", lambda _, q, k: product(q, k) * product(q, k).detach()),
        r"HalfDetached\.edges\(\) gives wrong gradients to query",
    ),
    (
        score_of("RootOfZero", lambda _, q, k: -(q - k).square().sum(-1).sqrt()),
        r"RootOfZero\.edges\(\) must give finite gradients .*key is equal to query",
    ),
    (
        score_of("BothZero", lambda _, q, k: product(q, k) / (q.square() + k.square()).sum(-1)),
        r"BothZero\.edges\(\) must give finite gradients .*query and key are 0",
    ),
    (
        score_of("DividedByZero", lambda _, q, k: product(q, k) / q.norm(dim=-1)),
        r"DividedByZero\.edges\(\) must give finite gradients .*query is 0",
    ),
    (
        score_of(
            "PairsDetached", pairs=lambda s, q, k: ga.Score.pairs(s, q, k.detach()), base=Laplacian
        ),
        r"PairsDetached\.pairs\(\) must give gradients to key",
    ),
    (
        score_of(
            "PairsAgainDetached",
            lambda s, q, k: s.scale * product(q, k),
            lambda s, q, k: s.scale.detach()[:, None, None] * (q @ k.mT),
            base=Learned,
        ),
        r"PairsAgainDetached\.pairs\(\) must give gradients to scale",
    ),
    (lambda: Laplacian, r"score must be an instance, got the class Laplacian"),
    (lambda: "rbf", r"score must be a graphattn\.Score"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_a_wrong_score_is_told_which_method_is_wrong(make, words: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + words):
        ga.check_score(make(), heads=3, head_dim=4)


def test_heads_and_features_are_checked() -> None:
    with pytest.raises(ValueError, match="heads must be >= 1, got 0"):
        ga.check_score(Laplacian(), heads=0, head_dim=4)
    with pytest.raises(ValueError, match="head_dim must be an integer"):
        ga.check_score(Laplacian(), heads=2, head_dim=4.0)


@pytest.mark.parametrize("backend", ["reference", "structured"])
@pytest.mark.parametrize(
    ("make", "cause"),
    [(OutOfRange, IndexError), (OtherHeads, RuntimeError), (OneArgument, TypeError)],
)
def test_errors_of_a_score_inside_an_operation_name_the_score(make, cause, backend: str) -> None:
    query = torch.randn(6, 3, 4)
    with pytest.raises(
        ValueError, match=rf"{make.__name__}\.edges\(\) must give .*{cause.__name__}.*check_score"
    ) as caught:
        ga.score_attention(query, query, query, ga.causal_graph(6), make(), backend=backend)
    assert isinstance(caught.value.__cause__, cause)


def test_candidates_of_a_score_with_a_parameter_alone_have_gradients_to_it() -> None:
    """The score does not say what it learns; query and key need no gradient."""

    class Scaled(Learned):
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            return self.scale * (query * key).sum(-1)

    score, query, graph = Scaled(), torch.randn(6, 3, 4), ga.causal_graph(6)
    logits, index = candidates_by_score(query, query, graph, 2, score)
    (found,) = torch.autograd.grad(logits[index >= 0].sum(), score.scale)
    products = torch.einsum("ihd,jhd->hij", query, query)
    pairs = (2 * products).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).topk(2).values
    expected = pairs.masked_fill(pairs == -torch.inf, 0).sum((1, 2)) / 2  # scale is 2
    torch.testing.assert_close(found, expected)


def test_a_score_inside_a_layer_and_a_step_is_named_too() -> None:
    class Layer(ga.nn.DotProductAttention):
        def score(self) -> ga.Score:
            return OutOfRange()

    layer, x = Layer(12, heads=3), torch.randn(1, 6, 12)
    with pytest.raises(ValueError, match=r"OutOfRange\.edges\(\) must give"):
        layer(x, ga.causal_graph(6))
    cache = layer.init_cache(1, 4)
    with pytest.raises(ValueError, match=r"OutOfRange\.edges\(\) must give"):
        layer.step(x[:, 0], cache)


def test_logits_may_be_infinite_where_an_edge_is_to_have_no_weight() -> None:
    class Positive(ga.Score):
        def edges(self, query: Tensor, key: Tensor) -> Tensor:
            logits = (query * key).sum(-1)
            return logits.masked_fill(logits < 0, -torch.inf)

        def pairs(self, query: Tensor, key: Tensor) -> Tensor:
            logits = query @ key.mT
            return logits.masked_fill(logits < 0, -torch.inf)

    ga.check_score(Positive(), heads=3, head_dim=4)
