"""Check Appendix A: edges with positive definite matrices, and the layer that learns them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Size, claim
from graphattn.cli.verify.graphs import generator, random_digraph

Array = NDArray[np.float64]
Rope = bool | Literal["isometric"]
ZERO = 1e-11  # eigenvalues below this, relative to the largest, count as 0


def random_matrices(graph: ga.TokenGraph, seed: int) -> Tensor:
    """Draw positive definite matrices R, [E, C, C], with C from 1 to 4.

    The eigenvalues differ by up to a factor of 100. Every third draw has R = I up to rounding, for
    which the lower and the upper bound of the claim are equal.
    """
    draw = generator(seed)
    C, E = int(torch.randint(1, 5, (), generator=draw)), graph.num_edges
    basis, _ = torch.linalg.qr(torch.randn(E, C, C, dtype=torch.float64, generator=draw))
    spread = (0.0, 0.02, 1.0)[seed % 3]
    stretch = 10 ** (spread * (2 * torch.rand(E, C, dtype=torch.float64, generator=draw) - 1))
    return basis @ torch.diag_embed(stretch) @ basis.mT


def block_laplacian(graph: ga.TokenGraph, R: Tensor) -> Array:
    """Build the matrix of E(u) edge by edge, [N C, N C]: Eq. 21 to 23, weights symmetrised."""
    N, C = graph.num_tokens, R.shape[-1]
    L = np.zeros((N, C, N, C))
    for j, i, block in zip(*graph.edge_index.tolist(), R.numpy(), strict=True):
        if i != j:
            for a, b, sign in ((i, i, 1), (j, j, 1), (i, j, -1), (j, i, -1)):
                L[a, :, b] += sign * block / 2
    return L.reshape(N * C, N * C)


class MatrixWeights(NamedTuple):
    """A graph of one or two connected parts with a matrix R for every edge, [E, C, C]."""

    name: str
    graph: ga.TokenGraph
    R: Tensor
    parts: int = 1

    @property
    def eigenvalues(self) -> NDArray[Any]:
        """The eigenvalues of the Laplacian, in ascending order; one part has C zeros."""
        return np.linalg.eigvalsh(block_laplacian(self.graph, self.R))

    @property
    def fiedler_value(self) -> float:
        return float(self.eigenvalues[self.R.shape[-1]])


def random_weights(size: Size) -> Iterator[MatrixWeights]:
    for seed in range(size.draws):
        N = 5 + seed % 12
        path = ga.window_path_graph(N, 2)
        yield MatrixWeights(f"path {N}, w 2, draw {seed}", path, random_matrices(path, seed))
        graph, _ = random_digraph(seed)
        yield MatrixWeights(f"digraph {seed}", graph, random_matrices(graph, seed))


def one_and_two_parts(size: Size) -> Iterator[MatrixWeights]:
    """Yield the graphs of `random_weights`, alone and twice side by side."""
    for name, graph, R, _ in random_weights(size):
        yield MatrixWeights(f"{name}, 1 parts", graph, R)
        yield MatrixWeights(f"{name}, 2 parts", ga.batch([graph, graph]), torch.cat([R, R]), 2)


@claim("matrix weights: a λ₁ ≤ λ ≤ b λ₁", "Section 4, Appendix A", random_weights)
def sandwich(case: MatrixWeights) -> tuple[float, float]:
    """The Fiedler value with matrices R whose eigenvalues lie in [a, b] lies between a and b
    times that of the unweighted graph."""
    value = case.fiedler_value
    lower, upper = ga.spectral.matrix_fiedler_bounds(case.graph, case.R)
    return min(value - lower, upper - value) / value, 1e-9


@claim("matrix weights: the Fiedler value", "Appendix A, Eq. 21-23", random_weights, "equation")
def fiedler_value_with_matrices(case: MatrixWeights) -> tuple[float, float]:
    """The smallest eigenvalue beyond the constant modes, beside a matrix built edge by edge."""
    expected = case.fiedler_value
    return -abs(ga.spectral.matrix_fiedler_value(case.graph, case.R) - expected) / expected, 1e-9


@claim(
    "matrix weights: D zero eigenvalues",
    "Appendix A, Eq. 24, corrected",
    one_and_two_parts,
    "equation",
)
def zero_eigenvalues(case: MatrixWeights) -> tuple[float, float]:
    """The Laplacian has exactly D zero eigenvalues for every connected part."""
    values = case.eigenvalues
    zeros = int((np.abs(values) < ZERO * values[-1]).sum())
    return -float(abs(zeros - case.parts * case.R.shape[-1])), 0.0


# The layer, with its learned matrices.


class RandomLayer(NamedTuple):
    """A layer in float64 that computes only its step, a graph, and tokens [N, dim]."""

    name: str
    layer: ga.nn.SelfConsensus
    graph: ga.TokenGraph
    x: Tensor

    @property
    def steps(self) -> Tensor:
        return step_matrices(self.layer, self.x, self.graph)


def random_layers(size: Size, rope: Rope = False) -> Iterator[RandomLayer]:
    """Yield layers with an automatic step size and random weights."""
    dim, heads = 8, 2
    for seed in range(size.draws):
        torch.manual_seed(seed)
        layer = ga.nn.SelfConsensus(
            dim, heads, rank=1 + seed % 3, edge_hidden=8, step_size="auto", rope=rope, bias=False
        ).double()
        with torch.no_grad():
            for projection in (layer.source_proj, layer.output_proj):
                projection.weight.copy_(torch.eye(dim))
            for parameter in layer.edge_net.parameters():
                parameter.mul_(1 + 3 * torch.rand(()))  # larger differences than at the start
        graph, _ = random_digraph(seed, num_tokens=6 + seed % 5)
        x = torch.randn(graph.num_tokens, dim, dtype=torch.float64)
        yield RandomLayer(f"layer {seed}", layer, graph, x)


@torch.no_grad()
def step_matrices(layer: ga.nn.SelfConsensus, x: Tensor, graph: ga.TokenGraph) -> Tensor:
    """Compute the matrix of the layer's step for every head, [H, ND, ND].

    The step is linear in its states if the matrices of the edges are fixed, here to those of the
    tokens x. The states are therefore replaced by unit vectors behind the source projection.

    Raises:
        ArithmeticError: if a head depends on another one, or if the matrices, applied to x, do not
            give the output of the layer.
    """
    N, H, D = graph.num_tokens, layer.heads, layer.head_dim
    unit = torch.eye(N * H * D, dtype=torch.float64).view(-1, N, H * D)
    hook = layer.source_proj.register_forward_hook(lambda *_: unit)
    try:
        moved = layer(x.expand_as(unit), graph)
    finally:
        hook.remove()
    # The response of (token, head, feature) to the unit vector of (token, head, feature).
    responses = moved.view(N, H, D, N, H, D).permute(4, 1, 3, 5, 0, 2)
    by_heads = responses.reshape(H, H, N * D, N * D)
    head = torch.arange(H)
    matrices = by_heads[head, head]
    state = x.view(N, H, D).transpose(0, 1).reshape(H, N * D, 1)
    out = (matrices @ state).view(H, N, D).transpose(0, 1).reshape(N, H * D)
    if by_heads[head[:, None] != head].any() or not torch.allclose(
        out, layer(x, graph), rtol=1e-9, atol=1e-9
    ):
        raise ArithmeticError("the step of the layer is not linear in its states, head by head")
    return matrices


@claim("SelfConsensus auto: no oscillation", "Section 2.2, Algorithm 5", random_layers)
def automatic_step_never_oscillates(case: RandomLayer) -> tuple[float, float]:
    """SelfConsensus(update="energy", step_size="auto"): no eigenvalue of the step is negative."""
    return float(torch.linalg.eigvalsh(case.steps).min()), 1e-12


@claim("SelfConsensus auto: low-pass", "Section 2.2, Algorithm 5", random_layers, "equation")
def automatic_step_is_low_pass(case: RandomLayer) -> tuple[float, float]:
    """The step of SelfConsensus is a symmetric matrix with largest eigenvalue 1."""
    H = case.steps
    largest = torch.linalg.eigvalsh(H)[:, -1]
    return -max(float((H - H.mT).abs().max()), float((largest - 1).abs().max())), 1e-12


class LayerState(NamedTuple):
    """A layer, and a state [N, dim] from which it takes a step."""

    case: RandomLayer
    u: Tensor

    @property
    def name(self) -> str:
        return self.case.name


def layers_and_states(size: Size) -> Iterator[LayerState]:
    """Yield every layer with its token features, and with a random state."""
    for case in random_layers(size):
        yield LayerState(case, case.x)
        yield LayerState(case, torch.randn_like(case.x))


@claim("SelfConsensus auto: energy falls", "Eq. 14, Algorithm 5", layers_and_states)
@torch.no_grad()
def automatic_step_descends(state: LayerState) -> tuple[float, float]:
    """The energy of every head falls."""
    (_, layer, graph, x), u = state
    N, H, D = graph.num_tokens, layer.heads, layer.head_dim
    edge_net = layer.edge_net
    hidden = edge_net.target_hidden(x), edge_net.source_hidden(x)
    R = ga.consensus_edge_matrices(*hidden, edge_net.second_layer(), graph)
    before = u.view(N, H, D)
    moved = step_matrices(layer, x, graph) @ before.transpose(0, 1).reshape(H, N * D, 1)
    after = moved.view(H, N, D).transpose(0, 1)
    first, last = (energies(graph, R, state) for state in (before, after))
    return float(((first - last) / first).min()), 0.0


def energies(graph: ga.TokenGraph, R: Tensor, u: Tensor) -> Tensor:
    """Compute the energy of every head (Eq. 14) from u [N, H, D] and R [E, H, D, D]."""
    source, target = graph.edge_index
    gap = u[target] - u[source]
    return 0.5 * torch.einsum("ehc,ehcd,ehd->h", gap, R, gap)
