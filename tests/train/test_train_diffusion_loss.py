"""Absorbing diffusion as an objective: the noise, the score entropy, and what a batch loses."""

import math

import numpy as np
import pytest
import torch
from draws import generator
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

import graphattn as ga
from graphattn.train import (
    AbsorbingDiffusion,
    GeometricNoise,
    LogLinearNoise,
    absorbing_log_scores,
    denoising_score_entropy,
    score_entropy,
)
from graphattn.train.diffusion.calling import takes_noise_level
from graphattn.train.diffusion.objective import diffusion_losses

NOISES = [LogLinearNoise(), LogLinearNoise(0.2), GeometricNoise(), GeometricNoise(0.05, 3.0)]


class Spy(torch.nn.Module):
    """A model of fixed random logits per token and place that remembers what it was given."""

    def __init__(self, vocab_size: int, length: int, scale: float = 1.0) -> None:
        super().__init__()
        shape = (vocab_size, length, vocab_size)
        self.table = torch.nn.Parameter(torch.randn(shape, generator=generator(7)) * scale)
        self.calls: list[dict] = []

    def forward(self, tokens, noise_level, valid=None):
        self.calls.append({"tokens": tokens, "noise_level": noise_level, "valid": valid})
        return self.table[tokens, torch.arange(tokens.shape[-1])]


# Noise.


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_the_rate_is_the_derivative_and_the_weight_is_its_share(noise):
    t = torch.linspace(0.01, 1, 50, dtype=torch.float64, requires_grad=True)
    total = noise.total(t)
    (derivative,) = torch.autograd.grad(total.sum(), t)
    torch.testing.assert_close(noise.rate(t), derivative, rtol=1e-10, atol=0)
    torch.testing.assert_close(noise.mask_probability(t), 1 - (-total).exp())
    torch.testing.assert_close(noise.weight(t), derivative / (total.exp() - 1), rtol=1e-9, atol=0)
    ends = noise.total(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert noise.range() == pytest.approx(ends.tolist())


def test_the_schedules_are_those_of_the_paper():
    t = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    log_linear = [-math.log(1 - (1 - 1e-3) * x) for x in t.tolist()]
    geometric = [1e-4 ** (1 - x) * 20**x for x in t.tolist()]
    assert LogLinearNoise().total(t).tolist() == pytest.approx(log_linear, rel=1e-12)
    assert GeometricNoise().total(t).tolist() == pytest.approx(geometric, rel=1e-12)


# Score entropy.


@given(st.floats(0, 5), st.floats(-4, 3))
def test_score_entropy_is_zero_at_the_exact_ratio_and_its_gradient_is_the_difference(r, log_s):
    at = torch.tensor(log_s, dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor(r, dtype=torch.float64)
    cost = score_entropy(at, ratio)
    cost.backward()
    s = math.exp(log_s)
    assert float(at.grad) == pytest.approx(s - r, abs=1e-12)
    assert float(cost) >= -1e-12
    assert float(score_entropy(ratio.log(), ratio)) == pytest.approx(0, abs=1e-12)
    if r > 0:
        assert float(cost) == pytest.approx(s - r * log_s + r * (math.log(r) - 1), abs=1e-12)


@pytest.mark.parametrize("mask_token", [0, 2, 4, 5])
@pytest.mark.parametrize("sigma", [1e-3, 0.7, 12.0])
def test_denoising_score_entropy_is_the_sum_of_score_entropies(mask_token, sigma):
    """The true ratio at a place is 1 / (exp(sigma) - 1) for the hidden token, 0 for all others."""
    logits = torch.randn(2, 6, 5, dtype=torch.float64, generator=generator(), requires_grad=True)
    real = [v for v in range(5) if v != mask_token]
    tokens = torch.tensor(real)[torch.randint(len(real), (2, 6), generator=generator(1))]
    masked = torch.rand(2, 6, generator=generator(2)) < 0.5
    level = torch.full((2,), sigma, dtype=torch.float64)
    entropy = denoising_score_entropy(logits, tokens, masked, level, mask_token)

    ratio = torch.nn.functional.one_hot(tokens, 5) / (math.exp(sigma) - 1)
    log_scores = logits - math.log(len(real)) - math.log(math.exp(sigma) - 1)
    expected = score_entropy(log_scores, ratio)[..., real].sum(-1) * masked
    torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-9)
    gradient, own_gradient = (torch.autograd.grad(x.sum(), logits)[0] for x in (entropy, expected))
    torch.testing.assert_close(gradient, own_gradient, rtol=1e-5, atol=1e-9)

    log_s = absorbing_log_scores(logits, level.unsqueeze(-1), mask_token)
    torch.testing.assert_close(log_s[..., real], log_scores[..., real])
    if mask_token < 5:
        assert (log_s[..., mask_token] == -torch.inf).all()
        assert not gradient[..., mask_token].any()


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_two_tokens_lose_what_the_closed_form_says_and_least_at_the_exact_ratio(noise):
    """One place, tokens of probabilities q: the expected loss, integrated over t.

    By hand, with c_v = exp(z_v) / 2: (m(1) - m(0)) (c_0 + c_1 - 1 - sum q log c), for shares m of
    masks, of which the gradient by z_v is (m(1) - m(0)) (c_v - q_v).
    """
    q = torch.tensor([0.3, 0.7], dtype=torch.float64)
    nodes, weights = np.polynomial.legendre.leggauss(400)
    t = torch.tensor((nodes + 1) / 2)
    quadrature = torch.tensor(weights / 2)
    low, high = (
        float(noise.mask_probability(torch.tensor(x, dtype=torch.float64))) for x in (0, 1)
    )

    def expected(z: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x in (0, 1):
            tokens = torch.full((len(t), 1), x)
            entropy, penalty, _ = diffusion_losses(
                lambda inputs: z.expand(*inputs.shape, 2), tokens, tokens >= 0, t, 2, noise
            )
            losses = (entropy + penalty).squeeze(-1) * noise.mask_probability(t)
            total = total + q[x] * (quadrature * losses).sum()
        return total

    def by_hand(time: float, z: list[float]) -> float:
        """d sigma P(masked) [s_0 + s_1 - log(s_x) a + a (log a - 1)], a = 1 / (exp(sigma) - 1)."""
        at = torch.tensor(time, dtype=torch.float64)
        sigma, rate = float(noise.total(at)), float(noise.rate(at))
        a = 1 / math.expm1(sigma)
        s = [math.exp(value) / 2 * a for value in z]
        crossed = sum(float(q[x]) * math.log(s[x]) for x in (0, 1))
        return rate * -math.expm1(-sigma) * (sum(s) - a * crossed + a * (math.log(a) - 1))

    z = torch.tensor([0.4, -0.9], dtype=torch.float64, requires_grad=True)
    c = z.exp() / 2
    loss = expected(z)
    closed = (high - low) * (c.sum() - 1 - (q * c.log()).sum())
    torch.testing.assert_close(loss, closed, rtol=1e-9, atol=0)
    numeric = integrate.quad(by_hand, 0, 1, args=(z.tolist(),), epsabs=1e-10, limit=200)[0]
    assert float(loss) == pytest.approx(numeric, rel=1e-7)
    (gradient,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(gradient, ((high - low) * (c - q)).detach(), rtol=1e-8, atol=0)

    best = (2 * q).log().requires_grad_()
    least = expected(best)
    entropy = -(q * q.log()).sum()
    torch.testing.assert_close(least, (high - low) * entropy, rtol=1e-9, atol=0)
    assert torch.autograd.grad(least, best)[0].abs().max() < 1e-9


# The objective.


def test_normalised_scores_lose_masked_cross_entropy_with_the_weight_1_over_t():
    model = Spy(9, 12)
    objective = AbsorbingDiffusion(8, t_min=0.0, noise_options={"eps": 1e-6})
    tokens = torch.randint(8, (5, 12), generator=generator())

    def normalised(inputs, noise_level):
        logits = model(inputs, noise_level)[..., :8]
        return logits.log_softmax(-1) + math.log(8)

    loss = objective.loss(normalised, {"tokens": tokens}, generator(3))
    (seen,) = model.calls
    t = 1 - (-seen["noise_level"].double()).exp()
    masked = seen["tokens"] == 8
    assert 0 < masked.sum() < masked.numel()
    logits = model.table[seen["tokens"], torch.arange(12)][..., :8].double()
    expected = sum(
        torch.nn.functional.cross_entropy(logits[b, n], tokens[b, n]) / t[b]
        for b in range(5)
        for n in range(12)
        if masked[b, n]
    )
    assert float(loss.total) == pytest.approx(float(expected), rel=1e-4)
    assert loss.count == 60
    assert loss.sums["masked"] == int(masked.sum())
    assert loss.sums["normalization"] == pytest.approx(0, abs=1e-3)


def test_scores_that_sum_to_another_number_lose_more():
    model = Spy(9, 12)
    objective = AbsorbingDiffusion(8)
    batch = {"tokens": torch.randint(8, (5, 12), generator=generator())}
    losses = [
        objective.loss(
            lambda x, shift=shift: model(x, None).log_softmax(-1) + shift, batch, generator()
        )
        for shift in (math.log(8) - 1, math.log(8) + 1)
    ]
    assert all(loss.sums["normalization"] > 0 for loss in losses)
    cross_entropies = [float(x.total) - x.sums["normalization"] for x in losses]
    assert cross_entropies[0] == pytest.approx(cross_entropies[1], rel=1e-5)


@pytest.mark.parametrize("noise", ["log-linear", "geometric"])
def test_the_loss_is_an_unbiased_estimate_of_its_integral(noise):
    """Even chances lose log V in the mean, less the share that is masked before t_min."""
    objective = AbsorbingDiffusion(4, noise, t_min=0.2)
    zeros = torch.zeros(1, 1, 5)
    tokens = torch.randint(4, (200, 40), generator=generator())
    draws = generator(1)
    losses = torch.stack(
        [
            objective.loss(lambda x: zeros.expand(*x.shape, 5), {"tokens": tokens}, draws).mean
            for _ in range(30)
        ]
    )
    before = float(objective.noise.mask_probability(torch.tensor(0.2)))
    error = float(losses.std()) / math.sqrt(len(losses))
    assert abs(float(losses.mean()) - (1 - before) * math.log(4)) < 4 * error
    assert error < 0.02


def test_times_of_a_batch_are_even_where_asked_for_and_uniform_always():
    tokens = torch.zeros(10, 3, dtype=torch.long)
    even = AbsorbingDiffusion(1)
    spread = even.times(tokens, generator=generator()).sort().values
    torch.testing.assert_close(spread.diff(), torch.full((9,), 0.0999))
    draws = generator(1)
    for objective in (even, AbsorbingDiffusion(1, low_discrepancy=False)):
        t = torch.stack([objective.times(tokens, generator=draws) for _ in range(4000)])
        assert ((t >= 1e-3) & (t <= 1)).all()
        assert (t.mean(0) - 0.5005).abs().max() < 5 * 0.2886 / math.sqrt(4000)
    independent = AbsorbingDiffusion(1, low_discrepancy=False).times(tokens, generator=generator())
    assert independent.sort().values.diff().std() > 0.01


def test_padding_is_not_read_not_masked_and_not_counted():
    objective = AbsorbingDiffusion(8)
    examples = [{"tokens": torch.randint(8, (n,), generator=generator(n))} for n in (12, 5, 9)]
    batch = objective.collate(examples)
    assert batch["valid"].sum(-1).tolist() == [12, 5, 9]
    for row, example in zip(batch["tokens"], examples, strict=True):
        n = len(example["tokens"])
        assert torch.equal(row[:n], example["tokens"])
        assert (row[n:] == 8).all()
    model = Spy(9, 12)

    def poisoned(tokens, noise_level, valid):
        return model(tokens, noise_level, valid).masked_fill(~valid.unsqueeze(-1), torch.nan)

    loss = objective.loss(poisoned, batch, generator())
    assert loss.count == 26
    assert loss.total.isfinite()
    assert loss.sums["masked"] == int((model.calls[0]["tokens"] == 8)[batch["valid"]].sum())
    equal = objective.collate([{"tokens": torch.arange(4)}] * 2)
    assert set(equal) == {"tokens"}


def test_packed_sequences_lose_what_they_lose_alone():
    """Each has a time of its own; the model sees its noise at every token."""
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 16, depth=2, heads=2, noise_dim=8).double()
    for parameter in model.parameters():  # gates start at 0
        torch.nn.init.normal_(parameter, std=0.3, generator=generator())
    lengths, noise = torch.tensor([7, 3, 5]), LogLinearNoise()
    tokens = torch.randint(8, (15,), generator=generator())
    graph = ga.batch([ga.complete_graph(int(n)) for n in lengths])
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    t = AbsorbingDiffusion(8).times(tokens, lengths, generator(1)).double()
    masked = torch.rand(15, generator=generator(2)) < 0.5
    packed, penalty, _ = diffusion_losses(
        model, tokens, masked, t, 8, noise, graph=graph, positions=positions
    )
    assert len(t.unique()) == 3
    first = 0
    for n in lengths.tolist():
        here = slice(first, first + n)
        alone, own_penalty, _ = diffusion_losses(
            model, tokens[here], masked[here], t[first], 8, noise
        )
        torch.testing.assert_close(packed[here], alone)
        torch.testing.assert_close(penalty[here], own_penalty)
        first += n
    batch = {"tokens": tokens, "lengths": lengths, "graph": graph, "positions": positions}
    loss = AbsorbingDiffusion(8).loss(model, batch, generator())
    assert loss.count == 15
    assert loss.total.isfinite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_scored_in_float32(dtype):
    logits = (torch.randn(1, 4000, 50, generator=generator()) * 4).to(dtype)
    tokens = torch.randint(49, (1, 4000), generator=generator())
    everything = torch.ones(1, 4000, dtype=torch.bool)
    level = torch.tensor([1e-3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        entropy = denoising_score_entropy(logits, tokens, everything, level, 49)
    exact = denoising_score_entropy(logits.double(), tokens, everything, level.double(), 49)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy.double(), exact, rtol=1e-5, atol=0)


def test_nearly_normalised_scores_keep_their_digits_in_float32():
    """S - 1 - log S is (S - 1)^2 / 2 near 1, which subtraction would lose."""
    shift = 1e-3
    logits = torch.full((1, 1, 4), shift)
    none, everything = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    at = torch.tensor([math.log(2)])
    penalty = float(denoising_score_entropy(logits, none, everything, at, 4)) - math.log(4)
    assert penalty == pytest.approx(math.expm1(shift) - shift, abs=3e-7)
    objective = AbsorbingDiffusion(4, t_min=0.5)
    loss = objective.loss(lambda x: logits.expand(*x.shape, 4), {"tokens": none.expand(64, 64)})
    per_masked = loss.sums["normalization"] / loss.sums["masked"]
    assert per_masked == pytest.approx(shift**2 / 2 * 2 / 3, rel=0.02)  # E[t / t] 0.5 / E[t]


def test_training_under_autocast_gives_finite_gradients():
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(28, 16, depth=2, heads=2, noise_dim=8, zero_head=True)
    objective = AbsorbingDiffusion(27, "geometric")
    tokens = torch.randint(27, (3, 20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective.loss(model, {"tokens": tokens})
    loss.mean.backward()
    assert loss.total.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.head.weight.grad[:27].any()
    assert not model.head.weight.grad[27].any()  # the mask has no score


def test_a_model_that_starts_at_zero_starts_at_log_v():
    model = ga.models.SequenceEncoder(28, 16, depth=1, heads=2, noise_dim=8, zero_head=True)
    objective = AbsorbingDiffusion(27)
    tokens = torch.randint(27, (16, 50), generator=generator())
    report = objective.evaluate(model, [{"tokens": tokens}] * 20)
    assert report["loss"] == pytest.approx(math.log(27), rel=0.1)
    assert report["normalization"] == pytest.approx(0, abs=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert 0.4 < report["masked"] < 0.6
    assert objective.evaluate(model, [{"tokens": tokens}] * 20) == report


def test_the_same_generator_gives_the_same_loss_and_nothing_given_is_changed():
    model, objective = Spy(9, 12), AbsorbingDiffusion(8)
    batch = {"tokens": torch.randint(8, (4, 12)), "valid": torch.arange(12) < torch.tensor([[9]])}
    copies = {name: x.clone() for name, x in batch.items()}
    first, again, other = (objective.loss(model, batch, generator(s)).total for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert all(torch.equal(batch[name], copies[name]) for name in batch)
    torch.manual_seed(5)
    default = objective.loss(model, batch).total
    torch.manual_seed(5)
    assert torch.equal(objective.loss(model, batch).total, default)


def test_nothing_masked_loses_the_start_alone_and_has_a_gradient():
    model = Spy(3, 1)
    objective = AbsorbingDiffusion(2, "geometric", noise_options={"sigma_max": 1e-3})
    loss = objective.loss(model, {"tokens": torch.zeros(1, 1, dtype=torch.long)}, generator())
    loss.total.backward()
    assert loss.sums["masked"] == 0
    assert not model.table.grad.any()
    assert float(loss.total) == pytest.approx(math.exp(-1e-3) * math.log(2))


def test_a_noise_level_is_given_to_models_that_take_one():
    with_noise = ga.models.SequenceEncoder(9, 8, depth=1, heads=2, noise_dim=8)
    without = ga.models.SequenceEncoder(9, 8, depth=1, heads=2)
    assert takes_noise_level(with_noise)
    assert not takes_noise_level(without)
    assert not takes_noise_level(torch.compile(without))
    assert takes_noise_level(Spy(3, 4))
    assert takes_noise_level(lambda tokens, noise_level: tokens)
    assert not takes_noise_level(lambda tokens: tokens)
    loss = AbsorbingDiffusion(8).loss(without, {"tokens": torch.randint(8, (2, 5))})
    assert loss.total.isfinite()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: AbsorbingDiffusion(-1), "mask_token must be >= 0"),
        (lambda: AbsorbingDiffusion(8, "cosine"), "noise must be one of 'log-linear', 'geometric'"),
        (
            lambda: AbsorbingDiffusion(8, noise_options={"sigma": 1}),
            "noise_options for noise='log-linear'",
        ),
        (
            lambda: AbsorbingDiffusion(8, LogLinearNoise(), noise_options={"eps": 1}),
            "noise_options must be None",
        ),
        (lambda: AbsorbingDiffusion(8, t_min=1.0), r"t_min must be in \[0, 1\), got 1.0"),
        (lambda: LogLinearNoise(1.0), r"eps must be in \(0, 1\), got 1.0"),
        (lambda: GeometricNoise(2.0, 1.0), "sigma_max must be above sigma_min, 2.0, got 1.0"),
        (lambda: AbsorbingDiffusion(8).collate([]), "examples must contain at least one"),
        (
            lambda: AbsorbingDiffusion(8).collate([{"tokens": torch.zeros(3)}]),
            "must contain 'tokens', an integer tensor .* got torch.float32",
        ),
        (lambda: loss_of(tokens=torch.tensor([[0, 8]])), "tokens must not contain mask_token, 8"),
        (lambda: loss_of(tokens=torch.tensor([[0, -3]] * 50)), r"tokens must be 0 .. 8, got -3"),
        (lambda: loss_of(lengths=torch.tensor([1, 2])), "lengths must be integers"),
        (lambda: loss_of(model=lambda x: x), "model must return floating-point logits"),
        (lambda: loss_of(model=lambda x: torch.zeros(3, 9)), "got torch.float32 of shape"),
        (lambda: score_entropy(torch.zeros(3).long(), torch.zeros(3)), "log_scores must be"),
    ],
)
@pytest.mark.every_case
def test_bad_arguments_are_named(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def loss_of(tokens=None, model=None, **batch):
    tokens = torch.zeros(50, 2, dtype=torch.long) if tokens is None else tokens
    model = model or (lambda x: torch.zeros(*x.shape, 9))
    return AbsorbingDiffusion(8).loss(model, {"tokens": tokens, **batch}, generator())
