"""Models that were changed, as files: written whole or not at all, and made again from them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from graphattn.integrations.transformers.options import VERSION, GraphOf, steps_of

# transformers names weights that it has no use for when it loads a model: that is how whoever
# loads a changed model as if it were not hears of it.
MARK = "load_with_graphattn_integrations_transformers_from_pretrained"


def from_pretrained(
    directory: Any, *, graph: GraphOf | None = None, model_class: Any = None, **kwargs: Any
) -> Any:
    """Load a model that was changed by this package, added parameters included.

    The files are those of ``model.save_pretrained(directory)``. What was done to the model stands
    in its config, under `graphattn`, and is done again before the weights are read.

    Args:
        directory: a folder or a name on the hub, as in transformers.
        graph: the function that `configure` was given as `graph`, which files do not hold.
        model_class: the class of the model; the first of the config's `architectures` if None.
        **kwargs: what the class's own ``from_pretrained`` takes (`dtype`, `device_map`, ...).

    Returns:
        The model, in evaluation mode as transformers loads it.

    Raises:
        ValueError: if the config holds nothing of graphattn, was written by a newer version, or
            the weights do not fit what it says.

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
    if config is None:
        taken = {name: kwargs[name] for name in HUB if name in kwargs}
        config = transformers.AutoConfig.from_pretrained(directory, **taken)
    steps = steps_of(config)
    if not steps:
        raise ValueError(
            f"directory must hold a model changed by graphattn, got {str(directory)!r}, whose "
            "config has no steps under 'graphattn': load it with transformers itself"
        )
    cls = _class_of(config, model_class)
    kwargs.setdefault("attn_implementation", _implementation(steps))
    model, info = _rebuilt(cls, steps, graph).from_pretrained(
        directory, config=config, output_loading_info=True, **kwargs
    )
    model.__class__ = cls
    frozen = model.__dict__.pop(FROZEN)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    wrong = {kind: sorted(map(str, info[kind])) for kind in WRONG if info.get(kind)}
    if wrong:
        raise ValueError(f"the weights in {str(directory)!r} do not fit config.graphattn: {wrong}")
    return model


HUB = ("cache_dir", "revision", "token", "subfolder", "local_files_only", "trust_remote_code")
FROZEN = "_frozen_by_replay"  # names of what an adapter froze, which loading makes trainable
WRONG = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _implementation(steps: list[dict[str, Any]]) -> str | None:
    configured = any(step["call"] == "configure" for step in steps)
    return "graphattn" if configured else None


def _class_of(config: Any, model_class: Any) -> Any:
    import transformers

    if model_class is not None:
        return model_class
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ValueError(
        f"model_class must be given: transformers has no class of the config's architectures "
        f"({config.architectures})"
    )


def _rebuilt(cls: Any, steps: list[dict[str, Any]], graph: GraphOf | None) -> Any:
    """The class of a model that is changed as soon as it is made, before weights are read."""
    from graphattn.integrations.transformers.configure import register

    register()

    def initialize(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        replay(self, steps, graph)
        parameters = self.named_parameters()
        setattr(self, FROZEN, {name for name, p in parameters if not p.requires_grad})

    body = {"__init__": initialize, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def replay(model: Any, steps: list[dict[str, Any]], graph: GraphOf | None = None) -> None:
    """Do to a model what the steps of a config say, without writing them down again."""
    from graphattn.integrations.transformers.configure import replay_configure
    from graphattn.integrations.transformers.convert import replay_convert
    from graphattn.integrations.transformers.shortcut import replay_krause_shortcut

    calls: dict[str, Any] = {
        "configure": replay_configure,
        "convert": replay_convert,
        "add_krause_shortcut": replay_krause_shortcut,
    }
    for step in steps:
        arguments = dict(step)
        call = arguments.pop("call")
        if call not in calls:
            raise ValueError(
                f"config.graphattn names the step {call!r}, which this version does not know "
                f"({', '.join(calls)}): update graphattn"
            )
        if call == "configure":
            arguments["graph"] = _given(arguments.get("graph"), graph)
        calls[call](model, **arguments)
    mark(model)


def _given(kept: Any, graph: GraphOf | None) -> GraphOf | None:
    if kept is None:
        return None
    if graph is None:
        raise ValueError(
            "graph must be given: the model was configured with a function for its graph, and "
            "files do not hold functions"
        )
    return graph


def mark(model: nn.Module) -> None:
    """Let loading without this package be heard of, and saving be whole or not at all."""
    if MARK not in dict(model.named_buffers(recurse=False)):
        model.register_buffer(MARK, torch.tensor(VERSION))
    model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]


def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the model as its class does, in a folder beside it, then move all the files."""
    save = type(self).save_pretrained
    folder = Path(save_directory)
    if kwargs.get("push_to_hub") or folder.is_file() or not kwargs.get("is_main_process", True):
        return save(self, save_directory, *args, **kwargs)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        result = save(self, beside, *args, **kwargs)
        folder.mkdir(exist_ok=True)
        written = sorted(beside.iterdir(), key=_settings_last)
        for path in written:
            os.replace(path, folder / path.name)
        _drop_old_weights(folder, {path.name for path in written})
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return result


def _settings_last(path: Path) -> tuple[bool, str]:
    return path.suffix == ".json", path.name


def _drop_old_weights(folder: Path, written: set[str]) -> None:
    """Shards of an earlier, larger save, which nothing names any more."""
    for path in [*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"]:
        if path.name not in written and any(name.startswith("model") for name in written):
            path.unlink(missing_ok=True)
