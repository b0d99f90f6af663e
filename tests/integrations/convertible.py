"""Tiny models of every family that `convert` knows, and dense attention to compare them with.

Weights are several times larger than usual, so that attention is far from uniform. Heads are not
grouped, unless asked for: mixers of slices need as many key heads as query heads.
"""

from __future__ import annotations

import math
from typing import Any

import tiny_models
import torch
import transformers
from torch import Tensor, nn

from graphattn.integrations import transformers as gat

V, PAD = tiny_models.VOCABULARY, tiny_models.PAD
SIZES = {**tiny_models.COMMON, **tiny_models.TOKENS}
GPT2 = tiny_models.FAMILIES["gpt2"].options
SLIDING: dict[str, Any] = {
    "sliding_window": 6,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
WITHOUT_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
ESM = {"mask_token_id": 2, "position_embedding_type": "rotary", "token_dropout": True}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("", {}),
    "Mistral": ("", {"sliding_window": 6}),
    "Qwen2": ("", {}),
    "Qwen3": ("", {"head_dim": 8}),
    "Gemma": ("", {"head_dim": 8}),
    "Gemma2": ("", {**SLIDING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}),
    "Gemma3": ("Text", {**SLIDING, "query_pre_attn_scalar": 8}),
    "Granite": ("", {"attention_multiplier": 0.3}),
    "Olmo2": ("", {}),
    "GPTNeoX": ("", {}),
    "GPT2": ("", GPT2),
    "OPT": ("", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("", WITHOUT_DROPOUT),
    "Roberta": ("", WITHOUT_DROPOUT),
    "Electra": ("", {**WITHOUT_DROPOUT, "embedding_size": 32}),
    "Esm": ("", {**WITHOUT_DROPOUT, **ESM}),
    "Esmc": ("", {}),
    "ModernBert": (
        "",
        {
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 3,
            "sep_token_id": 3,
        },
    ),
}
IMAGES = ("ViT", "DeiT")


def is_there(name: str) -> bool:
    """ESM C is younger than the oldest transformers, whose Olmo 2 refuses its own defaults."""
    config = getattr(transformers, f"{name}{(DECODERS.get(name) or [''])[0]}Config", None)
    try:
        return config is not None and config() is not None
    except Exception:
        if name != "Olmo2":
            raise
        return False


NAMES = [name for name in (*DECODERS, *ENCODERS, *IMAGES) if is_there(name)]
GROUPABLE = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Granite")


def model_of(name: str, gain: float = 6.0, seed: int = 0, **changes: Any) -> Any:
    """A tiny model with dense ("eager") attention, in evaluation mode."""
    torch.manual_seed(seed)
    if name in IMAGES:
        config_class = getattr(transformers, f"{name}Config")
        model_class = getattr(transformers, f"{name}ForImageClassification")
        options = {**tiny_models.IMAGES, **WITHOUT_DROPOUT, **changes}
    else:
        infix, sizes = DECODERS.get(name) or ENCODERS[name]
        config_class = getattr(transformers, f"{name}{infix}Config")
        head = {"GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
        model_class = getattr(transformers, name + (head if name in DECODERS else "ForMaskedLM"))
        options = {**(sizes if name == "GPT2" else {**SIZES, **sizes}), **changes}
    if name in GROUPABLE:
        options.setdefault("num_key_value_heads", 4)
    config = config_class(**options)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name:
                parameter.mul_(gain)
            elif "embed" in parameter_name:
                parameter.mul_(20)
            elif "bias" in parameter_name:
                parameter.normal_(std=0.1)
    return model


def inputs_of(name: str, length: int = 13, padding: str | None = "left") -> dict[str, Tensor]:
    """Two samples, the second padded by 4; images have none."""
    generator = torch.Generator().manual_seed(1)
    if name in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.randint(4, V, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    if padding is not None:
        mask[1, slice(0, 4) if padding == "left" else slice(-4, None)] = 0
        tokens[mask == 0] = PAD
    return {"input_ids": tokens, "attention_mask": mask}


def converted(name: str, mixer: str, implementation: str = "sdpa", **options: Any) -> Any:
    """A tiny model whose attention is converted."""
    model = model_of(name)
    gat.register()
    if name != "Gemma2":  # whose softcap "sdpa" does not have
        model.set_attn_implementation(implementation)
    gat.convert(model, mixer=mixer, **options)
    return model


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of real tokens alone."""
    result = tiny_models.logits(model, **inputs)
    mask = inputs.get("attention_mask")
    return result if mask is None else result[mask.bool()]


def attention_of(name: str) -> type[nn.Module]:
    """The class of a model's attention modules."""
    from graphattn.integrations.transformers.conversion.modules import attention_modules

    return type(attention_modules(model_of(name))[0][1])


# Dense attention, written down once more: what "eager" would be with another score.


def visible(module: nn.Module, mask: Tensor | None, scores: Tensor) -> Tensor:
    if mask is not None:
        return scores.masked_fill(mask[..., : scores.shape[-1]] < 0, -math.inf)
    if getattr(module, "is_causal", False):
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(future, -math.inf)
    return scores


def dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    *,
    sigma: float | None = None,
    of_keys: bool = False,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend by distance, or by dot product if `sigma` is None; `of_keys` averages the keys."""
    assert scaling is not None
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1).double() for x in (key, value))
    query = query.double()
    if sigma is None:
        scores = query @ key.mT * scaling
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    else:
        if scaling == 1.0:  # ESM and OPT have scaled their queries already
            query = query * query.shape[-1] ** 0.5
        distance = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        scores = -distance / (2 * sigma**2)
    weights = visible(module, mask, scores).softmax(-1).nan_to_num(0)
    out = weights @ (key if of_keys else value)
    return out.to(torch.float32).transpose(1, 2).contiguous(), None


def make_identity(model: nn.Module, *, queries_and_keys: bool) -> None:
    """Turn the value projections into the identity; queries, keys and their norms too if asked."""
    D = 8
    for module in model.modules():
        for norm in ("q_norm", "k_norm"):
            if queries_and_keys and hasattr(module, norm):
                setattr(module, norm, nn.Identity())
        names = ["v_proj", "value", *(["q_proj", "k_proj", "query", "key"] * queries_and_keys)]
        for name in names:
            linear = getattr(module, name, None)
            if isinstance(linear, nn.Linear):
                set_rows(linear, torch.arange(32), torch.eye(32))
        for name in ("c_attn", "Wqkv", "query_key_value"):
            if not hasattr(module, name):
                continue
            rows = torch.arange(96)
            by_head = rows.view(4, 3, D).transpose(0, 1) if name == "query_key_value" else rows
            parts = by_head.reshape(3, 32)
            for part in range(0 if queries_and_keys else 2, 3):
                set_rows(getattr(module, name), parts[part], torch.eye(32))


def set_rows(linear: Any, rows: Tensor, matrix: Tensor) -> None:
    weight = linear.weight if isinstance(linear, nn.Linear) else linear.weight.T
    with torch.no_grad():
        weight[rows] = matrix
        if linear.bias is not None:
            linear.bias[rows] = 0
