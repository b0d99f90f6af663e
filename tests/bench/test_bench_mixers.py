"""`graphattn bench mixers` takes models apart, and what it times is what a model does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_helpers import CPU, measured, quick_runs

import graphattn as ga
from graphattn.bench.cases import mixers as mixer_cases
from graphattn.bench.measuring import host_clock, runner
from graphattn.bench.measuring.passes import leaves, one_pass, time_interleaved
from graphattn.bench.models import mixers
from graphattn.bench.models.mixers import (
    MIXERS,
    MixerTruth,
    OperationsRun,
    RestRun,
    WholeRun,
    mixer_inputs,
)
from graphattn.bench.reporting import tables
from graphattn.bench.reporting.record import OURS, Row
from graphattn.cli.bench import chosen
from graphattn.models.mixers import KINDS
from graphattn.ops.backends import wanted_backend

SIZE = {
    "tokens": 40, "dim": 24, "heads": 6, "blocks": 2, "window": 7, "top_k": 5, "edge_hidden": 8,
}  # fmt: skip


def inputs(mixer: str, **changes: int) -> mixers.MixerInputs:
    return mixer_inputs(mixer)({**SIZE, **changes}, CPU, torch.float32)


def gradients(run, x):
    """Compute the gradients of all parameters that a run has read, by name."""
    out = run(x)
    read = leaves(out)
    computed = torch.autograd.grad(out, read, torch.ones_like(out))
    names = {id(p): name for name, p in x.models[OURS].named_parameters()}
    pairs = zip(read, computed, strict=True)
    return {names[id(p)]: gradient for p, gradient in pairs if id(p) in names}


def test_every_mixer_of_the_models_has_a_case_at_both_lengths():
    both = {"dot+krause"}  # its time is that of two others, which have cases
    assert {options["mixer"] for options in MIXERS.values()} == set(KINDS) - both
    assert [case.name for case in chosen(["mixers"])] == [
        f"mixer-{mixer}-{tokens}" for tokens in (2048, 8192) for mixer in MIXERS
    ]
    assert chosen(["mixers-2048"]) + chosen(["mixers-8192"]) == chosen(["mixers"])
    for case in chosen(["mixers"]):
        size = case.size("paper", "cpu")
        assert (size["dim"], size["heads"], size["blocks"]) == (384, 6, 6)
        assert f"-{size['tokens']}" in case.name


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_parts_of_a_model_are_those_of_the_model(mixer):
    """The parts of a model give its features, and gradients that add up to its gradients.

    A weight gets its gradient from either part, or from both in sum.
    """
    x = inputs(mixer)
    whole = gradients(WholeRun(), x)
    torch.testing.assert_close(RestRun()(x), WholeRun()(x), rtol=0, atol=0)
    rest, operations = gradients(RestRun(), x), gradients(OperationsRun(), x)
    assert set(rest) | set(operations) == set(whole)
    for name, gradient in whole.items():
        parts = [part[name] for part in (rest, operations) if name in part]
        torch.testing.assert_close(sum(parts), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_operations_run_no_projection_and_all_else_runs_no_operation(mixer, monkeypatch):
    x = inputs(mixer)
    assert len(x.operations()) == SIZE["blocks"]

    def refuse(*_, **__):
        raise AssertionError("not this part")

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Linear, "forward", refuse)
        patched.setattr(torch.nn.LayerNorm, "forward", refuse)
        for backward in (False, True):
            one_pass(OperationsRun(), x, backward=backward)
        with pytest.raises(AssertionError, match="not this part"):
            one_pass(RestRun(), x, backward=False)
    with monkeypatch.context() as patched:
        patched.setattr(type(x.models[OURS].blocks[0].mixer), "fused", refuse)
        for backward in (False, True):
            one_pass(RestRun(), x, backward=backward)
        with pytest.raises(AssertionError, match="not this part"):
            one_pass(OperationsRun(), x, backward=False)


def test_a_model_is_as_it_was_when_its_parts_have_run():
    x = inputs("krause")
    before = WholeRun().features(x)
    one_pass(RestRun(), x, backward=True)
    assert "mix" not in vars(x.models[OURS].blocks[0].mixer)
    assert all(p.grad is None for p in x.models[OURS].parameters())
    assert torch.equal(WholeRun().features(x), before)


def test_one_tensor_is_one_tensor_for_an_operation_by_itself():
    """Keys that are the queries are read once: a copy of them would take another time."""
    operation = inputs("gka").operations()[0]
    query, key, value = operation.args[:3]
    assert query is key is value
    assert len(operation.gradients) == 1


@pytest.mark.parametrize("backend", ["auto", "structured"])
def test_a_run_uses_the_backend_that_it_names(backend, monkeypatch):
    x = inputs("dot-window")
    backends = []
    layer = type(x.models[OURS].blocks[0].mixer)
    fused = layer.fused

    def looks(*args, **options):
        backends.append(wanted_backend("auto"))
        return fused(*args, **options)

    x.operations()
    monkeypatch.setattr(layer, "fused", looks)
    for run in (WholeRun(backend=backend), OperationsRun(backend)):
        one_pass(run, x, backward=True)
    assert backends == [backend] * (2 * SIZE["blocks"])


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_is_judged_by_the_readable_backend(mixer, monkeypatch):
    """The truth that judges a model is what the readable backend gives for one of its tokens.

    That token sees none of the tokens that the truth leaves out.
    """
    monkeypatch.setattr(mixers, "CHECKED", 20)
    x = inputs(mixer)
    truth = MixerTruth(x)
    assert truth.row < 20
    model = x.models[OURS].double()
    with ga.use_backend("reference"):
        out = model.encode(x.tokens)[0, truth.row]
    torch.testing.assert_close(truth.out, out, rtol=0, atol=1e-12)
    learned = [model.get_parameter(name) for name in truth.gradients]
    expected = torch.autograd.grad((out * x.gradient[0, truth.row].double()).sum(), learned)
    for mine, theirs in zip(truth.gradients.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_another_window_or_another_weight_is_wrong():
    x = inputs("dot-window")
    truth = MixerTruth(x)
    assert max(truth.errors_of(WholeRun())) < 1e-5
    model = x.models[OURS]
    model.windows = [window - 1 for window in model.windows]
    assert min(truth.errors_of(WholeRun())) > 1e-3
    model.windows = [window + 1 for window in model.windows]
    with torch.no_grad():
        model.blocks[0].mixer.value_proj.weight *= 1.1
    assert truth.errors_of(WholeRun())[0] > 1e-4


def test_the_peer_has_the_weights_of_ours_and_sees_no_later_token():
    x = inputs("dot")
    features = WholeRun(mixers.PEER).features(x)
    torch.testing.assert_close(features, WholeRun().features(x), rtol=1e-4, atol=1e-5)
    x.tokens[0, 30:] = 0
    changed = WholeRun(mixers.PEER).features(x)
    torch.testing.assert_close(changed[:, :30], features[:, :30], rtol=0, atol=1e-6)
    assert x.models[OURS].num_parameters() == x.models[mixers.PEER].num_parameters()


# Times and tables.


def row(contender: str, milliseconds: float, passes: str = "forward") -> Row:
    size = {"tokens": 40, "blocks": 4}
    seconds = milliseconds / 1000
    case, ratio = "mixer-dot-window-40", milliseconds / 40
    return Row(case, passes, contender, size, seconds, 0.0, 3, ratio, None, None, None)


def test_a_line_has_times_per_block_and_shares():
    rows = [
        row(OURS, 40.0),
        row(mixer_cases.OPERATIONS, 10.0),
        row(mixer_cases.REST, 32.0),
        row(mixer_cases.STRUCTURED, 80.0),
        row(mixer_cases.STRUCTURED_OPERATIONS, 48.0),
        row(mixers.PEER, 100.0),
    ]
    ((passes, lines),) = mixer_cases.by_pass(rows)
    assert passes == "forward"
    assert lines == [["dot-window", "40", "10", "25%", "20", "60%", "25", "105%"]]
    (note,) = tables.notes(rows)
    assert note.startswith("forward: ms per block 10, in operations 25%, structured 20,")
    ((_, _, cells),) = mixer_cases.lines_of(rows[:2])
    assert cells == ["10", "25%", "", "", "", ""]


def test_a_model_takes_three_passes_and_no_more():
    passes = []
    clock = host_clock.LongClock(lambda: passes.append(torch.get_num_threads()))
    assert passes == []
    timings, _ = time_interleaved({"model": clock}, seconds=0.0)
    assert passes == [torch.get_num_threads()] * 3
    assert len(timings["model"].times) == 3


@pytest.mark.parametrize("size", ["small", "paper"])
def test_models_are_timed_three_times_but_at_the_small_size(size, monkeypatch, tmp_path):
    """Models are timed by three passes and no others, except at the small size.

    At that size a pass takes a millisecond: it is timed as every other, after one that nobody
    times.
    """
    case = replace(
        mixer_cases.mixer_case("gka", 2048),
        sizes=dict.fromkeys(("small", "paper"), SIZE),
        yardsticks={},
        contenders={OURS: WholeRun()},
        backward=False,
    )
    quick_runs(monkeypatch, case)
    monkeypatch.setitem(runner.SECONDS, "paper", 60.0)
    sampled = []
    sample = host_clock.HostClock._mean
    monkeypatch.setattr(host_clock.HostClock, "_mean", lambda its: sampled.append(0) or sample(its))
    results, _ = measured(tmp_path, case.name, "--size", size)
    assert [row.rounds for row in results.rows] == [3]
    assert (len(sampled) == 3) == (size == "paper")
