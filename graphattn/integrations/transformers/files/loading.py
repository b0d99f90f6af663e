"""Load models that were changed by this package from their files."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from graphattn.integrations.transformers.configure import register, replay_configure
from graphattn.integrations.transformers.conversion.convert import replay_convert
from graphattn.integrations.transformers.files.saving import MARK, mark
from graphattn.integrations.transformers.options import VERSION, GraphOf, is_part, steps_of
from graphattn.integrations.transformers.shortcut.add import replay_krause_shortcut


def from_pretrained(
    directory: Any,
    *,
    graph: GraphOf | list[GraphOf] | None = None,
    model_class: Any = None,
    **kwargs: Any,
) -> Any:
    """Load a model that was changed by this package, including added parameters.

    The files are those of ``model.save_pretrained(directory)``. The config contains the changes
    under `graphattn`; they are made again before the weights are read.

    Args:
        directory: a folder or a name on the hub, as in transformers.
        graph: the function that was passed to `configure` as `graph`, because files cannot contain
            it; a list of them, in the order of the calls, if there were several.
        model_class: the class of the model, or an ``AutoModelFor...``; the first of the
            `architectures` in the config if None. With another class, transformers warns about
            additional or missing parameters, as usual.
        **kwargs: arguments of ``from_pretrained`` of that class (`dtype`, `device_map`, ...),
            including attributes of the config (`num_labels`, ...).

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: if the config contains no changes by graphattn, was written by a newer version,
            or does not fit the weights; if the folder contains only adapters; or if
            `attn_implementation` is not "graphattn" although layers were configured.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> from graphattn.integrations import transformers as gat
        >>> config = BertConfig(
        ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64)
        >>> model = BertModel(config)
        >>> gat.configure(model, mixer="rbf", window=8)
        [0, 1]
        >>> folder = tempfile.mkdtemp()
        >>> model.save_pretrained(folder)
        >>> gat.from_pretrained(folder).config._attn_implementation
        'graphattn'
    """
    import transformers

    config = kwargs.pop("config", None)
    wants_info = kwargs.pop("output_loading_info", False)
    if config is None or isinstance(config, str | os.PathLike):
        taken = {name: kwargs[name] for name in HUB if name in kwargs}
        source = directory if config is None else config
        _refuse_adapters(source)
        names = [name for name in kwargs if name not in (*HUB, *NOT_CONFIG)]
        others = {name: kwargs.pop(name) for name in names}
        config, unused = transformers.AutoConfig.from_pretrained(
            source, **taken, **others, return_unused_kwargs=True
        )
        kwargs |= {name: unused[name] for name in names if name in unused}
    steps = steps_of(config)
    if not steps:
        raise ValueError(
            f"directory must contain a model changed by graphattn, got {str(directory)!r}, whose "
            f"config has no changes under 'graphattn': {_what_else(config)}"
        )
    cls = _class_of(config, model_class, directory, kwargs)
    wanted = "graphattn" if any(step["call"] == "configure" for step in steps) else None
    if kwargs.get("attn_implementation") is None:
        kwargs["attn_implementation"] = wanted
    elif wanted is not None and kwargs["attn_implementation"] != wanted:
        raise ValueError(
            f"attn_implementation must be {wanted!r} (or not given) for a model whose layers were "
            f"configured, got {kwargs['attn_implementation']!r}, which ignores the options of "
            "configure(). To use it anyway, call model.set_attn_implementation() after loading"
        )
    model, info = _rebuilt(cls, steps, graph).from_pretrained(
        directory, config=config, output_loading_info=True, **kwargs
    )
    model.__class__ = cls
    frozen = model.__dict__.pop(FROZEN)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if getattr(model, MARK).device.type != "meta":
        getattr(model, MARK).fill_(VERSION)  # weights from another class may not contain it
    _check_loaded(model, info, config, directory, bool(kwargs.get("ignore_mismatched_sizes")))
    return (model, info) if wants_info else model


HUB = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
CODE = tuple(name for name in HUB if name not in ("subfolder", "trust_remote_code"))
# Arguments of the model itself, although some are also attributes of configs.
NOT_CONFIG = (
    "attn_implementation",
    "device_map",
    "distributed_config",
    "dtype",
    "experts_implementation",
    "quantization_config",
    "torch_dtype",
)
# Names of parameters that adapters froze, and that loading would make trainable.
FROZEN = "_frozen_by_replay"
WRONG = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _refuse_adapters(source: Any) -> None:
    folder = Path(source)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"directory must contain a whole model, got {str(source)!r}, which contains only "
            "adapters of PEFT: make the model as it was before the adapters, with the same calls "
            "of this package, and load the adapters with peft.PeftModel.from_pretrained(model, "
            "directory)"
        )


def _what_else(config: Any) -> str:
    if is_part(config):
        return (
            "it is a part of a model that was changed. Load it with transformers, set "
            "model.config.graphattn = None, and make the changes again"
        )
    return "load it with transformers"


def _check_loaded(model: Any, info: Any, config: Any, directory: Any, ignore: bool) -> None:
    """Raise an error if weights do not fit; transformers has warned about other heads."""
    wrong = {kind: {name for name in info.get(kind) or () if not _is_mark(name)} for kind in WRONG}
    if ignore:
        wrong["mismatched_keys"] = set()
    if type(model).__name__ not in (config.architectures or [type(model).__name__]):
        wrong["unexpected_keys"] = set()
        if wrong["missing_keys"]:
            with torch.device("meta"):
                plain = set(type(model)(config).state_dict())
            wrong["missing_keys"] -= plain
    named = {kind: sorted(map(str, names)) for kind, names in wrong.items() if names}
    if named:
        raise ValueError(
            f"weights in {str(directory)!r} do not fit the changes in config.graphattn: {named}"
        )


def _is_mark(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == MARK


def _class_of(config: Any, model_class: Any, directory: Any, kwargs: dict[str, Any]) -> Any:
    """Return the given class, which may be an AutoModel, or the one that was saved."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    written = getattr(config, "auto_map", None) or {}
    if model_class is None:
        names = config.architectures or ()
        for name in names:
            if hasattr(transformers, name):
                return getattr(transformers, name)
        written = {key: place for key, place in written.items() if place.split(".")[-1] in names}
    elif not hasattr(model_class, "_model_mapping"):
        return model_class
    else:
        if type(config) in model_class._model_mapping:
            classes = model_class._model_mapping[type(config)]
            return classes[0] if isinstance(classes, list | tuple) else classes
        written = {key: place for key, place in written.items() if key == model_class.__name__}
    if written and kwargs.get("trust_remote_code"):
        taken = {name: kwargs[name] for name in CODE if name in kwargs}
        return get_class_from_dynamic_module(next(iter(written.values())), directory, **taken)
    raise ValueError(
        "model_class must be given: transformers has no class for the architectures of the "
        f"config, {config.architectures}. If their code is stored with the weights, pass "
        "trust_remote_code=True"
    )


def _rebuilt(cls: Any, steps: list[dict[str, Any]], graph: Any) -> Any:
    """Make a subclass of a model that is changed right after construction, before weights are
    read."""
    register()

    def initialize(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        replay(self, steps, graph)
        parameters = self.named_parameters()
        setattr(self, FROZEN, {name for name, p in parameters if not p.requires_grad})

    body = {"__init__": initialize, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def replay(model: Any, steps: list[dict[str, Any]], graph: Any = None) -> None:
    """Make the changes in a config to a model, without storing them again."""
    calls: dict[str, Any] = {
        "configure": replay_configure,
        "convert": replay_convert,
        "add_krause_shortcut": replay_krause_shortcut,
    }
    graphs = _given(steps, graph)
    for step in steps:
        arguments = dict(step)
        call = arguments.pop("call")
        if call not in calls:
            raise ValueError(
                f"config.graphattn contains a change {call!r}, which this version does not know "
                f"({', '.join(calls)}): update graphattn"
            )
        try:
            inspect.signature(calls[call]).bind(model, **arguments)
        except TypeError as error:
            raise ValueError(
                f"config.graphattn contains a change {call!r} with arguments that this version "
                f"does not know ({error}), got {step}: update graphattn"
            ) from None
        if call == "configure" and arguments.get("graph") is not None:
            arguments["graph"] = graphs.pop(0)
        calls[call](model, **arguments)
    mark(model)


def _given(steps: list[dict[str, Any]], graph: Any) -> list[GraphOf]:
    """Return the functions for the changes that had one, in their order."""
    layers = [step["layers"] for step in steps if step.get("graph") is not None]
    graphs = [] if graph is None else list(graph) if isinstance(graph, list | tuple) else [graph]
    if len(graphs) == len(layers):
        return graphs
    if not layers:
        raise ValueError(
            "graph must be None, because no layer of this model was configured with a graph, got "
            "one"
        )
    if not graphs:
        raise ValueError(
            "graph must be given, because the model was configured with a function for its graph, "
            "and files cannot contain functions"
        )
    raise ValueError(
        f"graph must be a list of {len(layers)} functions, for the layers {layers}, got "
        f"{len(graphs)}"
    )
