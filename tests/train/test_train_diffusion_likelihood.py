"""Likelihoods of diffusion against exact ones, and samples under judges that are known."""

import itertools
import math

import numpy as np
import pytest
import torch
import transformers
from draws import CHAIN, MASK, V, generator

import graphattn as ga
from graphattn.train import (
    AbsorbingDiffusion,
    GeometricNoise,
    Likelihood,
    LogLinearNoise,
    MarkovChain,
    generative_nll,
    likelihood_bound,
    sample_diffusion,
)
from graphattn.train.diffusion.objective import diffusion_losses

# Almost all noise there is, so that the ends of the integral do not count.
WHOLE = {"log-linear": LogLinearNoise(1e-13), "geometric": GeometricNoise(1e-11, 32.0)}


def integral(model, tokens: torch.Tensor, noise, nodes: int) -> torch.Tensor:
    """The loss of one sequence [N], over all masks and by quadrature over t, in float64."""
    at, weight = np.polynomial.legendre.leggauss(nodes)
    t = torch.tensor((at + 1) / 2)
    masks = torch.tensor(list(itertools.product([False, True], repeat=len(tokens))))
    m = noise.mask_probability(t).unsqueeze(1)
    hidden = masks.sum(-1)
    chance = m**hidden * (-noise.total(t)).exp().unsqueeze(1) ** (len(tokens) - hidden)
    shape = (len(t), len(masks), len(tokens))
    entropy, penalty, _ = diffusion_losses(
        model, tokens.expand(shape), masks.expand(shape), t.unsqueeze(1).expand(shape[:2]), MASK,
        noise,
    )  # fmt: skip
    losses = (entropy + penalty).sum(-1)
    return (torch.tensor(weight / 2).unsqueeze(1) * chance * losses).sum()


@pytest.mark.parametrize(("name", "nodes"), [("log-linear", 4), ("geometric", 200)])
def test_the_integral_of_the_exact_score_is_the_exact_log_likelihood(name, nodes):
    """The integral is -log p for every single sequence: the chain rule averaged over all orders."""
    for tokens in torch.tensor([[0, 0, 1, 2], [2, 1, 0, 0], [1, 1, 1, 1]]):
        exact = float(-CHAIN.log_probability(tokens))
        nats = float(integral(CHAIN, tokens, WHOLE[name], nodes))
        assert nats == pytest.approx(exact, rel=1e-8)


def test_other_scores_bound_it_from_above_in_the_mean():
    """Wrong scores, normalised or of any sum, cost more in the mean over the chain's sequences."""
    everything = torch.tensor(list(itertools.product(range(V), repeat=3)))
    chance = CHAIN.log_probability(everything).exp()
    entropy = float(-(chance * chance.log()).sum())

    def mean(model) -> float:
        return float(
            sum(
                p * integral(model, x, WHOLE["log-linear"], 3)
                for p, x in zip(chance, everything, strict=True)
            )
        )

    assert mean(CHAIN) == pytest.approx(entropy, rel=1e-8)
    other = MarkovChain(torch.full((V, V), 1 / V).double())
    assert mean(other) == pytest.approx(3 * math.log(V), rel=1e-8)
    for factor in (0.5, 1.1):
        nats = mean(lambda tokens, factor=factor: CHAIN(tokens) + math.log(factor))
        # Every token is hidden in the end, which costs its penalty for t in 0 .. 1.
        assert nats == pytest.approx(entropy + 3 * (factor - 1 - math.log(factor)), rel=1e-8)


@pytest.mark.parametrize(
    ("noise", "t_min"),
    [
        (LogLinearNoise(), 1e-3),
        (LogLinearNoise(0.3), 0.2),
        (GeometricNoise(), 1e-3),
        (GeometricNoise(0.3, 2.0), 0.3),
        (GeometricNoise(0.3, 2.0), 0.0),
    ],
    ids=str,
)
def test_even_chances_are_worth_log_v_wherever_the_integral_ends(noise, t_min):
    """All three terms of the bound: shares of masks m(1) - m(t_min), m(t_min) and 1 - m(1)."""
    tokens = torch.randint(V, (40, 25), generator=generator())
    bound = likelihood_bound(
        lambda x: torch.zeros(*x.shape, V + 1), tokens, mask_token=MASK, noise=noise, t_min=t_min,
        samples=32, generator=generator(1),
    )  # fmt: skip
    assert abs(bound.per_token - math.log(V)) < 4 * bound.standard_error
    assert bound.standard_error < 0.03


@pytest.mark.long
@pytest.mark.parametrize("noise", ["log-linear", "geometric"])
def test_the_bound_of_the_exact_score_is_near_the_log_likelihood(noise):
    tokens = CHAIN.sample((300, 6), generator())
    exact = float(-CHAIN.log_probability(tokens).sum()) / tokens.numel()
    bound = likelihood_bound(CHAIN, tokens, mask_token=MASK, noise=noise, generator=generator(1))
    assert abs(bound.per_token - exact) < 4 * bound.standard_error + 2e-3
    assert bound.standard_error < 0.02
    assert bound.perplexity == pytest.approx(math.exp(bound.per_token))
    assert bound.num_tokens.tolist() == [6] * 300


@pytest.mark.long
def test_the_standard_error_is_that_of_repeated_estimates():
    tokens = CHAIN.sample((4, 6), generator())
    draws = generator(1)
    bounds = [
        likelihood_bound(CHAIN, tokens, mask_token=MASK, samples=8, generator=draws)
        for _ in range(150)
    ]
    spread = np.std([x.per_token for x in bounds], ddof=1)
    claimed = math.sqrt(np.mean([x.standard_error**2 for x in bounds]))
    assert claimed == pytest.approx(spread, rel=0.3)


@pytest.mark.long
def test_the_objective_estimates_the_same_bound():
    tokens = CHAIN.sample((200, 6), generator())
    objective = AbsorbingDiffusion(MASK)
    losses = [
        float(objective.loss(CHAIN, {"tokens": tokens}, generator(k)).mean) for k in range(40)
    ]
    bound = likelihood_bound(CHAIN, tokens, mask_token=MASK, generator=generator(1))
    error = math.hypot(np.std(losses, ddof=1) / math.sqrt(40), bound.standard_error)
    assert abs(np.mean(losses) - bound.per_token) < 4 * error + 2e-3


@pytest.mark.long
def test_padding_is_not_counted_and_batches_do_not_matter():
    valid = torch.arange(7) < torch.tensor([[7], [2], [4]])
    tokens = torch.randint(V, (3, 7), generator=generator()).masked_fill(~valid, MASK)

    def poisoned(inputs, valid):
        logits = torch.zeros(*inputs.shape, V)
        return logits.masked_fill(~valid.unsqueeze(-1), torch.nan)

    for batch_size in (1, 2, 64):
        bound = likelihood_bound(
            poisoned, tokens, mask_token=MASK, valid=valid, batch_size=batch_size, samples=200,
            generator=generator(1),
        )  # fmt: skip
        assert bound.num_tokens.tolist() == [7, 2, 4]
        assert bound.nats.isfinite().all()
        assert abs(bound.per_token - math.log(V)) < 4 * bound.standard_error
    shaped = likelihood_bound(
        poisoned, tokens.view(3, 1, 7), mask_token=MASK, valid=valid.view(3, 1, 7)
    )
    assert shaped.nats.shape == shaped.num_tokens.shape == (3, 1)


def test_an_encoder_is_bounded_without_dropout_and_the_same_twice():
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 16, depth=1, heads=2, noise_dim=8, dropout=0.5)
    tokens = torch.randint(8, (2, 10))
    first, again = (
        likelihood_bound(model, tokens, mask_token=8, samples=4, generator=generator())
        for _ in range(2)
    )
    assert torch.equal(first.nats, again.nats)
    assert model.training


# Generative likelihood.


def test_an_oracle_says_what_samples_are_worth():
    samples = CHAIN.sample((50, 6), generator())
    judged = generative_nll(samples, CHAIN.log_probability, batch_size=7)
    torch.testing.assert_close(judged.nats, -CHAIN.log_probability(samples))
    per_token = -CHAIN.log_probability(samples) / 6
    assert judged.per_token == pytest.approx(float(per_token.mean()))
    assert judged.standard_error == pytest.approx(float(per_token.std()) / math.sqrt(50))
    assert judged.num_tokens.tolist() == [6] * 50


@pytest.mark.parametrize("start_token", [None, 5])
def test_a_causal_model_judges_every_token_after_those_before_it(start_token):
    torch.manual_seed(0)
    judge = ga.models.CausalLM(9, 16, depth=1, heads=2, dropout=0.5)
    samples = torch.randint(9, (3, 7), generator=generator())
    valid = torch.arange(7) < torch.tensor([[7], [3], [1]])
    judged = generative_nll(
        samples.masked_fill(~valid, 77), judge, valid=valid, start_token=start_token, batch_size=2
    )
    assert judge.training
    judge.eval()
    for row, n, nats, count in zip(
        samples.tolist(), (7, 3, 1), judged.nats, judged.num_tokens, strict=True
    ):
        text = ([] if start_token is None else [start_token]) + row[:n]
        expected = 0.0
        for k in range(1, len(text)):
            logits = judge(torch.tensor([text[:k]]))[0, -1]
            expected -= float(logits.log_softmax(-1)[text[k]])
        assert float(nats) == pytest.approx(expected, abs=1e-4)
        assert int(count) == len(text) - 1


def test_a_model_of_transformers_judges_as_its_own_loss_does():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    judge = transformers.GPT2LMHeadModel(config).eval()
    samples = torch.randint(11, (4, 9), generator=generator())
    judged = generative_nll(samples, judge)
    expected = float(judge(samples, labels=samples).loss)
    assert judged.per_token == pytest.approx(expected, abs=1e-5)


def test_samples_of_the_right_model_are_worth_its_entropy_and_others_are_not():
    samples = sample_diffusion(CHAIN, (500, 6), 60, mask_token=MASK, generator=generator())
    everything = torch.tensor(list(itertools.product(range(V), repeat=6)))
    log_p = CHAIN.log_probability(everything)
    entropy = float(-(log_p.exp() * log_p).sum()) / 6
    right = generative_nll(samples, CHAIN.log_probability)
    assert abs(right.per_token - entropy) < 4 * right.standard_error
    even = generative_nll(torch.randint(V, (500, 6), generator=generator()), CHAIN.log_probability)
    assert even.per_token > entropy + 10 * even.standard_error


def test_a_likelihood_says_what_it_is():
    likelihood = Likelihood(torch.tensor([3.0, 5.0]), torch.tensor([2, 6]), 0.25)
    assert likelihood.per_token == 1.0
    assert repr(likelihood) == "Likelihood(1.0000 +- 0.2500 nats per token, 2 sequences)"
    assert Likelihood(torch.tensor([1e6]), torch.tensor([1]), 0.0).perplexity == math.inf


GOOD = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": torch.zeros(2, 5)}, "tokens must be an int32 or int64"),
        ({"tokens": torch.zeros(0, 5).long()}, "not empty"),
        ({"tokens": GOOD + MASK}, "tokens must not contain mask_token, 3"),
        ({"tokens": GOOD + 7}, "tokens must be 0 .. 2, got 7"),
        ({"samples": 3}, "samples must be an even number >= 2, got 3"),
        ({"samples": 0}, "samples must be >= 2"),
        ({"t_min": -0.1}, "t_min must be"),
        ({"noise": None}, "noise must be one of"),
        ({"valid": torch.ones(2, 4).bool()}, "valid .* must have shape"),
        ({"generator": 0}, "generator must be a torch.Generator"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_bad_arguments_of_the_bound_are_named(change, says):
    with pytest.raises(ValueError, match=says):
        likelihood_bound(CHAIN, **{"tokens": GOOD, "mask_token": MASK, **change})


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"samples": torch.zeros(2, 5)}, "samples must be an int32 or int64"),
        ({"samples": GOOD + 3}, "tokens must be 0 .. 2, got 3"),
        ({"judge": CHAIN, "samples": GOOD + 9}, "samples or start_token must be 0 .. 2, got 9"),
        ({"judge": lambda x: x}, "judge must return floating-point logits"),
        ({"start_token": 1}, "valid and start_token must be None"),
        ({"valid": torch.arange(5) < 3}, "valid and start_token must be None"),
        ({"valid": torch.arange(5) > 3}, "valid must be False only at the end of a sample"),
        ({"start_token": -1}, "start_token must be >= 0"),
    ],
)
def test_bad_arguments_of_the_judging_are_named(change, says):
    with pytest.raises(ValueError, match=says):
        generative_nll(**{"samples": GOOD, "judge": CHAIN.log_probability, **change})
