"""Gaussian kernel attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_float
from graphattn.nn.attention import DistanceAttention, normalized
from graphattn.nn.base.graph_layer import Rotations
from graphattn.nn.rotary import RotaryEmbedding


class GaussianKernelAttention(DistanceAttention):
    r"""Projection-free attention: every token averages the tokens with similar features.

    .. math::
        K_{ij} = \exp\Big( -\frac{\lVert x_i - x_j \rVert^2}{2 \sigma_h^2} \Big), \qquad
        y_i = W_O \, \Big\Vert_h \sum_{j \in N(i)}
              \frac{K_{ij}}{\varepsilon + \sum_{j'} K_{ij'}} \, x_j^h

    Query, key and value are one tensor, the heads of the (already normalised) input; learned are
    one bandwidth per head and the output projection, a quarter of attention's parameters
    (Projection-Free Transformers via Gaussian Kernel Attention, Eq. 3-5). ``rope=True`` and
    ``normalize=True`` give the language-model variant (Section 5.1): values are the rotated and
    normalised features too, as Eq. 11 writes them.

    Args:
        dim: width of `x` and of the output.
        heads: H, divides `dim`; D = dim / H.
        init_sigma: bandwidth at the start; sqrt(D) if None. Squared distances between normalised
            tokens are about 2 D, so sigma = 1 gives off-diagonal weights of about e^-D (e^-64 for
            64 features): the identity, with vanishing gradients.
        rope: rotate the features by their positions: True, or a :class:`RotaryEmbedding`.
        normalize: parameter-free RMS norm per head, after the rotation.
        eps: >= 0, added to the normaliser (Eq. 4); with `top_k`, to that of the sources kept.
        top_k: sources kept per target and head, the nearest ones, as in :class:`KrauseAttention`;
            all if None.
        bias: whether the output projection has a bias.
        backend: "auto", or one of :func:`~graphattn.backends`; "reference" runs `message()` through
            PyG's `propagate`.
        attention_dropout: share of the attention weights set to 0 in training, in [0, 1), the
            others divided by 1 - attention_dropout. Never in :meth:`step`, nor in the weights of
            ``return_attention_weights=True``, which are computed without dropout.
        sink: whether every head learns a logit that joins the normaliser, the parameter `sink`
            [heads] (GPT-OSS). It starts at 0, which is the weight of one token of logit 0
            (transformers draws it from N(0, 0.02^2)); -inf is none.

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
        - **output**: [*, N, dim]; with ``return_attention_weights=True`` also the
          weights [*, E, heads], in the order of ``graph.edge_index``

    Raises:
        ValueError: names the argument, its value and what is allowed. With
            ``return_attention_weights=True`` or `edge_bias` also for a raw edge_index that is not
            sorted.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.GaussianKernelAttention(192, heads=3)
        >>> sum(p.numel() for p in layer.parameters())  # 192 * 192 + 192 + 3
        37059
        >>> layer(torch.randn(2, 197, 192), ga.complete_graph(197)).shape
        torch.Size([2, 197, 192])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        init_sigma: float | None = None,
        rope: bool | RotaryEmbedding = False,
        normalize: bool = False,
        eps: float = 0.0,
        top_k: int | None = None,
        bias: bool = True,
        backend: str = "auto",
        attention_dropout: float = 0.0,
        sink: bool = False,
    ) -> None:
        super().__init__(
            dim,
            heads,
            top_k=top_k,
            rope=rope,
            backend=backend,
            attention_dropout=attention_dropout,
            sink=sink,
        )
        self.normalize = bool(normalize)
        self.eps = as_float("eps", eps, positive=False)
        self.output_proj = nn.Linear(self.dim, self.dim, bias=bias)
        self.init_sigma = self.initial_sigma(init_sigma)
        self.log_sigma = nn.Parameter(torch.empty(self.heads))
        self.reset_parameters()

    def project(
        self, x: Tensor, context: Tensor, rotations: Rotations
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = self.split(x, self.heads)
        key = query if context is x else self.split(context, self.heads)
        query, key = self.rotate(query, key, rotations)
        if self.normalize:
            one_tensor = key is query  # it must stay one: backends recognise it and do less work
            query = normalized(query)
            key = query if one_tensor else normalized(key)
        return query, key, key

    def cache_fields(self) -> dict[str, tuple[int, int]]:
        return {"key": (self.heads, self.head_dim)}  # values are the keys

    def project_step(
        self, x: Tensor, rotations: Rotations
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        features, _, _ = self.project(x, x, rotations)
        return (features,), {"key": features}

    def project_flat(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if not self.normalize:
            return x, x, None
        if self.rotary is not None:
            return None  # the norm follows the rotation
        by_head = normalized(self.split(x, self.heads))
        return by_head, by_head, None

    def flat_projections(self) -> tuple[nn.Linear | None, ...] | None:
        return None if self.normalize else (None, None, None)
