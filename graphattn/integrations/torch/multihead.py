"""Modules that replace `nn.MultiheadAttention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import wrap_torch_function

from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.torch.masks import (
    GraphOf,
    Places,
    SeenMask,
    seen_everywhere,
    seen_in_mask,
)
from graphattn.late_imports import not_compiled
from graphattn.ops import attention_weights, dot_product_attention, rbf_attention


@dataclass(frozen=True)
class MultiheadOptions:
    """Options of a converted module."""

    mixer: str = "dot"
    graph: TokenGraph | GraphOf | None = None
    window: int | None = None
    top_k: int | None = None
    sigma: float | None = None

    def shown(self) -> str:
        graph: Any = self.graph
        if graph is not None and not isinstance(graph, TokenGraph):
            graph = getattr(graph, "__name__", type(graph).__name__)
        given = {"window": self.window, "top_k": self.top_k, "sigma": self.sigma, "graph": graph}
        return "".join(f", {name}={value}" for name, value in given.items() if value is not None)


class ConvertedAttention(nn.Module):
    """Base of all converted modules: the call of `nn.MultiheadAttention`, and its masks.

    They do not inherit `nn.MultiheadAttention`, and set ``_qkv_same_embed_dim = False``, which
    PyTorch's fused code does not support. Otherwise, in evaluation mode,
    `nn.TransformerEncoderLayer` would read their weights and compute attention over all tokens
    without calling them.
    """

    _qkv_same_embed_dim: ClassVar[bool] = False
    in_proj_bias: Tensor | None

    def __init__(self, replaced: nn.MultiheadAttention, options: MultiheadOptions) -> None:
        super().__init__()
        self.options = options
        self.embed_dim = replaced.embed_dim
        self.num_heads = replaced.num_heads
        self.head_dim = replaced.head_dim
        self.kdim, self.vdim = replaced.kdim, replaced.vdim
        self.batch_first = replaced.batch_first
        self.dropout = replaced.dropout
        self.train(replaced.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        graph = self.options.graph
        if isinstance(graph, TokenGraph):  # move the graph together with the weights
            device = next(self.parameters()).device
            if device.type != "meta" and graph.device != device:
                moved = {**vars(self.options), "graph": graph.to(device)}
                self.options = MultiheadOptions(**moved)
        return self

    @property
    def places(self) -> Places:
        return Places(self.options.graph, self.options.window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `nn.MultiheadAttention` does, over the graph and within the masks.

        Arguments, shapes and results are those of :class:`torch.nn.MultiheadAttention`, with two
        differences: a target that sees nothing gets the bias of the output projection instead of
        NaN, and returned weights are without dropout.

        Raises:
            ValueError: if shapes do not fit, if the mixer does not support an argument, or for
                nested tensors.
        """
        _check_inputs(query, key, value)
        same = query is key and key is value
        same_source = key is value
        batched = query.dim() == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        if same:  # keep one tensor for all three, so that it is projected once
            key = value = query
        elif same_source:
            value = key
        B, L, S = len(query), query.shape[1], key.shape[1]
        self._check_shapes(query, key, value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        seen = self._seen(B, L, S, key_padding_mask, attn_mask, is_causal, query)
        out, weights = self.mix(query, key, value, seen, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, seen: list[SeenMask], need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, L, E] and, if requested, the weights [B, H, L, S]."""
        raise NotImplementedError

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        B, S = len(query), key.shape[1]
        wanted = {
            "query": (query, (B, query.shape[1], self.embed_dim)),
            "key": (key, (B, S, self.kdim)),
            "value": (value, (B, S, self.vdim)),
        }
        for name, (x, shape) in wanted.items():
            if x.shape != shape:
                raise ValueError(
                    f"{name} must have the shape {list(shape)} (batch, tokens, features, in the "
                    f"order of batch_first={self.batch_first}), got {list(x.shape)}"
                )

    def _seen(
        self,
        B: int,
        L: int,
        S: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        like: Tensor,
    ) -> list[SeenMask]:
        if is_causal and attn_mask is None:
            raise ValueError(
                "attn_mask must be given with is_causal=True, which is only a hint about it, got "
                "attn_mask=None: make it with nn.Transformer.generate_square_subsequent_mask"
            )
        valid, key_bias = _read_padding(key_padding_mask, B, S)
        rest: dict[str, Any] = {"valid": valid, "key_bias": key_bias}
        if attn_mask is None:
            return [seen_everywhere(self.places, L, S, like.device, **rest)]
        mask = self._pairs(attn_mask, B, L, S)
        if is_causal and torch.compiler.is_compiling() and L == S:
            # torch.compile cannot read the mask. Without it, the mask is read, whatever the hint
            # says.
            return [seen_everywhere(self.places, L, S, like.device, causal=True, **rest)]
        return seen_in_mask(self.places, mask, **rest)

    def _pairs(self, attn_mask: Tensor, B: int, L: int, S: int) -> Tensor:
        """Convert PyTorch's mask (True: not seen) to [B or 1, H or 1, L, S] (True: seen)."""
        _check_mask("attn_mask", attn_mask)
        H = self.num_heads
        if attn_mask.shape == (L, S):
            mask = attn_mask[None, None]
        elif attn_mask.shape == (B * H, L, S):
            mask = attn_mask.unflatten(0, (B, H))
        else:
            raise ValueError(
                f"attn_mask must have the shape [{L}, {S}] or [{B * H}, {L}, {S}] (batch x heads), "
                f"got {list(attn_mask.shape)}"
            )
        return ~mask if mask.dtype == torch.bool else mask

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, mixer={self.options.mixer!r}"
            f"{self.options.shown()}"
        )


class GraphMultiheadAttention(ConvertedAttention):
    """`nn.MultiheadAttention` over a token graph, by dot products or by distances.

    Its parameters are those of the module it replaces, under their names: `in_proj_weight` (or
    `q_proj_weight`, `k_proj_weight` and `v_proj_weight`), `in_proj_bias`, `out_proj.weight` and
    `out_proj.bias`; with mixer="krause" also `log_sigma` [heads]. Made by :func:`convert`.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    log_sigma: nn.Parameter | None

    def __init__(self, replaced: Any, options: MultiheadOptions) -> None:
        super().__init__(replaced, options)
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self.register_parameter(name, getattr(replaced, name))
        self.register_parameter("in_proj_bias", replaced.in_proj_bias)
        self.out_proj = replaced.out_proj
        self.bias_k = self.bias_v = None
        self.add_zero_attn = False
        sigma = self.head_dim**0.25 if options.sigma is None else options.sigma
        self.sigma = None if options.mixer == "dot" else sigma
        self.log_sigma = None
        if options.mixer == "krause":
            learned = getattr(replaced, "log_sigma", None) if options.sigma is None else None
            new = new_bandwidths(sigma, self.num_heads, self.out_proj.weight)
            self.log_sigma = new if learned is None else learned

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, seen: list[SeenMask], need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim))
            for x in self._project(query, key, value)
        )
        sigma = self.sigma if self.log_sigma is None else self.log_sigma.exp()
        p = self.dropout if self.training else 0.0
        out, weights = attend(q, k, v, seen, sigma, self.options.top_k, p, need_weights)
        return self.out_proj(out.flatten(-2)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        W, b = self.in_proj_weight, self.in_proj_bias
        if W is not None and query is key and key is value:
            return functional.linear(query, W, b).chunk(3, -1)
        if W is not None:
            matrices = W.chunk(3)
        else:
            matrices = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if b is None else b.chunk(3)
        tokens = query, key, value
        return tuple(
            functional.linear(*part) for part in zip(tokens, matrices, biases, strict=True)
        )


class LayerAttention(ConvertedAttention):
    """A layer of :mod:`graphattn.nn` in the place of `nn.MultiheadAttention`.

    Its parameters are those of `layer`, under ``layer.``; the output projection is that of the
    module it replaces. Made by :func:`convert` with mixer="gka", "vlt" or "consensus".
    """

    in_proj_bias = None

    def __init__(
        self, replaced: nn.MultiheadAttention, options: MultiheadOptions, layer: nn.Module
    ) -> None:
        super().__init__(replaced, options)
        self.layer = layer
        if options.mixer == "consensus":
            self.no_attention_weights = "consensus has no attention weights"
        self.train(replaced.training)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, seen: list[SeenMask], need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        mixer = self.options.mixer
        if query is not key or key is not value:
            raise ValueError(
                f"query, key and value must be the same tensor with mixer={mixer!r}, which "
                "averages the tokens themselves, got different tensors (as in cross-attention, or "
                "if positions are added to some of them)"
            )
        if len(seen) > 1:
            raise ValueError(
                f"attn_mask must be the same for all heads with mixer={mixer!r}, got {len(seen)} "
                "different ones"
            )
        [what] = seen
        graph, valid, B = what.graph, what.valid, len(query)
        x = query.flatten(0, 1) if what.packed else query
        if mixer == "consensus":
            if what.bias is not None or what.key_bias is not None:
                raise ValueError(
                    "attn_mask and key_padding_mask must be bool, or contain only 0 and -inf, "
                    "with mixer='consensus', which has no logits, got other numbers"
                )
            if need_weights:
                raise ValueError(
                    "need_weights must be False with mixer='consensus', which has no attention "
                    "weights, got need_weights=True"
                )
            return self.layer(x, graph, valid=valid).view_as(query), None
        pair = None if valid is None else (None, valid)
        out = self.layer(
            x,
            graph,
            valid=pair,
            edge_bias=what.per_edge(self.num_heads),
            return_attention_weights=need_weights,
        )
        if not need_weights:
            return out.view_as(query), None
        out, weights = out
        return out.view_as(query), what.dense(weights[None] if what.packed else weights, B)


# A mode for torch functions, such as graphattn.diagnostics.record, sees every call.
@wrap_torch_function(lambda q, k, v, *_: (q, k, v))
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: list[SeenMask],
    sigma: float | Tensor | None,
    top_k: int | None,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages [B, L, H, D] of attention, and the weights [B, H, L, S]."""
    if len(seen) == 1:
        return _attend(q, k, v, seen[0], sigma, top_k, dropout, need_weights)
    outs, weights = [], []
    for head, what in enumerate(seen):  # with one mask per head, there is one graph per head
        one = slice(head, head + 1)
        of_head = sigma[one] if isinstance(sigma, Tensor) else sigma
        qh, kh, vh = (x[:, :, one] for x in (q, k, v))
        out, weight = _attend(qh, kh, vh, what, of_head, top_k, dropout, need_weights)
        outs.append(out)
        weights.append(weight)
    mixed = torch.cat(outs, dim=2)
    return mixed, torch.cat([w for w in weights if w is not None], 1) if need_weights else None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: SeenMask,
    sigma: float | Tensor | None,
    top_k: int | None,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    B, L, H, _ = q.shape
    if seen.packed:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    bias = seen.per_edge(H)
    given: dict[str, Any] = {
        "top_k": top_k,
        "edge_bias": None if bias is None else bias.to(q.dtype),
        "valid": None if seen.valid is None else (None, seen.valid),
    }
    if sigma is None:
        out = dot_product_attention(q, k, v, seen.graph, dropout=dropout, **given)
    else:
        out = rbf_attention(q, k, v, seen.graph, sigma, dropout=dropout, **given)
    out = out.reshape(B, L, H, v.shape[-1])
    if not need_weights:
        return out, None
    return out, seen.dense(attention_weights(q, k, seen.graph, sigma=sigma, **given), B)


def new_bandwidths(sigma: float, heads: int, like: Tensor) -> nn.Parameter:
    """Make `log_sigma` [heads], a learned bandwidth per head."""
    start = torch.full((heads,), math.log(sigma), dtype=like.dtype, device=like.device)
    return nn.Parameter(start)


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    if any(x.is_nested for x in (query, key, value)):
        raise ValueError(
            "query, key and value must not be nested tensors. If an nn.TransformerEncoder made "
            "them, convert() the whole encoder instead of its layers, or set its "
            "use_nested_tensor = False"
        )
    dims = [x.dim() for x in (query, key, value)]
    if dims not in ([2, 2, 2], [3, 3, 3]):
        raise ValueError(
            f"query, key and value must all have 3 dimensions, or 2 without a batch, got {dims}"
        )


def _check_mask(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be bool (True: not seen) or floats, got {mask.dtype}")


def _read_padding(mask: Tensor | None, B: int, S: int) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask of real keys, bool [B, S], and the bias of their logits, or None."""
    if mask is None:
        return None, None
    _check_mask("key_padding_mask", mask)
    if mask.shape != (B, S):
        raise ValueError(f"key_padding_mask must have the shape {[B, S]}, got {list(mask.shape)}")
    return (~mask, None) if mask.dtype == torch.bool else _read_float_padding(mask)


@not_compiled()
def _read_float_padding(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    valid = mask != float("-inf")
    bias = mask.masked_fill(~valid, 0)
    return valid, bias if mask.requires_grad or bool(bias.any()) else None
