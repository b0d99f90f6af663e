"""Attention by C++ code on a CPU: bands, and rows of edges for every other graph.

The planner of `structured` chooses. Where it finds tiles, `bands.py` is used, elsewhere `rows.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention import structured
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.native.bands import (
    NativeBandPlan,
    in_dtype_of_scale,
    most_saved_per_head,
    native_tiles,
)
from graphattn.ops.attention.native.rows import native_rows
from graphattn.ops.attention.structured.plans import Kernels
from graphattn.ops.attention.structured.recompute import Gradients, Inputs, Plan
from graphattn.ops.inputs import may_be_differentiated

__all__ = ["attend", "gradients_of_part", "most_saved_per_head", "plan_call", "plan_of_kind"]

KERNELS = Kernels(native_rows, native_tiles)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H].

    Inputs may have half precision. If C++ code can read them, the output has half precision, unless
    it must not be rounded. Otherwise they are converted first, and the output is in float32.
    """
    tensors = call.tensors(widened=not call.rounded)
    options = call.options()
    scale, bias = options.pop("scale"), options.pop("bias")
    inputs, plan = plan_call((*tensors, scale, bias), call.graph, flat=False, **options)
    if tensors[0].dtype != scale.dtype:
        if not isinstance(plan, NativeBandPlan):
            inputs = in_dtype_of_scale(inputs)
        elif may_be_differentiated(inputs):
            plan = replace(plan, keeps_outputs=call.value.shape[-1])
    return structured.run(plan, inputs)


def plan_of_kind(call: AttentionCall) -> Plan | None:
    """The plan of all calls like this one; None where plans depend on more than sizes."""
    by_numbers = call.bias is not None or call.valid != (None, None) or call.dropout > 0
    if by_numbers or call.query.dtype not in (torch.float32, torch.float64):
        return None
    unread = call.query.new_empty(0)  # in the place of the scale
    inputs = *call.tensors(), unread, None
    return plan_call(
        inputs,
        call.graph,
        score=call.score.kernel,
        per_offset=False,
        top_k=call.top_k,
        valid=(None, None),
        softcap=call.softcap,
        flat=False,
    )[1]


def gradients_of_part(inputs: Inputs, *of_all: Any, **options: Any) -> Gradients | None:
    """Return what `structured.gradients_of_part` returns, by C++ code."""
    return structured.gradients_of_part(inputs, *of_all, kernels=KERNELS, **options)


def plan_call(inputs: Inputs, graph: TokenGraph, **options: Any) -> tuple[Inputs, Plan]:
    """The inputs as a plan wants them, and the plan."""
    return structured.plan_call(inputs, graph, kernels=KERNELS, **options)
