"""Features of edges as a third input of consensus' edge network: gelu(T y_i + S y_j + F e_ij)."""

from __future__ import annotations

from typing import Any

import oracle_ops as oracle
import pytest
import torch
from cases_ops import (
    ENERGY,
    FAST,
    GRAPHS,
    ConsensusInputs,
    Largest,
    consensus_inputs,
    random,
    random_mask,
    shuffled,
    valid_tokens,
)
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import graphattn as ga
from graphattn.ops.backends import support
from graphattn.ops.consensus import backends as table
from graphattn.ops.consensus import pieces
from graphattn.ops.consensus.calls import ConsensusKind
from graphattn.ops.consensus.structured import sums as structured

EXACT = {"rtol": 1e-10, "atol": 1e-10}
BACKENDS = pytest.mark.parametrize("backend", ["reference", *FAST])
CASES = [(name, "energy") for name in ENERGY] + [(name, "target") for name in GRAPHS]
F = 3


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few edges a chunk, and windows hop by hop: most cases then have several chunks."""
    monkeypatch.setattr(structured, "CHUNK", 200)
    monkeypatch.setattr(pieces, "SHORTEST", 0)


def of_edges(
    graph: ga.TokenGraph, inputs: ConsensusInputs, *batch: int, features: int = F, seed: int = 40
) -> ga.FirstLayer:
    """Random features of every edge and a random F."""
    groups, width = inputs.target_hidden.shape[-2:]
    return ga.FirstLayer(
        random(*batch, graph.num_edges, 1, features, seed=seed),
        random(groups, width, features, seed=seed + 1),
    )


def by_loops(layer: ga.FirstLayer) -> Tensor:
    return oracle.edge_hidden(layer.tokens.squeeze(-2), layer.weight)


FORMS: dict[str, Any] = {
    "factored": lambda layer: layer,
    "formed": by_loops,
}


# Against plain loops.


@BACKENDS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "update"), CASES)
def test_one_step_is_its_equation(name: str, update: str, form: str, backend: str) -> None:
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph)
    layer = of_edges(graph, inputs)
    expected = oracle.consensus(
        *inputs, graph.to_mask(), 0.1, update=update, of_edges=by_loops(layer)
    )
    new = ga.consensus_update(
        *inputs, graph, 0.1, update=update, edge_hidden=FORMS[form](layer), backend=backend
    )
    torch.testing.assert_close(new, expected, **EXACT)
    if graph.num_edges > (graph.edge_index[0] == graph.edge_index[1]).sum():
        without = ga.consensus_update(*inputs, graph, 0.1, update=update, backend=backend)
        assert not torch.allclose(new, without)  # they do count


OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"batch": (2,)},
    "two batch dimensions": {"batch": (2, 2), "heads": 1, "hidden": 2},
    "one network for all heads": {"shared_network": True, "heads": 3, "hidden": 2},
    "separate trunks": {"separate_trunks": True},
    "separate trunks, one network": {"separate_trunks": True, "shared_network": True},
    "rank 1, one feature": {"rank": 1, "features": 1},
}


@BACKENDS
@pytest.mark.parametrize(
    ("form", "per_sequence"),
    [("factored", False), ("factored", True), ("formed", True)],
    ids=["factored, shared", "factored, per sequence", "formed, per sequence"],
)
@pytest.mark.parametrize("step", [0.1, "auto"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("path with self loops", "energy"),
        ("batch of windows", "energy"),
        ("mixed batch", "target"),
        ("random rectangle", "target"),
    ],
)
def test_every_network_and_step_is_its_equation(
    name: str, update: str, option: str, step: Any, per_sequence: bool, form: str, backend: str
) -> None:
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph, **OPTIONS[option])
    layer = of_edges(graph, inputs, *(OPTIONS[option].get("batch", ()) if per_sequence else ()))
    lengths = tuple(targets for targets, _ in graph.sizes)
    expected = oracle.consensus(
        *inputs, graph.to_mask(), step, update=update, lengths=lengths, of_edges=by_loops(layer)
    )
    new = ga.consensus_update(
        *inputs, graph, step, update=update, edge_hidden=FORMS[form](layer), backend=backend
    )
    torch.testing.assert_close(new, expected, **EXACT)


@BACKENDS
@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize("masks", ["shared", "per sequence", "pair", "nothing valid"])
@pytest.mark.parametrize(("name", "update"), [("path", "energy"), ("mixed batch", "target")])
def test_with_padding_and_disagreement_it_is_its_equation(
    name: str, update: str, masks: str, step: Any, backend: str
) -> None:
    graph = GRAPHS[name]()
    N = graph.num_targets
    valid: Any = {
        "shared": valid_tokens(N),
        "per sequence": valid_tokens(2, N),
        "pair": (valid_tokens(N), valid_tokens(2, N, seed=1)),
        "nothing valid": torch.zeros(2, N, dtype=torch.bool),
    }[masks]
    inputs = consensus_inputs(graph, batch=(2,))
    layer = of_edges(graph, inputs, 2)
    pair = random(*inputs.state.shape, seed=6), random(*inputs.state.shape, seed=7)
    options = {"update": update, "valid": valid, "disagreement": pair}
    lengths = tuple(targets for targets, _ in graph.sizes)
    expected = oracle.consensus(
        *inputs, graph.to_mask(), step, lengths=lengths, of_edges=by_loops(layer), **options
    )
    new = ga.consensus_update(*inputs, graph, step, edge_hidden=layer, backend=backend, **options)
    keeps = valid[0] if isinstance(valid, tuple) else valid
    expected = torch.where(keeps.expand(2, N)[..., None, None], expected, inputs.state)
    torch.testing.assert_close(new, expected, **EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["path", "grid with class token", "random rectangle"])
def test_edge_matrices_are_their_equation(name: str, form: str) -> None:
    graph = GRAPHS[name]()
    for batch in ((), (2,)):
        inputs = consensus_inputs(graph, batch=(2,))
        layer = of_edges(graph, inputs, *batch)
        expected, _, _ = oracle.edge_matrices(*inputs[2:], graph.to_mask(), by_loops(layer))
        R = ga.consensus_edge_matrices(*inputs[2:], graph, edge_hidden=FORMS[form](layer))
        torch.testing.assert_close(R, expected, **EXACT)
        assert torch.equal(R, R.mT)


# What must hold.


# Gradients.


@BACKENDS
@pytest.mark.parametrize("form", ["factored", "formed"])
@pytest.mark.parametrize("step", [0.3, "auto"])
@pytest.mark.parametrize("per_sequence", [False, True], ids=["shared", "per sequence"])
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("banded", [True, False])
def test_gradients_of_both_orders_are_those_of_finite_differences(
    banded: bool, update: str, per_sequence: bool, step: Any, form: str, backend: str
) -> None:
    window = ga.window_path_graph(3, 1, self_loops=True)
    graph = ga.batch([window, window if banded else ga.complete_graph(2)])
    inputs = consensus_inputs(
        graph,
        batch=(2,),
        heads=2,
        features=2,
        hidden=2,
        separate_trunks=per_sequence,
        shared_network=per_sequence,
    )
    layer = of_edges(graph, inputs, *([2] if per_sequence else []), features=2)
    given = list(layer[:2]) if form == "factored" else [by_loops(layer)]
    valid = torch.arange(graph.num_targets) != 1

    def operation(u: Tensor, a: Tensor, *rest: Tensor) -> Tensor:
        edges, network = rest[: len(given)], rest[len(given) :]
        return ga.consensus_update(
            u,
            u,
            a,
            inputs.source_hidden,
            ga.EdgeNetworkParameters(*network),
            graph,
            step,
            update=update,
            valid=valid,
            edge_hidden=ga.FirstLayer(*edges) if form == "factored" else edges[0],
            backend=backend,
        )

    leaves = [inputs.state, inputs.target_hidden, *given, *inputs.network]
    leaves = [x.requires_grad_() for x in leaves]
    torch.manual_seed(0)
    assert gradcheck(operation, leaves, fast_mode=True)
    assert gradgradcheck(operation, leaves, fast_mode=True)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_sequence", [False, True], ids=["shared", "per sequence"])
@pytest.mark.parametrize(("name", "update"), CASES)
def test_every_gradient_is_that_of_the_reference(
    name: str, update: str, per_sequence: bool, form: str, fast: str
) -> None:
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph, batch=(2,))
    layer = of_edges(graph, inputs, *([2] if per_sequence else []))
    gradients = []
    for backend in ("reference", fast):
        given = list(layer[:2]) if form == "factored" else [by_loops(layer)]
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs[:4], *inputs[4], *given)]
        new = ga.consensus_update(
            *leaves[:4],
            ga.EdgeNetworkParameters(*leaves[4:10]),
            graph,
            "auto",
            update=update,
            edge_hidden=ga.FirstLayer(*leaves[10:]) if form == "factored" else leaves[10],
            backend=backend,
        )
        weight = random(*new.shape, seed=9)
        gradients.append(torch.autograd.grad((new * weight).sum(), leaves, allow_unused=True))
    for mine, theirs in zip(*gradients, strict=True):
        if mine is None or theirs is None:
            assert all(x is None or not x.any() for x in (mine, theirs))
        else:
            torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=["features", "weight", "both"])
def test_gradients_that_nobody_wants_are_not_computed(wanted: tuple[int, ...]) -> None:
    graph = ga.window_path_graph(9, 2)
    inputs = consensus_inputs(graph)
    layer = of_edges(graph, inputs)
    every = [x.clone().requires_grad_() for x in layer[:2]]
    some = [x.clone().requires_grad_(place in wanted) for place, x in enumerate(layer[:2])]
    for leaves in (every, some):
        new = ga.consensus_update(*inputs, graph, "auto", edge_hidden=ga.FirstLayer(*leaves))
        new.square().sum().backward()
    for place in range(2):
        if place in wanted:
            torch.testing.assert_close(some[place].grad, every[place].grad, **EXACT)
        else:
            assert some[place].grad is None


# What is never read.


@BACKENDS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("per_sequence", [False, True], ids=["shared", "per sequence"])
@pytest.mark.parametrize("name", ["path with self loops", "batch of windows", "longformer"])
def test_features_of_edges_that_touch_padding_reach_nothing(
    name: str, per_sequence: bool, bad: float, form: str, backend: str
) -> None:
    """No value, no gradient (that of F included), no second derivative."""
    graph = GRAPHS[name]()
    N = graph.num_targets
    valid = torch.stack([torch.arange(N) % 4 != 1] * 2)
    if per_sequence:
        valid[1] = torch.arange(N) % 3 != 2
    inputs = consensus_inputs(graph, batch=(2,))
    layer = of_edges(graph, inputs, *([2] if per_sequence else []))
    source, target = graph.edge_index
    keep = (valid[:, source] & valid[:, target])[(...,) if per_sequence else 0][..., None, None]
    results = []
    for dirty in (False, True):
        tokens = torch.where(keep, layer.tokens, bad) if dirty else layer.tokens
        if form == "formed":
            formed = by_loops(layer)
            given = [torch.where(keep, formed, bad) if dirty else formed]
        else:
            given = [tokens, layer.weight]
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs[:4], *inputs[4], *given)]
        new = ga.consensus_update(
            *leaves[:4],
            ga.EdgeNetworkParameters(*leaves[4:10]),
            graph,
            "auto",
            valid=valid,
            edge_hidden=ga.FirstLayer(*leaves[10:]) if form == "factored" else leaves[10],
            backend=backend,
        )
        first = torch.autograd.grad(new.square().sum(), leaves[1:], create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves[4:])
        results.append((new, *first, *second))
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


@BACKENDS
@pytest.mark.parametrize("name", ["path with self loops", "batch of windows", "grid"])
def test_nan_of_an_edge_reaches_the_tokens_that_it_moves_and_no_other(
    name: str, backend: str
) -> None:
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph)
    layer = of_edges(graph, inputs)
    source, target = graph.edge_index
    for e in (source != target).nonzero().flatten().tolist():
        tokens = layer.tokens.clone()
        tokens[e] = torch.nan
        for update in ("energy", "target"):
            new = ga.consensus_update(
                *inputs,
                graph,
                0.1,
                update=update,
                edge_hidden=layer._replace(tokens=tokens),
                backend=backend,
            )
            ends = {int(target[e])} | ({int(source[e])} if update == "energy" else set())
            assert set(new.isnan().flatten(1).any(1).nonzero().flatten().tolist()) == ends


# Dtypes, memory, compilers, and what is refused.


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, backend: str) -> None:
    """Results of half precision err by their own rounding and by that of float32, and no more."""
    graph = GRAPHS["grid with class token"]()
    inputs = consensus_inputs(graph, batch=(2,), dtype=dtype)
    layer = of_edges(graph, inputs, 2)
    layer = ga.FirstLayer(layer.tokens.to(dtype), layer.weight.to(dtype))
    for given in (layer, by_loops(layer).to(dtype)):
        formed = by_loops(layer) if isinstance(given, ga.FirstLayer) else given.double()
        wide = [x.double() for x in inputs[:4]]
        network = tuple(x.double() for x in inputs.network)
        expected = oracle.consensus(*wide, network, graph.to_mask(), 0.1, of_edges=formed)
        new = ga.consensus_update(*inputs, graph, 0.1, edge_hidden=given, backend=backend)
        assert new.dtype == dtype
        torch.testing.assert_close(new.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("listed", [False, True])
def test_hidden_vectors_of_all_edges_are_never_there_at_once(
    monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    monkeypatch.setattr(structured, "CHUNK", 1 << 12)
    graph = ga.window_path_graph(600, 8)  # 9,528 edges
    if listed:
        graph = ga.from_edge_index(graph.edge_index, 600)
    inputs = consensus_inputs(graph, hidden=16)
    given = [x.requires_grad_() for x in of_edges(graph, inputs)[:2]]
    for backend in ("structured", "reference"):
        with Largest() as largest:
            new = ga.consensus_update(
                *inputs, graph, "auto", edge_hidden=ga.FirstLayer(*given), backend=backend
            )
            torch.autograd.grad(new.sum(), given)
        features = graph.num_edges * F
        if backend == "structured":
            assert largest.numel <= max(features, graph.num_edges * 2 * listed)
        else:
            assert largest.numel >= graph.num_edges * 2 * 16


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("degrees", [False, True])
@pytest.mark.parametrize("backend", FAST)
def test_the_operator_keeps_the_promises_of_torch_library(
    backend: str, degrees: bool, form: str
) -> None:
    graph = ga.batch([ga.window_path_graph(4, 1), ga.window_path_graph(3, 1)])
    inputs = consensus_inputs(graph, batch=(2,))
    layer = of_edges(graph, inputs, 2)
    pair = layer[:2] if form == "factored" else (by_loops(layer), None)
    tensors = (*inputs[2:4], inputs.state, inputs.neighbor_state.clone(), *inputs.network)
    tensors, pair = (
        tuple(None if x is None else x.clone().requires_grad_() for x in inputs)
        for inputs in (tensors, pair)
    )
    valid = torch.rand(2, 7) < 0.8
    torch.library.opcheck(
        torch.ops.graphattn.consensus,
        (
            *(tensors[0], None, None, tensors[1], None, None, *tensors[2:], *pair),
            *(valid, valid, graph.code, None, True, degrees, backend, False),
        ),
    )


def test_torch_func_and_forward_differentiation_look_into_it() -> None:
    graph = GRAPHS["path"]()
    inputs = consensus_inputs(graph)
    layer = of_edges(graph, inputs)

    def step(tokens: Tensor) -> Tensor:
        return ga.consensus_update(
            *inputs, graph, "auto", edge_hidden=layer._replace(tokens=tokens)
        )

    mapped = torch.func.vmap(step)(torch.stack([layer.tokens, 2 * layer.tokens]))
    torch.testing.assert_close(mapped[1], step(2 * layer.tokens), **EXACT)
    forward = torch.func.jacfwd(step)(layer.tokens)
    backward = torch.autograd.functional.jacobian(step, layer.tokens)
    torch.testing.assert_close(forward, backward, **EXACT)


def test_kernels_say_that_they_take_none() -> None:
    graph = GRAPHS["path"]()
    inputs = consensus_inputs(graph, dtype=torch.float32)
    state = inputs.state.to("meta")
    reason = support(table.BACKENDS, ConsensusKind(state, 1, edge_hidden=True))["triton"]
    assert reason is not None
    with pytest.raises(ValueError, match="backend 'triton' cannot run this case"):
        ga.consensus_update(
            *inputs,
            graph,
            0.1,
            edge_hidden=torch.zeros(graph.num_edges, 2, 4),
            backend="triton",
        )


E = 14  # edges of ga.window_path_graph(5, 2)
REFUSED: dict[str, tuple[Any, str]] = {
    "no tensor": ([[0.0]], r"edge_hidden must be a tensor, got list"),
    "integers": (torch.zeros(E, 2, 4).long(), r"edge_hidden must be torch.float64, got .*int64"),
    "another dtype": (torch.zeros(E, 2, 4), r"edge_hidden must be torch.float64, got .*float32"),
    "an edge too few": (
        torch.zeros(E - 1, 2, 4).double(),
        r"edge_hidden must have shape \[14, 2, 4\] or \[3, 14, 2, 4\].*got \[13, 2, 4\]",
    ),
    "another batch": (torch.zeros(2, E, 2, 4).double(), r"edge_hidden must have shape"),
    "one group": (torch.zeros(E, 1, 4).double(), r"edge_hidden must have shape"),
    "a bias": (
        ga.FirstLayer(torch.zeros(E, 1, F), torch.zeros(2, 4, F), torch.zeros(2, 4)),
        r"edge_hidden\.bias must be None",
    ),
    "features without their group dimension": (
        ga.FirstLayer(torch.zeros(E, F), torch.zeros(2, 4, F)),
        r"edge_hidden\.tokens must have shape \[14, 1, 3\] or \[3, 14, 1, 3\]",
    ),
    "features of another graph": (
        ga.FirstLayer(torch.zeros(E + 1, 1, F), torch.zeros(2, 4, F)),
        r"edge_hidden\.tokens must have shape .*got \[15, 1, 3\]",
    ),
    "a weight for other features": (
        ga.FirstLayer(torch.zeros(E, 1, F), torch.zeros(2, 4, F + 1)),
        r"edge_hidden\.weight must have shape \[2, 4, 3\].*got \[2, 4, 4\]",
    ),
    "whole numbers": (
        ga.FirstLayer(torch.zeros(E, 1, F).int(), torch.zeros(2, 4, F)),
        r"edge_hidden\.tokens must be floating-point, got torch.int32",
    ),
    "another device": (
        ga.FirstLayer(torch.zeros(E, 1, F, device="meta"), torch.zeros(2, 4, F)),
        r"edge_hidden\.tokens must be on cpu, got meta",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    given, message = REFUSED[case]
    graph = ga.window_path_graph(5, 2)
    assert graph.num_edges == E
    inputs = consensus_inputs(graph, batch=(3,))
    with pytest.raises(ValueError, match=message):
        ga.consensus_update(*inputs, graph, 0.1, edge_hidden=given)
    with pytest.raises(ValueError, match=message):
        ga.consensus_edge_matrices(*inputs[2:], graph, edge_hidden=given)


def test_an_edge_list_must_be_sorted() -> None:
    mask = random_mask(6, 6, 0.5, seed=2)
    graph = ga.from_mask(mask)
    inputs = consensus_inputs(graph)
    layer = of_edges(graph, inputs)
    expected = ga.consensus_update(*inputs, graph, 0.1, edge_hidden=layer)
    new = ga.consensus_update(*inputs, graph.edge_index, 0.1, edge_hidden=layer)
    torch.testing.assert_close(new, expected, **EXACT)
    with pytest.raises(ValueError, match="edge_index must be sorted"):
        ga.consensus_update(*inputs, shuffled(mask), 0.1, edge_hidden=layer)
