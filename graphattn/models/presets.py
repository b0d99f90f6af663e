"""Models by name: the papers' shapes, and small ones for a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphattn.graphs.arguments import as_choice


@dataclass(frozen=True)
class Preset:
    """What a name stands for.

    Attributes:
        model: name of the class, in :mod:`graphattn.models`.
        arguments: of its constructor.
        about: one line: what it is for, and where the shapes are from.
    """

    model: str
    arguments: dict[str, Any] = field(repr=False)
    about: str


_TEXT = 50_257 + 1  # GPT-2's tokens and a mask
_DNA = 5 + 1  # those of data.NucleotideTokenizer (A, C, G, T, N) and a mask
_PROTEIN = 21 + 1  # those of data.ProteinTokenizer (20 amino acids, X) and a mask


def _table_10(
    vocab_size: int, depth: int, heads: int, dim: int, about: str, *, noise: bool
) -> Preset:
    """A shape of Stabilizing Transformer Training Through Consensus, with its MIX."""
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
    if noise:
        arguments.update(noise_dim=128, zero_head=True)
    return Preset("SequenceEncoder", arguments, about)


_PRESETS: dict[str, Preset] = {
    # SequenceEncoder: the text, DNA and protein models of Stabilizing Transformer Training Through
    # Consensus, Table 10. Their names have its totals, which do not follow from its shapes
    # (docs/counts.md).
    "consensus-text-54m": _table_10(
        _TEXT, 6, 6, 384,
        "text for diffusion, GPT-2's vocabulary: 51.2 / 53.0 / 52.1 M parameters with dot / "
        "consensus / mix; the paper's 54 M cannot follow from its shapes",
        noise=True,
    ),
    "consensus-text-193m": _table_10(
        _TEXT, 12, 12, 768,
        "text for diffusion, GPT-2's vocabulary: 169.7 / 169.8 / 169.7 M parameters with dot / "
        "consensus / mix; the paper's 193 M cannot follow from its shapes",
        noise=True,
    ),
    "consensus-text-385m": _table_10(
        _TEXT, 32, 16, 1024,
        "text for diffusion, GPT-2's vocabulary: 531.7 / 515.4 / 523.6 M parameters with dot / "
        "consensus / mix; the paper's 385 M cannot follow from its shapes",
        noise=True,
    ),
    "consensus-dna-51m": _table_10(
        _DNA, 6, 6, 384,
        "DNA, one token per base: 12.6 / 14.4 / 13.5 M parameters with dot / consensus / mix; the "
        "paper's 51 M cannot follow from its shapes",
        noise=True,
    ),
    "consensus-dna-172m": _table_10(
        _DNA, 12, 12, 768,
        "DNA, one token per base: 92.4 / 92.6 / 92.5 M parameters with dot / consensus / mix; the "
        "paper's 172 M cannot follow from its shapes",
        noise=True,
    ),
    "consensus-dna-331m": _table_10(
        _DNA, 32, 16, 1024,
        "DNA, one token per base: 428.8 / 412.5 / 420.6 M parameters with dot / consensus / mix; "
        "the paper's 331 M cannot follow from its shapes",
        noise=True,
    ),
    "consensus-protein-35m": _table_10(
        _PROTEIN, 12, 4, 256,
        "proteins, their sequence alone: 9.5 / 12.7 / 11.1 M parameters with dot / consensus / "
        "mix; the paper's 35 M have further tracks",
        noise=False,
    ),
    "consensus-protein-133m": _table_10(
        _PROTEIN, 24, 8, 512,
        "proteins, their sequence alone: 75.7 / 82.1 / 78.9 M parameters with dot / consensus / "
        "mix; the paper's 133 M have further tracks",
        noise=False,
    ),
    "consensus-protein-320m": _table_10(
        _PROTEIN, 32, 16, 768,
        "proteins, their sequence alone: 226.8 / 227.3 / 227.1 M parameters with dot / consensus / "
        "mix; the paper's 320 M have further tracks",
        noise=False,
    ),
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
}  # fmt: skip


def presets() -> dict[str, Preset]:
    """Return all presets by name, in the order of the models.

    ``from_preset`` of a model makes one of them.

    Example:
        >>> import graphattn as ga
        >>> ga.models.presets()["protein-6m"].about
        'proteins, their sequence alone, for a laptop: 6.2 M parameters'
    """
    return dict(_PRESETS)


def preset(name: str, model: str) -> dict[str, Any]:
    """The arguments of a preset of one class of models."""
    own = tuple(key for key, found in _PRESETS.items() if found.model == model)
    if name in _PRESETS and name not in own:
        raise ValueError(
            f"name must be a preset of {model}, got {name!r}, which is a preset of "
            f"{_PRESETS[name].model}; this class has {', '.join(own) or 'none'}"
        )
    as_choice("name", name, own)
    return dict(_PRESETS[name].arguments)
