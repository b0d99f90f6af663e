"""Model presets: the shapes of the papers, and small ones for a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphattn.graphs.arguments import as_choice


@dataclass(frozen=True)
class Preset:
    """Meaning of a preset's name.

    Attributes:
        model: name of the class, in :mod:`graphattn.models`.
        arguments: arguments of its constructor.
        about: one line about its use and the source of its shape.
        of_mixer: further arguments for a mixer, by the name of the mixer.

    Example:
        >>> import graphattn as ga
        >>> found = ga.models.presets()["deit-tiny"]
        >>> found.model, found.arguments["dim"]
        ('VisionTransformer', 192)
    """

    model: str
    arguments: dict[str, Any] = field(repr=False)
    about: str
    of_mixer: dict[str, dict[str, Any]] = field(repr=False, default_factory=dict)


# The language model of the GKA paper, Section 5 (nanochat's of depth 20): no biases, norms without
# weights, separate head and embedding. "nanochat-d20" adds what nanochat's code has beside that (in
# February 2026, when the paper read it): value embeddings, the norm of queries and keys, a softcap
# of 15. Three features of it are left out of both, 40 parameters: a norm after the embedding, a
# factor of the stream before every block, and a factor of the embedding that is added there.
_DEPTH_20: dict[str, Any] = {
    "vocab_size": 32_768,
    "dim": 1280,
    "depth": 20,
    "heads": 10,
    "window": (1024, 2048),
    "window_pattern": "SSSL",
    "norm": "rms",
    "norm_affine": False,
    "activation": "relu2",
    "bias": False,
}


def _krause_images(
    tokens: int, dim: int, depth: int, top_k: int, window: int, about: str
) -> Preset:
    """Make an image model of the Krause paper, with what it leaves open as in the authors' code.

    That is 8 heads, learned positions, dropout, and no start token: the first value is given.
    """
    arguments = {
        "vocab_size": 256,
        "dim": dim,
        "depth": depth,
        "heads": 8,
        "mixer": "krause",
        "mixer_options": {"top_k": top_k, "init_sigma": 2.5, "attention_dropout": 0.1},
        "window": window,
        "positions": "learned",
        "num_positions": tokens,
        "dropout": 0.1,
    }
    return Preset("CausalLM", arguments, f"{about} (Krause paper)")


_WITHOUT_VALUES = (  # mixers of CausalLM that cannot have value embeddings
    "vlt",
    "linear",
    "gka",
    "consensus",
    "dot+krause",
    "mix",
    "gka-consensus",
    "krause-consensus",
)

_PRESETS: dict[str, Preset] = {
    # CausalLM
    "gka-d20": Preset(
        "CausalLM",
        {**_DEPTH_20, "mixer": "gka", "mixer_options": {"normalize": True}},
        "language model of the GKA paper, 378.8 M parameters (Table 8)",
    ),
    "nanochat-d20": Preset(
        "CausalLM",
        {
            **_DEPTH_20,
            "mixer": "dot",
            "mixer_options": {"qk_norm": True},
            "value_embeddings": True,
            "logit_softcap": 15.0,
        },
        "baseline of the GKA paper, 896.5 M parameters (Table 8), 419.4 M of them value embeddings",
        {name: {"value_embeddings": False} for name in _WITHOUT_VALUES},
    ),
    "krause-mnist": _krause_images(
        784, 256, 12, 96, 128, "MNIST pixel by pixel, 784 of 256 grey levels"
    ),
    "krause-cifar10": _krause_images(
        3072, 512, 16, 192, 256, "CIFAR-10 value by value, 3,072 of 256 levels"
    ),
    # The defaults of the code that the authors published for 100 M. The paper also
    # trains 200 M, and neither says the shape of that.
    "krause-lm-100m": Preset(
        "CausalLM",
        {
            "vocab_size": 50_257,
            "dim": 768,
            "depth": 8,
            "heads": 12,
            "mixer": "dot+krause",
            "mixer_options": {
                "krause_window": 32,
                "top_k": 16,
                "init_sigma": 2.5,
                "attention_dropout": 0.1,
            },
            "positions": "learned",
            "num_positions": 1024,
            "mlp_ratio": 2048 / 768,
            "dropout": 0.1,
            "tie_weights": True,
        },
        "language model with standard and Krause attention, 102.4 M parameters, GPT-2's vocabulary "
        "(Krause paper)",
        {name: {"window": 32} for name in ("dot-window", "krause", "krause-consensus")},
    ),
    "text-1m": Preset(
        "CausalLM",
        {
            "vocab_size": 256,
            "dim": 128,
            "depth": 5,
            "heads": 4,
            "window": 256,
            "tie_weights": True,
        },
        "1.0 M parameters for bytes or characters, on a laptop",
    ),
    "dna-1m": Preset(
        "CausalLM",
        {
            "vocab_size": 5,
            "dim": 128,
            "depth": 5,
            "heads": 4,
            "window": (64, 1024),
            "window_pattern": "SL",
            "tie_weights": True,
        },
        "1.0 M parameters for nucleotides (NucleotideTokenizer), on a laptop",
    ),
}

# VisionTransformer: DeiT (Touvron et al., 2021), stochastic depth as in Projection-Free
# Transformers, Section 4.1; windows and neighbours as in Krause Synchronization Transformers.


def _deit(size: str, dim: int, heads: int, drop_path: float) -> Preset:
    schedule = [8, 9, 9, 10, 11, 12, 12, 13, 14, 15, 15, 16]  # top_k_schedule(8, 16, 12)
    return Preset(
        "VisionTransformer",
        {
            "image_size": 224,
            "patch_size": 16,
            "num_classes": 1000,
            "dim": dim,
            "depth": 12,
            "heads": heads,
            "drop_path": drop_path,
        },
        f"DeiT-{size}: 224 pixels, patches of 16, 1,000 classes",
        _of_vision_mixers(radius=2, krause={"top_k": schedule}),
    )


def _of_vision_mixers(
    radius: int, krause: dict[str, Any], **window: Any
) -> dict[str, dict[str, Any]]:
    windows = {"radius": radius, **window}
    patches_alone = {"class_token": False, "pooling": "mean"}
    safe = {"step_size": "auto"}
    return {
        "krause": {**windows, "mixer_options": krause},
        "dot-window": windows,
        "consensus": {**patches_alone, "mixer_options": safe},
        "mix": {**patches_alone, "mixer_options": safe},
        "gka-consensus": {**patches_alone, "mixer_options": safe},
        "krause-consensus": {**windows, **patches_alone, "mixer_options": {**krause, **safe}},
    }


_PRESETS["deit-tiny"] = _deit("Ti", 192, 3, 0.1)
_PRESETS["deit-small"] = _deit("S", 384, 6, 0.1)
_PRESETS["deit-base"] = _deit("B", 768, 12, 0.2)


def _krause_vit(size: str, dim: int, heads: int, patch_size: int, *, cifar: bool) -> Preset:
    """Make a vision model of the Krause paper, with what it leaves open as in the authors' code.

    That is: norms after the residual sums; one bandwidth per layer; patches of CIFAR's images see
    four neighbours, and those of ImageNet's see the 5 x 5 around them. Its settings for ImageNet
    are those of the small model.
    """
    first, last = (2, 4) if cifar else (8, 16)
    schedule = [round(first + (last - first) * place / 11) for place in range(12)]
    sigma = 2.5 if cifar else 4.5
    krause = {"top_k": schedule, "init_sigma": sigma, "sigma_per_head": False}
    pixels, classes = (32, 10) if cifar else (224, 1000)
    return Preset(
        "VisionTransformer",
        {
            "image_size": pixels,
            "patch_size": patch_size,
            "num_classes": classes,
            "dim": dim,
            "depth": 12,
            "heads": heads,
            "mixer": "krause",
            "norm": "post",
            "drop_path": 0.1,
        },
        f"Krause-ViT-{size}: {pixels} pixels, patches of {patch_size}, {classes:,} classes "
        "(Krause paper)",
        _of_vision_mixers(
            radius=1 if cifar else 2, krause=krause, **({"neighborhood": "plus"} if cifar else {})
        ),
    )


_PRESETS["krause-vit-small-cifar"] = _krause_vit("S", 384, 6, 4, cifar=True)
_PRESETS["krause-vit-base-cifar"] = _krause_vit("B", 768, 12, 4, cifar=True)
_PRESETS["krause-vit-small"] = _krause_vit("S", 384, 6, 16, cifar=False)
_PRESETS["krause-vit-base"] = _krause_vit("B", 768, 12, 32, cifar=False)
_PRESETS["digits"] = Preset(
    "VisionTransformer",
    {
        "image_size": 8,
        "patch_size": 2,
        "channels": 1,
        "num_classes": 10,
        "dim": 64,
        "depth": 3,
        "heads": 4,
        "mlp_ratio": 2.0,
    },
    "small vision model for a laptop: the 8 x 8 digits of scikit-learn",
    _of_vision_mixers(radius=1, krause={"top_k": [2, 3, 4], "init_sigma": 2.5}),
)

# SwinTransformer: Liu et al. (2021), Section 3.3; stochastic depth as trained on ImageNet-1K
# (Appendix A2.1).


def _swin(size: str, dim: int, depths: tuple[int, ...], drop_path: float, **other: Any) -> Preset:
    arguments = {
        "image_size": 224,
        "patch_size": 4,
        "num_classes": 1000,
        "dim": dim,
        "depths": depths,
        "heads": tuple(dim * 2**stage // 32 for stage in range(4)),
        "window_size": 7,
        "drop_path": drop_path,
        **other,
    }
    pixels, classes = arguments["image_size"], arguments["num_classes"]
    about = f"Swin-{size}: {pixels} pixels, patches of 4, {classes:,} classes"
    return Preset("SwinTransformer", arguments, about)


_CIFAR = {"image_size": 32, "num_classes": 10, "window_size": 4}
_PRESETS |= {
    "swin-tiny": _swin("T", 96, (2, 2, 6, 2), 0.2),
    "swin-small": _swin("S", 96, (2, 2, 18, 2), 0.3),
    "swin-base": _swin("B", 128, (2, 2, 18, 2), 0.5),
    "swin-small-cifar": _swin("S", 96, (2, 2, 18, 2), 0.3, **_CIFAR),
}

_PROTEIN = 21 + 1  # tokens of data.ProteinTokenizer (20 amino acids, X) and a mask

# SequenceEncoder: the models of Stabilizing Transformer Training Through Consensus, Table 10, with
# its MIX. Their names contain its parameter counts, which do not follow from its shapes
# (docs/counts.md).
_TABLE_10_DATA = {  # tokens with a mask, what they are, and what its counts leave out
    "text": (50_257 + 1, "text for diffusion, GPT-2's vocabulary", "cannot follow from its shapes"),
    "dna": (5 + 1, "DNA, one token per base", "cannot follow from its shapes"),
    "protein": (_PROTEIN, "proteins, their sequence alone", "have further tracks"),
}
_TABLE_10 = {  # millions in the paper: depth, heads, width; our millions with dot, consensus, mix
    ("text", 54): (6, 6, 384, "51.2 / 53.0 / 52.1"),
    ("text", 193): (12, 12, 768, "169.7 / 169.8 / 169.7"),
    ("text", 385): (32, 16, 1024, "531.7 / 515.4 / 523.6"),
    ("dna", 51): (6, 6, 384, "12.6 / 14.4 / 13.5"),
    ("dna", 172): (12, 12, 768, "92.4 / 92.6 / 92.5"),
    ("dna", 331): (32, 16, 1024, "428.8 / 412.5 / 420.6"),
    ("protein", 35): (12, 4, 256, "9.5 / 12.7 / 11.1"),
    ("protein", 133): (24, 8, 512, "75.7 / 82.1 / 78.9"),
    ("protein", 320): (32, 16, 768, "226.8 / 227.3 / 227.1"),
}


def _table_10(data: str, millions: int) -> Preset:
    """Make a shape of Table 10."""
    vocab_size, about, difference = _TABLE_10_DATA[data]
    depth, heads, dim, counts = _TABLE_10[data, millions]
    arguments = {
        "vocab_size": vocab_size,
        "dim": dim,
        "depth": depth,
        "heads": heads,
        "mixer": "mix",
        "window": 2,
        "rank": 4,
        "edge_hidden": 256,
        "step_size": 0.1,
    }
    if data != "protein":
        arguments |= {"noise_dim": 128, "zero_head": True}
    about = (
        f"{about}: {counts} M parameters with dot / consensus / mix; the paper's {millions} M "
        f"{difference}"
    )
    return Preset("SequenceEncoder", arguments, about)


_PRESETS |= {f"consensus-{data}-{m}m": _table_10(data, m) for data, m in _TABLE_10}
_PRESETS |= {
    "protein-6m": Preset(
        "SequenceEncoder",
        {
            "vocab_size": _PROTEIN,
            "dim": 256,
            "depth": 8,
            "heads": 8,
            "mixer": "mix",
            "edge_hidden": 64,
        },
        "proteins, their sequence alone, for a laptop: 6.2 M parameters",
    ),
    "encoder-1m": Preset(
        "SequenceEncoder",
        {
            "vocab_size": _PROTEIN,
            "dim": 128,
            "depth": 5,
            "heads": 4,
            "mixer": "mix",
            "edge_hidden": 32,
        },
        "proteins, or any other tokens with their `vocab_size`, on a laptop: 1.0 M parameters",
    ),
    # ProteinModel
    "protein-structure-1m": Preset(
        "ProteinModel",
        {
            "dim": 128,
            "depth": 4,
            "heads": 4,
            "mixer": "mix",
            "mixer_options": {"edge_hidden": 64},
            "neighbors": 16,
            "window": 4,
        },
        "proteins along the chain and in space; trains on a laptop",
    ),
}


def presets() -> dict[str, Preset]:
    """Return all presets by name, in the order of the models.

    ``from_preset`` of a model makes one of them.

    Example:
        >>> import graphattn as ga
        >>> sorted({preset.model for preset in ga.models.presets().values()})
        ['CausalLM', 'ProteinModel', 'SequenceEncoder', 'SwinTransformer', 'VisionTransformer']
        >>> ga.models.presets()["gka-d20"].about
        'language model of the GKA paper, 378.8 M parameters (Table 8)'
    """
    return dict(_PRESETS)


def preset(name: str, model: str, mixer: Any = None) -> dict[str, Any]:
    """Return the arguments of a preset of one model class, with those for the mixer."""
    names = tuple(key for key, other in _PRESETS.items() if other.model == model)
    if name in _PRESETS and name not in names:
        raise ValueError(
            f"name must be a preset of {model} ({', '.join(names) or 'it has none'}), got "
            f"{name!r}, which is a preset of {_PRESETS[name].model}"
        )
    chosen = _PRESETS[as_choice("name", name, names)]
    mixer = chosen.arguments.get("mixer") if mixer is None else mixer
    further = chosen.of_mixer.get(mixer, {}) if isinstance(mixer, str) else {}
    return {**chosen.arguments, **further}
