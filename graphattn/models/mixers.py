"""Mixers by name: the layers that mix the tokens in the blocks of a model.

A name stands for a layer of :mod:`graphattn.nn` with the width and heads of the model. Its further
options come from `mixer_options`, one dict for the whole model. Every layer takes the options that
its constructor has; an option that no layer takes is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from graphattn.graphs.arguments import as_int
from graphattn.near_names import did_you_mean
from graphattn.nn import (
    CrossConsensus,
    DotProductAttention,
    GatedKrauseAttention,
    GaussianKernelAttention,
    KrauseAttention,
    LinearAttention,
    SelfConsensus,
)
from graphattn.nn.files.config import constructor_arguments
from graphattn.nn.rotary import RotaryEmbedding

MixerName = Literal[
    "dot", "dot-window", "vlt", "linear", "gka", "krause", "dot+krause", "consensus"
]
Halves = Literal["mix", "gka-consensus", "krause-consensus"]
Mixer = MixerName | Halves | Sequence[MixerName | nn.Module]
Reach = Literal["all", "window", "near"]


@dataclass(frozen=True)
class Kind:
    """Meaning of a mixer's name.

    Attributes:
        layer: the class.
        reach: which tokens are seen if no graph is given: "all", those in a `window`, or the few
            "near" ones of consensus.
        fixed: arguments of the layer that the name fixes.
    """

    layer: type[nn.Module]
    reach: Reach = "all"
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return the arguments of the layer that `mixer_options` may set."""
        names = constructor_arguments(self.layer)
        taken = {"dim", "heads", "rope", "context_dim", "value_projection", "value_embeddings"}
        return tuple(name for name in names if name not in taken | {*dict(self.fixed)})

    @property
    def has_values(self) -> bool:
        """Return whether the layer can add value embeddings."""
        no_values = dict(self.fixed).get("value_projection") is False
        return "value_embeddings" in constructor_arguments(self.layer) and not no_values


KINDS: dict[str, Kind] = {
    "dot": Kind(DotProductAttention),
    "dot-window": Kind(DotProductAttention, "window"),
    "vlt": Kind(DotProductAttention, "all", (("value_projection", False), ("kv_heads", None))),
    "linear": Kind(LinearAttention),
    "gka": Kind(GaussianKernelAttention),
    "krause": Kind(KrauseAttention, "window"),
    "dot+krause": Kind(GatedKrauseAttention),
    "consensus": Kind(SelfConsensus, "near"),
}
HALVES: dict[str, tuple[str, str]] = {
    "mix": ("dot", "consensus"),
    "gka-consensus": ("gka", "consensus"),
    "krause-consensus": ("krause", "consensus"),
}
NAMES = (*KINDS, *HALVES)
_ALSO_CALLED = {
    "DotProductAttention": "dot",
    "LinearAttention": "linear",
    "GaussianKernelAttention": "gka",
    "KrauseAttention": "krause",
    "GatedKrauseAttention": "dot+krause",
    "dot-krause": "dot+krause",
    "SelfConsensus": "consensus",
    "dot-consensus": "mix",
    "attention": "dot",
    "softmax": "dot",
}


class Mixing(NamedTuple):
    """The layer of a block, and which tokens it sees if no graph is given."""

    layer: nn.Module
    reach: Reach


def mixers(
    mixer: Any,
    depth: int,
    dim: int | Sequence[int],
    heads: int | Sequence[int],
    *,
    rope: bool | Literal["isometric"] | RotaryEmbedding = False,
    options: Mapping[str, Any] | None = None,
    causal: bool = False,
    value_embeddings: int | None = None,
) -> Iterator[Mixing]:
    """Yield the layers of a model, one per block; each is made when it is needed.

    Args:
        mixer: a name, or one entry per block: a name or a layer of width `dim`.
        depth, dim, heads: those of the model; a list or tuple of widths or heads contains one per
            block.
        rope: rotary positions of all named layers; "isometric" applies to consensus, other layers
            then rotate as usual.
        options: further arguments of the layers; a list or tuple contains one value per block.
        causal: whether tokens see only earlier tokens; consensus then moves only targets.
        value_embeddings: vocabulary size; the last layer and every second one before it get value
            embeddings. None for no value embeddings.

    Raises:
        ValueError: if a name is unknown, a layer does not fit or comes twice, no layer of the model
            takes an option, or value embeddings are for a layer that has none.
    """
    entries = one_per_block(mixer, depth)
    options = as_options(options)
    if causal and "consensus" in entries:
        if options.get("update", "target") != "target":
            raise ValueError(
                f"update must be 'target' in a causal model, got {options['update']!r}, which lets "
                "later tokens change earlier ones"
            )
        options["update"] = "target"
    _check_options(options, entries)
    if value_embeddings is not None:
        vocabularies = [value_embeddings if (depth - i) % 2 else None for i in range(depth)]
        _check_value_embeddings(entries, vocabularies)
        options["value_embeddings"] = vocabularies
    widths, counts = _numbers("dim", dim, depth), _numbers("heads", heads, depth)
    return (
        Mixing(_layer(entry, place, depth, own_dim, own_heads, rope, options), _reach(entry))
        for place, (entry, own_dim, own_heads) in enumerate(
            zip(entries, widths, counts, strict=True)
        )
    )


def _check_value_embeddings(entries: list[Any], vocabularies: list[int | None]) -> None:
    takers = [repr(name) for name, kind in KINDS.items() if kind.has_values]
    for place, (entry, vocabulary) in enumerate(zip(entries, vocabularies, strict=True)):
        if vocabulary is None or (isinstance(entry, str) and KINDS[entry].has_values):
            continue
        got = repr(entry) if isinstance(entry, str) else f"a {type(entry).__name__}"
        raise ValueError(
            f"value_embeddings=True needs the mixer {', '.join(takers[:-1])} or {takers[-1]} in "
            f"the last block and every second one before it, got {got} in block {place}. (A layer "
            "that you make yourself gets its own, value_embeddings=vocab_size)"
        )


def check_rope(rope: Any) -> None:
    """Check the option `rope` of a model."""
    if not (isinstance(rope, bool) or rope == "isometric"):
        raise ValueError(f"rope must be True, False or 'isometric', got {rope!r}")


def as_options(options: Any) -> dict[str, Any]:
    """Return a copy of `mixer_options` as a dict."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ValueError(
            "mixer_options must be a dict of options and their values, or None, "
            f"got {type(options).__name__}"
        )
    return dict(options)


def _numbers(name: str, given: Any, depth: int) -> list[int]:
    """Return one number per block, from one for all blocks or a list with one per block."""
    if not isinstance(given, list | tuple):
        return [as_int(name, given, 1)] * depth
    if len(given) != depth:
        raise ValueError(f"{name} must be one number, or one per block ({depth}), got {len(given)}")
    return [as_int(name, number, 1) for number in given]


def options_taken(mixer: Any, depth: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `options` that some named layer of a model takes."""
    named = [entry for entry in one_per_block(mixer, depth) if isinstance(entry, str)]
    taken = {option for name in named for option in KINDS[name].options}
    return {option: value for option, value in options.items() if option in taken}


def over_depth(options: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return options of a preset whose schedule of top_k, if any, has one value per block."""
    schedule = options.get("top_k")
    if not isinstance(schedule, list | tuple) or len(schedule) == depth:
        return dict(options)
    return {**options, "top_k": top_k_schedule(schedule[0], schedule[-1], depth)}


def one_per_block(mixer: Any, depth: int) -> list[Any]:
    """Return the mixer of every block, from the short form of `mixer`."""
    if not isinstance(mixer, list | tuple | nn.ModuleList):
        if isinstance(mixer, str) and mixer in HALVES:
            first, second = HALVES[mixer]
            return [first] * (depth // 2) + [second] * (depth - depth // 2)
        _check_entry(mixer, NAMES)
        if isinstance(mixer, nn.Module) and depth > 1:
            raise ValueError(
                f"mixer must be a list with one layer per block ({depth}), got one "
                f"{type(mixer).__name__}, whose weights all blocks would share: give a list of "
                f"{depth} layers"
            )
        return [mixer] * depth
    if len(mixer) != depth:
        raise ValueError(f"mixer must have one entry per block ({depth}), got {len(mixer)}")
    for entry in mixer:
        _check_entry(entry, tuple(KINDS))
    layers = [entry for entry in mixer if isinstance(entry, nn.Module)]
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(
            "mixer must not contain the same layer twice, because blocks would share its weights: "
            "make one layer per block"
        )
    return list(mixer)


def _check_entry(entry: Any, names: tuple[str, ...]) -> None:
    if isinstance(entry, nn.Module) and not isinstance(entry, CrossConsensus):
        return
    if not isinstance(entry, str) or entry not in names:
        got = type(entry).__name__ if isinstance(entry, nn.Module) else repr(entry)
        near = did_you_mean(entry, names, {k: v for k, v in _ALSO_CALLED.items() if v in names})
        raise ValueError(
            f"mixer must be one of {', '.join(map(repr, names))}, or a list with one layer per "
            f"block, each for one sequence, got {got}{near}{_of_class(entry)}"
        )


def _of_class(entry: Any) -> str:
    if not isinstance(entry, type):
        return ""
    return f"; for your own class, give its layers: [{entry.__name__}(...) for _ in range(depth)]"


def _check_options(options: dict[str, Any], entries: list[Any]) -> None:
    named = list(dict.fromkeys(entry for entry in entries if isinstance(entry, str)))
    for option in options:
        if not isinstance(option, str) or not any(option in KINDS[n].options for n in named):
            takes = "; ".join(f"{name!r} takes {', '.join(KINDS[name].options)}" for name in named)
            raise ValueError(
                f"mixer_options must contain options of the model's mixers, got {option!r}: "
                f"{takes or 'layers that were given as modules take none'}"
                + did_you_mean(option, [other for name in named for other in KINDS[name].options])
            )


def _reach(entry: Any) -> Reach:
    if isinstance(entry, str):
        return KINDS[entry].reach
    return "near" if isinstance(entry, SelfConsensus) else "all"


def _layer(
    entry: Any,
    place: int,
    depth: int,
    dim: int,
    heads: int,
    rope: Any,
    options: dict[str, Any],
) -> nn.Module:
    if not isinstance(entry, str):
        width = getattr(entry, "dim", dim)
        if width != dim:
            raise ValueError(
                f"mixer must contain layers of width dim = {dim}, got a {type(entry).__name__} of "
                f"width {width}"
            )
        context = getattr(entry, "context_dim", dim)
        if context not in (dim, None):
            raise ValueError(
                f"mixer must contain layers that read one sequence, got a {type(entry).__name__} "
                f"that reads a context of width {context} (dim is {dim})"
            )
        layer: nn.Module = entry
        return layer
    kind = KINDS[entry]
    if rope == "isometric" and kind.layer is not SelfConsensus:
        rope = True
    given = {
        name: _of_block(name, value, place, depth)
        for name, value in options.items()
        if name in kind.options
    }
    if "value_embeddings" in options and kind.has_values:
        name = "value_embeddings"
        given[name] = _of_block(name, options[name], place, depth)
    return kind.layer(dim, heads, rope=rope, **dict(kind.fixed), **given)


def _of_block(name: str, value: Any, place: int, depth: int) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if len(value) != depth:
        raise ValueError(
            f"mixer_options[{name!r}] must be one value, or one per block ({depth}), "
            f"got {len(value)}"
        )
    return value[place]


def top_k_schedule(first: int, last: int, depth: int) -> list[int]:
    """Numbers of neighbours that grow or shrink evenly over the blocks of a model.

    ``round(linspace(first, last, depth))``, as in the vision models of Krause attention (Krause
    Synchronization Transformers: from 2 to 4, or from 8 to 16).

    Args:
        first: top_k of the first block, at least 1.
        last: top_k of the last block, at least 1.
        depth: number of blocks, at least 1.

    Raises:
        ValueError: if a number is below 1.

    Example:
        >>> import graphattn as ga
        >>> ga.models.top_k_schedule(8, 16, depth=6)
        [8, 10, 11, 13, 14, 16]
    """
    first, last = as_int("first", first, 1), as_int("last", last, 1)
    depth = as_int("depth", depth, 1)
    steps = max(depth - 1, 1)
    return [round(first + (last - first) * i / steps) for i in range(depth)]
