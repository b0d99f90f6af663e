"""The backends of a consensus step: which can run a call, and how each runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from graphattn.ops import compiled_code
from graphattn.ops.backends import Backend
from graphattn.ops.consensus import compiled, native, operators, reference, triton
from graphattn.ops.consensus.calls import ConsensusCall, ConsensusKind
from graphattn.ops.consensus.edge_network.parameters import FirstLayer, as_dtype
from graphattn.ops.consensus.structured import sums as structured
from graphattn.ops.counting import is_watched, note_uncounted
from graphattn.ops.inputs import compute_dtype, full_precision, may_be_differentiated

Case = ConsensusCall | ConsensusKind


def _why_not_triton(call: Case) -> str | None:
    """The reason why the kernels of "triton" cannot run a step; None if they can."""
    return triton.why_not(call.state, call.trunks, call.edge_hidden is not None)


def _why_not_native(call: Case) -> str | None:
    """The reason why the C++ code of "native" cannot run a step; None if it can."""
    return compiled_code.why_not(call.state)


def _is_on_gpu(call: Case) -> bool:
    """Whether "auto" may take "triton": elsewhere its kernels run in an interpreter."""
    return call.state.device.type == "cuda"


def _run_triton(call: ConsensusCall) -> Tensor:
    """Run the kernels, which apply first layers themselves and read half precision as it is."""
    with full_precision(call.state.device):
        return operators.consensus_update(
            call.state,
            call.target_hidden,
            call.source_hidden,
            call.network,
            call.graph,
            call.step_size,
            update=call.update,
            disagreement=call.disagreement,
            valid=call.valid,
        )


def _run_native(call: ConsensusCall) -> Tensor:
    """Run the C++ code, or one operator that calls it where torch must see an operator."""
    if is_watched(call.state):
        return _run(call, partial(compiled.consensus_update, backend="native"))
    update = partial(structured.consensus_update, sums=native.sums_over_edges)
    return _run(call, update, reads_halves=True)


def _run_structured(call: ConsensusCall) -> Tensor:
    """Run operations of torch over chunks of edges, or one operator that does."""
    if is_watched(call.state):
        return _run(call, partial(compiled.consensus_update, backend="structured"))
    return _run(call, structured.consensus_update)


def _run_reference(call: ConsensusCall) -> Tensor:
    """Run the readable form, one message per edge."""
    note_uncounted("consensus_update with backend='reference'")
    return _run(call, reference.consensus_update)


def _run(
    call: ConsensusCall, update: Callable[..., Tensor], *, reads_halves: bool = False
) -> Tensor:
    """Compute a step by `update`, from hidden vectors, in the compute dtype.

    If the code `reads_halves` and no gradients are needed, tensors of half precision are not
    converted. Autocast holds for the first layers, as for any linear layer, and not for the rest.
    """
    dtype = compute_dtype(call.state.dtype)
    state = as_dtype(call.state, dtype)  # first: gradients are added in the order of operations
    layers = call.target_hidden, call.source_hidden
    hidden = (x.hidden() if isinstance(x, FirstLayer) else x for x in layers)
    tensors: list[Any] = [*hidden, *call.disagreement]
    if not reads_halves or may_be_differentiated([*tensors, *call.network]):
        tensors = [as_dtype(x, dtype) for x in tensors]
    with full_precision(state.device):
        return update(
            state,
            tensors[0],
            tensors[1],
            call.network,
            call.graph,
            call.step_size,
            update=call.update,
            disagreement=(tensors[2], tensors[3]),
            valid=call.valid,
            **({} if call.edge_hidden is None else {"edge_hidden": call.edge_hidden}),
        )


BACKENDS = (  # fastest first
    Backend("triton", _why_not_triton, _run_triton, _is_on_gpu),
    Backend("native", _why_not_native, _run_native),
    Backend("structured", run=_run_structured),
    Backend("reference", run=_run_reference),
)
