"""The tokens of a file, whatever it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from torch import Tensor

from graphattn.data import (
    CharacterTokenizer,
    FileFormatError,
    NucleotideTokenizer,
    ProteinTokenizer,
    read_fasta,
    read_structure,
    read_text,
    sniff_format,
    tokenizer_for_sequence,
)

MOST_TRAINING_TOKENS = 1_000_000


@dataclass(frozen=True)
class Sample:
    """What a demonstration runs on."""

    title: str
    tokens: Tensor  # [N], what graphs and layers are shown on
    letters: str  # one character per token of `tokens`
    vocab_size: int
    sequences: tuple[Tensor, ...]  # all of the file's, to train on
    packed: tuple[int, ...] = ()  # lengths of the first sequences of a FASTA file
    ca_positions: Tensor | None = None  # [N, 3], in Angstrom


def load_sample(file: Path | None, num_tokens: int) -> Sample:
    """The first `num_tokens` tokens of a file, or of the text that every Python ships."""
    if file is None:
        text = "\n".join(topics[name] for name in sorted(topics))
        return _text_sample("Python's own manual (pydoc_data.topics)", text, num_tokens)
    if file.is_fifo():
        raise FileFormatError(file, "is a pipe, which cannot be read twice: save it first")
    kind = sniff_format(file, read_text(file))
    if kind == "fasta":
        return _fasta_sample(file, num_tokens)
    if kind in ("pdb", "mmcif"):
        return _structure_sample(file, num_tokens)
    return _text_sample(printable(file.name), read_text(file), num_tokens)


def _text_sample(name: str, text: str, num_tokens: int) -> Sample:
    tokenizer = CharacterTokenizer.from_text(text)
    everything = tokenizer.encode(text[:MOST_TRAINING_TOKENS])
    tokens = everything[:num_tokens]
    title = f"{name}: {_part(len(tokens), len(text))} characters"
    return Sample(
        f"{title}, {tokenizer.vocab_size} distinct",
        tokens,
        text[:num_tokens],
        tokenizer.vocab_size,
        sequences=(everything,),
    )


def _structure_sample(file: Path, num_tokens: int) -> Sample:
    chain = read_structure(file)
    tokenizer = ProteinTokenizer()
    everything = tokenizer.encode(chain.sequence)
    tokens = everything[:num_tokens]
    used = _part(len(tokens), len(everything))
    return Sample(
        f"{printable(file.name)}, chain {printable(chain.chain_id)}: {used} residues",
        tokens,
        tokenizer.decode(tokens),
        tokenizer.vocab_size,
        sequences=(everything,),
        ca_positions=chain.ca_positions[:num_tokens].double(),
    )


def _fasta_sample(file: Path, num_tokens: int) -> Sample:
    records = read_fasta(file)
    numbered = [(n, r) for n, r in enumerate(records, start=1) if r.sequence.strip("-")]
    if not numbered:
        raise FileFormatError(file, "all its sequences are gaps")
    number, first = numbered[0]
    tokenizer = tokenizer_for_sequence(first.sequence)
    unit = "bases" if isinstance(tokenizer, NucleotideTokenizer) else "residues"
    sequences, total = [], 0
    for _, record in numbered:  # those of the first one's kind
        own = tokenizer_for_sequence(record.sequence)
        if total < MOST_TRAINING_TOKENS and type(own) is type(tokenizer):
            sequences.append(tokenizer.encode(record.sequence[: MOST_TRAINING_TOKENS - total]))
            total += len(sequences[-1])
    tokens = sequences[0][:num_tokens]
    packed: list[int] = []
    for sequence in sequences[:4]:
        room = num_tokens - sum(packed)
        if room > 0:
            packed.append(min(room, len(sequence)))
    title = (
        f"{printable(file.name)}, record {number} of {len(records):,} "
        f"({printable(first.header[:40])}): "
        f"{_part(len(tokens), len(first.sequence.replace('-', '')))} {unit}"
    )
    return Sample(
        title,
        tokens,
        tokenizer.decode(tokens),
        tokenizer.vocab_size,
        sequences=tuple(sequences),
        packed=tuple(packed),
    )


def printable(name: str) -> str:
    """`name` with escapes in place of what would steer a terminal or cannot be written."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _part(used: int, there: int) -> str:
    return f"{used:,}" if used == there else f"the first {used:,} of {there:,}"
