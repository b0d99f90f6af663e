"""Certificates of consensus layers whose edge network sees features of edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.spectral import certify

DIM, HEADS, F = 12, 3, 2
GRAPHS = {
    "window": lambda: ga.window_path_graph(10, 2),
    "cycle": lambda: ga.window_cycle_graph(9, 2),
    "grid": lambda: ga.grid_window_graph(3, 3, 1, class_token=True),
    "random": lambda: ga.from_mask(
        torch.rand(9, 9, generator=torch.Generator().manual_seed(3)) < 0.45
    ),
}


def consensus(**options: Any) -> Any:
    torch.manual_seed(0)
    layer = ga.nn.SelfConsensus(
        DIM, HEADS, **{"rank": 2, "edge_hidden": 8, "edge_features": F, **options}
    )
    with torch.no_grad():
        layer.edge_net.edge.weight.mul_(5)  # what edges have matters
    return layer


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_matrices(layer: Any, x: Tensor, graph: ga.TokenGraph, e: Tensor) -> Tensor:
    """The layer's own step from any u with R held at x, [H, N D, N D] in float64, by autograd."""
    layer, x, e = layer.double(), x.double(), e.double()
    N, D = len(x), DIM // HEADS
    with torch.no_grad():
        layer.output_proj.weight.copy_(torch.eye(DIM))
        layer.output_proj.bias.zero_()

    def step(u: Tensor) -> Tensor:
        handle = layer.source_proj.register_forward_hook(lambda module, given, out: u)
        try:
            return layer(x, graph, edge_features=e)
        finally:
            handle.remove()

    jacobian = torch.autograd.functional.jacobian(step, torch.zeros(N, DIM).double())
    heads = jacobian.unflatten(-1, (HEADS, D)).unflatten(1, (HEADS, D))
    return torch.stack([heads[:, h, :, :, h].reshape(N * D, N * D) for h in range(HEADS)])


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("options", [{"step_size": 0.05}, {"step_size": "auto"}], ids=str)
def test_numbers_are_those_of_the_layers_own_step(name: str, options: dict[str, Any]) -> None:
    graph = GRAPHS[name]()
    layer, x, e = consensus(**options), drawn(graph.num_targets, DIM), drawn(graph.num_edges, F)
    certificate = certify(layer, x, graph=graph, edge_features=e)
    matrices = step_matrices(layer, x, graph, e)
    torch.testing.assert_close(matrices, matrices.mT, rtol=0, atol=1e-12)
    values = torch.linalg.eigvalsh(matrices)
    numbers = certificate["low-pass filter"].numbers["1 - 2 eta lambda_max"]
    assert numbers == pytest.approx(float(values.min()), abs=1e-9)
    other = certify(layer, x, graph=graph, edge_features=0 * e)
    assert abs(other["low-pass filter"].numbers["1 - 2 eta lambda_max"] - numbers) > 1e-4


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("rope", [False, "isometric"])
def test_every_guarantee_holds_with_the_automatic_step(name: str, rope: Any) -> None:
    graph = GRAPHS[name]()
    layer = consensus(step_size="auto", rope=rope)
    for scale in (1.0, 100.0):
        e = scale * drawn(graph.num_edges, F)
        certificate = certify(layer, drawn(graph.num_targets, DIM), graph=graph, edge_features=e)
        for fact in ("low-pass filter", "energy falls", "constants stay"):
            assert certificate[fact].status == "holds"
        assert certificate.sound


def assert_same_numbers(part: Any, alone: Any) -> None:
    for fact in alone.facts:
        assert part[fact.name].status == fact.status
        for name, value in fact.numbers.items():
            assert part[fact.name].numbers[name] == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("per_sequence", [False, True], ids=["shared", "per sequence"])
@pytest.mark.parametrize("update", ["energy", "target"])
def test_a_sequence_of_a_batch_is_certified_with_its_own_features_and_without_padding(
    update: str, per_sequence: bool
) -> None:
    layer, graph = consensus(update=update), ga.window_path_graph(9, 2)
    x, e = drawn(2, 9, DIM), drawn(*([2] if per_sequence else []), graph.num_edges, F)
    valid = torch.stack([torch.arange(9) < 6, torch.arange(9) >= 0])
    certificate = certify(layer, x, graph=graph, valid=valid, edge_features=e)
    first, second = (e[0], e[1]) if per_sequence else (e, e)
    short = ga.window_path_graph(6, 2)
    source, target = graph.edge_index
    inside = (source < 6) & (target < 6)
    assert_same_numbers(
        certificate.parts["x[0]"],
        certify(layer, x[0, :6], graph=short, edge_features=first[inside]),
    )
    assert_same_numbers(
        certificate.parts["x[1]"], certify(layer, x[1], graph=graph, edge_features=second)
    )


def test_packed_sequences_are_certified_with_their_own_features() -> None:
    layer, graphs = consensus(), [ga.window_path_graph(6, 2), ga.window_cycle_graph(5, 1)]
    x, e = [drawn(6, DIM), drawn(5, DIM, seed=1)], [drawn(g.num_edges, F) for g in graphs]
    packed = certify(layer, torch.cat(x), graph=ga.batch(graphs), edge_features=torch.cat(e))
    for p in range(2):
        alone = certify(layer, x[p], graph=graphs[p], edge_features=e[p])
        assert_same_numbers(packed.parts[f"sequence {p}"], alone)


def test_a_block_and_an_encoder_are_certified_with_the_features_they_are_called_with() -> None:
    graph = ga.window_path_graph(9, 2)
    block, x, e = ga.nn.PreNormBlock(consensus()), drawn(9, DIM), drawn(graph.num_edges, F)
    certificate = certify(block, x, graph=graph, edge_features=e)
    wide = ga.nn.PreNormBlock(block.mixer).double()
    wide.load_state_dict(block.state_dict())
    reached = wide.mixer_norm(x.double()).detach()
    assert_same_numbers(
        certificate.parts["mixer"], certify(wide.mixer, reached, graph=graph, edge_features=e)
    )
    model = ga.models.SequenceEncoder(
        9, DIM, depth=2, heads=3, mixer="mix", edge_hidden=4, rope=False, edge_features=F
    )
    tokens = torch.randint(9, (9,))
    for given in (e, [None, e]):
        parts = certify(model, tokens, graph=graph, edge_features=given).parts
        assert list(parts) == ["blocks.0.mixer", "blocks.1.mixer"]
    other = certify(model, tokens, graph=graph, edge_features=0 * e).parts["blocks.1.mixer"]
    name = "1 - 2 eta lambda_max"
    part = parts["blocks.1.mixer"]["low-pass filter"].numbers[name]
    assert abs(other["low-pass filter"].numbers[name] - part) > 1e-7


def test_features_are_never_ignored() -> None:
    graph = ga.from_mask(torch.rand(8, 8) < 0.5)
    layer, x, e = consensus(), drawn(8, DIM), drawn(graph.num_edges, F)
    with pytest.raises(ValueError, match=r"edge_features must be a tensor of shape .* got None"):
        certify(layer, x, graph=graph)
    with pytest.raises(ValueError, match="made with edge_features=0"):
        certify(consensus_without(), x, graph=graph, edge_features=e)
    with pytest.raises(ValueError, match="edge_features must have shape"):
        certify(layer, x, graph=graph, edge_features=e[:-1])
    with pytest.raises(
        ValueError, match="edge_features must be None unless the layer is a consensus layer"
    ):
        certify(ga.nn.KrauseAttention(DIM, HEADS), x, graph=graph, edge_features=e)
    with pytest.raises(
        ValueError, match="edge_features must be None if the first argument is a graph"
    ):
        certify(graph, edge_features=e)
    with pytest.raises(ValueError, match="edge_index must be sorted"):
        certify(layer, x, graph=graph.edge_index.flip(1), edge_features=e)


def consensus_without() -> Any:
    return ga.nn.SelfConsensus(DIM, HEADS, edge_hidden=8)
