"""The layers' state while a model trains: right numbers, and no trace in the training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_runs
import torch
from torch import nn

import graphattn as ga
from graphattn.train import Loss, Objective

LOWEST = "1 - 2 eta lambda_max"


class Call(Objective):
    """The mean square of what a model gives."""

    name = "call"

    def collate(self, examples: Any) -> Any:
        return examples

    def loss(self, model: nn.Module, batch: Any, generator: Any = None) -> Loss:
        outputs = model(**batch)
        return Loss(outputs.square().sum(), outputs.numel())


def mixed(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"depth": 2, "heads": 2, "mixer": "mix", "edge_hidden": 4, **changes}
    return ga.models.SequenceEncoder(9, 8, **options)


def batch(count: int = 2) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(9, (count, 12), generator=torch.Generator().manual_seed(1))}


def consensus_name(model: nn.Module) -> str:
    return next(n for n, m in model.named_modules() if isinstance(m, ga.nn.SelfConsensus))


@pytest.mark.parametrize("step_size", [0.1, 0.4])
def test_step_sizes_of_consensus_are_those_of_its_certificate(step_size):
    model = mixed(step_size=step_size, rope=False)
    given = batch(1)
    name = consensus_name(model)
    row = ga.train.layer_state(model, Call(), [given])["layers"][name]
    certificate = ga.spectral.certify(model, given["tokens"]).parts[name]
    lowest = certificate["low-pass filter"].numbers[LOWEST]
    assert row[LOWEST] == pytest.approx(lowest, rel=1e-3, abs=1e-3)
    assert row["max_step_size"] == pytest.approx(step_size / (1 - lowest), rel=1e-3)


def test_sinks_and_ranks_are_those_of_a_recording():
    model = mixed(mixer="dot")
    given = batch()
    layers = ga.train.layer_state(model, Call(), [given])["layers"]
    with ga.diagnostics.record(model.eval()) as recording:
        model(**given)
    sinks, names = recording.sinks()
    assert list(layers) == list(names)
    for row, sink, rank in zip(
        layers.values(), sinks.mean(-1), recording.effective_rank().values, strict=True
    ):
        assert row["sink_share"] == pytest.approx(float(sink), rel=1e-5)
        assert row["effective_rank"] == pytest.approx(float(rank), rel=1e-5)
        assert (row["max_step_size"], row[LOWEST]) == (None, None)


def test_alpha_max_is_that_of_the_diagnostics_and_of_each_layer_alone():
    model = mixed(mixer="dot").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [{"tokens": batch(3)["tokens"][i : i + 1]} for i in range(3)]
    state = ga.train.layer_state(model, Call(), batches, optimizer=optimizer, max_norm=1.0)
    model.eval()

    def expected(optimizer: torch.optim.Optimizer, given: Any) -> float:
        rates = ga.diagnostics.max_stable_lr(
            model, lambda m, b: Call().loss(m, b).mean, optimizer, [given],
            state_batches=0, warmup_steps=0, steps=1,
        )  # fmt: skip
        return rates.values[0]

    wanted = [expected(optimizer, given) for given in batches]
    assert state["alpha_max"] == pytest.approx(sorted(wanted)[1], rel=1e-6)
    assert state["share_stable"] == sum(value > 1e-3 for value in wanted) / 3
    for name, row in state["layers"].items():
        # Clipping by the norm of all gradients changes u by Adam's epsilon alone.
        alone = torch.optim.AdamW(model.get_submodule(name).parameters(), lr=1e-3)
        wanted = sorted(expected(alone, given) for given in batches)
        assert row["alpha_max"] == pytest.approx(wanted[1], rel=1e-3)


def test_a_quadratic_loss_has_the_rate_of_its_hessian():
    """Gradient descent on |w|^2 with Hessian 2 / n I: the loss falls below the rate n."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0]))

        def forward(self) -> torch.Tensor:
            return self.w

    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    state = ga.train.layer_state(model, Call(), [{}], optimizer=optimizer)
    assert state == {"alpha_max": pytest.approx(4.0), "share_stable": 1.0, "layers": {}}
    optimizer.param_groups[0]["lr"] = 5.0
    assert ga.train.layer_state(model, Call(), [{}], optimizer=optimizer)["share_stable"] == 0


def test_a_loss_that_cannot_be_differentiated_twice_is_measured_by_differences():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * gradient

    class Squares(Objective):
        name = "squares"
        collate = Call.collate

        def loss(self, model: nn.Module, batch: Any, generator: Any = None) -> Loss:
            return Loss(Once.apply(model(**batch)).square().sum(), 4)

    model = nn.Linear(1, 4, bias=False)
    given = {"input": torch.ones(1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = ga.train.layer_state(model, Squares(), [given], optimizer=optimizer)
    w = model.weight.detach()  # of sum w^4 / 4: gradient w^3, Hessian 3 w^2
    wanted = 2 * w.pow(6).sum() / (3 * w.pow(8).sum())
    assert state["alpha_max"] == pytest.approx(float(wanted), rel=1e-2)


def test_frozen_and_absent_layers_have_none_and_no_error():
    model = mixed()
    name = consensus_name(model)
    model.get_submodule(name).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    state = ga.train.layer_state(model, Call(), [batch()], optimizer=optimizer)
    row = state["layers"][name]
    assert (row["alpha_max"], row["share_stable"], row["sink_share"]) == (None, None, None)
    assert row["effective_rank"] > 0
    other = next(row for layer, row in state["layers"].items() if layer != name)
    assert other["alpha_max"] > 0
    plain = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_state = ga.train.layer_state(
        plain, Call(), [{"input": torch.eye(3)}], optimizer=optimizer
    )
    assert plain_state["layers"] == {}
    optimizer.param_groups[0]["lr"] = 0.0
    again = ga.train.layer_state(plain, Call(), [{"input": torch.eye(3)}], optimizer=optimizer)
    assert again == {"alpha_max": None, "share_stable": None, "layers": {}}


def test_padding_counts_for_nothing():
    model = mixed()
    tokens = batch(1)["tokens"]
    longer = torch.cat([tokens, torch.full((1, 5), 3)], dim=1)
    valid = torch.arange(17)[None] < 12
    short = ga.train.layer_state(model, Call(), [{"tokens": tokens}])["layers"]
    padded = ga.train.layer_state(model, Call(), [{"tokens": longer, "valid": valid}])["layers"]
    for name, row in short.items():
        for key in ("sink_share", "effective_rank", "max_step_size", LOWEST):
            wanted = row[key] if row[key] is None else pytest.approx(row[key], rel=2e-3, abs=1e-4)
            assert padded[name][key] == wanted


def test_looking_leaves_the_model_as_it_was():
    model = mixed(dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    Call().loss(model, batch()).mean.backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    torch.manual_seed(5)
    random = torch.get_rng_state()
    ga.train.layer_state(model, Call(), [batch()], optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.long
def test_a_run_with_records_has_the_losses_of_one_without(tmp_path):
    changes = {"steps": 8, "log_every": 1}

    def run(name: str, **more: Any) -> Any:
        torch.manual_seed(0)
        model = ga.models.SequenceEncoder(
            7, 8, depth=2, heads=2, dropout=0.2, mixer="mix", edge_hidden=4
        )
        return ga.train.fit(
            model, tiny_runs.Hidden(), tiny_runs.config(tmp_path / name, **changes, **more),
            tiny_runs.examples(), tiny_runs.examples(9, 1),
        )  # fmt: skip

    without, beside = run("without"), run("with", record_every=3)
    assert beside.training == without.training
    assert beside.evaluations == without.evaluations
    assert [row["step"] for row in beside.layers] == [3, 6]
    for row in beside.layers:
        assert row["alpha_max"] > 0
        assert 0 <= row["share_stable"] <= 1
        assert all(math.isfinite(layer["effective_rank"]) for layer in row["layers"].values())
    files = [tiny_runs.results(run.path) for run in (without, beside)]
    assert files[0]["step-00000008"] == files[1]["step-00000008"]
