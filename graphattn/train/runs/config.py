"""Configuration of a training run, with the names of the options of the command."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphattn.near_names import did_you_mean, explained, other_names


@dataclass
class RunConfig:
    """Configuration of a training run.

    Every name is an option of ``graphattn train`` (``batch_tokens`` is ``--batch-tokens``) and a
    key of its YAML file. "auto" is replaced by a value that fits the data before training starts,
    and the resulting config is saved with the results as ``config.yaml``.

    Args:
        data: a file, a folder or a pattern such as ``"*.fasta"``: text, FASTA, GenBank, PDB/mmCIF,
            idx images or folders of images.
        kind: what `data` contains: "text", "protein", "nucleotide", "structures" or "images";
            "auto" finds out.
        tokenizer: tokenizer for text: "bytes" (also "auto"), "characters", or the path of a
            tokenizer.json.
        length: maximal number of tokens per example; longer records are cut into windows. 0 means
            256 for text and 512 for other sequences.
        validation: share of the data that is set aside to choose the best checkpoint.
        test: share of the data that training never uses, for ``graphattn evaluate``.
        validation_tokens: number of tokens of the validation set that each evaluation uses, in
            windows evenly spread over it; 0 for all.
        split: how data is set aside: by "position" (the end of a text), by "record" (some records)
            or by "group" (whole groups, such as families or organisms).
        group: a regular expression; the part of a header that its parentheses match is the group of
            a record.
        split_seed: seed for drawing records and groups; `seed` does not change the split.
        model: a preset (``graphattn models`` lists them) or the folder of a saved model; "auto"
            chooses one for the data.
        model_options: further arguments of the model, such as {depth: 2, dropout: 0.1}.
        mixer: the layer that mixes tokens: dot, dot-window, vlt, linear, gka, krause, consensus,
            mix and more, or a list of one per block. Default: the preset's.
        mixer_options: further arguments of the mixer, such as {top_k: 8} for krause.
        window: number of tokens that a token sees, or a list of one per block. Default: the
            preset's.
        objective: "masked", "diffusion", "causal", "classification" or "regression".
        objective_options: further arguments of the objective, such as {mask_ratio: 0.3} for masked.
        steps: number of steps of the optimizer, that is, of updates of the weights.
        batch_tokens: number of tokens per batch, including padding; for images, the number of
            patches.
        accumulate: number of batches per step; together they count as one large batch.
        lr: the highest learning rate of AdamW.
        warmup_steps: number of steps in which the learning rate grows from 0 to `lr`.
        schedule: what the learning rate does after that: fall to 0 along a cosine or a line, or
            stay constant.
        weight_decay: weight decay of AdamW; norms, biases and embeddings have none.
        clip_norm: maximal norm of the gradient; a larger gradient is scaled down to it. 0 for no
            limit.
        precision: "float32", "bfloat16" or "float16" (autocast).
        gradient_checkpointing: recompute activations in the backward pass.
        compile: run the model through torch.compile.
        seed: seed of the weights, the order of the data, masks and dropout.
        evaluate_every: number of steps between evaluations on the validation set.
        save_every: number of steps between checkpoints, from which an interrupted run continues.
        log_every: number of steps between rows of training loss in log.jsonl.
        keep: how many of the newest checkpoints are kept, in addition to the best.
        record_every: number of steps between records of the layers (stability, sinks, rank); 0 for
            none.
        workers: number of additional processes that load data.
        log_to: service to which transformers' Trainer reports ("none", "tensorboard", "wandb",
            ...).
        out: the folder of the run, with config, log, checkpoints and model; it is created.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> from graphattn.train import RunConfig
        >>> config = RunConfig(data="proteins.fasta", model="protein-6m", steps=100)
        >>> config.lr, config.replace(lr=1e-2).lr
        (0.001, 0.01)
    """

    data: str = ""
    kind: str = "auto"
    tokenizer: str = "auto"
    length: int = 0
    validation: float = 0.05
    test: float = 0.05
    validation_tokens: int = 65536
    split: Literal["auto", "position", "record", "group"] = "auto"
    group: str = ""
    split_seed: int = 0
    model: str = "auto"
    model_options: dict[str, Any] = field(default_factory=dict)
    mixer: Any = None
    mixer_options: dict[str, Any] = field(default_factory=dict)
    window: Any = None
    objective: str = "auto"
    objective_options: dict[str, Any] = field(default_factory=dict)
    steps: int = 500
    batch_tokens: int = 4096
    accumulate: int = 1
    lr: float = 1e-3
    warmup_steps: int = 50
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    gradient_checkpointing: bool = False
    compile: bool = False
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 100
    log_every: int = 10
    keep: int = 2
    record_every: int = 0
    workers: int = 0
    log_to: str = "none"
    out: str = ""

    def __post_init__(self) -> None:
        from graphattn.graphs.arguments import as_choice, as_float, as_int  # imports torch

        for own in dataclasses.fields(self):
            setattr(self, own.name, _plain(own.name, getattr(self, own.name)))
        for name, least in _INTEGERS.items():
            setattr(self, name, as_int(name, getattr(self, name), least))
        for name, is_positive in _NUMBERS.items():
            setattr(self, name, as_float(name, getattr(self, name), positive=is_positive))
        if self.seed >= 2**32:
            raise ValueError(f"seed must be < 2**32, as numpy's must, got {self.seed}")
        hints = typing.get_type_hints(type(self))
        for name, hint in hints.items():
            value = getattr(self, name)
            if typing.get_origin(hint) is Literal:
                as_choice(name, value, typing.get_args(hint))
            plain = typing.get_origin(hint) or hint
            if plain in (str, bool, dict) and not isinstance(value, plain):
                raise ValueError(f"{name} must be a {plain.__name__}, got {value!r}")
        if self.validation + self.test >= 1:
            raise ValueError(
                "validation and test must have a sum below 1, so that data for training remains, "
                f"got {self.validation} + {self.test}"
            )

    def replace(self, **changes: Any) -> RunConfig:
        """Return a config with some values changed."""
        _check_keys(changes, "replace")
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Return a short hash of all values that influence the results of a run."""
        values = {k: v for k, v in self.as_dict().items() if k not in ("out", "workers", "log_to")}
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a YAML file."""
        Path(path).write_text(to_yaml(self.as_dict()), encoding="utf-8")

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Convert the text of a command-line option to a value; numbers, lists, dicts are YAML.

        Args:
            name: name of the option; if its value is text, the text is not parsed.
            text: the text.

        Raises:
            ValueError: if the text is not YAML.

        Example:
            >>> from graphattn.train import RunConfig
            >>> RunConfig.parse("lr", "1e-4"), RunConfig.parse("data", "1e-4")
            (0.0001, '1e-4')
            >>> RunConfig.parse("model_options", '{"dropout": 0.1}')
            {'dropout': 0.1}
        """
        hint = typing.get_type_hints(cls)[name]
        if hint is str or typing.get_origin(hint) is Literal:
            return text
        try:
            return from_yaml(text)
        except (_yaml().YAMLError, RecursionError) as error:
            raise ValueError(
                f"{name} must be a value in YAML or JSON, got {text!r}: "
                f"{' '.join(str(error).split())}"
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], **changes: Any) -> RunConfig:
        """Read a YAML file.

        Args:
            path: the file; values that it does not contain have their defaults.
            changes: values that replace those of the file.

        Raises:
            ValueError: if it is not YAML, or contains an unknown name; the message names the file.
        """
        yaml = _yaml()
        try:
            found = from_yaml(Path(path).read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)}: is not YAML: {' '.join(str(error).split())}"
            ) from None
        if not isinstance(found, dict):
            raise ValueError(
                f"{os.fspath(path)}: must contain names and values, got a {type(found).__name__}"
            )
        _check_keys(found, os.fspath(path))
        _check_keys(changes, "changes")
        try:
            return cls(**{**found, **changes})
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


_INTEGERS = {
    "length": 0,
    "validation_tokens": 0,
    "split_seed": 0,
    "steps": 0,
    "batch_tokens": 1,
    "accumulate": 1,
    "warmup_steps": 0,
    "seed": 0,
    "evaluate_every": 1,
    "save_every": 1,
    "log_every": 1,
    "keep": 1,
    "record_every": 0,
    "workers": 0,
}
_NUMBERS = {
    "validation": False,
    "test": False,
    "lr": True,
    "weight_decay": False,
    "clip_norm": False,
}


def _plain(name: str, value: Any) -> Any:
    """Convert a value for YAML: paths to text, tuples to lists; ValueError for other objects."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} must have strings as keys, got {wrong[0]!r}")
        return {key: _plain(name, entry) for key, entry in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    try:
        return operator.index(value)  # for instance an integer of numpy
    except TypeError:
        pass
    if callable(getattr(value, "item", None)) and not getattr(value, "shape", ()):
        return value.item()
    raise ValueError(
        f"{name} must consist of text, numbers, lists and dicts, which can be written to a file, "
        f"got {type(value).__name__}"
    )


def from_yaml(text: str) -> Any:
    """Read YAML with the numbers of YAML 1.2 and JSON: ``1e-4`` is a number, ``010`` is 10.

    Example:
        >>> from graphattn.train.runs.config import from_yaml
        >>> from_yaml("{lr: 1e-4, mixer: dot, steps: 010}")
        {'lr': 0.0001, 'mixer': 'dot', 'steps': 10}
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        def construct_document(self, node: Any) -> Any:
            return self.construct_object(node, deep=True)  # raises an error for recursive values

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key!r} occurs twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

        def construct_integer(self, node: Any) -> int:
            text = self.construct_scalar(node)
            return int(text, 16 if "x" in text else 8 if "o" in text else 10)

    _with_numbers(Loader)
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_integer)
    return yaml.load(text, Loader)  # a SafeLoader, which makes only plain values


def to_yaml(value: Any) -> str:
    """Write YAML that :func:`from_yaml` reads back unchanged; a text like ``1e-4`` is quoted.

    Example:
        >>> from graphattn.train.runs.config import from_yaml, to_yaml
        >>> to_yaml({"out": "1e-4", "lr": 1e-4})
        "out: '1e-4'\\nlr: 0.0001\\n"
    """
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    _with_numbers(Dumper)
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


# YAML 1.2, section 10.3.2, and 10_000; PyYAML has YAML 1.1, in which 010 is 8 and 1:30 is 90.
_NUMBERS_OF_YAML = {
    "int": r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


def _with_numbers(kind: Any) -> None:
    """Let a loader or dumper recognise the numbers of YAML 1.2."""
    tags = {f"tag:yaml.org,2002:{name}": text for name, text in _NUMBERS_OF_YAML.items()}
    kind.yaml_implicit_resolvers = {
        first: [own for own in resolvers if own[0] not in tags]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    for tag, text in tags.items():
        kind.add_implicit_resolver(tag, re.compile(f"^(?:{text})$"), list("-+0123456789."))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "files of runs need PyYAML: install it with pip install 'graphattn[train]'"
        ) from error
    return yaml


# What other libraries call these options.
ALSO_CALLED = {
    "batch_tokens": "batch_size max_tokens",
    "clip_norm": "max_grad_norm grad_clip gradient_clip_val",
    "accumulate": "gradient_accumulation_steps",
    "evaluate_every": "eval_steps eval_every eval_interval",
    "length": "seq_len max_length block_size context_length",
    "log_every": "logging_steps log_interval",
    "log_to": "report_to",
    "lr": "learning_rate",
    "out": "output output_dir out_dir",
    "save_every": "save_steps",
    "schedule": "lr_scheduler_type scheduler",
    "steps": "max_steps num_steps iterations",
    "warmup_steps": "warmup",
    "workers": "num_workers dataloader_num_workers",
}
RunConfig.__init__ = explained(RunConfig.__init__, ALSO_CALLED)  # type: ignore[method-assign]


def _check_keys(found: dict[Any, Any], where: str) -> None:
    """Raise a ValueError for an unknown name, with a suggestion."""
    known = [own.name for own in dataclasses.fields(RunConfig)]
    for key in found:
        if key not in known:
            near = did_you_mean(key, known, other_names(ALSO_CALLED, known))
            hint = near or f": known names are {', '.join(known)}"
            raise ValueError(f"{where}: unknown name {key!r}{hint}")
