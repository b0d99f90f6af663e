"""The kinds of `graphattn graph`: builders, options, and theorems about Fiedler values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import graphattn as ga
from graphattn.near_names import did_you_mean

Sizes = Mapping[str, Any]


class Theory(NamedTuple):
    """Statement of a theorem about the Fiedler value: that it lies in [lower, upper]."""

    lower: float
    upper: float
    source: str


class GraphKind(NamedTuple):
    """A builder, its options with their defaults, and the theorem about its Fiedler value."""

    build: Callable[..., ga.TokenGraph]
    options: Mapping[str, Any]
    theory: Callable[[Sizes], Theory | None]


def exactly(value: float, source: str) -> Theory:
    return Theory(value, value, source)


def _path(sizes: Sizes) -> Theory | None:
    tokens, window = sizes["num_tokens"], sizes["window"]
    if 2 * window >= tokens:
        return None
    lower, upper = ga.spectral.path_fiedler_bounds(tokens, window)
    return Theory(lower, upper, "Remark 4.2")


def _cycle(sizes: Sizes) -> Theory | None:
    tokens, window = sizes["num_tokens"], sizes["window"]
    if 2 * window >= tokens:
        return _complete(sizes)
    return exactly(ga.spectral.cycle_fiedler_value(tokens, window), "Remark 4.1")


def _causal_window(sizes: Sizes) -> Theory | None:
    # Every edge has only one direction, so it counts half as much as in the path.
    tokens, window = sizes["num_tokens"], sizes["window"] - 1
    if window == 0:
        return exactly(0.0, "no edge but self-loops")
    if 2 * window >= tokens:
        return None
    lower, upper = ga.spectral.path_fiedler_bounds(tokens, window)
    return Theory(lower / 2, upper / 2, "half of Remark 4.2")


def _complete(sizes: Sizes) -> Theory | None:
    tokens = sizes["num_tokens"]
    return exactly(float(tokens if tokens > 1 else 0), "complete graph: N")


def _causal(sizes: Sizes) -> Theory | None:
    tokens = sizes["num_tokens"]
    return exactly(tokens / 2 if tokens > 1 else 0.0, "half a complete graph: N / 2")


def _blocks(sizes: Sizes) -> Theory | None:
    tokens, size, shift = sizes["num_tokens"], sizes["block_size"], sizes["shift"]
    first_border = shift or size
    return exactly(0.0, "blocks are separate") if first_border < tokens else _complete(sizes)


def _grid_blocks(sizes: Sizes) -> Theory | None:
    height, width = sizes["height"], sizes["width"]
    if (sizes["shift"] or sizes["block_size"]) < max(height, width):
        return exactly(0.0, "blocks are separate")
    return _complete({"num_tokens": height * width})


def _dilated(sizes: Sizes) -> Theory | None:
    tokens, window, dilation = sizes["num_tokens"], sizes["window"], sizes["dilation"]
    if dilation == 1:
        return _path({"num_tokens": tokens, "window": window})
    return exactly(0.0, "tokens of another remainder are out of reach") if tokens > 1 else None


def _hubs(sizes: Sizes) -> Theory | None:
    """Return bounds for g tokens that see and are seen by all; each adds 1 to every eigenvalue."""
    tokens, hubs = sizes["num_tokens"], len(sizes["global_tokens"])
    if not hubs or tokens < 2:
        return None
    return Theory(float(hubs), float(tokens), "global tokens joined to the rest")


def _causal_longformer(num_tokens: int, window: int, global_tokens: range) -> ga.TokenGraph:
    return ga.causal_longformer_graph(num_tokens, window, len(global_tokens))


def _causal_hubs(sizes: Sizes) -> Theory | None:
    """Return half of the bounds of :func:`_hubs`, because every edge has only one direction."""
    both = _hubs(sizes)
    return both and Theory(both.lower / 2, both.upper / 2, f"half of: {both.source}")


def _grid(sizes: Sizes) -> Theory | None:
    height, width = sizes["height"], sizes["width"]
    longer = max(height, width)
    hub = float(sizes["class_token"])
    if not _is_plain(sizes):
        return _class_token(height * width, hub)
    if sizes["metric"] == "manhattan" and sizes["radius"] == 1 and longer > 1:
        value = 4 * math.sin(math.pi / (2 * longer)) ** 2 + hub
        return exactly(value, "product of two paths" + " and a class token" * int(hub))
    if sizes["radius"] >= longer - 1 and sizes["metric"] == "chebyshev":
        return _complete({"num_tokens": height * width + int(hub)})
    return _class_token(height * width, hub)


def _volume(sizes: Sizes) -> Theory | None:
    shape = sizes["depth"], sizes["height"], sizes["width"]
    tokens, hub = math.prod(shape), float(sizes["class_token"])
    if _is_plain(sizes) and tokens > 1:
        if sizes["metric"] == "manhattan" and sizes["radius"] == 1:
            value = 4 * math.sin(math.pi / (2 * max(shape))) ** 2 + hub
            return exactly(value, "product of three paths" + " and a class token" * int(hub))
        if sizes["metric"] == "chebyshev" and sizes["radius"] >= max(shape) - 1:
            return _complete({"num_tokens": tokens + int(hub)})
    return _class_token(tokens, hub)


def _is_plain(sizes: Sizes) -> bool:
    """Return whether grid windows are cut at the border, without dilation or causal axis."""
    dilated = sizes.get("dilation", 1) > 1
    return not dilated and not sizes.get("causal", False) and sizes.get("border", "cut") == "cut"


def _class_token(tokens: int, hub: float) -> Theory | None:
    return Theory(hub, float(tokens + 1), "a class token joined to the rest") if hub else None


GRID = {
    "radius": 1,
    "metric": "chebyshev",
    "class_token": False,
    "dilation": 1,
    "causal": False,
    "border": "cut",
}
TOKENS, WINDOW, HUBS = {"num_tokens": 64}, {"window": 2}, {"global_tokens": 1}

KINDS: dict[str, GraphKind] = {
    "window-path": GraphKind(
        ga.window_path_graph, {**TOKENS, **WINDOW, "self_loops": False}, _path
    ),
    "window-cycle": GraphKind(ga.window_cycle_graph, {**TOKENS, **WINDOW}, _cycle),
    "causal-window": GraphKind(ga.causal_window_graph, {**TOKENS, "window": 8}, _causal_window),
    "causal": GraphKind(ga.causal_graph, TOKENS, _causal),
    "complete": GraphKind(ga.complete_graph, {**TOKENS, "self_loops": True}, _complete),
    "block-window": GraphKind(
        ga.block_window_graph, {**TOKENS, "block_size": 16, "shift": 0}, _blocks
    ),
    "dilated-window": GraphKind(
        ga.dilated_window_graph, {**TOKENS, **WINDOW, "dilation": 3, "self_loops": True}, _dilated
    ),
    "longformer": GraphKind(
        ga.longformer_graph, {**TOKENS, "window": 4, **HUBS, "dilation": 1}, _hubs
    ),
    "causal-longformer": GraphKind(
        _causal_longformer, {**TOKENS, "window": 8, **HUBS}, _causal_hubs
    ),
    "bigbird": GraphKind(
        ga.bigbird_graph, {**TOKENS, "window": 3, "num_random": 3, **HUBS, "seed": 0}, _hubs
    ),
    "grid-window": GraphKind(
        ga.grid_window_graph,
        {"height": 8, "width": 8, **GRID},
        _grid,
    ),
    "grid-block": GraphKind(
        ga.grid_block_graph,
        {"height": 8, "width": 8, "block_size": 4, "shift": 0},
        _grid_blocks,
    ),
    "volume-window": GraphKind(
        ga.volume_window_graph,
        {"depth": 4, "height": 4, "width": 4, **GRID},
        _volume,
    ),
}

# Names of options on the command line that differ from the argument.
SPELLED = {"num_tokens": "tokens", "num_random": "random"}


def option(name: str) -> str:
    """Return the option of an argument, such as ``--block-size``."""
    return "--" + SPELLED.get(name, name).replace("_", "-")


def sizes_of(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the builder: the defaults, replaced by those `given` (not None)."""
    if kind not in KINDS:
        near = did_you_mean(kind, KINDS)
        raise ValueError(f"KIND must be one of {', '.join(KINDS)}, got {kind!r}{near}")
    options = KINDS[kind].options
    sizes = dict(options)
    for name, value in given.items():
        if value is None:
            continue
        if name not in options:
            has = ", ".join(map(option, options))
            raise ValueError(
                f"{option(name)} is not an option of {kind}, which has the options {has}"
            )
        sizes[name] = value
    if "global_tokens" in sizes:  # on the command line: how many of the first tokens are global
        if not 0 <= sizes["global_tokens"] <= sizes["num_tokens"]:
            raise ValueError(
                f"--global-tokens must be from 0 to --tokens = {sizes['num_tokens']}, "
                f"got {sizes['global_tokens']}"
            )
        sizes["global_tokens"] = range(sizes["global_tokens"])
    return sizes


def build(kind: str, sizes: Sizes) -> ga.TokenGraph:
    """Build the graph; errors of the builder name the option of the command line."""
    try:
        return KINDS[kind].build(**sizes)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"{option(name)} {rest}" if name in sizes else str(error)) from None
