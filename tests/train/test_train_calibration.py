"""Calibration: how sure a model is, beside how often it is right."""

import math

import numpy as np
import pytest
import torch
from draws import generator
from sklearn.calibration import calibration_curve

import graphattn as ga


def guesses(n: int = 3000, k: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(n, k, generator=generator(), dtype=torch.float64)
    return logits, torch.randint(k, (n,), generator=generator(1))


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_bins_are_those_of_scikit_learn_and_the_error_that_of_a_plain_loop(bins):
    logits, truth = guesses()
    calibration = ga.train.Calibration(bins)
    for some in torch.arange(len(truth)).split(700):  # added up over batches
        calibration.add(logits[some], truth[some])
    sure, guess = logits.softmax(1).max(1)
    right = (guess == truth).numpy()
    accuracy, confidence = calibration_curve(right, sure.numpy(), n_bins=bins)
    rows = calibration.rows()
    np.testing.assert_allclose([row["accuracy"] for row in rows], accuracy)
    np.testing.assert_allclose([row["confidence"] for row in rows], confidence)
    error = 0.0
    for k in range(bins):
        inside = (sure.numpy() > k / bins) & (sure.numpy() <= (k + 1) / bins)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - sure.numpy()[inside].mean())
    assert calibration.error == pytest.approx(error, rel=1e-9)
    assert int(calibration.counts.sum()) == len(truth)
    assert calibration.accuracy.isnan().sum() == bins - len(rows)


def test_truth_drawn_from_the_model_is_calibrated_and_sharper_logits_are_not():
    logits, _ = guesses(40_000)
    truth = torch.multinomial(logits.softmax(1), 1, generator=generator(2))[:, 0]
    honest, sharp = ga.train.Calibration(), ga.train.Calibration()
    honest.add(logits, truth)
    sharp.add(3 * logits, truth)
    assert honest.error < 0.02 < 0.1 < sharp.error


def test_a_sure_guess_is_in_the_last_bin_and_one_that_is_always_right_has_no_error():
    calibration = ga.train.Calibration(10)
    calibration.add(torch.tensor([[math.inf, 0.0], [90.0, 0.0]])[1:], torch.tensor([0]))
    assert calibration.rows() == [
        {"from": 0.9, "to": 1.0, "count": 1, "confidence": 1.0, "accuracy": 1.0}
    ]
    assert calibration.error == 0


def test_a_bin_holds_its_upper_border_and_what_is_too_sure_makes_up_for_nothing():
    calibration = ga.train.Calibration(2)
    calibration.add(torch.zeros(3, 2), torch.zeros(3).long())  # half sure, always right
    assert calibration.counts.tolist() == [3, 0]
    calibration.add(torch.tensor([[9.0, 0.0]]).expand(3, 2), torch.ones(3).long())  # all wrong
    assert calibration.error == pytest.approx((0.5 + 1 / (1 + math.exp(-9))) / 2)


def test_the_guesses_of_an_objective_are_those_of_its_evaluation():
    torch.manual_seed(0)
    model = ga.models.ProteinModel(16, 1, 2, dropout=0.3).train()
    objective = ga.train.MaskedTokens(21, "betalinear30")
    batches = [
        objective.collate([{"tokens": torch.randint(20, (n,), generator=generator(n))}])
        for n in (50, 70)
    ]
    calibration = ga.train.Calibration.of(objective, model, batches, seed=4, bins=10)
    evaluated = objective.evaluate(model, batches, seed=4)
    right = float((calibration.accuracy * calibration.counts).nansum())
    assert right / float(calibration.counts.sum()) == pytest.approx(evaluated["accuracy"])
    assert model.training


def test_what_cannot_be_calibrated_is_named():
    with pytest.raises(ValueError, match="objective must be one with guesses"):
        ga.train.Calibration.of(ga.train.ResidueRegression(), torch.nn.Linear(1, 1), [])
    with pytest.raises(ValueError, match="bins must be >= 1"):
        ga.train.Calibration(0)
    with pytest.raises(ValueError, match="error needs at least one guess"):
        _ = ga.train.Calibration().error
    with pytest.raises(ValueError, match=r"shapes \[\*, K\] and \[\*\]"):
        ga.train.Calibration().add(torch.zeros(3, 2), torch.zeros(2).long())
