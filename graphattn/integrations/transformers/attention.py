"""The attention function of the implementation "graphattn"."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from graphattn.integrations.edge_values import from_pairs, to_pairs
from graphattn.integrations.transformers.masks.graphs import (
    DENSE,
    Limits,
    SeenEdges,
    limit_of,
    plain_band,
    seen_in_mask,
    seen_through,
)
from graphattn.integrations.transformers.masks.mask_function import fitted, is_sketch
from graphattn.integrations.transformers.masks.pairs import Pairs, pairs_in_band, pairs_in_mask
from graphattn.integrations.transformers.options import Options, options_of
from graphattn.ops import attention_weights, dot_product_attention, rbf_attention
from graphattn.ops.attention.logits.score import score_of
from graphattn.ops.attention.step.pairs import PairLogits, attend_pairs

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
    call = InterfaceCall(
        query,
        key,
        value,
        fitted(attention_mask, query.shape[2], key.shape[2]),
        position_bias,
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
        options,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        s_aux,
        softcap,
        dropout,
        _asks_for_weights(kwargs),
    )
    mask = call.mask
    if mask is None or is_sketch(mask) or mask.dim() != 4 or mask.shape[1] == 1:
        return _attend(call)
    if mask.shape[1] != query.shape[1]:
        raise ValueError(
            f"attention_mask must have 1 or {query.shape[1]} heads, got shape {list(mask.shape)}"
        )
    return _attend(call) if call.fits_pairs else _by_head(call)


class InterfaceCall(NamedTuple):
    """One call: its tensors and masks, how its logits are computed, and how weights are used."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    position_bias: Tensor | None
    is_causal: bool
    options: Options
    scale: float
    sink: Tensor | None
    softcap: float | None
    dropout: float
    wants_weights: bool

    @property
    def fits_pairs(self) -> bool:
        """Whether all pairs can be computed if they are many, or their number is unknown."""
        by_products = self.options.mixer == "dot" and self.options.top_k is None
        return by_products or self.query.shape[2] == 1 or torch.compiler.is_compiling()

    def of_head(self, head: int) -> InterfaceCall:
        """Return the call of one head, with its own mask."""
        assert self.mask is not None
        H, Hk = self.query.shape[1], self.key.shape[1]
        one, shared = slice(head, head + 1), slice(head * Hk // H, head * Hk // H + 1)
        bias = self.position_bias
        return self._replace(
            query=self.query[:, one],
            key=self.key[:, shared],
            value=self.value[:, shared],
            mask=self.mask[:, one],
            position_bias=bias if bias is None or bias.shape[1] == 1 else bias[:, one],
            sink=None if self.sink is None else self.sink[one],
        )

    def bias_within(self, keys: slice, of_mask: Tensor | None) -> Tensor | None:
        """Return what is added to the logits of these keys, from the mask and the position bias."""
        if self.position_bias is None:
            return of_mask
        bias = self.position_bias[..., keys]
        return bias if of_mask is None else bias + of_mask

    def logits_of_edges(self) -> dict[str, Any]:
        """Return the arguments of `attention_weights` and of the operation for the logits."""
        given: dict[str, Any] = {"top_k": self.options.top_k}
        if self.sink is not None:
            given["sink"] = self.sink
        if self.options.mixer != "dot":
            sigma = self.options.sigma
            return given | {"sigma": self.scale**-0.5 if sigma is None else sigma}
        if self.softcap is not None:
            given["softcap"] = self.softcap
        return given | {"scale": self.scale}

    def logits_of_pairs(self) -> PairLogits:
        """Return how the logits of all pairs are formed."""
        given = self.logits_of_edges()
        score = score_of(given.get("sigma"), given.get("scale"))
        return PairLogits(score, self.options.top_k, self.softcap, self.sink, self.dropout)


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


def _attend(call: InterfaceCall) -> tuple[Tensor, Tensor | None]:
    query, key, value = call.query, call.key, call.value
    if not query.dtype == key.dtype == value.dtype:  # with autocast they can differ
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out, weights = _attend(call._replace(query=query, key=key, value=value))
        given = call.query.dtype
        return out.to(given), None if weights is None else weights.to(given)
    seen = _seen_or_pairs(call)
    keys = slice(seen.keys.start, seen.keys.stop)
    bias = call.bias_within(keys, seen.bias)
    call = call._replace(key=key[:, :, keys], value=value[:, :, keys])
    if isinstance(seen, Pairs):
        out, weights = _over_pairs(call, seen, bias)
    else:
        out, weights = _over_edges(call, seen, bias)
    if weights is not None:  # 0 for keys that were not read
        weights = torch.nn.functional.pad(weights, (keys.start, key.shape[2] - keys.stop))
    return out.contiguous(), weights


def _seen_or_pairs(call: InterfaceCall) -> SeenEdges | Pairs:
    """Return a graph if that is faster or necessary; else all pairs with a mask."""
    (B, _, Q, _), K, device = call.query.shape, call.key.shape[2], call.query.device
    mask, causal = call.mask, call.is_causal
    window, graph_of = call.options.window, call.options.graph
    if mask is not None and not is_sketch(mask):
        limits = Limits(B, Q, limit_of(window, causal), graph_of)
        if not call.fits_pairs:
            return seen_in_mask(mask, limits)
        traced = Q == 1 or torch.compiler.is_compiling() or mask.shape[1] > 1
        sparse = None if traced else seen_in_mask(mask, limits, most=DENSE)
        return pairs_in_mask(mask, limits) if sparse is None else sparse
    if Q == 1 or (call.position_bias is not None and call.fits_pairs):
        band, valid, n = plain_band(mask, Q, K, causal, window)
        if graph_of is not None or Q == 1 or band.spans(n) > DENSE * n:
            return pairs_in_band(band, Q, n, valid, device, graph_of)
    arguments: dict[str, Any] = {"causal": causal, "window": window, "graph_of": graph_of}
    return seen_through(mask, B, Q, K, device=device, **arguments)


def _over_pairs(
    call: InterfaceCall, seen: Pairs, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    tensors = call.query, call.key, call.value
    logits, weights = call.logits_of_pairs(), None
    out = attend_pairs(*tensors, logits, seen.allowed, bias).out
    if call.wants_weights:  # compute them separately, so that the output is the same, bit for bit
        kept = logits._replace(dropout=0.0)
        weights = attend_pairs(*tensors, kept, seen.allowed, bias, need_weights=True).weights
    return out.transpose(1, 2), weights


def _over_edges(
    call: InterfaceCall, seen: SeenEdges, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    B, H, Q, _ = call.query.shape
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    if seen.packed:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    given = call.logits_of_edges()
    if bias is not None:
        edge_bias = from_pairs(bias, seen.graph, B if seen.packed else 0)
        given["edge_bias"] = edge_bias.expand(*edge_bias.shape[:-1], H)
    given["valid"] = None if seen.valid is None else (None, seen.valid)
    weights = None
    if call.wants_weights:
        edges = attention_weights(q, k, seen.graph, **given)
        weights = to_pairs(edges, seen.graph, B, seen.packed)
    attend = rbf_attention if "sigma" in given else dot_product_attention
    out = attend(q, k, v, seen.graph, dropout=call.dropout, **given)
    return out.reshape(B, Q, H, v.shape[-1]), weights


def _by_head(call: InterfaceCall) -> tuple[Tensor, Tensor | None]:
    """Run every head with its own mask, and so with its own graph."""
    heads = [_attend(call.of_head(head)) for head in range(call.query.shape[1])]
    weights = [of_head for _, of_head in heads if of_head is not None]
    return torch.cat([out for out, _ in heads], dim=2), torch.cat(weights, 1) if weights else None
