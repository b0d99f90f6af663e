"""Backends that can run a case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice, as_share, as_softcap
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.ops.attention.backends import BACKENDS as ATTENTION_BACKENDS
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.score import DotProduct
from graphattn.ops.backends import support
from graphattn.ops.consensus.backends import BACKENDS as CONSENSUS_BACKENDS
from graphattn.ops.consensus.calls import ConsensusKind
from graphattn.ops.linear_attention.api import BACKENDS as LINEAR_BACKENDS

OPERATIONS = ("rbf_attention", "dot_product_attention", "linear_attention", "consensus_update")


def backends(
    op: str,
    graph: Any,
    query: Tensor,
    *,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> dict[str, str | None]:
    """Say for every backend whether it can run an operation on these inputs, or why not.

    Args:
        op: "rbf_attention", "dot_product_attention", "linear_attention" or "consensus_update".
        graph: the TokenGraph (or edge_index) of the call.
        query: its query, or the state of a consensus update, [*, N, H, D]. Its shape, dtype and
            device count, not its values.
        softcap, dropout: those of the call, for attention only; not every backend has them.

    Returns:
        For every backend, None if it can run, otherwise the reason why it cannot. An operation that
        is asked for such a backend by name raises a ValueError with that reason;
        ``backend="auto"`` takes the fastest of the others.

    Raises:
        ValueError: for an unknown operation, an option that it does not have, or a tensor that does
            not fit the graph.

    Example:
        >>> import torch, graphattn as ga
        >>> graph, query = ga.causal_graph(16), torch.randn(16, 4, 8)
        >>> support = ga.backends("rbf_attention", graph, query)
        >>> support["reference"] is None and support["structured"] is None
        True
        >>> print(support["triton"])
        its kernels run on CUDA and HIP devices, not on cpu
    """
    as_choice("op", op, OPERATIONS)
    softcap, dropout = as_softcap(softcap), as_share("dropout", dropout)
    for name, value in (("softcap", softcap), ("dropout", dropout)):
        without = op in ("consensus_update", "linear_attention")
        if value and (without or (name, op) == ("softcap", "rbf_attention")):
            raise ValueError(f"{name} is no option of {op}, got {value}")
    if not isinstance(query, Tensor) or query.dim() < 3 or not query.is_floating_point():
        got = list(query.shape) if isinstance(query, Tensor) else type(query).__name__
        raise ValueError(f"query must be a floating-point tensor [*, N, H, D], got {got}")
    N = query.shape[-3]
    if not isinstance(graph, TokenGraph):
        # A list of edges does not say whether there are more sources than those in it.
        edges = torch.as_tensor(graph) if isinstance(graph, Tensor) else graph
        sources = int(edges[0].max()) + 1 if isinstance(edges, Tensor) and edges.numel() else N
        graph = as_token_graph(edges, N, sources)
    graph = as_token_graph(graph, N, graph.num_sources)
    if op == "consensus_update":
        return support(CONSENSUS_BACKENDS, ConsensusKind(query))
    if op == "linear_attention":
        return support(LINEAR_BACKENDS, None)
    call = AttentionCall(
        query=query,
        key=query,
        value=query,
        graph=graph,
        score=DotProduct(),
        softcap=softcap,
        dropout=dropout,
    )
    return support(ATTENTION_BACKENDS, call)
