"""Consensus over a token graph: the public functions.

A call is checked (`calls.py`), one backend of the table is chosen (`backends.py`), and that backend
runs it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.backends import choose
from graphattn.ops.consensus import reference
from graphattn.ops.consensus.backends import BACKENDS
from graphattn.ops.consensus.calls import (
    ConsensusCall,
    as_disagreement,
    as_step,
    check_arguments,
    check_energy_graph,
    check_network,
)
from graphattn.ops.consensus.edge_network import (
    EdgeHidden,
    EdgeNetworkParameters,
    FirstLayer,
    as_dtype,
    check_edge_hidden,
    in_dtype,
)
from graphattn.ops.inputs import (
    Valid,
    check_graph,
    check_tensors,
    check_valid,
    clear_invalid,
    compute_dtype,
    full_precision,
)

Update = Literal["energy", "target"]


def consensus_update(
    state: Tensor,
    neighbor_state: Tensor,
    target_hidden: Tensor | FirstLayer,
    source_hidden: Tensor | FirstLayer,
    edge_network: EdgeNetworkParameters,
    graph: TokenGraph | Tensor,
    step_size: float | Tensor | Literal["auto"],
    *,
    update: Update = "energy",
    disagreement: tuple[Tensor, Tensor] | None = None,
    valid: Valid = None,
    backend: str = "auto",
    edge_hidden: EdgeHidden = None,
) -> Tensor:
    r"""One consensus step: every token moves towards the tokens it shares an edge with.

    Tensors are [*, tokens, heads, features]; [*, heads, tokens, features] becomes that by
    ``x.transpose(1, 2)``. With as many heads as tokens, a wrong layout raises no error.

    .. math::
        u_i' = u_i - \eta \, g_i, \qquad
        R_{ij} = \alpha_{ij} I + \beta_{ij} \Lambda_{ij}^\top \Lambda_{ij}

    update = "energy" is the exact gradient step of
    :math:`E(u) = \frac12 \sum_{(i,j)} (u_i - u_j)^\top R_{ij} (u_i - u_j)`
    (Stabilizing Transformer Training Through Consensus, Eq. 14, Algorithms 1, 2 and 5): it moves
    both ends of every edge, :math:`g_i = \sum_j R_{ij} (u_i - u_j) + \sum_k R_{ki} (u_i - u_k)`.
    update = "target" moves the target only, :math:`g_i = \sum_j R_{ij} (u_i - v_j)` (Algorithms 3,
    4 and 6). Causal graphs and cross-consensus need this one.

    R is positive definite and never formed. An edge's hidden vector is
    ``gelu(target_hidden_i + source_hidden_j)`` (exact GELU): the edge network's first layer acts
    on [y_i; y_j], so it splits into two products that are computed once per token. Features of the
    edge itself (a distance, a kind of bond) are a third input of that layer: `edge_hidden`.

    Args:
        state: u, the states that move, [*, N, H, D].
        neighbor_state: v, the states of the sources, [*, M, H, D]; `state` itself in
            self-consensus.
        target_hidden: [*, N, G, xi], G = H or 1 (one network for all heads). With 3 * xi features
            the thirds feed alpha, beta and Lambda (``trunk="separate"``: Algorithm 2, literally).
        source_hidden: [*, M, G, xi], likewise. Either may be a :class:`~graphattn.FirstLayer`,
            whose hidden vectors the operation then forms itself.
        edge_network: :class:`EdgeNetworkParameters`, the second layer.
        graph: N targets, M sources; shared by all leading dimensions.
        step_size: eta: a float, a tensor broadcastable to [*, N, H], or "auto": for "energy"
            1 / (2 max_i d_i) per head and sequence, d_i the sum of alpha + beta over the in- and
            out-edges of i (never oscillates); for "target" 1 / sum_j (alpha + beta)_ij per row.
        update: "energy" or "target".
        disagreement: (u, v) to use inside the differences only (rotary embedding, Eq. 42).
        valid: bool [*, N] or [N], or a pair for (targets, sources); an edge that touches an
            invalid token is no edge, and what invalid tokens hold is never read. They keep their
            state; NaN and infinity in it read as 0.
        backend: "reference" stores tensors with numbers of every edge. "structured" computes the
            edges in chunks, and does not list those of a window. "native" does the same in C++ on
            a CPU, and "triton" in fused kernels on a GPU, which support one trunk and multiply in
            the dtype of the tensors. "auto" takes "triton" on a GPU, "native" on a CPU and
            "structured" elsewhere. Inside torch.func, which must see every operation, it takes
            "reference". With `edge_hidden`, "triton" refuses and "auto" takes "structured" on a
            GPU, too.
        edge_hidden: F e_ij for features e_ij of edges, which is added to the hidden vector of an
            edge before GELU. Either a :class:`~graphattn.FirstLayer` with ``tokens`` [E, 1, F] or
            [*, E, 1, F], the features in the order of ``graph.edge_index``, and ``weight``
            [G, xi, F] (no bias), which is applied to a chunk of edges at a time. Or the product
            itself, [E, G, xi] or [*, E, G, xi], which needs more memory. An edge_index must be
            sorted. Edges (i, j) and (j, i) have their own features; those of edges of invalid
            tokens are never read.

    Returns:
        u', [*, N, H, D] in the dtype of `state`. Half precision is computed in float32; "triton"
        keeps the factors of matrix products and the messages of edges in half precision.

    Raises:
        ValueError: names the argument, its value and what is allowed. "energy" on a causal graph
            is refused, because edge (i, j), j < i, would also move j, depending on the later i.

    Example:
        >>> import torch, graphattn as ga
        >>> network = ga.EdgeNetworkParameters(  # R = softplus(0) I = 0.693 I
        ...     alpha=torch.zeros(1, 3), alpha_bias=torch.zeros(1), beta=torch.zeros(1, 3),
        ...     beta_bias=torch.full((1,), -1e9), shear=torch.zeros(1, 2, 1, 3),
        ...     shear_bias=torch.zeros(1, 2, 1))
        >>> u, hidden = torch.tensor([0.0, 0.0, 1.0]).view(3, 1, 1), torch.zeros(3, 1, 3)
        >>> graph = ga.window_path_graph(3, window=1)
        >>> ga.consensus_update(u, u, hidden, hidden, network, graph, 0.1).flatten()
        tensor([0.0000, 0.1386, 0.8614])
    """
    network = check_arguments(state, neighbor_state, target_hidden, source_hidden, edge_network)
    N, M = state.shape[-3], neighbor_state.shape[-3]
    of_edges = edge_hidden is not None
    graph = check_graph(graph, state, N, M, per_edge=of_edges, source=neighbor_state)
    if as_choice("update", update, ("energy", "target")) == "energy":
        check_energy_graph(graph)
    pair = check_valid(valid, state.shape[:-3], state.device, N, M)
    call = ConsensusCall(
        state, target_hidden, source_hidden, network, graph, step_size, update,
        as_disagreement(disagreement, state, neighbor_state), pair,
        check_edge_hidden(edge_hidden, state, target_hidden.shape, graph),
    )  # fmt: skip
    return run(call, backend)


def run(call: ConsensusCall, backend: str) -> Tensor:
    """Run a checked step, u', [*, N, H, D], by the backend that is asked for."""
    state, (of_target, _) = call.state, call.valid
    dtype = compute_dtype(state.dtype)
    step = as_step(call.step_size, state, dtype)
    moving = state
    if of_target is not None:  # an invalid token keeps its state, but must not spread a NaN
        moving = torch.where(of_target[..., None, None], state, state.nan_to_num(0.0, 0.0, 0.0))
        if step is not None:
            step = torch.where(of_target[..., None], step, 0)
    target_hidden, source_hidden = [
        x._replace(tokens=clear_invalid(x.tokens, of)) if isinstance(x, FirstLayer) else x
        for x, of in zip((call.target_hidden, call.source_hidden), call.valid, strict=True)
    ]
    call = call._replace(
        state=moving,
        target_hidden=target_hidden,
        source_hidden=source_hidden,
        step_size=step,
        edge_hidden=None if call.edge_hidden is None else in_dtype(call.edge_hidden, dtype),
    )
    new: Tensor = choose(BACKENDS, call, backend)(call)
    if of_target is not None and step is None:  # the automatic step may have moved it
        new = torch.where(of_target[..., None, None], new, moving)
    return as_dtype(new, state.dtype)


def consensus_edge_matrices(
    target_hidden: Tensor,
    source_hidden: Tensor,
    edge_network: EdgeNetworkParameters,
    graph: TokenGraph | Tensor,
    *,
    edge_hidden: EdgeHidden = None,
) -> Tensor:
    """R of every edge and head, [*, E, H, D, D] in the order of ``graph.edge_index``, for study.

    The arguments are those of :func:`consensus_update`. Every R is symmetric positive definite,
    with eigenvalues between alpha and alpha + beta.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> network = ga.EdgeNetworkParameters(
        ...     *(torch.randn(s) for s in [(2, 5), (2,), (2, 5), (2,), (2, 4, 3, 5), (2, 4, 3)]))
        >>> hidden, graph = torch.randn(6, 2, 5), ga.window_path_graph(6, window=2)
        >>> R = ga.consensus_edge_matrices(hidden, hidden, network, graph)
        >>> R.shape  # 18 edges, 2 heads, 3 x 3
        torch.Size([18, 2, 3, 3])
        >>> bool((torch.linalg.eigvalsh(R) > 0).all())
        True
    """
    check_tensors(target_hidden=target_hidden, source_hidden=source_hidden)
    network = check_network(edge_network, target_hidden, target_hidden.shape, source_hidden.shape)
    graph = check_graph(
        graph,
        target_hidden,
        target_hidden.shape[-3],
        source_hidden.shape[-3],
        per_edge=True,
        source=source_hidden,
    )
    edge_hidden = check_edge_hidden(edge_hidden, target_hidden, target_hidden.shape, graph)
    dtype = compute_dtype(target_hidden.dtype)
    with full_precision(target_hidden.device):
        R = reference.edge_matrices(
            target_hidden.to(dtype),
            source_hidden.to(dtype),
            network,
            graph,
            edge_hidden=in_dtype(edge_hidden, dtype),
        )
        return R.dense().to(target_hidden.dtype)
