"""Steps of generation of the attention layers: a new token attends to the tokens in a cache."""

from __future__ import annotations

import math
from typing import Self, cast

import torch
from torch import Tensor, nn

from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.base.graph_layer import Rotations
from graphattn.nn.base.overrides import is_as_shipped, overridden_kernel, overridden_rows
from graphattn.nn.base.streaming import StreamingLayer
from graphattn.nn.caches.divided_cache import DividedCache
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.ops.attention.logits.score import (
    DotProduct,
    GaussianKernel,
    Score,
    capped,
)
from graphattn.ops.attention.merge import merged
from graphattn.ops.attention.native.steps import CacheCall
from graphattn.ops.attention.step.kernels import step_by_kernel, step_kernel
from graphattn.ops.attention.step.pairs import attend_logits, pair_logits
from graphattn.ops.backends import wanted_backend
from graphattn.ops.inputs import ValidPair, clear_invalid, compute_dtype
from graphattn.ops.segments import share_beside_eps
from graphattn.ops.top_k import order_of_selection


class AttentionSteps(StreamingLayer):
    """Base class of attention layers with the methods of a step.

    A step computes the row of the newest token that the forward pass over all tokens would compute.
    It is one call of C++ code (:meth:`run_step`), one kernel launch (:meth:`kernel_row`), or a
    few operations of torch (:meth:`step_row`).
    """

    eps: float
    kv_heads: int
    top_k: int | None
    softcap: float | None
    sink: nn.Parameter | None
    output_proj: nn.Linear

    # Methods of the layer, in `attention.py`.

    def score(self) -> Score:
        """The function that gives the logit of an edge."""
        raise NotImplementedError

    def project_flat(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Projections of tokens [*, dim], before they are split by head and rotated."""
        raise NotImplementedError

    def flat_projections(self) -> tuple[nn.Linear | None, ...] | None:
        """The maps of tokens to query, key and value; None for the tokens as they are.

        None as a whole if :meth:`project_flat` does more.
        """
        raise NotImplementedError

    def sink_logits(self, like: Tensor) -> Tensor | None:
        """The sink of every head in the dtype of `like`, [heads]; None if there is none."""
        raise NotImplementedError

    def without_dropout(self) -> Self:
        """Return this layer, or a copy in eval mode that shares its weights."""
        raise NotImplementedError

    # Steps.

    def cache_fields(self) -> dict[str, tuple[int, int]]:
        heads = self.kv_heads, self.head_dim
        return {"key": heads, "value": heads}

    def project_step(
        self, x: Tensor, rotations: Rotations
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        query, key, value = self.project(x, x, rotations)
        return (query,), {"key": key, "value": value}

    def step_rows(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        graph: TokenGraph,
        valid: ValidPair,
    ) -> Tensor:
        key = sources["key"]
        layer = self.without_dropout()
        return layer.mix(targets[0], key, sources.get("value", key), graph, valid)

    def step_weights(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        graph: TokenGraph,
        valid: ValidPair,
    ) -> Tensor:
        """The weights of :meth:`step_rows`, [*, E, H]."""
        key = sources["key"]
        return self.weights_of_edges(targets[0], key, sources.get("value", key), graph, valid)

    def step_row(self, targets: tuple[Tensor, ...], cache: LayerCache) -> Tensor:
        if self.uses_propagate() or overridden_rows(self):
            return self.row_as_graph(targets, cache)
        (query,) = targets
        n = cache.held(cache.window)
        keep = cache.valid(n)
        if keep is not None:
            keep = keep & keep[..., -1:]  # padding sees nothing
        stored = "value" if "value" in cache.fields else "key"
        key, value = cache.rows("key", n), cache.rows(stored, n)
        dtype = compute_dtype(query.dtype)
        by_head = query.reshape(len(key), self.heads // self.kv_heads, self.head_dim).to(dtype)
        if keep is not None:
            keep = keep[..., None, :].expand(*cache.batch, self.kv_heads, n)
            keep = keep.reshape(len(key), 1, n)
        out = self.fused_row(by_head, key.to(dtype), value.to(dtype), keep)
        return out.to(query.dtype).reshape(query.shape)

    def may_divide_cache(self) -> bool:
        return not (self.uses_propagate() or overridden_rows(self) or overridden_kernel(self))

    def divided_row(
        self, targets: tuple[Tensor, ...], mask: Tensor | None, cache: DividedCache
    ) -> Tensor:
        (query,) = targets
        n = cache.held(cache.window)
        stored = "value" if "value" in cache.fields else "key"
        dtype = compute_dtype(query.dtype)
        key, value = (cache.rows(name, n).to(dtype) for name in ("key", stored))
        by_head = query.reshape(len(key), self.heads // self.kv_heads, self.head_dim).to(dtype)
        logits = capped(self.row_logits(by_head, key), self.softcap)  # [B * Hk, g, n]
        keep = cache.valid(n)
        if keep is not None:
            keep = keep[..., None, :].expand(*cache.batch, self.kv_heads, n)
            logits = logits.masked_fill(~keep.reshape(len(key), 1, n), -torch.inf)
            value = clear_invalid(value[..., None, :], keep.reshape(len(key), n))[..., 0, :]
        if self.top_k is None:
            parts = cache.gathered(torch.cat(average_of_row(logits, value), dim=-1))
            out, lse = merged([x[..., :-1] for x in parts], [x[..., -1] for x in parts])
        else:
            logits, value = best_over_ranks(logits, value, self.top_k, cache)
            out, lse = (x.squeeze(-2) for x in average_of_row(logits[..., None, :], value))
            lse = lse[..., 0]
        if self.eps > 0 or self.sink is not None:
            lse = lse.reshape(-1, self.heads)
            share = share_beside_eps(lse, self.eps, self.sink_logits(lse))
            out = out * share.reshape(*out.shape[:2], 1)
        out = out.to(query.dtype).reshape(query.shape)
        return out if mask is None else clear_invalid(out, mask)

    def step_kernel(self, like: Tensor, cache_dtype: torch.dtype, window: int | None) -> str | None:
        options = cache_dtype, window, self.top_k, self.softcap
        backend = step_kernel(self.backend, like, *options)
        if backend is None or self.score().kernel is None or self.uses_propagate():
            return None
        return None if overridden_rows(self) or overridden_kernel(self) else backend

    def kernel_row(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        valid: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        (query,), key, value = targets, sources["key"], sources.get("value")
        if cache.device.type == "cpu" and wanted_backend(self.backend) != "triton":
            query, key = (x.to(query.dtype).contiguous().resolve_neg() for x in (query, key))
            if value is not None:
                value = value.to(query.dtype).contiguous().resolve_neg()
            valid = None if valid is None else valid.contiguous()
            return self.run_step(cache, query, key, value, valid)
        cache.advance(1, masked=valid is not None)
        num_cached = cache.held(cache.window)
        (first, _), *_ = cache.runs(num_cached)
        keys = cache.buffers["key"]
        values = keys if value is None else cache.buffers["value"]
        log_sigma, scale = self.step_scale()
        entries = math.prod(cache.batch)
        key = key.reshape(entries, self.kv_heads, self.head_dim)
        out = step_by_kernel(
            query.reshape(entries, self.heads, self.head_dim),
            key,
            key if value is None else value.reshape(key.shape),
            keys=keys,
            values=values,
            first=first,
            held=num_cached,
            window=cache.window,
            log_sigma=log_sigma,
            scale=scale,
            top_k=self.top_k,
            eps=self.eps,
            sink=self.sink,
            valid=None if valid is None else valid.reshape(entries),
            valids=cache.buffers.get("valid"),
        )
        return out.view(query.shape)

    def run_step(
        self,
        cache: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        valid: Tensor | None,
        angles: tuple[Tensor, Tensor, int] | None = None,
    ) -> Tensor:
        """Compute the row of the newest token by C++ code, and add the token to the cache.

        All tensors are contiguous; the result has the shape of `query`. If query and key are still
        to be rotated, `angles` are the cosines and sines of some positions, and the index of the
        token's position.
        """
        return self.prepared_step(cache, query.dtype, valid, angles).run(query, key, value)

    def prepared_step(
        self,
        cache: LayerCache,
        dtype: torch.dtype,
        valid: Tensor | None,
        angles: tuple[Tensor, Tensor, int] | None,
    ) -> CacheCall:
        """Make a place for the newest token in the cache; return the call that fills it."""
        cache.advance(1, masked=valid is not None)
        num_cached = cache.held(cache.window)
        buffers, call = cache.buffers, cache.call
        keys = buffers["key"]
        values = buffers.get("value", keys)
        if call is None or not call.serves(self, keys, values, dtype):
            call = CacheCall(self, keys, values, self.heads, self.kv_heads, dtype)
            cache.call = call
        log_sigma, scale = self.step_scale()
        call.prepare(
            (cache.end - num_cached) % cache.capacity,
            num_cached,
            log_sigma,
            scale,
            self.top_k,
            self.softcap,
            self.eps,
            self.sink,
            angles,
            valid,
            buffers.get("valid"),
        )
        return call

    def has_plain_rotation(self) -> bool:
        """Whether C++ code can rotate queries and keys, if they are rotated at all."""
        return self.rotary is None or self.rotary.is_plain()

    def may_take_step(self, x: Tensor, cache: LayerCache) -> bool:
        """Whether C++ code may run a step of one token per text, also the first one.

        Raises:
            ValueError: the tokens, the cache and this layer do not fit each other.
        """
        if not self.has_plain_rotation():
            return False
        if self.may_repeat_step(x, cache):
            return True
        if "valid" in cache.buffers or not (is_as_shipped(self) and self._check_step(x, cache)):
            return False
        query = x.new_empty(0, self.heads, self.head_dim)
        return self.step_kernel(query, cache.dtype, cache.window) == "native"

    def compiled_row(self, x: Tensor, cache: LayerCache) -> Tensor | None:
        projected = self.project_flat(x) if self.has_plain_rotation() else None
        if projected is None or not cache.call.reads(*projected):
            return None
        return self.run_step(cache, *projected, None, self.angles_of_step(x, cache))

    def angles_of_step(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor, int] | None:
        """The rotation of the next token for C++ code; None without rotary positions."""
        return None if self.rotary is None else cache.angles_ahead(self.rotary, x.dtype)

    def step_scale(self) -> tuple[Tensor | None, float]:
        """The scale of the logits for C++ code: (log(sigma), 1), or (None, scale) for dot products.

        log(sigma) is [heads] or [1].
        """
        score = self.score()
        if isinstance(score, GaussianKernel):
            return score.log_sigma, 1.0
        assert isinstance(score, DotProduct)
        return None, cast(float, score.scale)

    def row_logits(self, query: Tensor, key: Tensor) -> Tensor:
        """The logits [B * Hk, g, n] of queries [B * Hk, g, D] and keys [B * Hk, n, D]."""
        by_head = query.reshape(-1, self.heads, 1, query.shape[-1])
        keys = key.unflatten(0, (-1, self.kv_heads))
        logits = pair_logits(self.score(), by_head, keys, exact=self.top_k is not None)
        return logits.reshape(*query.shape[:2], key.shape[1])

    def fused_row(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """The output for queries [B * Hk, g, D]; `keep`, bool [B * Hk, 1, n], marks sources."""
        logits = capped(self.row_logits(query, key), self.softcap)
        need_lse = self.eps > 0 or self.sink is not None
        out, lse, _ = attend_logits(
            logits[:, :, None],
            value[:, None],
            None if keep is None else keep[:, None],
            top_k=self.top_k,
            need_lse=need_lse,
        )
        if lse is not None:
            lse = lse.reshape(-1, self.heads)
            share = share_beside_eps(lse, self.eps, self.sink_logits(lse))
            out = out * share.reshape(*out.shape[:3], 1)
        return out[:, :, 0]


def average_of_row(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return averages [..., m, D] and log-sums [..., m, 1]; 0 and -inf where there is no source.

    `logits` are [..., m, n], with -inf for no source, and `value` [..., n, D].
    """
    lse = logits.logsumexp(-1, keepdim=True)
    nothing = lse == -torch.inf
    weights = (logits - lse.masked_fill(nothing, 0)).exp()
    return weights @ value, lse


def best_over_ranks(
    logits: Tensor, value: Tensor, k: int, cache: DividedCache
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of all ranks, [B, g, k], and their values, [B, g, k, D].

    `logits` [B, g, n] and `value` [B, n, D] are those of this rank's newest tokens. Every rank
    sends its k best. Of equal logits, that of the earlier token comes first.
    """
    B, groups, n = logits.shape
    best = order_of_selection(logits)[..., :k]
    places = cache.places(n)[best]
    chosen = value[torch.arange(B, device=value.device)[:, None, None], best]
    chosen = chosen.masked_fill((logits.gather(-1, best) == -torch.inf)[..., None], 0)
    # The bits of a position travel as a number of the same size.
    wide = torch.int64 if value.dtype == torch.float64 else torch.int32
    bits = places.to(wide).view(value.dtype)
    packed = torch.cat([logits.gather(-1, best)[..., None], bits[..., None], chosen], dim=-1)
    missing = k - best.shape[-1]
    if missing:
        nothing = packed.new_zeros(B, groups, missing, packed.shape[-1])
        nothing[..., 0] = -torch.inf
        packed = torch.cat([packed, nothing], dim=-2)
    packed = cache.gathered(packed).permute(1, 2, 0, 3, 4).flatten(2, 3)
    logits, places = packed[..., 0], packed[..., 1].contiguous().view(wide)
    in_order = places.argsort(dim=-1, stable=True)
    best = in_order.gather(-1, order_of_selection(logits.gather(-1, in_order))[..., :k])
    return logits.gather(-1, best), packed[..., 2:].gather(
        2, best[..., None].expand(*best.shape, value.shape[-1])
    )
