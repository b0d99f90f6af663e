"""Setup of a run from its config: what is "auto" is chosen by the data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphattn.train.objectives.objective import Example, Objective
from graphattn.train.objectives.registry import objective as make_objective
from graphattn.train.runs.choices import (
    choose_model,
    choose_objective,
    objective_options,
    tokens_of_image,
)
from graphattn.train.runs.config import RunConfig

if TYPE_CHECKING:
    from graphattn.data import Corpus, Part, Tokenizer

LENGTHS = {"text": 256, "nucleotide": 512, "protein": 512, "structures": 512}
LARGE = 64 * 2**20  # bytes of a file from which on what was read of it is kept


@dataclass(frozen=True)
class Prepared:
    """All that a run needs, made by :func:`prepare`.

    Attributes:
        config: resolved: nothing in it is "auto". Prepared again, it gives the same.
        corpus: all records.
        parts: "train", "validation" and "test", as :func:`graphattn.data.split_corpus` makes them.
        train, validation, test: examples by index; None where a part is empty. `validation` has no
            more than ``config.validation_tokens``.
        model: with the weights of ``config.seed``, or those of the folder that it was loaded from.
        objective: what it learns from.
        tokenizer: None for images.

    Example:
        >>> import graphattn as ga
        >>> found = ga.train.prepare(ga.train.RunConfig(data="play.txt"))  # doctest: +SKIP
        >>> ga.train.fit(found.model, found.objective, found.config.replace(out="runs/a"),
        ...              found.train, found.validation)  # doctest: +SKIP
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
    """Windows, or some of them, with how many tokens a model makes of each.

    Args:
        windows: :class:`graphattn.data.Windows`.
        tokens_each: of an image; None where the windows know.
        most_tokens: windows evenly spread over all of them, with so many tokens together (at least
            one window); 0 for all.

    Attributes:
        lengths: tokens of every example.
    """

    def __init__(self, windows: Any, tokens_each: int | None = None, most_tokens: int = 0) -> None:
        self.windows = windows
        lengths = windows.lengths
        self.lengths: Tensor = lengths if tokens_each is None else lengths * tokens_each
        self.indices: Tensor | None = None
        total = int(self.lengths.sum())
        if 0 < most_tokens < total:
            count = max(len(lengths) * most_tokens // total, 1)
            self.indices = torch.arange(count) * len(lengths) // count
            self.lengths = self.lengths[self.indices]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data that the windows are cut from: a run does not go on
        with others.
        """
        found: str = self.windows.part.corpus.fingerprint
        return found

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        if self.indices is not None:
            indices = self.indices[torch.as_tensor(indices)].tolist()
        found: list[Example] = self.windows.__getitems__(indices)
        return found


def prepare(config: RunConfig) -> Prepared:
    """Read the data of a config, and make the model and the objective that it asks for.

    "auto" becomes what fits the data: text is learnt by a CausalLM of bytes, nucleotides by one of
    their letters, proteins by a masked encoder, structures by a masked ProteinModel, images with
    classes by a VisionTransformer. A preset's vocabulary, image size and number of classes are
    those of the data. torch's random numbers are left as they are.

    Args:
        config: what is asked for; ``data`` is needed.

    Raises:
        ValueError: names the option that does not go with the data or with another option.
        FileFormatError: the data cannot be read; it names the file and the line.
        ImportError: an optional package is missing.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "play.txt")
        ...     _ = path.write_text("to be or not to be " * 50)
        ...     found = ga.train.prepare(ga.train.RunConfig(data=str(path)))
        >>> found.config.kind, found.config.model, found.config.objective, found.config.length
        ('text', 'text-1m', 'causal', 256)
        >>> len(found.train), len(found.validation), len(found.test)
        (4, 1, 1)
    """
    corpus = read_corpus(config)
    config = config.replace(
        data=os.path.abspath(config.data),
        kind=corpus.kind,
        tokenizer=_tokenizer_name(config, corpus),
    )
    config = choose_objective(config, corpus)
    config, parts = _split(config, corpus)
    config, model = choose_model(config, corpus)
    config = config.replace(objective_options=objective_options(config, corpus, model))
    of_image = tokens_of_image(model) if corpus.kind == "images" else None
    config = _length(config, parts["train"], of_image)
    found: dict[str, Examples | None] = {}
    for name, part in parts.items():
        most = config.validation_tokens if name == "validation" else 0
        found[name] = examples_of(part, config.length, of_image, most) if len(part) else None
    objective = make_objective(config.objective, **config.objective_options)
    train = found["train"]
    assert train is not None  # shares leave something
    return Prepared(
        config,
        corpus,
        parts,
        train,
        found["validation"],
        found["test"],
        model,
        objective,
        corpus.tokenizer,
    )


def read_corpus(config: RunConfig, tokenizer: Any = None) -> Corpus:
    """The records that ``config.data`` names.

    Of files of 64 MiB or more, what was read is kept in ``GRAPHATTN_CACHE``, or else in the user's
    cache; smaller ones are read each time.

    Args:
        config: `data`, `kind` and `tokenizer` count.
        tokenizer: in place of that of the config.
    """
    from graphattn.data import load_corpus

    if not config.data:
        raise ValueError("data must be a file or a folder, got ''")
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
    )


def examples_of(
    part: Part, length: int, tokens_each: int | None = None, most_tokens: int = 0
) -> Examples:
    """The windows of a part, or some of them; see :class:`Examples`."""
    from graphattn.data import Windows

    return Examples(Windows(part, length), tokens_each, most_tokens)


def _tokenizer_name(config: RunConfig, corpus: Corpus) -> str:
    """Return the name of the tokenizer, as the option has it; of sequences, whose letters follow
    from their kind, "auto".
    """
    if os.path.isfile(config.tokenizer):
        return os.path.abspath(config.tokenizer)
    if corpus.kind == "text" and config.tokenizer == "auto":
        return "bytes"
    return config.tokenizer


def _split(config: RunConfig, corpus: Corpus) -> tuple[RunConfig, dict[str, Part]]:
    """The parts, and by what they were told apart."""
    from graphattn.data import split_corpus

    shares: dict[str, Any] = {"validation": config.validation, "test": config.test}
    by = config.split
    if by == "auto":
        is_one = corpus.kind == "text" or len(corpus) == 1
        by = "group" if config.group else "position" if is_one else "record"
    shares |= {"group": config.group, "seed": config.split_seed}
    try:
        return config.replace(split=by), split_corpus(corpus, by=by, **shares)
    except ValueError:
        if config.split != "auto" or by != "record" or corpus.kind != "nucleotide":
            raise
    # Few long sequences, of which none is small enough to be set aside as a whole.
    return config.replace(split="position"), split_corpus(corpus, by="position", **shares)


def _length(config: RunConfig, train: Part, of_image: int | None) -> RunConfig:
    """The length of windows, and whether a batch holds one."""
    longest = int((train.spans[:, 2] - train.spans[:, 1]).max())
    chosen = min(LENGTHS.get(config.kind, longest), longest)
    if of_image is not None:
        if config.length not in (0, of_image):
            raise ValueError(
                f"length must be 0 for images, of which the model makes {of_image} tokens, got "
                f"{config.length}"
            )
        chosen = of_image
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
