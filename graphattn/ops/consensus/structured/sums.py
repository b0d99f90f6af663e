"""Consensus without tensors of all edges: a chunk of edges at a time, which stays in cache.

On bands (and batches of equal bands) both ends of a chunk are slices; elsewhere they are gathered.
The backward pass computes a chunk again, so that memory beside inputs and outputs is that of one
chunk. The results are those of reference.py, against which it is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.edge_network import EdgeNetworkParameters, edge_matrix
from graphattn.ops.consensus.pieces import EdgePiece, Pieces, add_at, at
from graphattn.ops.consensus.structured.edge_rows import Buffers, EdgeRows, by_network
from graphattn.ops.inputs import (
    ValidPair,
    full_precision,
    gradients_by_autograd,
    may_be_differentiated,
)

CHUNK = 1 << 20  # the most numbers of a tensor of a chunk on a CPU: 4 megabytes of float32
CHUNK_ELSEWHERE = 1 << 24  # the same on a GPU, where few and large launches are faster
MOST_STORED = 1 << 18  # up to so many numbers, the only chunk is stored for the backward pass


class _Plan(NamedTuple):
    """The pieces of a graph, and the sums to compute.

    Attributes:
        pieces: the edges of the graph.
        energy: whether both ends of an edge move.
        degrees: whether the sums of alpha + beta over the edges of every token are needed, too.
        backward: whether there will be a backward pass, for which a single chunk is stored.
    """

    pieces: Pieces
    energy: bool
    degrees: bool
    backward: bool = False


class _Inputs(NamedTuple):
    """The tensors of a step.

    Attributes:
        target_hidden, source_hidden: hidden vectors [B, N, G, xi] and [B, M, G, xi].
        u, v: states [B, N, H, D] and [B, M, H, D], of which the differences are taken.
        network: the second layer.
        edge: features of edges, [B or 1, E, 1, F]; without `edge_weight` their products with it,
            [B or 1, E, G, xi]; None if edges have none.
        edge_weight: [G, xi, F], or None.
    """

    target_hidden: Tensor
    source_hidden: Tensor
    u: Tensor
    v: Tensor
    network: EdgeNetworkParameters
    edge: Tensor | None = None
    edge_weight: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> _Inputs:
        target_hidden, source_hidden, u, v, *network = tensors[:10]
        of_edges = tensors[10:] or (None, None)
        return cls(target_hidden, source_hidden, u, v, EdgeNetworkParameters(*network), *of_edges)


class _Pass:
    """One pass over the edges, with views of all tensors by network, [G, B, N, heads, features].

    Each of the G networks computes the matrices of H / G heads; hidden vectors have 1 head.
    """

    def __init__(self, inputs: _Inputs, plan: _Plan) -> None:
        self.plan = plan
        self.num_networks = max(1, inputs.target_hidden.shape[2])
        self.hidden = self.view(inputs.target_hidden), self.view(inputs.source_hidden)
        self.states = self.view(inputs.u), self.view(inputs.v)
        self.network = by_network(inputs.network, self.num_networks)
        self.rank, self.features = inputs.network.shear.shape[1:3]
        self.edge, self.edge_weight = inputs.edge, inputs.edge_weight

    def view(self, x: Tensor) -> Tensor:
        """x [B, N, G or H, features] as a view [G, B, N, 1 or H / G, features]."""
        return x.unflatten(2, (self.num_networks, -1)).permute(2, 0, 1, 3, 4)

    def chunks(self, *, gradients: bool) -> Iterator[tuple[EdgePiece, EdgeRows, Tensor]]:
        """Every piece, R of its edges, and the differences [k, b n, h, D] that R is applied to."""
        buffers = Buffers(self.states[0])
        numbers = CHUNK if self.states[0].device.type == "cpu" else CHUNK_ELSEWHERE
        for piece in self.plan.pieces.chunks(max(1, numbers // self.widest())):
            hidden_sum, d = self.compare(piece, buffers)
            R = EdgeRows(
                hidden_sum.flatten(1, 3),
                piece.of_networks(self.network),
                self.rank,
                self.features,
                buffers,
                gradients=gradients,
            )
            yield piece, R, d.flatten(1, 2)

    def widest(self) -> int:
        """The largest number of elements that an edge has in one tensor."""
        of_edges = 1 if self.edge is None else self.edge.shape[-1]
        return max(1, self.hidden[0].shape[-1], self.network.shear.shape[1], of_edges)

    def is_stored(self) -> bool:
        """Whether all edges are one small chunk, which is stored for the backward pass."""
        pieces, most = self.plan.pieces, min(MOST_STORED, CHUNK)
        return self.plan.backward and not pieces.bands and pieces.rows * self.widest() <= most

    def compare(self, piece: EdgePiece, buffers: Buffers | None = None) -> tuple[Tensor, Tensor]:
        """hidden_i + hidden_j and u_i - v_j of the edges of a piece, [k, b, n, heads, features]."""
        hidden_i, u_i = (at(x, piece, piece.target) for x in (self.hidden[0], self.states[0]))
        hidden_j, v_j = (at(x, piece, piece.source) for x in (self.hidden[1], self.states[1]))
        out = None if buffers is None else buffers.get("hidden_sum", *hidden_i.shape)
        hidden_sum = torch.add(hidden_i, hidden_j, out=out)
        if self.edge is not None:
            of_edges = self.of_edges(piece)
            hidden_sum = hidden_sum + of_edges if out is None else out.add_(of_edges)
        return piece.clear(hidden_sum), piece.clear(u_i - v_j)

    def of_edges(self, piece: EdgePiece) -> Tensor:
        """F e_ij of the edges of a piece, [k, b or 1, n, 1, xi]."""
        assert self.edge is not None
        if self.edge_weight is None:
            numbers = piece.of_edges(self.edge[:, :, piece.networks])
            return numbers.permute(2, 0, 1, 3)[..., None, :]
        numbers = piece.of_edges(self.edge)[:, :, 0]
        weight = self.edge_weight[piece.networks, None]
        return torch.matmul(numbers, weight.mT)[..., None, :]

    def moving_ends(self, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """The total itself for targets, and for sources: itself under "energy", None otherwise."""
        return total, total if self.plan.energy else None

    def give(
        self, totals: tuple[Tensor, Tensor | None], piece: EdgePiece, values: Tensor, sign: int
    ) -> None:
        """Add values [k, b n, heads, features] at the targets, and times `sign` at the sources."""
        values = piece.clear(values.unflatten(1, piece.shape))
        add_at(self.view(totals[0]), piece, piece.target, values)
        if totals[1] is not None:
            add_at(self.view(totals[1]), piece, piece.source, values, sign)

    def take(self, totals: tuple[Tensor, Tensor | None], piece: EdgePiece, sign: int) -> Tensor:
        """The gradient of the values of :meth:`give`, from those of its totals."""
        values = at(self.view(totals[0]), piece, piece.target)
        if totals[1] is not None:
            at_source = at(self.view(totals[1]), piece, piece.source)
            values = torch.add(values, at_source, alpha=sign)
        return piece.clear(values).flatten(1, 2)

    def add_edge_gradients(
        self, total: _Inputs, needed: Sequence[bool], piece: EdgePiece, d_sum: Tensor
    ) -> None:
        """Add the needed gradients of `edge` and `edge_weight`, from d_sum [k, b n, xi]."""
        assert self.edge is not None
        d_hidden = d_sum.unflatten(1, piece.shape)  # 0 for pairs that are no edges
        if self.edge_weight is None:
            assert total.edge is not None
            d_edge = total.edge[:, :, piece.networks]
            piece.add_to_edges(d_edge, d_hidden.permute(1, 2, 0, 3))
            return
        if needed[1]:
            assert total.edge_weight is not None
            numbers = piece.of_edges(self.edge).expand(piece.shape[0], -1, -1, -1)[:, :, 0]
            total.edge_weight[piece.networks] += torch.einsum("kbnx,bnf->kxf", d_hidden, numbers)
        if needed[0]:
            assert total.edge is not None
            weight = self.edge_weight[piece.networks]
            d_edge = torch.einsum("kbnx,kxf->bnf", d_hidden, weight)
            piece.add_to_edges(total.edge, d_edge[:, :, None])


class _Sums(torch.autograd.Function):
    """The sums g [B, N, H, D], and the degrees [B, N, H] if needed, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*tensors)
        ctx.plan = plan
        gradient, degree, ctx.chunks = _sums(_Inputs.of(tensors), plan)
        return gradient, degree

    @staticmethod
    def backward(ctx: Any, *d_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        tensors = ctx.saved_tensors
        stored, ctx.chunks = ctx.chunks, None  # used once only: gradients overwrite their memory
        with full_precision(tensors[0].device):
            if torch.is_grad_enabled():  # create_graph=True: this is differentiated again
                return None, *gradients_of_sums_by_autograd(tensors, needed, ctx.plan, d_sums)
            return None, *gradients_of_sums(tensors, needed, ctx.plan, d_sums, stored)


Chunks = list[tuple[EdgePiece, EdgeRows, Tensor]]


def _sums(inputs: _Inputs, plan: _Plan) -> tuple[Tensor, Tensor | None, Chunks | None]:
    """The sums of :class:`_Sums`, and the only chunk if it is to be stored."""
    gradient, degree = _no_sums(inputs, plan)
    run = _Pass(inputs, plan)
    chunks = run.chunks(gradients=run.is_stored())
    stored = list(chunks) if run.is_stored() else None
    for piece, R, d in chunks if stored is None else stored:
        run.give(run.moving_ends(gradient), piece, R.apply(d, R.along(d)), -1)
        if degree is not None:
            run.give(run.moving_ends(degree[..., None]), piece, (R.alpha + R.beta)[..., None], 1)
    return gradient, degree, stored


def _no_sums(inputs: _Inputs, plan: _Plan) -> tuple[Tensor, Tensor | None]:
    gradient = inputs.u.new_zeros(inputs.u.shape)
    return gradient, gradient.new_zeros(gradient.shape[:-1]) if plan.degrees else None


def gradients_of_sums(
    tensors: tuple[Any, ...],
    needed: tuple[bool, ...],
    plan: _Plan,
    d_sums: tuple[Tensor | None, ...],
    stored: Chunks | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the sums; a chunk that was not stored is computed again."""
    d_gradient, d_degree = d_sums
    assert d_gradient is not None
    for_hidden, for_states, for_network = any(needed[:2]), any(needed[2:4]), any(needed[4:10])
    for_edges = any(needed[10:])
    written = [for_hidden] * 2 + [for_states] * 2 + [for_network] * 6 + list(needed[10:])
    totals = [x.new_zeros(x.shape) if w else x for x, w in zip(tensors, written, strict=True)]
    total = _Inputs.of(totals)
    run = _Pass(_Inputs.of(tensors), plan)
    total_network = by_network(total.network, run.num_networks)  # views
    for piece, R, d in run.chunks(gradients=True) if stored is None else stored:
        e = run.take(run.moving_ends(d_gradient), piece, -1)
        along_d, along_e = R.along(d), R.along(e)
        if for_states:
            run.give((total.u, total.v), piece, R.apply(e, along_e), -1)
        if not (for_hidden or for_network or for_edges):
            continue
        d_strength = None
        if d_degree is not None:
            d_strength = run.take(run.moving_ends(d_degree[..., None]), piece, 1)[..., 0]
        d_alpha, d_beta = R.logit_gradients(d, e, along_d, along_e, d_strength)
        d_rows = R.row_gradients(d, e, along_d, along_e)
        if for_network:
            R.add_network_gradients(piece.of_networks(total_network), d_alpha, d_beta, d_rows)
        if for_hidden or for_edges:
            d_sum = R.hidden_gradient(d_alpha, d_beta, d_rows)
        if for_edges:
            run.add_edge_gradients(total, needed[10:], piece, d_sum)
        if for_hidden:
            run.give((total.target_hidden, total.source_hidden), piece, d_sum[..., None, :], 1)
    return tuple(x if need else None for x, need in zip(totals, needed, strict=True))


def sums_by_autograd(tensors: Sequence[Any], plan: _Plan) -> tuple[Tensor, Tensor | None]:
    """The sums in operations for autograd, which stores the tensors of all edges."""
    inputs = _Inputs.of(tensors)
    gradient, degree = _no_sums(inputs, plan)
    run = _Pass(inputs, plan)

    def by_token(x: Tensor) -> Tensor:  # the inverse of `view`
        return x.permute(1, 2, 0, 3, 4).flatten(2, 3)

    for piece in (plan.pieces.no_edges(), *plan.pieces.chunks()):
        hidden_sum, d = run.compare(piece)
        R = edge_matrix(by_token(hidden_sum), inputs.network)
        run.give(run.moving_ends(gradient), piece, run.view(R.apply(by_token(d))).flatten(1, 2), -1)
        if degree is not None:
            strength = run.view((R.alpha + R.beta)[..., None]).flatten(1, 2)
            run.give(run.moving_ends(degree[..., None]), piece, strength, 1)
    return gradient, degree


def gradients_of_sums_by_autograd(
    tensors: tuple[Any, ...],
    needed: tuple[bool, ...],
    plan: _Plan,
    d_sums: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of the sums, in operations that can be differentiated again."""

    def sums_again(*tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return sums_by_autograd(tensors, plan)

    return gradients_by_autograd(sums_again, tensors, needed, d_sums, zeros=True)


def plan_of(
    graph: TokenGraph, tensors: Sequence[Any], valid: ValidPair, *, energy: bool, degrees: bool
) -> _Plan:
    """The plan of a graph, for the tensors of :class:`_Inputs` in their order."""
    batch, _, networks, _ = tensors[0].shape
    # Under "energy", the parts of a self-loop at its target and its source cancel.
    places = len(tensors) > 10 and tensors[10] is not None
    options = networks, batch, not energy, places

    def make() -> Pieces:
        networks, batch, loops, places = options
        return Pieces(
            graph, networks=networks, batch=batch, valid=valid, loops=loops, places=places
        )

    has_masks = valid[0] is not None or valid[1] is not None
    return _Plan(make() if has_masks else graph.derived(options, make), energy, degrees)


def sums_over_edges(
    graph: TokenGraph, tensors: Sequence[Any], valid: ValidPair, *, energy: bool, degrees: bool
) -> tuple[Tensor, Tensor | None]:
    """The sums g [B, N, H, D], and the sums of alpha + beta [B, N, H] if `degrees` are needed."""
    plan = plan_of(graph, tensors, valid, energy=energy, degrees=degrees)
    if not may_be_differentiated(tensors):
        gradient, degree, _ = _sums(_Inputs.of(tensors), plan)
        return gradient, degree
    gradient, degree = _Sums.apply(plan._replace(backward=True), *tensors)
    return gradient, degree
