"""Save changed models completely or not at all, with marks that only this package removes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphattn.integrations.transformers.options import VERSION

# transformers warns about unused weights when it loads a model, so a user who loads a changed
# model without this package sees a warning about the mark.
MARK = "load_with_graphattn_integrations_transformers_from_pretrained"
# peft warns about settings of adapters that it does not know, and ignores them. Adapter files do
# not contain the changes of the model below, so the warning is right for every model.
ADAPTER_MARK = "change_the_model_with_graphattn_integrations_transformers_before_loading_adapters"


def mark(model: nn.Module) -> None:
    """Mark a model, so that loading it without this package gives a warning, and saving is atomic.

    `load_state_dict` does not need the mark, so the original weights can still be loaded.
    """
    if MARK not in dict(model.named_buffers(recurse=False)):
        model.register_buffer(MARK, torch.tensor(VERSION))
        model.register_load_state_dict_post_hook(_without_mark)
        model.register_state_dict_pre_hook(_mark_adapters)
    # Use a partial: pickle would replace a bound method by that of the class.
    model.save_pretrained = functools.partial(save_pretrained, model)  # type: ignore[assignment]


def is_marked(model: nn.Module) -> bool:
    """Return whether this package has changed a model or a part of it."""
    return any(name.rpartition(".")[2] == MARK for name, _ in model.named_buffers())


def _without_mark(module: nn.Module, keys: Any) -> None:
    missing = [name for name in keys.missing_keys if name.rpartition(".")[2] != MARK]
    keys.missing_keys[:] = missing


def _mark_adapters(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Mark the settings of the adapters of a model, which peft writes after it reads the weights.

    peft gives a model no other sign that its adapters are being saved.
    """
    configs = getattr(module, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        config.to_dict = functools.partial(_marked_settings, config)


def _marked_settings(config: Any) -> dict[str, Any]:
    vars(config).pop("to_dict", None)  # another model, which was not changed, may share the object
    return {**type(config).to_dict(config), ADAPTER_MARK: VERSION}


# Saving.

PREFIX = ".saving-"


def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model into a hidden folder inside `save_directory`, then move all files up.

    If writing is interrupted (by an error, a full disk, Ctrl-C, or the end of the process), the old
    files do not change. If moving fails, the old files are restored. Other files, such as those of
    a tokenizer, stay. The disk needs space for both copies.

    With `push_to_hub` or `distributed_checkpoint`, and in processes that do not write, this calls
    only the save method of the class.

    Raises: ValueError: if adapters are merged into the weights, because files would contain them
        twice.
    """
    _refuse_merged(model)
    save = type(model).save_pretrained
    given = inspect.signature(save).bind(model, save_directory, *args, **kwargs)
    given.apply_defaults()
    settings = {**given.arguments, **given.arguments.get("kwargs", {})}
    folder = Path(save_directory)
    theirs = settings.get("push_to_hub") or settings.get("distributed_checkpoint")
    if theirs or folder.is_file() or not settings.get("is_main_process", True):
        return save(model, save_directory, *args, **kwargs)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _remove_leftovers(folder)
        prefix = f"{PREFIX}{socket.gethostname()}-{os.getpid()}-"
        hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        try:
            result = save(model, str(hidden), *args, **kwargs)
            _move(hidden, folder)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    return result


def _refuse_merged(model: Any) -> None:
    """Raise an error for merged adapters: they are also stored separately, so loading adds them
    twice."""
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise ValueError(
                "model must not be saved while adapters are merged into its weights, got "
                f"{module.merged_adapters} merged in {name}: call unmerge() of such layers first, "
                "or make a model without adapters with PeftModel.merge_and_unload()"
            )


def _move(hidden: Path, folder: Path) -> None:
    """Move all files of a hidden folder up, the settings last; or none of them."""
    names = [path.relative_to(hidden) for path in hidden.rglob("*") if path.is_file()]
    names.sort(key=lambda name: (name.suffix == ".json", str(name)))
    kept = Path(tempfile.mkdtemp(prefix="before-", dir=hidden))
    touched: list[Path] = []
    try:
        for name in [*names, *_outdated(folder, {str(name) for name in names})]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (folder / name).exists():
                (kept / name).parent.mkdir(parents=True, exist_ok=True)
                _keep(folder / name, kept / name)
            touched.append(name)
            if (hidden / name).exists():
                os.replace(hidden / name, folder / name)
            else:
                (folder / name).unlink()
    except BaseException:
        for name in touched:
            if (kept / name).exists():
                os.replace(kept / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        raise


def _keep(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # a file system without hard links
        shutil.copy2(path, copy)


WEIGHTS = re.compile(
    r"(model|adapter_model)(\.(?!safetensors)[^-/]+?)?(-\d{5}-of-\d{5})?\.safetensors"
)
INDEX = re.compile(r"(model|adapter_model)\.safetensors\.index(\.[^/]+)?\.json")


def _outdated(folder: Path, written: set[str]) -> list[Path]:
    """Return weight files of an earlier save with the same name and variant that are now unused.

    transformers would read an old single file instead of the new shards.
    """
    sets = {_set_of(name) for name in written} - {None}
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [Path(name) for name in names if name not in written and _set_of(name) in sets]


def _set_of(name: str) -> tuple[str, str] | None:
    """Return the set of weights that a file belongs to: its stem and its variant."""
    match = WEIGHTS.fullmatch(name) or INDEX.fullmatch(name)
    return None if match is None else (match[1], (match[2] or "").lstrip("."))


def _remove_leftovers(folder: Path) -> None:
    """Remove folders of processes on this machine that were killed while saving."""
    start = f"{PREFIX}{socket.gethostname()}-"
    for path in folder.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(start).partition("-")[0]
        if path.name.startswith(start) and number.isdigit() and not _runs(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
