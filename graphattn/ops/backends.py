"""Which implementation runs an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph, as_token_graph

OPERATIONS = ("rbf_attention", "dot_product_attention", "consensus_update")
BACKENDS = ("reference", "structured", "triton")

_override: ContextVar[str] = ContextVar("graphattn_backend", default="auto")


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block, ``backend="auto"`` means `backend`; explicit choices stay.

    It holds for the current thread or task (a context variable), not for threads started inside.

    Example:
        >>> import graphattn as ga
        >>> with ga.use_backend("reference"):
        ...     pass  # every layer and operation runs its readable message-passing form
    """
    check_backend(backend)
    token = _override.set(backend)
    try:
        yield
    finally:
        _override.reset(token)


def backends(op: str, graph: Any, query: Tensor) -> dict[str, str | None]:
    """Which backends can run an operation on these inputs, and why the others cannot.

    Args:
        op: "rbf_attention", "dot_product_attention" or "consensus_update".
        graph: the TokenGraph (or edge_index) of the call.
        query: its query, or the state of a consensus update, [*, N, H, D]: shape, dtype and device
            count, not what it holds. (Today every case has the same answer.)

    Returns:
        Backend -> None where it can run, otherwise the reason why it cannot. An operation that is
        asked for such a backend by name raises with that reason; ``backend="auto"`` takes the
        fastest of the others.

    Raises:
        ValueError: for an unknown operation, or tensors that do not fit the graph.

    Example:
        >>> import torch, graphattn as ga
        >>> graph, query = ga.causal_graph(16), torch.randn(16, 4, 8)
        >>> support = ga.backends("rbf_attention", graph, query)
        >>> [backend for backend, why_not in support.items() if why_not is None]
        ['reference']
        >>> print(support["triton"])
        not implemented yet
    """
    as_choice("op", op, OPERATIONS)
    if not isinstance(query, Tensor) or query.dim() < 3 or not query.is_floating_point():
        got = list(query.shape) if isinstance(query, Tensor) else type(query).__name__
        raise ValueError(f"query must be a floating-point tensor [*, N, H, D], got {got}")
    N = query.shape[-3]
    if isinstance(graph, TokenGraph):
        as_token_graph(graph, N, graph.num_sources)
    else:  # a list of edges does not tell how many sources there are beyond the last it names
        sources = int(graph[0].max()) + 1 if isinstance(graph, Tensor) and graph.numel() else N
        as_token_graph(torch.as_tensor(graph) if isinstance(graph, Tensor) else graph, N, sources)
    return {backend: _why_not(backend) for backend in BACKENDS}


def _why_not(backend: str) -> str | None:
    """Why a backend cannot run; None where it can."""
    return None if backend == "reference" else "not implemented yet"


def check_backend(backend: str) -> str:
    """`backend` if it can run; a ValueError with the reason otherwise."""
    as_choice("backend", backend, ("auto", *BACKENDS))
    reason = None if backend == "auto" else _why_not(backend)
    if reason is not None:
        raise ValueError(
            f"backend {backend!r} cannot run: {reason} (every operation runs on 'reference')"
        )
    return backend


def wanted_backend(backend: str) -> str:
    """What a caller's `backend` argument asks for, the surrounding `use_backend` included."""
    check_backend(backend)
    return _override.get() if backend == "auto" else backend
