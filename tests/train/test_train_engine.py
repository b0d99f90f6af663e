"""Training runs: the mathematics of a step, and the order of examples."""

from __future__ import annotations

import itertools

import pytest
import tiny_runs
import torch
import transformers
from torch import nn

import graphattn as ga
from graphattn.train.batches import EndlessBatches

pytestmark = pytest.mark.usefixtures("short_collections")


# The mathematics.


@pytest.mark.long
def test_a_step_is_of_the_mean_over_all_answers_of_all_batches(tmp_path):
    """Compared with a plain loop: AdamW, gradients of the mean, clipped, transformers' schedule."""
    config = tiny_runs.config(tmp_path / "run", steps=5, accumulate=3, clip_norm=0.5)
    data, objective = tiny_runs.examples(), tiny_runs.Certain()
    model = tiny_runs.model(dropout=0.0)
    run = ga.train.fit(model, objective, config, data)

    plain = tiny_runs.model(dropout=0.0)
    optimizer = torch.optim.AdamW(ga.train.parameter_groups(plain, 0.01), lr=config.lr)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, 5)
    lengths = torch.tensor([len(example["tokens"]) for example in data])
    stream = iter(
        EndlessBatches(ga.data.TokenBatches(lengths, config.batch_tokens, seed=config.seed))
    )
    totals, counts = [], []
    for _ in range(config.steps):
        losses = [
            objective.loss(plain, objective.collate([data[i] for i in next(stream)]))
            for _ in range(config.accumulate)
        ]
        totals.append(sum(one.total for one in losses))
        counts.append(sum(one.count for one in losses))
        optimizer.zero_grad()
        (totals[-1] / counts[-1]).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), config.clip_norm)
        optimizer.step()
        schedule.step()
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    logged = [row["loss"] for row in run.training]  # of steps 1 .. 4 and 5
    assert [row["step"] for row in run.training] == [4, 5]
    assert logged[0] == pytest.approx(sum(totals[:4]).item() / sum(counts[:4]), rel=1e-5)
    assert logged[1] == pytest.approx(totals[4].item() / counts[4], rel=1e-5)
    # Adam and clipping hide by which number gradients were divided; their norm does not.
    assert run.training[1]["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_a_loss_that_is_infinite_leaves_the_weights_as_they_were(tmp_path):
    class Infinite(tiny_runs.Certain):
        asked = 0

        def loss(self, *given):
            cost = super().loss(*given)
            self.asked += 1
            return ga.train.Loss(cost.total * (torch.inf if self.asked == 5 else 1), cost.count)

    model = tiny_runs.model(dropout=0.0)
    config = tiny_runs.config(tmp_path / "run", accumulate=1)
    run = ga.train.fit(model, Infinite(), config, tiny_runs.examples())
    assert (run.status, run.step) == ("diverged", 5)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.long
def test_validation_is_what_the_objective_says_of_the_weights_at_that_step(tmp_path):
    reports = []
    held_out, objective = tiny_runs.examples(9, 1), tiny_runs.Hidden()
    lengths = torch.tensor([len(example["tokens"]) for example in held_out])

    def evaluate(model: nn.Module) -> None:
        batches = [
            objective.collate([held_out[i] for i in chosen])
            for chosen in ga.data.TokenBatches(lengths, 48, shuffle=False)
        ]
        reports.append(objective.evaluate(model, batches, seed=0))

    run = tiny_runs.train(tmp_path / "run", steps=7, callbacks=[tiny_runs.At(5, evaluate)])
    first = run.evaluations[0]
    assert first == {"step": 5, "split": "validation", **reports[0]}
    assert [row["step"] for row in run.evaluations] == [5, 7]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_and_then_follows_its_schedule(tmp_path, schedule):
    run = tiny_runs.train(
        tmp_path / "run", schedule=schedule, log_every=1, steps=6, warmup_steps=2, save_every=9
    )
    rates = [row["lr"] / 1e-2 for row in run.training]
    falls = {
        "cosine": [1, 0.853553390593, 0.5, 0.146446609407],
        "linear": [1, 0.75, 0.5, 0.25],
        "constant": [1, 1, 1, 1],
    }[schedule]
    assert rates == pytest.approx([0, 0.5, *falls])


@pytest.mark.long
def test_training_in_bfloat16_keeps_weights_in_float32_and_learns(tmp_path):
    model = tiny_runs.model(dropout=0.0)
    config = tiny_runs.config(tmp_path / "run", steps=40, precision="bfloat16", log_every=10)
    run = ga.train.fit(model, tiny_runs.Certain(), config, tiny_runs.examples())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert run.training[-1]["loss"] < 0.9 * run.training[0]["loss"]
    exact = ga.train.fit(
        tiny_runs.model(dropout=0.0),
        tiny_runs.Certain(),
        config.replace(precision="float32", out=str(tmp_path / "exact")),
        tiny_runs.examples(),
    )
    difference = abs(run.training[0]["loss"] - exact.training[0]["loss"])
    assert 0 < difference < 0.05


@pytest.mark.long
def test_gradient_checkpointing_changes_no_loss(tmp_path):
    runs = [
        tiny_runs.train(tmp_path / str(on), steps=4, log_every=1, gradient_checkpointing=on)
        for on in (False, True)
    ]
    losses = [[row["loss"] for row in run.training] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Order.


def test_batches_without_end_start_anywhere_and_are_shared_among_processes():
    lengths = torch.randint(1, 9, (25,), generator=torch.Generator().manual_seed(0))

    def stream(**options: int) -> list[list[int]]:
        epochs = ga.data.TokenBatches(lengths, 20, seed=3)
        batches = iter(EndlessBatches(epochs, **options))
        return [next(batches) for _ in range(30)]

    whole = stream()
    assert stream(start=17) == stream()[17:] + stream(start=30)[:17]
    assert stream(rank=1, processes=2)[:15] == whole[1::2]
    epoch = len(ga.data.TokenBatches(lengths, 20, seed=3))
    assert sorted(itertools.chain(*whole[:epoch])) == list(range(25))
    second = ga.data.TokenBatches(lengths, 20, seed=3)
    second.set_epoch(1)
    assert whole[epoch : 2 * epoch] == list(second) != whole[:epoch]


@pytest.mark.long
def test_processes_that_load_data_change_nothing(tmp_path, straight):
    assert tiny_runs.train(tmp_path / "run", workers=1).rows == straight.rows


def test_where_no_terminal_is_every_evaluation_is_a_line(tmp_path, capsys):
    run = tiny_runs.train(tmp_path / "night", steps=4, evaluate_every=2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in lines] == ["night: step 2 of 4", "night: step 4 of 4"]
    for line, row in zip(lines, run.evaluations, strict=True):
        assert f"validation {row['loss']:.4g}" in line
    assert lines[0].endswith(" left")
    assert not lines[1].endswith(" left")


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        ("collate", torch.zeros(2), r"Wrong.collate must return a dict, .* got Tensor"),
        ("loss", torch.zeros(()), r"Wrong.loss must return a graphattn.train.Loss.* got Tensor"),
    ],
)
def test_an_objective_that_returns_something_else_is_told_what_it_must(
    tmp_path, name, made, message
):
    wrong = type("Wrong", (tiny_runs.Hidden,), {name: lambda self, *_, **__: made})()
    with pytest.raises(ValueError, match=message):
        ga.train.fit(
            tiny_runs.model(), wrong, tiny_runs.config(tmp_path, steps=1), tiny_runs.examples()
        )


def test_tracks_that_no_example_has_are_refused(tmp_path):
    """Tracks would keep their first weights, and nothing would say so."""
    model = ga.models.ProteinModel(16, depth=1, heads=2, context={"helix": 3, "surface": 2})
    objective = ga.train.MaskedTokens(model.mask_token)
    config = tiny_runs.config(tmp_path / "run", steps=1)
    data = [{"tokens": torch.arange(8), "context": {"surface": torch.randn(8, 2)}}] * 3
    with pytest.raises(ValueError, match="got helix, which is in none of the first 3"):
        ga.train.fit(model, objective, config, data)
    some = {"tokens": torch.arange(8), "context": {"helix": torch.zeros(8).long()}}
    run = ga.train.fit(model, objective, config, [*data, some])
    assert run.status == "finished"
