"""Generation steps of consensus layers in compiled code: one call for the row of a new token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.nn.base.overrides import is_as_shipped, overridden_kernel, overridden_rows
from graphattn.nn.base.streaming import StreamingLayer
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.edges.network import EdgeNetwork
from graphattn.ops.backends import may_repeat_step
from graphattn.ops.consensus.edge_network import FirstLayer
from graphattn.ops.consensus.native.steps import ConsensusCacheCall, applies, first_hidden
from graphattn.ops.consensus.step import step_kernel


class CompiledSteps(StreamingLayer):
    """Base of consensus layers whose generation steps can run in compiled code.

    The layer itself defines a step by torch operations. This class computes the same step, for one
    token, by one call of compiled code. If a user has overridden a method, or replaced a projection
    or a first layer, that code still runs.
    """

    edge_net: EdgeNetwork
    source_proj: torch.nn.Linear
    trunk: str

    def step_tensor(self) -> Any:
        """Return the step size in the form that `consensus_update` accepts."""
        raise NotImplementedError

    def step_kernel(self, like: Tensor, cache_dtype: torch.dtype, window: int | None) -> str | None:
        found = step_kernel(self.backend, like, cache_dtype)
        if found is None or self.uses_propagate() or not self.edge_net.is_plain():
            return None
        return None if overridden_rows(self) or overridden_kernel(self) else found

    def kernel_row(
        self,
        targets: tuple[Tensor, ...],
        sources: dict[str, Tensor],
        valid: Tensor | None,
        cache: LayerCache,
    ) -> Tensor:
        step = self.step_of_heads()
        if step is None:
            cache.append(sources, valid)
            return self.step_row(targets, cache)
        u, compared, hidden = targets
        pair = hidden, sources["hidden"]
        return self.run_step(cache, u, compared, sources["state"], pair, step, valid)

    def step_of_heads(self) -> Any:
        """Return the step size if it is a number, "auto", or one number per head; else None."""
        step = self.step_tensor()
        if isinstance(step, Tensor) and step.shape != (self.heads,):
            return None
        return step

    def compiled_step(self, x: Tensor, cache: LayerCache) -> Tensor | None:
        if type(cache) is not LayerCache or not may_repeat_step(self.backend):
            return None
        call = cache.call  # made by the first step, which has checked the remaining conditions
        if call is None or not call.fits(self, x, cache.buffers) or "valid" in cache.buffers:
            return None
        if torch.is_autocast_enabled("cpu") or x.shape[:-1] != cache.batch:
            return None
        if self.output_proj.weight.dtype is not x.dtype or self.rotary is not None:
            return None
        if not is_as_shipped(self) or not self.edge_net.is_plain():
            return None
        had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            x = x.contiguous()
            u = self.source_proj(x)
            hidden = self.first_step_layers(x.unsqueeze(-2))
            step = self.step_of_heads()
            if step is None:
                return None
            mixed = self.run_step(cache, u, u, u, hidden, step, None)
            out: Tensor = self.output_proj(mixed.view(x.shape))
        finally:
            torch._C._set_grad_enabled(had_gradients)
        return out

    def run_step(
        self,
        cache: LayerCache,
        u: Tensor,
        compared: Tensor,
        state: Tensor,
        hidden: tuple[Tensor, Tensor] | tuple[FirstLayer, FirstLayer],
        step: Any,
        valid: Tensor | None,
    ) -> Tensor:
        """Return u' of the newest token, shaped like `u`, and add the token to the cache."""
        cache.advance(1, masked=valid is not None)
        held = cache.held(cache.window)
        buffers, call = cache.buffers, cache.call
        if call is None or not call.serves(self, buffers["state"], buffers["hidden"], u.dtype):
            call = ConsensusCacheCall(
                self,
                buffers["state"],
                buffers["hidden"],
                self.heads,
                self.edge_net.groups,
                1 if self.trunk == "shared" else 3,
                u.dtype,
            )
            cache.call = call
        return call.run(
            u,
            compared,
            state,
            hidden,
            self.edge_net.second_layer(),
            step,
            (cache.end - held) % cache.capacity,
            held,
            valid,
            buffers.get("valid"),
        )

    def step_hidden(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden vectors of tokens [*, n, dim]; for n = 1, bit for bit as compiled steps
        do."""
        if x.shape[-2] != 1 or step_kernel(self.backend, u, u.dtype) is None:
            return self.edge_net.target_hidden(x), self.edge_net.source_hidden(x)
        of_target, of_source = self.first_step_layers(x)
        if isinstance(of_target, FirstLayer) and isinstance(of_source, FirstLayer):
            return first_hidden(of_target), first_hidden(of_source)
        return of_target, of_source

    def first_step_layers(self, x: Tensor) -> tuple[Any, Any]:
        """Return the first layers for compiled code or, if it cannot apply them, their outputs."""
        layers = self.edge_net.first_layers(x, x)
        if applies(layers[0], x.dtype) and applies(layers[1], x.dtype):
            return layers
        of_target, of_source = (
            layer.hidden() if isinstance(layer, FirstLayer) else layer for layer in layers
        )
        return of_target, of_source
