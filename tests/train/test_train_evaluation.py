"""How sure an evaluation is: standard errors of losses, and masks that are drawn several times."""

import itertools

import numpy
import pytest
import torch
from scipy.stats import sem
from torch.nn import functional

import graphattn as ga
from graphattn.train.evaluation.baselines import bigram_nats, frequency_nats

VOCAB = 7


def texts(count, length, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [{"tokens": torch.randint(VOCAB, (length,), generator=draws)} for _ in range(count)]


def test_the_error_of_a_loss_is_the_standard_error_of_its_guesses():
    torch.manual_seed(0)
    model = ga.models.CausalLM(VOCAB, dim=16, depth=1, heads=2)
    data = texts(9, 20)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    report = ga.train.evaluate_model(model, ga.train.NextToken(), data, batch_tokens=60)
    assert len(calls) == 3  # the calibration is of the same answers
    with torch.no_grad():
        nats = torch.cat(
            [
                functional.cross_entropy(
                    model(text["tokens"][None])[0, :-1], text["tokens"][1:], reduction="none"
                )
                for text in data
            ]
        )
    assert report["guesses"] == len(nats) == 9 * 19
    assert report["loss"] == pytest.approx(float(nats.mean()), rel=1e-5)
    assert report["loss_error"] == pytest.approx(sem(nats.numpy()), rel=1e-4)


def test_guesses_without_a_model_have_errors_too():
    train, asked = torch.tensor([0, 1, 1, 2, 0, 1]), torch.tensor([1, 0, 1, 2, 2])
    share = (train.bincount(minlength=3) + 1) / 9
    loss, error = frequency_nats(train, asked, 3)
    nats = -share[asked].double().log().numpy()
    assert (loss, error) == pytest.approx((nats.mean(), sem(nats)))
    pairs = -numpy.log([bigram_share(train, a, b) for a, b in itertools.pairwise(asked)])
    loss, error = bigram_nats(train, asked, 3, smoothing=0.5)
    assert (loss, error) == pytest.approx((pairs.mean(), sem(pairs)))
    assert loss == ga.train.bigram_loss(train, asked, 3, smoothing=0.5)


def bigram_share(train, a, b):
    seen = sum(1 for x, y in itertools.pairwise(train) if (x, y) == (a, b))
    return (seen + 0.5) / ((train[:-1] == a).sum() + 1.5)


def test_masks_of_few_tokens_are_drawn_several_times():
    torch.manual_seed(0)
    model = ga.models.ProteinModel(16, depth=1, heads=2)
    objective = ga.train.MaskedTokens(model.mask_token)
    data = texts(2, 30)
    report = ga.train.evaluate_model(model, objective, data, pseudo_tokens=0)
    once = objective.sums_over(model, [objective.collate(data)], seed=0)
    assert 10 * once.count < report["guesses"] < 25 * once.count
    many = objective.sums_over(model, [objective.collate(data)] * 500, seed=1)
    assert abs(report["loss"] - float(many.mean)) < 4 * report["loss_error"]
    # Guesses of a token under several masks are not independent.
    mean, squares = float(many.mean), float(many.squares) / many.count
    assert report["loss_error"] == pytest.approx(((squares - mean**2) / 60) ** 0.5, rel=0.2)
    more = ga.train.evaluate_model(model, objective, texts(80, 60), pseudo_tokens=0)
    assert more["guesses"] < 80 * 60 / 4  # one draw of 15 %


def test_the_error_of_one_guess_is_left_out():
    model = ga.models.CausalLM(VOCAB, dim=16, depth=1, heads=2)
    report = ga.train.evaluate_model(model, ga.train.NextToken(), texts(1, 2))
    assert report["guesses"] == 1
    assert "loss_error" not in report
