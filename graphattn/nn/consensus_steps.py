"""Generation steps of consensus layers in compiled code: one call for the row of a new token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.nn.base.overrides import overridden_kernel, overridden_rows
from graphattn.nn.base.streaming import StreamingLayer
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.edges.network import EdgeNetwork
from graphattn.ops.backends import refusal, wanted_backend, why_no_step
from graphattn.ops.consensus.edge_network import FirstLayer
from graphattn.ops.consensus.native.steps import ConsensusCacheCall, applies, first_hidden


class CompiledSteps(StreamingLayer):
    """Base of consensus layers whose generation steps can run in compiled code.

    The layer itself defines a step by torch operations. This class computes the same step, for one
    token, by one call of compiled code. If a user has overridden a method, or replaced a projection
    or a first layer, that code still runs.
    """

    edge_net: EdgeNetwork
    source_proj: torch.nn.Linear
    trunk: str

    def step_tensor(self, iteration: int = 0) -> Any:
        """Return the step size of an iteration in the form that `consensus_update` accepts."""
        raise NotImplementedError

    def step_kernel(self, like: Tensor, cache_dtype: torch.dtype, window: int | None) -> str | None:
        backend = _backend_of_step(self.backend, like, cache_dtype)
        if backend is None or self.uses_propagate() or not self.edge_net.is_plain():
            return None
        return None if overridden_rows(self) or overridden_kernel(self) else backend

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

    def compiled_row(self, x: Tensor, cache: LayerCache) -> Tensor | None:
        step = self.step_of_heads()
        if self.rotary is not None or step is None or not self.edge_net.is_plain():
            return None
        u, hidden = self.source_proj(x), self.first_step_layers(x.unsqueeze(-2))
        return self.run_step(cache, u, u, u, hidden, step, None)

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
        """The hidden vectors of tokens [*, n, dim]; for n = 1 with the bits of compiled steps."""
        if x.shape[-2] != 1 or _backend_of_step(self.backend, u, u.dtype) is None:
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


def _backend_of_step(backend: str, like: Tensor, cache_dtype: torch.dtype) -> str | None:
    """ "native" if C++ code can run a step of targets like these, [*, H, D], else None.

    Raises:
        ValueError: "native" was asked for by name and cannot run the step.
    """
    wanted = wanted_backend(backend)
    if wanted not in ("auto", "native") or torch.compiler.is_compiling():
        return None  # torch.compile traces operations of torch
    reason = why_no_step(like, cache_dtype)
    if reason is not None and wanted == "native":
        raise refusal(wanted, reason)
    return "native" if reason is None else None
