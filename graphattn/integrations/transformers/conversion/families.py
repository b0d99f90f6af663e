"""Parts of the attention modules of each model family: the table that `convert` reads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

# transformers renamed its argument in 5.24: past_key_values is cache; GPT-2 had layer_past before.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


@dataclass(frozen=True)
class Family:
    """How the attention modules of some models are built.

    Args:
        query, key, value: names of the projections; of one and the same where they are fused.
        output: name of the output projection; None where it lives outside the module (BERT).
        head_dim: name of the attribute that holds D.
        fused: how a fused projection's features are laid out: "thirds", all queries, then all
            keys, then all values; or "heads", the three of every head side by side.
        norms: "head" or "full", where queries and keys pass `q_norm` and `k_norm`: over the
            features of a head, or over all of them; None for none. A module without them has none.
        scale: what dot products are multiplied by: the module's `scaling`, or 1 / sqrt(D).
        attention_dropout: name of the dropout of weights: a number or an nn.Dropout.
        output_dropout: name of what follows the output projection inside the module, if anything.
    """

    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str | None = "o_proj"
    head_dim: str = "head_dim"
    fused: Literal["thirds", "heads"] | None = None
    norms: Literal["head", "full"] | None = None
    scale: Literal["scaling", "head_dim"] = "scaling"
    attention_dropout: str = "attention_dropout"
    output_dropout: str | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the query, key and value projections, each once."""
        return tuple(dict.fromkeys((self.query, self.key, self.value)))


SEPARATE = Family()
BERT = Family(
    "query", "key", "value", None, head_dim="attention_head_size", attention_dropout="dropout"
)
FAMILIES: dict[str, Family] = {
    # decoders with rotary positions
    "LlamaAttention": SEPARATE,
    "MistralAttention": SEPARATE,
    "Qwen2Attention": SEPARATE,
    "Qwen3Attention": Family(norms="head"),
    "GemmaAttention": SEPARATE,
    "Gemma2Attention": SEPARATE,
    "Gemma3Attention": Family(norms="head"),
    "GraniteAttention": SEPARATE,
    "Olmo2Attention": Family(norms="full"),
    "GPTNeoXAttention": Family(
        *("query_key_value",) * 3, output="dense", head_dim="head_size", fused="heads"
    ),
    # decoders without
    "GPT2Attention": Family(
        *("c_attn",) * 3,
        output="c_proj",
        fused="thirds",
        attention_dropout="attn_dropout",
        output_dropout="resid_dropout",
    ),
    "OPTAttention": Family(output="out_proj", attention_dropout="dropout"),
    # encoders
    "BertSelfAttention": BERT,
    "RobertaSelfAttention": BERT,
    "XLMRobertaSelfAttention": BERT,
    "CamembertSelfAttention": BERT,
    "ElectraSelfAttention": BERT,
    "EsmSelfAttention": replace(BERT, scale="head_dim"),
    "EsmcAttention": Family(norms="full"),
    "ModernBertAttention": Family(
        *("Wqkv",) * 3, output="Wo", fused="thirds", scale="head_dim", output_dropout="out_drop"
    ),
    # vision
    "ViTAttention": SEPARATE,
    "DeiTAttention": SEPARATE,
    # transformers before 5.6
    "ViTSelfAttention": replace(BERT, attention_dropout="dropout_prob"),
    "DeiTSelfAttention": replace(BERT, attention_dropout="dropout_prob"),
}


def family_of(module: nn.Module) -> Family | None:
    """Return the family of a module; None for one whose `forward` is not of a class in the table.

    A subclass that keeps the `forward` of a known class is of its family.
    """
    for base in type(module).__mro__:
        known = base.__name__ in FAMILIES and base.__module__.startswith("transformers.")
        if known and getattr(base, "forward", None) is type(module).forward:
            return FAMILIES[base.__name__]
    return None


def missing_parts(module: nn.Module, family: Family) -> list[str]:
    """Names the table has and the module lacks: another version of the family."""
    names: list[str | None] = [*family.projections, family.output, family.head_dim]
    names += [family.attention_dropout, family.output_dropout, "config"]
    if family.scale == "scaling":
        names.append("scaling")
    return [name for name in names if name is not None and not hasattr(module, name)]


def rotation_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The function by which the model rotates queries and keys; None without rotary positions."""
    if "position_embeddings" not in argument_names(module):
        return None
    if getattr(module, "position_embedding_type", "rotary") != "rotary":  # ESM-1 has absolute ones
        return None
    source = inspect.unwrap(type(module).forward)
    rotate = getattr(sys.modules[source.__module__], "apply_rotary_pos_emb", None)
    return rotate if callable(rotate) else None


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's `forward`, in order, which others call it with."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)[1:]


def cache_name(given: Mapping[str, Any]) -> str | None:
    """Return the name under which a call hands on its cache; None where there is no cache."""
    return next((name for name in CACHE_NAMES if given.get(name) is not None), None)


def dropout_of(module: nn.Module, family: Family) -> float:
    """The share of attention weights that is dropped in training."""
    dropout = getattr(module, family.attention_dropout)
    return float(dropout.p if isinstance(dropout, nn.Dropout) else dropout)


def scale_of(module: Any, family: Family) -> float:
    """Return the factor of the products of queries and keys."""
    if family.scale == "scaling":
        return float(module.scaling)
    return float(getattr(module, family.head_dim)) ** -0.5


def rows_of(projection: Any) -> Tensor:
    """Return the weight of a projection as [out, in]; a Conv1D stores [in, out]."""
    weight: Tensor = projection.weight.detach()
    return weight if isinstance(projection, nn.Linear) else weight.T


def set_weights(projection: Any, rows: Tensor, bias: Tensor | None) -> None:
    """Give copies of a weight [out, in] and a bias to a new projection on the device "meta"."""
    weight = rows if isinstance(projection, nn.Linear) else rows.T
    projection.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        projection.bias = nn.Parameter(bias.clone())


def without_values(projection: Any, family: Family, head_dim: int) -> nn.Module:
    """A fused projection without the features that are values, a new module of the same class."""

    def kept(features: Tensor) -> Tensor:
        if family.fused == "thirds":
            return features[: features.shape[0] * 2 // 3]
        return features.unflatten(0, (-1, 3, head_dim))[:, :2].flatten(0, 2)

    rows, bias = kept(rows_of(projection)), projection.bias
    with torch.device("meta"):
        if isinstance(projection, nn.Linear):
            new: nn.Module = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None)
        else:
            new = type(projection)(rows.shape[0], rows.shape[1])
    set_weights(new, rows, None if bias is None else kept(bias.detach()))
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(getattr(projection, name).requires_grad)
    return new


def value_projection(module: nn.Module, family: Family, heads: int, head_dim: int) -> nn.Linear:
    """A new linear map that starts as the model's value projection, grouped heads repeated."""
    projection: Any = getattr(module, family.value)

    def of_values(features: Tensor) -> Tensor:
        if family.fused == "thirds":
            features = features[features.shape[0] * 2 // 3 :]
        elif family.fused == "heads":
            features = features.unflatten(0, (-1, 3, head_dim))[:, 2].flatten(0, 1)
        by_head = features.unflatten(0, (-1, head_dim))
        return by_head.repeat_interleave(heads // by_head.shape[0], dim=0).flatten(0, 1)

    rows, bias = of_values(rows_of(projection)), projection.bias
    with torch.device("meta"):
        new = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None)
    set_weights(new, rows, None if bias is None else of_values(bias.detach()))
    return new
