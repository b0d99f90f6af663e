"""Errata of the four papers: statements, printed or tempting, that are false.

Each comes with a counterexample and the correct statement.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.functional import jacobian

import graphattn as ga
from graphattn.cli.verify.claims import Exhibit, erratum
from graphattn.cli.verify.filtering import filter_matrix
from graphattn.cli.verify.graphs import generator, star
from graphattn.cli.verify.matrix_weights import block_laplacian

Array = NDArray[np.float64]


def papers_laplacian(graph: ga.TokenGraph) -> Array:
    """(L + L^T) / 2 with L = D_out - W (Eq. 4): W[i, j] = 1 where target i looks at source j."""
    W = graph.to_mask().double().numpy()
    L = np.diag(W.sum(1)) - W
    return (L + L.T) / 2


def hub_looks_at_three() -> tuple[ga.TokenGraph, Tensor]:
    """Make the graph in which token 0 sees three others, with the states 0 and 1."""
    graph = ga.from_edge_index(torch.tensor([[1, 2, 3], [0, 0, 0]]), 4)
    return graph, torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)


@erratum(
    "Eq. 4, 5",
    "E(u) = uᵀ L u with out-degrees, for directed graphs",
    "the Laplacian of the symmetrised weights",
)
def energy_by_out_degrees() -> Exhibit:
    graph, u = hub_looks_at_three()
    energy = float(ga.spectral.energy(graph, u))
    papers, ours = (
        float(u.numpy() @ L @ u.numpy())
        for L in (papers_laplacian(graph), ga.spectral.laplacian(graph).toarray())
    )
    numbers = {"E(u)": energy, "uᵀ L u as printed": papers, "corrected": ours}
    return Exhibit(abs(papers - energy), ours - energy, numbers)


@erratum("Section 2.2", "L_sym = (L + Lᵀ) / 2 is positive semidefinite", "D(W_sym) - W_sym is")
def semidefinite_by_out_degrees() -> Exhibit:
    graph, _ = hub_looks_at_three()
    papers = float(np.linalg.eigvalsh(papers_laplacian(graph))[0])
    ours = float(np.linalg.eigvalsh(ga.spectral.laplacian(graph).toarray())[0])
    share = np.mean([_has_negative(seed) for seed in range(100)])
    numbers = {
        "smallest eigenvalue as printed": papers,
        "corrected": ours,
        "share of 100 random digraphs": float(share),
    }
    return Exhibit(-papers, min(ours, 0.0), numbers)


def _has_negative(seed: int) -> bool:
    graph = ga.from_mask(torch.rand(5, 5, generator=generator(seed)) < 0.5)
    return bool(np.linalg.eigvalsh(papers_laplacian(graph))[0] < -1e-9)


@erratum("Eq. 12", "the limit is (1/N) 1ᵀ 1 u, which is u", "(1/N) 1 1ᵀ u, the mean")
def limit_of_equation_12() -> Exhibit:
    N, u = 8, np.arange(8.0)
    graph = ga.window_path_graph(N, 2)
    H = filter_matrix(graph, ga.spectral.max_step_size(graph), None)
    limit = np.linalg.matrix_power(H, 4000) @ u
    one = np.ones((N, 1))
    printed = float((one.T @ one)[0, 0]) / N * u  # 1^T 1 is the number N: u itself
    right = (one @ one.T) @ u / N
    numbers = {
        "u_0": float(u[0]),
        "limit_0": float(limit[0]),
        "(1/N) 1ᵀ1 u as printed": float(printed[0]),
        "(1/N) 1 1ᵀ u": float(right[0]),
    }
    wrong, error = (float(np.abs(stated - limit).max()) for stated in (printed, right))
    return Exhibit(wrong, error, numbers)


@erratum("Eq. 24", "L_sym v = 0 for v = (1_d, 0, …, 0)", "for v = 1_N ⊗ e_k, one per coordinate")
def eigenvectors_of_equation_24() -> Exhibit:
    N, d = 6, 2
    graph = ga.window_path_graph(N, 2)
    R = torch.eye(d, dtype=torch.float64).expand(graph.num_edges, d, d)
    L = block_laplacian(graph, R)
    printed = np.zeros(N * d)
    printed[:d] = 1  # cat(1_d, 0_d, ..., 0_d)
    right = np.kron(np.ones(N), np.eye(d)[0])  # 1_N (x) e_k
    wrong_by, right_by = (float(np.linalg.norm(L @ v)) for v in (printed, right))
    numbers = {"‖L v‖, v = (1_d, 0, …, 0)": wrong_by, "v = 1_N ⊗ e_k": right_by}
    return Exhibit(wrong_by, right_by, numbers)


@erratum("Algorithm 3", "b_Λ has r entries", "r d, as in Algorithm 2")
def bias_of_algorithm_3() -> Exhibit:
    rank, dim = 4, 16
    layer = ga.nn.CrossConsensus(dim, 1, rank=rank, edge_hidden=8)
    needed = layer.edge_net.shear[..., 0].numel()  # entries of W_Lambda phi
    has = layer.edge_net.shear_bias.numel()
    numbers = {"r as printed": float(rank), "needed: r d": float(needed), "has": float(has)}
    return Exhibit(float(needed - rank), float(needed - has), numbers)


@erratum(
    "Eq. 42",
    "with RoPE a safe step stays safe",
    'only if the step is rotated back: rope="isometric"',
)
def rope_amplifies() -> Exhibit:
    """N 24, w 2, R = I, eta = 1 / (4 d_max) = 1 / 16, one head of 8 features."""
    options: tuple[bool | Literal["isometric"], ...] = (False, True, "isometric")
    radius = {rope: _spectral_radius(rope) for rope in options}
    numbers = {
        "spectral radius without RoPE": radius[False],
        "Eq. 42": radius[True],
        'rope="isometric"': radius["isometric"],
    }
    return Exhibit(radius[True] - 1, radius["isometric"] - 1, numbers)


def _spectral_radius(rope: bool | Literal["isometric"]) -> float:
    N, dim = 24, 8
    layer = ga.nn.SelfConsensus(dim, 1, edge_hidden=4, step_size=1 / 16, rope=rope, bias=False)
    layer = layer.double()
    with torch.no_grad():
        for projection in (layer.source_proj, layer.output_proj):
            projection.weight.copy_(torch.eye(dim))
        for weight, bias, strength in (
            (layer.edge_net.alpha, layer.edge_net.alpha_bias, math.log(math.expm1(1.0))),
            (layer.edge_net.beta, layer.edge_net.beta_bias, -1e9),
        ):  # alpha = 1, beta = 0: R = I
            weight.zero_()
            bias.fill_(strength)
    graph = ga.window_path_graph(N, 2)
    unit = torch.eye(N * dim, dtype=torch.float64)
    with torch.no_grad():  # R does not depend on the tokens: the map is linear
        step = layer(unit.view(N * dim, N, dim), graph).reshape(N * dim, N * dim).T
    return float(torch.linalg.eigvals(step).abs().max())


@erratum(
    "Algorithms 3, 4, 6",
    "moving the target only is a low-pass filter too",
    'matrices R allow growth at every step; update="energy" does not',
)
def target_update_leaves_the_half_plane() -> Exhibit:
    """Find the worst of some random networks on three tokens that see each other, and on a path."""
    graphs = {"K3": ga.complete_graph(3, self_loops=False), "path": ga.window_path_graph(6, 2)}
    worst = {
        name: min(_slowest_real(graph, seed) for seed in range(60))
        for name, graph in graphs.items()
    }
    symmetric = min(_slowest_real(graphs["K3"], seed, "energy") for seed in range(60))
    numbers = {
        "smallest real part, K3": worst["K3"],
        "path 6, w 2": worst["path"],
        'K3, update="energy"': symmetric,
    }
    return Exhibit(-worst["K3"], min(symmetric, 0.0), numbers)


def _slowest_real(
    graph: ga.TokenGraph, seed: int, update: Literal["energy", "target"] = "target"
) -> float:
    """Return the smallest real part of the eigenvalues of u -> (u - step(u)) / eta, relative.

    A negative one means growth at every step size: |1 - eta mu| > 1.
    """
    N, D, xi = graph.num_tokens, 2, 8
    draw = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    network = ga.EdgeNetworkParameters(
        alpha=torch.zeros(1, xi, dtype=torch.float64),
        # R is almost only beta Lambda^T Lambda.
        alpha_bias=torch.full((1,), -6.0, dtype=torch.float64),
        beta=normal(1, xi),
        beta_bias=torch.ones(1, dtype=torch.float64),
        shear=normal(1, 1, D, xi),
        shear_bias=torch.zeros(1, 1, D, dtype=torch.float64),
    )
    unit = torch.eye(N * D, dtype=torch.float64).view(N * D, N, 1, D)
    target_hidden, source_hidden = (normal(1, N, 1, xi).expand(N * D, -1, -1, -1) for _ in range(2))
    moved = ga.consensus_update(
        unit, unit, target_hidden, source_hidden, network, graph, 1.0, update=update
    )
    pull = (unit - moved).view(N * D, N * D).T
    values = torch.linalg.eigvals(pull)
    return float(values.real.min() / values.abs().max())


@erratum(
    "Section 2.2",
    "degrees of one direction give a safe step",
    "edges of both directions count",
)
def one_direction_on_a_star() -> Exhibit:
    """Use a star: eight leaves see a hub, R = I. d_max is 1 with in-edges only, 8 with all
    edges."""
    graph = star(8)
    top = ga.spectral.max_eigenvalue(graph)
    one_way, both_ways = 1 / (4 * 1), 1 / (2 * 8)
    left = {eta: 1 - 2 * eta * top for eta in (one_way, both_ways)}
    numbers = {
        "limit 1 / (2 λ_max)": ga.spectral.max_step_size(graph),
        "step by one direction": one_way,
        "factor of the top mode": left[one_way],
        "step by both": both_ways,
        "its factor, by both": left[both_ways],
    }
    return Exhibit(-left[one_way], min(left[both_ways], 0.0), numbers)


@erratum(
    "Algorithm 1",
    "the gradient step runs on causal graphs",
    'earlier tokens then depend on later ones; with update="target" they do not',
)
def energy_on_a_causal_graph() -> Exhibit:
    """Return token 0 as a function of token 5, which comes later."""
    graph = ga.causal_graph(6)
    eta = ga.spectral.max_step_size(graph)
    leak = float(filter_matrix(graph, eta, None)[0, 5])
    x = torch.zeros(6, 4, dtype=torch.float64)
    layer = ga.nn.SelfConsensus(4, 1, edge_hidden=4, update="target", bias=False).double()
    step = jacobian(lambda u: layer(u, graph), x)  # [N, dim, N, dim]
    by_target = float(step[0, :, 5].abs().max())
    numbers = {"∂u₀' / ∂u₅ of a gradient step": leak, 'update="target"': by_target}
    return Exhibit(abs(leak), by_target, numbers)


# Other papers.


@erratum(
    "Clusters, Section 3.3",
    "scaling the queries instead of the products widens the spectral gap",
    "both are one operator; what was measured also shrinks keys, values and X",
)
def scaled_queries() -> Exhibit:
    x = ga.dynamics.standardize(torch.randn(24, 4, dtype=torch.float64, generator=generator(0)))
    end = {
        scaling: ga.dynamics.simulate(x, ga.complete_graph(24), steps=5, scaling=scaling).states[-1]
        for scaling in ("sdp", "sq", "sq_inplace")
    }
    apart = {
        name: float((end[name] - end["sdp"]).abs().max() / end["sdp"].abs().max())
        for name in ("sq", "sq_inplace")
    }
    numbers = {"queries scaled: difference": apart["sq"], "in place": apart["sq_inplace"]}
    return Exhibit(apart["sq_inplace"], apart["sq"], numbers)


@erratum(
    "Consensus, Table 9",
    "Algorithm 5 has 55,600 parameters per unit of ξ",
    "258,480: every head has a network that reads all of both tokens",
)
def parameters_of_algorithm_5() -> Exhibit:
    def count(**options: Any) -> int:
        with torch.device("meta"):
            few, many = (ga.nn.SelfConsensus(768, 12, edge_hidden=xi, **options) for xi in (1, 2))
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in (few, many)]
        return 12 * (sizes[1] - sizes[0])  # layers

    literal = count(edge_input="full", edge_networks="per_head")
    printed, right = 55_600, 258_480
    numbers = {"printed": float(printed), "counted": float(literal), "heads on slices": count()}
    return Exhibit(abs(literal - printed) / literal, float(literal - right), numbers)


@erratum(
    "Gaussian kernels, Table 5",
    "the value-less DeiT-Ti has 5.28 M parameters",
    "5.27 M: the biases of values that do not exist do not count",
)
def parameters_without_values() -> Exhibit:
    with torch.device("meta"):
        model = ga.models.VisionTransformer.from_preset("deit-tiny", mixer="vlt")
    count, biases = model.num_parameters(), 12 * 192
    numbers = {"counted": float(count), "with the biases": float(count + biases)}
    millions = round(count / 1e6, 2)
    return Exhibit(abs(5.28 - millions), 5.27 - millions, numbers)


@erratum(
    "Krause, ImageNet and CIFAR",
    "Krause attention saves 30 % of the operations of a ViT",
    "at most all work between tokens, 1.4 % of ViT-B on CIFAR",
)
def operations_of_krause_attention() -> Exhibit:
    """Count multiply-adds of ViT-B, 65 tokens of width 768, 12 blocks."""
    N, D, depth = 65, 768, 12
    between = depth * 2 * N * N * D
    maps = depth * 12 * N * D * D + N * 48 * D + D * 10
    share = between / (maps + between)
    projections = depth * 4 * N * D * D / (maps + between)
    printed = 1 - 3.77 / 5.61
    numbers = {
        "printed saving": printed,
        "all work between tokens": share,
        "the four projections": projections,
    }
    return Exhibit(printed - share, 0.014 - round(share, 3), numbers)
