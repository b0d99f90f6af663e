"""Generation, token by token: steps of a layer, with a cache of the newest tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.graphs.builders.windows import (
    bipartite_complete_graph,
    causal_graph,
    causal_window_graph,
)
from graphattn.graphs.token_graph import TokenGraph
from graphattn.near_names import explained
from graphattn.nn.base.graph_layer import GraphLayer, Rotations
from graphattn.nn.base.overrides import is_as_shipped, names_of, overridden_forward
from graphattn.nn.caches.divided_cache import DividedCache, append_prompt
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.rotary import check_positions
from graphattn.ops.backends import may_repeat_step
from graphattn.ops.inputs import ValidPair, full_precision


class StreamingLayer(GraphLayer):
    """A layer that can run token by token; a token sees the last `window` ones, itself included."""

    training: bool  # of nn.Module

    # Methods that a subclass defines.

    def cache_fields(self) -> dict[str, tuple[int, int]]:
        """The tensors that a cache stores of a token: name -> (heads, features).

        Raises:
            ValueError: the layer cannot run token by token.
        """
        raise NotImplementedError

    def project_step(
        self, x: Tensor, rotations: Rotations
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Project tokens [*, n, dim]: tensors as targets, and one tensor per field as sources."""
        raise NotImplementedError

    def step_row(self, targets: tuple[Tensor, ...], cache: LayerCache) -> Tensor:
        """The row of the newest token in the cache, over its last window, [*, 1, H, D]."""
        raise NotImplementedError

    def may_divide_cache(self) -> bool:
        """Whether :meth:`divided_row` merges what ranks compute over their own tokens."""
        return False

    def divided_row(
        self, targets: tuple[Tensor, ...], mask: Tensor | None, cache: DividedCache
    ) -> Tensor:
        """:meth:`step_row` over the tokens of all ranks, if `mask` says that the token is real."""
        raise NotImplementedError

    def step_kernel(self, like: Tensor, cache_dtype: torch.dtype, window: int | None) -> str | None:
        """The backend with a kernel for :meth:`kernel_row`, with targets like this; or None.

        Raises:
            ValueError: a backend with kernels was asked for by name and cannot run the step.
        """
        return None

    def kernel_row(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        valid: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        """Add a token to the cache and compute its row, [*, 1, H, D], in one call of a kernel."""
        raise NotImplementedError

    def compiled_row(self, x: Tensor, cache: LayerCache) -> Tensor | None:
        """The row of one token [*, dim] by C++ code, before the output projection.

        It adds the token to the cache. None if C++ code cannot run this step.
        """
        return None

    def step_rows(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        graph: TokenGraph,
        valid: ValidPair,
    ) -> Tensor:
        """The rows of all tokens of a causal graph at once, [*, N, H, D]."""
        raise NotImplementedError

    def row_as_graph(self, targets: tuple[Tensor, ...], cache: LayerCache) -> Tensor:
        """:meth:`step_row` by :meth:`step_rows`, over a graph with one target, the newest token."""
        n = cache.held(cache.window)
        keep = cache.valid(n)
        dtype = targets[0].dtype
        sources = {name: cache.tokens(name, n) for name in cache.fields}
        common = torch.promote_types(dtype, cache.dtype)
        mixed = self.step_rows(
            tuple(x.to(common) for x in targets),
            {name: x.to(common) for name, x in sources.items()},
            bipartite_complete_graph(1, n).to(cache.device),
            (None, None) if keep is None else (keep[..., -1:], keep),
        )
        return mixed.to(dtype)

    # Methods that all layers share.

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
        """An empty cache for :meth:`step`.

        Args:
            batch: the leading dimensions of the tokens; () for a single text.
            window: how many tokens each token sees, itself included, as in
                :func:`~graphattn.causal_window_graph`; memory is that of 1.25 window tokens (at
                least window + 16; of the window alone where a kernel takes the steps, on a GPU),
                however long the text. If None, a token sees all tokens before it, as in
                :func:`~graphattn.causal_graph`, and memory grows with the text (by doubling).
            dtype, device: those of the cached tensors; the layer's own if None.
            rollback: how many of the newest tokens :meth:`LayerCache.truncate` can remove at any
                time. So many more tokens are stored: window + rollback in place of window above.
                Without a window, all tokens can be removed anyway.

        Raises:
            ValueError: for arguments out of range, and for layers in which a token does not depend
                on earlier tokens only: ``SelfConsensus(update="energy")``, attention to a context.
                Also if the backend "triton" was asked for by name and its kernel cannot run steps.
        """
        self._check_steps()
        fields = self.cache_fields()
        sizes = batch if isinstance(batch, tuple | list) else (batch,)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating-point, got {dtype}")
        weight = self.output_proj.weight
        cache_dtype = weight.dtype if dtype is None else dtype
        sizes = tuple(as_int("batch", size, 0) for size in sizes)
        window = None if window is None else as_int("window", window, 1)
        rollback = as_int("rollback", rollback, 0)
        target = torch.empty(
            (0, self.heads, self.head_dim),
            dtype=weight.dtype,
            device=weight.device if device is None else device,
        )
        return LayerCache(
            (type(self).__name__, weight.dtype),
            fields,
            sizes,
            window,
            dtype=cache_dtype,
            device=target.device,
            ring=self.step_kernel(target, cache_dtype, window) == "triton",
            rollback=rollback,
        )

    def step(
        self,
        x: Tensor,
        cache: LayerCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """The outputs of the next token, or of the next few; the cache stores these tokens.

        T steps give the same as one forward pass over all T tokens with the graph
        ``causal_window_graph(T, window)`` (or ``causal_graph(T)`` for window=None), up to rounding.
        Several tokens at once, such as a prompt, give the same as one by one. The output never has
        a gradient; use `forward` for training.

        Args:
            x: [*, dim], the next token of every text, or [*, n, dim], the next n; * is the batch
                of the cache.
            cache: from this layer's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real. Pad a text on the left if it
                starts later than others of its batch. No token sees padding, but padding counts as
                positions (after padding on the right, a text continues where the padding ends).
            positions: [*] (or [*, n]), positions for a rotary embedding; if None, the cache counts
                them from 0.
            tokens: integers [*] (or [*, n]), for a layer with value embeddings.

        Returns:
            [*, dim] or [*, n, dim].

        Raises:
            ValueError: for a cache of another layer or batch, and for shapes, dtypes and devices
                that do not fit.

        Example:
            >>> import torch, graphattn as ga
            >>> layer = ga.nn.KrauseAttention(16, heads=4, top_k=3, rope=True)
            >>> x = torch.randn(2, 40, 16)
            >>> y = layer(x, ga.causal_window_graph(40, window=8))
            >>> cache = layer.init_cache(2, window=8)
            >>> prompt = layer.step(x[:, :30], cache)
            >>> rest = [layer.step(x[:, t], cache) for t in range(30, 40)]
            >>> torch.allclose(torch.cat([prompt, torch.stack(rest, 1)], 1), y, atol=1e-5)
            True
        """
        if valid is None and positions is None and tokens is None:
            y = self.compiled_step(x, cache)
            if y is not None:
                return y
        with torch.no_grad():
            return self._step(x, cache, valid, positions, tokens)

    def compiled_step(self, x: Tensor, cache: LayerCache) -> Tensor | None:
        """:meth:`step` of one token [*, dim] by C++ code, if that ran the step before; else None.

        The first step, with all checks, stores its call with the cache. So few checks are left.
        """
        if type(cache) is not LayerCache or not self.may_repeat_step(x, cache):
            return None
        had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # faster than torch.no_grad()
        try:
            row = self.compiled_row(x.contiguous(), cache)
            y: Tensor | None = None if row is None else self.output_proj(row.view(x.shape))
        finally:
            torch._C._set_grad_enabled(had_gradients)
        return y

    def may_repeat_step(self, x: Tensor, cache: LayerCache) -> bool:
        """Whether C++ code may run a step of one token per text, as it ran the step before."""
        call = cache.call
        return (
            call is not None
            and may_repeat_step(self.backend)
            and call.fits(self, x, cache.buffers)
            and "valid" not in cache.buffers
            and not torch.is_autocast_enabled("cpu")
            and x.shape[:-1] == cache.batch
            and self.output_proj.weight.dtype is x.dtype
            and is_as_shipped(self)
        )

    def _step(
        self, x: Tensor, cache: LayerCache, valid: Any, positions: Any, tokens: Any
    ) -> Tensor:
        """:meth:`step` for any tokens, with all checks."""
        single = self._check_step(x, cache)
        if single:  # contiguous, so that projections give the same bits on every path
            x = x.contiguous().unsqueeze(-2)
        n = x.shape[-2]
        if n == 0:
            empty: Tensor = self.output_proj(x)
            return empty
        if single and isinstance(tokens, Tensor):
            tokens = tokens.unsqueeze(-1)
        mask = step_mask(valid, cache.batch, None if single else n, x.device)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        if single and isinstance(positions, Tensor):
            positions = positions.unsqueeze(-1)
        if cache.shard is not None and cache.position == 0:
            y = self._read_prompt(x, cache, mask, positions, tokens)
            return y.squeeze(-2) if single else y
        rotations = self._step_rotations(x, cache, positions)
        targets, sources = self.project_step(x, rotations)
        if tokens is not None or self.embeds_values:
            values = sources.get("value", x)  # without values, an error says so
            sources = {**sources, "value": self.with_embedding(values, x, tokens, mask)}
        # The rows themselves are computed in full precision, as operations are.
        if torch.is_autocast_enabled(x.device.type):
            with full_precision(x.device):
                mixed = self._mix_step(targets, sources, mask, cache)
        else:
            mixed = self._mix_step(targets, sources, mask, cache)
        y = self.project_back(mixed, rotations)
        return y.squeeze(-2) if single else y

    def _check_steps(self) -> None:
        """Refuse steps of attention to a context, and where an override of `forward` is not run."""
        if self.context_dim != self.dim:
            raise ValueError(
                f"{type(self).__name__} cannot generate token by token when its keys come from a "
                f"context, as context_dim = {self.context_dim} says (dim is {self.dim}): the "
                "context is known from the start, so call the layer itself"
            )
        if replaced := overridden_forward(self):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so it would "
                "not give what forward gives: override step, too (super().step(x, cache, ...) "
                "where it is right as it is)"
            )

    def _check_step(self, x: Any, cache: Any) -> bool:
        """Check that `x`, the cache and this layer fit; return whether `x` is one token."""
        self._check_steps()
        if not isinstance(cache, LayerCache):
            raise ValueError(
                f"cache must be a LayerCache, from init_cache, got {type(cache).__name__}"
            )
        owner = type(self).__name__, self.output_proj.weight.dtype
        if cache.owner != owner or cache.fields != self.cache_fields():
            raise ValueError(
                f"cache must come from init_cache of this layer, {self!r} in {owner[1]}; got one "
                f"of {cache.owner[0]} in {cache.owner[1]} with (heads, width) {cache.fields} "
                f"in place of {self.cache_fields()}"
            )
        one = (*cache.batch, self.dim)
        single = isinstance(x, Tensor) and x.shape == one
        if single or (isinstance(x, Tensor) and (*x.shape[:-2], *x.shape[-1:]) == one):
            if x.dtype != owner[1]:
                self.check_dtype("x", x)
            if x.device != cache.device:
                raise ValueError(
                    f"x must be on the device of cache, {cache.device}, got {x.device}"
                )
            return single
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        several = ", ".join(map(str, [*cache.batch, "n", self.dim]))
        raise ValueError(
            f"x must be a tensor of shape {list(one)} (a token) or [{several}] (n of them) with a "
            f"cache of batch {list(cache.batch)}, got {got}"
        )

    def _step_rotations(self, x: Tensor, cache: LayerCache, positions: Any) -> Rotations:
        """The rotations of the new tokens, as targets and as sources; None without rope."""
        if self.rotary is None:
            return None
        if positions is None:
            rotation = cache.rotation(self.rotary, x.shape[-2], x.dtype)
        else:
            check_positions(positions, x.shape[:-1])
            rotation = self.rotary.rotation(positions.to(x.device), x.dtype)
        return rotation, rotation

    def _read_prompt(
        self, x: Tensor, cache: LayerCache, mask: Tensor | None, positions: Any, tokens: Any
    ) -> Tensor:
        """The outputs of this rank's part of a prompt, by `forward` over its shard."""
        shard = cache.shard
        if x.shape[-2] != shard.num_targets:
            raise ValueError(
                f"x must be the {shard.num_targets} tokens of the prompt on rank {shard.rank} of "
                f"{shard.ranks}, because the cache was made with a shard and is empty, got shape "
                f"{list(x.shape)}"
            )
        of_values = {} if tokens is None else {"tokens": tokens}
        had: bool = self.training
        self.training = False  # a step has no dropout
        try:
            y: Tensor = self(x, shard, valid=mask, positions=positions, **of_values)
        finally:
            self.training = had
        places = shard.positions if positions is None else positions
        _, sources = self.project_step(x, self._step_rotations(x, cache, places))
        if tokens is not None or self.embeds_values:
            values = self.with_embedding(sources.get("value", x), x, tokens, mask)
            sources = {**sources, "value": values}
        append_prompt(cache, sources, mask)
        return y

    def _mix_step(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        mask: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        """Compute the rows of the new tokens, [*, n, H, D], and add the tokens to the cache."""
        n = targets[0].shape[-3]
        before = cache.held(None if cache.window is None else cache.window - 1)
        if n == 1:
            return self._mix_one(targets, sources, mask, cache)
        # One by one, no cached token is copied. All at once is faster if many tokens are new.
        if 4 * n > before and not isinstance(cache, DividedCache):
            mixed = self._prefill(targets, sources, mask, cache, before)
            cache.append(sources, mask)
            return mixed
        rows = []
        for t in range(n):
            here = slice(t, t + 1)
            row = self._mix_one(
                tuple(s[..., here, :, :] for s in targets),
                {name: s[..., here, :, :] for name, s in sources.items()},
                None if mask is None else mask[..., here],
                cache,
            )
            rows.append(row)
        return torch.cat(rows, dim=-3)

    def _mix_one(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        mask: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        """Compute the row of one new token, [*, 1, H, D], and add the token to the cache."""
        if isinstance(cache, DividedCache):
            cache.append(sources, mask)
            return self.divided_row(targets, mask, cache)
        if self.step_kernel(targets[0], cache.dtype, cache.window) is not None:
            return self.kernel_row(targets, sources, mask, cache)
        cache.append(sources, mask)
        return self.step_row(targets, cache)

    def _prefill(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        mask: Tensor | None,
        cache: LayerCache,
        before: int,
    ) -> Tensor:
        """The rows of new tokens, which see each other and `before` cached tokens, causally."""
        n = targets[0].shape[-3]
        if cache.window is None:
            graph = causal_graph(n, past=before)
        else:
            graph = causal_window_graph(n, cache.window, past=before)
        dtype = targets[0].dtype
        seen_mask = mask
        if before:
            old_mask = cache.valid(before)
            if mask is not None or old_mask is not None:
                real = torch.ones((), dtype=torch.bool, device=cache.device)
                masks = (old_mask, before), (mask, n)
                seen_mask = torch.cat(
                    [(real if m is None else m).expand(*cache.batch, k) for m, k in masks], dim=-1
                )
            sources = {
                name: torch.cat([cache.tokens(name, before), s], dim=-3)
                for name, s in sources.items()
            }
        common = torch.promote_types(dtype, next(iter(sources.values())).dtype)
        mixed = self.step_rows(
            tuple(t.to(common) for t in targets),
            {name: s.to(common) for name, s in sources.items()},
            graph.to(cache.device),
            (mask, seen_mask),
        )
        return mixed.to(dtype)


def step_mask(
    valid: Any, batch: tuple[int, ...], n: int | None, device: torch.device
) -> Tensor | None:
    """`valid` as a bool tensor [*, n], or [*, 1] for a single token (n = None)."""
    if valid is None:
        return None
    shapes = [batch, ()] if n is None else [(*batch, n), (n,)]
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape not in shapes:
        got = f"{valid.dtype} {list(valid.shape)}" if isinstance(valid, Tensor) else repr(valid)
        raise ValueError(f"valid must be a bool tensor of shape {list(shapes[0])}, got {got}")
    if valid.device != device:
        raise ValueError(f"valid must be on {device}, got {valid.device}")
    return (valid[..., None] if n is None else valid).expand(*batch, n or 1)
