"""Store the constructor arguments of layers with their weights, and compare them on loading.

The weights of a layer do not determine its options: weights trained with ``top_k=2`` also fit a
    layer with ``top_k=8``. So every layer and model stores its constructor arguments as plain
    values in `config`, and writes them into the metadata of its state dict
    (`state_dict()._metadata`, where torch stores the versions of modules). There they survive
    ``torch.load(weights_only=True)``, deep copies, and being part of a larger module. Files without
    them can still be loaded.
"""

from __future__ import annotations

import copy
import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from graphattn.nn.files.argument_names import refuse_missing, refuse_unknown
from graphattn.nn.files.pretrained import KNOWN, Described, build, class_name, load, save

NOT_COMPARED = frozenset(
    {
        # These do not change what given weights compute.
        "backend",  # all backends compute the same
        "dropout",  # used in training only
        "attention_dropout",
        "drop_path",
        "init_sigma",  # initial value, before training
        "zero_head",
        "zero_init",
        # Names and shapes of the weights determine these.
        "bias",
        "condition_dim",
        "context_dim",
        "depth",
        "dim",
        "edge_hidden",
        "edge_input",
        "edge_networks",
        "kv_heads",
        "learned_beta",
        "learned_step",
        "mlp_ratio",
        "noise_dim",
        "norm_affine",
        "num_positions",
        "rank",
        "share_alpha",
        "sigma_per_head",
        "sink",
        "trunk",
        "value_embeddings",
        "value_projection",
        "vocab_size",
        # A module inside compares its own options.
        "mixer",
    }
)
# Options with these values add a parameter, so the names of the weights show whether both have it.
TOLD_BY_NAMES = {"step_size": "learned"}


class Configured(Described):
    """Base of modules that record their constructor's arguments and explain unknown ones.

    It comes before the module class: ``class Layer(Configured, nn.Module)``. Constructors need no
        special code; a wrapper records their arguments.

    Attributes of a class:
        attribute_of: maps a constructor argument to its attribute, if their names differ and the
            attribute may change later; `config` then contains the present value.
        options_of_parts: arguments that are passed on to modules inside; those modules compare
            them.
    """

    attribute_of: ClassVar[dict[str, str]] = {}
    options_of_parts: ClassVar[frozenset[str]] = frozenset()

    forward: Callable[..., Any]
    _arguments: dict[str, Any]  # of the constructor, as plain values
    _base_arguments: tuple[
        str, dict[str, Any]
    ]  # name and arguments of the class of graphattn that a user's class inherits
    _at_first: dict[str, Any]  # attributes with those names, at the end of the constructor

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__.split(".")[0] == "graphattn":
            KNOWN[cls.__name__] = cls
        made: Any = cls
        if "__init__" in vars(cls):
            made.__init__ = _recorded(cls, made.__init__)
        if "forward" in vars(cls):
            made.forward = _answering(made.forward)

    def when_made(self) -> None:
        """Run at the end of the constructor, that of a subclass included."""

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as plain values: ``type(x)(**x.config)`` makes another.

        A module among them becomes a dict with its class. An attribute that has been changed since
        construction counts with its present value.

        Example:
            >>> import graphattn as ga
            >>> layer = ga.nn.KrauseAttention(16, heads=4, top_k=3)
            >>> layer.config["top_k"], layer.config["rope"]
            (3, False)
        """
        if not _is_recorded(self):
            raise RuntimeError(
                f"config of this {type(self).__name__} is not known, because it was pickled by an "
                "earlier version, or its constructor has not finished: make it again in code"
            )
        return _present(self, self._arguments)

    def save_pretrained(self, directory: Any) -> None:
        """Write ``model.safetensors`` and ``config.json`` into a folder: :func:`graphattn.save`."""
        save(self, directory)

    @classmethod
    def from_pretrained(cls, directory: Any, *, device: Any = "cpu") -> Self:
        """Load a module of this class from its files: :func:`graphattn.load`.

        Raises: ValueError: as :func:`graphattn.load`, and if the files are those of another class.
        """
        module: Self = load(directory, device=device, kind=cls)
        return module

    @classmethod
    def comparable(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` in a normal form, so that configs that compute the same are equal."""
        return config

    @classmethod
    def advice(cls, name: str) -> str | None:
        """Return advice on an argument that the constructor does not have, or None."""
        return None

    # Hooks that torch calls for every module of a state dict.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and _is_recorded(self):
            metadata.setdefault(prefix[:-1], {}).update(record(self))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: list[str],
    ) -> None:
        if options := differences(self, local_metadata):
            where = f" at {prefix[:-1]!r}" if prefix else ""
            error_msgs.append(
                f"the weights of this {type(self).__name__}{where} were trained with other "
                f"options: {'; '.join(options)}. Make it with the saved config, or load the "
                "weights without this check from a plain dict: load_state_dict(dict(state))"
            )
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


def plain(value: Any) -> Any:
    """Convert `value` to JSON values: a module to its class and config, other objects to a
    class."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Configured) and _is_recorded(value):
        return {"class": class_name(type(value)), **value.config}
    if isinstance(value, list | tuple | nn.ModuleList):
        return [plain(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(entry) for key, entry in value.items()}
    return {"class": f"{type(value).__module__}.{type(value).__qualname__}"}


def not_default(module: Configured) -> dict[str, Any]:
    """The present values of a module's arguments that are not the defaults of its constructor.

    For a user's subclass they are the arguments of the class of graphattn that it inherits.
    """
    if not _is_recorded(module):
        return {}
    name, arguments = module._base_arguments
    cls = KNOWN.get(name, type(module))
    known = inspect.signature(cls.__init__).parameters
    present = cls.comparable(_present(module, arguments))
    return {
        name: value
        for name, value in present.items()
        if name not in known or value != known[name].default
    }


def record(module: Configured) -> dict[str, Any]:
    """Return the record of a module for the metadata of a state dict.

    For a user's subclass it also contains the class of graphattn that it inherits, with that
    class's arguments, so that the weights of the two can be compared.
    """
    entry: dict[str, Any] = {"class": class_name(type(module)), "config": module.config}
    base, arguments = module._base_arguments
    if base != entry["class"]:
        entry["base"] = {"class": base, "config": _present(module, arguments)}
    return entry


def differences(module: Configured, saved: Any) -> list[str]:
    """List the differences between a module and a saved record that the weights do not show."""
    if not isinstance(saved, dict) or "config" not in saved or not _is_recorded(module):
        return []
    entry = record(module)
    theirs, ours = saved.get("base", saved), entry.get("base", entry)
    if theirs.get("class") != ours["class"]:
        return [f"they are those of a {theirs.get('class')}"]
    options = _differing(KNOWN.get(ours["class"], type(module)), theirs["config"], ours["config"])
    if not options and "base" in entry and saved.get("class") == entry["class"]:
        options = _differing(type(module), saved["config"], entry["config"])
    return options


def _differing(cls: type[Configured], saved: Any, config: dict[str, Any]) -> list[str]:
    if not isinstance(saved, dict):
        return [f"their config must be a dict, got {type(saved).__name__}"]
    # An option that one side does not know is off there, or has its default value.
    known = inspect.signature(cls.__init__).parameters
    defaults = {
        name: None if known[name].default is inspect.Parameter.empty else plain(known[name].default)
        for name in config
        if name in known
    }
    theirs, ours = cls.comparable({**defaults, **saved}), cls.comparable(config)
    options = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name in NOT_COMPARED or name in cls.options_of_parts:
            continue
        there, here = theirs.get(name), ours.get(name)
        if name in TOLD_BY_NAMES and TOLD_BY_NAMES[name] in (there, here):
            continue
        if there != here and not (name not in ours and there in (None, False)):
            options.append(f"saved with {name}={there!r}, but this one has {name}={here!r}")
    return options


def _is_recorded(module: Configured) -> bool:
    return vars(module).get("_arguments") is not None


def _is_described(value: Any) -> bool:
    return isinstance(value, dict) and "class" in value


def _built(value: Any) -> Any:
    """Return `value` with every described module replaced by the module itself."""
    if _is_described(value):
        return build(value)
    if isinstance(value, list) and any(map(_is_described, value)):
        return [_built(entry) for entry in value]
    return value


def _present(module: Configured, arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy arguments, with attributes that have changed since construction."""
    present: dict[str, Any] = copy.deepcopy(arguments)
    for name, value in present.items():
        part = vars(module)["_modules"].get(name)
        now = _plain_attribute(module, name)
        if part is not None and _is_described(value):
            present[name] = plain(part)
        elif now != module._at_first[name]:
            present[name] = now
    return present


def _plain_attribute(module: Configured, name: str) -> Any:
    """Return the attribute of an argument if it is a number, a string or None; else "..."."""
    value = vars(module).get(module.attribute_of.get(name, name), ...)
    return value if isinstance(value, bool | int | float | str | None) else ...


def _names(parameters: list[inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in variable]


def _takes_any_name(parameters: list[inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def constructor_arguments(cls: type) -> tuple[str, ...]:
    """Return the names of a constructor's arguments; with ``**options``, also of its base's."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            names |= dict.fromkeys(_names(parameters))
            if not _takes_any_name(parameters):
                break
    return tuple(names)


def _recorded(cls: type[Configured], init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it records its arguments."""
    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())[1:]
    allowed, is_open = _names(parameters), _takes_any_name(parameters)

    @functools.wraps(init)
    def construct(self: Configured, *args: Any, **kwargs: Any) -> None:
        unknown = [] if is_open else [name for name in kwargs if name not in allowed]
        if unknown:
            call = _names(list(inspect.signature(cls.forward).parameters.values())[1:])
            raise refuse_unknown(
                f"{cls.__name__}(...)", unknown, allowed, ("the call", call), cls.advice
            )
        args = tuple(_built(value) for value in args)
        kwargs = {name: _built(value) for name, value in kwargs.items()}
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            init(self, *args, **kwargs)  # raises Python's error for missing arguments
            raise
        state = vars(self)
        outermost = "_constructing" not in state
        if outermost:
            state["_constructing"] = True
            state["_arguments"], state["_base_arguments"] = None, None
        bound.apply_defaults()
        mine: dict[str, Any] = {}
        surplus: tuple[Any, ...] = ()
        for parameter in parameters:
            value = bound.arguments[parameter.name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                mine.update(value)
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                surplus = value
            else:
                mine[parameter.name] = value
        mine = {name: plain(value) for name, value in mine.items()}
        if state["_base_arguments"] is None and KNOWN.get(cls.__name__) is cls:
            state["_base_arguments"] = cls.__name__, mine
        try:
            init(self, *args, **kwargs)
        finally:
            if outermost:
                del state["_constructing"]
        if outermost:
            if (
                surplus and state["_base_arguments"]
            ):  # passed on by *args: use the names of the base class
                base = KNOWN[state["_base_arguments"][0]]
                below = list(inspect.signature(base.__init__).parameters)[1:]
                mine = {**dict(zip(below, map(plain, surplus), strict=False)), **mine}
            state["_arguments"] = mine
            if state["_base_arguments"] is None:  # no base class of graphattn has recorded them
                state["_base_arguments"] = class_name(type(self)), mine
            names = {*mine, *state["_base_arguments"][1]}
            state["_at_first"] = {name: _plain_attribute(self, name) for name in names}
            self.when_made()

    return construct


def _answering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward method so that it explains unknown and missing arguments."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if _takes_any_name(parameters):
        return forward
    allowed = tuple(_names(parameters))
    required = [p.name for p in parameters if p.name in allowed and p.default is p.empty]
    num_required = len(required)

    @functools.wraps(forward)
    def call(self: Configured, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in allowed:
                raise _refuse_call(self, kwargs, allowed)
        if len(args) < num_required:
            missing = [name for name in required[len(args) :] if name not in kwargs]
            if missing:
                raise refuse_missing(f"the call of {type(self).__name__}", missing, allowed)
        return forward(self, *args, **kwargs)

    answering: Any = call
    # Calls without keywords have no unknown argument, and with that many positions none is missing.
    answering.without_keywords, answering.num_required = forward, num_required
    return call


def _refuse_call(module: Configured, given: dict[str, Any], allowed: tuple[str, ...]) -> TypeError:
    unknown = [name for name in given if name not in allowed]
    made_with = constructor_arguments(type(module))
    return refuse_unknown(
        f"the call of {type(module).__name__}", unknown, allowed, ("the constructor", made_with)
    )
