"""Options of `configure`: checked, kept in the model's config, and found again by its modules."""

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

VERSION = 1  # of config.graphattn
MIXERS = ("dot", "rbf", "krause")
GRAPH = "given in code"  # what a config says of a graph, which is a function

GraphOf = Callable[[int, int], TokenGraph]


@dataclass(frozen=True)
class Options:
    """How one attention module mixes; the defaults are what the model itself does."""

    mixer: str = "dot"
    window: int | None = None
    top_k: int | None = None
    sigma: float | None = None
    graph: GraphOf | None = None


AS_IT_IS = Options()


def checked_options(mixer: Any, window: Any, top_k: Any, sigma: Any, graph: Any) -> Options:
    """Return the options, or say what is wrong with them."""
    if mixer not in MIXERS:
        raise ValueError(
            f"mixer must be one of {', '.join(map(repr, MIXERS))}, got {mixer!r} (mixers that "
            "replace projections, such as 'gka', are for convert())"
        )
    window = None if window is None else as_int("window", window, 1)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    if sigma is not None:
        if mixer == "dot":
            raise ValueError(f"sigma is for mixer='rbf' and 'krause', got sigma={sigma} with 'dot'")
        sigma = as_float("sigma", sigma, positive=True)
    if mixer == "krause" and window is None and graph is None and top_k is None:
        raise ValueError("mixer='krause' needs window=, top_k= or graph=; without use mixer='rbf'")
    if graph is not None and not callable(graph):
        raise ValueError(
            "graph must be a function of (num_targets, num_sources) that returns a TokenGraph, got "
            f"{type(graph).__name__}: lengths change from call to call; write graph=lambda "
            "num_targets, num_sources: graph where the length is fixed"
        )
    check_takes_two(graph)
    return Options(mixer, window, top_k, sigma, graph)


def chosen_layers(model: nn.Module, layers: Any) -> list[int]:
    """Return the numbers of the attention modules that `layers` chooses, all for None."""
    count = len(attention_modules(model))
    if count == 0:
        raise ValueError(
            f"model has no module that calls transformers' attention interface: {type(model)} "
            f"cannot be changed, it computes attention in code of its own{_hint(model)}"
        )
    if layers is None:
        return list(range(count))
    found = sorted(numbers_of_layers(layers))
    for number in found:
        if not -count <= number < count:
            raise ValueError(
                f"layers must be within {-count} .. {count - 1} (negative from the end), got "
                f"{number}"
            )
    if not found:
        raise ValueError("layers must name at least one layer (None for all), got none")
    return sorted({number % count for number in found})


def _hint(model: nn.Module) -> str:
    if not any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        return ""
    return "; for nn.MultiheadAttention there is graphattn.integrations.torch.convert"


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
            "graphattn.integrations.transformers.from_pretrained, or, where two models were made "
            "of one config object, make each of a copy of it"
        )
    return AS_IT_IS


def layers_for(model: nn.Module, options: Options, layers: Any) -> list[int]:
    """Return the numbers of the layers that get `options`, after checking that they can.

    A window or graph has no meaning in cross-attention: `layers=None` leaves it out.
    """
    numbers = chosen_layers(model, layers)
    modules = attention_modules(model)
    places = options.window is not None or options.graph is not None
    if places and layers is None:
        numbers = [number for number in numbers if not is_cross_attention(*modules[number])]
        if not numbers:
            raise ValueError("model has cross-attention only, where no window or graph has meaning")
    for number in numbers:
        name, module = modules[number]
        if places and is_cross_attention(name, module):
            raise ValueError(
                f"layers must not include {number} ({name}), which attends to another sequence, "
                "where a window or graph has no meaning; choose others with layers= (None: all "
                "but these)"
            )
        if options.mixer != "dot" and _softcap(module) is not None:
            raise ValueError(
                f"mixer must be 'dot' in layer {number} ({name}), whose logits are capped "
                f"(softcap = {_softcap(module)}), got {options.mixer!r}"
            )
    return numbers


def give_options(model: nn.Module, options: Options, numbers: list[int]) -> None:
    """Give `options` to the modules of these numbers, and to others what they have or had."""
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


# What is kept.


def add_step(model: nn.Module, call: str, arguments: dict[str, Any]) -> None:
    """Write a call and its arguments into ``model.config.graphattn``, to be replayed on loading.

    The configs of its parts, which masks and attention of a text or vision part read, say only
    that they are parts.
    """
    config: Any = model.config
    steps = [*steps_of(config), {"call": call, **arguments}]
    if call == "configure":  # a later one takes the place of what it covers
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
    """Return the steps that a config holds, after checking that this version can read them."""
    kept = getattr(config, "graphattn", None)
    if kept is None:
        return []
    version = kept.get("version") if isinstance(kept, dict) else None
    if type(version) is not int or version < 1:
        raise ValueError(f"config.graphattn must hold a version and steps, got {kept!r}")
    if version > VERSION:
        raise ValueError(
            f"config.graphattn was written by a newer graphattn (its version is {version}, this "
            f"one reads up to {VERSION}): update graphattn"
        )
    steps = kept.get("steps")
    if not isinstance(steps, list) or not all(map(_is_step, steps)):
        raise ValueError(
            "config.graphattn must hold a version and steps, each with a call and layers (numbers, "
            f"or None for all), got {kept!r}"
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
    kept = getattr(config, "graphattn", None)
    of = kept.get("part_of") if isinstance(kept, dict) else None
    return of if isinstance(of, dict) else {}


def is_part(config: Any) -> bool:
    """Whether a config is that of a part of a changed model, which holds no steps of its own."""
    return bool(_part_of(config))


def is_configured(config: Any) -> bool:
    """Whether a config, or that of the model it is a part of, has options for attention."""
    steps = any(step["call"] == "configure" for step in steps_of(config))
    return steps or bool(_part_of(config).get("configured"))


def has_places(config: Any) -> bool:
    """Whether any layer has a window or graph, for which it matters where queries stand."""
    return bool(_part_of(config).get("places")) or any(
        step.get("window") is not None or step.get("graph") is not None
        for step in steps_of(config)
        if step["call"] == "configure"
    )


def as_step(options: Options, layers: list[int]) -> dict[str, Any]:
    """Return the options as a config keeps them."""
    return {
        "mixer": options.mixer,
        "window": options.window,
        "top_k": options.top_k,
        "sigma": options.sigma,
        "graph": None if options.graph is None else GRAPH,
        "layers": layers,
    }
