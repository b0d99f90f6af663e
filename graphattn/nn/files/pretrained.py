"""A layer or model as files: `model.safetensors` (weights) and `config.json` (class, arguments).

Names and formats are those of Hugging Face. Like a state dict, the file of the weights also
contains the configs of all layers, so loading fails if config.json describes other options. Nothing
in the files is executed: config.json only names classes of graphattn and their arguments.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from graphattn.version import __version__

WEIGHTS, CONFIG = "model.safetensors", "config.json"
OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".json")
LAYERS = "graphattn"  # key of the configs of all layers in the safetensors header

# A constructor may make some parameters that it replaces later.
SLACK = 16


class Described:
    """A module whose `config` contains the arguments to make another one like it."""

    state_dict: Callable[..., Any]

    @property
    def config(self) -> dict[str, Any]:
        raise NotImplementedError


# The only classes that a file may name.
KNOWN: dict[str, type[Any]] = {}


def class_name(cls: type) -> str:
    """Return the name of a class; classes outside graphattn get their module as a prefix."""
    return (
        cls.__name__ if KNOWN.get(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"
    )


def build(description: dict[str, Any], kind: type | None = None) -> Any:
    """Make the module that a dict with its class and arguments describes.

    Args:
        description: a dict made by :func:`plain`.
        kind: the class to make instead of the named one.

    Raises:
        ValueError: if no class is named, or the class is not one of graphattn.
    """
    arguments = {name: value for name, value in description.items() if name != "class"}
    if kind is None:
        kind = KNOWN.get(description["class"]) if isinstance(description["class"], str) else None
    if kind is None:
        raise ValueError(
            f"class must be a class of graphattn, got {description['class']!r}, which cannot be "
            "made from files alone: make the model in code and load its state dict"
        )
    return kind(**arguments)


def save(module: Any, directory: Any) -> None:
    """Write both files into `directory`; see :func:`graphattn.save`."""
    from safetensors.torch import save_file

    if not isinstance(module, Described):
        raise ValueError(
            f"model must be a layer or model of graphattn, got {type(module).__name__}, which "
            "cannot be made again from files alone: save its state dict, in which graphattn's "
            "layers also store their config. If the model is compiled or distributed, save the "
            "model inside it"
        )
    config = module.config
    foreign = _foreign_part(config)
    if foreign:
        raise ValueError(
            f"model contains {foreign} in {_where(config, foreign)!r}, which is not a class of "
            "graphattn, so it cannot be made again from files alone: save its state dict instead"
        )
    state = module.state_dict()
    _check_is_as_configured(module, config, state)
    folder = _folder(directory)
    is_file = folder.exists() and not folder.is_dir()
    if is_file or (folder.suffix.lower() in OF_FILES and not folder.exists()):
        what = "which is a file" if is_file else "the name of a file"
        raise ValueError(
            f"directory must be a folder, in which {WEIGHTS} and {CONFIG} will be written, got "
            f"{str(folder)!r}, {what}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors, ties = _without_ties(state)
    # Tied weights in the form of safetensors: from the name left out to the name that is stored.
    header = {"format": "pt", LAYERS: json.dumps(_layers(state)), **ties}
    described = {"class": class_name(type(module)), **config}
    text = json.dumps({**described, "graphattn_version": __version__}, indent=2) + "\n"
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata=header))
    _replace(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def load(directory: Any, *, device: Any = "cpu", kind: type | None = None) -> Any:
    """Make the module from the files in `directory`; see :func:`graphattn.load`."""
    folder = _folder(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"directory must be a folder that ga.save wrote, got {str(folder)!r}, which "
            f"{'is a file' if folder.exists() else 'does not exist'}. Models are not downloaded"
        )
    path = folder / CONFIG
    description = _read_config(path)
    kind = _kind(path, description, kind)
    state, ties = _read_weights(folder / WEIGHTS, device)
    try:
        check_depths(description, state)
        with no_larger_than(state):
            module = _make(description, kind, [*state, *ties])
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error
    state.update({name: state[kept] for name, kept in ties.items()})
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS} does not fit {path}: {error}") from error
    for name, kept in ties.items():
        _tie(module, name, kept)
    return module.to(device).eval()


# Writing.


def _foreign_part(value: Any, top: bool = True) -> str | None:
    """Return the first class in a config that is not one of graphattn."""
    if isinstance(value, dict):
        name = value.get("class")
        if isinstance(name, str) and "." in name and not top:
            return name
        value = list(value.values())
    entries = value if isinstance(value, list) else []
    return next(filter(None, (_foreign_part(entry, False) for entry in entries)), None)


def _where(config: dict[str, Any], foreign: str) -> str:
    return next(name for name, value in config.items() if _foreign_part(value, False) == foreign)


def _check_is_as_configured(module: Described, config: dict[str, Any], state: Any) -> None:
    """Check that a module made from this config accepts the weights and computes the same."""
    try:
        again = _on_meta(lambda: build({"class": None, **config}, type(module)))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"model cannot be made again from its config, {config}: {error}. If the class is your "
            "own, its constructor must take the arguments that it passes on by name, not as *args"
        ) from error
    fresh = again.state_dict()
    parts: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("parameters", _shapes(state), _shapes(fresh)),
        ("layers", _layers(state), _layers(fresh)),
    ]
    for what, now, then in parts:
        for name in sorted({*now, *then}):
            if now.get(name) != then.get(name):
                raise ValueError(
                    f"model has been changed since its constructor made it: in its {what}, "
                    f"{name!r} is {now.get(name, 'missing')}, but its config makes "
                    f"{then.get(name, 'none')}. Save its state dict instead"
                )


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", type(value)) for name, value in state.items()}


def _layers(state: Any) -> dict[str, Any]:
    """Return the records of our layers in the metadata of a state dict, by prefix."""
    metadata = getattr(state, "_metadata", {})
    return {
        prefix: {key: value for key, value in entry.items() if key in ("class", "config", "base")}
        for prefix, entry in metadata.items()
        if "config" in entry
    }


def _without_ties(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every tensor once, and for each name left out the name that is stored."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the state dict of the model must contain only tensors, got {name!r}: "
                f"{type(value).__name__}"
            )
        if value.is_meta:
            raise ValueError(
                f"model must have values for all tensors, but {name!r} is on the meta device"
            )
        place = value.untyped_storage().data_ptr(), value.storage_offset()
        key = (*place, value.dtype, value.shape, value.stride(), value.device)
        if value.numel() and key in seen:
            ties[name] = seen[key]
        else:
            seen[key] = name
            # Copy it: safetensors does not write tensors that share storage.
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, ties


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write to a temporary file, then move it into place, so that no reader sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # the mode that open() would have given it
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# Reading.


def _folder(directory: Any) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory must be a path, got {directory!r}")
    return Path(directory)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        if (inner := path.parent / "model").joinpath(path.name).is_file():
            raise FileNotFoundError(
                f"{path} is missing, because this is the folder of a run: give the folder of its "
                f"model, {inner}"
            )
        raise FileNotFoundError(
            f"{path} is missing, so the class and the options of the model are not known. Make the "
            "model in code, and call model.load_state_dict(safetensors.torch.load_file(...))"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("class"), str):
        raise ValueError(
            f"{path} must contain an object with a 'class' of graphattn, as ga.save writes it"
        )
    config.pop("graphattn_version", None)
    return config


def _kind(path: Path, description: dict[str, Any], wanted: Any) -> type | None:
    """Return the class to make, or None for the named class, which must be a `wanted` one."""
    named = description["class"]
    if wanted is None or not issubclass(
        wanted, nn.Module
    ):  # a base class such as Configured, which is not a layer
        return None
    if wanted in KNOWN.values():
        if not issubclass(KNOWN.get(named, object), wanted):
            raise ValueError(f"{path} must be of a {wanted.__name__}, got 'class': {named!r}")
        return None
    if named.rpartition(".")[2] not in {base.__name__ for base in wanted.__mro__}:
        raise ValueError(f"{path} must be of a {wanted.__name__}, got 'class': {named!r}")
    return wanted


def _read_weights(path: Path, device: Any) -> tuple[OrderedDict[str, Tensor], dict[str, str]]:
    """Return the weights with the configs in their header, and the names tied to others."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it must contain the weights of the model")
    state: OrderedDict[str, Tensor] = OrderedDict()
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 (it is not a dict)
                # Copy it: torch's alignment of memory changes the last bits of products.
                state[name] = file.get_tensor(name).clone()
        layers = json.loads(header.pop(LAYERS, "{}"))
        metadata = {prefix: dict(entry) for prefix, entry in layers.items()}
    except (SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
    state._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    # Other entries of a header are not names of tensors.
    ties = {name: kept for name, kept in header.items() if kept in state and name not in state}
    return state, ties


def _make(description: dict[str, Any], kind: type | None, names: list[str]) -> nn.Module:
    """Make the module, on the meta device if it needs no values other than those of the file."""
    module = _on_meta(lambda: build(description, kind))
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    if not any(tensor.is_meta and name not in names for name, tensor in tensors.items()):
        return module
    return _undisturbed(lambda: build(description, kind))


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module on the meta device, or on the CPU if its constructor needs values."""
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError):  # reading a meta tensor raises one of these
        return _undisturbed(make)


def _undisturbed(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module without drawing from the caller's random numbers."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return make()


def _tie(module: nn.Module, name: str, kept: str) -> None:
    """Make one parameter or buffer of two names again."""
    owner, _, last = name.rpartition(".")
    source, _, first = kept.rpartition(".")
    setattr(module.get_submodule(owner), last, getattr(module.get_submodule(source), first))


@contextmanager
def no_larger_than(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise a ValueError inside if far more parameters are made than there are weights.

    A config is a small text. A wrong number in it must not take all memory, or run without end.
    """
    numbers = sum(tensor.numel() for tensor in weights.values())
    most = {"tensors": SLACK * len(weights) + 1000, "numbers": SLACK * numbers + 2**20}
    left, thread = dict(most), threading.get_ident()

    def count(module: Any, name: str, parameter: Any) -> None:
        if parameter is None or threading.get_ident() != thread:  # hooks are for all threads
            return
        left["tensors"] -= 1
        left["numbers"] -= parameter.numel()
        if min(left.values()) < 0:
            raise ValueError(
                f"its class makes more parameters than the file of weights has: that has {numbers} "
                f"numbers in {len(weights)} tensors"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_depths(config: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a config has more blocks than there are weights.

    Constructors make lists of options, one per block, before they make parameters.
    """
    entries = config.items() if isinstance(config, dict) else enumerate(config)
    for name, value in entries:
        if name in ("depth", "depths"):
            depths = value if isinstance(value, list) else [value]
            for depth in depths:
                if isinstance(depth, int) and depth > len(weights):
                    raise ValueError(
                        f"{name} must be at most {len(weights)}, the number of tensors in the file "
                        f"of weights, got {value!r:.40}"
                    )
        elif isinstance(value, dict | list):
            check_depths(value, weights)
