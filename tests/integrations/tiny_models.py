"""Tiny random models of other people's families, and inputs for them.

Every model has two or three layers, width 32 and four heads (two of keys and values where the
family groups them). Its weights are ten times as large as usual, so that attention is far from
uniform and a wrong mask changes what comes out. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from graphattn.integrations import transformers as gat

# The name of the argument of models that takes a cache; 5.24 renamed it.
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
VOCABULARY = 50
PAD, MASK, START = 1, 2, 3  # tokens from 4 on are words
WORDS = range(4, VOCABULARY)
WINDOW = 6  # Mistral's, Gemma's and GPT-OSS's; ModernBERT sees half of it on each side

Kind = Literal["decoder", "encoder", "vision", "encoder-decoder"]


@dataclass(frozen=True)
class Family:
    """Describes a tiny model of one family: its classes, options and scale of weights."""

    title: str
    kind: Kind
    config: str  # class names, looked up in the installed version
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""  # what its attention has beside a plain mask
    gain: float = 10.0  # how many times larger than usual the weights are


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
TOKENS: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
GROUPED: dict[str, Any] = {**COMMON, **TOKENS, "num_key_value_heads": 2}
MASKED: dict[str, Any] = {**COMMON, "pad_token_id": PAD}
IMAGES: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k not in ("vocab_size", "max_position_embeddings")},
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
ALTERNATING = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
BOTH_SIDES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": None,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "decoder", "LlamaConfig", "LlamaForCausalLM", GROUPED),
    "qwen2": Family("Qwen2", "decoder", "Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": Family(
        "Qwen3", "decoder", "Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}
    ),
    "mistral": Family(
        "Mistral",
        "decoder",
        "MistralConfig",
        "MistralForCausalLM",
        {**GROUPED, "sliding_window": WINDOW},
        note="sliding window",
    ),
    "gemma2": Family(
        "Gemma 2",
        "decoder",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
        note="softcap, alternating windows",
    ),
    "gemma3": Family(
        "Gemma 3",
        "decoder",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 8},
        note="alternating windows",
    ),
    "gpt2": Family(
        "GPT-2",
        "decoder",
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **TOKENS,
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
    "gpt_neox": Family(
        "GPT-NeoX", "decoder", "GPTNeoXConfig", "GPTNeoXForCausalLM", {**COMMON, **TOKENS}
    ),
    "opt": Family(
        "OPT",
        "decoder",
        "OPTConfig",
        "OPTForCausalLM",
        {
            **{k: v for k, v in COMMON.items() if k != "intermediate_size"},
            **TOKENS,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
    ),
    "phi3": Family("Phi-3", "decoder", "Phi3Config", "Phi3ForCausalLM", GROUPED),
    "gpt_oss": Family(
        "GPT-OSS",
        "decoder",
        "GptOssConfig",
        "GptOssForCausalLM",
        {**GROUPED, **ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
        note="sinks, alternating windows",
    ),
    "llama4": Family(
        "Llama 4 (text)",
        "decoder",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [],
        },
        note="chunked attention",
    ),
    "bert": Family("BERT", "encoder", "BertConfig", "BertForMaskedLM", MASKED),
    "roberta": Family("RoBERTa", "encoder", "RobertaConfig", "RobertaForMaskedLM", MASKED),
    "distilbert": Family(
        "DistilBERT",
        "encoder",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 128,
            "pad_token_id": PAD,
        },
    ),
    "esm": Family(
        "ESM-2",
        "encoder",
        "EsmConfig",
        "EsmForMaskedLM",
        {
            **MASKED,
            "mask_token_id": MASK,
            "position_embedding_type": "rotary",
            "token_dropout": True,
        },
    ),
    "esmc": Family(
        "ESM C",
        "encoder",
        "EsmcConfig",
        "EsmcForMaskedLM",
        {**MASKED, "mask_token_id": MASK},
        note="`sequence_id`",
    ),
    "modernbert": Family(
        "ModernBERT",
        "encoder",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {
            **COMMON,
            "num_hidden_layers": 3,
            "pad_token_id": PAD,
            "cls_token_id": START,
            "sep_token_id": START,
            "bos_token_id": None,
            "eos_token_id": None,
            "local_attention": WINDOW,
            "global_attn_every_n_layers": 2,
        },
        note="local windows",
    ),
    "vit": Family("ViT", "vision", "ViTConfig", "ViTForImageClassification", IMAGES),
    "deit": Family("DeiT", "vision", "DeiTConfig", "DeiTForImageClassification", IMAGES),
    "bart": Family(
        "BART",
        "encoder-decoder",
        "BartConfig",
        "BartForConditionalGeneration",
        {**BOTH_SIDES, "max_position_embeddings": 128},
        note="cross attention",
    ),
    "whisper": Family(
        "Whisper",
        "encoder-decoder",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**BOTH_SIDES, "num_mel_bins": 6, "max_source_positions": 16, "max_target_positions": 96},
        note="cross attention",
    ),
    "t5": Family(
        "T5",
        "encoder-decoder",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "pad_token_id": PAD,
            "eos_token_id": None,
            "decoder_start_token_id": START,
        },
        note="`position_bias`, cross attention",
        gain=1.5,
    ),
}


@cache
def uses_the_interface(name: str) -> bool:
    """Whether the installed transformers has the family and lets it choose its attention."""
    model = getattr(transformers, FAMILIES[name].model, None)
    config = getattr(transformers, FAMILIES[name].config, None)
    if model is None or config is None:
        return False
    source = inspect.getsource(importlib.import_module(model.__module__))
    return "ALL_ATTENTION_FUNCTIONS" in source


def arguments_of_attention() -> dict[str, set[str]]:
    """Names that any family of the installed version hands to its attention, and which families."""
    families_by_argument: dict[str, set[str]] = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if "attention_interface(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "attention_interface"
            ):
                for keyword in node.keywords:
                    if keyword.arg is not None:
                        families_by_argument.setdefault(keyword.arg, set()).add(path.parent.name)
    return families_by_argument


def families(*kinds: Kind) -> list[str]:
    """Names of the families of these kinds (all, if none is given) in the installed version."""
    return [
        name
        for name, family in FAMILIES.items()
        if (not kinds or family.kind in kinds) and uses_the_interface(name)
    ]


def tiny(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    implementation: str = "eager",
    seed: int = 0,
    gain: float | None = None,
    **options: Any,
) -> Any:
    """A model of a family in evaluation mode; `options` go into its config."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**family.options, **options})
    config._attn_implementation = implementation
    if dtype == torch.float64:  # grouped products of experts know no float64
        config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for name_, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # experts are torch.empty in some versions; tokens of images start at zero, and
                # the gradient of a normalised zero is huge
                if "experts" in name_ or not parameter.any():
                    parameter.normal_(std=0.02)
                parameter.mul_(family.gain if gain is None else gain)
            elif "sinks" in name_ or "bias" in name_:
                parameter.normal_(std=0.5)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
    return model.to(dtype).eval()


def inputs(
    name: str,
    *,
    batch: int = 2,
    length: int = 16,
    padding: Literal["left", "right"] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
) -> dict[str, Tensor]:
    """Draw the arguments of a model's call; `padding` leaves every second item 5 tokens shorter."""
    generator = torch.Generator().manual_seed(seed)
    kind = FAMILIES[name].kind
    if kind == "vision":
        pixels = torch.randn(batch, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels.to(dtype)}
    tokens = torch.randint(WORDS.start, VOCABULARY, (batch, length), generator=generator)
    arguments = {"input_ids": tokens}
    if padding is not None:
        mask = torch.ones_like(tokens)
        mask[1::2, slice(None, 5) if padding == "left" else slice(-5, None)] = 0
        tokens[mask == 0] = PAD
        arguments["attention_mask"] = mask
    if kind == "encoder-decoder":
        arguments["decoder_input_ids"] = torch.randint(
            WORDS.start, VOCABULARY, (batch, length - 3), generator=generator
        )
    if name == "whisper":  # hears 32 frames instead of reading; a mask of frames changes nothing
        sound = torch.randn(batch, 6, 32, generator=generator, dtype=torch.float64)
        arguments = {
            "input_features": sound.to(dtype),
            "decoder_input_ids": arguments["decoder_input_ids"],
        }
    return arguments


def real(outputs: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Rows [M, ...] of `outputs` [B, N, ...] that belong to real tokens.

    Eager attention averages all values for a padded query, we give 0: only real rows compare.
    """
    mask = given.get("attention_mask")
    if mask is None or outputs.shape[:2] != mask.shape:
        return outputs.flatten(0, 1)
    return outputs[mask.bool()]


def labels(given: dict[str, Tensor]) -> Tensor:
    """Targets for a loss: -100 where a row or the row before it is padding.

    A causal model predicts the first real token from the padded one before it.
    """
    if "pixel_values" in given:
        return torch.arange(len(given["pixel_values"])) % 5
    tokens = given.get("decoder_input_ids", given.get("input_ids"))
    assert tokens is not None
    targets = tokens.clone()
    mask = given.get("attention_mask")
    if mask is not None and mask.shape == targets.shape:
        before = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=0)
        targets[(mask == 0) | (before == 0)] = -100
    return targets


def twins(name: str, **options: Any) -> tuple[Any, Any]:
    """Two models with the same weights: one with eager attention, one with ours.

    Both are built with their implementation, since some families of older versions cannot change.
    """
    gat.register()
    eager = tiny(name, implementation="eager", **options)
    ours = tiny(name, implementation="graphattn", **options)
    ours.load_state_dict(eager.state_dict())
    assert eager.config._attn_implementation == "eager"
    assert ours.config._attn_implementation == "graphattn"
    return eager, ours


def logits(model: Any, **given: Any) -> Tensor:
    """Logits without a gradient."""
    with torch.no_grad():
        result: Tensor = model(**given).logits
    return result


def gradients(model: Any, given: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """Gradient of the model's own loss with respect to every parameter that takes part."""
    model.zero_grad()
    model(**given, labels=labels(given), **more).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected number (of 1, if all are less)."""
    assert actual.shape == expected.shape
    size = max(1.0, float(expected.abs().max()))
    return float((actual - expected).abs().max()) / size


@contextmanager
def exact_softmax() -> Iterator[None]:
    """Keep eager attention in float64: many families take its softmax in float32 whatever comes.

    There the lowest float64, which stands for a hidden key, becomes an infinity: a row of padding
    is NaN, and every row after it.
    """
    narrow = torch.nn.functional.softmax

    def softmax(x: Tensor, dim: int | None = None, *args: Any, dtype: Any = None) -> Tensor:
        return narrow(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    torch.nn.functional.softmax = softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.softmax = narrow
