"""Inputs of the edge kernels, checked and laid out once for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from graphattn.kernels.edges.schedule import EdgeSchedule, Rows
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import as_bytes, side_by_side
from graphattn.kernels.shared.tuning import Choice


@dataclass
class EdgeInputs:
    """Attention over any edges: tensors, edges and options.

    Args:
        query: [B, N, H, D], float32, float16 or bfloat16.
        key: [B, M, Hk, D]; Hk divides H.
        value: [B, M, Hk, Dv].
        scale: [H], float32.
        schedule: the edges between N targets and M sources.
        rbf: logits -scale ||q - k||^2 / 2 instead of scale q . k.
        bias: [E, H], or [B, E, H] where every sample has its own; float32, added to the logits.
        valid_target, valid_source: bool [B, N] and [B, M]; None: all are.
        kept: uint8 [B, E, H], 1 for the edges that top-k has chosen
            (:func:`graphattn.kernels.edges.top_k.select`); None: every edge counts.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    schedule: EdgeSchedule
    rbf: bool
    bias: Tensor | None = None
    valid_target: Tensor | None = None
    valid_source: Tensor | None = None
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        self.query, self.key, self.value = map(side_by_side, (self.query, self.key, self.value))
        self.scale = self.scale.to(torch.float32).contiguous()
        if self.bias is not None:
            self.bias = self.bias.to(torch.float32).contiguous()
        self.valid_target, self.valid_source = map(as_bytes, (self.valid_target, self.valid_source))

    @property
    def width(self) -> int:
        """The wider of the features of keys and values."""
        return max(self.query.shape[-1], self.value.shape[-1])

    @property
    def num_edges(self) -> int:
        """E, the number of edges. Without biases it includes the empty entries of a table, because
        then nothing is stored per edge.
        """
        return self.schedule.num_edges if self.bias is None else self.bias.shape[-2]

    @property
    def unread(self) -> Tensor:
        """A tensor for the pointers that a version of a kernel takes and does not read."""
        return self.scale

    def common(self) -> dict[str, Any]:
        """The arguments that all edge kernels take, whether they read them or not.

        Names in capitals are constants (``tl.constexpr``): Triton compiles another version of the
        kernel for every set of values. Beginnings of names, such as ``b_``, are explained in
        :mod:`graphattn.kernels`. The constants of all calls are:

        - REPEATS: query heads that share one key head, H / Hk.
        - D, DV: features of queries and keys, and of values. BLOCK_D, BLOCK_DV: the same, rounded
          up to powers of 2, as tiles need.
        - RBF: affinities are -||q - k||^2 / 2; otherwise q . k.
        - BIAS: 0 without biases, 1 with biases [E, H], 2 with biases [B, E, H].
        - KEPT: only the edges that top-k has chosen count; `p_kept` marks them.
        - VALID, VALID_TARGET: there is a mask of valid sources, of valid targets.

        :func:`launch_over` adds:

        - ROWS, SLOTS: segments of a program, and edges of each that it takes at a time.
        - EDGE_IDS: numbers of edges are listed in `p_edge_ids`; otherwise they are their places.
        - SPLIT: some rows are split, so some results are those of parts.
        """
        query, key, value, unread = self.query, self.key, self.value, self.unread
        D, DV, H, Hk = query.shape[-1], value.shape[-1], query.shape[-2], key.shape[-2]
        return {
            "p_query": query,
            "p_key": key,
            "p_value": value,
            "p_scale": self.scale,
            "p_bias": unread if self.bias is None else self.bias,
            "p_kept": unread if self.kept is None else self.kept,
            "p_valid_target": unread if self.valid_target is None else self.valid_target,
            "p_valid_source": unread if self.valid_source is None else self.valid_source,
            "N": query.shape[1],
            "M": key.shape[1],
            "E": self.num_edges,
            "H": H,
            "stride_qn": query.stride(1),
            "stride_qh": query.stride(2),
            "stride_kn": key.stride(1),
            "stride_kh": key.stride(2),
            "stride_vn": value.stride(1),
            "stride_vh": value.stride(2),
            "REPEATS": H // Hk,
            "D": D,
            "DV": DV,
            "BLOCK_D": triton.next_power_of_2(D),
            "BLOCK_DV": triton.next_power_of_2(DV),
            "RBF": self.rbf,
            "BIAS": 0 if self.bias is None else self.bias.dim() - 1,  # 2: every sample has its own
            "KEPT": self.kept is not None,
            "VALID_TARGET": self.valid_target is not None,
            "VALID": self.valid_source is not None,
        }


def launch_over(
    kernel: Any,
    choice: Choice,
    inputs: EdgeInputs,
    rows: Rows,
    heads: int,
    *,
    per_edge: bool = False,
    **arguments: Any,
) -> None:
    """Starts a kernel on all segments of `rows`, for all batch entries and `heads` heads.

    `choice.rows` are the segments of a program, `choice.columns` its SLOTS. `per_edge` says that
    the kernel writes something for every edge, and so needs the numbers of the edges.
    """
    x = inputs
    per_edge = per_edge or x.bias is not None or x.kept is not None
    groups = num_groups(choice, rows)
    launch(
        kernel,
        (len(x.query) * heads * groups,),
        **arguments,
        **x.common(),
        p_segments=rows.segments,
        p_others=rows.others,
        p_edge_ids=x.unread if rows.edge_ids is None else rows.edge_ids,
        num_segments=len(rows.segments),
        num_groups=groups,
        num_parts=rows.num_parts,
        ROWS=choice.rows,
        SLOTS=choice.columns,
        EDGE_IDS=per_edge and rows.edge_ids is not None,
        SPLIT=rows.num_parts > 0,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )


def num_groups(choice: Choice, rows: Rows) -> int:
    """How many programs share the segments of one head."""
    return triton.cdiv(len(rows.segments), choice.rows)
