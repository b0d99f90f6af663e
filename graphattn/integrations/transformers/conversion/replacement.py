"""Base of the modules that `convert` puts in the place of a model's attention."""

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
from graphattn.integrations.transformers.masks.mask_function import is_sketch

IMPLEMENTATIONS = ("graphattn", "sdpa", "eager")  # whose masks say who sees whom


class ReplacedCall(NamedTuple):
    """Arguments of an attention module beside the hidden states."""

    mask: Tensor | None
    rotation: tuple[Tensor, Tensor] | None  # cos and sin at the positions of the queries
    cache: Any
    is_causal: bool


class Replacement(nn.Module):
    """A module in the place of an attention module: called the same way, and returning the same.

    It keeps the output projection of the module before it (where that is inside the module), its
    dropouts, and every plain attribute that the rest of the model may look at. Projections that its
    mixer does not use are gone.
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
        """Mix the hidden states [B, Q, dim], as the module that stood here was called."""
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
        """The hidden states, and what else the call means; what is not understood is refused."""
        given = dict(zip(self.argument_names, args, strict=False)) | kwargs
        self.check_implementation()
        if given.get("output_attentions"):
            raise ValueError(
                f"output_attentions=True cannot be had of a layer converted to {self.mixer!r}: the "
                "model collects the weights of its own attention classes only"
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
                    f"{name} is not supported by a layer converted to {self.mixer!r} (got a "
                    f"{type(value).__name__}), and ignoring it could change the result"
                )
        return hidden, call

    def check_implementation(self) -> None:
        """Refuse implementations that keep the mask to themselves, or hand on none."""
        name = self.config._attn_implementation
        if name is not None and name not in IMPLEMENTATIONS:
            raise ValueError(
                f"attn_implementation must be one of {IMPLEMENTATIONS} in a model with converted "
                f"layers, got {name!r}: model.set_attn_implementation('sdpa')"
            )

    def rotate(self, call: ReplacedCall, *states: Tensor) -> tuple[Tensor, ...]:
        """States [B, H, Q, D] turned by their positions, as the model turns queries and keys."""
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
        """Keep the model's rotation of features by position, or not; None keeps what there is."""
        if rope is None:
            return
        if not isinstance(rope, bool):
            raise ValueError(f"rope must be True, False or None (as in the model), got {rope!r}")
        if rope and self.rotation is None:
            raise ValueError(
                f"rope=True needs a model with rotary positions, which {self.replaced_class} does "
                "not have: its positions are in the hidden states already"
            )
        if not rope:
            self.rotation = None

    def remember(self, call: ReplacedCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, where the model keeps a cache."""
        if call.cache is None:
            return key, value
        key, value = call.cache.update(key, value, self.layer_idx)
        return key, value

    def seen(self, call: ReplacedCall, hidden: Tensor, num_keys: int) -> SeenEdges:
        """Return the edges that queries see."""
        mask, window, Q = call.mask, self.window, hidden.shape[1]
        if mask is not None and not is_sketch(mask):
            if mask.dim() != 4 or mask.shape[1] != 1:
                raise ValueError(
                    "attention_mask must have the shape [batch, 1, queries, keys] in a converted "
                    f"layer, the same for all heads, got {list(mask.shape)}"
                )
            if window is not None and call.is_causal and 1 < Q < num_keys:
                mask, window = narrowed(mask, window), None
        found = seen_through(
            mask,
            hidden.shape[0],
            Q,
            num_keys,
            causal=call.is_causal,
            window=window,
            device=hidden.device,
        )
        if found.bias is not None:
            raise ValueError(
                "attention_mask must hold 0 where a token is seen and the smallest number where "
                "it is not: a bias of the logits is not supported in a converted layer"
            )
        return found

    def extra_repr(self) -> str:
        return f"{self.mixer}, heads={self.heads}, in the place of {self.replaced_class}"


def narrowed(mask: Tensor, window: int) -> Tensor:
    """A causal mask [B, 1, Q, n] cut to the last `window` keys of every row, its own counted.

    Its own is the last that a row sees: a static cache has room beyond, which nothing sees.
    """
    low = None if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    seen = mask if low is None else mask > low / 2
    key = torch.arange(mask.shape[-1], device=mask.device)
    outside = key <= torch.where(seen, key, -1).amax(-1, keepdim=True) - window
    return mask & ~outside if low is None else mask.masked_fill(outside, low)


class Bandwidth(nn.Module):
    """A bandwidth per head, sigma = exp(log_sigma), as a module of its own.

    PEFT freezes the parameters of a model but for those of modules named in its `modules_to_save`,
    so ``modules_to_save=["bandwidth"]`` keeps it trainable, and saves it with the adapter.

    Args:
        heads: H, or 1 for a bandwidth that all heads share.
        sigma: > 0, at the start.
        like: a parameter of the model, whose dtype and device it takes.
    """

    def __init__(self, heads: int, sigma: float, like: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.log_sigma = nn.Parameter(
            torch.full((heads,), math.log(sigma), dtype=like.dtype, device=like.device)
        )

    def forward(self, features: Tensor) -> Tensor:
        """The bandwidths for these features, [heads], in float32 at least."""
        dtype = torch.promote_types(self.log_sigma.dtype, torch.float32)
        return self.log_sigma.to(dtype).exp()

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def a_weight(module: nn.Module) -> Tensor:
    """A parameter of a module, whose dtype and device new ones take."""
    return next(p for p in module.parameters() if p.is_floating_point())


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
    found = getattr(projection, "out_features", None)
    return int(projection.nf if found is None else found)
