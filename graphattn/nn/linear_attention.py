"""Linear attention over a token graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_float
from graphattn.graphs.builders.windows import causal_graph
from graphattn.graphs.token_graph import TokenGraph
from graphattn.near_names import explained
from graphattn.nn.base.across_ranks import (
    linear_on_ring,
    linear_own_first,
    linear_with_globals,
)
from graphattn.nn.base.graph_layer import Positions, Rotations, edge_mask, valid_for_propagate
from graphattn.nn.base.message_passing import OptTensor
from graphattn.nn.base.overrides import (
    names_of,
    overridden_edges,
    overridden_rows,
    overridden_weights,
)
from graphattn.nn.base.streaming import StreamingLayer
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.caches.running_cache import RunningCache
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.ops.inputs import (
    Valid,
    ValidPair,
    clear_invalid,
    compute_dtype,
    full_precision,
    repeat_heads,
)
from graphattn.ops.linear_attention.api import (
    Features,
    average,
    by_head,
    elu_features,
    linear_attention,
    linear_attention_weights,
)
from graphattn.ops.linear_attention.operators import linear_sums
from graphattn.ops.segments import segment_sum


class LinearAttention(StreamingLayer):
    r"""Attention by products of positive features, in time linear in the number of tokens.

    .. math::
        y_i = W_O \, \Big\Vert_h
              \frac{\sum_{j \in N(i)} \phi(q_i^h) \cdot \phi(k_j^h) \; v_j^h}
                   {\varepsilon + \sum_{j \in N(i)} \phi(q_i^h) \cdot \phi(k_j^h)}, \qquad
        \phi(z) = \operatorname{elu}(z) + 1

    (Katharopoulos et al., Transformers are RNNs, 2020, Eq. 4-7). Because :math:`\phi(q_i)` can be
    taken out of the sum, a complete graph needs one matrix per head, and a causal graph needs
    running sums of this matrix: O(N D^2) operations, no N x N matrix, and generation in constant
    memory. The Krause paper uses it as a fast baseline (Krause Synchronization Transformers). Other
    graphs are computed exactly, too: windows in blocks, the rest edge by edge.

    ``rope=True`` rotates :math:`\phi(q_i)` and :math:`\phi(k_j)` in the numerator only, as RoFormer
    does (Su et al., Eq. 19): rotated features can be negative, and the denominator must be
    positive. The weights can then be negative, and they do not sum to 1.

    Args:
        dim: width of `x` and of the output.
        heads: H, divides `dim`; D = dim / H.
        kv_heads: key and value heads, divides `heads` (grouped-query attention); `heads` if None.
        context_dim: width of `context` in cross-attention; `dim` if None.
        rope: rotate the features by their positions: True, or a :class:`RotaryEmbedding`.
        eps: a number >= 0 that is added to the denominator (1e-6 in the authors' code). With 0 the
            weights sum to 1.
        bias: whether the projections have biases.
        backend: "auto", "reference" or "structured"; "reference" runs `message()` through PyG's
            `propagate`.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: TokenGraph, edge_index [2, E] or PyG EdgeIndex; N targets, M sources
        - **context**: [*, M, context_dim]; `x` itself if None
        - **valid**: bool [N] or [*, N], or a pair for targets and sources (keyword); one mask
          serves both tracks if they have the same length
        - **positions**: [N] or [*, N], or a pair (keyword)
        - **output**: [*, N, dim]; with ``return_attention_weights=True`` also the
          weights [*, E, heads], in the order of ``graph.edge_index``

    Raises:
        ValueError: if an argument is out of range; with ``return_attention_weights=True`` also if a
            raw edge_index is not sorted.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.LinearAttention(16, heads=4, rope=True)
        >>> layer(torch.randn(2, 5000, 16), ga.causal_graph(5000)).shape
        torch.Size([2, 5000, 16])
        >>> cross = ga.nn.LinearAttention(16, heads=4, context_dim=8)
        >>> graph = ga.bipartite_complete_graph(10, 5)
        >>> cross(torch.randn(2, 10, 16), graph, torch.randn(2, 5, 8)).shape
        torch.Size([2, 10, 16])
    """

    merged_by = linear_on_ring, linear_with_globals, linear_own_first
    # Types of the arguments that PyG's generated code passes on; the pair is (sources, targets).
    propagate_type: ClassVar = {
        "query": Tensor,
        "key": Tensor,
        "value": Tensor,
        "turned_query": Tensor,
        "turned_key": Tensor,
        "valid": tuple[OptTensor, OptTensor],
    }

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        context_dim: int | None = None,
        rope: bool | RotaryEmbedding = False,
        eps: float = 0.0,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim, heads, kv_heads=kv_heads, context_dim=context_dim, rope=rope, backend=backend
        )
        if backend == "triton":
            raise ValueError(
                "backend must be 'auto', 'reference' or 'structured' in LinearAttention, which "
                "has no Triton kernels, got 'triton'"
            )
        self.eps = as_float("eps", eps, positive=False)
        kv_dim = self.kv_heads * self.head_dim
        self.query_proj = nn.Linear(self.dim, self.dim, bias=bias)
        self.key_proj = nn.Linear(self.context_dim, kv_dim, bias=bias)
        self.value_proj = nn.Linear(self.context_dim, kv_dim, bias=bias)
        self.output_proj = nn.Linear(self.dim, self.dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        context: Tensor | None = None,
        *,
        valid: Valid = None,
        positions: Positions = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Average the values of the sources of every target."""
        context = x if context is None else context
        out: Tensor | tuple[Tensor, Tensor] = self.forward_pass(
            x, context, graph, valid, positions, return_attention_weights
        )
        return out

    def project(self, x: Tensor, context: Tensor, rotations: Rotations) -> tuple[Features]:
        """The features of queries [*, N, H, D] and keys [*, M, Hk, D], and the values."""
        query, key = self.query_proj(x), self.key_proj(context)
        query, key = self.split(query, self.heads), self.split(key, self.kv_heads)
        value = self.split(self.value_proj(context), self.kv_heads)
        dtype = compute_dtype(query.dtype)
        query, key = elu_features(query.to(dtype)), elu_features(key.to(dtype))
        return (Features(query, key, value.to(dtype), *self.rotate(query, key, rotations)),)

    def sides(self, projected: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        query, key, value, turned_query, turned_key = projected[0]
        return (query, turned_query), (key, value, turned_key)

    def from_sides(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Any, ...]:
        (query, turned_query), (key, value, turned_key) = targets, sources
        return (Features(query, key, value, turned_query, turned_key),)

    def fetch(
        self, shard: ShardedGraph, projected: Any, valid: ValidPair, of_edges: dict[str, Tensor]
    ) -> Any:
        query, key, value, turned_query, turned_key = projected[0]
        graph, seen, valid = shard.fetch((key, value, turned_key), (-3, -3, -3), valid)
        return (Features(query, seen[0], seen[1], turned_query, seen[2]),), graph, valid, of_edges

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        turned_query_i: Tensor,
        turned_key_j: Tensor,
        valid_i: Tensor | None,
        valid_j: Tensor | None,
        index: Tensor,
        size_i: int,
    ) -> Tensor:
        """Return weight_ij * v_j; weights are divided by their sum over the edges of target i."""
        above = (turned_query_i * turned_key_j).sum(-1, keepdim=True)
        below = (query_i * key_j).sum(-1, keepdim=True)
        keep = edge_mask(valid_i, valid_j)
        if keep is not None:
            above, below = (x.masked_fill(~keep[..., None], 0) for x in (above, below))
            value_j = value_j.masked_fill(~keep[..., None], 0)  # 0 * NaN is NaN
        total = self.eps + segment_sum(below, index, size_i)
        return above / total.masked_fill(total == 0, 1).index_select(-3, index) * value_j

    def unfused(self, features: Features, graph: TokenGraph, valid: ValidPair) -> Tensor:
        """Return the averages, [*, N, H, D], by `message()`."""
        self.check_message_masks(valid)
        query, key, value, turned_query, turned_key = features
        with full_precision(query.device):
            averages: Tensor = self.propagate(
                graph.edge_index,
                size=(graph.num_sources, graph.num_targets),
                query=query,
                key=repeat_heads(key, self.heads),
                value=repeat_heads(value, self.heads),
                turned_query=turned_query,
                turned_key=repeat_heads(turned_key, self.heads),
                valid=valid_for_propagate(valid),
            )
        return averages.to(self.mixed_dtype(query))

    def mixed_dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype that the output projection reads: its own, or that of autocast."""
        device = like.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.output_proj.weight.dtype

    def fused(self, features: Features, graph: TokenGraph, valid: ValidPair) -> Tensor:
        """Call the operation, which computes the same as `propagate`, [*, N, H, D]."""
        query, key, value, *turned = features
        out = linear_attention(
            query,
            key,
            value,
            graph,
            rotated=None if self.rotary is None else (turned[0], turned[1]),
            eps=self.eps,
            valid=valid,
            backend=self.backend,
        )
        return out.to(self.mixed_dtype(query))

    def edge_weights(self, features: Features, graph: TokenGraph, valid: ValidPair) -> Tensor:
        """Return the weights of the operation, [*, E, H]."""
        query, key, _, *turned = features
        rotated = None if self.rotary is None else (turned[0], turned[1])
        weights = linear_attention_weights(
            query, key, graph, rotated=rotated, eps=self.eps, valid=valid
        )
        return weights.to(self.mixed_dtype(query))

    def weights_of_edges(self, features: Features, graph: TokenGraph, valid: ValidPair) -> Tensor:
        """Return :meth:`edge_weights`, or raise a ValueError if a user has replaced `message()`."""
        if replaced := overridden_weights(self):
            raise ValueError(
                f"return_attention_weights=True cannot be used with this {type(self).__name__}: it "
                f"has its own {names_of(replaced)}, so its weights are not known. Override "
                "edge_weights(features, graph, valid), too"
            )
        return self.edge_weights(features, graph, valid)

    # Generation, token by token.

    def cache_fields(self) -> dict[str, tuple[int, int]]:
        heads = self.kv_heads, self.head_dim
        turned = {} if self.rotary is None else {"turned_key": heads}
        return {"key": heads, "value": heads, **turned}

    @explained
    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> LayerCache:
        """Make an empty cache for :meth:`step`.

        Args:
            batch: the leading dimensions of the tokens that will follow; () for a single text.
            window: how many tokens each token sees, itself included; the cache stores those. With
                None, a token sees all earlier ones, and the cache stores only sums: a
                :class:`RunningCache` of constant size (or all tokens, if a user has replaced
                `message()`).
            dtype, device: dtype and device of the stored tensors; None takes the layer's own. Sums
                are at least float32.
            rollback: how many of the newest tokens :meth:`LayerCache.truncate` can remove at any
                time. The cache stores that many more tokens, also without a window.

        Raises:
            ValueError: if an argument is out of range, or if the layer attends to a context.
        """
        cache = super().init_cache(batch, window, dtype=dtype, device=device, rollback=rollback)
        if window is not None or overridden_edges(self) or overridden_rows(self):
            return cache
        return RunningCache(
            cache.owner,
            cache.fields,
            cache.batch,
            dtype=cache.dtype,
            device=cache.device,
            rollback=cache.rollback,
        )

    def project_step(
        self, x: Tensor, rotations: Rotations
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        ((query, key, value, turned_query, turned_key),) = self.project(x, x, rotations)
        turned = {} if self.rotary is None else {"turned_key": turned_key}
        return (query, turned_query), {"key": key, "value": value, **turned}

    def step_rows(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        graph: TokenGraph,
        valid: ValidPair,
    ) -> Tensor:
        return self.mix(_features(targets, sources), graph, valid)

    def step_weights(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        graph: TokenGraph,
        valid: ValidPair,
    ) -> Tensor:
        """Return the weights of :meth:`step_rows`, [*, E, H]."""
        return self.weights_of_edges(_features(targets, sources), graph, valid)

    def step_row(self, targets: tuple[Tensor, ...], cache: LayerCache) -> Tensor:
        if self.uses_propagate() or overridden_rows(self):
            return self.row_as_graph(targets, cache)
        query = targets[0]
        n = cache.held(cache.window)
        keep = cache.valid(n)
        if keep is not None:
            keep = keep & keep[..., -1:]  # a padded target sees no token
            keep = keep[..., None, :].expand(*cache.batch, self.kv_heads, n).reshape(-1, 1, n)
        above, below = self._of_tokens(targets, cache, n, keep)
        out = average(above, below, self.eps)
        return out.to(self.mixed_dtype(query)).reshape(query.shape)

    def _of_tokens(
        self, targets: tuple[Tensor, ...], cache: LayerCache, n: int, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return numerators [B * Hk, g, D] and denominators of one token over the newest n
        tokens."""
        query, turned_query = (self._by_key_head(x) for x in targets)
        key, value = (cache.rows(name, n).to(query.dtype) for name in ("key", "value"))
        below = query @ key.transpose(1, 2)
        below = below if keep is None else below.masked_fill(~keep, 0)
        above = below
        if self.rotary is not None:
            turned_key = cache.rows("turned_key", n).to(query.dtype)
            above = turned_query @ turned_key.transpose(1, 2)
            above = above if keep is None else above.masked_fill(~keep, 0)
        return above @ value, below.sum(-1, keepdim=True)

    def _by_key_head(self, x: Tensor) -> Tensor:
        """Reshape one token [*, 1, H, D] to [B * Hk, g, D]."""
        return x.reshape(-1, self.heads // self.kv_heads, self.head_dim)

    # Generation with running sums.

    def _mix_step(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        mask: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        if not isinstance(cache, RunningCache):
            return super()._mix_step(targets, sources, mask, cache)
        if replaced := (*overridden_edges(self), *overridden_rows(self)):
            raise ValueError(
                "cache must be a new one from init_cache: it contains sums, which the "
                f"{names_of(replaced)} of this {type(self).__name__}, replaced since it was made, "
                "cannot use"
            )
        query = targets[0]
        state, total = cache.sums["state"], cache.sums["total"]
        if query.shape[-3] == 1:
            cache.append(sources, mask)
            own, turned = (self._by_key_head(x).to(state.dtype) for x in targets)
            above, below = turned @ state, own @ total[..., None]
            if held := cache.held(None):
                of_tokens = self._of_tokens(targets, cache, held, None)
                above, below = above + of_tokens[0], below + of_tokens[1]
            out = average(above, below, self.eps).reshape(query.shape)
            out = out if mask is None else clear_invalid(out, mask)
        else:
            out = self._mix_prompt(targets, sources, mask, cache)
            cache.append(sources, mask)
        return out.to(self.mixed_dtype(query))

    def _mix_prompt(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        mask: Tensor | None,
        cache: RunningCache,
    ) -> Tensor:
        """Mix new tokens with each other, with the tokens outside the sums, and with the sums."""
        n, held = targets[0].shape[-3], cache.held(None)
        dtype = targets[0].dtype
        cleared = {name: clear_invalid(x, mask) for name, x in sources.items()}
        if held:
            cleared = {
                name: torch.cat([cache.tokens(name, held).to(dtype), x], dim=-3)
                for name, x in cleared.items()
            }
        own = _features(tuple(clear_invalid(x, mask) for x in targets), cleared)
        query, turned_query = by_head(own.query), by_head(own.turned_query)
        key, value, turned_key = (
            by_head(repeat_heads(x, self.heads)) for x in (own.key, own.value, own.turned_key)
        )
        graph = causal_graph(n, past=held).to(cache.device)
        above = linear_sums(turned_query, turned_key, value, graph)
        below = linear_sums(query, key, torch.ones_like(value[..., :1]), graph)
        groups = self.kv_heads, self.heads // self.kv_heads, n
        for_state = (
            x.unflatten(-3, groups[:2]).reshape(-1, groups[1] * n, self.head_dim)
            for x in (turned_query, query)
        )
        state, total = cache.sums["state"], cache.sums["total"][..., None]
        above, below = (
            x + (rows.to(sums.dtype) @ sums).view(*x.shape)
            for x, rows, sums in zip((above, below), for_state, (state, total), strict=True)
        )
        return average(above, below, self.eps).transpose(-3, -2)


def _features(targets: tuple[Tensor, ...], sources: dict[str, Tensor]) -> Features:
    query, turned_query = targets
    key, value = sources["key"], sources["value"]
    return Features(query, key, value, turned_query, sources.get("turned_key", key))
