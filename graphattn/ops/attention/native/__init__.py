"""Attention by C++ code on a CPU: bands, and rows of edges for every other graph.

The planner of `structured` chooses. Where it finds tiles, `bands.py` is used, elsewhere `rows.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention import structured
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

__all__ = ["attend", "gradients_of_part", "most_saved_per_head", "plan_call"]

KERNELS = Kernels(native_rows, native_tiles)


def attend(
    query: Tensor, key: Tensor, value: Tensor, graph: TokenGraph, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]; options are those of `structured`.

    Inputs may have half precision, with a scale in float32. If C++ code can read them, the output
    has half precision. Otherwise they are converted first, and the output is in float32.
    """
    scale, bias = options.pop("scale"), options.pop("bias")
    inputs, plan = plan_call((query, key, value, scale, bias), graph, **options)
    if query.dtype != scale.dtype:
        if not isinstance(plan, NativeBandPlan):
            inputs = in_dtype_of_scale(inputs)
        elif may_be_differentiated(inputs):
            plan = replace(plan, keeps_outputs=value.shape[-1])
    return structured.run(plan, inputs, query.shape[:-3])


def gradients_of_part(inputs: Inputs, *of_all: Any, **options: Any) -> Gradients | None:
    """Return what `structured.gradients_of_part` returns, by C++ code."""
    return structured.gradients_of_part(inputs, *of_all, kernels=KERNELS, **options)


def plan_call(inputs: Inputs, graph: TokenGraph, **options: Any) -> tuple[Inputs, Plan]:
    """The inputs as a plan wants them, and the plan."""
    return structured.plan_call(inputs, graph, kernels=KERNELS, **options)
