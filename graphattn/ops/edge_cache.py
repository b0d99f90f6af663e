"""A cache of values that are computed from the list of edges of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.stored import NOT_STORED, OnStream, as_entry, may_store

T = TypeVar("T")

# The key is the tensor that lists the edges, because operators get that list and not the graph.
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def cached_by_edges(graph: TokenGraph, make: Callable[[TokenGraph, Tensor], T]) -> T:
    """Return ``make(graph, listed)``, computed once per list of edges.

    `listed` is the graph's edge list, or its table of neighbours. The result is stored as long as
    that tensor lives. If it was changed in place, its version differs and the result is computed
    again. The result must hold neither the graph nor a view of its list, because then the list
    would live forever; ``graph.compact_csr()`` may be stored.
    """
    listed = graph.compact_neighbors
    listed = graph.compact_edges if listed is None else listed
    version = None if listed.is_inference() else listed._version
    key = make, graph.num_targets, graph.num_sources, not graph.is_table
    stored_version, values = _cache.get(listed, (None, {}))
    if version is None or version != stored_version:
        values = {}
    result: T = values.get(key, NOT_STORED)
    if result is NOT_STORED:
        # Detached, because a stored value must not itself keep the list alive.
        with graph.storing():
            result = make(graph, listed.detach())
            if may_store(listed.device):
                _cache[listed] = version, values | {key: as_entry(result, listed.device)}
    elif isinstance(result, OnStream):
        result = result.read()
    return result
