"""The Krause shortcut of one attention layer: its projections, bandwidths, gate and cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from graphattn.graphs.builders.windows import causal_window_graph
from graphattn.integrations.transformers.conversion.families import argument_names, cache_name
from graphattn.integrations.transformers.conversion.replacement import Bandwidth
from graphattn.integrations.transformers.shortcut.masks import (
    Reach,
    ShortcutCall,
    dense,
    reach_of,
)
from graphattn.nn.gated_krause import Gate
from graphattn.ops.attention.api import rbf_attention
from graphattn.ops.attention.step.decode import decode_attention


class KrauseShortcut(nn.Module):
    """Krause attention in parallel to the attention of a layer, with its own projections.

    The projections start as copies of those of the layer, with biases and norms if it has them.
    Queries and keys are rotated as in the layer before distances are computed.

    Args:
        attention: the attention layer, of Llama, Mistral, Qwen 2 or Qwen 3.
        window: number of tokens that a token sees, itself included.
        top_k: how many of these it averages, the nearest ones; None for all.
        init_sigma: initial bandwidth of every head.
    """

    def __init__(
        self, attention: Any, *, window: int, top_k: int | None, init_sigma: float
    ) -> None:
        super().__init__()
        config = attention.config
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.window, self.top_k = window, top_k
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _copy(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        own_norms = hasattr(attention, "q_norm")
        self.q_norm = _copy(attention.q_norm) if own_norms else None
        self.k_norm = _copy(attention.k_norm) if own_norms else None
        # At least float32, so that small steps of an optimizer are not rounded to 0.
        weight = attention.o_proj.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.bandwidth = Bandwidth(self.heads, init_sigma, weight.device, dtype)
        self.gate = Gate(config.hidden_size, weight.device, dtype)

    def project(self, x: Tensor, rotations: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query [B, N, H, D], key and value [B, N, Hk, D]; rotate query and key."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        shape = *x.shape[:-1], -1, self.head_dim
        query, key = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        value = self.v_proj(x).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *rotations, unsqueeze_dim=2)
        return query, key, value

    # A mode for torch functions, such as graphattn.diagnostics.record, sees every call.
    @wrap_torch_function(lambda self, query, key, value, *_: (query, key, value))
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        past: int | Tensor,
        dropout: float,
    ) -> Tensor:
        """Average over the window of every query, [B, Q, H * D].

        The queries are [B, Q, H, D]. Keys and values [B, K, Hk, D] are all slots of the cache;
        query q is in slot past + q. `past` is a tensor if it is not known as a number.
        """
        B, Q, K = *query.shape[:2], key.shape[1]
        if isinstance(past, Tensor) and Q > 1:
            past = int(past)
        if isinstance(past, Tensor):  # a static cache in compiled code
            key, value, seen = self._read_slots(key, value, mask, past)
            reach = Reach(causal_window_graph(1, self.window, past=self.window - 1), (None, seen))
            return self._average(query, key, value, reach, dropout)
        call = ShortcutCall(B, Q, K, past, self.window)
        slots = slice(call.start, call.stop)
        key, value = key[:, slots].to(query.dtype), value[:, slots].to(query.dtype)
        if Q == 1 and mask is None and dropout == 0:  # four times faster than a graph
            sigma, length = self.bandwidth(query), call.stop - call.start
            out = decode_attention(query, key, value, length, sigma=sigma, top_k=self.top_k)
            return out.flatten(-2)
        return self._average(query, key, value, reach_of(mask, call), dropout)

    def _read_slots(
        self, key: Tensor, value: Tensor, mask: Any, past: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last W keys and values up to a slot that is not read, and which are seen."""
        B, K, W = len(key), key.shape[1], self.window
        slots = past + torch.arange(1 - W, 1, device=key.device)
        seen = (slots >= 0).expand(B, W)
        slots = slots.clamp(min=0)
        if mask is not None:
            row = dense(mask, ShortcutCall(B, 1, K, 0, W))[:, 0]
            seen = seen & row.index_select(1, slots)
        return key.index_select(1, slots), value.index_select(1, slots), seen

    def _average(
        self, query: Tensor, key: Tensor, value: Tensor, reach: Reach, dropout: float
    ) -> Tensor:
        """Normalise the `top_k` largest RBF weights and average, as in the paper."""
        q, k, v = query, key.to(query.dtype), value.to(query.dtype)
        if reach.packed:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        graph, sigma = reach.graph.to(query.device), self.bandwidth(query)
        out = rbf_attention(
            q, k, v, graph, sigma, top_k=self.top_k, valid=reach.valid, dropout=dropout
        )
        return out.reshape(*query.shape[:2], -1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, window={self.window}, top_k={self.top_k}"


def _copy(module: nn.Module) -> nn.Module:
    """Make a trainable copy of a projection or a norm."""
    return copy.deepcopy(module).requires_grad_(True)


class CacheBeside:
    """A layer's view of a cache that also contains the keys and values of its shortcut.

    They are additional heads in the tensors of the cache. All operations of the cache (growing,
    writing, windows, beams, cropping, moving) then apply to both.
    """

    def __init__(self, cache: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.cache = cache
        self.query, self.key, self.value = query, key, value
        self.past: int | Tensor = 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store both, and return those of the layer itself."""
        before = self.cache.get_seq_length(layer_idx)
        if isinstance(before, Tensor):  # the counter of a static cache, which changes later
            before = before.clone()
        queries, heads = key.shape[2], key.shape[1]
        self.check_room(layer_idx, 2 * heads)
        both = (
            torch.cat([of_layer, of_shortcut.transpose(1, 2).to(of_layer.dtype)], dim=1)
            for of_layer, of_shortcut in ((key, self.key), (value, self.value))
        )
        keys, values = self.cache.update(*both, layer_idx, *args, **kwargs)
        self.key, self.value = keys[:, heads:].transpose(1, 2), values[:, heads:].transpose(1, 2)
        # A sliding cache has dropped its oldest tokens.
        most = keys.shape[2] - queries
        if isinstance(before, Tensor):
            self.past = before.clamp(max=most)
        else:
            self.past = min(before, most)
        return keys[:, :heads], values[:, :heads]

    def check_room(self, layer_idx: int, heads: int) -> None:
        """Raise an error if the cache was allocated before its first token, without the
        shortcut."""
        layers = getattr(self.cache, "layers", [])
        stored = getattr(layers[layer_idx], "keys", None) if layer_idx < len(layers) else None
        if isinstance(stored, Tensor) and stored.dim() == 4 and stored.shape[1] != heads:
            raise ValueError(
                f"cache (past_key_values) must have {heads} heads in layer {layer_idx} with the "
                f"Krause shortcut, got {stored.shape[1]}: pass a new cache, without "
                "early_initialization, which this model fills itself"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "cache":  # it does not exist yet while the object is copied
            raise AttributeError(name)
        return getattr(self.cache, name)


# Hooks are module-level functions, so that models can be copied and pickled.


def before_attention(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let the cache of the layer also store the keys and values of the shortcut."""
    kwargs = _by_name(attention, args, kwargs)
    refuse_implementation(attention)
    refuse_continuous_batching(kwargs)
    name = cache_name(kwargs)
    if name is not None:
        x, rotations = kwargs["hidden_states"], kwargs["position_embeddings"]
        kwargs[name] = CacheBeside(kwargs[name], *attention.krause.project(x, rotations))
    return (), kwargs


def after_attention(attention: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Mix the layer's own output with that of the shortcut."""
    shortcut: KrauseShortcut = attention.krause
    name = cache_name(kwargs)
    cache = None if name is None else kwargs[name]
    past: int | Tensor = 0
    if cache is None:
        projected = shortcut.project(kwargs["hidden_states"], kwargs["position_embeddings"])
    else:
        projected, past = (cache.query, cache.key, cache.value), cache.past
    dropout = attention.attention_dropout if attention.training else 0.0
    averages = shortcut.attend(*projected, kwargs.get("attention_mask"), past, dropout)
    standard, *others = output
    krause = shortcut.o_proj(averages.to(standard.dtype))
    return (shortcut.gate(standard, krause), *others)


def _by_name(attention: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of the layer by name."""
    if not args:
        return dict(kwargs)
    names = argument_names(attention)
    if len(args) > len(names):
        raise ValueError(
            f"{type(attention).__name__} takes at most {len(names)} positional arguments, got "
            f"{len(args)}"
        )
    return dict(zip(names, args, strict=False)) | kwargs


def refuse_continuous_batching(kwargs: dict[str, Any]) -> None:
    """Raise an error for the paged cache of continuous batching, which cannot store more heads."""
    for name in ("read_index", "write_index", "block_table"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None with a Krause shortcut: it is for continuous batching, whose "
                "paged cache cannot store the heads of the shortcut. Use model.generate"
            )


def refuse_implementation(attention: Any) -> None:
    """Raise an error for implementations that do not pass a mask to the layer."""
    name = attention.config._attn_implementation or "eager"
    if "flash" in name or "paged" in name or "/" in name:
        raise ValueError(
            f"attn_implementation = {name!r} passes no mask to its layers, so the Krause shortcut "
            "would not see padding and packed texts: use 'sdpa', 'eager', 'flex_attention' or "
            "'graphattn' (model.set_attn_implementation)"
        )
