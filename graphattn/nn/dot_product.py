"""Dot-product attention over a token graph."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from graphattn.graphs.arguments import as_choice
from graphattn.nn.attention import GraphAttention
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.ops.attention.logits.score import DotProduct, Score


class DotProductAttention(GraphAttention):
    r"""Multi-head softmax attention along the edges of a graph.

    .. math::
        y_i = W_O \, \Big\Vert_h \sum_{j \in N(i)}
              \operatorname{softmax}_j \big( q_i^h \cdot k_j^h / \sqrt{D} \big) \, v_j^h

    The graph makes the variant: ``complete_graph`` gives global attention (SA),
    ``window_path_graph(N, w, self_loops=True)`` sliding windows (SW), ``causal_graph`` a decoder,
    ``longformer_graph`` Longformer, a bipartite graph cross-attention (Vaswani et al., 2017).
    ``value_projection=False`` is the Value-Less Transformer (Projection-Free Transformers,
    Table 5): values are the input features themselves.

    Args:
        dim: width of `x` and of the output.
        heads: H, divides `dim`; D = dim / H.
        value_projection: whether values are projected.
        kv_heads: key and value heads, divides `heads` (grouped-query attention); `heads` if None.
        context_dim: width of `context` in cross-attention; `dim` if None.
        rope: rotate queries and keys by their positions: True, or a :class:`RotaryEmbedding`.
        qk_norm: parameter-free RMS norm of queries and keys per head, before the rotation, which
            keeps their norm (nanochat, the language baseline of Projection-Free Transformers,
            Section 5.1). Logits then lie within sqrt(D), and a cache holds normalised keys.
        scaling: "sdp" (scaled dot product), or "sq_inplace" for the input divided by sqrt(D) and
            logits without a scale. A `qk_norm` would undo the latter, so it must be False.
        top_k: sources kept per target and head, the largest logits; all if None.
        bias: whether the projections have biases.
        backend: "auto", or one of :func:`~graphattn.backends`; "reference" runs `message()` through
            PyG's `propagate`.
        attention_dropout: share of the attention weights set to 0 in training, in [0, 1), the
            others divided by 1 - attention_dropout. Never in :meth:`step`, nor in the weights of
            ``return_attention_weights=True``, which are computed without dropout.
        sink: whether every head learns a logit that joins the normaliser, the parameter `sink`
            [heads] (GPT-OSS). It starts at 0, which is the weight of one token of logit 0
            (transformers draws it from N(0, 0.02^2)); -inf is none.
        softcap: cap c > 0 on logits, ``c * tanh(logits / c)`` (Gemma 2: 50); none if None.
        value_embeddings: vocabulary size of a table of embeddings that are added to the values,
            each with a gate per head (nanochat); the layer is then called with ``tokens=``. None
            for no table. :class:`~graphattn.models.CausalLM` has ``value_embeddings=True``.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: TokenGraph, edge_index [2, E] or PyG EdgeIndex; N targets, M sources
        - **context**: [*, M, context_dim]; `x` itself if None
        - **valid**: bool [N] or [*, N], or a pair for targets and sources (keyword); one
          mask serves both targets and sources if there are equally many
        - **positions**: [N] or [*, N], or a pair (keyword)
        - **edge_bias**: added to the logits: [E, heads], [*, E, heads], or a table [offsets, heads]
          where the graph has one (keyword); see :class:`OffsetBias`, :class:`DistanceBias`,
          :class:`EdgeProjection`
        - **tokens**: integers [*, M] below `value_embeddings`, the tokens of the sources (keyword)
        - **output**: [*, N, dim]; with ``return_attention_weights=True`` also the
          weights [*, E, heads], in the order of ``graph.edge_index``

    Raises:
        ValueError: names the argument, its value and what is allowed. With
            ``return_attention_weights=True`` or `edge_bias` also for a raw edge_index that is not
            sorted.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.DotProductAttention(16, heads=4, rope=True)
        >>> layer(torch.randn(2, 10, 16), ga.causal_graph(10)).shape
        torch.Size([2, 10, 16])
        >>> cross = ga.nn.DotProductAttention(16, heads=4, context_dim=8)
        >>> graph = ga.bipartite_complete_graph(10, 5)
        >>> cross(torch.randn(2, 10, 16), graph, torch.randn(2, 5, 8)).shape
        torch.Size([2, 10, 16])
    """

    scaling: str = "sdp"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        value_projection: bool = True,
        kv_heads: int | None = None,
        context_dim: int | None = None,
        rope: bool | RotaryEmbedding = False,
        qk_norm: bool = False,
        scaling: Literal["sdp", "sq_inplace"] = "sdp",
        top_k: int | None = None,
        bias: bool = True,
        backend: str = "auto",
        attention_dropout: float = 0.0,
        sink: bool = False,
        softcap: float | None = None,
        value_embeddings: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            heads,
            kv_heads=kv_heads,
            context_dim=context_dim,
            top_k=top_k,
            rope=rope,
            backend=backend,
            attention_dropout=attention_dropout,
            sink=sink,
            softcap=softcap,
            value_embeddings=value_embeddings,
        )
        if not value_projection and kv_heads is not None:
            raise ValueError(
                f"kv_heads must be None without value_projection, got {kv_heads}: values are then "
                "the heads of the input itself"
            )
        if not value_projection and value_embeddings is not None:
            raise ValueError(
                f"value_embeddings must be None without value_projection, got {value_embeddings}: "
                "values are then the input itself"
            )
        if not value_projection and self.context_dim != self.dim:
            raise ValueError(
                f"context_dim must be {dim} (dim) without value_projection, got {context_dim}"
            )
        if not isinstance(qk_norm, bool):
            raise ValueError(f"qk_norm must be True or False, got {qk_norm!r}")
        self.qk_norm = qk_norm
        if isinstance(scaling, str) and scaling == "sq":
            raise ValueError(
                "scaling must be 'sdp' or 'sq_inplace', got 'sq': to scale the queries alone is to "
                "scale the product, so use 'sdp'"
            )
        self.scaling = as_choice("scaling", scaling, ("sdp", "sq_inplace"))
        if scaling == "sq_inplace":
            self.input_divisor = math.sqrt(self.head_dim)
        if qk_norm and scaling != "sdp":
            raise ValueError(
                f"scaling must be 'sdp' with qk_norm=True, which undoes any other, got {scaling!r}"
            )
        kv_dim = self.kv_heads * self.head_dim
        self.query_proj = nn.Linear(self.dim, self.dim, bias=bias)
        self.key_proj = nn.Linear(self.context_dim, kv_dim, bias=bias)
        self.value_proj = (
            nn.Linear(self.context_dim, kv_dim, bias=bias) if value_projection else None
        )
        self.output_proj = nn.Linear(self.dim, self.dim, bias=bias)

    def score(self) -> Score:
        return DotProduct(1 / math.sqrt(self.head_dim) if self.scaling == "sdp" else 1.0)
