"""Krause attention."""

from __future__ import annotations

import torch
from torch import nn

from graphattn.nn.attention import DistanceAttention
from graphattn.nn.rotary import RotaryEmbedding


class KrauseAttention(DistanceAttention):
    r"""Attention by distance within a window, cut to the `top_k` nearest: bounded confidence.

    .. math::
        s_{ij} = \exp\Big( -\frac{\lVert q_i - k_j \rVert^2}{2 \sigma_h^2} \Big), \qquad
        z_i = \sum_{j \in S_k(i)} \frac{s_{ij}}{\sum_{l \in S_k(i)} s_{il}} \, v_j

    with S_k(i) the `top_k` sources of i of largest affinity (Krause Synchronization Transformers).
    The window is the graph: ``grid_window_graph(..., class_token=True)`` in vision (the class
    token's row is cut to top-k as well), ``causal_window_graph(N, W)`` for generation. With
    top_k >= window nothing is cut. Published settings: windows 4-25 and k 2 -> 4 or 8 -> 16 over
    the layers in vision; W = 256, k = 192 for CIFAR-10 generation.

    Args:
        dim: width of `x` and of the output.
        heads: H, divides `dim`; D = dim / H.
        top_k: sources kept per target and head; all if None.
        init_sigma: bandwidth at the start; sqrt(D) if None (published: 2.5 for small vision and
            generation, 4.5-9 for ImageNet, 5.5 for a language model).
        sigma_per_head: one bandwidth per head, or one for the layer.
        kv_heads: key and value heads, divides `heads` (grouped-query attention).
        rope: rotate queries and keys before the distance: True, or a :class:`RotaryEmbedding`.
        bias: whether the projections have biases.
        backend: "auto", or one of :func:`~graphattn.backends`; "reference" runs `message()` through
            PyG's `propagate`.
        attention_dropout: share of the attention weights set to 0 in training, in [0, 1), the
            others divided by 1 - attention_dropout. Never in :meth:`step`, nor in the weights of
            ``return_attention_weights=True``, which are computed without dropout.
        sink: whether every head learns a logit that joins the normaliser, the parameter `sink`
            [heads] (GPT-OSS). It starts at 0, which is the weight of one token of logit 0
            (transformers draws it from N(0, 0.02^2)); -inf is none.
        value_embeddings: vocabulary size of a table of embeddings that are added to the values, as
            :class:`DotProductAttention` has it; the layer is then called with ``tokens=``.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: TokenGraph, square but for a `context`; or an edge_index [2, E] or PyG
          EdgeIndex, which is read as one sequence (a :func:`~graphattn.batch` keeps its borders in
          the TokenGraph alone)
        - **context**: [*, M, dim], the tokens that are seen where `x` holds some rows alone, as
          over ``causal_graph(N, past=m)`` or :meth:`graphattn.TokenGraph.targets`; `x` itself if
          None
        - **valid**: bool [N] or [*, N], True where a token is real (keyword), or a pair for `x` and
          `context`; others are not read, and their own output means nothing
        - **positions**: [N] or [*, N], or a pair for `x` and `context` (keyword)
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
        >>> layer = ga.nn.KrauseAttention(16, heads=4, top_k=3)
        >>> y, weights = layer(
        ...     torch.randn(10, 16), ga.causal_window_graph(10, window=6),
        ...     return_attention_weights=True)
        >>> int((weights[-6:, 0] > 0).sum())  # the last token keeps 3 of its 6 keys
        3
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        top_k: int | None = None,
        init_sigma: float | None = None,
        sigma_per_head: bool = True,
        kv_heads: int | None = None,
        rope: bool | RotaryEmbedding = False,
        bias: bool = True,
        backend: str = "auto",
        attention_dropout: float = 0.0,
        sink: bool = False,
        value_embeddings: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            heads,
            kv_heads=kv_heads,
            top_k=top_k,
            rope=rope,
            backend=backend,
            attention_dropout=attention_dropout,
            sink=sink,
            value_embeddings=value_embeddings,
        )
        kv_dim = self.kv_heads * self.head_dim
        self.query_proj = nn.Linear(self.dim, self.dim, bias=bias)
        self.key_proj = nn.Linear(self.dim, kv_dim, bias=bias)
        self.value_proj = nn.Linear(self.dim, kv_dim, bias=bias)
        self.output_proj = nn.Linear(self.dim, self.dim, bias=bias)
        self.init_sigma = self.initial_sigma(init_sigma)
        self.log_sigma = nn.Parameter(torch.empty(self.heads if sigma_per_head else 1))
        self.reset_parameters()
