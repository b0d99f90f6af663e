"""Overrides: methods of a layer that a subclass, or somebody at an instance, has replaced.

Fused operations know the mathematics of the library's layers and no other, so a layer whose
`message()` was replaced must not be handed to them. PyG's hooks and explainers count too: they look
at messages, which fused operations never form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# What `propagate` runs; `fused` gives the same for the library's own.
EDGE_METHODS = (
    "message", "aggregate", "update", "edge_update", "log_affinity", "unfused",
    "propagate", "edge_updater",
)  # fmt: skip
WEIGHT_METHODS = ("message", "log_affinity", "propagate")  # what `edge_weights` restates
# What a step of generation shortens to one row, by `step_row` or the methods that it calls.
ROW_METHODS = (*EDGE_METHODS, "fused", "mix", "move", "sigma")
ROW_TWINS = ("step_row", "fused_row", "row_logits")
# What a compiled step restates, beside them.
KERNEL_METHODS = (*ROW_TWINS, "score", "kernel_row", "step_scale", "sink_logits")
# What it restates where it also turns queries and keys by their positions.
TURN_METHODS = (
    "project_step", "project_rotated", "rotate", "split", "finish_step",
    "step_hidden", "project_back", "turn_back",
)  # fmt: skip
# What `forward` runs and steps of generation do not.
FORWARD_METHODS = (
    "forward", "attend", "one_step", "project", "rotations", "resolve_positions",
)  # fmt: skip
STEP_TWINS = ("step", "project_step", "step_rows", *ROW_TWINS)

# What a plain forward pass restates (`flat_call`), beside what happens at edges.
CALL_METHODS = (
    *EDGE_METHODS, "score", "fused", "mix", "sigma", "prepare", "check_dtype", "project",
    "project_rotated", "project_flat", "turned", "split", "rotate", "rotations", "rotation_of",
    "resolve_positions", "uses_propagate", "current_dropout", "step_scale", "project_features",
    "features_of", "mixed_dtype", "checked_features", "one_step", "applies_first_layer", "move",
    "project_back", "turn_back", "step_tensor",
)  # fmt: skip

MADE_BY_PYG = ("propagate", "edge_updater")  # PyG sets compiled ones at classes and instances
HOOKS = tuple(
    f"_{method}_forward{when}_hooks"
    for method in ("propagate", "message", "aggregate", "edge_update")
    for when in ("_pre", "")
)
NOWHERE = 1 << 30


class ClassOverrides(NamedTuple):
    """Names of methods that the classes of a layer replace, found when its class is made."""

    at_edges: tuple[str, ...]  # and `fused` is not replaced along with them
    in_rows: tuple[str, ...]  # nor is what does the same for one row
    in_forward: tuple[str, ...]  # nor is what does the same in steps
    weights_unknown: tuple[str, ...]  # nor is `edge_weights`
    in_kernel: tuple[str, ...]  # what a compiled step restates, whatever is replaced with them
    as_shipped: bool  # whether nothing that a step runs is replaced
    methods: dict[str, Any]  # all as they were then; somebody may patch the class later
    call_as_shipped: bool  # whether nothing that a plain forward pass restates is replaced
    call_methods: dict[str, Any]  # those, as they were then


def overrides_of_class(cls: type) -> ClassOverrides:
    """Find the overrides of a class, called from ``__init_subclass__``: later PyG puts its own
    `propagate` into classes.
    """

    def depth(name: str) -> int:
        """Return the place of the base of `cls` that replaces a method of the library's, if any."""
        for place, base in enumerate(cls.__mro__):
            if name in base.__dict__:
                if not is_ours(base):
                    return place
                known = vars(base).get("class_overrides")
                if known is None or name in MADE_BY_PYG:
                    return NOWHERE
                own = base.__dict__[name]
                before = known.methods.get(name, known.call_methods.get(name, own))
                return NOWHERE if before is own else place
        return NOWHERE

    def replaced(names: tuple[str, ...], *twins: str) -> tuple[str, ...]:
        """Return the methods that are replaced without a twin replaced along with them or later."""
        last = min(depth(twin) for twin in twins)
        return tuple(name for name in names if depth(name) < last)

    shortened = {*ROW_METHODS, *KERNEL_METHODS, *TURN_METHODS}
    watched = {*shortened, "edge_weights"} - {*MADE_BY_PYG}
    return ClassOverrides(
        at_edges=replaced(EDGE_METHODS, "fused"),
        in_rows=replaced(ROW_METHODS, *ROW_TWINS),
        in_forward=replaced(FORWARD_METHODS, *STEP_TWINS),
        weights_unknown=replaced(WEIGHT_METHODS, "edge_weights"),
        in_kernel=tuple(name for name in KERNEL_METHODS if depth(name) < NOWHERE),
        as_shipped=not replaced(FORWARD_METHODS, *STEP_TWINS)
        and all(depth(name) == NOWHERE for name in shortened),
        methods={name: getattr(cls, name) for name in sorted(watched) if hasattr(cls, name)},
        call_as_shipped=all(depth(name) == NOWHERE for name in CALL_METHODS),
        call_methods={
            name: getattr(cls, name)
            for name in CALL_METHODS
            if name not in MADE_BY_PYG and hasattr(cls, name)
        },
    )


def is_ours(cls: type) -> bool:
    """A class of this library, or one that it is made of."""
    return cls is object or cls.__module__.split(".")[0] in (
        "graphattn",
        "torch_geometric",
        "torch",
    )


def own_methods(layer: Any, names: tuple[str, ...], *twins: str) -> tuple[str, ...]:
    """Return those of `names` that were replaced in an instance, or in its class since then."""
    cls, attributes = type(layer), vars(layer)
    methods = cls.class_overrides.methods
    found: tuple[str, ...] = ()
    for name in names:  # plain and short: steps of generation come here
        if name in methods and (name in attributes or getattr(cls, name) is not methods[name]):
            found += (name,)
    return () if found and twins and own_methods(layer, twins) else found


def overridden_edges(layer: Any) -> tuple[str, ...]:
    """List the overrides that keep `fused` from giving the result of `propagate`: what was
    replaced, by name.
    """
    found: tuple[str, ...] = layer.class_overrides.at_edges
    found += own_methods(layer, EDGE_METHODS, "fused")
    if not torch.compiler.is_compiling():  # PyG's own propagate then runs no hooks either
        attributes = vars(layer)
        for name in HOOKS:
            if attributes[name]:
                found += (name,)
    return (*found, "explain") if layer._explain else found


def overridden_rows(layer: Any) -> tuple[str, ...]:
    """List the overrides that keep a single row from giving the layer's result: what was replaced,
    by name.
    """
    return layer.class_overrides.in_rows + own_methods(layer, ROW_METHODS, *ROW_TWINS)


def overridden_kernel(layer: Any) -> tuple[str, ...]:
    """List what keeps a compiled step from `step_row`, beside :func:`overridden_rows`."""
    return layer.class_overrides.in_kernel + own_methods(layer, KERNEL_METHODS)


def overridden_weights(layer: Any) -> tuple[str, ...]:
    """List the overrides that keep `edge_weights` from being those of the messages: what was
    replaced, by name.
    """
    found: tuple[str, ...] = layer.class_overrides.weights_unknown
    found += own_methods(layer, WEIGHT_METHODS, "edge_weights")
    return tuple(dict.fromkeys(found))


def replaced_beside(module: Any, names: tuple[str, ...], twins: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of a module's `names` that are replaced without one of `twins`, then or later.

    By an instance, by a subclass, or in the class itself; the library's own class has the twins.
    """
    attributes = vars(module)
    found: tuple[str, ...] = ()
    for name in names:
        if name in attributes:
            found += (name,)
    for cls in type(module).__mro__:  # plain and short: steps of generation come here
        own = vars(cls)
        for twin in twins:
            if twin in own:
                if is_ours(own[twin]):
                    found += tuple(n for n in names if n in own and not is_ours(own[n]))
                return found
        # A class of the library may inherit the twins of what it states itself.
        found += tuple(n for n in names if n in own and not is_ours(own[n]))
    return found


def message_takes(layer: Any, argument: str) -> bool:
    """Whether `message()` takes it: the one of the class, or what was put in its place since."""
    if not own_methods(layer, ("message",)):
        return argument in layer._user_args
    parameters = inspect.signature(layer.message).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return argument in parameters or any_name


def propagate_without(layer: Any, argument: str) -> Callable[..., Any]:
    """`propagate`, for a `message()` that may have been put in place without that argument.

    PyG hands every message what the one took that the class was made with.
    """
    run = getattr(layer.propagate, "__func__", None)
    if message_takes(layer, argument) or argument not in layer._user_args or run is None:
        propagate: Callable[..., Any] = layer.propagate
        return propagate
    message, twin = layer.message, object.__new__(type(layer))
    vars(twin).update(vars(layer))

    def handed(**arguments: Any) -> Any:
        del arguments[argument]
        return message(**arguments)

    vars(twin)["message"] = handed
    return functools.partial(run, twin)


def names_of(methods: tuple[str, ...]) -> str:
    """`message() and log_affinity()`, for an error."""
    shown = []
    for name in dict.fromkeys(methods):
        if name in HOOKS:
            what = name.removeprefix("_").removesuffix("s")
            shown.append(f"a hook (register_{what})")
        else:
            shown.append("explain = True" if name == "explain" else f"{name}()")
    return " and ".join(shown)
