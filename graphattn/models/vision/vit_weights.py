"""Load the weights of Hugging Face's ViT and DeiT into our vision transformer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.models.vision.loaded_weights import Model, options_of_mixers, with_weights

# Names in transformers 5 and in earlier versions (as in files of weights), and ours.
_PARTS = (
    (r"(?:vit|deit)\.", ""),
    (r"embeddings\.cls_token$", "embedding.class_token"),
    (r"embeddings\.distillation_token$", "embedding.distillation_token"),
    (r"embeddings\.position_embeddings$", "embedding.positions"),
    (r"embeddings\.patch_embeddings\.projection\.", "embedding.projection."),
    (r"(?:encoder\.)?layers?\.(?=\d)", "blocks."),
    (r"(blocks\.\d+\.)attention\.(?:attention\.)?(?:q_proj|query)\.", r"\1mixer.query_proj."),
    (r"(blocks\.\d+\.)attention\.(?:attention\.)?(?:k_proj|key)\.", r"\1mixer.key_proj."),
    (r"(blocks\.\d+\.)attention\.(?:attention\.)?(?:v_proj|value)\.", r"\1mixer.value_proj."),
    (r"(blocks\.\d+\.)attention\.(?:o_proj|output\.dense)\.", r"\1mixer.output_proj."),
    (r"(blocks\.\d+\.)layernorm_before\.", r"\1mixer_norm."),
    (r"(blocks\.\d+\.)layernorm_after\.", r"\1mlp_norm."),
    (r"(blocks\.\d+\.)(?:mlp\.fc1|intermediate\.dense)\.", r"\1mlp.0."),
    (r"(blocks\.\d+\.)(?:mlp\.fc2|output\.dense)\.", r"\1mlp.2."),
    (r"layernorm\.", "norm."),
    (r"(?:cls_)?classifier\.", "head."),
    (r"distillation_classifier\.", "distillation_head."),
)
_OTHERS = re.compile(r"pooler\.|embeddings\.mask_token$")  # weights without effect on logits


def our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a ViT or DeiT of transformers under the names of a VisionTransformer.

    Raises:
        ValueError: if none of those models has a name.

    Example:
        >>> import torch
        >>> from graphattn.models.vision.vit_weights import our_names
        >>> list(our_names({"vit.encoder.layer.3.layernorm_before.weight": torch.ones(8)}))
        ['blocks.3.mixer_norm.weight']
    """
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        ours = name
        for theirs, here in _PARTS:
            ours = re.sub(rf"^{theirs}", here, ours)
        if _OTHERS.match(ours):
            continue
        if ours.split(".")[0] not in ("embedding", "blocks", "norm", "head", "distillation_head"):
            raise ValueError(
                f"model must be a ViT or DeiT of transformers, but it has a weight {name!r}, which "
                "these do not have"
            )
        if ours.startswith("embedding.") and "projection" not in ours:
            value = value.flatten(0, -2).squeeze(0)  # in transformers they have a batch dimension
        renamed[ours] = value
    return renamed


def from_transformers(cls: type[Model], model: Any, changes: Mapping[str, Any]) -> Model:
    """See :meth:`graphattn.models.VisionTransformer.from_transformers`."""
    _check_class(model)
    weights = our_names(model.state_dict())
    arguments = {**_arguments(model.config, weights), **changes}
    depth, config = as_int("depth", arguments["depth"], 1), model.config
    widths = [config.hidden_size / config.num_attention_heads] * depth
    arguments["mixer_options"] = options_of_mixers(config, arguments, widths)
    return with_weights(cls, arguments, changes, weights)


def _check_class(model: Any) -> None:
    import transformers

    names = (
        "ViTModel",
        "ViTForImageClassification",
        "DeiTModel",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
    )
    if not isinstance(model, tuple(getattr(transformers, name) for name in names)):
        raise ValueError(
            f"model must be an instance of {', '.join(names)}, got {type(model).__name__}"
        )


def _arguments(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the constructor's arguments for a config of transformers."""
    if config.hidden_act != "gelu":
        raise ValueError(f"model must have hidden_act='gelu', got {config.hidden_act!r}")
    dim, hidden = config.hidden_size, config.intermediate_size
    if (width := weights["blocks.0.mixer.query_proj.weight"].shape[0]) != dim:
        raise ValueError(
            f"model must have heads with {dim} features together (hidden_size), got {width}"
        )
    ratio = hidden / dim
    arguments = {
        "image_size": _size(config.image_size),
        "patch_size": _size(config.patch_size),
        "num_classes": len(weights["head.weight"]) if "head.weight" in weights else 0,
        "dim": dim,
        "depth": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "channels": config.num_channels,
        "mlp_ratio": ratio if int(ratio * dim) == hidden else (hidden + 0.5) / dim,
        "dropout": float(config.hidden_dropout_prob),
        "norm_eps": float(config.layer_norm_eps),
        "distillation_token": "embedding.distillation_token" in weights,
    }
    if "distillation_head.weight" in weights:
        arguments["pooling"] = "distilled"
    return arguments


def _size(value: Any) -> int | tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else value
