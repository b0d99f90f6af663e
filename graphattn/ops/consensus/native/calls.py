"""The arguments of consensus in C++, and the edges of a graph in the form that C++ reads."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.structure import GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu.tensors import TokenView
from graphattn.ops.consensus.pieces import equal_bands, moves_of, shift_of
from graphattn.ops.edge_cache import cached_by_edges

MOST_STORED = 1 << 18  # up to so many numbers, the matrices of edges are stored for the backward
EDGES_OF_BLOCK = 32  # the most edges of a block; memory is allocated for whole blocks
EDGES_OF_ROUND = 0  # the most edges whose results are stored at a time; 0: as many as fit in cache


def numbers_to_store(
    edges: int, heads: int, rank: int, width: int, groups: int, hidden: int
) -> int | None:
    """How many numbers the matrices of all edges have; None if they are too many to be stored.

    `hidden` is the number of features of all trunks. Edges are counted in whole blocks.
    """
    edges = -(-edges // EDGES_OF_BLOCK) * EDGES_OF_BLOCK
    numbers = edges * heads * (2 + rank * width)
    # In the backward pass, gradients of both ends of all edges are stored at a time, too.
    of_ends = edges * (heads * width + groups * hidden)
    return None if numbers > MOST_STORED or of_ends > 4 * MOST_STORED else numbers


class ConsensusNetwork(ctypes.Structure):
    """The second layer; the fields are those of ``kernels/cpu/consensus.h``, in their order."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("alpha", "alpha_bias", "beta", "beta_bias", "shear", "shear_bias")
    )


class ConsensusArguments(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/consensus.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "targets", "sources", "heads", "groups")),
        *((name, ctypes.c_int64) for name in ("width", "rank", "hidden", "trunks")),
        *((name, ctypes.c_void_p) for name in ("rowptr", "source", "moves")),
        ("move_count", ctypes.c_int64),
        ("borders", ctypes.c_void_p),
        ("border_count", ctypes.c_int64),
        ("energy", ctypes.c_int64),
        *((name, TokenView) for name in ("target_hidden", "source_hidden", "u", "v")),
        ("edge", ctypes.c_void_p),
        ("edge_batch", ctypes.c_int64),
        ("edge_inputs", ctypes.c_int64),
        ("edge_weight", ctypes.c_void_p),
        ("network", ConsensusNetwork),
        ("valid_targets", ctypes.c_void_p),
        ("valid_sources", ctypes.c_void_p),
        ("gradient", TokenView),
        ("degree", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("round", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class ConsensusGradients(ctypes.Structure):
    """Arguments of a call's backward, beside those of the call."""

    _fields_ = (
        ("d_gradient", TokenView),
        ("d_degree", ctypes.c_void_p),
        *((name, TokenView) for name in ("target_hidden", "source_hidden", "u", "v")),
        *((name, ctypes.c_void_p) for name in ("edge", "edge_weight")),
        ("edge_count", ctypes.c_int64),
        ("network", ConsensusNetwork),
    )


class ConsensusEdges(NamedTuple):
    """The edges of a graph: rows of a list, or moves that all targets share.

    Attributes:
        rowptr, source: [N + 1] and [E], the sources of every target.
        moves: source minus target of every edge that a target may have.
        borders: the first token of every sequence but the first.
    """

    rowptr: Tensor | None = None
    source: Tensor | None = None
    moves: Tensor | None = None
    borders: Tensor | None = None

    def most(self, targets: int) -> int:
        """The largest possible number of edges, for so many targets."""
        if self.source is not None:
            return len(self.source)
        return 0 if self.moves is None else targets * len(self.moves)


def edges_of(graph: TokenGraph) -> ConsensusEdges:
    """The edges of a graph; those of bands, and of batches of equal bands, are never listed."""
    structure = graph.structure
    if structure is not None:
        found = graph.derived(_of_bands, lambda: _of_bands(structure))
        if found is not None:
            return found
    return cached_by_edges(graph, _listed)


def _of_bands(structure: GraphStructure) -> ConsensusEdges | None:
    bands = equal_bands(structure)
    if not bands:
        return None
    moves = moves_of(bands, loops=True, shift=shift_of(structure))
    counts = [band.num_tokens for band in bands]
    ends = torch.tensor(counts, dtype=torch.int64, device="cpu").cumsum(0)
    listed = torch.tensor(moves, dtype=torch.int64, device="cpu")
    return ConsensusEdges(moves=listed, borders=ends[:-1].contiguous())


def _listed(graph: TokenGraph, _: Tensor) -> ConsensusEdges:
    rowptr, source = (x.to(torch.int64).contiguous() for x in graph.compact_csr())
    return ConsensusEdges(rowptr, source)
