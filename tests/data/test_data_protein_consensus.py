"""A protein: residues move towards each other as their distances in space say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga

DIM, HEADS, F = 8, 2, 4
CENTRES = torch.tensor([4.0, 6.0, 8.0, 10.0], dtype=torch.float64)  # Angstrom


@pytest.fixture(scope="module")
def residues(real_file: Callable[[str], Path]) -> Tensor:
    """C-alpha positions of a chain of 1A8O (70 residues), [N, 3]."""
    pytest.importorskip("biotite")
    chain = ga.data.read_structure(real_file("structure/pdb/1a8o.pdb"))
    return chain.ca_positions.double()


def bumps(positions: Tensor, graph: ga.TokenGraph) -> Tensor:
    """Distances along edges as radial basis functions of width 2 Angstrom, [E, F]."""
    source, target = graph.edge_index
    distance = (positions[target] - positions[source]).norm(dim=-1)
    return torch.exp(-(((distance[:, None] - CENTRES) / 2) ** 2))


def layer_and_tokens(positions: Tensor, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    layer = ga.nn.SelfConsensus(DIM, HEADS, rank=2, edge_hidden=6, edge_features=F, **options)
    return layer.double(), torch.randn(len(positions), DIM, dtype=torch.float64)


def graphs(positions: Tensor) -> list[ga.TokenGraph]:
    """Make the graphs of the eight nearest residues in space and of neighbours along the chain."""
    return [ga.knn_graph(positions, k=8), ga.window_path_graph(len(positions), 3)]


def step_by_loops(layer: Any, x: Tensor, graph: ga.TokenGraph, e: Tensor) -> Tensor:
    """W_o u' + b_o with update "energy", edge by edge and number by number."""
    state = {name: value.tolist() for name, value in layer.state_dict().items()}
    D = DIM // HEADS
    N, tokens, features = len(x), x.tolist(), e.tolist()

    def dot(a: list[float], b: list[float]) -> float:
        return math.fsum(p * q for p, q in zip(a, b, strict=True))

    def affine(name: str, y: list[float]) -> list[float]:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return [dot(row, y) + b for row, b in zip(weight, bias, strict=True)]

    def softplus(a: float) -> float:
        return max(a, 0.0) + math.log1p(math.exp(-abs(a)))

    u = [affine("source_proj", y) for y in tokens]
    moved = [list(row) for row in u]
    net = {name.removeprefix("edge_net."): v for name, v in state.items()}
    for edge, (j, i) in enumerate(graph.edge_index.T.tolist()):
        for h in range(HEADS):
            head = slice(h * D, (h + 1) * D)
            hidden = []
            for k, bias in enumerate(net["target.bias"][h]):
                total = bias + dot(net["target.weight"][h][k], tokens[i][head])
                total += dot(net["source.weight"][h][k], tokens[j][head])
                total += dot(net["edge.weight"][h][k], features[edge])
                hidden.append(total / 2 * (1 + math.erf(total / math.sqrt(2))))
            alpha = softplus(dot(net["alpha"][h], hidden) + net["alpha_bias"][h])
            beta = softplus(dot(net["beta"][h], hidden) + net["beta_bias"][h])
            d = [p - q for p, q in zip(u[i][head], u[j][head], strict=True)]
            pull = [alpha * p for p in d]
            shear = net["shear"][h]
            for row, biases in zip(shear, net["shear_bias"][h], strict=True):
                raw = [dot(w, hidden) + b for w, b in zip(row, biases, strict=True)]
                share = beta / len(shear) * dot(raw, d) / dot(raw, raw)
                pull = [p + share * q for p, q in zip(pull, raw, strict=True)]
            for c in range(D):
                moved[i][h * D + c] -= layer.step_size * pull[c]
                moved[j][h * D + c] += layer.step_size * pull[c]
    new = [affine("output_proj", moved[i]) for i in range(N)]
    return torch.tensor(new, dtype=torch.float64)


def test_a_step_over_a_protein_is_its_equation(residues):
    for graph in graphs(residues):
        layer, x = layer_and_tokens(residues)
        e = bumps(residues, graph)
        expected = step_by_loops(layer, x, graph, e)
        for backend in ("structured", "reference"):
            with ga.use_backend(backend):
                out = layer(x, graph, edge_features=e)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"update": "target"}, {"step_size": "auto"}], ids=str)
def test_distances_change_the_result_and_gradients_reach_their_projection(residues, options):
    for graph in graphs(residues):
        layer, x = layer_and_tokens(residues, **options)
        positions = residues.clone().requires_grad_()
        e = bumps(positions, graph)
        out = layer(x, graph, edge_features=e)
        still = layer.output_proj(layer.source_proj(x))
        elsewhere = layer(x, graph, edge_features=bumps(2 * residues, graph))
        assert (out - elsewhere).norm() > 1e-3 * (out - still).norm()
        loss = out.square().mean()
        projection = layer.edge_net.edge.weight
        of_projection, of_positions = torch.autograd.grad(loss, [projection, positions])
        assert (of_projection != 0).all()
        assert (of_positions != 0).any(dim=-1).all()  # every residue is somebody's neighbour
        # Along the gradient the loss rises by its squared length.
        slope = 1e-6 / of_projection.norm()
        with torch.no_grad():
            projection += slope * of_projection
            risen = layer(x, graph, edge_features=e).square().mean() - loss
        assert float(risen / slope) == pytest.approx(float(of_projection.square().sum()), rel=1e-3)
