"""Dot-product attention and Krause attention in parallel, mixed by a gate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_int
from graphattn.graphs.nearby import nearby_edges
from graphattn.graphs.token_graph import TokenGraph
from graphattn.near_names import explained
from graphattn.nn.base.graph_layer import Positions
from graphattn.nn.base.overrides import names_of, replaced_beside
from graphattn.nn.caches.model_cache import ModelCache
from graphattn.nn.dot_product import DotProductAttention
from graphattn.nn.files.config import Configured
from graphattn.nn.krause import KrauseAttention
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.ops.inputs import check_graph, full_precision


class Gate(nn.Module):
    r"""Mixes two outputs per token with the weights softmax(W [standard; krause] + b).

    It starts with W = 0 and b = (ln 4, 0): 0.8 of the standard output plus 0.2 of the other one.
    """

    def __init__(self, dim: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2 * dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to 0.8 and 0.2."""
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias[0], self.bias[1] = math.log(4), 0.0

    def shares(self, standard: Tensor, krause: Tensor) -> Tensor:
        """Return the two weights of every token, [*, N, 2], at least in float32."""
        both = torch.cat([standard, krause], dim=-1)
        with full_precision(both.device):
            logits = functional.linear(both.to(self.weight.dtype), self.weight, self.bias)
            return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)

    def forward(self, standard: Tensor, krause: Tensor) -> Tensor:
        """Return the mixture [*, N, dim], in the dtype of `standard`."""
        share = self.shares(standard, krause)
        mixed = share[..., :1] * standard + share[..., 1:] * krause
        return mixed.to(standard.dtype)


class GatedKrauseAttention(Configured, nn.Module):
    r"""Dot-product attention with Krause attention in parallel, mixed per token by a gate.

    .. math::
        y_i = g_i^1 \, \mathrm{dot}(x, G)_i + g_i^2 \, \mathrm{krause}(x, G_w)_i, \qquad
        g_i = \operatorname{softmax} \big( W [\mathrm{dot}_i; \mathrm{krause}_i] + b \big)

    This is the layer of the language models of Krause Synchronization Transformers (its Figure 6,
    and the authors' code). Both branches have their own four projections. The dot product sees all
    edges of the graph G. The Krause branch sees G_w, those of its edges that join tokens less than
    `krause_window` apart in their sequence: the last `krause_window` keys of a causal graph, the
    token itself included. The gate starts with W = 0 and b = (ln 4, 0), so with 0.8 and 0.2.

    Args:
        dim: width of `x` and of the output.
        heads: H, divides `dim`; D = dim / H.
        krause_window: w, the keys of the Krause branch; all edges of the graph if None.
        top_k: sources that the Krause branch keeps per target and head, the nearest; all if None.
        init_sigma: bandwidth of the Krause branch at the start; sqrt(D) if None.
        sigma_per_head: one bandwidth per head, or one for the layer.
        kv_heads: key and value heads of both branches, divides `heads`.
        rope: rotate queries and keys of both branches: True, or a :class:`RotaryEmbedding`.
        bias: whether the projections have biases.
        backend: "auto", or one of :func:`~graphattn.backends`.
        attention_dropout: share of the attention weights of both branches set to 0 in training.

    Attributes:
        dot, krause: the branches, a :class:`DotProductAttention` and a :class:`KrauseAttention`.
        gate: the module that mixes them.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: TokenGraph of N tokens, or an edge_index [2, E], which is read as one sequence
        - **valid**: bool [N] or [*, N], True where a token is real (keyword)
        - **positions**: [N] or [*, N], of rotary embeddings; those of the graph if None (keyword).
          They do not change which tokens the Krause branch sees
        - **output**: [*, N, dim]

    Raises:
        ValueError: names the argument, its value and what is allowed. With `krause_window` also for
            a graph of neighbours that was found over ranks.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.GatedKrauseAttention(16, heads=4, krause_window=6, top_k=3)
        >>> x, graph = torch.randn(2, 40, 16), ga.causal_graph(40)
        >>> y = layer(x, graph)
        >>> near = ga.causal_window_graph(40, window=6)
        >>> torch.allclose(y, 0.8 * layer.dot(x, graph) + 0.2 * layer.krause(x, near), atol=1e-6)
        True
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        krause_window: int | None = None,
        top_k: int | None = None,
        init_sigma: float | None = None,
        sigma_per_head: bool = True,
        kv_heads: int | None = None,
        rope: bool | RotaryEmbedding = False,
        bias: bool = True,
        backend: str = "auto",
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.krause_window = (
            None if krause_window is None else as_int("krause_window", krause_window, 1)
        )
        self.dot = DotProductAttention(
            dim,
            heads,
            kv_heads=kv_heads,
            rope=rope,
            bias=bias,
            backend=backend,
            attention_dropout=attention_dropout,
        )
        self.krause = KrauseAttention(
            dim,
            heads,
            top_k=top_k,
            init_sigma=init_sigma,
            sigma_per_head=sigma_per_head,
            kv_heads=kv_heads,
            rope=rope,
            bias=bias,
            backend=backend,
            attention_dropout=attention_dropout,
        )
        self.dim, self.heads = self.dot.dim, self.dot.heads
        self.gate = Gate(self.dim)

    def reset_parameters(self) -> None:
        """Draw every projection anew, and return to the initial bandwidth and gate."""
        for part in (self.dot, self.krause, self.gate):
            part.reset_parameters()

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        *,
        valid: Tensor | None = None,
        positions: Positions = None,
    ) -> Tensor:
        """Mix what every token gets over the graph and over its nearby edges."""
        if isinstance(graph, Tensor) and isinstance(x, Tensor) and x.dim() >= 2:
            graph = check_graph(graph, x, x.shape[-2], x.shape[-2])
        given: dict[str, Any] = {"valid": valid, "positions": positions}
        standard: Any = self.dot(x, graph, **given)
        near: Any = graph
        if self.krause_window is not None and isinstance(near, ShardedGraph):
            near = near.nearby(self.krause_window)
        elif self.krause_window is not None:
            near = nearby_edges(near, self.krause_window)
        krause: Any = self.krause(x, near, **given)
        mixed: Tensor = self.gate(standard, krause)
        return mixed

    def extra_repr(self) -> str:
        return "" if self.krause_window is None else f"krause_window={self.krause_window}"

    # Generation, token by token.

    @explained
    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> ModelCache:
        """Make an empty cache for :meth:`step`, with one cache per branch.

        Args:
            batch: the leading dimensions of the tokens that will follow; () for a single text.
            window: how many tokens the dot product sees, the newest included; None for all before
                it. The Krause branch sees `krause_window` of these.
            dtype, device: dtype and device of the stored tensors; None takes the layer's own.
            rollback: how many of the newest tokens ``cache.truncate`` can remove at any time.

        Raises:
            ValueError: if an argument is out of range, or if a subclass has replaced `forward` but
                not `step`.
        """
        self._check_steps()
        given: dict[str, Any] = {"dtype": dtype, "device": device, "rollback": rollback}
        near = [width for width in (window, self.krause_window) if width is not None]
        return ModelCache(
            [
                self.dot.init_cache(batch, window, **given),
                self.krause.init_cache(batch, min(near, default=None), **given),
            ]
        )

    def step(
        self,
        x: Tensor,
        cache: ModelCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of the next token, or of the next n, and add them to the cache.

        T steps give the same outputs as one call of `forward` on ``causal_window_graph(T, window)``
        (``causal_graph(T)`` for window=None), up to rounding, and no gradients.

        Args:
            x: [*, dim], the next token of every text, or [*, n, dim], the next n; * is the batch
                of the cache.
            cache: from this layer's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real.
            positions: [*] (or [*, n]), positions of the tokens for a rotary embedding. If None, the
                cache counts them from 0.

        Returns:
            [*, dim] or [*, n, dim].

        Raises:
            ValueError: for the same reasons as :meth:`init_cache`, and if an argument does not fit
                the layer or the cache.

        Example:
            >>> import torch, graphattn as ga
            >>> layer = ga.nn.GatedKrauseAttention(16, heads=4, krause_window=6, top_k=3)
            >>> x, cache = torch.randn(2, 40, 16), layer.init_cache(2, window=None)
            >>> prompt = layer.step(x[:, :39], cache)
            >>> y = layer(x, ga.causal_graph(40))
            >>> torch.allclose(layer.step(x[:, 39], cache), y[:, 39], atol=1e-6)
            True
        """
        self._check_steps()
        if not isinstance(cache, ModelCache) or len(cache) != 2:
            raise ValueError(
                "cache must be a ModelCache with 2 layers, from init_cache of this layer, got "
                f"{cache!r}"
            )
        given: dict[str, Any] = {"valid": valid, "positions": positions}
        with torch.no_grad():
            standard = self.dot.step(x, cache[0], **given)
            mixed: Tensor = self.gate(standard, self.krause.step(x, cache[1], **given))
        return mixed

    def _check_steps(self) -> None:
        if replaced := replaced_beside(self, ("forward",), ("step",)):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so its "
                "outputs would differ from those of forward: override step, too"
            )
