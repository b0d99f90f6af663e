"""Options of `configure`: check them, and store them in the config and modules of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.arguments import check_takes_two, numbers_of_layers
from graphattn.integrations.transformers.conversion.modules import (
    attention_modules,
    is_cross_attention,
)
from graphattn.near_names import did_you_mean

VERSION = 1  # version of the format of config.graphattn
MIXERS = ("dot", "rbf", "krause")
GRAPH = "given in code"  # value in a config for a graph, which is a function

GraphOf = Callable[[int, int], TokenGraph]


@dataclass(frozen=True)
class Options:
    """Options of one attention module; the defaults do what the model itself does."""

    mixer: str = "dot"
    window: int | None = None
    top_k: int | None = None
    sigma: float | None = None
    graph: GraphOf | None = None


AS_IT_IS = Options()


def checked_options(mixer: Any, window: Any, top_k: Any, sigma: Any, graph: Any) -> Options:
    """Return the options, or raise a ValueError."""
    if mixer not in MIXERS:
        raise ValueError(
            f"mixer must be one of {', '.join(map(repr, MIXERS))}, got {mixer!r}"
            f"{did_you_mean(mixer, MIXERS)} (for mixers that "
            "replace projections, such as 'gka', use convert())"
        )
    window = None if window is None else as_int("window", window, 1)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    if sigma is not None:
        if mixer == "dot":
            raise ValueError(
                f"sigma must be None with mixer='dot', got {sigma}: it is the bandwidth of 'rbf' "
                "and 'krause'"
            )
        sigma = as_float("sigma", sigma, positive=True)
    if mixer == "krause" and window is None and graph is None and top_k is None:
        raise ValueError(
            "mixer='krause' needs window=, top_k= or graph=, got none of them: without these, use "
            "mixer='rbf'"
        )
    if graph is not None and not callable(graph):
        raise ValueError(
            "graph must be a function of (num_targets, num_sources) that returns a TokenGraph, "
            f"got {type(graph).__name__}: lengths can change from call to call. If the length is "
            "fixed, write graph=lambda num_targets, num_sources: graph"
        )
    check_takes_two(graph)
    return Options(mixer, window, top_k, sigma, graph)


def chosen_layers(model: nn.Module, layers: Any) -> list[int]:
    """Return the numbers of the attention modules that `layers` chooses, all for None."""
    count = len(attention_modules(model))
    if count == 0:
        raise ValueError(
            "model must have a module that uses transformers' attention interface, got "
            f"{type(model)}, which cannot be changed, because it computes attention in its own "
            f"code{_hint(model)}"
        )
    if layers is None:
        return list(range(count))
    numbers = sorted(numbers_of_layers(layers))
    for number in numbers:
        if not -count <= number < count:
            raise ValueError(
                f"layers must be numbers in {-count} .. {count - 1} (negative ones count from the "
                f"end), got {number}"
            )
    if not numbers:
        raise ValueError("layers must contain at least one layer (None for all), got none")
    return sorted({number % count for number in numbers})


def _hint(model: nn.Module) -> str:
    if not any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        return ""
    return "; for nn.MultiheadAttention use graphattn.integrations.torch.convert"


def options_of(module: nn.Module) -> Options:
    """Return the options of one attention module."""
    options = getattr(module, "graphattn_options", None)
    if options is not None:
        assert isinstance(options, Options)
        return options
    if is_configured(getattr(module, "config", None)):
        raise ValueError(
            f"config.graphattn of this model has options for its attention, but {type(module)} was "
            "made without them: load the model with "
            "graphattn.integrations.transformers.from_pretrained, or, if two models share one "
            "config object, make each from its own copy"
        )
    return AS_IT_IS


def layers_for(model: nn.Module, options: Options, layers: Any) -> list[int]:
    """Return the numbers of the layers that get `options`, after checking that they can.

    A window or graph has no meaning in cross-attention, so `layers=None` skips it.
    """
    numbers = chosen_layers(model, layers)
    modules = attention_modules(model)
    places = options.window is not None or options.graph is not None
    if places and layers is None:
        numbers = [number for number in numbers if not is_cross_attention(*modules[number])]
        if not numbers:
            raise ValueError(
                "model must have self-attention for a window or graph, got a model with only "
                "cross-attention, where these have no meaning"
            )
    for number in numbers:
        name, module = modules[number]
        if places and is_cross_attention(name, module):
            raise ValueError(
                f"layers must not include {number} ({name}), which attends to another sequence, "
                "where a window or graph has no meaning: choose other layers with layers= (None "
                "for all without cross-attention)"
            )
        if options.mixer != "dot" and _softcap(module) is not None:
            raise ValueError(
                f"mixer must be 'dot' in layer {number} ({name}), whose logits are capped "
                f"(softcap = {_softcap(module)}), got {options.mixer!r}"
            )
    return numbers


def give_options(model: nn.Module, options: Options, numbers: list[int]) -> None:
    """Set `options` for the modules with these numbers; others keep theirs."""
    modules = attention_modules(model)
    for number in numbers:
        modules[number][1].graphattn_options = options  # type: ignore[assignment]
    for _, module in modules:
        if not hasattr(module, "graphattn_options"):
            module.graphattn_options = AS_IT_IS  # type: ignore[assignment]


def _softcap(module: nn.Module) -> float | None:
    config = getattr(module, "config", None)
    return getattr(module, "attn_logit_softcapping", None) or getattr(
        config, "attn_logit_softcapping", None
    )


# Storage in the config.


def add_step(model: nn.Module, call: str, arguments: dict[str, Any]) -> None:
    """Store a call and its arguments in ``model.config.graphattn``, to be repeated on loading.

    The configs of its parts (such as a text or vision part), which masks and attention read,
    contain only a mark that they are parts.
    """
    config: Any = model.config
    steps = [*steps_of(config), {"call": call, **arguments}]
    if call == "configure":  # a later call replaces earlier options of the same layers
        covered = set(arguments["layers"])
        steps = [
            step
            for step in steps[:-1]
            if step["call"] != "configure" or not covered.issuperset(step["layers"])
        ] + steps[-1:]
    config.graphattn = {"version": VERSION, "steps": steps}
    for _, module in attention_modules(model):
        part = getattr(module, "config", None)
        if part is not None and part is not config:
            of = {"configured": is_configured(config), "places": has_places(config)}
            part.graphattn = {"version": VERSION, "steps": [], "part_of": of}


def steps_of(config: Any) -> list[dict[str, Any]]:
    """Return the changes in a config, after checking that this version can read them."""
    stored = getattr(config, "graphattn", None)
    if stored is None:
        return []
    version = stored.get("version") if isinstance(stored, dict) else None
    if type(version) is not int or version < 1:
        raise ValueError(f"config.graphattn must contain a version >= 1 and steps, got {stored!r}")
    if version > VERSION:
        raise ValueError(
            f"config.graphattn was written by a newer graphattn (its version is {version}, this "
            f"one reads up to {VERSION}): update graphattn"
        )
    steps = stored.get("steps")
    if not isinstance(steps, list) or not all(map(_is_step, steps)):
        raise ValueError(
            "config.graphattn must contain a version and steps, each with a call and layers "
            f"(numbers, or None for all), got {stored!r}"
        )
    return steps


def _is_step(step: Any) -> bool:
    if not isinstance(step, dict) or not isinstance(step.get("call"), str):
        return False
    layers = step.get("layers")
    return layers is None or (
        isinstance(layers, list) and all(type(n) is int and n >= 0 for n in layers)
    )


def _part_of(config: Any) -> dict[str, Any]:
    stored = getattr(config, "graphattn", None)
    of = stored.get("part_of") if isinstance(stored, dict) else None
    return of if isinstance(of, dict) else {}


def is_part(config: Any) -> bool:
    """Return whether a config belongs to a part of a changed model."""
    return bool(_part_of(config))


def is_configured(config: Any) -> bool:
    """Return whether a config, or that of the whole model, has options for attention."""
    steps = any(step["call"] == "configure" for step in steps_of(config))
    return steps or bool(_part_of(config).get("configured"))


def has_places(config: Any) -> bool:
    """Return whether any layer has a window or graph, which need the positions of queries."""
    return bool(_part_of(config).get("places")) or any(
        step.get("window") is not None or step.get("graph") is not None
        for step in steps_of(config)
        if step["call"] == "configure"
    )
