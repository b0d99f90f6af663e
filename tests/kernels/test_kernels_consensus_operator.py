"""The operator behind fused consensus: torch.library, torch.compile, derivatives, refusals."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases_consensus import BACKEND, CASES, Case, kernels, move
from cases_edges import nearest, some
from cases_kernels import kernels_and_exact
from compiling import check_compilations, check_compiled
from test_kernels_no_waiting import nothing_waits
from torch._subclasses import FakeTensorMode

import graphattn as ga
from graphattn.kernels.shared.launch import recording
from graphattn.ops.consensus import operators

pytestmark = pytest.mark.usefixtures("device", "fresh_compiler")


def consensus_layer(backend: str = BACKEND, **options: Any) -> ga.nn.SelfConsensus:
    torch.manual_seed(0)
    options = {"step_size": "learned", **options}
    return ga.nn.SelfConsensus(8, 2, rank=2, edge_hidden=4, backend=backend, **options)


LAYERS = {
    "path": (ga.window_path_graph(7, 1), {"step_size": "auto"}),
    "causal, rotated": (ga.causal_window_graph(7, 2), {"update": "target", "rope": True}),
    "side by side": (ga.batch([ga.window_path_graph(n, 1) for n in (3, 4)]), {"step_size": "auto"}),
    "list, full networks": (some(7, 7), {"edge_input": "full", "edge_networks": "per_head"}),
    "list, one network": (some(7, 7), {"edge_input": "full", "step_size": "auto"}),
    "neighbours": (nearest(7, 2), {"update": "target", "step_size": "auto"}),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "padded"), [("path", True), ("list, one network", True), *((n, False) for n in LAYERS)]
)
def test_a_compiled_layer_is_one_node_and_gives_what_an_eager_one_gives(
    name: str, padded: bool, device: str
) -> None:
    """A compiled layer is one node in each pass, and gives what an eager layer gives.

    The operators in it keep the promises of torch.library.
    """
    graph, options = LAYERS[name]
    graph, model = graph.to(device), consensus_layer(**options).to(device)
    valid = {"valid": torch.arange(7, device=device) != 5} if padded else {}
    calls = check_compiled(model, torch.randn(1, 7, 8, device=device), graph, **valid)
    assert [len(nodes) for nodes in calls] == [1, 1], calls
    for nodes, is_forward in zip(calls, (True, False), strict=True):
        for target, args, kwargs in nodes:
            torch.library.opcheck(target, *_leaves((args, kwargs), is_forward))


def _leaves(arguments: Any, requires_grad: bool) -> Any:
    """Copies, which want gradients if they are of the forward."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach().clone()
        return x.requires_grad_(requires_grad and x.is_floating_point())

    return torch.utils._pytree.tree_map(leaf, arguments)


@pytest.mark.long
@pytest.mark.parametrize("step_size", [0.1, "auto"])
def test_two_compilations_serve_all_lengths_and_windows(
    step_size: float | str, device: str
) -> None:
    model = consensus_layer(update="target", step_size=step_size).to(device)
    check_compilations(model, 8, device)


class Taken(Exception):
    """The implementation that was chosen is reached."""


@pytest.mark.parametrize(("trunk", "backend"), [("shared", "triton"), ("separate", "structured")])
def test_on_a_gpu_auto_takes_kernels_where_there_are_some(
    trunk: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors say what happens on a device that is not there."""
    sums = mock.Mock(side_effect=Taken)
    monkeypatch.setattr(operators, "sums_over_edges", sums)
    layer = consensus_layer("auto", trunk=trunk)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parameters = {
            n: torch.empty_like(p, device="cuda").detach() for n, p in layer.named_parameters()
        }
        graph, x = ga.window_path_graph(20, 2).to("cuda"), torch.empty(2, 20, 8, device="cuda")
        with pytest.raises(Taken):
            torch.func.functional_call(layer, parameters, (x, graph))
    assert sums.call_args.kwargs["backend"] == backend


def test_kernels_run_where_they_are_asked_for(device: str) -> None:
    """Kernels run on a CPU only where they are asked for by name.

    There they could only be interpreted, and torch is faster.
    """
    if device != "cpu":
        pytest.skip("a GPU takes kernels")
    for name in ("path", "list", "neighbours, target", "rectangle"):
        tensors = CASES[name].tensors()
        for backend, runs in (("auto", False), ("structured", False), (BACKEND, True)):
            with recording() as launches:
                move(CASES[name], tensors, backend=backend)
            assert bool(launches) == runs, (name, backend)


# Derivatives.


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(ga.window_path_graph(7, 2), step="auto"),
        Case(ga.window_path_graph(7, 2), "target", rotated="two tensors", step=(2,)),
        Case(ga.causal_window_graph(7, 3), "target", step="auto", valid="both"),
        Case(some(7, 7), step="auto", one_network=True),
        Case(some(7, 5), "target", step=(7, 1), valid="both"),
        Case(ga.batch([ga.window_path_graph(n, 1) for n in (4, 1, 2)]), step="auto"),
    ],
    ids=["path", "rotated", "causal", "list", "rectangle", "side by side"],
)
def test_second_derivatives_are_those_of_the_reference(case: Case, device: str) -> None:
    """Hessian-vector products, of every tensor."""
    case, results = replace(case, features=3, xi=4), []
    for backend, where, dtype in kernels_and_exact(device):
        leaves = {n: x.to(where, dtype).requires_grad_() for n, x in case.tensors().items()}
        new = move(case, leaves, backend=backend, device=where)
        first = torch.autograd.grad(
            new.pow(3).sum(), list(leaves.values()), create_graph=True, materialize_grads=True
        )
        along = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(along, list(leaves.values()), materialize_grads=True)
        results.append({n: g.detach().cpu() for n, g in zip(leaves, second, strict=True)})
    for n, theirs in results[1].items():
        off = (results[0][n].double() - theirs).norm()
        assert off <= 2e-5 * theirs.norm().clamp(min=1.0), n


def test_torch_func_is_told_to_take_the_reference(device: str) -> None:
    case = CASES["path"]
    tensors = {n: x.to(device) for n, x in case.tensors().items()}

    def loss(state: torch.Tensor, backend: str) -> torch.Tensor:
        new = move(case, {**tensors, "state": state}, backend=backend, device=device)
        return new.square().sum()

    state = tensors["state"]
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(ValueError, match='use backend="reference"'):
            transform(lambda x: loss(x, BACKEND))(state)
    expected = torch.func.grad(lambda x: loss(x, "reference"))(state)
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, "auto"))(state), expected)


@pytest.mark.long
def test_only_the_gradients_that_are_wanted_are_there(device: str) -> None:
    """Whichever are wanted, they are the same to the last bit."""
    for name in ("rotated", "padding of a list", "one network, list"):
        graph = ga.window_path_graph(5, 1) if name == "rotated" else some(5, 5)
        step = (5, 1) if name == "padding of a list" else CASES[name].step
        case = replace(CASES[name], graph=graph, step=step, batch=(1,), heads=1, xi=3)
        tensors, everything = case.tensors(), kernels(case, device)
        names = list(tensors)
        subsets = [[n] for n in ("state", "target_hidden", "source_hidden", "alpha", "shear_bias")]
        subsets += [names[:2], [n for n in names if "hidden" in n], names[-6:], names[1::2]]
        subsets += [[n] for n in names if n in ("u", "step_size")]
        for wanted in subsets:
            leaves = {n: x.clone().to(device) for n, x in tensors.items()}
            leaves = {n: x.requires_grad_(n in wanted) for n, x in leaves.items()}
            new = move(case, leaves, device=device)
            new.backward(case.upstream().to(device))
            for n, leaf in leaves.items():
                if n in wanted:
                    assert torch.equal(leaf.grad.cpu(), everything[n]), (name, wanted, n)
                else:
                    assert leaf.grad is None


# Waiting.


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda: ga.window_path_graph(20, 2), {"rope": True}),
        (lambda: ga.causal_window_graph(20, 4), {"update": "target"}),
        (lambda: ga.batch([ga.window_path_graph(n, 2) for n in (9, 11)]), {}),
        (lambda: ga.knn_graph(torch.randn(20, 3), 4), {"update": "target"}),
    ],
    ids=["path", "causal", "side by side", "neighbours"],
)
@pytest.mark.parametrize("step_size", ["learned", "auto"])
def test_a_layer_waits_for_nothing(
    build: Callable[[], ga.TokenGraph], options: dict[str, Any], step_size: str, device: str
) -> None:
    if step_size == "auto":
        options = {k: v for k, v in options.items() if k != "rope"}
    where = "meta" if device == "cpu" else device
    layer, graph = consensus_layer(step_size=step_size, **options).to(where), build().to(where)
    x = torch.randn(2, 20, 8, device=where, requires_grad=True)

    def step() -> list[torch.Tensor]:
        y = layer(x, graph)
        return [y, *torch.autograd.grad(y.square().mean(), [x, *layer.parameters()])]

    with recording() if where == "meta" else nullcontext():
        step()  # tables are made once, kernels compiled
    with nothing_waits(where):
        results = step()
    assert [t.shape for t in results] == [x.shape, x.shape, *(p.shape for p in layer.parameters())]


# Refusals.


def test_what_kernels_cannot_do_they_refuse_with_the_reason(device: str) -> None:
    """Kernels asked for by name refuse what they cannot do, and say why.

    "auto" takes another backend instead.
    """
    case = CASES["path"]
    three = {n: case.tensors()[n].repeat(1, 1, 1, 3) for n in ("target_hidden", "source_hidden")}
    wide = replace(case, features=257, heads=1, rank=1)
    for of, tensors, says in (
        (case, {n: x.double() for n, x in case.tensors().items()}, "not float64"),
        (case, {**case.tensors(), **three}, "one trunk"),
        (wide, wide.tensors(), "1 to 256 features, not of 257"),
    ):
        tensors = {n: x.to(device) for n, x in tensors.items()}
        with pytest.raises(ValueError, match=f"backend 'triton' cannot run .*{says}"):
            move(of, tensors, backend=BACKEND, device=device)
        new = move(of, tensors, backend="auto", device=device).cpu()
        expected = {n: x.cpu() for n, x in tensors.items()}
        torch.testing.assert_close(new, move(of, expected, backend="reference"))
