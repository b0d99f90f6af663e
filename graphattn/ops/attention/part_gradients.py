"""Gradients of attention over some of the sources, from the results over all of them.

Softmax attention over many sources may be computed in parts, which are merged by their log-sums.
Its backward pass needs no part again: with the log-sum L and the output y over all sources,

    w_ij = exp(l_ij - L_i),    dl_ij = w_ij (dy_i . v_j - dy_i . y_i + dL_i),

so a part needs its own logits l_ij only. A backward pass that starts from saved log-sums computes
this for the sources of a part, if it is given L and y in the place of the part's own. "triton" does
so for all graphs; "native" and "structured" do for bands, tiles and lists of edges, and not for
graphs that they compute as several parts themselves. Dropout, top-k and scores of your own need the
results of the part, and so do numbers for which exp(l - L) has few digits (`merge.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.backends import BACKENDS, gradients_of_part
from graphattn.ops.attention.calls import AttentionCall, as_bias, with_options
from graphattn.ops.attention.logits.score import Score
from graphattn.ops.backends import choose
from graphattn.ops.inputs import check_qkv, check_valid

Pairs = list[tuple[Tensor, Tensor]]


def part_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    score: Score,
    *,
    whole: tuple[Tensor, Tensor],
    d_whole: tuple[Tensor, Tensor],
    backend: str,
    **options: Any,
) -> Pairs | None:
    """Return gradients of the inputs of a part.

    Args:
        query: [*, N, H, D].
        key, value: [*, M, Hk, D] and [*, M, Hk, Dv], the sources of the part.
        graph: the edges of the part.
        score: gives the logits.
        whole: the output [*, N, H, Dv] and the log-sums [*, N, H] over all sources, in the compute
            dtype.
        d_whole: their gradients.
        backend: as in :func:`graphattn.score_attention`.
        options: `valid`, `edge_bias` and `softcap`, as there.

    Returns:
        Tensors that depend on the inputs, each with its gradient: queries, keys, values, and the
        numbers of the score and the bias, those that need one. None if the part must be computed
        again, because its backend reads log-sums of its own, or because of numbers that this form
        of the gradient is not exact for.
    """
    heads, (N, M) = check_qkv(query, key, value), (query.shape[-3], key.shape[-3])
    masks = check_valid(options.get("valid"), query.shape[:-3], query.device, N, M)
    bias, per_offset = as_bias(options.get("edge_bias"), graph, query)
    ready = score.ready(heads, query)
    call = AttentionCall(query, key, value, graph, ready, None, bias, per_offset, masks)
    call = with_options(call, None, options.get("softcap"), 0.0)
    return gradients_of_part(call, choose(BACKENDS, call, backend).name, whole, d_whole)
