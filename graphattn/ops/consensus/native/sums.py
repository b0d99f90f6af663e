"""The sums of a consensus step by C++ code, forward and backward.

The code is `kernels/cpu/consensus.cpp` and `consensus_backward.cpp`. This file passes it the
addresses of tensors, and the edges of a graph in the form that it reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.composites import Section
from graphattn.graphs.structures.structure import Complete, GraphStructure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import (
    KINDS,
    TokenView,
    address,
    as_it_lies,
    featurewise,
    packer,
    view,
)
from graphattn.ops.consensus.pieces import equal_bands, moves_of, shift_of
from graphattn.ops.consensus.structured import sums as structured
from graphattn.ops.edge_cache import cached_by_edges
from graphattn.ops.inputs import ValidPair, full_precision, may_be_differentiated

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


def edges_of(graph: TokenGraph, batch: int, sizes: Sequence[int]) -> ConsensusEdges:
    """The edges of a graph; those of bands, and of batches of equal bands, are never listed.

    Nor are those of a complete graph, unless they are so few that their matrices are stored.
    `sizes` are the last arguments of :func:`numbers_to_store`.
    """
    structure = graph.structure
    if structure is not None:
        whole = structure.whole if isinstance(structure, Section) else structure
        if isinstance(whole, Complete):
            if numbers_to_store(batch * structure.num_edges(), *sizes) is None:
                return graph.derived(_of_complete, lambda: _of_complete(structure))
        elif edges := graph.derived(_of_bands, lambda: _of_bands(structure)):
            return edges
    return cached_by_edges(graph, _listed)


def _of_complete(structure: GraphStructure) -> ConsensusEdges:
    moves = torch.arange(1 - structure.num_targets, structure.num_sources, device="cpu")
    return ConsensusEdges(moves=moves)


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


_LIBRARY = library.library()
ARGUMENTS, GRADIENTS = packer(ConsensusArguments), packer(ConsensusGradients)
OF_TOKENS, OF_EDGES = 4, 10  # tensors[:4] are of tokens, [4:10] the second layer, [10:] of edges


class SumsCall:
    """A call, and the tensors that must live as long as it does.

    Args:
        tensors: hidden vectors of targets and of sources [B, N, G, W], the states u and v
            [B, N, H, D], the six tensors of the second layer, and if edges have features, these
            [B or 1, E, 1, F] and a weight [G, W, F], or their products [B or 1, E, G, W] and None.
        energy: whether both ends of an edge move.
    """

    def __init__(
        self, graph: TokenGraph, tensors: Sequence[Any], valid: ValidPair, *, energy: bool
    ) -> None:
        network = [as_it_lies(x) for x in tensors[OF_TOKENS:OF_EDGES]]
        self.dtype = network[0].dtype
        readable = [self._readable(x) for x in tensors[:OF_TOKENS]]
        target_hidden, source_hidden, u, v = [featurewise(x) for x in readable]
        edge, edge_weight = tensors[OF_EDGES:] or (None, None)
        edge = None if edge is None else as_it_lies(edge)
        edge_weight = None if edge_weight is None else edge_weight.mT.contiguous()
        B, N, _, _ = self.shape = u.shape
        heads, rank, width, xi = network[4].shape
        hidden, groups = target_hidden.shape[3], target_hidden.shape[2]
        self.sizes = heads, rank, width, groups, hidden
        edges = edges_of(graph, B, self.sizes)
        masks = tuple(_mask(mask, B) for mask in valid)
        self.most_edges = B * edges.most(N)
        self.alive = target_hidden, source_hidden, u, v, network, edge, edge_weight, edges, masks
        self.before = (
            B, N, v.shape[1], heads, groups, width, rank, xi, hidden // xi,
            address(edges.rowptr), address(edges.source),
            address(edges.moves), 0 if edges.moves is None else len(edges.moves),
            address(edges.borders), 0 if edges.borders is None else len(edges.borders),
            energy,
            *view(target_hidden), *view(source_hidden), *view(u), *view(v),
            address(edge), 0 if edge is None or len(edge) == 1 else edge.stride(0),
            0 if edge_weight is None else edge_weight.shape[1], address(edge_weight),
            *map(address, network), *map(address, masks),
        )  # fmt: skip

    def _packed(
        self, gradient: Tensor | None, degree: Tensor | None, stored: Tensor | None
    ) -> bytes:
        """All arguments, with the addresses of results and of stored matrices."""
        results = *view(gradient), address(degree), address(stored)
        return ARGUMENTS.pack(*self.before, *results, EDGES_OF_ROUND, torch.get_num_threads())

    def _readable(self, x: Tensor) -> Tensor:
        """Tokens in the dtype of the network, or in half precision beside float32."""
        if x.dtype is not self.dtype and (x.dtype not in KINDS or self.dtype is torch.float64):
            return x.to(self.dtype)
        return x

    def new_storage(self) -> Tensor | None:
        """Memory to store the matrices of edges for the backward pass; None if too many."""
        numbers = numbers_to_store(self.most_edges, *self.sizes)
        if numbers is None or EDGES_OF_ROUND:
            return None
        return torch.empty(numbers, dtype=self.dtype, device="cpu")

    def forward(
        self, *, degrees: bool, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sums g [B, N, H, D], and the degrees [B, N, H] if needed.

        The matrices of edges are written to `stored`, memory from :meth:`new_storage`.
        """
        assert _LIBRARY is not None
        gradient = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        degree = torch.empty(self.shape[:-1], dtype=self.dtype, device="cpu") if degrees else None
        call = self._packed(gradient, degree, stored)
        library.check(_LIBRARY.graphattn_consensus(call, self.dtype == torch.float64))
        return gradient, degree

    def backward(
        self,
        tensors: Sequence[Any],
        needed: Sequence[bool],
        d_gradient: Tensor,
        d_degree: Tensor | None,
        stored: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The needed gradients of `tensors`; matrices that are not `stored` are computed again."""
        assert _LIBRARY is not None
        d_gradient = featurewise(d_gradient)
        d_degree = None if d_degree is None else as_it_lies(d_degree)
        # C++ computes those of two ends, and the six of the network, together or not at all.
        wanted = [any(needed[:2])] * 2 + [any(needed[2:4])] * 2 + [any(needed[4:10])] * 6
        gradients = [
            torch.empty(x.shape, dtype=self.dtype, device="cpu") if want else None
            for x, want in zip(tensors, [*wanted, *needed[OF_EDGES:]], strict=True)
        ]
        edge, edge_weight = gradients[OF_EDGES:] or (None, None)
        if edge_weight is not None:
            edge_weight = torch.empty(edge_weight.mT.shape, dtype=self.dtype, device="cpu")
        packed = GRADIENTS.pack(
            *view(d_gradient), address(d_degree),
            *(number for x in gradients[:OF_TOKENS] for number in view(x)),
            address(edge), address(edge_weight), 0 if edge is None else edge.numel(),
            *map(address, gradients[OF_TOKENS:OF_EDGES]),
        )  # fmt: skip
        call = self._packed(None, None, stored)
        status = _LIBRARY.graphattn_consensus_backward(call, packed, self.dtype == torch.float64)
        library.check(status)
        if edge_weight is not None:
            gradients[-1] = edge_weight.mT
        return tuple(x if need else None for x, need in zip(gradients, needed, strict=True))


def _mask(mask: Tensor | None, entries: int) -> Tensor | None:
    """A mask [entries, tokens] in the form that C++ reads."""
    if mask is None:
        return None
    flat = mask.reshape(mask.shape[:-1].numel(), mask.shape[-1])
    return flat.expand(entries, -1).contiguous()


class NativeSums(torch.autograd.Function):
    """The autograd function of :func:`sums_over_edges`."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: TokenGraph,
        valid: ValidPair,
        energy: bool,
        degrees: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*tensors)
        ctx.options = graph, valid, {"energy": energy, "degrees": degrees}
        ctx.set_materialize_grads(False)
        call = SumsCall(graph, tensors, valid, energy=energy)
        ctx.stored = call.new_storage()
        return call.forward(degrees=degrees, stored=ctx.stored)

    @staticmethod
    def backward(ctx: Any, *d_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        tensors = ctx.saved_tensors
        graph, valid, options = ctx.options
        needed = ctx.needs_input_grad[4:]
        with full_precision(tensors[0].device):
            if torch.is_grad_enabled():
                # create_graph=True: this is differentiated again.
                plan = structured.plan_of(graph, tensors, valid, **options)
                gradients = structured.gradients_of_sums_by_autograd(
                    tensors, needed, plan, _with_zeros(tensors, d_sums)
                )
            else:
                gradients = gradients_of_sums(
                    graph, tensors, needed, valid, d_sums, options["energy"], ctx.stored
                )
            return None, None, None, None, *gradients


def _with_zeros(tensors: Sequence[Tensor], d_sums: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The gradients of the sums, with zeros in place of None."""
    u = tensors[2]
    shapes = u.shape, u.shape[:-1]
    return tuple(
        u.new_zeros(shape) if d is None else d for d, shape in zip(d_sums, shapes, strict=True)
    )


def gradients_of_sums(
    graph: TokenGraph,
    tensors: Sequence[Any],
    needed: Sequence[bool],
    valid: ValidPair,
    d_sums: Sequence[Tensor | None],
    energy: bool,
    stored: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The needed gradients of the tensors of :func:`sums_over_edges`."""
    d_gradient, d_degree = d_sums
    if d_gradient is None:
        d_gradient = _with_zeros(tensors, d_sums)[0]
    call = SumsCall(graph, tensors, valid, energy=energy)
    return call.backward(tensors, needed, d_gradient, d_degree, stored)


def sums_over_edges(
    graph: TokenGraph, tensors: Sequence[Any], valid: ValidPair, *, energy: bool, degrees: bool
) -> tuple[Tensor, Tensor | None]:
    """The sums g [B, N, H, D], and the sums of alpha + beta [B, N, H] if `degrees` are needed."""
    if not may_be_differentiated(tensors):
        return SumsCall(graph, tensors, valid, energy=energy).forward(degrees=degrees)
    gradient, degree = NativeSums.apply(graph, valid, energy, degrees, *tensors)
    return gradient, degree
