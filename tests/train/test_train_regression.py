"""Numbers per token: errors and correlations against scipy and scikit-learn."""

import math

import pytest
import torch
from draws import Table, generator
from scipy.stats import pearsonr
from sklearn.metrics import mean_absolute_error, mean_squared_error

import graphattn as ga

NAN = torch.nan


def examples(targets: int = 1, lengths=(30, 12, 21), missing: float = 0.3) -> list[dict]:
    random = generator()
    made = []
    for n in lengths:
        labels = 50 + 20 * torch.randn(n, targets, generator=random)
        labels[torch.rand(n, targets, generator=random) < missing] = NAN
        tokens = torch.randint(9, (n,), generator=random)
        made.append({"tokens": tokens, "labels": labels[:, 0] if targets == 1 else labels})
    return made


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("error", ["mse", "mae"])
def test_errors_and_correlation_are_those_of_scipy_and_scikit_learn(error, targets):
    model = Table(torch.randn(9, targets, generator=generator(1), dtype=torch.float64))
    objective = ga.train.ResidueRegression(targets, error, mean=45.0, std=18.0)
    one, other, third = examples(targets)
    batches = [objective.collate([one, other]), objective.collate([third])]
    report = objective.evaluate(model, batches)
    answers = torch.cat(
        [model.table[example["tokens"]].detach() for example in (one, other, third)]
    )
    labels = torch.cat(
        [example["labels"].view(-1, targets) for example in (one, other, third)]
    ).double()
    known = labels.isfinite()
    predicted = (answers * 18 + 45)[known].numpy()
    assert report["mse"] == pytest.approx(mean_squared_error(labels[known], predicted), rel=1e-9)
    assert report["mae"] == pytest.approx(mean_absolute_error(labels[known], predicted), rel=1e-9)
    in_units = report["mse"] / 18**2 if error == "mse" else report["mae"] / 18
    assert report["loss"] == pytest.approx(in_units, rel=1e-6)
    correlations = [
        pearsonr(answers[known[:, t], t], labels[known[:, t], t])[0] for t in range(targets)
    ]
    assert report["pearson"] == pytest.approx(sum(correlations) / targets, rel=1e-7)


def test_a_label_that_is_missing_costs_nothing_and_has_no_gradient():
    labels = torch.tensor([[1.0, NAN], [NAN, NAN], [NAN, 4.0]])
    batch = {"tokens": torch.tensor([[0, 1, 2]]), "labels": labels[None]}
    model = Table(torch.zeros(3, 2))
    loss = ga.train.ResidueRegression(2).loss(model, batch)
    loss.total.backward()
    assert (float(loss.total), loss.count) == (17.0, 2)
    assert model.table.grad.tolist() == [[-2, 0], [0, 0], [0, -8]]


@pytest.mark.parametrize("name", ["encoder", "protein", "causal"])
def test_padding_and_packing_change_nothing(name):
    torch.manual_seed(0)
    made = {
        "encoder": lambda: ga.models.SequenceEncoder(9, 16, 1, 2),
        "protein": lambda: ga.models.ProteinModel(16, 1, 2),
        "causal": lambda: ga.models.CausalLM(9, 16, 1, 2),
    }[name]()
    model = ga.train.WithHead(made, 1).eval()
    padded, packed = (
        ga.train.ResidueRegression(mean=50, std=20, packed=each) for each in (False, True)
    )
    batch = padded.collate(examples())
    losses = [each.loss(model, batch).total for each in (padded, packed)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    alone = sum(padded.loss(model, padded.collate([each])).total for each in examples())
    torch.testing.assert_close(losses[0], alone, rtol=1e-4, atol=1e-4)


def test_a_constant_prediction_has_no_correlation_and_all_labels_missing_no_loss():
    objective = ga.train.ResidueRegression()
    batch = objective.collate(examples())
    assert math.isnan(objective.evaluate(Table(torch.ones(9, 1)), [batch])["pearson"])
    nothing = objective.collate([{"tokens": torch.arange(3), "labels": torch.full((3,), NAN)}])
    model = Table(torch.ones(9, 1))
    loss = objective.loss(model, nothing)
    assert loss.count == 0
    loss.mean.backward()
    assert not model.table.grad.any()


def test_bad_labels_models_and_options_are_named():
    objective = ga.train.ResidueRegression()
    tokens = torch.arange(3)
    with pytest.raises(ValueError, match="examples must contain 'labels'"):
        objective.collate([{"tokens": tokens}])
    with pytest.raises(ValueError, match="labels must be a floating-point tensor"):
        objective.collate([{"tokens": tokens, "labels": tokens}])
    with pytest.raises(ValueError, match=r"one row of 'labels' per token \(3\)"):
        objective.collate([{"tokens": tokens, "labels": torch.zeros(2)}])
    with pytest.raises(ValueError, match="targets=1 numbers per token, got \\[2\\]"):
        objective.collate([{"tokens": tokens, "labels": torch.zeros(3, 2)}])
    batch = objective.collate([{"tokens": tokens, "labels": torch.zeros(3)}])
    with pytest.raises(ValueError, match=r"targets=1 numbers per token, got 9 .*WithHead"):
        objective.loss(ga.models.SequenceEncoder(9, 8, 1, 2), batch)
    for options, says in [
        ({"targets": 0}, "targets must be >= 1"),
        ({"error": "huber"}, "error must be one of 'mse', 'mae'"),
        ({"std": 0}, "std must be a finite number > 0"),
        ({"mean": math.nan}, "mean must be a finite number"),
    ]:
        with pytest.raises(ValueError, match=says):
            ga.train.ResidueRegression(**options)
