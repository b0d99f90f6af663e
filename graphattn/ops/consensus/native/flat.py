"""Consensus steps of plain calls.

In a call with few tokens, checks take longer than arithmetic. So everything that calls of one kind
share is computed once and stored. The arithmetic is that of :func:`~graphattn.consensus_update`,
operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.packing import packer, steps_of
from graphattn.kernels.cpu.tensors import address
from graphattn.ops.consensus.native import calls
from graphattn.ops.consensus.native.sums import NativeSums
from graphattn.ops.consensus.step_size import automatic_move, bounds_of_degrees

_LIBRARY = library.library()
ARGUMENTS = packer(calls.ConsensusArguments)


class FlatConsensus:
    """Everything that calls of one kind share.

    Args:
        graph: its edges are read; the graph itself is not stored, because it stores this object.
        state: the shape [B, N, H, D].
        hidden: the shape [B, N, G, W] of the hidden vectors of targets, and of those of sources.
        shear: the shape [H, r, D, xi] of the largest tensor of the second layer.
        dtype: float32 or float64, that of all tensors.
        update: "energy" or "target".
        step: the step size, a tensor []; None if every call passes its own, or it is automatic.
    """

    def __init__(
        self,
        graph: TokenGraph,
        state: tuple[int, int, int, int],
        hidden: tuple[int, int, int, int],
        shear: tuple[int, int, int, int],
        dtype: torch.dtype,
        update: str,
        step: Tensor | None,
    ) -> None:
        (B, N, H, D), (_, _, groups, width), (_, rank, _, xi) = state, hidden, shear
        self.state, self.hidden, self.update, self.step = state, hidden, update, step
        self.dtype, self.is_double = dtype, dtype == torch.float64
        self.edges = edges = calls.edges_of(
            graph
        )  # they must live as long as their addresses are used
        self.sizes = (
            B, N, N, H, groups, D, rank, xi, width // xi,
            address(edges.rowptr) or 0, address(edges.source) or 0, address(edges.moves) or 0,
            0 if edges.moves is None else len(edges.moves), address(edges.borders) or 0,
            0 if edges.borders is None else len(edges.borders), update == "energy",
        )  # fmt: skip
        self.of_state, self.of_hidden = steps_of(state), steps_of(hidden)
        self.num_stored = calls.numbers_to_store(B * edges.most(N), H, rank, D, groups, width)

    def new_storage(self) -> Tensor | None:
        """Memory to store the matrices of edges for the backward pass; None if too many."""
        if self.num_stored is None or calls.EDGES_OF_ROUND:
            return None
        return torch.empty(self.num_stored, dtype=self.dtype, device="cpu")

    def sums(
        self, tensors: Sequence[Tensor], stored: Tensor | None, degrees: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sums of :func:`~graphattn.ops.consensus.native.sums.sums_over_edges`."""
        target_hidden, source_hidden, u, _, *network = map(_contiguous, tensors)
        gradient = torch.empty(self.state, dtype=self.dtype, device="cpu")
        degree = torch.empty(self.state[:-1], dtype=self.dtype, device="cpu") if degrees else None
        of_state, of_hidden = self.of_state, self.of_hidden
        call = ARGUMENTS.pack(
            *self.sizes,
            target_hidden.data_ptr(), *of_hidden,
            source_hidden.data_ptr(), *of_hidden,
            u.data_ptr(), *of_state,
            u.data_ptr(), *of_state,
            0, 0, 0, 0,  # edges have no features
            *(x.data_ptr() for x in network),
            0, 0,  # all tokens are valid
            gradient.data_ptr(), *of_state,
            0 if degree is None else degree.data_ptr(),
            0 if stored is None else stored.data_ptr(),
            calls.EDGES_OF_ROUND, torch.get_num_threads(),
        )  # fmt: skip
        assert _LIBRARY is not None
        status = _LIBRARY.graphattn_consensus(call, self.is_double)
        if status:
            library.check(status)
        return gradient, degree


def flat_consensus(
    call: FlatConsensus,
    graph: TokenGraph,
    state: Tensor,
    hidden: tuple[Tensor, Tensor],
    network: Sequence[Tensor],
    step: Tensor | None,
) -> Tensor:
    """The states [*, N, H, D] after a step of a call of a known kind, on a CPU, by C++ code.

    Args:
        call: what calls of this kind over this graph share.
        state: [*, N, H, D].
        hidden: hidden vectors of targets and of sources, [B, N, G, W].
        network: the second layer of the edge network.
        step: [H], if `call` has none; None for the automatic one.
    """
    u = v = state
    if state.dim() != 4:  # gradients are added in the order of operations, as in other calls
        u, v = state.reshape(call.state), state.reshape(call.state)
    tensors = (*hidden, u, v, *network)
    step = call.step if step is None else step
    degrees = step is None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        gradient, degree = _FlatSums.apply(graph, call, degrees, None, *tensors)
    else:
        gradient, degree = call.sums(tensors, None, degrees)
    if state.dim() != 4:
        gradient = gradient.view(state.shape)
    if step is None:
        bound = bounds_of_degrees(degree.view(state.shape[:-1]), graph, call.update)
        return automatic_move(state, gradient, bound)
    return torch.addcmul(state, step[..., None], gradient, value=-1)


class _FlatSums(NativeSums):
    """The sums of a call of a known kind; the backward pass is that of other calls."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, graph: TokenGraph, call: FlatConsensus, degrees: bool, _: None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*tensors)
        energy = call.update == "energy"
        ctx.options = graph, (None, None), {"energy": energy, "degrees": degrees}
        ctx.set_materialize_grads(False)
        ctx.stored = call.new_storage()
        return call.sums(tensors, ctx.stored, degrees)


def _contiguous(x: Tensor) -> Tensor:
    """x with its numbers side by side in memory; :func:`~graphattn.kernels.cpu.tensors.as_it_lies`.

    It is restated here so that a plain call opens as few files as possible.
    """
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
