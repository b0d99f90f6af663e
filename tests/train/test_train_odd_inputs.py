"""Inputs of training that are not as a class hopes: computed as they stand, or refused."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from tiny_runs import config as tiny_config
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga
from graphattn.train.batches import call


class Table(nn.Module):
    """Logits by the token itself: what stands around it changes nothing."""

    def __init__(self, vocab_size: int, outputs: int | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.table = nn.Embedding(vocab_size, outputs or vocab_size)

    def forward(self, tokens: Tensor, valid: Tensor | None = None, **given: object) -> Tensor:
        return self.table(tokens)


# Objectives.


def test_padding_on_any_side_guesses_nothing_in_a_causal_loss():
    model, objective = Table(9).double(), ga.train.NextToken()
    tokens = torch.randint(9, (4, 8), generator=torch.Generator().manual_seed(0))
    valid = torch.ones(4, 8, dtype=torch.bool)
    valid[0, :3] = valid[1, 6:] = valid[2, 3:5] = valid[3, :7] = False
    loss = objective.loss(model, {"tokens": tokens, "valid": valid})
    total, count = 0.0, 0
    for row, real in zip(tokens, valid, strict=True):
        for i in range(1, 8):
            if real[i] and real[i - 1]:
                total -= float(model(row[i - 1]).log_softmax(-1)[row[i]].detach())
                count += 1
    assert loss.count == count == 4 + 5 + 2 + 2 + 0
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-12)


def test_an_evaluation_leaves_every_part_of_a_model_in_its_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Embedding(9, 9))
    objective = ga.train.NextToken()
    batch = objective.collate([{"tokens": torch.arange(9)}])
    modes = [False, True, True]
    for whole in (True, False):
        model.training = whole
        for part, mode in zip(model, modes, strict=True):
            part.training = mode
        first = objective.evaluate(model, [batch])
        assert objective.evaluate(model, [batch]) == first
        assert model.training == whole
        assert [part.training for part in model] == modes


def test_a_calibration_counts_no_guess_without_a_truth():
    calibration = ga.train.Calibration(10)
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for truth in ([0, -100, 2], [0, 1, 4]):
        with pytest.raises(ValueError, match=r"truth must contain choices 0 \.\. 3"):
            calibration.add(logits, torch.tensor(truth))
    with pytest.raises(ValueError, match=r"truth must be an integer tensor, got torch.float32"):
        calibration.add(logits, torch.tensor([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="truth must be an integer tensor, got list"):
        calibration.add(logits, [0, 1, 2])
    with pytest.raises(ValueError, match="logits must be a floating-point tensor"):
        calibration.add(logits.long(), torch.tensor([0, 1, 2]))
    assert int(calibration.counts.sum()) == 0


def test_positions_of_a_pseudo_likelihood_are_numbers_of_tokens():
    model, tokens = Table(6), torch.arange(5)
    for positions in (torch.tensor([0.5]), torch.tensor([True, False, True, False, False])):
        with pytest.raises(ValueError, match="positions must be integers"):
            ga.train.pseudo_log_likelihood(model, tokens, 5, positions=positions)
    one = ga.train.pseudo_log_likelihood(model, tokens, 5, positions=torch.tensor([3, 1]).int())
    torch.testing.assert_close(one, model(torch.tensor(5)).log_softmax(-1)[[3, 1]].detach())


def test_labels_that_are_infinite_are_refused_and_not_taken_for_missing():
    objective = ga.train.ResidueRegression()
    labels = torch.tensor([1.0, math.inf, math.nan])
    with pytest.raises(ValueError, match="labels must be finite, or NaN for missing labels"):
        objective.collate([{"tokens": torch.arange(3), "labels": labels}])
    for mean in ("a", math.nan, None, True):
        with pytest.raises(ValueError, match="mean must be a finite number, got"):
            ga.train.ResidueRegression(mean=mean)
    assert ga.train.ResidueRegression(mean=-2).mean == -2.0


def test_bytes_per_token_may_be_an_array_and_must_be_numbers():
    objective = ga.train.NextToken(numpy.arange(9))
    batch = objective.collate([{"tokens": torch.tensor([8, 0, 3])}])
    assert objective.loss(Table(9), batch).sums["bytes"] == 3
    with pytest.raises(ValueError, match="bytes_per_token must be a number"):
        ga.train.NextToken(["a"])


# Diffusion.


class Reader(Table):
    """Keeps what it was called with."""

    structure = True

    def forward(self, tokens: Tensor, valid: Tensor | None = None, **given: object) -> Tensor:
        self.given = given
        return super().forward(tokens)


def test_diffusion_hands_on_what_examples_hold_beside_their_tokens():
    objective = ga.train.AbsorbingDiffusion(8)
    track = torch.arange(5)
    examples = [
        {
            "tokens": torch.arange(n),
            "positions": torch.arange(n) + 7,
            "context": {"sasa": track[:n]},
        }
        for n in (5, 3)
    ]
    batch = objective.collate(examples)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 8, 8]]
    model = Reader(9)
    objective.loss(model, batch)
    assert model.given["positions"].tolist() == [[7, 8, 9, 10, 11], [7, 8, 9, 0, 0]]
    assert model.given["context"]["sasa"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]
    with pytest.raises(ValueError, match="examples must not contain 'graph'"):
        objective.collate([{"tokens": torch.arange(3), "graph": None}])
    with pytest.raises(ValueError, match="N >= 1"):
        objective.collate([{"tokens": torch.arange(0)}])


def test_diffusion_shows_a_structure_to_models_that_read_structures():
    places = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) * 4
    structure = ga.data.Structure("MKVLAG", places)
    model = ga.models.ProteinModel(16, depth=1, heads=2).eval()
    tokens = model.tokenizer.encode(structure.sequence)
    objective = ga.train.AbsorbingDiffusion(model.mask_token)
    batch = objective.collate([{"tokens": tokens, "structure": structure}] * 2)

    def loss(model: nn.Module, batch: dict[str, object]) -> float:
        generator = torch.Generator().manual_seed(1)
        return float(objective.loss(model, batch, generator).total.detach())

    nn.init.normal_(model.head.weight)
    seen, unseen = loss(model, batch), loss(model, {"tokens": batch["tokens"]})
    assert seen != unseen
    # The same logits by another way: those of masked-token modelling.
    answers, _ = call(model, batch["tokens"], batch)
    torch.testing.assert_close(answers, model(batch["tokens"], structure=batch["structure"]))
    blind = Table(22)
    assert loss(blind, batch) == loss(blind, {"tokens": batch["tokens"]})


# Evaluations and runs.


@pytest.mark.parametrize("mask_token", [0, 3, 8, 20])
def test_frequencies_are_told_wherever_the_mask_stands_in_the_vocabulary(tmp_path, mask_token):
    (tmp_path / "text.txt").write_text("abcdefgh" * 40)
    corpus = ga.data.load_corpus(tmp_path / "text.txt", tokenizer="characters")
    parts = ga.data.split_corpus(corpus, validation=0.2, test=0.0)
    windows = ga.data.Windows(parts["validation"], 8)
    model, objective = Table(max(9, mask_token + 1)), ga.train.MaskedTokens(mask_token)
    report = ga.train.evaluate_model(
        model, objective, windows, train=parts["train"], pseudo_tokens=0
    )
    letters = max(8, mask_token) if mask_token >= 8 else 9
    seen = torch.cat([corpus.tokens(0, 0, 256)]).bincount(minlength=letters)
    share = (seen + 1).double() / (256 + letters)
    asked = corpus.tokens(0, 256, None)
    expected = functional.nll_loss(share.log()[None].expand(len(asked), -1), asked)
    assert report["frequency_loss"] == pytest.approx(float(expected))


def test_an_evaluation_refuses_sizes_that_are_none():
    data = [{"tokens": torch.arange(8)}]
    for options in ({"batch_tokens": 0}, {"batch_tokens": -5}, {"seed": "a"}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            ga.train.evaluate_model(Table(9), ga.train.NextToken(), data, **options)


def fit(tmp_path, train, validation=None, objective=None, **changes):
    config = tiny_config(tmp_path / "run", **{"steps": 2, "batch_tokens": 16, **changes})
    return ga.train.fit(Table(9), objective or ga.train.NextToken(), config, train, validation)


def test_examples_that_no_batch_holds_are_told_before_the_first_step(tmp_path):
    short, long = [{"tokens": torch.arange(8)}] * 3, [{"tokens": torch.arange(20) % 9}]
    for train, validation, name in ((short + long, None, "3 of train"), (short, long, "0 of val")):
        with pytest.raises(ValueError, match=f"batch_tokens must be .* 20 for example {name}"):
            fit(tmp_path, train, validation)
    assert not (tmp_path / "run" / "log.jsonl").read_text()


def test_examples_that_are_none_are_told_by_their_argument(tmp_path):
    example = {"tokens": torch.arange(8)}
    with pytest.raises(ValueError, match=r"train must be a sequence of examples .* got generator"):
        fit(tmp_path, (each for each in [example]))
    with pytest.raises(ValueError, match="validation must be a sequence of examples"):
        fit(tmp_path, [example], iter([example]))
    with pytest.raises(ValueError, match="examples must be dicts, got Tensor"):
        fit(tmp_path, [torch.arange(8)])


class Reports(ga.train.NextToken):
    def __init__(self, reported: dict[str, object]) -> None:
        super().__init__()
        self.reported = reported

    def report(self, mean: float, means: dict[str, float]) -> dict[str, object]:
        return self.reported


@pytest.mark.long
def test_a_report_has_a_loss_and_may_hold_tensors(tmp_path):
    examples = [{"tokens": torch.arange(8)}] * 3
    run = fit(tmp_path / "a", examples, examples, Reports({"loss": torch.tensor(0.5)}))
    assert run.evaluations[-1]["loss"] == 0.5
    with pytest.raises(ValueError, match=r"objective must report a 'loss', got \['nll'\]"):
        fit(tmp_path / "b", examples, examples, Reports({"nll": 1.0}))
