"""Choose a model and an objective that fit the data and each other."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import graphattn.models
from graphattn.data import Corpus, load_tokenizer
from graphattn.data.tokenizers import tokenizer_as_dict
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.mixers import options_taken, over_depth
from graphattn.models.presets import preset as arguments_of
from graphattn.near_names import did_you_mean
from graphattn.nn.files import pretrained
from graphattn.train.batches import unwrapped
from graphattn.train.objectives.registry import OBJECTIVES
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.heads import WithHead

CLASSES_OF_TOKENS = 2  # the labels of GenBank files say if a base is coding
MOST_PATCHES = 64  # default for the number of patches of an image
_TOKENS = ("text", "nucleotide", "protein", "structures")
_KINDS = {  # class of models: kinds of data that it reads
    "CausalLM": (*_TOKENS, "images"),  # images as sequences of pixels
    "SequenceEncoder": (*_TOKENS, "table"),
    "ProteinModel": ("protein", "structures"),
    "VisionTransformer": ("images",),
    "SwinTransformer": ("images",),
}
_OBJECTIVES = {  # class of models: objectives that it can be trained with
    "CausalLM": ("causal", "classification", "regression"),
    "SequenceEncoder": ("masked", "diffusion", "classification", "regression"),
    "ProteinModel": ("masked", "diffusion", "classification", "regression"),
    "VisionTransformer": ("classification",),
    "SwinTransformer": ("classification",),
}
_WITH_MASK = ("masked", "diffusion")


def choose_objective(config: RunConfig, corpus: Corpus) -> RunConfig:
    """Choose the model and the objective, and raise an error for pairs that cannot work."""
    as_choice("objective", config.objective, ("auto", *OBJECTIVES))
    kind = corpus.kind
    if config.model == "auto":
        config = config.replace(model=_model_for(config.objective, kind))
    elif os.path.isdir(config.model):
        config = config.replace(model=folder_of_model(config.model))
    elif config.model not in graphattn.models.presets():
        raise ValueError(
            "model must be 'auto', a preset (`graphattn models` lists them) or the folder of a "
            f"saved model, got {config.model!r}"
            + did_you_mean(config.model, graphattn.models.presets())
        )
    name, noise = _class_of(config)
    if kind not in _KINDS[name]:
        raise ValueError(
            f"model {config.model!r} is a {name}, which reads data of kind "
            f"{' and '.join(_KINDS[name])}, but data is of kind {kind!r}: choose another model or "
            "other data"
        )
    if config.objective == "auto":
        usual = "classification" if kind == "table" else _OBJECTIVES[name][0]
        config = config.replace(objective="diffusion" if noise else usual)
    if config.objective not in _OBJECTIVES[name]:
        raise ValueError(
            f"objective must be {' or '.join(map(repr, _OBJECTIVES[name]))} for a {name}, got "
            f"{config.objective!r}"
        )
    if name == "CausalLM" and kind == "images" and config.objective != "causal":
        raise ValueError(
            "objective must be 'causal' for a CausalLM of images, which reads them pixel by pixel, "
            f"got {config.objective!r}"
        )
    if noise and config.objective != "diffusion":
        raise ValueError(
            f"objective must be 'diffusion' for a model with noise_dim={noise}, got "
            f"{config.objective!r}"
        )
    _check_labels(config, corpus)
    return config


def choose_model(config: RunConfig, corpus: Corpus) -> tuple[RunConfig, nn.Module]:
    """Make the model of a config, with the sizes that the data needs; fill in its options."""
    if os.path.isdir(config.model):
        return config, _saved_model(config, corpus)
    made = graphattn.models.presets()[config.model]
    kind = getattr(graphattn.models, made.model)
    given = dict(config.model_options)
    known = [name for name in inspect.signature(kind).parameters if name not in _OWN_OPTIONS]
    for name in given:
        if name in _OWN_OPTIONS:
            raise ValueError(
                f"model_options must not contain {name!r}, because it is an option of the run: set "
                f"{name} itself"
            )
        if name not in known:
            raise ValueError(
                f"model_options must contain arguments of {made.model} ({', '.join(known)}), got "
                f"{name!r}{did_you_mean(name, known)}"
            )
    arguments = {**arguments_of(config.model, made.model, config.mixer), **given}
    if corpus.image_shape is not None:
        given |= _of_images(corpus, arguments, config)
    elif "vocab_size" in known:
        least = _tokens_of(corpus) + (config.objective in _WITH_MASK)
        given.setdefault("vocab_size", least)
        if not isinstance(given["vocab_size"], int) or given["vocab_size"] < least:
            raise ValueError(
                f"model_options: vocab_size must be at least {least}, the number of tokens of the "
                f"data{' and a mask' if config.objective in _WITH_MASK else ''}, got "
                f"{given['vocab_size']!r}"
            )
    if made.model == "SequenceEncoder" and config.objective == "diffusion":
        given.setdefault("noise_dim", arguments.get("noise_dim") or 128)
        given.setdefault("zero_head", True)
    changes = {**given, **_mixing(config, arguments, kind)}
    if config.objective in ("classification", "regression") and made.model == "CausalLM":
        new_head: dict[str, Any] = {"tie_weights": False}
        if arguments.get("logit_softcap") is not None:
            new_head["logit_softcap"] = None
        given, changes = {**new_head, **given}, {**new_head, **changes}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model: nn.Module = kind.from_preset(config.model, **changes)
            if config.objective == "classification" and corpus.kind != "images":
                model = WithHead(model, num_classes(config, corpus))
    except (ValueError, TypeError, RuntimeError) as error:  # torch's, if there is no memory
        raise ValueError(f"model {config.model!r}: {str(error).splitlines()[0]}") from None
    return config.replace(model_options=given), model


def objective_options(config: RunConfig, corpus: Corpus, model: nn.Module) -> dict[str, Any]:
    """Return the options of the objective, with defaults that follow from the data."""
    options = dict(config.objective_options)
    if config.objective in _WITH_MASK:
        least = _tokens_of(corpus)
        mask_token = options.setdefault("mask_token", least)
        if not isinstance(mask_token, int) or mask_token < least:
            raise ValueError(
                f"objective_options: mask_token must be at least {least}, after the tokens of the "
                f"data, got {mask_token!r}"
            )
    elif config.objective == "causal" and corpus.kind in ("text", "images"):
        share = corpus.num_bytes / corpus.num_tokens
        options.setdefault("bytes_per_token", 1 if share == 1 else share)
    elif config.objective == "classification":
        of_images = corpus.kind == "images"
        options["num_classes"] = (
            options.get("num_classes", model.num_classes)
            if of_images
            else num_classes(config, corpus)
        )
        if corpus.classes:
            options.setdefault("classes", list(corpus.classes))
        elif not of_images:
            options.setdefault("per_token", True)
    return options


def mixing(config: RunConfig) -> dict[str, float]:
    """Return those options of the run that mix images; a ValueError if they cannot be used."""
    chosen = {}
    for name in ("mixup", "cutmix"):
        if name in config.objective_options:
            raise ValueError(
                f"objective_options must not contain {name!r}, because it is an option of the run: "
                f"set {name} itself"
            )
        if value := getattr(config, name):
            if (config.objective, config.kind) != ("classification", "images"):
                raise ValueError(
                    f"{name} must be 0 for objective {config.objective!r} and data of kind "
                    f"{config.kind!r}, because only the classes of images can be mixed, got {value}"
                )
            chosen[name] = value
    return chosen


def num_classes(config: RunConfig, corpus: Corpus) -> int:
    """Return the number of classes of texts, rows or tokens: as asked for, or those of the data."""
    least = len(corpus.classes) or CLASSES_OF_TOKENS
    given = config.objective_options.get("num_classes", least)
    return as_int("objective_options: num_classes", given, least)


def folder_of_model(folder: str) -> str:
    """Return the folder of a saved model, which may be given as the folder of its run."""
    of_run = os.path.join(folder, "model")
    is_run = not os.path.isfile(os.path.join(folder, pretrained.CONFIG))
    is_run = is_run and os.path.isfile(os.path.join(of_run, pretrained.CONFIG))
    return os.path.abspath(of_run if is_run else folder)


def tokenizer_of_model(folder: str) -> str | None:
    """Return the file of the tokenizer with which the model of a run was trained, if there is one.

    Tokenizers without options follow from the data, so they need no file.
    """
    path = os.path.join(os.path.dirname(folder_of_model(folder)), "tokenizer.json")
    if os.path.basename(folder_of_model(folder)) != "model" or not os.path.isfile(path):
        return None
    learned = "columns", "vocabulary", "file", "iupac"
    return path if {*tokenizer_as_dict(load_tokenizer(path))} & {*learned} else None


def classes_of_model(folder: str) -> list[str]:
    """Return the names of the classes that the model of a run was trained with, in their order."""
    folder = folder_of_model(folder)
    path = os.path.join(os.path.dirname(folder), "config.yaml")
    if os.path.basename(folder) != "model" or not os.path.isfile(path):
        return []
    return list(RunConfig.load(path).objective_options.get("classes") or [])


def tokens_of_image(model: nn.Module) -> int:
    """Return the number of tokens that a model makes of an image."""
    config = unwrapped(model).config
    height, width = _pair(config["image_size"])
    sides = _pair(config["patch_size"])
    return (height // sides[0]) * (width // sides[1])


_OWN_OPTIONS = ("mixer", "mixer_options", "window")


def _model_for(objective: str, kind: str) -> str:
    if kind == "images":
        return "digits"
    if objective == "causal":
        return "dna-1m" if kind == "nucleotide" else "text-1m"
    if objective != "auto":
        with_structure = (objective, kind) == ("masked", "structures")
        return "protein-structure-1m" if with_structure else "encoder-1m"
    others = {"text": "text-1m", "nucleotide": "dna-1m", "protein": "encoder-1m"}
    return others.get(kind, "encoder-1m" if kind == "table" else "protein-structure-1m")


def _class_of(config: RunConfig) -> tuple[str, int | None]:
    """Return the class of the model, and its `noise_dim` if one is set."""
    if not os.path.isdir(config.model):
        made = graphattn.models.presets()[config.model]
        return made.model, {**made.arguments, **config.model_options}.get("noise_dim")
    path = os.path.join(config.model, pretrained.CONFIG)
    if not os.path.isfile(path):
        raise ValueError(
            f"model must be a preset or the folder of a saved model, got {config.model!r}, which "
            f"does not contain {pretrained.CONFIG}"
        )
    with torch.device("meta"):
        model: Any = pretrained.load(config.model, device="cpu")
    inner = model.model if isinstance(model, WithHead) else model
    name = type(inner).__name__
    if name not in _KINDS:
        raise ValueError(f"model must be one of {', '.join(_KINDS)}, got a {name}")
    return name, getattr(inner, "noise_dim", None)


def _saved_model(config: RunConfig, corpus: Corpus) -> nn.Module:
    for name in ("model_options", "mixer", "mixer_options", "window"):
        if getattr(config, name):
            raise ValueError(
                f"{name} must not be given together with a saved model, whose options cannot "
                f"change, got {getattr(config, name)!r}"
            )
    model: Any = pretrained.load(config.model)
    if corpus.image_shape is not None:
        image_shape = (model.config["channels"], *_pair(model.config["image_size"]))
        if image_shape != tuple(corpus.image_shape or ()):
            raise ValueError(
                f"model {config.model!r} reads images of (channels, height, width) = "
                f"{image_shape}, but the images of data have {corpus.image_shape}: choose another "
                "model, or resize the images"
            )
        if model.num_classes < len(corpus.classes):
            raise ValueError(
                f"model {config.model!r} has {model.num_classes} classes, but data has "
                f"{len(corpus.classes)}: choose a model with at least as many"
            )
    else:
        inner = model.model if isinstance(model, WithHead) else model
        least = _tokens_of(corpus) + (config.objective in _WITH_MASK)
        if inner.vocab_size < least and not hasattr(inner, "mask_token"):
            raise ValueError(
                f"model {config.model!r} has vocab_size={inner.vocab_size}, but the data needs at "
                f"least {least}: choose a model with a larger vocabulary"
            )
        if config.objective == "classification":
            model = _with_classes(config, model, num_classes(config, corpus), corpus.classes)
    return model.train()


def _with_classes(config: RunConfig, model: Any, classes: int, names: Sequence[str]) -> WithHead:
    """Give a saved model a new head for classes, unless it has one."""
    if not isinstance(model, WithHead):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return WithHead(model, classes)
    if model.outputs != classes:
        raise ValueError(
            f"model {config.model!r} has a head for {model.outputs} classes, but the data has "
            f"{classes}: choose data with the same classes, or the model without this head, from "
            "which it was trained"
        )
    known = classes_of_model(config.model)
    if known and names and not {*names} <= {*known} and "classes" not in config.objective_options:
        raise ValueError(
            f"model {config.model!r} has a head for the classes {_listed(known)}, but the data has "
            f"{_listed(names)}: choose data with the same classes, or the model without this head, "
            "from which it was trained. If only their names differ, set objective_options: classes "
            "to those of the data, in the order of the head"
        )
    return model


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _mixing(config: RunConfig, arguments: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the mixer, and those options of the preset that it takes."""
    changes: dict[str, Any] = {}
    if config.mixer is not None:
        changes["mixer"] = config.mixer
    options = arguments.get("mixer_options") or {}
    if "depth" in config.model_options:
        options = over_depth(options, _depth(arguments))
    if config.mixer is not None and options:
        options = options_taken(config.mixer, _depth(arguments), options)
    if options or config.mixer_options:
        changes["mixer_options"] = {**options, **config.mixer_options}
    elif arguments.get("mixer_options"):
        changes["mixer_options"] = None
    if config.window is not None:
        if "window" not in inspect.signature(kind).parameters:
            raise ValueError(
                f"window must not be given for {config.model!r}, got {config.window!r}: for "
                "images, set radius or window_size in model_options instead"
            )
        changes["window"] = config.window
        pair = isinstance(config.window, list) and len(config.window) == 2
        if arguments.get("window_pattern") and not pair:
            changes["window_pattern"] = None
    return changes


def _depth(arguments: dict[str, Any]) -> int:
    if "depth" in arguments:
        return as_int("model_options: depth", arguments["depth"], 1)
    return int(sum(arguments["depths"]))


def _of_images(corpus: Corpus, arguments: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return image size, channels and classes, and a patch size if that of the preset differs."""
    channels, *size = corpus.image_shape or (0, 0, 0)
    here = {"image_size": size, "channels": channels, "num_classes": len(corpus.classes)}
    given = config.model_options
    for name in ("image_size", "channels"):
        value = given.get(name, here[name])
        if (list(_pair(value)) if name == "image_size" else value) != here[name]:
            raise ValueError(
                f"model_options: {name} must be that of the data, {here[name]}, got {value!r}"
            )
    if given.get("num_classes", here["num_classes"]) < here["num_classes"]:
        raise ValueError(
            f"model_options: num_classes must be at least {here['num_classes']}, the number of "
            f"classes of the data, got {given['num_classes']}"
        )
    here |= {name: given[name] for name in here if name in given}
    if "patch_size" not in given and "depth" in arguments:
        sides = _pair(arguments["patch_size"])
        if list(_pair(arguments["image_size"])) != size or any(
            a % b for a, b in zip(size, sides, strict=True)
        ):
            here["patch_size"] = patch_size_for(size[0], size[1])
    return here


def patch_size_for(height: int, width: int) -> list[int]:
    """Return the smallest patch size with at most 64 patches per image, square if possible."""
    pairs = [
        (a != b, a * b, [a, b])
        for a in range(1, height + 1)
        for b in range(1, width + 1)
        if height % a == 0 and width % b == 0 and height // a * (width // b) <= MOST_PATCHES
    ]
    return min(pairs)[2]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _tokens_of(corpus: Corpus) -> int:
    if corpus.tokenizer is None:
        return 256 if corpus.kind == "images" else 0  # values of pixels
    return corpus.tokenizer.vocab_size


def _check_labels(config: RunConfig, corpus: Corpus) -> None:
    """Raise a ValueError if an objective needs labels that the data does not have."""
    if config.objective == "regression":
        raise ValueError(
            "objective must not be 'regression' for files of data, which contain no numbers per "
            "token, got 'regression': call ga.train.fit with your own examples"
        )
    if config.objective != "classification":
        return
    if corpus.kind == "images":
        if len(corpus.classes) < 2:
            raise ValueError(
                "data must contain images of at least two classes (one folder per class, or a "
                f"file of labels next to an idx file), got {len(corpus.classes)}"
            )
    elif corpus.classes:
        if not 2 <= len(corpus.classes) <= max(2, len(corpus) // 2):
            raise ValueError(
                "data must have at least two classes, and on average two records of each, got "
                f"{len(corpus.classes)} different labels of {len(corpus)} records: classes are in "
                "the column 'label', or else in the last one"
            )
    elif "labels" not in corpus.example(0, 0, 1):
        folders = {name.rpartition("/")[0] for name in corpus.names}
        stray = ""
        if corpus.kind == "text" and "" in folders and len(folders) > 2:
            beside = next(name for name in corpus.names if "/" not in name)
            stray = f" ({beside!r} is in no folder, so the other folders are no classes)"
        raise ValueError(
            "objective must not be 'classification' for data without labels, got data of kind "
            f"{corpus.kind!r}{stray}: give texts in one folder per class, CSV or TSV with a column "
            "of labels, GenBank files, or images"
        )
