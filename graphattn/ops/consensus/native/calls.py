"""Arguments of compiled consensus, and the edges of a graph as it reads them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.structure import GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu.tensors import TokenView
from graphattn.ops.consensus.pieces import equal_bands, moves_of, shift_of
from graphattn.ops.kept import kept

KEPT = 1 << 18  # numbers of all edges' matrices that a backward does not compute again
EDGES_OF_BLOCK = 32  # at most; memory for them is whole blocks
EDGES_OF_ROUND = 0  # at most, whose results are there at a time; 0: as many as stay in cache


def numbers_to_keep(
    edges: int, heads: int, rank: int, width: int, groups: int, hidden: int
) -> int | None:
    """Count the numbers of all edges' matrices; None where they are too many to be kept.

    `hidden` counts the features of all trunks, and edges stand in whole blocks.
    """
    edges = -(-edges // EDGES_OF_BLOCK) * EDGES_OF_BLOCK
    numbers = edges * heads * (2 + rank * width)
    # What edges give to their ends in a backward is there at a time, too.
    given = edges * (heads * width + groups * hidden)
    return None if numbers > KEPT or given > 4 * KEPT else numbers


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
    """The sources of every target: rows of a list, or moves that are the same for all targets."""

    rowptr: Tensor | None = None
    source: Tensor | None = None
    moves: Tensor | None = None
    borders: Tensor | None = None  # where sequences begin, but for the first

    def most(self, targets: int) -> int:
        """How many there may be, of so many targets."""
        if self.source is not None:
            return len(self.source)
        return 0 if self.moves is None else targets * len(self.moves)


def edges_of(graph: TokenGraph) -> ConsensusEdges:
    """The edges of a graph; those of bands, and of batches of equal ones, are never listed."""
    structure = graph.structure
    if structure is not None:
        found = graph.derived(_of_bands, lambda: _of_bands(structure))
        if found is not None:
            return found
    return kept(graph, _listed)


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
    rowptr, source = (x.to(torch.int64).contiguous() for x in graph.csr())
    return ConsensusEdges(rowptr, source)
