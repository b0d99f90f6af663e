"""Load weights of Hugging Face's ViT, DeiT and Swin into our vision models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_int
from graphattn.models.mixers import KINDS, one_per_block

Model = TypeVar("Model", bound=nn.Module)
MIXING = (
    ".mixer.",
    ".position_bias.",
)  # parameters that another mixer may lack, or have in addition


def with_weights(
    cls: type[Model],
    arguments: Mapping[str, Any],
    changes: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> Model:
    """Make a model in evaluation mode, with the dtype and device of its `weights`.

    Args:
        cls: class of the model.
        arguments: all arguments of its constructor, including `changes`.
        changes: arguments that the caller has set. Without a `mixer` among them, all parameters
            come from `weights`, and the state of the random number generator does not change.
        weights: weights under the names of `cls`. Those of projections that a mixer does not have
            are ignored. Parameters of a mixer without a weight keep their random values, but a bias
            becomes 0 if its projection has a weight and no bias.

    Raises:
        ValueError: if, outside of mixers, a weight has no parameter, or a parameter has no weight.
    """
    with torch.random.fork_rng(devices=[], enabled="mixer" not in changes):
        ours = cls(**arguments)
    ours.to(weights["norm.weight"].device, weights["norm.weight"].dtype)
    parameters = ours.state_dict()
    if surplus := [name for name in weights if name not in parameters and not _mixes(name)]:
        raise ValueError(
            "changes must keep the shape of the model, but with them it has no parameter for the "
            f"weight {surplus[0]!r}"
        )
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in weights:
                _copy(name, weights[name], parameter)
            elif not _mixes(name):
                raise ValueError(
                    "changes must keep the shape of the model, but the loaded weights have none "
                    f"for the parameter {name!r}"
                )
            elif name.endswith("_proj.bias") and name.removesuffix("bias") + "weight" in weights:
                parameter.zero_()
    return ours.eval()


def _mixes(name: str) -> bool:
    return any(part in name for part in MIXING)


def _copy(name: str, value: Tensor, parameter: nn.Parameter) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"changes must keep the shape of the model: the loaded weight {name!r} has shape "
            f"{list(value.shape)}, the parameter has {list(parameter.shape)}"
        )
    parameter.copy_(value)


def options_of_mixers(
    config: Any, arguments: Mapping[str, Any], widths: Sequence[float]
) -> dict[str, Any]:
    """Return the options of the mixers: those given, dropout of `config`, and Krause's bandwidth.

    `widths` are the numbers of features per head, for every block.
    """
    options = dict(arguments.get("mixer_options") or {})
    entries = one_per_block(arguments.get("mixer", "dot"), len(widths))
    taken = {o for entry in entries if isinstance(entry, str) for o in KINDS[entry].options}
    if config.attention_probs_dropout_prob > 0 and "attention_dropout" in taken:
        options.setdefault("attention_dropout", float(config.attention_probs_dropout_prob))
    if "krause" in entries:  # so that -|q - k|^2 / (2 sigma^2) contains q k / sqrt(D)
        sigmas = [
            width**0.25 if entry == "krause" else None
            for entry, width in zip(entries, widths, strict=True)
        ]
        options.setdefault("init_sigma", sigmas)
    return options


# ViT and DeiT.

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


def vit_from_transformers(cls: type[Model], model: Any, changes: Mapping[str, Any]) -> Model:
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


# Swin.

# Names of parameters in transformers, and ours; `{}` stands for the stage and the block.
BLOCK = {
    "layernorm_before": "mixer_norm",
    "layernorm_after": "mlp_norm",
    "attention.q_proj": "mixer.query_proj",
    "attention.k_proj": "mixer.key_proj",
    "attention.v_proj": "mixer.value_proj",
    "attention.o_proj": "mixer.output_proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
    # Before transformers rewrote the model:
    "attention.self.query": "mixer.query_proj",
    "attention.self.key": "mixer.key_proj",
    "attention.self.value": "mixer.value_proj",
    "attention.output.dense": "mixer.output_proj",
    "intermediate.dense": "mlp.0",
    "output.dense": "mlp.2",
}
AROUND = {
    "embeddings.patch_embeddings.projection": "patches",
    "embeddings.norm": "patch_norm",
    "layernorm": "norm",
    "classifier": "head",
}
IN_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.blocks\.(\d+)\.(.+)\.(weight|bias)")
TABLE = re.compile(r"encoder\.layers\.(\d+)\.blocks\.(\d+)\..*\.relative_position_bias_table")
MERGING = re.compile(r"encoder\.layers\.(\d+)\.downsample\.(.+)")


def swin_from_transformers(cls: type[Model], model: Any, changes: Mapping[str, Any]) -> Model:
    """See :meth:`graphattn.models.SwinTransformer.from_transformers`."""
    arguments = {**arguments_of(model), **changes}
    config = model.config
    if list(arguments["depths"]) != list(config.depths):
        raise ValueError(
            f"changes must keep the shape of the model: depths must be {tuple(config.depths)}, got "
            f"{arguments['depths']!r}"
        )
    widths = [
        config.embed_dim * 2**stage / config.num_heads[stage]
        for stage, depth in enumerate(config.depths)
        for _ in range(depth)
    ]
    arguments["mixer_options"] = options_of_mixers(config, arguments, widths)
    return with_weights(cls, arguments, changes, weights_of(model))


def arguments_of(model: Any) -> dict[str, Any]:
    """Return the constructor's arguments for a Swin of transformers; ValueError for other
    models."""
    import transformers

    if not isinstance(model, transformers.SwinModel | transformers.SwinForImageClassification):
        raise ValueError(
            "model must be a transformers.SwinModel or SwinForImageClassification, got "
            f"{type(model).__name__}"
        )
    config = model.config
    needed = {
        "hidden_act": ("gelu", config.hidden_act),
        "layer_norm_eps": (1e-5, config.layer_norm_eps),
        "use_absolute_embeddings": (False, config.use_absolute_embeddings),
    }
    for name, (wanted, got) in needed.items():
        if got != wanted:
            raise ValueError(f"model.config.{name} must be {wanted!r}, got {got!r}")
    patch = config.patch_size
    if isinstance(patch, list | tuple):
        if len(set(patch)) > 1:
            raise ValueError(f"model.config.patch_size must be one number, got {patch!r}")
        patch = patch[0]
    arguments = {
        "image_size": config.image_size,
        "patch_size": patch,
        "num_classes": len(getattr(getattr(model, "classifier", None), "weight", ())),
        "dim": config.embed_dim,
        "depths": tuple(config.depths),
        "heads": tuple(config.num_heads),
        "window_size": config.window_size,
        "channels": config.num_channels,
        "mlp_ratio": config.mlp_ratio,
        "dropout": config.hidden_dropout_prob,
        "drop_path": config.drop_path_rate,
    }
    _check_windows(config, patch)
    return arguments


def _check_windows(config: Any, patch: int) -> None:
    """Raise an error for grids smaller than a window, with which transformers fails, too."""
    size = config.image_size
    sides = size if isinstance(size, list | tuple) else (size, size)
    smallest = min(-(-side // patch) for side in sides)
    for stage in range(len(config.depths)):
        if smallest < config.window_size:
            raise ValueError(
                "model.config.window_size must be at most the number of tokens along each axis of "
                f"every stage, got {config.window_size} with {smallest} tokens along an axis of "
                f"stage {stage}. Such a model cannot run in transformers either, because its table "
                "of biases does not fit"
            )
        smallest = (smallest + 1) // 2


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the state dict of a Swin of transformers under the names of this library."""
    depths = model.config.depths
    first = [sum(depths[:stage]) for stage in range(len(depths))]
    renamed: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("swin.")
        if name.endswith("relative_position_index") or name == "embeddings.mask_token":
            continue
        if match := TABLE.fullmatch(name):
            stage, block = int(match[1]), int(match[2])
            # Rows are indexed by target minus source there, by source minus target here.
            renamed[f"blocks.{first[stage] + block}.position_bias.table"] = weight.flip(0)
        elif match := IN_BLOCK.fullmatch(name):
            stage, block = int(match[1]), int(match[2])
            renamed[f"blocks.{first[stage] + block}.{BLOCK[match[3]]}.{match[4]}"] = weight
        elif match := MERGING.fullmatch(name):
            renamed[f"merges.{match[1]}.{match[2]}"] = weight
        else:
            part, kind = name.rsplit(".", 1)
            renamed[f"{AROUND[part]}.{kind}"] = weight
    return renamed
