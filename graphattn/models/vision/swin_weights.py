"""Swin's weights from Hugging Face transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graphattn.models.vision.loaded_weights import Model, options_of_mixers, with_weights

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


def from_transformers(cls: type[Model], model: Any, changes: Mapping[str, Any]) -> Model:
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
