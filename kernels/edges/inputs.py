"""Inputs of the edge kernels, checked and laid out once for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from graphattn.kernels.edges.schedule import EdgeSchedule, Rows
from graphattn.kernels.shared.launch import Heads, launch
from graphattn.kernels.shared.layout import Valid, as_bytes, side_by_side
from graphattn.kernels.shared.tuning import Choice


class RowEdges(NamedTuple):
    """The edges of all rows as kernels take them (see `Rows`)."""

    p_segments: Tensor
    p_others: Tensor
    p_edge_ids: Tensor | None  # None: numbers of edges are their places, or no kernel needs them


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

    def common(self) -> dict[str, Any]:
        """The arguments that all edge kernels take, whether they read them or not.

        Names in capitals are constants (``tl.constexpr``): Triton compiles another version of the
        kernel for every set of values, and of tensors that are None: `p_bias`, `p_kept` (the edges
        that top-k has chosen) and those of `valid`. Beginnings of names, such as ``b_``, are
        explained in :mod:`graphattn.kernels`. The constants of all calls are:

        - REPEATS: query heads that share one key head, H / Hk.
        - D, DV: features of queries and keys, and of values. BLOCK_D, BLOCK_DV: the same, rounded
          up to powers of 2, as tiles need.
        - RBF: affinities are -||q - k||^2 / 2; otherwise q . k.
        - OWN_BIAS: biases are [B, E, H]; otherwise [E, H].

        :func:`launch_over` adds ROWS and SLOTS: segments of a program, and edges of each that it
        takes at a time.
        """
        query, key, value = self.query, self.key, self.value
        H, Hk = query.shape[-2], key.shape[-2]
        return {
            "query": Heads.of(query),
            "key": Heads.of(key),
            "value": Heads.of(value),
            "p_scale": self.scale,
            "p_bias": self.bias,
            "p_kept": self.kept,
            "valid": Valid(self.valid_target, self.valid_source),
            "N": query.shape[1],
            "M": key.shape[1],
            "E": self.num_edges,
            "H": H,
            "REPEATS": H // Hk,
            "D": query.shape[-1],
            "DV": value.shape[-1],
            "RBF": self.rbf,
            "OWN_BIAS": self.bias is not None and self.bias.dim() == 3,
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
    launch(
        kernel,
        (len(x.query) * heads * num_groups(choice, rows),),
        **arguments,
        **x.common(),
        edges=RowEdges(rows.segments, rows.others, rows.edge_ids if per_edge else None),
        num_segments=len(rows.segments),
        num_parts=rows.num_parts,
        ROWS=choice.rows,
        SLOTS=choice.columns,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )


def num_groups(choice: Choice, rows: Rows) -> int:
    """How many programs share the segments of one head."""
    return triton.cdiv(len(rows.segments), choice.rows)
