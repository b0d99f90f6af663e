"""Values that are made of a graph's list of edges, kept as long as the list lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from graphattn.graphs.token_graph import TokenGraph, makes_fakes

T = TypeVar("T")

# By the tensor that lists the edges: operators get a graph's list, not the graph.
_of_lists: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def kept(graph: TokenGraph, make: Callable[[TokenGraph, Tensor], T]) -> T:
    """``make(graph, listed)``, once for every list of edges, or table of neighbours, `listed`.

    A list that was changed in place since has another version, and all is made anew.
    """
    listed = graph.compact_neighbors
    listed = graph.compact_edges if listed is None else listed
    version = None if listed.is_inference() else listed._version
    key = make, graph.num_targets, graph.num_sources, not graph.is_table
    before, found = _of_lists.get(listed, (None, {}))
    if version is None or version != before:
        found = {}
    if key not in found:
        # Detached: what is kept must not itself keep the list alive.
        found = found | {key: make(graph, listed.detach())}
        # Under capture it would be filled only when the CUDA graph is replayed.
        captured = listed.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and not makes_fakes():
            _of_lists[listed] = version, found
    result: T = found[key]
    return result
