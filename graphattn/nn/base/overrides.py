"""Overrides: methods of a layer that a subclass or an instance has replaced.

Fused operations compute the mathematics of the library's own layers. So they must not run a layer
whose `message()` is overridden. Hooks and explainers of PyG count as overrides, too, because they
read messages, which fused operations do not compute.

A *twin* of a method is another method that does the same in another way: `fused` is the twin of
`message`. If both are overridden together, nothing is wrong.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphattn.nn.base.message_passing import HOOKED, Member

# Methods that `propagate` runs; the twin is `fused`.
EDGE_METHODS = (
    "message", "aggregate", "update", "edge_update", "log_affinity", "unfused",
    "propagate", "edge_updater",
)  # fmt: skip
WEIGHT_METHODS = ("message", "log_affinity", "propagate")  # the twin is `edge_weights`
# Methods over all rows, of which a step of generation computes one; the twins do this.
ROW_METHODS = (*EDGE_METHODS, "fused", "mix", "sigma")
ROW_TWINS = ("step_row", "fused_row", "row_logits")
# Methods whose work a step in C++ does itself, beside those above.
KERNEL_METHODS = (*ROW_TWINS, "score", "kernel_row", "step_scale", "sink_logits")
# Methods whose work it does itself if it also rotates queries and keys by their positions.
ROTATION_METHODS = (
    "project_step", "rotate", "split",
    "step_hidden", "project_back", "rotate_back",
)  # fmt: skip
# Methods that `forward` runs and steps of generation do not; the twins run in steps.
FORWARD_METHODS = (
    "forward", "forward_pass", "project", "rotations", "resolve_positions",
)  # fmt: skip
STEP_TWINS = ("step", "project_step", "step_rows", *ROW_TWINS)

MADE_BY_PYG = ("propagate", "edge_updater")  # PyG puts compiled ones into classes and instances
HOOKS = tuple(f"_{method}_forward{when}_hooks" for method in HOOKED for when in ("_pre", ""))
NOWHERE = 1 << 30
# Methods whose overrides a step in C++ would not run, and methods that are watched for later ones.
SHORTENED = frozenset((*ROW_METHODS, *KERNEL_METHODS, *ROTATION_METHODS))
WATCHED = (SHORTENED | {"edge_weights"}) - {*MADE_BY_PYG}


class ClassOverrides(NamedTuple):
    """The overrides of a class of layers, found when the class is made.

    Attributes:
        places: overridden methods, each with the index of the class that overrides it among the
            bases of the class.
        methods: the methods of the class at that time, to notice if one is replaced later.
        as_shipped: whether a step runs only methods of the library.
    """

    places: dict[str, int]
    methods: dict[str, Any]
    as_shipped: bool

    def without_twins(self, names: tuple[str, ...], twins: tuple[str, ...]) -> tuple[str, ...]:
        """The overridden methods whose twins are not overridden in the same class or a subclass."""
        last = min([NOWHERE, *(self.places.get(twin, NOWHERE) for twin in twins)])
        return tuple(name for name in names if self.places.get(name, NOWHERE) < last)


def overrides_of_class(cls: type) -> ClassOverrides:
    """Find the overrides of a class.

    It is called from ``__init_subclass__``, before PyG puts its own `propagate` into the class.
    """
    places = {}
    for name in SHORTENED | {"edge_weights", *FORWARD_METHODS, *STEP_TWINS}:
        for place, base in enumerate(cls.__mro__):
            if name in vars(base):
                if not is_ours(base) or _is_patched(base, name):
                    places[name] = place
                break
    methods = {name: getattr(cls, name) for name in sorted(WATCHED) if hasattr(cls, name)}
    overrides = ClassOverrides(places, methods, as_shipped=False)
    in_forward = overrides.without_twins(FORWARD_METHODS, STEP_TWINS)
    return overrides._replace(as_shipped=not in_forward and not places.keys() & SHORTENED)


def _is_patched(base: type, name: str) -> bool:
    """Whether a class of layers was given another method after it was made."""
    known = vars(base).get("class_overrides")
    if known is None or name in MADE_BY_PYG:
        return False
    method = vars(base)[name]
    return known.methods.get(name, method) is not method


def note_members(cls: Any, base: type) -> None:
    """Let the subclasses of `cls` know the methods that they inherit from MessagePassing, `base`.

    Their overrides were found without it (:mod:`.message_passing`).
    """
    for subclass in cls.__subclasses__():
        known = subclass.class_overrides.methods
        for name, method in known.items():
            if isinstance(method, Member):
                known[name] = getattr(base, name)
        note_members(subclass, base)


def is_ours(cls: Any) -> bool:
    """Whether a class or a function belongs to this library, to PyG or to torch."""
    return cls is object or cls.__module__.split(".")[0] in (
        "graphattn",
        "torch_geometric",
        "torch",
    )


def overridden(layer: Any, names: tuple[str, ...], *twins: str) -> tuple[str, ...]:
    """The methods of `names` that are overridden without one of `twins`: in classes or later."""
    of_class, later = layer.class_overrides, replaced_later(layer, names, *twins)
    return of_class.without_twins(names, twins) + later if of_class.places else later


def replaced_later(layer: Any, names: tuple[str, ...], *twins: str) -> tuple[str, ...]:
    """The methods of `names` that were replaced in an instance, or in its class after it was made.

    None if one of `twins` was replaced in this way, too.
    """
    cls, attributes = type(layer), vars(layer)
    methods = cls.class_overrides.methods
    replaced: tuple[str, ...] = ()
    for name in names:  # a plain loop, because it runs in every step of generation
        if name in methods and (name in attributes or getattr(cls, name) is not methods[name]):
            replaced += (name,)
    return () if replaced and twins and replaced_later(layer, twins) else replaced


def is_as_shipped(layer: Any) -> bool:
    """Whether a step of this layer runs only methods of the library, and no hook observes them.

    Then C++ code that does all their work gives the same. This runs once per token, so it is short.
    """
    cls, attributes = type(layer), vars(layer)
    known = cls.class_overrides.methods
    return (
        cls.class_overrides.as_shipped
        and not attributes.get("_explain")
        and attributes.keys().isdisjoint(known)
        and all(map(operator.is_, map(getattr, itertools.repeat(cls), known), known.values()))
        and not any(map(attributes.get, HOOKS))
    )


def overridden_edges(layer: Any) -> tuple[str, ...]:
    """The names of overrides because of which `fused` would not give what `propagate` gives."""
    names = overridden(layer, EDGE_METHODS, "fused")
    attributes = vars(layer)
    # When compiled, PyG's own propagate runs no hooks either.
    if not torch.compiler.is_compiling() and any(map(attributes.get, HOOKS)):
        names += tuple(name for name in HOOKS if attributes.get(name))
    return (*names, "explain") if attributes.get("_explain") else names


def overridden_rows(layer: Any) -> tuple[str, ...]:
    """The names of overrides because of which a step of one row would differ from the layer."""
    return overridden(layer, ROW_METHODS, *ROW_TWINS)


def overridden_kernel(layer: Any) -> tuple[str, ...]:
    """The names of other overrides because of which a step in C++ would differ from `step_row`."""
    return overridden(layer, KERNEL_METHODS)


def overridden_weights(layer: Any) -> tuple[str, ...]:
    """The names of overrides because of which `edge_weights` would not be those of messages."""
    return tuple(dict.fromkeys(overridden(layer, WEIGHT_METHODS, "edge_weights")))


def overridden_forward(layer: Any) -> tuple[str, ...]:
    """The names of overrides because of which steps would not give what `forward` gives."""
    names: tuple[str, ...] = layer.class_overrides.without_twins(FORWARD_METHODS, STEP_TWINS)
    return names


def replaced_beside(module: Any, names: tuple[str, ...], twins: tuple[str, ...]) -> tuple[str, ...]:
    """The methods of `names` that are overridden in a module without one of `twins`.

    They may be overridden by a subclass, in the instance, or in the class itself. The library's own
    class has the twins.
    """
    attributes = vars(module)
    replaced = tuple(name for name in names if name in attributes)
    for cls in type(module).__mro__:  # plain loops, because this runs in every step of generation
        members = vars(cls)
        for twin in twins:
            if twin in members:
                if is_ours(members[twin]):
                    replaced += tuple(n for n in names if n in members and not is_ours(members[n]))
                return replaced
        # A class of the library may inherit the twins of what it states itself.
        replaced += tuple(n for n in names if n in members and not is_ours(members[n]))
    return replaced


def message_takes(layer: Any, argument: str) -> bool:
    """Whether `message()` takes an argument, also if it was replaced in the instance or class."""
    if not replaced_later(layer, ("message",)):
        return argument in layer._user_args
    parameters = inspect.signature(layer.message).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return argument in parameters or any_name


def propagate_without(layer: Any, argument: str) -> Callable[..., Any]:
    """`propagate` that does not pass an argument to a `message()` which does not take it.

    PyG always passes the arguments that the `message()` of the original class takes.
    """
    run = getattr(layer.propagate, "__func__", None)
    if message_takes(layer, argument) or argument not in layer._user_args or run is None:
        propagate: Callable[..., Any] = layer.propagate
        return propagate
    message, copied = layer.message, object.__new__(type(layer))
    vars(copied).update(vars(layer))

    def message_without(**arguments: Any) -> Any:
        del arguments[argument]
        return message(**arguments)

    vars(copied)["message"] = message_without
    return functools.partial(run, copied)


def names_of(methods: tuple[str, ...]) -> str:
    """The names of methods for an error, such as `message() and log_affinity()`."""
    shown = []
    for name in dict.fromkeys(methods):
        if name in HOOKS:
            what = name.removeprefix("_").removesuffix("s")
            shown.append(f"a hook (register_{what})")
        else:
            shown.append("explain = True" if name == "explain" else f"{name}()")
    return " and ".join(shown)
