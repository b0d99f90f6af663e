"""A token may be real as a target and padding as a source, or the other way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases_ops import BACKENDS, consensus_inputs
from torch import Tensor

import graphattn as ga

STEPS: dict[str, Any] = {
    "number": 0.2,
    "per head": torch.tensor([0.1, 0.3]),
    "per token": torch.linspace(0.05, 0.3, 14).view(7, 2),
    "auto": "auto",
}
OF_TARGETS = torch.tensor([1, 1, 0, 1, 0, 1, 1]).bool()
OF_SOURCES = torch.tensor([1, 0, 1, 1, 1, 1, 0]).bool()
PAIRS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "two masks": (OF_TARGETS, OF_SOURCES),
    "targets": (OF_TARGETS, None),
    "sources": (None, OF_SOURCES),
    "per sequence": (torch.stack([OF_TARGETS, ~OF_TARGETS]), OF_SOURCES),
}
GRAPHS = {
    "path": ga.window_path_graph(7, 2),
    "list": ga.from_edge_index(ga.window_cycle_graph(7, 2).edge_index, 7),
    "packed": ga.batch([ga.window_path_graph(4, 1), ga.complete_graph(3)]),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "compiled"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("update", ["energy", "target"])
def test_an_invalid_target_keeps_its_state(update: str, step: str, pair: str, backend: str) -> None:
    """A valid source pulls at the targets that look at it; one that is invalid stays."""
    masks = PAIRS[pair]
    if backend == "compiled" and (update, pair) != ("energy", "two masks"):
        pytest.skip("compilations take long, and these say nothing new")
    for graph in GRAPHS.values() if backend != "compiled" else [GRAPHS["path"]]:
        inputs = consensus_inputs(graph, batch=(2,), heads=2)
        state = inputs.state.clone().requires_grad_()
        inputs = inputs._replace(state=state, neighbor_state=state)
        run: Any = ga.consensus_update
        if backend == "compiled":
            torch._dynamo.reset()
            run = torch.compile(run, backend="eager")
        named = "auto" if backend == "compiled" else backend
        new = run(*inputs, graph, STEPS[step], update=update, valid=masks, backend=named)
        real = torch.ones(7, dtype=torch.bool) if masks[0] is None else masks[0]
        real = real.expand(2, 7)
        assert torch.equal(new[~real], state[~real])
        assert (new[real] != state[real]).any()
        (gradient,) = torch.autograd.grad(new[~real].sum(), state)
        assert torch.equal(gradient, (~real)[..., None, None].expand_as(state).to(state.dtype))


@pytest.mark.parametrize("step", STEPS)
def test_the_valid_ones_move_as_on_the_graph_of_the_edges_that_are_left(step: str) -> None:
    for graph in GRAPHS.values():
        inputs = consensus_inputs(graph, heads=2)
        mask = graph.to_mask() & OF_TARGETS[:, None] & OF_SOURCES
        left = ga.from_mask(mask)
        if len(graph.sizes) > 1 and step == "auto":
            left = ga.batch([ga.from_mask(mask[:4, :4]), ga.from_mask(mask[4:, 4:])])
        expected = ga.consensus_update(*inputs, left, STEPS[step])
        new = ga.consensus_update(*inputs, graph, STEPS[step], valid=(OF_TARGETS, OF_SOURCES))
        torch.testing.assert_close(new[OF_TARGETS], expected[OF_TARGETS], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda backend: ga.nn.SelfConsensus(8, 2, edge_hidden=4, backend=backend),
        lambda backend: ga.nn.SelfConsensus(
            8, 2, edge_hidden=4, step_size="auto", rope="isometric", backend=backend
        ),
        lambda backend: ga.nn.SelfConsensus(
            8, 2, edge_hidden=4, update="target", step_size="learned", backend=backend
        ),
        lambda backend: ga.nn.GaussianKernelAttention(8, 2, normalize=True, backend=backend),
        lambda backend: ga.nn.KrauseAttention(8, 2, backend=backend),
        lambda backend: ga.nn.DotProductAttention(8, 2, rope=True, backend=backend),
    ],
    ids=["consensus", "auto", "target", "gaussian", "krause", "dot"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_read_a_token_in_the_role_in_which_it_is_real(make: Any, backend: str) -> None:
    """Layers read a token only in the role, target or source, in which it is valid.

    Results are those of the graph without its edges in the other role. A token that is valid in
    neither role may hold NaN: it is never read.
    """
    torch.manual_seed(0)
    layer, graph = make(backend).double(), ga.window_path_graph(7, 2, self_loops=True)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    of_targets = OF_TARGETS & (torch.arange(7) != 2)
    of_sources = OF_SOURCES & (torch.arange(7) != 2)  # token 2 is padding altogether
    bad = x.clone()
    bad[:, 2] = torch.nan
    moved = layer(bad, graph, valid=(of_targets, of_sources))
    left = ga.from_mask(graph.to_mask() & of_targets[:, None] & of_sources)
    expected = layer(x, left)
    torch.testing.assert_close(
        moved[:, of_targets], expected[:, of_targets], rtol=1e-11, atol=1e-11
    )
