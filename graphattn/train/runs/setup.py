"""Setup of a run from its config: the data determines values that are "auto"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.data import (
    Corpus,
    Part,
    TableTokenizer,
    Tokenizer,
    Windows,
    load_corpus,
    split_corpus,
)
from graphattn.data.tables.tokenizer import cells_of
from graphattn.train.objectives.objective import Example, Objective
from graphattn.train.objectives.registry import objective as make_objective
from graphattn.train.runs.choices import (
    choose_model,
    choose_objective,
    classes_of_model,
    mixing,
    objective_options,
    tokenizer_of_model,
    tokens_of_image,
)
from graphattn.train.runs.config import RunConfig

LENGTHS = {"text": 256, "nucleotide": 512, "protein": 512, "structures": 512}
LARGE = 64 * 2**20  # bytes; for files of at least this size, the parsed data is cached


@dataclass(frozen=True)
class Prepared:
    """Everything that a run needs, made by :func:`prepare`.

    Attributes:
        config: the config without "auto". Preparing it again gives the same result.
        corpus: all records.
        parts: "train", "validation" and "test", made by :func:`graphattn.data.split_corpus`.
        train, validation, test: sequences of examples; None if a part is empty. `validation` has at
            most ``config.validation_tokens`` tokens.
        model: the model, with random weights from ``config.seed`` or weights from its folder.
        objective: the objective of the run.
        tokenizer: the tokenizer; None for images.

    Example:
        >>> import graphattn as ga
        >>> made = ga.train.prepare(ga.train.RunConfig(data="play.txt"))  # doctest: +SKIP
        >>> ga.train.fit(made.model, made.objective, made.config.replace(out="runs/a"),
        ...              made.train, made.validation)  # doctest: +SKIP
    """

    config: RunConfig
    corpus: Corpus
    parts: dict[str, Part]
    train: Examples
    validation: Examples | None
    test: Examples | None
    model: nn.Module
    objective: Objective
    tokenizer: Tokenizer | None


class Examples(Sequence[Example]):
    """Windows of a part, or some of them, with the number of tokens of each, `lengths`.

    Args:
        part: a part of a corpus.
        length: the largest number of tokens of a window.
        tokens_each: number of tokens of an image; None if the windows know it.
        most_tokens: maximal number of tokens of all windows together, which are then evenly spread
            (at least one window); 0 for all.
        beginnings: whether only the first window of every record is an example, because the record
            has a class as a whole.
    """

    def __init__(
        self,
        part: Part,
        length: int,
        tokens_each: int | None = None,
        most_tokens: int = 0,
        beginnings: bool = False,
    ) -> None:
        if beginnings:
            spans = part.spans.clone()
            spans[:, 2] = torch.minimum(spans[:, 2], spans[:, 1] + length)
            part = Part(part.corpus, spans)
        self.windows = Windows(part, length)
        lengths = self.windows.lengths
        self.lengths: Tensor = lengths if tokens_each is None else lengths * tokens_each
        self.indices: Tensor | None = None
        total = int(self.lengths.sum())
        if 0 < most_tokens < total:
            count = max(len(lengths) * most_tokens // total, 1)
            self.indices = torch.arange(count) * len(lengths) // count
            self.lengths = self.lengths[self.indices]

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the data; a run continues only with the same data."""
        return self.windows.part.corpus.fingerprint

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        if self.indices is not None:
            indices = self.indices[torch.as_tensor(indices)].tolist()
        return self.windows.__getitems__(indices)


def prepare(config: RunConfig) -> Prepared:
    """Read the data of a config, and make its model and its objective.

    "auto" is replaced by what fits the data: a CausalLM of bytes for text, a CausalLM of letters
    for nucleotides, a masked encoder for proteins, a masked ProteinModel for structures, a
    VisionTransformer for images with classes, and an encoder with a head of classes for a table,
    whose tokenizer is fitted to the training rows. Vocabulary, image size and number of classes of
    a preset are changed to those of the data. The state of torch's random numbers does not change.

    Args:
        config: the config; ``data`` must be set.

    Raises:
        ValueError: if an option does not fit the data or another option; the message names it.
        FileFormatError: if the data cannot be read; the message names the file and the line.
        ImportError: if an optional package is missing.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "play.txt")
        ...     _ = path.write_text("to be or not to be " * 50)
        ...     made = ga.train.prepare(ga.train.RunConfig(data=str(path)))
        >>> made.config.kind, made.config.model, made.config.objective, made.config.length
        ('text', 'text-1m', 'causal', 256)
        >>> len(made.train), len(made.validation), len(made.test)
        (4, 1, 1)
    """
    if config.tokenizer == "auto" and os.path.isdir(config.model):
        config = config.replace(tokenizer=tokenizer_of_model(config.model) or "auto")
    corpus = read_corpus(config)
    tokenizer = config.tokenizer  # "auto" for proteins and nucleotides
    if os.path.isfile(tokenizer):
        tokenizer = os.path.abspath(tokenizer)
    elif corpus.kind == "text" and tokenizer == "auto":
        tokenizer = "bytes"
    data = os.path.abspath(config.data)
    config = config.replace(data=data, kind=corpus.kind, tokenizer=tokenizer)
    config = choose_objective(config, corpus)
    if config.objective == "classification" and os.path.isdir(config.model):
        config, corpus = _numbered(config, corpus)
    corpus = as_read(corpus, config.objective)
    config, parts = split_data(config, corpus)
    if corpus.kind == "table" and config.tokenizer == "auto":
        corpus, parts = _fitted(config, corpus, parts)
    config, model = choose_model(config, corpus)
    config = config.replace(objective_options=objective_options(config, corpus, model))
    of_image = None if corpus.image_shape is None else tokens_of_image(model)
    config = _length(config, parts["train"], of_image)
    objective = make_objective(config.objective, **config.objective_options, **mixing(config))
    examples: dict[str, Any] = {}
    for name, part in parts.items():
        most = config.validation_tokens if name == "validation" else 0
        given = part, config.length, of_image, most, is_of_records(objective)
        examples[name] = Examples(*given) if len(part) else None
    # The config ensures that data for training remains.
    return Prepared(config, corpus, parts, **examples, model=model, objective=objective,
                    tokenizer=corpus.tokenizer)  # fmt: skip


def read_corpus(config: RunConfig, tokenizer: Any = None) -> Corpus:
    """Read the records of ``config.data``, with the tokenizer of the config or another one.

    The parsed data of files of 64 MiB or more is cached in ``GRAPHATTN_CACHE``, or else in the
    user's cache folder; smaller files are read every time.
    """
    if not config.data:
        raise ValueError("data must be the path of a file or a folder, got ''")
    path = Path(config.data)
    files = path.rglob("*") if path.is_dir() else [path]
    is_large = sum(file.stat().st_size for file in files if file.is_file()) >= LARGE
    kept = os.environ.get("GRAPHATTN_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(kept) if kept else Path(home).expanduser() / "graphattn"
    return load_corpus(
        config.data,
        kind=config.kind,
        tokenizer=config.tokenizer if tokenizer is None else tokenizer,
        cache=cache if is_large else None,
        classes=config.objective_options.get("classes"),
    )


def _fitted(
    config: RunConfig, corpus: Corpus, parts: dict[str, Part]
) -> tuple[Corpus, dict[str, Part]]:
    """Fit the tokenizer of a table to the training rows only, and read the table with it.

    A row has one token per column, whatever the tokenizer, so the parts have the same spans.
    """
    assert isinstance(corpus.tokenizer, TableTokenizer)
    names = corpus.names  # the cells of every row
    rows = [cells_of(names[record]) for record in parts["train"].spans[:, 0].tolist()]
    corpus = read_corpus(config, TableTokenizer.fit(corpus.tokenizer.names, rows))
    return corpus, {name: Part(corpus, part.spans) for name, part in parts.items()}


def _numbered(config: RunConfig, corpus: Corpus) -> tuple[RunConfig, Corpus]:
    """Give the classes of data the numbers that they have in a saved model."""
    known, options = classes_of_model(config.model), config.objective_options
    here = list(corpus.classes)
    if "classes" in options or here == known or not here or not {*here} <= {*known}:
        return config, corpus
    config = config.replace(objective_options={**options, "classes": known})
    return config, read_corpus(config)


def is_of_records(objective: Objective) -> bool:
    """Return whether an objective asks for one class of every record."""
    return objective.name == "classification" and not getattr(objective, "per_token", False)


def as_read(corpus: Corpus, objective: str) -> Corpus:
    """Return a corpus as an objective reads it: a causal model reads images pixel by pixel."""
    return corpus.pixels() if objective == "causal" and corpus.image_shape else corpus


def cut_records(part: Part, length: int, noun: str, beginnings: bool = False) -> str:
    """Say how many records of a part are longer than a window; "" if none is.

    With `beginnings`, only the first window of each is read.
    """
    sizes = part.spans[:, 2] - part.spans[:, 1]
    long = sizes[sizes > length]
    if not len(long):
        return ""
    if beginnings:
        return f"{len(long):,} of {len(sizes):,} {noun} are cut to a beginning"
    pieces = int((-(-long // length)).sum())
    return f"{len(long):,} of {len(sizes):,} {noun} are cut into {pieces:,} pieces"


def split_data(config: RunConfig, corpus: Corpus) -> tuple[RunConfig, dict[str, Part]]:
    """Split the data; return the parts, and a config with the way they were split."""
    by = config.split
    if by == "auto":
        is_one = corpus.kind == "text" or len(corpus) == 1
        if corpus.classes and config.objective == "classification":
            is_one = False
        by = "group" if config.group else "position" if is_one else "record"
    options: dict[str, Any] = {"validation": config.validation, "test": config.test}
    options |= {"group": config.group, "seed": config.split_seed}
    try:
        return config.replace(split=by), split_corpus(corpus, by=by, **options)
    except ValueError:
        if config.split != "auto" or by != "record" or corpus.kind != "nucleotide":
            raise
    # There are few long sequences, and each is too large to be set aside as a whole.
    return config.replace(split="position"), split_corpus(corpus, by="position", **options)


def _length(config: RunConfig, train: Part, of_image: int | None) -> RunConfig:
    """Choose the length of windows, and check that a batch can contain one."""
    longest = int((train.spans[:, 2] - train.spans[:, 1]).max())
    chosen = min(LENGTHS.get(config.kind, longest), longest)
    if of_image is not None:
        if config.length not in (0, of_image):
            raise ValueError(
                f"length must be 0 or {of_image} for images, because the model makes {of_image} "
                f"tokens of each, got {config.length}"
            )
        chosen = of_image
    elif config.kind == "table" and config.length not in (0, longest):
        raise ValueError(
            f"length must be 0 or {longest} for a table, which has {longest} columns beside the "
            f"label, got {config.length}"
        )
    elif config.length:
        chosen = config.length
    if config.objective == "causal" and chosen < 2:
        raise ValueError(f"length must be at least 2 for objective 'causal', got {chosen}")
    if config.batch_tokens < chosen:
        raise ValueError(
            f"batch_tokens must be at least the length of one example, {chosen} tokens, got "
            f"{config.batch_tokens}"
        )
    return config.replace(length=chosen)
