"""The attention function that belongs to "graphattn"."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from graphattn.integrations.transformers.edges import Seen, seen_through
from graphattn.integrations.transformers.masks import is_sketch
from graphattn.integrations.transformers.options import Options, options_of
from graphattn.ops import attention_weights, dot_product_attention, rbf_attention

# Arguments that say how something is computed or returned, or that the model has dealt with
# already; whatever else arrives and is not None could change the mathematics.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "inputs_embeds",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


def graph_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend over the graph that the mask is, within the window or graph of `configure`.

    The interface is that of ``transformers.AttentionInterface``. A query that sees nothing, such
    as padding on the left, gets exactly 0.

    Args:
        module: the attention module, which holds its options.
        query: [B, H, Q, D].
        key: [B, Hk, K, D]; Hk divides H.
        value: [B, Hk, K, Dv].
        attention_mask: from :func:`.masks.graph_mask`; or a bool mask (True: is seen) or a float
            mask (is added) [B or 1, 1 or H, Q or 1, n], n <= K.
        dropout: share of the weights that is dropped, in training.
        scaling: of the dot products, 1 / sqrt(D) if None; RBF attention has sigma =
            scaling ** -0.5 unless `configure` said otherwise.
        is_causal: read where there is no mask; the module's own if None.
        s_aux: [H], attention sinks (GPT-OSS).
        softcap: of the dot products (Gemma 2).
        position_bias: [B or 1, H or 1, Q, K], added to the logits (T5).

    Returns:
        [B, Q, H, Dv], and the weights [B, H, Q, K] where ``output_attentions=True`` asks for them.

    Raises:
        ValueError: for an argument that would change the result and is not supported.
    """
    _refuse_unknown(module, kwargs)
    options = options_of(module)
    if options.mixer != "dot" and softcap is not None:
        raise ValueError(
            f"mixer must be 'dot' where logits are capped (softcap={softcap}), "
            f"got {options.mixer!r}"
        )
    logits = Logits(options, scaling, s_aux, softcap, dropout)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    wants_weights = _asks_for_weights(kwargs)
    mask = attention_mask
    if mask is None or is_sketch(mask) or mask.dim() != 4 or mask.shape[1] == 1:
        return _attend(query, key, value, mask, position_bias, causal, logits, wants_weights)
    return _by_head(query, key, value, mask, position_bias, causal, logits, wants_weights)


class Logits(NamedTuple):
    """How the logits of one call are made, and what becomes of the weights."""

    options: Options
    scaling: float | None
    sink: Tensor | None
    softcap: float | None
    dropout: float

    def of_head(self, head: int) -> Logits:
        return self if self.sink is None else self._replace(sink=self.sink[head : head + 1])

    def arguments(self, features: int) -> dict[str, Any]:
        """What `attention_weights` takes; `rbf_attention` and `dot_product_attention` too."""
        scale = features**-0.5 if self.scaling is None else self.scaling
        given: dict[str, Any] = {"top_k": self.options.top_k}
        if self.sink is not None:
            given["sink"] = self.sink
        if self.options.mixer == "dot":
            return given | {"scale": scale, "softcap": self.softcap}
        sigma = self.options.sigma
        return given | {"sigma": scale**-0.5 if sigma is None else sigma}


def _asks_for_weights(kwargs: dict[str, Any]) -> bool:
    """Whether weights are wanted: GPT-2 and OPT keep the argument, and collect what is returned."""
    if kwargs.get("output_attentions"):
        return True
    collected = _active_collector.get()
    return collected is not None and any("attentions" in kind for kind in collected)


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name, given in kwargs.items():
        if given is not None and name not in HARMLESS:
            raise ValueError(
                f"graphattn does not support the argument {name} of {type(module).__name__} (a "
                f"{type(given).__name__}), and ignoring it could change the result: use another "
                "attn_implementation for this model"
            )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    causal: bool,
    logits: Logits,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    (B, H, Q, D), K = query.shape, key.shape[2]
    options = logits.options
    seen = seen_through(
        mask,
        B,
        Q,
        K,
        causal=causal,
        window=options.window,
        graph_of=options.graph,
        device=query.device,
    )
    keys = slice(seen.keys.start, seen.keys.stop)
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, keys], value[:, :, keys]))
    bias = seen.bias
    if position_bias is not None:
        cut = position_bias[..., keys]
        bias = cut if bias is None else cut + bias[..., keys]
    given = logits.arguments(D)
    if seen.packed:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    given["edge_bias"] = None if bias is None else _per_edge(bias, seen, B, H, Q)
    given["valid"] = None if seen.valid is None else (None, seen.valid)
    if given.pop("softcap", None) is not None:
        given["softcap"] = logits.softcap
    weights = None
    if wants_weights:
        edges = attention_weights(q, k, seen.graph, **given)
        weights = _dense_weights(edges, seen, (B, H, Q, K))
    attend = rbf_attention if "sigma" in given else dot_product_attention
    out = attend(q, k, v, seen.graph, dropout=logits.dropout, **given)
    return out.reshape(B, Q, H, -1).contiguous(), weights


def _by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    position_bias: Tensor | None,
    causal: bool,
    logits: Logits,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """A mask for every head is a graph for every head."""
    H, Hk = query.shape[1], key.shape[1]
    if mask.shape[1] != H:
        raise ValueError(f"attention_mask must have 1 or {H} heads, got shape {list(mask.shape)}")
    outs, weights = [], []
    for head in range(H):
        one, shared = slice(head, head + 1), slice(head * Hk // H, head * Hk // H + 1)
        bias = position_bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, one]
        tensors = query[:, one], key[:, shared], value[:, shared], mask[:, one]
        out, weight = _attend(*tensors, bias, causal, logits.of_head(head), wants_weights)
        outs.append(out)
        weights.append(weight)
    if not wants_weights:
        return torch.cat(outs, dim=2), None
    return torch.cat(outs, dim=2), torch.cat([w for w in weights if w is not None], dim=1)


def _per_edge(bias: Tensor, seen: Seen, B: int, H: int, Q: int) -> Tensor:
    """[B or 1, H or 1, Q, n] -> [B or 1, E, H], or [E, H] of a packed batch."""
    source, target = seen.graph.edge_index
    if seen.packed:
        n = len(seen.keys)
        sample = target // Q
        bias = bias.expand(B, -1, -1, -1)[sample, :, target % Q, source % n]  # [E, H or 1]
        return bias.expand(-1, H)
    return bias[:, :, target, source].transpose(1, 2).expand(-1, -1, H)


def _dense_weights(weights: Tensor, seen: Seen, shape: tuple[int, int, int, int]) -> Tensor:
    """[*, E, H] -> [B, H, Q, K]."""
    B, H, Q, K = shape
    source, target = seen.graph.edge_index
    full = weights.new_zeros(B, Q, K, H)
    if seen.packed:
        n = len(seen.keys)
        full[target // Q, target % Q, seen.keys.start + source % n] = weights[0]
    else:
        full[:, target, seen.keys.start + source] = weights
    return full.permute(0, 3, 1, 2)
