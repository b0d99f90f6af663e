"""Error messages for arguments that have another name here, or belong elsewhere.

Users know names from torch, timm, Hugging Face and PyTorch Geometric. For the names below, the
error says ours; for other unknown names, it lists those that are allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence

# Our name, then the names of other libraries for the same thing.
_RENAMED = {
    "attention_dropout": "attn_dropout attn_drop attn_drop_rate attn_pdrop dropout dropout_p "
    "attention_probs_dropout_prob",
    "base": "theta rope_theta rotary_base rotary_emb_base",
    "bias": "qkv_bias use_bias attention_bias add_bias proj_bias attn_bias",
    "context": "memory encoder_hidden_states key_value_states cond key value kv",
    "context_dim": "kdim vdim kv_dim cross_attention_dim encoder_hidden_size encoder_dim cond_dim",
    "depth": "num_layers n_layers n_layer num_hidden_layers num_encoder_layers num_blocks layers",
    "dim": "embed_dim d_model hidden_size n_embd embedding_dim hidden_dim model_dim width "
    "dim_model in_channels out_channels in_features out_features hidden_channels channels head_dim",
    "drop_path": "drop_path_rate stochastic_depth stochastic_depth_prob drop_connect_rate",
    "dropout": "drop dropout_p drop_rate hidden_dropout_prob hidden_dropout resid_pdrop embd_pdrop "
    "proj_drop proj_drop_rate resid_dropout",
    "edge_bias": "position_bias relative_position_bias rel_pos_bias attn_bias",
    "edge_features": "edge_attr edge_attrs edge_dim edge_feats edge_feat",
    "edge_hidden": "hidden xi edge_hidden_dim",
    "graph": "edge_index adj adj_t adjacency adj_matrix token_graph",
    "heads": "num_heads n_heads n_head nhead nheads num_attention_heads head h",
    "images": "pixel_values image imgs img x inputs input",
    "init_sigma": "sigma bandwidth length_scale lengthscale",
    "kv_heads": "num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_num_heads",
    "mixer": "layer attention attn self_attn attn_layer mixers",
    "positions": "position_ids pos input_pos token_positions position",
    "qk_norm": "qk_layernorm qk_normalization use_qk_norm query_key_norm",
    "radius": "window window_size kernel_size",
    "rank": "r lambda_rank",
    "return_attention_weights": "need_weights output_attentions return_attn return_weights "
    "average_attn_weights",
    "sink": "sinks attention_sink attention_sinks attn_sink use_sink learnable_sink s_aux",
    "softcap": "soft_cap logit_softcap logits_softcap logits_soft_cap attn_logit_softcapping "
    "attn_softcap attention_softcap softclamp logits_softclamp_value",
    "rope": "rotary use_rope rotary_emb use_rotary rotary_embedding pos_emb rotary_embeddings",
    "step_size": "eta lr step step_length",
    "tokens": "input_ids src input inputs x ids",
    "top_k": "topk k num_neighbors top_k_neighbors",
    "update": "update_rule",
    "window": "window_size sliding_window attention_window local_window_size",
    "window_size": "window",
    "vocab_size": "num_tokens ntoken n_vocab num_embeddings vocabulary_size",
    "x": "hidden_states src inputs_embeds input inputs query q tokens",
}
_NOTES = {
    "average_attn_weights": "weights come per head",
    "in_channels": "output and input have one width",
    "out_channels": "output and input have one width",
}

_NOTES_OF_OURS = {"radius": "patches on each side, so that radius=1 is a window of 3 x 3"}

_VALID = (
    "pass in the call valid=~{name} (valid is True where a token is real, {name} is True where it "
    "is not)"
)
_GRAPH = (
    "say it in the graph, the second argument of every call: ga.from_mask(mask) with mask True "
    "where a token may look"
)
_MASK = (
    _GRAPH + "; a mask of padding is valid=, True where a token is real "
    "(torch.nn.MultiheadAttention's masks are True where it must not look: pass ~{name})"
)
_WINDOW = "say it in the graph: ga.causal_window_graph(N, window), ga.window_path_graph(N, window)"
_CAUSAL = "say it in the graph: ga.causal_graph(N), ga.causal_window_graph(N, window)"
_DROPOUT = (
    "attention layers take attention_dropout=, on weights; PreNormBlock and SequenceEncoder "
    "dropout=, on features; consensus has no weights to drop: leave it out"
)
_PATH = "stochastic depth belongs to a block: PreNormBlock takes drop_path="
_LENGTH = "no length is fixed: leave it out"
_EDGES = (
    "what an edge holds becomes a bias per head in the call of an attention layer: "
    "edge_bias=ga.nn.EdgeProjection(features, heads)({name})"
)
_BIAS = "attention layers take it in their call: edge_bias= [E, heads]"
_CACHE = "generation is cache = layer.init_cache(batch, window) and layer.step(x, cache)"
_PLACE = "leave it out and convert the layer: layer.to({name})"
_MLP = "mlp_ratio= of PreNormBlock and SequenceEncoder sets the perceptron's width, in units of dim"
_FIXED_BLOCK = (
    "PreNormBlock normalises first, PostNormBlock last; both take norm='layer' or 'rms' and "
    "activation='gelu' or 'relu2'"
)

# Names without an argument of ours: what to do instead.
_ADVICE = {
    "batch_first": "x is always batch first, [batch, tokens, dim]: leave it out",
    "key_padding_mask": _VALID,
    "src_key_padding_mask": _VALID,
    "padding_mask": _VALID,
    "pad_mask": _VALID,
    "attention_mask": "a mask of padding [batch, tokens] is valid=attention_mask.bool() in the "
    "call (True where a token is real); a mask of pairs [N, M] is the graph ga.from_mask(mask)",
    "encoder_attention_mask": "valid=(None, encoder_attention_mask.bool()) in the call",
    "attn_mask": _MASK,
    "src_mask": _MASK,
    "mask": _MASK,
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "is_decoder": _CAUSAL,
    "window": _WINDOW,
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "attention_window": _WINDOW,
    "local_window_size": _WINDOW,
    "dropout": _DROPOUT,
    "attn_dropout": _DROPOUT,
    "attention_dropout": _DROPOUT,
    "attn_drop": _DROPOUT,
    "attn_drop_rate": _DROPOUT,
    "attn_pdrop": _DROPOUT,
    "attention_probs_dropout_prob": _DROPOUT,
    "drop_path": _PATH,
    "drop_path_rate": _PATH,
    "stochastic_depth": _PATH,
    "max_seq_len": _LENGTH,
    "max_len": _LENGTH,
    "max_position_embeddings": _LENGTH,
    "block_size": _LENGTH,
    "context_length": _LENGTH,
    "seq_len": _LENGTH,
    "n_positions": _LENGTH,
    "edge_attr": _EDGES,
    "edge_features": "consensus layers take them, made with edge_features=F: leave it out here",
    "edge_weight": _EDGES,
    "edge_bias": _BIAS,
    "edge_dim": _EDGES,
    "position_bias": _BIAS,
    "relative_position_bias": _BIAS,
    "past_key_value": _CACHE,
    "past_key_values": _CACHE,
    "use_cache": _CACHE,
    "cache": _CACHE,
    "device": _PLACE,
    "dtype": _PLACE,
    "dim_feedforward": _MLP,
    "intermediate_size": _MLP,
    "ffn_dim": _MLP,
    "d_ff": _MLP,
    "n_inner": _MLP,
    "mlp_dim": _MLP,
    "activation": _FIXED_BLOCK,
    "hidden_act": _FIXED_BLOCK,
    "act_layer": _FIXED_BLOCK,
    "norm_first": _FIXED_BLOCK,
    "norm_layer": _FIXED_BLOCK,
    "layer_norm_eps": _FIXED_BLOCK,
    "rope_theta": "rope=ga.nn.RotaryEmbedding(dim // heads, base=rope_theta)",
    "rope_scaling": "rope= takes a ga.nn.RotaryEmbedding, which knows base= and no scaling yet",
    "qk_norm": "queries and keys are not normalised: leave it out",
    "qk_scale": "dot products are scaled by 1 / sqrt(dim / heads): leave it out",
    "scale": "dot products are scaled by 1 / sqrt(dim / heads): leave it out",
    "add_bias_kv": "there is no such key and value: leave it out",
    "add_zero_attn": "a token without edges gets zeros: leave it out",
    "add_self_loops": "the graph says it: self_loops=True of its builder",
    "concat": "heads are always concatenated and projected: leave it out",
    "batch": "the graph says it: ga.batch([...]) of one graph per sequence, or "
    "ga.from_edge_index(edge_index, N, batch=batch)",
    "cu_seqlens": "the graph says it: ga.batch([...]) of one graph per sequence",
    "labels": "the loss is a function: ga.train.masked_token_loss(logits, tokens, masked)",
    "return_dict": "outputs are tensors: leave it out",
    "value": "keys and values come from one tensor: context=, or x itself",
}


def refuse_unknown(
    where: str,
    unknown: Iterable[str],
    allowed: Collection[str],
    elsewhere: tuple[str, Collection[str]] = ("", ()),
    advice: Callable[[str], str | None] = lambda _: None,
) -> TypeError:
    """Return the error that lists the unknown arguments and says what to do.

    Args:
        where: for a constructor "KrauseAttention(...)", for a call "the call of KrauseAttention".
        unknown: the names that were given.
        allowed: the names that are allowed.
        elsewhere: for a call ("the constructor", its argument names), for a constructor ("the
            call", names).
        advice: the class's own advice on a name, or None.
    """
    advices = "; none ".join(
        f"{name!r}: {_answer(name, allowed, elsewhere, advice)}" for name in unknown
    )
    takes = f"It takes {', '.join(allowed)}" if allowed else "It takes none"
    return TypeError(
        f"{where} has no argument {advices}{'' if advices.endswith('?') else '.'} {takes}"
    )


def refuse_missing(where: str, missing: Collection[str], allowed: Sequence[str]) -> TypeError:
    """Return the error that says which arguments of a call are missing, and what a graph is."""
    needs = [f"the argument {name!r}" for name in missing if name != "graph"]
    if "graph" in missing:
        place = ("first", "second", "third")[allowed.index("graph")]
        tokens = "x.shape[-2]" if "x" in allowed else "num_tokens"
        needs.insert(0, f"a graph as its {place} argument, for instance ga.causal_graph({tokens})")
    return TypeError(f"{where} needs {', and '.join(needs)}. It takes {', '.join(allowed)}")


def _answer(
    name: str,
    allowed: Collection[str],
    elsewhere: tuple[str, Collection[str]],
    advice: Callable[[str], str | None],
) -> str:
    """Return advice for an unknown argument."""
    key = name.lower()
    if key == "head_dim" and "heads" in allowed:
        return "a head is dim / heads wide: leave it out"
    other, names = elsewhere
    ours = [name for name, others in _RENAMED.items() if key in others.split()]
    if here := [name for name in ours if name in allowed]:
        note = _NOTES.get(key) or _NOTES_OF_OURS.get(here[0])
        return f"here it is called {here[0]!r}" + (f" ({note})" if note else "")
    if name in names:
        return f"it is an argument of {other}"
    if of_class := [said for called in (name, *ours) if (said := advice(called))]:
        return of_class[0]
    if key in _ADVICE:
        return _ADVICE[key].format(name=name)
    if there := [name for name in ours if name in names]:
        return f"it is called {there[0]!r}, an argument of {other}"
    if known := [_ADVICE[name] for name in ours if name in _ADVICE]:
        return known[0].format(name=name)
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else "nothing here is called so"
