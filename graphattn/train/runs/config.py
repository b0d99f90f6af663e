"""Configuration of a training run, with the names of the options of the command."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)

import contextlib
import dataclasses
import hashlib
import json
import operator
import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from graphattn.near_names import did_you_mean, explained, other_names


def option(default: Any, description: str, **more: Any) -> Any:
    """Return a field of :class:`RunConfig`, with all that documentation and ``--help`` need.

    `more` may have "least", the smallest integer; "positive", if a number must not be 0; "also",
    what other libraries call it; "is_free", if it does not change the results of a run; "panel",
    the heading of this and the next options in ``--help``.
    """
    metadata = {"description": description, **more}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    """Configuration of a training run.

    Every name is an option of ``graphattn train`` (``batch_tokens`` is ``--batch-tokens``) and a
    key of its YAML file. "auto" is replaced by a value that fits the data before training starts,
    and the resulting config is saved with the results as ``config.yaml``.

    Args:
        OPTIONS

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> from graphattn.train import RunConfig
        >>> config = RunConfig(data="proteins.fasta", model="protein-6m", steps=100)
        >>> config.lr, config.replace(lr=1e-2).lr
        (0.001, 0.01)
    """

    data: str = option(
        "",
        'a file, a folder or a pattern such as ``"*.fasta"``: text, CSV or TSV, FASTA, GenBank, '
        "PDB/mmCIF, idx images or folders of images.",
        panel="Data",
    )
    kind: str = option(
        "auto",
        'what `data` contains: "text", "protein", "nucleotide", "structures", "images" or "table"; '
        '"auto" finds out.',
    )
    tokenizer: str = option(
        "auto",
        'tokenizer for text: "bytes" (also "auto"), "characters", or the path of a tokenizer.json; '
        '"iupac" for nucleotides with all codes of IUPAC, not only A, C, G, T and N. "auto" takes '
        "that of the run whose `model` is trained further.",
    )
    length: int = option(
        0,
        "maximal number of tokens per example; longer records are cut into windows. 0 means 256 "
        "for text and 512 for other sequences.",
        also="seq_len max_length block_size context_length",
    )
    validation: float = option(
        0.05, "share of the data that is set aside to choose the best checkpoint."
    )
    test: float = option(
        0.05, "share of the data that training never uses, for ``graphattn evaluate``."
    )
    validation_tokens: int = option(
        65536,
        "number of tokens of the validation set that each evaluation uses, in windows evenly "
        "spread over it; 0 for all.",
    )
    split: Literal["auto", "position", "record", "group"] = option(
        "auto",
        'how data is set aside: by "position" (the end of a text), by "record" (some records) or '
        'by "group" (whole groups, such as families or organisms).',
    )
    group: str = option(
        "",
        "a regular expression; the part of a header that its parentheses match is the group of a "
        "record.",
    )
    split_seed: int = option(
        0, "seed for drawing records and groups; `seed` does not change the split."
    )
    model: str = option(
        "auto",
        "a preset (``graphattn models`` lists them), or the folder of a saved model or of its run; "
        '"auto" chooses one for the data.',
        panel="Model",
    )
    model_options: dict[str, Any] = option(
        {}, "further arguments of the model, such as {depth: 2, dropout: 0.1}."
    )
    mixer: Any = option(
        None,
        "the layer that mixes tokens: dot, dot-window, vlt, linear, gka, krause, consensus, mix "
        "and more, or a list of one per block. Default: the preset's.",
    )
    mixer_options: dict[str, Any] = option(
        {}, "further arguments of the mixer, such as {top_k: 8} for krause."
    )
    window: Any = option(
        None,
        "number of tokens that a token sees, or a list of one per block. Default: the preset's.",
    )
    objective: str = option(
        "auto",
        '"masked", "diffusion", "causal", "classification" or "regression".',
        panel="Objective",
    )
    objective_options: dict[str, Any] = option(
        {}, "further arguments of the objective, such as {mask_ratio: 0.3} for masked."
    )
    mixup: float = option(
        0.0,
        "alpha of Mixup for classes of images, such as 0.8: training images are mixed in pairs; 0 "
        "for no Mixup.",
        also="mixup_alpha",
    )
    cutmix: float = option(
        0.0,
        "alpha of CutMix for classes of images, such as 1.0: a box of another training image is "
        "pasted in; 0 for no CutMix. If both are on, each batch uses one of them.",
        also="cutmix_alpha",
    )
    steps: int = option(
        500,
        "number of steps of the optimizer, that is, of updates of the weights.",
        also="max_steps num_steps iterations",
        panel="Training",
    )
    batch_tokens: int = option(
        4096,
        "number of tokens per batch, including padding; for images, the number of patches.",
        least=1,
        also="batch_size max_tokens",
    )
    accumulate: int = option(
        1,
        "number of batches per step; together they count as one large batch.",
        least=1,
        also="gradient_accumulation_steps",
    )
    lr: float = option(
        1e-3, "the highest learning rate of AdamW.", positive=True, also="learning_rate"
    )
    warmup_steps: int = option(
        50, "number of steps in which the learning rate grows from 0 to `lr`.", also="warmup"
    )
    schedule: Literal["cosine", "linear", "constant"] = option(
        "cosine",
        "what the learning rate does after that: fall to 0 along a cosine or a line, or stay "
        "constant.",
        also="lr_scheduler_type scheduler",
    )
    weight_decay: float = option(
        0.01, "weight decay of AdamW; norms, biases and embeddings have none."
    )
    clip_norm: float = option(
        1.0,
        "maximal norm of the gradient; a larger gradient is scaled down to it. 0 for no limit.",
        also="max_grad_norm grad_clip gradient_clip_val",
    )
    ema_decay: float = option(
        0.0,
        "decay per step of an exponential moving average of the weights, such as 0.999, which is "
        "evaluated and saved instead of the weights; 0 for no average.",
        also="ema model_ema model_ema_decay",
    )
    precision: Literal["float32", "bfloat16", "float16"] = option(
        "float32", '"float32", "bfloat16" or "float16" (autocast).'
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass.")
    context_parallel: int = option(
        1,
        "number of processes that divide the tokens of every sequence among them, for sequences "
        "that are too long for one; it divides the number of processes of torchrun.",
        least=1,
        also="cp_size context_parallel_size sequence_parallel",
        is_free=True,
    )
    fsdp: bool = option(
        False,
        "divide the weights, their gradients and the state of the optimizer among all processes of "
        "torchrun, instead of storing all of them in each (PyTorch's fully_shard, FSDP2).",
        also="fsdp2 fully_shard shard_weights zero",
        is_free=True,
    )
    compile: bool = option(False, "run the model through torch.compile.")
    seed: int = option(0, "seed of the weights, the order of the data, masks and dropout.")
    evaluate_every: int = option(
        100,
        "number of steps between evaluations on the validation set.",
        least=1,
        also="eval_steps eval_every eval_interval",
        panel="Records",
    )
    save_every: int = option(
        100,
        "number of steps between checkpoints, from which an interrupted run continues.",
        least=1,
        also="save_steps",
    )
    log_every: int = option(
        10,
        "number of steps between rows of training loss in log.jsonl.",
        least=1,
        also="logging_steps log_interval",
    )
    keep: int = option(
        2, "how many of the newest checkpoints are kept, in addition to the best.", least=1
    )
    record_every: int = option(
        0, "number of steps between records of the layers (stability, sinks, rank); 0 for none."
    )
    workers: int = option(
        0,
        "number of additional processes that load data.",
        also="num_workers dataloader_num_workers",
        is_free=True,
    )
    log_to: str = option(
        "none",
        'service to which transformers\' Trainer reports ("none", "tensorboard", "wandb", ...).',
        also="report_to",
        is_free=True,
    )
    out: str = option(
        "",
        "the folder of the run, with config, log, checkpoints and model; it is created.",
        also="output output_dir out_dir",
        is_free=True,
    )

    def __post_init__(self) -> None:
        from graphattn.graphs.arguments import (
            as_choice,
            as_float,
            as_int,
            as_share,
        )  # imports torch

        for each in dataclasses.fields(self):
            name, kind = each.name, each.type
            value = _plain(name, getattr(self, name))
            plain: Any = get_origin(kind) or kind
            if kind is int:
                value = as_int(name, value, each.metadata.get("least", 0))
            elif kind is float:
                value = as_float(name, value, positive=each.metadata.get("positive", False))
            elif plain is Literal:
                as_choice(name, value, get_args(kind))
            elif plain is not Any and not isinstance(value, plain):
                raise ValueError(f"{name} must be a {plain.__name__}, got {value!r}")
            setattr(self, name, value)
        as_share("ema_decay", self.ema_decay)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be < 2**32, as numpy's must, got {self.seed}")
        if self.validation + self.test >= 1:
            raise ValueError(
                "validation and test must have a sum below 1, so that data for training remains, "
                f"got {self.validation} + {self.test}"
            )

    def replace(self, **changes: Any) -> Self:
        """Return a config with some values changed."""
        _check_names(changes, "replace")
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Return a short hash of all values that influence the results of a run."""
        values = {name: value for name, value in self.as_dict().items() if name not in FREE}
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a YAML file."""
        text = _yaml().safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Convert the text of a command-line option to a value; lists and dicts are YAML.

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
        kind = cls.__dataclass_fields__[name].type
        is_yaml = kind is Any or get_origin(kind) is dict
        try:
            return _of_type(kind, _read_yaml(text) if is_yaml else text)
        except (_yaml().YAMLError, RecursionError) as error:
            raise ValueError(
                f"{name} must be a value in YAML or JSON, got {text!r}: "
                f"{' '.join(str(error).split())}"
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], **changes: Any) -> Self:
        """Read a YAML file.

        Args:
            path: the file; values that it does not contain have their defaults.
            changes: values that replace those of the file.

        Raises:
            ValueError: if it is not YAML, or contains an unknown name; the message names the file.
        """
        file = os.fspath(path)
        try:
            values = _read_yaml(Path(path).read_text(encoding="utf-8")) or {}
        except (_yaml().YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{file}: is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ValueError(
                f"{file}: must contain names and values, got a {type(values).__name__}"
            )
        _check_names(values, file)
        _check_names(changes, "changes")
        kinds = cls.__dataclass_fields__
        values = {name: _of_type(kinds[name].type, value) for name, value in values.items()}
        try:
            return cls(**{**values, **changes})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


_OPTIONS = dataclasses.fields(RunConfig)
_ENTRIES = (
    textwrap.fill(f"{each.name}: {each.metadata['description']}", 100,
                  initial_indent=" " * 8, subsequent_indent=" " * 12)
    for each in _OPTIONS
)  # fmt: skip
RunConfig.__doc__ = (RunConfig.__doc__ or "").replace("        OPTIONS", "\n".join(_ENTRIES))
FREE = tuple(each.name for each in _OPTIONS if "is_free" in each.metadata)
_ALSO_CALLED = {each.name: each.metadata.get("also", "") for each in _OPTIONS}
RunConfig.__init__ = explained(RunConfig.__init__, _ALSO_CALLED)  # type: ignore[method-assign]


def _check_names(values: dict[Any, Any], where: str) -> None:
    """Raise a ValueError for an unknown name, with a suggestion."""
    for name in values:
        if name not in _ALSO_CALLED:
            near = did_you_mean(name, _ALSO_CALLED, other_names(_ALSO_CALLED, _ALSO_CALLED))
            hint = near or f": known names are {', '.join(_ALSO_CALLED)}"
            raise ValueError(f"{where}: unknown name {name!r}{hint}")


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


# YAML.


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "files of runs need PyYAML: install it with pip install 'graphattn[train]'"
        ) from error
    return yaml


def _read_yaml(text: str) -> Any:
    """Read YAML; raise an error if a name occurs twice, of which PyYAML would keep the last."""
    _check_differ(_yaml().compose(text, _yaml().SafeLoader))
    return _yaml().safe_load(text)


def _check_differ(node: Any) -> None:
    if node is None or isinstance(node.value, str):
        return
    entries = node.value
    if node.id == "mapping":
        names = [name.value for name, _ in entries]
        if twice := [name for name in names if names.count(name) > 1]:
            raise _yaml().YAMLError(f"{twice[0]!r} occurs twice{node.start_mark}")
        entries = [value for _, value in entries]
    for entry in entries:
        _check_differ(entry)


def _of_type(kind: Any, value: Any) -> Any:
    """Convert texts that are numbers: PyYAML reads YAML 1.1, in which 1e-4 is text."""
    if kind is str or get_origin(kind) is Literal:
        return value
    if isinstance(value, list):
        return [_of_type(Any, entry) for entry in value]
    if isinstance(value, dict):
        return {name: _of_type(Any, entry) for name, entry in value.items()}
    if isinstance(value, str) and (kind in (int, float) or "e" in value.lower()):
        with contextlib.suppress(ValueError):
            return int(value) if kind is int else float(value)
    return value
