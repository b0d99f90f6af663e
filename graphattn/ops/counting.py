"""Operations per call, for torch's FlopCounterMode: from the edges of the graph, and exact.

A multiply-add is two operations. As everywhere in FlopCounterMode, elementwise work (exponentials,
GELU, sums at the ends of edges) is not counted. A distance costs as much as a product, because
|q - k|^2 is a product and two norms. A backward pass has two products for every product of the
forward pass. It also computes again what the forward pass does not store: the logits of attention,
and the matrix of an edge. Padding counts, as in torch's own operations, since shapes include it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphattn.graphs.token_graph import TokenGraph, decode
from graphattn.ops.linear_attention.intervals import runs_of

Formula = Callable[..., int]
COUNTER = "torch.utils.flop_counter"  # imported only by users that count, because it imports triton

_uncounted: ContextVar[dict[str, None] | None] = ContextVar("graphattn_uncounted", default=None)


@contextmanager
def uncounted_calls() -> Iterator[dict[str, None]]:
    """Collect, within the block, the names of calls that FlopCounterMode does not count."""
    seen: dict[str, None] = {}
    token = _uncounted.set(seen)
    try:
        yield seen
    finally:
        _uncounted.reset(token)


def note_uncounted(name: str) -> None:
    """Remember `name` for :func:`uncounted_calls`."""
    if not torch.compiler.is_compiling() and (seen := _uncounted.get()) is not None:
        seen[name] = None


def attention_operations(
    graph: TokenGraph,
    entries: int,
    heads: int,
    features: int,
    value_features: int,
    *,
    top_k: int | None = None,
    backward: bool = False,
) -> int:
    """Count the operations of RBF or dot-product attention over a graph, for some batch entries.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.ops.counting import attention_operations
        >>> attention_operations(ga.complete_graph(10), 1, 2, 8, 8)  # 2 * 2 * 10 * 10 * 16
        6400
    """
    scored = graph.num_edges
    selected = scored if top_k is None else int(graph.in_degree().clamp(max=top_k).sum())
    both = features + value_features
    if backward:
        products = scored * features + 2 * selected * both
    else:
        products = scored * features + selected * value_features
    return 2 * entries * heads * products


def consensus_operations(
    graph: TokenGraph,
    entries: int,
    heads: int,
    features: int,
    *,
    rank: int,
    edge_hidden: int,
    backward: bool = False,
) -> int:
    """Count the operations of a consensus step behind the edge network's first layer.

    Per edge and head alpha, beta and Lambda from xi hidden numbers, and Lambda and its transpose
    applied to a difference: 2 (xi (r D + 2) + 2 r D), the O(N d w r (xi + 1)) of Table 1 of the
    consensus paper with its constants.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.ops.counting import consensus_operations
        >>> graph = ga.window_path_graph(100, window=2)  # 394 edges
        >>> consensus_operations(graph, 1, 1, features=8, rank=4, edge_hidden=16)
        479104
    """
    rows = rank * features
    network, applied = edge_hidden * (rows + 2), 2 * rows
    products = 3 * network + 5 * rows if backward else network + applied
    return 2 * entries * heads * graph.num_edges * products


def linear_sum_operations(
    graph: TokenGraph, entries: int, heads: int, features: int, value_features: int
) -> int:
    """Count the operations of the sums of linear attention: numerator, denominator, or both.

    On a complete or causal graph, and on batches of them, every source adds the matrix k v^T and
    every target is multiplied by a sum of these: 2 (N + M) D Dv per head, whatever the chunks.
    Windows and other graphs are counted by their edges, 2 E (D + Dv). The backward pass is three
    such sums.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.ops.counting import linear_sum_operations
        >>> linear_sum_operations(ga.causal_graph(100), 1, 2, 8, 9)  # 2 * 2 * 200 * 8 * 9
        57600
        >>> window = ga.causal_window_graph(100, 4)  # 394 edges
        >>> linear_sum_operations(window, 1, 2, 8, 9)  # 2 * 2 * 394 * 17
        26792
    """
    runs = runs_of(graph.structure)
    if runs is None:
        return 2 * entries * heads * graph.num_edges * (features + value_features)
    products = 0
    for run in runs:
        for interval in run.intervals:
            if interval.is_linear:
                tokens = interval.targets + interval.sources
                products += run.times * tokens * features * value_features
            else:
                products += run.times * interval.num_edges() * (features + value_features)
    return 2 * entries * heads * products


# Formulas with the arguments of the operators, as FlopCounterMode calls them.


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator.default._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _graph(given: dict[str, Any]) -> TokenGraph:
    listed = given["listed"]
    return decode(given["code"], listed, torch.device("cpu") if listed is None else listed.device)


def _of_attention(operator: Any, *, backward: bool) -> Formula:
    def operations(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = _named(operator, args, kwargs)
        *batch, _, heads, features = given["query"].shape
        return attention_operations(
            _graph(given),
            torch.Size(batch).numel(),
            heads,
            features,
            given["value"].shape[-1],
            top_k=given["top_k"],
            backward=backward,
        )

    return operations


def _of_consensus(operator: Any, *, backward: bool) -> Formula:
    def operations(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = _named(operator, args, kwargs)
        entries, _, heads, features = given["u"].shape
        _, rank, _, edge_hidden = given["shear"].shape
        total = consensus_operations(
            _graph(given),
            entries,
            heads,
            features,
            rank=rank,
            edge_hidden=edge_hidden,
            backward=backward,
        )
        # First layers that the operator itself applies: of tokens by kernels, of edges everywhere.
        for name, layer in (
            ("target_tokens", "target_weight"),
            ("source_tokens", "source_weight"),
            ("edge", "edge_weight"),
        ):
            if (weight := given.get(layer)) is not None:
                networks = weight.shape[0] if name == "edge" else 1
                once = 2 * given[name].numel() * networks * weight.shape[1]
                total += 3 * once if backward else once
        return total

    return operations


def _of_linear_sums(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    given = _named(torch.ops.graphattn.linear_sums, args, kwargs)
    *batch, heads, _, features = given["a"].shape
    entries, width = torch.Size(batch).numel(), given["c"].shape[-1]
    return linear_sum_operations(_graph(given), entries, heads, features, width)


def _formulas() -> dict[Any, Formula]:
    library = torch.ops.graphattn
    return {
        library.attention: _of_attention(library.attention, backward=False),
        library.attention_backward: _of_attention(library.attention_backward, backward=True),
        library.consensus: _of_consensus(library.consensus, backward=False),
        library.consensus_backward: _of_consensus(library.consensus_backward, backward=True),
        library.linear_sums: _of_linear_sums,
    }


def register_formulas() -> None:
    """Register the formulas for FlopCounterModes to come and for those that are active."""
    module = sys.modules.get(COUNTER)
    if module is None:
        return
    registries = [module.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            registries.append(registry)
    missing = [registry for registry in registries if torch.ops.graphattn.attention not in registry]
    if missing:
        formulas = _formulas()
        for registry in missing:
            for operator, formula in formulas.items():
                registry.setdefault(operator, formula)
