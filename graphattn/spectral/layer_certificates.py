"""What theory says of a layer on given tokens, beside what is measured."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh
from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.nn import (
    CrossConsensus,
    DotProductAttention,
    GaussianKernelAttention,
    KrauseAttention,
    SelfConsensus,
)
from graphattn.ops import consensus_edge_matrices
from graphattn.spectral.arguments import check_finite
from graphattn.spectral.certificates import SLACK, Certificate, Fact
from graphattn.spectral.classes import eigenvalue_one_multiplicity
from graphattn.spectral.eigenvalues import fiedler_value

PAPER = "Stabilizing Transformer Training Through Consensus"
DENSE = 600  # numbers of a state up to which a map is written out
AT_A_TIME = 64  # states that take a step together
Map = Callable[[Tensor], Tensor]


def certify_layer(layer: nn.Module, x: Tensor | None, graph: TokenGraph | None) -> Certificate:
    """See :func:`graphattn.spectral.certify`."""
    if isinstance(layer, CrossConsensus):
        raise ValueError(
            "graph_or_layer must mix one set of tokens, got CrossConsensus: its output lives on "
            "the targets and its input on the sources, so it has no eigenvalues"
        )
    known = SelfConsensus, DotProductAttention, KrauseAttention, GaussianKernelAttention
    if not isinstance(layer, known):
        names = ", ".join(kind.__name__ for kind in known)
        raise ValueError(
            f"graph_or_layer must be a TokenGraph or one of {names}, got {type(layer).__name__}"
        )
    if not isinstance(x, Tensor) or not isinstance(graph, TokenGraph):
        missing = "x" if not isinstance(x, Tensor) else "graph"
        raise ValueError(
            f"{missing} is needed to certify a layer: tokens x [N, {layer.dim}] and the graph "
            "over which it runs"
        )
    if x.shape != (graph.num_targets, layer.dim):
        raise ValueError(
            f"x must have shape [{graph.num_targets}, {layer.dim}] (tokens of the graph, width of "
            f"the layer), got {list(x.shape)}"
        )
    check_finite(x)
    layer, graph = deepcopy(layer).cpu().double().eval(), graph.to("cpu")
    x = x.detach().to("cpu", torch.float64)
    with torch.no_grad():
        facts = (
            _consensus_facts(layer, x, graph)
            if isinstance(layer, SelfConsensus)
            else _attention_facts(layer, x, graph)
        )
    return Certificate(f"{layer!r} over {graph!r}", tuple(facts))


# Consensus.


def _consensus_facts(layer: SelfConsensus, x: Tensor, graph: TokenGraph) -> list[Fact]:
    step = _frozen_step(layer, x, graph)
    if layer.update_rule == "target":
        reason = (
            "update='target' moves only one end of an edge: it is no gradient step, and its map "
            "can have eigenvalues of negative real part at any step size"
        )
    elif layer.rotary is not None and not layer.isometric:
        reason = (
            "rope=True compares rotated tokens but moves unrotated ones (Eq. 42): no gradient "
            "step any more. rope='isometric' restores the theorem"
        )
    else:
        return _energy_facts(layer, x, graph, step)
    names = ("low-pass filter", "energy falls", "constants stay")
    return [
        *(Fact(name, "not applicable", reason) for name in names),
        Fact(
            "map",
            "measured",
            "of one step with R held fixed, the largest over heads",
            {"norm": _norm(step, layer, graph), "spectral radius": _radius(step, layer, graph)},
        ),
    ]


def _frozen_step(layer: SelfConsensus, x: Tensor, graph: TokenGraph) -> Map:
    """u -> u' for states u [*, N, H, D], with R and the step as the tokens `x` make them."""
    x, _, graph, valid = layer.prepare(x, x, layer.dim, graph, None)
    rotations = layer.rotations(x, x, graph, None)
    hidden = layer.edge_net.target_hidden(x), layer.edge_net.source_hidden(x)

    def step(u: Tensor) -> Tensor:
        compared = layer.rotate(u, u, rotations)
        start = compared[0] if layer.isometric else u
        moved = layer.move(start, compared, _like(hidden, u), graph, valid)
        return layer.turn_back(moved, rotations)

    return step


def _like(hidden: tuple[Tensor, Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence's hidden vectors beside a batch of states."""
    if u.dim() == 3:
        return hidden
    target, source = (h.expand(*u.shape[:-3], *h.shape) for h in hidden)
    return target, source


def _energy_facts(layer: SelfConsensus, x: Tensor, graph: TokenGraph, step: Map) -> list[Fact]:
    u = layer.split(layer.source_proj(x), layer.heads)
    hidden = layer.edge_net.target_hidden(x), layer.edge_net.source_hidden(x)
    second = layer.edge_net.second_layer()
    R = consensus_edge_matrices(*hidden, second, graph)  # [E, H, D, D]
    rotations = layer.rotations(x, x, graph, None)
    source, target = graph.edge_index

    def energy(u: Tensor) -> float:
        u = layer.rotate(u, u, rotations)[0]
        d = u[target] - u[source]
        return float(torch.einsum("ehi,ehij,ehj->", d, R, d) / 2)

    lowest = _lowest(step, layer, graph)  # 1 - 2 eta lambda_max of the worst head
    eigenvalues = torch.linalg.eigvalsh(R)
    before, after = energy(u), energy(step(u))
    constant = layer.turn_back(torch.ones_like(u) * u[:1], rotations)
    name, what = "constants stay", "tokens that agree do not move"
    if layer.isometric:
        what = "tokens that agree after rotation do not move"
    drift = float((step(constant) - constant).abs().max() / constant.abs().max().clamp(min=1e-300))
    facts = [
        Fact(
            "low-pass filter",
            "holds" if lowest >= -SLACK else "violated",
            "no mode changes sign: 1 - 2 eta lambda_max >= 0"
            if lowest >= -SLACK
            else "some mode changes sign in every step: the step is larger than 1 / (2 lambda_max)",
            {"1 - 2 eta lambda_max": lowest},
            f"{PAPER}, Section 2.2 and Appendix A",
        ),
        Fact(
            "energy falls",
            "holds" if after <= before * (1 + SLACK) else "violated",
            "in this step, on these tokens; for certain while 1 - 2 eta lambda_max > -1",
            {"before": before, "after": after},
            f"{PAPER}, Eq. 5-7, with R",
        ),
        Fact(
            name,
            "holds" if drift <= SLACK else "violated",
            what,
            {"largest relative change": drift},
            f"{PAPER}, Appendix A",
        ),
    ]
    if layer.isometric:
        return facts
    slowest = _slowest(step, layer, graph)
    mean = float((step(u).mean(0) - u.mean(0)).abs().max())
    facts.append(
        Fact(
            "mean stays",
            "holds" if mean <= SLACK * float(1 + u.abs().max()) else "violated",
            "every edge moves both ends by the same amount",
            {"drift": mean},
            f"{PAPER}, Algorithm 1",
        )
    )
    eta = layer.step_tensor()
    if isinstance(eta, float) and lowest >= -SLACK:
        # Smallest eigenvalue over all edges and heads times the unweighted Fiedler value.
        weakest = float(eigenvalues.min()) if eigenvalues.numel() else 0.0
        bound = 1 - 2 * eta * weakest * fiedler_value(graph)
        facts.append(
            Fact(
                "rate",
                "holds" if slowest <= bound + SLACK else "violated",
                "the slowest mode shrinks at least as fast as the sandwich of Appendix A says",
                {"slowest mode": slowest, "bound": bound},
                f"{PAPER}, Appendix A",
            )
        )
    else:
        facts.append(
            Fact(
                "rate",
                "measured",
                "of the slowest mode, over heads; the sandwich of Appendix A speaks of a given "
                "step no larger than 1 / (2 lambda_max)",
                {"slowest mode": slowest},
            )
        )
    return facts


# Attention.


def _attention_facts(layer: nn.Module, x: Tensor, graph: TokenGraph) -> list[Fact]:
    _, weights = layer(x, graph, return_attention_weights=True)  # [E, H]
    target = graph.edge_index[1]
    sums = torch.zeros(graph.num_targets, weights.shape[-1], dtype=weights.dtype)
    sums.index_add_(0, target, weights)
    has_edges = graph.in_degree() > 0
    error = float((sums[has_edges] - 1).abs().max()) if bool(has_edges.any()) else 0.0
    averages = error <= 1e-9 and bool((weights >= 0).all())
    facts = [
        Fact(
            "rows are averages",
            "holds" if averages else "not applicable",
            "every token's values are an average of those it sees: nothing leaves their hull"
            if averages
            else "rows do not sum to 1 (eps > 0): values shrink towards 0",
            {"largest |row sum - 1|": error},
        )
    ]
    if averages and bool(has_edges.all()):
        classes = [
            eigenvalue_one_multiplicity(graph, weights[:, h]) for h in range(weights.shape[-1])
        ]
        facts.append(
            Fact(
                "eigenvalue 1",
                "holds",
                "as often as there are closed classes of tokens, per head",
                {f"head {h}": float(count) for h, count in enumerate(classes)},
                "Krause attention, multi-cluster formation",
            )
        )
    reason = "attention is no gradient step on an energy of the graph: rows are normalised"
    facts.append(Fact("energy falls", "not applicable", reason))
    return facts


# The ends of a map's spectrum, over states [N, H, D] of all heads at once.


def _operator(step: Map, layer: SelfConsensus, graph: TokenGraph) -> LinearOperator:
    shape = graph.num_targets, layer.heads, layer.head_dim
    size = int(np.prod(shape))

    def apply(u: NDArray[np.float64]) -> NDArray[np.float64]:
        columns = u.reshape(size, -1).T  # [k, N H D]
        states = torch.from_numpy(np.ascontiguousarray(columns)).view(-1, *shape)
        moved = torch.cat([step(few) for few in states.split(AT_A_TIME)])
        return moved.reshape(-1, size).T.numpy().reshape(u.shape)

    return LinearOperator((size, size), matvec=apply, matmat=apply, dtype=np.float64)


def _lowest(step: Map, layer: SelfConsensus, graph: TokenGraph) -> float:
    """The smallest eigenvalue of a symmetric map."""
    T = _operator(step, layer, graph)
    if T.shape[0] <= DENSE:
        return float(np.linalg.eigvalsh(T.matmat(np.eye(T.shape[0])))[0])
    return float(eigsh(T, k=1, which="SA", tol=1e-9, v0=_start(T), return_eigenvectors=False)[0])


def _slowest(step: Map, layer: SelfConsensus, graph: TokenGraph) -> float:
    """The largest |eigenvalue| of a symmetric map beside those of constants."""
    shape = graph.num_targets, layer.heads * layer.head_dim
    T = _operator(step, layer, graph)

    def deflated(u: NDArray[np.float64]) -> NDArray[np.float64]:
        u = u.reshape(*shape, -1)
        u = (u - u.mean(0)).reshape(T.shape[0], -1)
        moved = T.matmat(u).reshape(*shape, -1)
        return (moved - moved.mean(0)).reshape(T.shape[0], -1)

    if T.shape[0] <= DENSE:
        return float(np.abs(np.linalg.eigvalsh(deflated(np.eye(T.shape[0])))).max())
    operator = LinearOperator(T.shape, matvec=deflated, matmat=deflated, dtype=np.float64)
    found = eigsh(operator, k=1, which="LM", tol=1e-9, v0=_start(T), return_eigenvectors=False)
    return float(np.abs(found).max())


def _radius(step: Map, layer: SelfConsensus, graph: TokenGraph) -> float:
    T = _operator(step, layer, graph)
    if T.shape[0] <= DENSE:
        return float(np.abs(np.linalg.eigvals(T.matmat(np.eye(T.shape[0])))).max())
    try:
        found = eigs(T, k=1, which="LM", tol=1e-6, v0=_start(T), return_eigenvectors=False)
    except ArpackNoConvergence as error:
        found = error.eigenvalues if len(error.eigenvalues) else np.array([np.nan])
    return float(np.abs(found).max())


def _norm(step: Map, layer: SelfConsensus, graph: TokenGraph) -> float:
    """The largest singular value; the transposed map comes from autograd."""
    T = _operator(step, layer, graph)
    if T.shape[0] <= DENSE:
        return float(np.linalg.norm(T.matmat(np.eye(T.shape[0])), 2))
    shape = graph.num_targets, layer.heads, layer.head_dim

    def square(u: NDArray[np.float64]) -> NDArray[np.float64]:
        with torch.enable_grad():
            zero = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
            moved = step(torch.from_numpy(u.reshape(shape)))
            (back,) = torch.autograd.grad(step(zero), zero, moved)
        return back.flatten().numpy()

    operator = LinearOperator(T.shape, matvec=square, dtype=np.float64)
    found = eigsh(operator, k=1, which="LA", tol=1e-9, v0=_start(T), return_eigenvectors=False)
    return float(np.sqrt(found[0]))


def _start(T: LinearOperator) -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal(T.shape[0])
