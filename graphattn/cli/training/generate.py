"""`graphattn generate`: text and sequences from a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor

from graphattn.cli.training.run_options import flag
from graphattn.data import NucleotideTokenizer, ProteinTokenizer
from graphattn.graphs.arguments import as_int
from graphattn.models import CausalLM
from graphattn.train.diffusion.sampler import sample_diffusion
from graphattn.train.runs.folder import origin
from graphattn.train.runs.trained import Trained, load_trained

SAMPLES = "samples.jsonl"
GAP = "_"  # in a prompt of residues or bases: a position that the model fills
UNREAD = "\N{REPLACEMENT CHARACTER}"


class Drawing(NamedTuple):
    """How texts are drawn."""

    tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    steps: int | None
    method: str | None


def run_generate(
    folder: Path, *, prompt: str, seed: int, samples: int, console: Console, **options: Any
) -> None:
    """Write samples to stdout and into ``samples.jsonl``; `options` are those of Drawing."""
    how = Drawing(**options)
    as_int("--tokens", how.tokens, 1)
    samples = as_int("--samples", samples, 1)
    trained = load_trained(folder)
    if trained.objective.name not in ("causal", "masked", "diffusion"):
        raise ValueError(
            "RUN must be the folder of a run with the objective 'causal', 'masked' or "
            f"'diffusion', got {trained.objective.name!r}"
        )
    if trained.tokenizer is None:
        raise ValueError(
            "RUN must be a run on text or sequences, got one on images: a model of pixels writes "
            "numbers from 0 to 255. Call trained.model.generate in code, with "
            "trained = ga.train.load_trained(RUN)"
        )
    is_causal = isinstance(trained.model, CausalLM)
    for name in ("steps", "method") if is_causal else ("top_k",):
        if (value := getattr(how, name)) is not None:
            kind = "a causal model" if is_causal else "a masked or diffusion model"
            raise ValueError(
                f"{flag(name)} must not be given for {kind}, where it has no effect, got {value!r}"
            )
    made_by = origin(trained.run.config)
    for number in range(samples):
        generator = torch.Generator().manual_seed(seed + number)
        if number:
            typer.echo()
        if is_causal:
            text = _write_on(trained, prompt, how, generator)
        else:
            text = _unmask(trained, prompt, how, generator, console)
        row = {
            "prompt": prompt,
            "text": text,
            "seed": seed + number,
            **{name: value for name, value in how._asdict().items() if name != "tokens"},
            "model": str(trained.source.relative_to(trained.run.path)),
            "origin": {**made_by, "seed": seed + number},
        }
        with (folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _encoded(trained: Trained, prompt: str) -> Tensor:
    assert trained.tokenizer is not None
    try:
        return trained.tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None


# Causal models.


def _write_on(trained: Trained, prompt: str, how: Drawing, generator: torch.Generator) -> str:
    """Write the prompt and its continuation to stdout, token by token."""
    assert isinstance(trained.model, CausalLM)
    if prompt:
        start, hidden = _encoded(trained, prompt), 0
        if not len(start):
            raise ValueError(f"--prompt must contain at least one token, got {prompt!r}")
    else:
        start, hidden = _first_token(trained, generator), 1
    if hidden and not _is_text(trained):
        hidden = 0
    stream = TextStream(trained.tokenizer)
    stream.add(start[hidden:].tolist())

    def add_last(step: int, written: Tensor) -> None:
        stream.add([int(written[-1])])

    trained.model.generate(
        start,
        how.tokens,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        generator=generator,
        progress=add_last,
    )
    return stream.end()


def _is_text(trained: Trained) -> bool:
    return not isinstance(trained.tokenizer, ProteinTokenizer | NucleotideTokenizer)


def _first_token(trained: Trained, generator: torch.Generator) -> Tensor:
    """Return the first token of a text without a prompt: a newline, or a random token."""
    assert trained.tokenizer is not None
    if _is_text(trained):
        try:
            newline = trained.tokenizer.encode("\n")
        except ValueError:
            newline = torch.zeros(0)
        if len(newline):
            return newline
    return torch.randint(trained.tokenizer.vocab_size, (1,), generator=generator)


class TextStream:
    """Writes tokens as text to stdout, as soon as they form whole characters.

    Args:
        tokenizer: converts tokens to text.
        write: function that gets pieces of text; None for stdout.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.cli.training.generate import TextStream
        >>> pieces = []
        >>> stream = TextStream(ga.data.ByteTokenizer(), pieces.append)
        >>> for byte in "né".encode():
        ...     stream.add([byte])
        >>> pieces, stream.end()
        (['n', 'é'], 'né')
    """

    def __init__(self, tokenizer: Any, write: Any = None) -> None:
        self.tokenizer, self.write = tokenizer, _to_stdout if write is None else write
        self.tokens: list[int] = []
        self.context, self.written = 0, 0  # how many tokens are context, and already written
        self.text = ""

    def add(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self._write_new(is_end=False)

    def end(self) -> str:
        """Write the rest of the text, and return the whole text."""
        self._write_new(is_end=True)
        return self.text

    def _write_new(self, is_end: bool) -> None:
        # Decoders drop or add blanks at the start of a text, so decode the new tokens together with
        # the tokens before them, and remove the text of those.
        old = self.tokenizer.decode(self.tokens[self.context : self.written])
        new = self.tokenizer.decode(self.tokens[self.context :])
        if new.endswith(UNREAD) and not is_end and len(self.tokens) - self.written < 4:
            return  # an incomplete character; a UTF-8 character has at most four bytes
        piece = new[len(old) :]
        self.context, self.written = self.written, len(self.tokens)
        if piece:
            self.text += piece
            self.write(piece)


def _to_stdout(piece: str) -> None:
    """Write to stdout without control characters."""
    kept = "".join(
        letter if letter.isprintable() or letter in "\n\t" else UNREAD for letter in piece
    )
    sys.stdout.write(kept)
    sys.stdout.flush()


# Masked and diffusion models.


def _unmask(
    trained: Trained,
    prompt: str,
    how: Drawing,
    generator: torch.Generator,
    console: Console,
) -> str:
    mask = int(trained.objective.mask_token)  # type: ignore[attr-defined]
    pieces = [prompt] if _is_text(trained) else prompt.split(GAP)
    start: list[int] = []
    for place, piece in enumerate(pieces):
        start += [mask] * (place > 0) + (_encoded(trained, piece).tolist() if piece else [])
    is_diffusion = trained.objective.name == "diffusion"
    noise = {"noise": trained.objective.noise} if is_diffusion else {}  # type: ignore[attr-defined]
    # A prompt with gaps keeps its length; another one is continued.
    length = len(start) if mask in start else len(start) + how.tokens
    with console.status(f"unmasking {length:,} tokens"):
        made = sample_diffusion(
            trained.model,
            length,
            how.steps,
            mask_token=mask,
            method=how.method or ("ancestral" if is_diffusion else "top-probability"),  # type: ignore[arg-type]
            temperature=how.temperature,
            top_p=how.top_p,
            generator=generator,
            prompt=torch.tensor(start) if start else None,
            **noise,
        )
    assert trained.tokenizer is not None
    text = trained.tokenizer.decode(made)
    _to_stdout(text)
    return text
