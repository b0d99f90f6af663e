"""Whole models of the benchmark: peers have the windows of ours, and a step changes nothing."""

from __future__ import annotations

import pytest
import torch
from bench_helpers import CPU, NEEDS_COMPILER
from torch._dynamo.testing import CompileCounterWithBackend

from graphattn.bench.cases.whole import WHOLE
from graphattn.bench.contenders.peers import MissingError
from graphattn.bench.models import whole
from graphattn.bench.models.whole import FLEX, FORMS, OURS_BY_MIXER, SDPA, StepTruth, WholeTruth
from graphattn.bench.reporting.record import OURS
from graphattn.cli.bench import chosen

SIZE = {"batch": 2, "tokens": 20, "dim": 16, "heads": 2, "depth": 3, "window": 6, "top_k": 4,
        "edge_hidden": 8}  # fmt: skip
KINDS = ("encoder", "causal")


def inputs(kind: str, **changes: int) -> whole.WholeInputs:
    return whole.whole_inputs(kind)({**SIZE, **changes}, CPU, torch.float32)


def steps(**changes: int) -> whole.StepInputs:
    return whole.step_inputs({**SIZE, **changes}, CPU, torch.float32)


def test_whole_stands_for_training_and_steps_at_both_lengths_on_a_gpu() -> None:
    assert chosen(["whole"]) == WHOLE
    assert [case.name for case in WHOLE] == [
        f"{name}-{tokens}" for tokens in (4096, 32768) for name in (*KINDS, "causal-step")
    ]
    for case in WHOLE:
        size = case.size("paper", "cuda")
        assert case.name.endswith(f"-{size['tokens']}")
        assert (size["dim"], size["heads"], size["depth"]) == (768, 12, 12)
        assert size["batch"] * size["tokens"] == 32768
        assert set(OURS_BY_MIXER.values()) < set(case.contenders) <= set(FORMS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_of_flexattention_is_that_of_our_model(kind: str, monkeypatch) -> None:
    with pytest.raises(MissingError, match="no backward pass on a CPU"):
        inputs(kind).training(FLEX)
    monkeypatch.setattr(whole, "refuse_flex", lambda device: None)
    N = SIZE["tokens"]
    mask = whole.window_mask(N, SIZE["window"], is_causal=kind == "causal", device=CPU)
    i, j = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
    (graph, *_) = inputs(kind).model(OURS).graphs(N)
    assert torch.equal(mask.mask_mod(0, 0, i, j), graph.to_mask())


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_on_flexattention_is_ours(kind: str, monkeypatch, flex_on_a_cpu) -> None:
    monkeypatch.setattr(whole, "refuse_flex", lambda device: None)
    x = inputs(kind)
    assert max(WholeTruth(x).errors_of(whole.ModelRun(FLEX))) < 1e-5


def test_a_model_with_another_window_is_wrong(monkeypatch) -> None:
    x, others = inputs("causal"), inputs("causal", window=5)
    truth = WholeTruth(x)
    x.made[OURS], x.graphs[OURS] = others.training(OURS), others.training(OURS)[0].graphs(20)
    assert min(truth.errors_of(whole.ModelRun(OURS))) > 1e-2


@pytest.mark.parametrize(
    ("name", "stored", "reads_all"), [(OURS, 6 + 1, False), (SDPA, 21, True)], ids=["ours", "SDPA"]
)
def test_a_step_reads_the_last_token_after_those_it_sees_and_can_be_repeated(
    name: str, stored: int, reads_all: bool
) -> None:
    x, run = steps(), whole.StepRun(name)
    truth = StepTruth(x)
    with torch.no_grad():
        first = run(x)
        assert torch.equal(run(x), first)
    assert truth.errors_of(run)[0] < 1e-5
    numbers = SIZE["depth"] * 2 * SIZE["batch"] * stored * SIZE["dim"]  # keys and values
    assert 4 * numbers <= run.held(x) <= 16 * numbers
    x.tokens[:, 3] = (x.tokens[:, 3] + 1) % whole.VOCABULARY  # three windows do not reach it
    x.made.clear()
    with torch.no_grad():
        assert torch.equal(run(x), first) != reads_all


@pytest.mark.long
@NEEDS_COMPILER
def test_equal_blocks_are_compiled_once(monkeypatch) -> None:
    counter = CompileCounterWithBackend("eager")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile",
        lambda module, **options: compile_module(module, **options, backend=counter),
    )  # fmt: skip
    in_training = whole.in_training

    def compiled(model, *where):
        whole.compile_blocks(model)
        return in_training(model, *where)

    monkeypatch.setattr(whole, "in_training", compiled)
    torch._dynamo.reset()
    x = inputs("causal")
    whole.ModelRun(OURS).step(x)
    assert counter.frame_count == 1
    torch._dynamo.reset()
