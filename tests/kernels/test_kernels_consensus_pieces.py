"""Consensus in pieces: how edges, heads and batches are cut changes nothing.

Also first layers that the operation applies itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cases_consensus import CASES, NETWORK, Case, check, exact, kernels
from cases_edges import cut_at, hubs, nearest
from cases_kernels import random
from torch import Tensor
from watched_memory import watched_memory

import graphattn as ga
from graphattn.kernels.consensus import inputs
from graphattn.kernels.shared import launch, tuning

pytestmark = pytest.mark.usefixtures("device")

ALLOWED = 5e-6  # relative RMS of float32
FORMS = {
    "window": Case(ga.window_path_graph(23, 2), batch=(2,), heads=3, step="auto"),
    "windows side by side": Case(
        ga.batch([ga.window_path_graph(9, 2), ga.window_path_graph(14, 2)]), batch=(2,)
    ),
    "causal": Case(ga.causal_window_graph(23, 4), update="target", batch=(3,), step="auto"),
    "neighbours": Case(nearest(19, 4), batch=(2,), heads=3, step="auto"),
    "hubs": Case(hubs(), update="target", other_states=True, one_network=True),
    "one network": Case(ga.window_path_graph(17, 2), batch=(2,), heads=3, one_network=True),
}


@contextmanager
def workspace(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "WORKSPACE", size)
        yield


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of the kernels that are started."""
    started: list[str] = []
    start = launch.launch

    def noted(kernel, *arguments, **options) -> None:
        started.append(kernel.fn.__name__)
        start(kernel, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("inputs", "sum_messages"):
            patch.setattr(f"graphattn.kernels.consensus.{module}.launch", noted)
        yield started


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_a_small_workspace_gives_the_same(name: str, device: str) -> None:
    case = FORMS[name]
    with workspace(5000), counted() as started, watched_memory(device):
        results = kernels(case, device)
    edges_kernels = [kernel for kernel in started if kernel.startswith("consensus")]
    assert len(edges_kernels) > 2, started  # or nothing was cut
    check(results, exact(case), case, ALLOWED)


@pytest.mark.long
def test_a_large_workspace_takes_one_launch_forward_and_one_backward(device: str) -> None:
    with counted() as started:
        kernels(FORMS["neighbours"], device)
    assert started.count("consensus_kernel") == started.count("consensus_backward_kernel") == 1


@pytest.mark.long
def test_more_offsets_than_a_piece_has_room_for(device: str) -> None:
    case = Case(ga.window_path_graph(12, 9), heads=1)
    with workspace(900):
        results = kernels(case, device)
    check(results, exact(case), case, ALLOWED)


@pytest.mark.long
@pytest.mark.parametrize("size", [3000, 1 << 28])
def test_rows_that_are_cut_and_edges_that_are_cut(size: int, device: str) -> None:
    for update in ("energy", "target"):
        case = Case(hubs(), update=update, heads=1, step="auto")
        with cut_at(4), workspace(size):
            results = kernels(case, device)
        check(results, exact(case), case, ALLOWED)


@pytest.mark.long
@pytest.mark.parametrize("xi", [7, 40])
@pytest.mark.parametrize("name", ["path", "padding, target"])
def test_weights_that_stay_on_chip_are_the_same_weights(name: str, xi: int, device: str) -> None:
    """Weights in half precision that are read once and kept on chip change no bit of the results.

    Programs for Hopper and Blackwell keep them, and programs for older GPUs do not.
    """
    if device != "cpu":
        pytest.skip("a GPU takes the way it has")
    case = replace(CASES[name], xi=xi)
    results, decisions = [], []
    decide = inputs.ConsensusInputs.holds_weights

    def noted(self, choice) -> bool:
        decisions.append(decide(self, choice))
        return decisions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs.ConsensusInputs, "holds_weights", noted)
        for architecture in ("sm_80", "sm_90"):
            with tuning.compiling_for(architecture):
                results.append(kernels(case, device, torch.float16))
    assert decisions == [False, True]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def layered(case: Case, groups: int) -> dict[str, Tensor]:
    """The tensors of a case whose hidden vectors are still to be formed from 3 features."""
    tensors = case.tensors()
    for place, side in enumerate(("target", "source")):
        tokens = tensors.pop(f"{side}_hidden").shape[:-2]
        tensors[f"{side}_tokens"] = random(*tokens, groups, 3, seed=40 + place).float()
        tensors[f"{side}_weight"] = random(groups, case.xi, 3, seed=50 + place).float()
    tensors["target_bias"] = random(groups, case.xi, seed=60).float()
    return tensors


def move_layered(
    case: Case, x: dict[str, Tensor], backend: str, device: str, **options: Tensor
) -> Tensor:
    return ga.consensus_update(
        x["state"],
        x.get("neighbor_state", x["state"]),
        ga.FirstLayer(x["target_tokens"], x["target_weight"], x["target_bias"]),
        ga.FirstLayer(x["source_tokens"], x["source_weight"]),
        ga.EdgeNetworkParameters(*(x[name] for name in NETWORK)),
        case.graph.to(device),
        case.step,
        update=case.update,
        backend=backend,
        **options,
    )


def solve_layered(case: Case, tensors: dict[str, Tensor], backend: str, device: str):
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in tensors.items()}
    new = move_layered(case, leaves, backend, device)
    d_new = case.upstream().to(device, new.dtype)
    gradients = torch.autograd.grad(new, list(leaves.values()), d_new)
    return {"new": new.detach().cpu()} | {
        name: x.cpu() for name, x in zip(leaves, gradients, strict=True)
    }


@pytest.mark.long
@pytest.mark.parametrize("size", [4000, 1 << 28])
@pytest.mark.parametrize("name", ["window", "hubs", "one network"])
def test_a_first_layer_gives_what_its_hidden_vectors_give(
    name: str, size: int, device: str
) -> None:
    case = FORMS[name]
    tensors = layered(case, 1 if case.one_network else case.heads)
    with workspace(size):
        results = solve_layered(case, tensors, "triton", device)
    expected = solve_layered(
        case, {name: x.double() for name, x in tensors.items()}, "reference", "cpu"
    )
    for tensor, theirs in expected.items():
        error = (results[tensor].double() - theirs).square().mean().sqrt()
        assert error <= ALLOWED * theirs.square().mean().sqrt(), tensor


@pytest.mark.long
def test_a_first_layer_keeps_no_hidden_vectors_for_the_backward(device: str) -> None:
    case = FORMS["window"]
    leaves = {n: x.to(device).requires_grad_() for n, x in layered(case, case.heads).items()}
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[1] == case.graph.num_targets:
            kept.append(x.shape[-1])
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        move_layered(case, leaves, "triton", device)
    assert {3} < set(kept) <= {1, 3, case.features}  # tokens, states, a step


def test_a_hook_on_the_first_layer_is_called(device: str) -> None:
    layer = ga.nn.SelfConsensus(8, heads=2, rank=1, edge_hidden=4, backend="triton").to(device)
    graph, x = ga.window_path_graph(5, 1).to(device), random(5, 8, seed=1).float().to(device)
    expected = layer(x, graph)
    seen: list[int] = []
    layer.edge_net.source.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x, graph), expected)
    assert seen == [1]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["triton", "structured", "reference"])
def test_what_padding_of_a_first_layer_holds_is_not_read(backend: str, device: str) -> None:
    case = FORMS["window"]
    tensors = layered(case, case.heads)
    valid = torch.arange(23) < 20
    for name in ("target_tokens", "source_tokens", "state"):
        tensors[name][:, 20:] = float("nan")
    leaves = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
    new = move_layered(case, leaves, backend, device, valid=valid.to(device))
    gradients = torch.autograd.grad(new[:, :20].sum(), list(leaves.values()))
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.long
def test_autocast_around_the_backward_changes_nothing(device: str) -> None:
    case = FORMS["window"]
    tensors = layered(case, case.heads)

    def gradients(**options) -> list[Tensor]:
        leaves = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
        new = move_layered(case, leaves, "triton", device)
        with torch.autocast(device, torch.bfloat16, enabled=bool(options)):
            return torch.autograd.grad(new.square().sum(), list(leaves.values()), **options)

    torch.testing.assert_close(gradients(retain_graph=True), gradients(), rtol=0, atol=0)
    for ours, theirs in zip(gradients(create_graph=True), gradients(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.nightly
def test_many_groups_add_up_in_float32(device: str) -> None:
    case = Case(ga.window_path_graph(6, 1), batch=(40,), heads=1, features=2, xi=3)
    tensors = {name: x.bfloat16() for name, x in layered(case, 1).items()}
    for name in ("target_tokens", "source_tokens", "state"):  # equal entries: the worst case
        tensors[name] = tensors[name][:1].expand_as(tensors[name])
    results = []
    for size in (1, 1 << 28):
        leaves = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
        with workspace(size):
            move_layered(case, leaves, "triton", device).sum().backward()
        results.append({name: x.grad.float() for name, x in leaves.items()})
    for name in ("target_weight", "target_bias", "source_weight", "shear"):
        error = (results[0][name] - results[1][name]).abs().max()
        assert error <= 0.01 * results[1][name].abs().max(), name


@pytest.mark.parametrize(
    ("part", "wrong", "says"),
    [
        (
            "tokens",
            torch.zeros(3, 23, 3, 3),
            r"target_hidden.tokens must have shape \[2, N, G, in\]",
        ),
        ("weight", torch.zeros(3, 7, 4), r"target_hidden.weight must have shape \[3, xi, 3\]"),
        ("weight", torch.zeros(3, 5, 3), r"target_hidden.bias must have shape \[3, 5\]"),
        ("bias", torch.zeros(7), r"target_hidden.bias must have shape \[3, 7\]"),
        ("bias", torch.zeros(3, 7, dtype=torch.int64), "target_hidden.bias must be a floating"),
    ],
)
def test_a_first_layer_that_does_not_fit_is_refused_by_name(
    part: str, wrong: Tensor, says: str
) -> None:
    case = FORMS["window"]
    tensors = layered(case, case.heads) | {f"target_{part}": wrong}
    with pytest.raises(ValueError, match=says):
        move_layered(case, tensors, "auto", "cpu")
