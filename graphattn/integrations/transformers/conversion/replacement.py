"""Base of the modules with which `convert` replaces a model's attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.integrations.transformers.attention import HARMLESS
from graphattn.integrations.transformers.conversion.families import (
    CACHE_NAMES,
    Family,
    argument_names,
    cache_name,
    dropout_of,
    rotation_of,
    scale_of,
)
from graphattn.integrations.transformers.masks.graphs import SeenEdges, seen_through
from graphattn.integrations.transformers.masks.mask_function import fitted, is_sketch

IMPLEMENTATIONS = ("graphattn", "sdpa", "eager")  # implementations that pass masks to layers


class ReplacedCall(NamedTuple):
    """Arguments of an attention module other than the hidden states."""

    mask: Tensor | None
    rotation: tuple[Tensor, Tensor] | None  # cos and sin at the positions of the queries
    cache: Any
    is_causal: bool


class Replacement(nn.Module):
    """A module that replaces an attention module, with the same arguments and kind of result.

    It keeps the output projection of the original module (if it has one), its dropouts, and all
    plain attributes that the rest of the model may read. Projections that its mixer does not use
    are removed.
    """

    replaces_attention: ClassVar = True
    mixer: ClassVar[str]

    config: Any
    layer_idx: int | None
    is_causal: bool

    def __init__(self, replaced: nn.Module, family: Family, *, window: int | None) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.training = replaced.training
        self.family = family
        self.replaced_class = type(replaced).__name__
        self.head_dim: int = getattr(replaced, family.head_dim)
        self.heads = heads_of(replaced, family)
        self.scale = scale_of(replaced, family)
        self.dropout_of_weights = dropout_of(replaced, family)
        self.is_causal = bool(getattr(replaced, "is_causal", False))
        self.layer_idx = getattr(replaced, "layer_idx", None)
        self.window = window
        self.argument_names = argument_names(replaced)
        self.rotation: Callable[..., tuple[Tensor, Tensor]] | None = rotation_of(replaced)
        for kept in (family.output, family.output_dropout):
            if kept is not None:
                setattr(self, kept, getattr(replaced, kept))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Mix the hidden states [B, Q, dim]; arguments are those of the original module."""
        hidden, call = self.read(args, kwargs)
        mixed = self.mix(hidden, call).reshape(*hidden.shape[:-1], -1)
        for name in (self.family.output, self.family.output_dropout):
            if name is not None:
                mixed = getattr(self, name)(mixed)
        return mixed, None

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        """Mix the states that go to the output projection, [B, Q, H, D]."""
        raise NotImplementedError

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ReplacedCall]:
        """Return the hidden states and the other arguments; raise an error for unsupported ones."""
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        self.check_implementation()
        if given.get("output_attentions"):
            raise ValueError(
                f"output_attentions must be False in a layer converted to {self.mixer!r}, got "
                "True: the model collects weights only from its own attention classes"
            )
        name = cache_name(given)
        cache = None if name is None else given[name]
        for name in CACHE_NAMES:
            given.pop(name, None)
        causal = given.get("is_causal")
        hidden: Tensor = given.pop("hidden_states")
        call = ReplacedCall(
            given.pop("attention_mask", None),
            given.pop("position_embeddings", None),
            getattr(cache, "self_attention_cache", cache),  # of an encoder-decoder cache
            self.is_causal if causal is None else bool(causal),
        )
        for name, value in given.items():
            if value is not None and name not in HARMLESS:
                raise ValueError(
                    f"{name} must be None in a layer converted to {self.mixer!r}, which does not "
                    f"support it, got a {type(value).__name__}: ignoring it could change the result"
                )
        return hidden, call

    def check_implementation(self) -> None:
        """Raise an error for implementations that do not pass a mask to layers."""
        name = self.config._attn_implementation
        if name is not None and name not in IMPLEMENTATIONS:
            raise ValueError(
                f"attn_implementation must be one of {IMPLEMENTATIONS} in a model with converted "
                f"layers, got {name!r}: call model.set_attn_implementation('sdpa')"
            )

    def rotate(self, call: ReplacedCall, *states: Tensor) -> tuple[Tensor, ...]:
        """Rotate states [B, H, Q, D] by position, as the model rotates queries and keys."""
        if self.rotation is None:
            return states
        if call.rotation is None:
            raise ValueError(
                f"position_embeddings must be given to this {self.replaced_class}, got None"
            )
        first = states[0]
        turned = self.rotation(first, states[-1], *call.rotation)
        return turned if len(states) == 2 else turned[:1]

    def choose_rotation(self, rope: bool | None) -> None:
        """Set whether the model's rotation by position is used; None uses it if there is one."""
        if rope is None:
            return
        if not isinstance(rope, bool):
            raise ValueError(f"rope must be True, False or None (as in the model), got {rope!r}")
        if rope and self.rotation is None:
            raise ValueError(
                f"rope=True needs a model with rotary positions, which {self.replaced_class} does "
                "not have: its positions are already in the hidden states. Leave out rope="
            )
        if not rope:
            self.rotation = None

    def remember(self, call: ReplacedCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens so far, if the model has a cache."""
        if call.cache is None:
            return key, value
        updated: tuple[Tensor, Tensor] = call.cache.update(key, value, self.layer_idx)
        return updated

    def seen(self, call: ReplacedCall, hidden: Tensor, num_keys: int) -> SeenEdges:
        """Return the edges that queries see."""
        Q = hidden.shape[1]
        mask = fitted(call.mask, Q, num_keys)
        self.check_empty(call, Q, num_keys)
        is_dense = mask is not None and not is_sketch(mask)
        if mask is not None and is_dense and (mask.dim() != 4 or mask.shape[1] != 1):
            raise ValueError(
                "attention_mask must have the shape [batch, 1, queries, keys] in a converted "
                f"layer, the same for all heads, got {list(mask.shape)}"
            )
        seen = seen_through(
            mask,
            hidden.shape[0],
            Q,
            num_keys,
            causal=call.is_causal,
            window=self.window,
            device=hidden.device,
        )
        if seen.bias is not None:
            raise ValueError(
                "attention_mask must be 0 where a token is seen and the smallest number of its "
                "dtype where it is not, got other numbers: a converted layer does not support a "
                "bias of the logits"
            )
        return seen

    def check_empty(self, call: ReplacedCall, num_targets: int, num_keys: int) -> None:
        """Raise an error if there is no mask, but the queries are not the first of the keys.

        A model passes no mask with the first tokens of a static cache. All places after them must
        be empty.
        """
        if call.mask is None and call.is_causal and 1 < num_targets < num_keys:
            held = int(call.cache.get_seq_length(self.layer_idx))
            if held > num_targets:
                raise ValueError(
                    f"cache (past_key_values) must hold equally many tokens in all layers, got "
                    f"{held - num_targets} in layer {self.layer_idx} and none in the first one"
                )

    def extra_repr(self) -> str:
        return f"{self.mixer}, heads={self.heads}, in the place of {self.replaced_class}"


class Bandwidth(nn.Module):
    """A bandwidth per head, sigma = exp(log_sigma), as a separate module.

    PEFT freezes the parameters of a model, except those of modules named in `modules_to_save`. With
    ``modules_to_save=["bandwidth"]`` they stay trainable and are saved with the adapter.

    Args:
        heads: H, or 1 for a bandwidth that all heads share.
        sigma: > 0, at the start.
        device, dtype: device and dtype of the parameter.
    """

    def __init__(self, heads: int, sigma: float, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        start = torch.full((heads,), math.log(sigma), device=device, dtype=dtype)
        self.log_sigma = nn.Parameter(start)

    def forward(self, features: Tensor) -> Tensor:
        """Return the bandwidths [heads], at least in float32, on the device of `features`."""
        dtype = torch.promote_types(self.log_sigma.dtype, torch.float32)
        return self.log_sigma.to(features.device, dtype).exp()

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def device_and_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype that new parameters of a module have."""
    weight = next(p for p in module.parameters() if p.is_floating_point())
    return weight.device, weight.dtype


def heads_of(module: nn.Module, family: Family) -> int:
    """H, by the width of the query projection."""
    return out_features(getattr(module, family.query)) // (
        getattr(module, family.head_dim) * (3 if family.fused else 1)
    )


def key_heads_of(module: nn.Module, family: Family) -> int:
    """Hk: as many as query heads, or a divisor of it."""
    if family.fused:
        return heads_of(module, family)
    width: int = out_features(getattr(module, family.key))
    return width // int(getattr(module, family.head_dim))


def out_features(projection: Any) -> int:
    """The width of what a projection gives: nn.Linear, or GPT-2's Conv1D."""
    width = getattr(projection, "out_features", None)
    return int(projection.nf if width is None else width)
