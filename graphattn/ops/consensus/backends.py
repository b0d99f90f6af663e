"""The backends of a consensus step: which can run a call, and how each runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphattn.ops.backends import Backend, is_watched, why_not_native
from graphattn.ops.consensus import operators, reference, triton
from graphattn.ops.consensus.calls import ConsensusCall, ConsensusKind
from graphattn.ops.consensus.edge_network import FirstLayer, as_dtype, as_pair, in_dtype
from graphattn.ops.consensus.native import sums as native
from graphattn.ops.consensus.step_size import automatic_move, bounds_of_degrees
from graphattn.ops.consensus.structured import sums as structured
from graphattn.ops.counting import note_uncounted
from graphattn.ops.inputs import (
    compute_dtype,
    flat_masks,
    full_precision,
    keep_freed_memory,
    may_be_differentiated,
)

Sums = Callable[..., tuple[Tensor, Tensor | None]]
Case = ConsensusCall | ConsensusKind
Result = Tensor | tuple[Tensor, Tensor | None]  # u', or the sums of `only_sums`


def _why_not_triton(call: Case) -> str | None:
    """The reason why the kernels of "triton" cannot run a step; None if they can."""
    return triton.why_not(call.state, call.trunks, call.edge_hidden is not None)


def _why_not_native(call: Case) -> str | None:
    """The reason why the C++ code of "native" cannot run a step; None if it can."""
    return why_not_native(call.state)


def _is_on_gpu(call: Case) -> bool:
    """Whether "auto" may take "triton": elsewhere its kernels run in an interpreter."""
    return call.state.device.type == "cuda"


def _run_triton(call: ConsensusCall) -> Result:
    """Run the kernels, which apply first layers themselves and read half precision as it is."""
    dtype = call.state.dtype
    layers: list[Any] = [in_dtype(x, dtype) for x in (call.target_hidden, call.source_hidden)]
    u, v = call.disagreement
    call = call._replace(valid=flat_masks(call.valid, call.state.shape[:-3]))
    with full_precision(call.state.device):
        sums = partial(operators.sums_over_edges, backend="triton", shared=u is v)
        return _step(call, call.state, (*layers, u, v), sums)


def _run_native(call: ConsensusCall) -> Result:
    """Run the C++ code, or one operator that calls it where torch must see an operator."""
    if is_watched(call.state):
        return _run(call, partial(operators.sums_over_edges, backend="native"))
    return _run(call, native.sums_over_edges, reads_halves=True)


def _run_structured(call: ConsensusCall) -> Result:
    """Run operations of torch over chunks of edges, or one operator that does."""
    if is_watched(call.state):
        return _run(call, partial(operators.sums_over_edges, backend="structured"))
    return _run(call, structured.sums_over_edges)


def _run_reference(call: ConsensusCall) -> Result:
    """Run the readable form, one message per edge."""
    note_uncounted("consensus_update with backend='reference'")
    dtype = compute_dtype(call.state.dtype)
    state = as_dtype(call.state, dtype)
    target_hidden, source_hidden, u, v = [as_dtype(x, dtype) for x in _of_tokens(call)]
    tensors = target_hidden, source_hidden, call.network, call.graph
    options: dict[str, Any] = {
        "update": call.update,
        "disagreement": (u, v),
        "valid": call.valid,
        "edge_hidden": call.edge_hidden,
    }
    with full_precision(state.device):
        if call.only_sums:
            return reference.sums_over_edges(
                *tensors, **options, with_degrees=call.step_size is None
            )
        return reference.consensus_update(state, *tensors, call.step_size, **options)


def _of_tokens(call: ConsensusCall) -> tuple[Tensor, ...]:
    """Hidden vectors of targets and sources, and u and v.

    Autocast holds for the first layers, as for any linear layer, and not for the rest of a step.
    """
    layers = call.target_hidden, call.source_hidden
    hidden = [x.hidden() if isinstance(x, FirstLayer) else x for x in layers]
    return *hidden, *call.disagreement


def _run(call: ConsensusCall, sums: Sums, *, reads_halves: bool = False) -> Result:
    """Compute a step from hidden vectors, in the compute dtype.

    If the code `reads_halves` and no gradients are needed, tensors of half precision are not
    converted.
    """
    dtype = compute_dtype(call.state.dtype)
    state = as_dtype(call.state, dtype)  # first: gradients are added in the order of operations
    tensors = _of_tokens(call)
    keeps_halves = reads_halves and dtype is not call.state.dtype
    if not keeps_halves or may_be_differentiated([*tensors, *call.network]):
        tensors = tuple([as_dtype(x, dtype) for x in tensors])
    keep_freed_memory()
    with full_precision(state.device):
        return _step(call, state, tensors, sums)


def _step(
    call: ConsensusCall, state: Tensor, of_tokens: tuple[Tensor | FirstLayer, ...], sums: Sums
) -> Result:
    """Compute u' = u - step * g, from the sums g; or only these."""
    batch = state.shape[:-3]
    entries = math.prod(batch)  # not batch.numel(), which makes a constant of a traced size
    tensors = [x if len(batch) == 1 else _flat(x, entries) for x in of_tokens]
    of_edges = () if call.edge_hidden is None else as_pair(call.edge_hidden, entries)
    gradient, degree = sums(
        call.graph,
        (*tensors, *call.network, *of_edges),
        call.valid,
        energy=call.update == "energy",
        degrees=call.step_size is None,
    )
    gradient = gradient if len(batch) == 1 else gradient.view(state.shape)
    degree = None if degree is None else degree.view(state.shape[:-1])
    if call.only_sums:
        return gradient, degree
    if call.step_size is not None:
        return torch.addcmul(state, call.step_size[..., None], gradient, value=-1)
    assert degree is not None
    return automatic_move(state, gradient, bounds_of_degrees(degree, call.graph, call.update))


def _flat(x: Tensor | FirstLayer, entries: int) -> Tensor | FirstLayer:
    """x [*, tokens, heads, features], or the tokens of a layer, with one batch dimension."""
    if isinstance(x, FirstLayer):
        return x._replace(tokens=x.tokens.reshape(entries, *x.tokens.shape[-3:]))
    return x.reshape(entries, *x.shape[-3:])


def _why_not_fused(_: Any) -> str:
    """The reason why torch's fused attention cannot run a call."""
    return "torch's fused attention is no consensus"


BACKENDS = (  # fastest first
    Backend("fused", _why_not_fused),
    Backend("triton", _why_not_triton, _run_triton, _is_on_gpu),
    Backend("native", _why_not_native, _run_native),
    Backend("structured", run=_run_structured),
    Backend("reference", run=_run_reference),
)
