"""The attention function of the implementation "graphattn"."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from graphattn.integrations.transformers.masks.graphs import (
    DENSE,
    SeenEdges,
    limit_of,
    plain_band,
    seen_in_mask,
    seen_through,
    seen_where_sparse,
)
from graphattn.integrations.transformers.masks.mask_function import fitted, is_sketch
from graphattn.integrations.transformers.masks.pairs import (
    Pairs,
    pairs_in_band,
    pairs_in_graph,
    pairs_in_mask,
)
from graphattn.integrations.transformers.options import Options, options_of
from graphattn.ops import attention_weights, dot_product_attention, rbf_attention
from graphattn.ops.attention.step import all_pairs

# Arguments that say how something is computed or returned, or that the model has dealt with
# already; whatever else arrives and is not None could change the mathematics. Refused are thus, by
# name, sequences that are packed by their lengths (cu_seq_lens_q, max_length_k, seq_idx: the model
# counts on an attention function that reads these in place of a mask; packing by position_ids is
# understood), continuous batching (cache, read_index, block_table), sparse attention whose keys a
# model chooses for a kernel of its own (indices, block_indices), and sinks per query (sinks).
HARMLESS = frozenset(
    {
        "cache_position",  # where new keys were written; it is in the mask
        "deterministic",  # for the gradients of flash-attention
        "inputs_embeds",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",  # for the loss
        "output_attentions",  # read here
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",  # the keys are already in it
        "past_key_values",
        "position_embeddings",  # have been applied
        "position_ids",  # have been applied, and packing by them is in the mask
        "return_dict",
        "sliding_window",  # is in the mask
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
    """Attend over the graph of the mask, limited by the window or graph of `configure`.

    The interface is that of ``transformers.AttentionInterface``. A query that sees nothing, such
    as padding on the left, gets exactly 0.

    Args:
        module: the attention module, which contains its options.
        query: [B, H, Q, D].
        key: [B, Hk, K, D]; Hk divides H.
        value: [B, Hk, K, Dv].
        attention_mask: from :func:`.masks.graph_mask`; or a bool mask (True: is seen) or a float
            mask (is added) [B or 1, 1 or H, Q or 1, K].
        dropout: share of the weights that training sets to zero.
        scaling: factor of the dot products; None means 1 / sqrt(D). RBF attention uses sigma =
            scaling ** -0.5 unless `configure` has set another one.
        is_causal: used if there is no mask; None takes the module's own.
        s_aux: [H], attention sinks (GPT-OSS).
        softcap: softcap of the dot products (Gemma 2).
        position_bias: [B or 1, H or 1, Q, K], added to the logits (T5).

    Returns:
        [B, Q, H, Dv], and with ``output_attentions=True`` the weights [B, H, Q, K], otherwise None.

    Raises:
        ValueError: if an argument is not supported and could change the result, or if the mask has
            another number of keys.
    """
    _refuse_unknown(module, kwargs)
    options = options_of(module)
    if options.mixer != "dot" and softcap is not None:
        raise ValueError(
            f"mixer must be 'dot' if logits are capped (softcap={softcap}), got {options.mixer!r}"
        )
    if position_bias is not None and position_bias.shape[-1] != key.shape[2]:
        raise ValueError(
            f"position_bias must have {key.shape[2]} keys, the number of keys of this call, got "
            f"shape {list(position_bias.shape)}"
        )
    logits = CallLogits(options, scaling, s_aux, softcap, dropout)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    wants_weights = _asks_for_weights(kwargs)
    mask = fitted(attention_mask, query.shape[2], key.shape[2])
    if mask is None or is_sketch(mask) or mask.dim() != 4 or mask.shape[1] == 1:
        return _attend(query, key, value, mask, position_bias, causal, logits, wants_weights)
    if mask.shape[1] != query.shape[1]:
        raise ValueError(
            f"attention_mask must have 1 or {query.shape[1]} heads, got shape {list(mask.shape)}"
        )
    if _fits_pairs(options, query):
        return _attend(query, key, value, mask, position_bias, causal, logits, wants_weights)
    return _by_head(query, key, value, mask, position_bias, causal, logits, wants_weights)


class CallLogits(NamedTuple):
    """How the logits of one call are computed, and how the weights are used."""

    options: Options
    scaling: float | None
    sink: Tensor | None
    softcap: float | None
    dropout: float

    def of_head(self, head: int) -> CallLogits:
        return self if self.sink is None else self._replace(sink=self.sink[head : head + 1])

    def arguments(self, features: int) -> dict[str, Any]:
        """Return the arguments of `attention_weights`; `rbf_attention` and `dot_product_attention`
        too.
        """
        scale = features**-0.5 if self.scaling is None else self.scaling
        given: dict[str, Any] = {"top_k": self.options.top_k}
        if self.sink is not None:
            given["sink"] = self.sink
        if self.options.mixer == "dot":
            return given | {"scale": scale, "softcap": self.softcap}
        sigma = self.options.sigma
        return given | {"sigma": scale**-0.5 if sigma is None else sigma}

    def of_pairs(self, features: int) -> all_pairs.Logits:
        """Return how the logits of all pairs are formed."""
        scale = features**-0.5 if self.scaling is None else self.scaling
        options, rest = self.options, (self.softcap, self.sink, self.dropout)
        if options.mixer == "dot":
            return all_pairs.Logits("dot", scale, options.top_k, *rest)
        strength = scale if options.sigma is None else options.sigma**-2
        return all_pairs.Logits("rbf", strength, options.top_k, *rest)


def _asks_for_weights(kwargs: dict[str, Any]) -> bool:
    """Return whether a call wants weights: GPT-2 and OPT do not pass the argument on."""
    if kwargs.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():  # torch.compile cannot read a context variable
        return False
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
    logits: CallLogits,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    if not query.dtype == key.dtype == value.dtype:  # with autocast they can differ
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        tensors = query.to(dtype), key.to(dtype), value.to(dtype)
        out, weights = _attend(*tensors, mask, position_bias, causal, logits, wants_weights)
        return out.to(query.dtype), None if weights is None else weights.to(query.dtype)
    seen = _seen_or_pairs(query, key, mask, position_bias, causal, logits.options)
    if isinstance(seen, Pairs):
        return _over_pairs(query, key, value, seen, position_bias, logits, wants_weights)
    return _over_edges(query, key, value, seen, position_bias, logits, wants_weights)


def _fits_pairs(options: Options, query: Tensor) -> bool:
    """Return whether all pairs can be computed if they are many, or their number is unknown."""
    by_products = options.mixer == "dot" and options.top_k is None
    return by_products or query.shape[2] == 1 or torch.compiler.is_compiling()


def _seen_or_pairs(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    causal: bool,
    options: Options,
) -> SeenEdges | Pairs:
    """Return a graph if that is faster or necessary; else all pairs with a mask."""
    (B, _, Q, _), K, device = query.shape, key.shape[2], query.device
    window, graph_of = options.window, options.graph
    if mask is not None and not is_sketch(mask):
        given = mask, B, Q, limit_of(window, causal), graph_of
        if not _fits_pairs(options, query):
            return seen_in_mask(*given)
        traced = Q == 1 or torch.compiler.is_compiling() or mask.shape[1] > 1
        sparse = None if traced else seen_where_sparse(*given)
        return pairs_in_mask(*given) if sparse is None else sparse
    if Q == 1 or (position_bias is not None and _fits_pairs(options, query)):
        band, valid, n = plain_band(mask, Q, K, causal, window)
        if graph_of is not None:
            return pairs_in_graph(graph_of, band, Q, n, valid, device)
        if Q == 1 or min(band.before, n) + min(band.after, n) + 1 > DENSE * n:
            return pairs_in_band(band, Q, n, valid, device)
    arguments: dict[str, Any] = {"causal": causal, "window": window, "graph_of": graph_of}
    return seen_through(mask, B, Q, K, device=device, **arguments)


def _over_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Pairs,
    position_bias: Tensor | None,
    logits: CallLogits,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    keys = slice(seen.keys.start, seen.keys.stop)
    bias = seen.bias
    if position_bias is not None:
        cut = position_bias[..., keys]
        bias = cut if bias is None else cut + bias
    tensors = query, key[:, :, keys], value[:, :, keys], seen.allowed
    of_pairs, weights = logits.of_pairs(query.shape[-1]), None
    out, _ = all_pairs.attend_pairs(*tensors, of_pairs, bias=bias)
    if wants_weights:  # compute them separately, so that the output is the same, bit for bit
        kept = of_pairs._replace(dropout=0.0)
        _, weights = all_pairs.attend_pairs(*tensors, kept, bias=bias, need_weights=True)
        assert weights is not None
        before, after = seen.keys.start, key.shape[2] - seen.keys.stop
        weights = torch.nn.functional.pad(weights, (before, after))
    return out.transpose(1, 2).contiguous(), weights


def _over_edges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: SeenEdges,
    position_bias: Tensor | None,
    logits: CallLogits,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    (B, H, Q, D), K = query.shape, key.shape[2]
    keys = slice(seen.keys.start, seen.keys.stop)
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, keys], value[:, :, keys]))
    bias = seen.bias
    if position_bias is not None:
        cut = position_bias[..., keys]
        bias = cut if bias is None else cut + bias[..., keys]
    given = logits.arguments(D)
    if seen.packed:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
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
    return out.reshape(B, Q, H, value.shape[-1]).contiguous(), weights


def _by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    position_bias: Tensor | None,
    causal: bool,
    logits: CallLogits,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run every head with its own mask, and so with its own graph."""
    H, Hk = query.shape[1], key.shape[1]
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


def _per_edge(bias: Tensor, seen: SeenEdges, B: int, H: int, Q: int) -> Tensor:
    """[B or 1, H or 1, Q, n] -> [B or 1, E, H], or [E, H] of a packed batch."""
    source, target = seen.graph.edge_index
    if seen.packed:
        n = len(seen.keys)
        sample = target // Q
        bias = bias.expand(B, -1, -1, -1)[sample, :, target % Q, source % n]  # [E, H or 1]
        return bias.expand(-1, H)
    return bias[:, :, target, source].transpose(1, 2).expand(-1, -1, H)


def _dense_weights(weights: Tensor, seen: SeenEdges, shape: tuple[int, int, int, int]) -> Tensor:
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
