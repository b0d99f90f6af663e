"""Attention by C++ code on a CPU: bands, and rows of edges for every other graph.

The planner of `structured` chooses. Where it finds tiles, `bands.py` is used, elsewhere `rows.py`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from graphattn.ops.attention import structured
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.native.bands import (
    NativeBandPlan,
    in_dtype_of_scale,
    native_tiles,
)
from graphattn.ops.attention.native.rows import native_rows
from graphattn.ops.attention.structured.plans import Kernels
from graphattn.ops.attention.structured.recompute import run
from graphattn.ops.attention.structured.whole import WholePlan
from graphattn.ops.inputs import may_be_differentiated

__all__ = ["KERNELS", "attend"]

KERNELS = Kernels(native_rows, native_tiles)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H].

    Inputs may have half precision. If C++ code can read them, the output has half precision, unless
    it must not be rounded. Otherwise they are converted first, and the output is in float32.
    """
    call = call if call.rounded else call.widened()
    plan, inputs = structured.plan_of(call, KERNELS), call.inputs()
    if isinstance(plan, WholePlan) and not plan.is_faster(inputs):
        plan = plan.other  # which reads half precision
    if inputs.query.dtype != inputs.scale.dtype:
        if not isinstance(plan, NativeBandPlan):
            inputs = in_dtype_of_scale(inputs)
        elif may_be_differentiated(inputs[:5]):
            plan = replace(plan, keeps_outputs=call.value.shape[-1])
    return run(plan, inputs)
