"""Attention of plain calls: from the projections of a layer to averages, in one autograd function.

In a call with few tokens, checks and autograd take longer than arithmetic. So everything that
depends only on the kind of a call (sizes, dtype, options) is computed once, by the same checks as
in other calls, and stored. And one autograd function does what takes several elsewhere: views by
head, rotation, and averages.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.packing import packer, steps_of
from graphattn.ops.attention import native
from graphattn.ops.attention.api import known_backend
from graphattn.ops.attention.logits.score import Score
from graphattn.ops.attention.native.bands import BandsCall, BandsGradients, NativeBandPlan
from graphattn.ops.attention.structured.recompute import Plan
from graphattn.ops.inputs import full_precision, gradients_by_autograd
from graphattn.ops.rotary import KnownRotation, rotate_by_torch

Rotation = tuple[Tensor, Tensor]


class FlatCall:
    """Everything that calls of one kind share.

    Args:
        plan: the plan of the graph.
        query, key: shapes [B, N, H, D] and [B, M, Hk, D]; values have that of keys.
        out: the shape [*, N, H * D].
        dtype: float32 or float64.
        rotation: cosines and sines [N, 1, D / 2] by which queries and keys are rotated, or None.
        scale: [H], of dot products; None if every call passes its own.
    """

    def __init__(
        self,
        plan: Plan,
        query: tuple[int, ...],
        key: tuple[int, ...],
        out: tuple[int, ...],
        dtype: torch.dtype,
        rotation: Rotation | None,
        scale: Tensor | None,
    ) -> None:
        self.scale = scale
        self.plan, self.query, self.key, self.rotation = plan, query, key, rotation
        self.rotate = None if rotation is None else KnownRotation(query, key, rotation)
        if isinstance(plan, NativeBandPlan):
            self.engine: KnownBands | _ByPlan = KnownBands(plan, query, key, out, dtype)
        else:
            self.engine = _ByPlan(plan, query, key, out)

    def rotated(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys, contiguous, and rotated if the call has a rotation."""
        query = _contiguous(query)
        key = None if key is None else _contiguous(key)
        if self.rotate is not None:
            query, key = self.rotate(query, key)
        return query, query if key is None else key

    def by_autograd(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, scale: Tensor
    ) -> Tensor:
        """The averages [B, N, H, D], in operations of torch that can be differentiated again."""
        query = self._rotated_by_torch(query.reshape(self.query))
        key = query if key is None else self._rotated_by_torch(key.reshape(self.key))
        value = key if value is None else value.reshape(self.key)
        return self.plan.by_autograd((query, key, value, scale, None))[0]

    def _rotated_by_torch(self, x: Tensor) -> Tensor:
        return x if self.rotation is None else rotate_by_torch(x, *self.rotation)


class _ByPlan:
    """Runs any other plan, with the methods of :class:`KnownBands`."""

    def __init__(
        self, plan: Plan, query: tuple[int, ...], key: tuple[int, ...], out: tuple[int, ...]
    ) -> None:
        self.plan, self.query, self.key, self.out = plan, query, key, out

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, _, saved = self.plan.forward(self._inputs(query, key, value, scale))
        # Resized in place, not viewed: callers may change the result in place.
        return out.contiguous().resize_(self.out), saved

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        out: Tensor,
        saved: Tensor,
        d_out: Tensor,
        needs_scale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        inputs = self._inputs(query, key, value, scale)
        results = out.view(self.query), saved, d_out.reshape(self.query), None
        d_query, d_key, d_value, d_scale, _ = self.plan.backward(inputs, *results)
        of_tokens = (
            d.contiguous().view(x.shape)
            for d, x in ((d_query, query), (d_key, key), (d_value, value))
        )
        return *of_tokens, d_scale if needs_scale else None  # type: ignore[return-value]

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Any:
        by_head = query.view(self.query), key.view(self.key), value.view(self.key)
        return *by_head, scale, None


def known_call(
    like: Tensor,
    graph: TokenGraph,
    heads: int,
    kv_heads: int,
    width: int,
    score: Score,
    *,
    top_k: Any,
    softcap: Any,
    backend: str,
    rotation: Rotation | None,
    keeps_scale: bool,
) -> FlatCall | None:
    """Everything that calls with tokens like these, [*, N, F], share; None if "native" cannot run.

    With `keeps_scale`, the scale of the score is a constant and is stored, too.

    Raises:
        ValueError: if the operation refuses the call.
    """
    lead, (N, M) = like.shape[:-2], (graph.num_targets, graph.num_sources)
    element = like.detach().new_empty(())  # tensors of the right sizes, without memory
    query = element.expand(*lead, N, heads, width)
    key = element.expand(*lead, M, kv_heads, width)
    options = {"top_k": top_k, "softcap": softcap}
    chosen, call = known_backend(query, key, key, graph, score, backend=backend, **options)
    if chosen != "native":
        return None
    inputs = query, key, key, element.expand(heads), None
    (query, key, *_), plan = native.plan_call(
        inputs,
        graph,
        score=score.kernel,
        top_k=call.top_k,
        softcap=call.softcap,
        per_offset=False,
        valid=(None, None),
    )
    scale = score.ready(heads, like).strength if keeps_scale else None
    out = *lead, N, heads * width
    return FlatCall(plan, tuple(query.shape), tuple(key.shape), out, like.dtype, rotation, scale)


def flat_attention(
    call: FlatCall, query: Tensor, key: Tensor | None, value: Tensor | None, scale: Tensor
) -> Tensor:
    """The averages [*, N, H * D] of a call of a known kind, on a CPU, by C++ code.

    Args:
        call: what :func:`known_call` returned for this kind.
        query: [*, N, H * D] or [*, N, H, D], before rotation.
        key: [*, M, Hk * D], likewise; None if keys are the queries.
        value: [*, M, Hk * D]; None if values are the rotated keys.
        scale: [H].
    """
    if torch.is_grad_enabled() and (
        query.requires_grad
        or scale.requires_grad
        or (key is not None and key.requires_grad)
        or (value is not None and value.requires_grad)
    ):
        found: Tensor = _FlatAttention.apply(call, query, key, value, scale)
        return found
    return _averages(call, query, key, value, scale)[0]


def _averages(
    call: FlatCall, query: Tensor, key: Tensor | None, value: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The averages, and the numbers to save for the backward pass."""
    query, key = call.rotated(query, key)
    return call.engine.forward(query, key, key if value is None else _contiguous(value), scale)


class _FlatAttention(torch.autograd.Function):
    """Saves its arguments, not the rotated tensors: to rotate again is cheap."""

    @staticmethod
    def forward(
        ctx: Any,
        call: FlatCall,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        scale: Tensor,
    ) -> Tensor:
        out, saved = _averages(call, query, key, value, scale)
        ctx.call = call
        ctx.save_for_backward(query, key, value, scale, out, saved)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # Read once only: under a gradient checkpoint, every reading computes the tensors again.
        query, key, value, scale, out, saved = ctx.saved_tensors
        call: FlatCall = ctx.call
        needs_query, needs_key, needs_value, needs_scale = ctx.needs_input_grad[1:]
        with full_precision(out.device):
            if torch.is_grad_enabled():  # create_graph=True: this is differentiated again
                return None, *gradients_by_autograd(
                    lambda *tensors: (call.by_autograd(*tensors),),
                    (query, key, value, scale),
                    ctx.needs_input_grad[1:],
                    (d_out.reshape(call.query),),
                )
            rotated, rotated_key = call.rotated(query, key)
            read = rotated_key if value is None else _contiguous(value)
            results = out, saved, d_out, needs_scale
            d_query, d_key, d_value, d_scale = call.engine.backward(
                rotated, rotated_key, read, scale, *results
            )
            # One tensor in several places: its gradients are added in the order of autograd.
            if key is None:
                d_query.add_(d_key)
            if value is None:
                (d_query if key is None else d_key).add_(d_value)
            if call.rotate is not None:
                call.rotate.back(d_query, None if key is None else d_key)
        return (
            None,
            d_query if needs_query else None,
            d_key if needs_key else None,
            d_value if needs_value else None,
            d_scale,
        )


def _contiguous(x: Tensor) -> Tensor:
    """x with its numbers side by side in memory; :func:`~graphattn.kernels.cpu.tensors.as_it_lies`.

    It is restated here so that a plain call opens as few files as possible.
    """
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()


# For known sizes, the arguments of C++ code are packed as bytes, because to fill a ctypes structure
# field by field takes as long as the attention of a few tokens.

_LIBRARY = library.library()
BANDS, GRADIENTS = packer(BandsCall), packer(BandsGradients)


class KnownBands:
    """Attention over one table of sequences, for one set of sizes, options and a dtype.

    Args:
        plan: without masks or biases.
        query, key: shapes [B, N, H, D] and [B, M, Hk, D]; values have that of keys.
        out: the shape in which averages are given.
        dtype: float32 or float64, that of all tensors.
    """

    def __init__(
        self,
        plan: NativeBandPlan,
        query: tuple[int, ...],
        key: tuple[int, ...],
        out: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        (B, N, H, D), (_, M, kv_heads, _) = query, key
        options, bands = plan.slow.options, plan.bands
        assert options.valid == (None, None)
        self.out, self.is_double = out, dtype == torch.float64
        self.sequences = bands.sequences  # must live as long as its address is used
        sizes = B, N, M, H, kv_heads, D, D, len(bands.sequences), bands.sequences.data_ptr()
        self.sizes, self.of_query, self.of_key = sizes, steps_of(query), steps_of(key)
        self.heads, self.score, self.softcap = H, options.score == "rbf", options.softcap or 0.0
        self.top_k, self.origin = options.top_k or 0, bands.origin or 0
        self.saved_before_lse = B * N * H * plan.saved_per_head
        self.num_saved = self.saved_before_lse + B * N * H  # log-sums are the last part
        self.is_covered = bands.covers(N, M)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The averages, and the numbers to save for the backward pass."""
        out, saved = query.new_empty(self.out), scale.new_empty(self.num_saved)
        self._run(query, key, value, scale, out, saved, None)
        return out, saved

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        out: Tensor,
        saved: Tensor,
        d_out: Tensor,
        needs_scale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of queries, keys, values and scales, in their shapes."""
        new = torch.empty_like if self.is_covered else torch.zeros_like
        d_query, d_key, d_value = new(query), new(key), new(value)
        d_out = _contiguous(d_out)
        if needs_scale:
            d_scale = torch.zeros(self.heads, dtype=torch.float64, device=scale.device)
            address = d_scale.data_ptr()
        else:
            unread = (ctypes.c_double * self.heads)()
            address = ctypes.addressof(unread)
        wanted = GRADIENTS.pack(
            d_out.data_ptr(), *self.of_query, 0,
            d_query.data_ptr(), *self.of_query,
            d_key.data_ptr(), *self.of_key,
            d_value.data_ptr(), *self.of_key,
            address, 0,
        )  # fmt: skip
        self._run(query, key, value, scale, out, saved, wanted)
        return d_query, d_key, d_value, d_scale.to(scale.dtype) if needs_scale else None

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        out: Tensor,
        saved: Tensor,
        wanted: bytes | None,
    ) -> None:
        scale = scale.contiguous()
        saved_address = saved.data_ptr()
        lse_address = saved_address + self.saved_before_lse * saved.element_size()
        call = BANDS.pack(
            *self.sizes,
            query.data_ptr(), *self.of_query,
            key.data_ptr(), *self.of_key,
            value.data_ptr(), *self.of_key,
            self.score, scale.data_ptr(), self.top_k, self.softcap,
            0, 0, self.origin, 0, 0,
            out.data_ptr(), *self.of_query,
            lse_address, saved_address, False, torch.get_num_threads(),
        )  # fmt: skip
        assert _LIBRARY is not None
        status = _LIBRARY.graphattn_attention_bands(call, wanted, self.is_double)
        if status:
            library.check(status)
