"""Checkpoints of a run: never incomplete; the newest and the best are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphattn.nn.files import pretrained
from graphattn.nn.files.config import Configured
from graphattn.train.runs.records import sync

UNFINISHED = "."  # prefix of folders that are being written or removed
STATE = "trainer_state.json"  # the name in transformers
# With ema_decay, the weights in training: the model of a checkpoint is their average.
NOT_AVERAGED = "not_averaged.safetensors"
# What a checkpoint consists of, beside the weights, and what every file must have.
ENTRIES = {
    STATE: {"global_step", "best_global_step"},
    "running_loss.json": {"total", "count", "first", "above"},
    "optimizer.pt": {"state", "param_groups"},
    "scheduler.pt": {"last_epoch"},
    "rng_state": {"python", "numpy", "cpu"},
}
NAME = re.compile(r"step-(\d{8,})")
LEFT = re.compile(r"\.(step-\d{8,}|model)\.(unfinished|removed)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in the folder of a run."""
    return folder / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, ascending; a folder with that name is complete."""
    parent = folder / "checkpoints"
    names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)


def best_checkpoint(folder: Path) -> int | None:
    """Return the step with the lowest validation loss; without validation, the newest step."""
    steps = complete_checkpoints(folder)
    if not steps:
        return None
    text = (checkpoint_path(folder, steps[-1]) / STATE).read_text(encoding="utf-8")
    best = json.loads(text).get("best_global_step")
    return best if best in steps else steps[-1]


def check_newest(folder: Path, *, averages: bool = False) -> None:
    """Raise a ValueError if a file of the newest checkpoint is missing or broken.

    `averages` says that the run averages its weights.
    """
    steps = complete_checkpoints(folder)
    if not steps:
        return
    path = checkpoint_path(folder, steps[-1])
    random = [file.name for file in path.glob("rng_state*.pth")] or ["rng_state.pth"]
    weights = [pretrained.WEIGHTS, *[NOT_AVERAGED] * averages]
    for name in (*weights, *(file for file in ENTRIES if file != "rng_state"), *random):
        if (wrong := _what_is_wrong(path / name)) is not None:
            before = f"the checkpoint of step {steps[-2]}" if len(steps) > 1 else "the start"
            raise ValueError(
                f"{path / name} {wrong}, so the run cannot continue from this checkpoint: remove "
                f"the folder {str(path)!r}, and it continues from {before}"
            )


def _what_is_wrong(file: Path) -> str | None:
    """Return what is wrong with a file (missing, cut off, of other content), or None."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return "is missing"
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                return None
        is_json = file.suffix == ".json"
        content = json.loads(file.read_text(encoding="utf-8")) if is_json else _read_pickle(file)
    except (ValueError, SafetensorError) as error:
        return f"is broken ({error})"
    needed = ENTRIES[file.name if file.name in ENTRIES else "rng_state"]
    lacks = needed.difference(content if isinstance(content, dict) else ())
    return f"is broken (it has no {sorted(lacks)[0]!r})" if lacks else None


def _read_pickle(file: Path) -> Any:
    """Read a file of torch.save without its numbers, and without executing anything in it."""
    from transformers.trainer_pt_utils import safe_globals  # as Trainer, which reads it later

    try:
        with safe_globals():
            return torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # an unpickler may raise anything
        raise ValueError(
            "it is cut off, or contains other objects than numbers, which are never loaded"
        ) from error


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files and folders of a killed process."""
    for place in (folder, folder / "checkpoints"):
        for path in place.glob(f"{UNFINISHED}*") if place.is_dir() else ():
            if not path.is_dir():
                if path.name.startswith((".log.jsonl.", ".run.json.", ".config.yaml.")):
                    path.unlink(missing_ok=True)
            elif LEFT.fullmatch(path.name):
                shutil.rmtree(path)


def unfinished_path(folder: Path, step: int) -> Path:
    """Return the path where a step's checkpoint is written before it is complete."""
    return folder / "checkpoints" / f"{UNFINISHED}step-{step:08d}.unfinished"


def publish(aside: Path, path: Path) -> None:
    """Rename a complete folder to its final name, after its contents are on the disk.

    An older folder with that name is removed only after the new one has replaced it. If the process
    is killed in between, the old folder or none remains.
    """
    for parent, _, names in os.walk(aside):
        sync(*(Path(parent) / name for name in names), Path(parent))
    before = path.with_name(f"{UNFINISHED}{path.name}.removed")
    shutil.rmtree(before, ignore_errors=True)
    if path.exists():
        path.rename(before)
    aside.rename(path)
    sync(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def keep_checkpoints(folder: Path, newest: int, best: int | None) -> None:
    """Remove all checkpoints except the last `newest` ones and the one of step `best`."""
    steps = complete_checkpoints(folder)
    for step in steps[:-newest]:
        if step != best:
            _remove(checkpoint_path(folder, step))


def _remove(path: Path) -> None:
    """Rename a folder, then remove it, so that no partly removed folder has the old name."""
    aside = path.with_name(f"{UNFINISHED}{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    sync(path.parent)
    shutil.rmtree(aside)


# Models.


def save_model(model: nn.Module, folder: Path) -> None:
    """Write a model by :func:`graphattn.save`, or only its weights if that is not possible."""
    if isinstance(model, Configured):
        try:
            pretrained.save(model, folder)
            return
        except ValueError:  # it contains other classes, or has been changed after construction
            pass
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder / pretrained.WEIGHTS)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write only the weights of a model."""
    from safetensors.torch import save_model as save_numbers

    save_numbers(model, str(path))


def load_weights(model: nn.Module, path: Path) -> None:
    """Read the weights of a file into a model with the same shapes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    try:
        load_model(model, path, strict=True)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error


def copy_model(source: Path, target: Path) -> None:
    """Copy the model of a checkpoint into its own folder."""

    def write(aside: Path) -> None:
        for name in (pretrained.WEIGHTS, pretrained.CONFIG):
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)

    write_folder(target, write)


def write_folder(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a folder under another name, and rename it when it is complete."""
    aside = path.with_name(f"{UNFINISHED}{path.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        publish(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
