"""The sums of a consensus step by compiled code, forward and backward.

`kernels/cpu/consensus.cpp` is the code. This file hands it tensors by their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import address, as_it_lies, featurewise, view
from graphattn.ops.consensus import structured
from graphattn.ops.consensus.native import calls
from graphattn.ops.consensus.native.calls import ConsensusCall, ConsensusNetwork, edges_of
from graphattn.ops.inputs import ValidPair, full_precision, may_be_differentiated

_FOUND = library.library()


class Call:
    """A call, and the tensors that must live as long.

    Args:
        tensors: hidden vectors [B, N, G, W] twice, what is compared [B, N, H, D] twice, and the
            second layer.
    """

    def __init__(
        self,
        graph: TokenGraph,
        tensors: Sequence[Tensor],
        valid: ValidPair,
        *,
        energy: bool,
        degrees: bool,
    ) -> None:
        of_tokens = tuple(featurewise(x) for x in tensors[:4])
        network = tuple(as_it_lies(x) for x in tensors[4:10])
        target_hidden, source_hidden, u, v = of_tokens
        B, N, H, D = u.shape
        heads, rank, _, xi = network[4].shape
        edges = edges_of(graph)
        masks = tuple(_mask(mask, B) for mask in valid)
        self.dtype = network[0].dtype
        self.gradient = torch.empty(u.shape, dtype=self.dtype)
        self.degree = torch.empty(u.shape[:-1], dtype=self.dtype) if degrees else None
        self.alive = of_tokens, network, edges, masks
        self.numbers = ConsensusCall(
            batch=B,
            targets=N,
            sources=v.shape[1],
            heads=heads,
            groups=target_hidden.shape[2],
            width=D,
            rank=rank,
            hidden=xi,
            trunks=target_hidden.shape[3] // xi,
            rowptr=address(edges.rowptr),
            source=address(edges.source),
            moves=address(edges.moves),
            move_count=0 if edges.moves is None else len(edges.moves),
            borders=address(edges.borders),
            border_count=0 if edges.borders is None else len(edges.borders),
            energy=energy,
            target_hidden=view(target_hidden),
            source_hidden=view(source_hidden),
            u=view(u),
            v=view(v),
            network=ConsensusNetwork(*(x.data_ptr() for x in network)),
            valid_targets=address(masks[0]),
            valid_sources=address(masks[1]),
            gradient=view(self.gradient),
            degree=address(self.degree),
            round=calls.EDGES_OF_ROUND,
            threads=torch.get_num_threads(),
        )

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """g [B, N, H, D], and the degrees [B, N, H] where they are wanted."""
        assert _FOUND is not None
        is_double = self.dtype == torch.float64
        library.check(_FOUND.graphattn_consensus(ctypes.byref(self.numbers), is_double))
        return self.gradient, self.degree


def _mask(mask: Tensor | None, entries: int) -> Tensor | None:
    if mask is None:
        return None
    flat = mask.reshape(mask.shape[:-1].numel(), mask.shape[-1])
    return flat.expand(entries, -1).contiguous()


class _Sums(torch.autograd.Function):
    """What :func:`sums_over_edges` gives."""

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
        return Call(graph, tensors, valid, energy=energy, degrees=degrees).forward()

    @staticmethod
    def backward(ctx: Any, *d_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: checkpointing computes them again for a single reading
        graph, valid, options = ctx.options
        needed = ctx.needs_input_grad[4:]
        with full_precision(tensors[0].device):
            # With create_graph=True, that is with gradients, somebody differentiates this again.
            plan = structured.plan_of(graph, tensors, valid, **options)
            of_sums = (
                structured.gradients_plainly
                if torch.is_grad_enabled()
                else structured.gradients_of_sums
            )
            return None, None, None, None, *of_sums(tensors, needed, plan, d_sums)


def sums_over_edges(
    graph: TokenGraph, tensors: Sequence[Any], valid: ValidPair, *, energy: bool, degrees: bool
) -> tuple[Tensor, Tensor | None]:
    """g [B, N, H, D], and the sums of alpha + beta [B, N, H] where they are wanted."""
    tensors = tensors[:10]  # compiled code knows no features of edges
    if not may_be_differentiated(tensors):
        return Call(graph, tensors, valid, energy=energy, degrees=degrees).forward()
    gradient, degree = _Sums.apply(graph, valid, energy, degrees, *tensors)
    return gradient, degree
