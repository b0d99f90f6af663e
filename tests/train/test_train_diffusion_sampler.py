"""Samplers of absorbing diffusion against distributions that are known."""

import itertools
import math

import pytest
import torch
from draws import CHAIN, MASK, TRANSITION, V, generator
from scipy import stats

import graphattn as ga
from graphattn.train import LogLinearNoise, MarkovChain, sample_diffusion


def every_sequence(length: int, vocab_size: int = V) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))


def p_value(samples: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the p-value of a chi-square test of samples [n, N] against `probabilities`.

    There is one probability for every sequence of length N.
    """
    length = samples.shape[-1]
    index = (samples * V ** torch.arange(length - 1, -1, -1)).sum(-1)
    counts = torch.bincount(index, minlength=V**length).double()
    expected = probabilities * len(samples)
    order = expected.argsort()  # the rarest together, so that 5 are expected of each kind
    rare = order[expected[order].cumsum(0) < 5]
    kept = torch.ones(len(expected), dtype=torch.bool)
    kept[rare] = False
    counts, expected = (
        torch.cat([x[kept], x[rare].sum(0, keepdim=True)] if len(rare) else [x])
        for x in (counts, expected)
    )
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


def of_chain(length: int) -> torch.Tensor:
    return CHAIN.log_probability(every_sequence(length)).exp()


# The oracle.


def test_the_chain_knows_its_conditionals_and_its_probabilities():
    everything = every_sequence(4)
    joint = of_chain(4)
    by_hand = [
        float(CHAIN.initial[s[0]])
        * math.prod(float(TRANSITION[a, b]) for a, b in itertools.pairwise(s))
        for s in everything.tolist()
    ]
    assert joint.tolist() == pytest.approx(by_hand)
    assert float(joint.sum()) == pytest.approx(1)
    torch.testing.assert_close(CHAIN.initial @ TRANSITION, CHAIN.initial)
    for seen in itertools.product([*range(V), MASK], repeat=4):
        guesses = CHAIN(torch.tensor(seen)).exp() / V
        for place in range(4):
            fits = torch.ones(len(everything), dtype=torch.bool)
            for other, token in enumerate(seen):
                if other != place and token != MASK:
                    fits &= everything[:, other] == token
            shares = [float(joint[fits & (everything[:, place] == v)].sum()) for v in range(V)]
            assert guesses[place].tolist() == pytest.approx([x / sum(shares) for x in shares])


def test_samples_of_the_chain_are_of_the_chain():
    assert p_value(CHAIN.sample((8000, 4), generator()), of_chain(4)) > 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"transition": torch.ones(2, 2)}, "transition must contain probabilities"),
        ({"transition": torch.ones(2)}, "transition must be a floating-point tensor of 2"),
        (
            {"transition": torch.full((2, 3), 1 / 3), "initial": torch.ones(1)},
            "must have shapes .V, V. and",
        ),
        (
            {"transition": torch.eye(2), "initial": torch.tensor([1.5, -0.5])},
            "initial must contain",
        ),
    ],
)
def test_a_chain_is_made_of_probabilities(change, says):
    with pytest.raises(ValueError, match=says):
        MarkovChain(**change)


# The distribution of samples.


def ancestral(steps: int = 100, seed: int = 0, **changes) -> torch.Tensor:
    return sample_diffusion(
        CHAIN, (3000, 3), steps, mask_token=MASK, generator=generator(seed), **changes
    )


@pytest.mark.long
@pytest.mark.parametrize("method", ["ancestral", "tweedie"])
@pytest.mark.parametrize("noise", ["log-linear", "geometric"])
def test_given_the_exact_posterior_samples_are_of_the_chain(method, noise):
    steps = 100 if noise == "log-linear" else 300  # most of its time hides all, or nothing
    assert p_value(ancestral(steps, method=method, noise=noise), of_chain(3)) > 1e-3


@pytest.mark.long
def test_wrong_samplers_fail_the_same_test():
    joint = of_chain(3)
    independent = ancestral(1)  # everything at once
    assert p_value(independent, joint) < 1e-12
    assert p_value(ancestral(temperature=0.8), joint) < 1e-6
    assert p_value(ancestral(top_p=0.9), joint) < 1e-12
    biased = MarkovChain(TRANSITION, torch.full((V,), 1 / V).double())
    wrong = sample_diffusion(biased, (3000, 3), 100, mask_token=MASK, generator=generator())
    assert p_value(wrong, joint) < 1e-3
    early = LogLinearNoise(eps=0.7)  # 0.7 of all tokens would be there at the start
    assert p_value(ancestral(4, noise=early), joint) < 1e-12


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_few_steps_give_the_mixture_that_they_must(steps):
    """Two places are unmasked in one step, and so independently, with probability sum w_k^2."""
    samples = sample_diffusion(
        CHAIN, (8000, 2), steps, mask_token=MASK, generator=generator(),
        noise=LogLinearNoise(eps=1e-9),
    )  # fmt: skip
    joint = of_chain(2)
    apart = (CHAIN.initial.unsqueeze(1) * CHAIN.initial).flatten()
    together = 1 / steps
    assert p_value(samples, together * apart + (1 - together) * joint) > 1e-3
    if steps > 1:
        assert p_value(samples, joint) < 1e-12


@pytest.mark.long
def test_gaps_are_filled_with_their_distribution_given_the_rest():
    prompt = torch.tensor([MASK, 2, MASK, MASK, 0])
    samples = sample_diffusion(
        CHAIN, (3000, 5), 100, mask_token=MASK, prompt=prompt, generator=generator()
    )
    assert (samples[:, 1] == 2).all()
    assert (samples[:, 4] == 0).all()
    rest = every_sequence(3)
    fixed = torch.tensor([2, 0]).expand(len(rest), 2)
    whole = torch.stack([rest[:, 0], fixed[:, 0], rest[:, 1], rest[:, 2], fixed[:, 1]], -1)
    joint = CHAIN.log_probability(whole).exp()
    assert p_value(samples[:, [0, 2, 3]], joint / joint.sum()) > 1e-3


@pytest.mark.parametrize("steps", [None, 2])
def test_top_probability_draws_the_surest_place_first(steps):
    """Samples follow the distribution of a plain recursion over the states that can be reached."""
    count = {None: [1, 1, 1], 2: [2, 1]}[steps]

    def reach(state: tuple[int, ...], step: int) -> dict[tuple[int, ...], float]:
        if MASK not in state:
            return {state: 1.0}
        guesses = (CHAIN(torch.tensor(state)).exp() / V).tolist()
        gaps = [i for i, token in enumerate(state) if token == MASK]
        surest = sorted(gaps, key=lambda i: -max(guesses[i]))[: count[step]]
        chances: dict[tuple[int, ...], float] = {}
        for drawn in itertools.product(range(V), repeat=len(surest)):
            p = math.prod(guesses[i][v] for i, v in zip(surest, drawn, strict=True))
            following = list(state)
            for i, v in zip(surest, drawn, strict=True):
                following[i] = v
            for end, q in reach(tuple(following), step + 1).items():
                chances[end] = chances.get(end, 0.0) + p * q
        return chances

    start = (MASK, MASK, MASK)
    exact = reach(start, 0)
    probabilities = torch.tensor([exact[tuple(s)] for s in every_sequence(3).tolist()]).double()
    prompt = torch.tensor(start)

    def uneven(tokens: torch.Tensor) -> torch.Tensor:  # that all logits of a place are large
        return CHAIN(tokens) + torch.tensor([[9.0], [0.0], [3.0]])  # makes no token sure

    samples = sample_diffusion(
        uneven, (4000, 3), steps, mask_token=MASK, method="top-probability", prompt=prompt,
        generator=generator(),
    )  # fmt: skip
    assert p_value(samples, probabilities) > 1e-3
    if steps is not None:
        assert p_value(samples, of_chain(3)) < 1e-12


def test_tweedie_unmasks_more_where_scores_sum_to_more():
    """After the first of 10 steps, 0.1 of the tokens are there, times S."""
    seen = []
    for shift in (0.0, math.log(3.0)):
        sample_diffusion(
            lambda tokens, shift=shift: CHAIN(tokens) + shift, (5000, 4), 10, mask_token=MASK,
            method="tweedie", noise=LogLinearNoise(1e-9), generator=generator(),
            progress=lambda step, tokens: seen.append(float((tokens != MASK).double().mean())) or 1,
        )  # fmt: skip
    assert seen == pytest.approx([0.1, 0.3], abs=0.015)


# What a call does.


class Recorder(torch.nn.Module):
    """Zero logits, and what was given; writes into what it was given, as it should not."""

    def __init__(self, vocab_size: int = V + 1) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dropout = torch.nn.Dropout()
        self.tokens, self.levels = [], []

    def forward(self, tokens, noise_level, valid=None):
        assert not self.dropout.training
        assert not self.training
        self.tokens.append(tokens.clone())
        self.levels.append(noise_level)
        tokens.zero_()
        return torch.zeros(*tokens.shape, self.vocab_size)


@pytest.mark.parametrize("method", ["ancestral", "tweedie", "top-probability"])
def test_every_gap_is_filled_and_all_else_stays(method):
    model = Recorder()
    model.dropout.eval()  # its own modes stay, whatever they are
    prompt = torch.tensor([[0, MASK, 2], [1, 1, 1]])
    before = prompt.clone()
    samples = sample_diffusion(
        model, (2, 6), mask_token=MASK, method=method, prompt=prompt, generator=generator()
    )
    assert torch.equal(prompt, before)
    assert samples.shape == (2, 6)
    assert samples.dtype == torch.int64
    assert not (samples == MASK).any()
    assert torch.equal(samples[:, :3][prompt != MASK], prompt[prompt != MASK])
    assert model.training
    assert not model.dropout.training


def test_the_same_generator_draws_the_same_samples():
    for method in ("ancestral", "tweedie", "top-probability"):
        first, again, other = (
            sample_diffusion(CHAIN, (4, 9), mask_token=MASK, method=method, generator=generator(s))
            for s in (0, 0, 1)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    torch.manual_seed(3)
    first = sample_diffusion(CHAIN, (4, 9), mask_token=MASK)
    torch.manual_seed(3)
    assert torch.equal(first, sample_diffusion(CHAIN, (4, 9), mask_token=MASK))


def test_noise_falls_and_is_that_of_the_share_of_masks_where_places_are_chosen():
    model = Recorder()
    sample_diffusion(model, (3, 20), 8, mask_token=MASK, generator=generator())
    levels = torch.stack(model.levels)
    expected = LogLinearNoise().total(1 - torch.arange(8) / 8)
    torch.testing.assert_close(levels, expected.unsqueeze(1).expand(8, 3))

    model = Recorder()
    prompt = torch.tensor([[0, 0, MASK, MASK], [MASK] * 4])
    sample_diffusion(
        model, (2, 4), mask_token=MASK, method="top-probability", prompt=prompt,
        generator=generator(),
    )  # fmt: skip
    shares = torch.stack([(seen == MASK).float().mean(-1) for seen in model.tokens])
    assert shares.T.tolist() == [[0.5, 0.25, 0, 0], [1, 0.75, 0.5, 0.25]]
    level = -torch.log1p(-shares.clamp_max(0.999))
    torch.testing.assert_close(torch.stack(model.levels), level, rtol=1e-4, atol=1e-6)


def test_a_step_that_unmasks_nothing_calls_no_model_and_still_counts():
    model, steps = Recorder(), []
    sample_diffusion(
        model, 3, 100, mask_token=MASK, generator=generator(),
        progress=lambda step, tokens: steps.append(step),
    )  # fmt: skip
    assert len(model.tokens) <= 3
    assert steps == list(range(1, 101))


def test_progress_sees_copies_and_ends_the_sampling():
    seen = []

    def watch(step, tokens):
        seen.append(tokens.clone())
        tokens.fill_(1)
        return step == 3

    samples = sample_diffusion(
        CHAIN, (2, 6), mask_token=MASK, method="top-probability", progress=watch,
        generator=generator(),
    )  # fmt: skip
    assert [(x == MASK).sum().item() for x in seen] == [10, 8, 6]
    assert torch.equal(samples, seen[-1])


def test_padding_is_left_alone_and_the_model_is_told():
    masks = []

    def model(tokens, valid):
        masks.append(valid)
        return CHAIN(tokens)

    valid = torch.arange(5) < torch.tensor([[3], [5]])
    for method in ("ancestral", "top-probability"):
        samples = sample_diffusion(model, (2, 5), mask_token=MASK, method=method, valid=valid)
        assert torch.equal(samples == MASK, ~valid)
    assert all(torch.equal(mask, valid) for mask in masks)


def test_the_likeliest_tokens_at_temperature_zero_and_never_the_mask():
    logits = torch.randn(6, V + 1, generator=generator())
    logits[:, MASK] = 50.0
    for method in ("ancestral", "tweedie", "top-probability"):
        samples = sample_diffusion(
            lambda tokens: logits, 6, mask_token=MASK, method=method, temperature=0
        )
        assert torch.equal(samples, logits[:, :V].argmax(-1))
    middle = sample_diffusion(lambda tokens: logits, 6, mask_token=1, generator=generator())
    assert not (middle == 1).any()


def test_one_number_of_steps_for_all_gaps_fills_them_evenly():
    seen = []
    sample_diffusion(
        CHAIN, (1, 7), 3, mask_token=MASK, method="top-probability",
        progress=lambda step, tokens: seen.append(int((tokens == MASK).sum())),
    )  # fmt: skip
    assert seen == [4, 2, 0]


def test_an_encoder_samples_in_its_own_dtype_and_graph():
    model = ga.models.SequenceEncoder(V + 1, 8, depth=1, heads=2, noise_dim=8).bfloat16()
    for graph in (None, ga.window_path_graph(9, 2, self_loops=True)):
        samples = sample_diffusion(model, (2, 9), 4, mask_token=V, graph=graph)
        assert samples.max() < V


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": ()}, r"shape must be a tuple \(\*, N\), or N, with N >= 1"),
        ({"shape": (2, 0)}, "N >= 1"),
        ({"shape": 2.5}, "shape must be an integer"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"mask_token": -1}, "mask_token must be >= 0"),
        ({"method": "greedy"}, "method must be one of 'ancestral'"),
        ({"noise": "linear"}, "noise must be one of"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"temperature": 0, "top_p": 0.5}, "top_p must be None at temperature 0"),
        ({"generator": 3}, "generator must be a torch.Generator"),
        ({"progress": 3}, "progress must be callable"),
        ({"prompt": torch.zeros(5)}, "prompt must be an int32 or int64"),
        (
            {"prompt": torch.zeros(7).long()},
            r"prompt must have shape \[n\] or \[\*, n\] with n in 1 \.\. 5",
        ),
        ({"prompt": torch.zeros(3, 2).long()}, "prompt must have shape"),
        ({"prompt": torch.tensor(1)}, "prompt must have shape"),
        ({"valid": torch.ones(4).bool()}, "valid .* must have shape"),
        ({"model": lambda x: torch.full((2, 5, 4), torch.nan)}, "model must return finite logits"),
        ({"model": lambda x: torch.zeros(2, 4, 4)}, "model must return floating-point logits"),
        (
            {"model": lambda x: torch.zeros(2, 5, 1), "mask_token": 0},
            "at least one token besides the mask",
        ),
    ],
)
def test_bad_arguments_are_named(change, says):
    with pytest.raises(ValueError, match=says):
        sample_diffusion(**{"model": CHAIN, "shape": (2, 5), "mask_token": MASK, **change})


# A model that learned the chain.


@pytest.mark.long
def test_an_encoder_learns_the_chain_and_its_samples_are_like_it():
    chain = MarkovChain(torch.tensor([[0.85, 0.1, 0.05], [0.05, 0.15, 0.8], [0.6, 0.05, 0.35]]))
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(
        V + 1, 32, depth=2, heads=2, noise_dim=16, zero_head=True
    )  # fmt: skip
    objective = ga.train.AbsorbingDiffusion(MASK)
    optimizer = torch.optim.AdamW(ga.train.parameter_groups(model), lr=3e-3)
    draws = generator()
    for step in range(250):
        rate = 3e-3 * min(1, step / 30) * (1 - step / 250)
        for group in optimizer.param_groups:
            group["lr"] = rate
        examples = [{"tokens": tokens} for tokens in chain.sample((64, 16), draws)]
        optimizer.zero_grad()
        objective.loss(model, objective.collate(examples), draws).mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    held_out = chain.sample((200, 16), generator(9))
    exact = float(-chain.log_probability(held_out).mean()) / 16
    bound = ga.train.likelihood_bound(
        model, held_out, mask_token=MASK, samples=16, generator=generator(1)
    )
    assert abs(bound.per_token - exact) < 4 * bound.standard_error + 0.02
    assert bound.standard_error < 0.02

    samples = sample_diffusion(model, (300, 16), 64, mask_token=MASK, generator=generator(2))
    judged = ga.train.generative_nll(samples, chain.log_probability)
    even = ga.train.generative_nll(torch.randint(V, (300, 16)), chain.log_probability)
    assert abs(judged.per_token - exact) < 0.1 < even.per_token - exact - 0.5
    pairs = torch.nn.functional.one_hot(samples, V).float()
    counts = torch.einsum("bia,bic->ac", pairs[:, :-1], pairs[:, 1:])
    transition = counts / counts.sum(1, keepdim=True)
    assert (transition - chain.transition).abs().max() < 0.12
    assert (pairs.mean((0, 1)) - chain.initial).abs().max() < 0.05
