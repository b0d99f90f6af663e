"""Attention of features as projections give them, turned and averaged in one step of autograd.

Calls of few tokens cost what is asked and kept in between, more than what is computed. So what is
known of one kind of call (sizes, dtype, options) is found once, by the checks of every other call,
and steps that every call has are one: views by head, rotations, averages, and back.
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
from graphattn.ops.inputs import full_precision
from graphattn.ops.rotary import KnownTurn, turned_by_torch

Rotation = tuple[Tensor, Tensor]


class FlatCall:
    """The part of a call that others of its kind share.

    Args:
        plan: of the graph.
        query, key: shapes [B, N, H, D] and [B, M, Hk, D]; values have that of keys.
        out: the shape [*, N, H * D].
        dtype: float32 or float64.
        rotation: cosines and sines [N, 1, D / 2] by which queries and keys are turned, or None.
        scale: [H], of dot products; None where every call brings its own.
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
        self.turn = None if rotation is None else KnownTurn(query, key, rotation)
        if isinstance(plan, NativeBandPlan):
            self.engine: KnownBands | _ByPlan = KnownBands(plan, query, key, out, dtype)
        else:
            self.engine = _ByPlan(plan, query, key, out)

    def turned(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Turn queries and keys where there is a rotation, laid out as compiled code reads them."""
        query = _contiguous(query)
        key = None if key is None else _contiguous(key)
        if self.turn is not None:
            query, key = self.turn(query, key)
        return query, query if key is None else key

    def by_autograd(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, scale: Tensor
    ) -> Tensor:
        """Averages in operations that can be differentiated any number of times, [B, N, H, D]."""
        query = self._turned_by_torch(query.reshape(self.query))
        key = query if key is None else self._turned_by_torch(key.reshape(self.key))
        value = key if value is None else value.reshape(self.key)
        return self.plan.by_autograd((query, key, value, scale, None))[0]

    def _turned_by_torch(self, x: Tensor) -> Tensor:
        return x if self.rotation is None else turned_by_torch(x, *self.rotation)


class _ByPlan:
    """Engine of any other plan, with the methods of :class:`KnownBands`."""

    def __init__(
        self, plan: Plan, query: tuple[int, ...], key: tuple[int, ...], out: tuple[int, ...]
    ) -> None:
        self.plan, self.query, self.key, self.out = plan, query, key, out

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, _, saved = self.plan.forward(self._inputs(query, key, value, scale))
        # Resized in place: a view could not be changed in place by those who get it.
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
    """Return what calls of tokens like these [*, N, F] share; None where compiled code does not run
    them.

    Their score is a constant that they share, too, where the call `keeps_scale`.

    Raises:
        ValueError: for what the operation refuses.
    """
    lead, (N, M) = like.shape[:-2], (graph.num_targets, graph.num_sources)
    nothing = like.detach().new_empty(())  # sizes count, not what there is
    query = nothing.expand(*lead, N, heads, width)
    key = nothing.expand(*lead, M, kv_heads, width)
    options = {"top_k": top_k, "softcap": softcap}
    chosen, call = known_backend(query, key, key, graph, score, backend=backend, **options)
    if chosen != "native":
        return None
    inputs = query, key, key, nothing.expand(heads), None
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
    """Averages [*, N, H * D] of a known kind of call, on the CPU, by compiled code.

    Args:
        call: what :func:`known_call` told of it.
        query: [*, N, H * D], or by head.
        key, value: [*, M, Hk * D]; None for the query, and for the key, both turned.
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
    """The averages, and what the backward wants to see again."""
    query, key = call.turned(query, key)
    return call.engine.forward(query, key, key if value is None else _contiguous(value), scale)


class _FlatAttention(torch.autograd.Function):
    """Saved is what was given: rotations are cheap, and made again."""

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
        query, key, value, scale, out, saved = ctx.saved_tensors  # asked for once
        call: FlatCall = ctx.call
        needs_query, needs_key, needs_value, needs_scale = ctx.needs_input_grad[1:]
        with full_precision(out.device):
            if torch.is_grad_enabled():  # create_graph=True: somebody differentiates this again
                return None, *_plain_gradients(ctx, (query, key, value, scale), d_out)
            turned, turned_key = call.turned(query, key)
            read = turned_key if value is None else _contiguous(value)
            results = out, saved, d_out, needs_scale
            d_query, d_key, d_value, d_scale = call.engine.backward(
                turned, turned_key, read, scale, *results
            )
            # What serves as several is added up as autograd does, one after the other.
            if key is None:
                d_query.add_(d_key)
            if value is None:
                (d_query if key is None else d_key).add_(d_value)
            if call.turn is not None:
                call.turn.back(d_query, None if key is None else d_key)
        return (
            None,
            d_query if needs_query else None,
            d_key if needs_key else None,
            d_value if needs_value else None,
            d_scale,
        )


def _plain_gradients(
    ctx: Any, tensors: tuple[Tensor | None, ...], d_out: Tensor
) -> list[Tensor | None]:
    # Each apart, also where one tensor was given several times: each gets a share of the gradient.
    query, key, value, scale = (None if x is None else x.view_as(x) for x in tensors)
    assert query is not None
    assert scale is not None
    out = ctx.call.by_autograd(query, key, value, scale)
    needed = ctx.needs_input_grad[1:]
    given = zip((query, key, value, scale), needed, strict=True)
    wanted = [x for x, n in given if n and x is not None]
    found = torch.autograd.grad(
        out, wanted, d_out.reshape(out.shape), create_graph=True, allow_unused=True
    )
    each = iter(found)
    return [next(each) if n else None for n in needed]


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() and not x.is_neg() else x.contiguous().resolve_neg()


# Sizes that were seen before are packed with new addresses: filling a structure of ctypes field by
# field takes as long as the attention of a few tokens does.

_FOUND = library.library()
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
        self.sequences = bands.sequences  # its address is kept
        sizes = B, N, M, H, kv_heads, D, D, len(bands.sequences), bands.sequences.data_ptr()
        self.sizes, self.of_query, self.of_key = sizes, steps_of(query), steps_of(key)
        self.heads, self.score, self.softcap = H, options.score == "rbf", options.softcap or 0.0
        self.top_k, self.origin = options.top_k or 0, bands.origin or 0
        self.kept = B * N * H * plan.saved_per_head
        self.saved = self.kept + B * N * H  # log-sums behind the others
        self.is_covered = bands.covers(N, M)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The averages, and what the backward wants to see again."""
        out, saved = query.new_empty(self.out), scale.new_empty(self.saved)
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
        """Gradients of queries, keys, values and scales, of the shapes of these."""
        new = torch.empty_like if self.is_covered else torch.zeros_like
        d_query, d_key, d_value = new(query), new(key), new(value)
        if not d_out.is_contiguous() or d_out.is_neg():
            d_out = d_out.contiguous().resolve_neg()
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
        kept = saved.data_ptr()
        call = BANDS.pack(
            *self.sizes,
            query.data_ptr(), *self.of_query,
            key.data_ptr(), *self.of_key,
            value.data_ptr(), *self.of_key,
            self.score, scale.data_ptr(), self.top_k, self.softcap,
            0, 0, self.origin, 0, 0,
            out.data_ptr(), *self.of_query,
            kept + self.kept * saved.element_size(), kept, False, torch.get_num_threads(),
        )  # fmt: skip
        assert _FOUND is not None
        status = _FOUND.graphattn_attention_bands(call, wanted, self.is_double)
        if status:
            library.check(status)
