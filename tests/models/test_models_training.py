"""Whole models train, stop, go on elsewhere, and share the work: the same numbers every time."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import continued_run
import pytest
import torch
import two_processes
import zoo

import graphattn as ga

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in the order that the other process has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(script: str, *arguments: Any) -> subprocess.Popen[str]:
    """A Python process that finds the package and the zoo."""
    path = os.pathsep.join([str(TOP), str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said


# Stopping and going on.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train every model for 20 steps, save it, and train 5 more, here and in another process."""
    folder = tmp_path_factory.mktemp("runs")
    by_name: dict[str, dict[str, Any]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in zoo.ZOO:
        model = zoo.made(name)
        optimizer = continued_run.optimizer_of(model)
        losses = continued_run.train(name, model, optimizer, range(20))
        ga.save(model, folder / name)
        state = {"name": name, **continued_run.state_of(model, optimizer)}
        torch.save(state, folder / name / "training.pt")
        more = continued_run.train(name, model, optimizer, range(20, 25))
        by_name[name] = {
            "first": losses,
            "losses": more,
            "weights": dict(model.state_dict()),
            **continued_run.state_of(model, optimizer),
        }
    torch.set_num_threads(threads)
    finish(start("continued_run.py", folder))
    for name, run in by_name.items():
        run["continued"] = torch.load(folder / name / "continued.pt")
    return by_name


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.ZOO)
def test_twenty_steps_of_training_lower_the_loss(name: str, runs: dict[str, Any]) -> None:
    losses = runs[name]["first"]
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_run_goes_on_in_another_process_bit_by_bit(name: str, runs: dict[str, Any]) -> None:
    here, there = runs[name], runs[name]["continued"]
    assert there["losses"] == here["losses"]
    assert zoo.same(there["weights"], here["weights"])
    assert zoo.same(there["optimizer"], here["optimizer"])
    assert zoo.same(there["random"], here["random"])


# Two processes.


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return how much two processes differ from one, by model and way of sharing the work.

    The two processes are started once for all models.
    """
    file = tmp_path_factory.mktemp("processes") / "found.json"
    for process in [start("two_processes.py", file, rank, *zoo.ZOO) for rank in range(2)]:
        finish(process)
    errors: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return errors


@pytest.mark.long
@pytest.mark.parametrize("way", two_processes.WAYS)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_two_processes_with_half_the_examples_each_are_one_with_all(
    name: str, way: str, differences: dict[str, Any]
) -> None:
    """Gradients of two steps and the weights after them, in float64."""
    error = differences[f"{name}, {way}"]
    assert isinstance(error, float), error
    assert error < 1e-9


# In one process.


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if zoo.ZOO[name].has_lengths])
def test_tokens_learn_what_only_other_tokens_know(name: str) -> None:
    """Below the entropy of hidden letters, where all models stay whose tokens see themselves."""
    model = zoo.made(name)
    optimizer = continued_run.optimizer_of(model, lr=3e-2)
    losses = continued_run.train(name, model, optimizer, range(30), examples=16)
    assert losses[0] > 2
    assert sum(losses[-5:]) / 5 < 0.75 * zoo.ALONE


def gradients(model: torch.nn.Module, batch: zoo.Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    zoo.exact_loss_of(model, batch).backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradient_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    """Dropout draws again what it drew; every parameter is there."""
    model = zoo.made(name).double().train()
    batch = zoo.batch_of(name, 1).to(torch.float64)
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    for block in zoo.blocks_of(model):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    actual = gradients(model, batch)
    assert len(calls) == 2 * len(zoo.blocks_of(model))  # once more in the backward pass
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-9, atol=1e-12, msg=key)


def test_reentrant_checkpoints_behind_a_frozen_embedding_give_gradients() -> None:
    """Nothing that the first block is given has a gradient, and its weights have."""
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 16, 2, 4).double().train()
    model.embedding.requires_grad_(False)
    tokens = torch.randint(9, (2, 7))
    learned = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(model(tokens).square().sum(), learned)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model(tokens).square().sum().backward()
    for parameter, gradient in zip(learned, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_reach_what_blocks_are_given_and_blocks_behind_frozen_embeddings(
    reentrant: bool,
) -> None:
    """Features of edges that are themselves learned, the same for all blocks."""
    model = zoo.encoder(mixer="consensus", edge_features=3, **zoo.CONSENSUS).double()
    model.embedding.requires_grad_(False)
    batch = zoo.batch_of("encoder mix", 4)
    graph = ga.window_path_graph(18, 2)
    features = torch.randn(graph.num_edges, 3, dtype=torch.float64, requires_grad=True)
    wanted = [features, *(p for p in model.parameters() if p.requires_grad)]

    def actual() -> list[torch.Tensor]:
        for tensor in wanted:
            tensor.grad = None
        model(*batch.inputs, graph, edge_features=features).square().mean().backward()
        return [tensor.grad for tensor in wanted]

    expected = actual()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for mine, theirs in zip(actual(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_autocast_to_bfloat16_is_near(name: str) -> None:
    """Forward and backward; the weights stay what they are.

    All sources are kept: half precision would find other nearest neighbours (15 % apart).
    """
    model, batch = zoo.made(name).eval(), zoo.batch_of(name, 2)
    for part in model.modules():
        if getattr(part, "top_k", None) is not None:
            part.top_k = 10**6
    expected, exact = zoo.call(model, batch), gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        out, actual = zoo.call(model, batch), gradients(model, batch)
    valid = batch.keywords.get("valid", torch.ones(1, 1, dtype=torch.bool))
    shown = valid.expand(expected.shape[:-1]) if expected.dim() > 2 else slice(None)
    error = (out.float() - expected)[shown].norm() / expected[shown].norm()
    assert error < 0.03
    assert all(gradient.dtype == torch.float32 for gradient in actual.values())
    whole = [torch.cat([g[key].flatten() for key in exact]) for g in (actual, exact)]
    assert (whole[0] - whole[1]).norm() / whole[1].norm() < 0.1


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_parameter_has_a_gradient_and_is_drawn_anew(name: str) -> None:
    """Biases may have none: those of keys, which a softmax cancels, and of consensus sources."""
    model = zoo.shaken(zoo.made(name)).double().train()
    result = gradients(model, zoo.batch_of(name, 1).to(torch.float64))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    silent = [key for key in before if key not in result or not result[key].any()]
    assert all(key.endswith(("source_proj.bias", "key_proj.bias")) for key in silent), silent
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.reset_parameters()
    assert not [key for key, p in model.named_parameters() if torch.equal(p, before[key] + 1)]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_copy_answers_the_same_and_shares_no_weight(name: str, way: str) -> None:
    model, batch = zoo.made(name).eval(), zoo.batch_of(name, 3)
    expected = zoo.call(model, batch)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(zoo.call(twin, batch), expected)
    assert twin.config == model.config
    assert twin.num_parameters() == model.num_parameters()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(zoo.call(model, batch), expected)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_copy_of_the_config_makes_the_same_shapes(name: str) -> None:
    model = zoo.made(name)
    twin = type(model)(**model.config)
    assert {k: v.shape for k, v in twin.state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
