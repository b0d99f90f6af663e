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
    gradients_from_log_sums,
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


def gradients_of_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    whole: tuple[Tensor, Tensor],
    d_whole: tuple[Tensor, Tensor],
    **options: Any,
) -> Gradients | None:
    """Gradients of the five inputs, from results over more sources than those of the graph.

    Args:
        query, key, value: in the compute dtype.
        graph: the edges of a part.
        whole: output and log-sums over all sources.
        d_whole: their gradients.
        options: those of :func:`attend`.

    Returns:
        None if the plan is another one than bands, or for numbers that bands leave to slower code.
    """
    scale, bias = options.pop("scale"), options.pop("bias")
    given = query, key, value, scale, bias
    inputs, plan = plan_call(given, graph, **options)
    if not isinstance(plan, NativeBandPlan):
        return None
    results = (x.reshape(len(inputs[0]), *x.shape[query.dim() - 3 :]) for x in (*whole, *d_whole))
    found = gradients_from_log_sums(plan, inputs, *results)
    if found is None:
        return None
    query_, key_, value_ = (d.view(x.shape) for x, d in zip(given, found[:3], strict=False))
    return query_, key_, value_, *found[3:]


def plan_call(inputs: Inputs, graph: TokenGraph, **options: Any) -> tuple[Inputs, Plan]:
    """The inputs as a plan wants them, and the plan."""
    return structured.plan_call(inputs, graph, kernels=KERNELS, **options)
