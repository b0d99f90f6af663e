"""Check Appendix A: edges with positive definite matrices, and the layer that learns them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Claim, ClaimCase, Size
from graphattn.cli.verify.graphs import generator, random_digraph

Array = NDArray[np.float64]
ZERO = 1e-11  # eigenvalues below this, relative to the largest, count as 0


def random_matrices(graph: ga.TokenGraph, seed: int) -> Tensor:
    """Draw positive definite matrices R, [E, C, C], with C from 1 to 4.

    The eigenvalues differ by up to a factor of 100. Every third draw has R = I up to rounding.
    The lower and the upper bound of the claim are equal for R = I.
    """
    draw = generator(seed)
    C, E = int(torch.randint(1, 5, (), generator=draw)), graph.num_edges
    basis, _ = torch.linalg.qr(torch.randn(E, C, C, dtype=torch.float64, generator=draw))
    spread = (0.0, 0.02, 1.0)[seed % 3]
    stretch = 10 ** (spread * (2 * torch.rand(E, C, dtype=torch.float64, generator=draw) - 1))
    return basis @ torch.diag_embed(stretch) @ basis.mT


def block_laplacian(graph: ga.TokenGraph, R: Tensor) -> Array:
    """Build the matrix of E(u) = 1/2 sum (u_i - u_j)^T R_ij (u_i - u_j), [N C, N C].

    The code adds one edge after another. This is Eq. 21 to 23 with symmetrised weights.
    """
    N, C = graph.num_tokens, R.shape[-1]
    L = np.zeros((N, C, N, C))
    for j, i, block in zip(*graph.edge_index.tolist(), R.numpy(), strict=True):
        if i != j:
            for a, b, sign in ((i, i, 1), (j, j, 1), (i, j, -1), (j, i, -1)):
                L[a, :, b] += sign * block / 2
    return L.reshape(N * C, N * C)


def random_cases(size: Size) -> Iterator[tuple[str, ga.TokenGraph, Tensor]]:
    """Yield paths and digraphs, each with random matrices."""
    for seed in range(size.draws):
        N = 5 + seed % 12
        path = ga.window_path_graph(N, 2)
        yield f"path {N}, w 2, draw {seed}", path, random_matrices(path, seed)
        graph, _ = random_digraph(seed)
        yield f"digraph {seed}", graph, random_matrices(graph, seed)


def sandwich(size: Size) -> Iterator[ClaimCase]:
    """Check the bounds of the Fiedler value with matrices R.

    The bounds are the smallest and the largest eigenvalue of R, each times the Fiedler value
    without R.
    """
    for name, graph, R in random_cases(size):
        value = float(np.linalg.eigvalsh(block_laplacian(graph, R))[R.shape[-1]])
        lower, upper = ga.spectral.matrix_fiedler_bounds(graph, R)
        yield ClaimCase(name, min(value - lower, upper - value) / value, 1e-9)


def fiedler_value_with_matrices(size: Size) -> Iterator[ClaimCase]:
    """Compare the library's value with eigenvalue C + 1 of the matrix built edge by edge."""
    for name, graph, R in random_cases(size):
        expected = float(np.linalg.eigvalsh(block_laplacian(graph, R))[R.shape[-1]])
        found = ga.spectral.matrix_fiedler_value(graph, R)
        yield ClaimCase(name, -abs(found - expected) / expected, 1e-9)


def zero_eigenvalues(size: Size) -> Iterator[ClaimCase]:
    """Check that the matrix has exactly C zero eigenvalues per connected part of the graph.

    The error is the difference between the two numbers.
    """
    for name, graph, R in random_cases(size):
        for parts in (1, 2):
            together, blocks = graph, R
            if parts == 2:
                together, blocks = ga.batch([graph, graph]), torch.cat([R, R])
            values = np.linalg.eigvalsh(block_laplacian(together, blocks))
            zeros = int((np.abs(values) < ZERO * values[-1]).sum())
            yield ClaimCase(f"{name}, {parts} parts", -abs(zeros - parts * R.shape[-1]))


# The layer, with its learned matrices.


def random_layer(seed: int) -> tuple[ga.nn.SelfConsensus, ga.TokenGraph, Tensor]:
    """Make a layer in float64, a graph and random tokens.

    The projections of the layer are the identity, so the layer computes only its step.
    """
    torch.manual_seed(seed)
    dim, heads = 8, 2
    layer = ga.nn.SelfConsensus(
        dim,
        heads,
        rank=1 + seed % 3,
        edge_hidden=8,
        step_size="auto",
        update="energy",
        bias=False,
    ).double()
    with torch.no_grad():
        for projection in (layer.source_proj, layer.output_proj):
            projection.weight.copy_(torch.eye(dim))
        for parameter in layer.edge_net.parameters():
            parameter.mul_(1 + 3 * torch.rand(()))  # larger differences than after initialisation
    graph, _ = random_digraph(seed, num_tokens=6 + seed % 5)
    return layer, graph, torch.randn(graph.num_tokens, dim, dtype=torch.float64)


@torch.no_grad()
def step_matrices(layer: ga.nn.SelfConsensus, x: Tensor, graph: ga.TokenGraph) -> Tensor:
    """Compute the matrix of the layer's step for every head, [H, ND, ND].

    The step is linear in its state if the matrices of the edges are fixed, here to those of x.

    Raises:
        ArithmeticError: if the matrices, applied to x, do not give the output of the layer.
    """
    N, H, D = graph.num_tokens, layer.heads, layer.head_dim
    unit = torch.eye(N * D, dtype=torch.float64).view(N * D, N, 1, D).expand(-1, -1, H, -1)
    target_hidden, source_hidden = (
        hidden_of(x).expand(N * D, -1, -1, -1)
        for hidden_of in (layer.edge_net.target_hidden, layer.edge_net.source_hidden)
    )
    network = layer.edge_net.second_layer()
    columns = ga.consensus_update(
        unit, unit, target_hidden, source_hidden, network, graph, "auto", update="energy"
    )
    H_sym = columns.permute(2, 1, 3, 0).reshape(H, N * D, N * D)
    state = x.view(N, H, D).transpose(0, 1).reshape(H, N * D, 1)
    moved = (H_sym @ state).view(H, N, D).transpose(0, 1).reshape(N, H * D)
    if not torch.allclose(moved, layer(x, graph), rtol=1e-9, atol=1e-9):
        raise ArithmeticError("the output of the layer differs from that of its operation")
    return H_sym


def automatic_step_never_oscillates(size: Size) -> Iterator[ClaimCase]:
    """Check that no eigenvalue of the step is below 0, for random weights."""
    for seed in range(size.draws):
        layer, graph, x = random_layer(seed)
        values = torch.linalg.eigvalsh(step_matrices(layer, x, graph))
        yield ClaimCase(f"layer {seed}", float(values.min()), 1e-12)


def automatic_step_is_low_pass(size: Size) -> Iterator[ClaimCase]:
    """Check that the matrix of the step is symmetric and that its largest eigenvalue is 1.

    No mode then grows in a step.
    """
    for seed in range(size.draws):
        layer, graph, x = random_layer(seed)
        H = step_matrices(layer, x, graph)
        largest = torch.linalg.eigvalsh(H)[:, -1]
        error = max(float((H - H.mT).abs().max()), float((largest - 1).abs().max()))
        yield ClaimCase(f"layer {seed}", -error, 1e-12)


@torch.no_grad()
def automatic_step_descends(size: Size) -> Iterator[ClaimCase]:
    """Check that the energy of every head falls, for the token features and for random states."""
    for seed in range(size.draws):
        layer, graph, x = random_layer(seed)
        N, H, D = graph.num_tokens, layer.heads, layer.head_dim
        edge_net = layer.edge_net
        hidden = edge_net.target_hidden(x), edge_net.source_hidden(x)
        R = ga.consensus_edge_matrices(*hidden, edge_net.second_layer(), graph)
        steps = step_matrices(layer, x, graph)
        for u in (x, torch.randn_like(x)):
            before = u.view(N, H, D)
            moved = steps @ before.transpose(0, 1).reshape(H, N * D, 1)
            after = moved.view(H, N, D).transpose(0, 1)
            energy = [_energy(graph, R, state) for state in (before, after)]
            yield ClaimCase(f"layer {seed}", float(((energy[0] - energy[1]) / energy[0]).min()))


def _energy(graph: ga.TokenGraph, R: Tensor, u: Tensor) -> Tensor:
    """Compute the energy of every head (Eq. 14) from u [N, H, D] and R [E, H, D, D]."""
    source, target = graph.edge_index
    gap = u[target] - u[source]
    return 0.5 * torch.einsum("ehc,ehcd,ehd->h", gap, R, gap)


CLAIMS = [
    Claim(
        "matrix weights: a λ₁ ≤ λ ≤ b λ₁",
        "Section 4, Appendix A",
        "With matrices R whose eigenvalues lie in [a, b], the Fiedler value lies between a and b "
        "times that of the unweighted graph.",
        sandwich,
    ),
    Claim(
        "matrix weights: the Fiedler value",
        "Appendix A, Eq. 21-23",
        "The smallest eigenvalue beyond the constant modes, beside a matrix built edge by edge.",
        fiedler_value_with_matrices,
        "equation",
    ),
    Claim(
        "matrix weights: D zero eigenvalues",
        "Appendix A, Eq. 24, corrected",
        "The Laplacian has exactly D zero eigenvalues for every connected part.",
        zero_eigenvalues,
        "equation",
    ),
    Claim(
        "SelfConsensus auto: no oscillation",
        "Section 2.2, Algorithm 5",
        'SelfConsensus(update="energy", step_size="auto"): no eigenvalue of the step is negative.',
        automatic_step_never_oscillates,
    ),
    Claim(
        "SelfConsensus auto: low-pass",
        "Section 2.2, Algorithm 5",
        "Its step is a symmetric matrix with largest eigenvalue 1.",
        automatic_step_is_low_pass,
        "equation",
    ),
    Claim(
        "SelfConsensus auto: energy falls",
        "Eq. 14, Algorithm 5",
        "The energy of every head falls.",
        automatic_step_descends,
    ),
]
