"""The tokens of a file, whatever it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from torch import Tensor

from graphattn.data import (
    CharacterTokenizer,
    NucleotideTokenizer,
    ProteinTokenizer,
    read_fasta,
    read_structure,
    read_text,
    sniff_format,
    tokenizer_for_sequence,
)


@dataclass(frozen=True)
class Sample:
    """What a demonstration runs on."""

    title: str
    tokens: Tensor  # [N]
    vocab_size: int
    packed: tuple[int, ...] = ()  # lengths of the first sequences of a FASTA file
    ca_positions: Tensor | None = None  # [N, 3], in Angstrom


def load_sample(file: Path | None, num_tokens: int) -> Sample:
    """The first `num_tokens` tokens of a file, or of the text that every Python ships."""
    if file is None:
        text = "\n".join(topics[name] for name in sorted(topics))
        return _text_sample("Python's own manual (pydoc_data.topics)", text, num_tokens)
    kind = sniff_format(file, read_text(file))
    if kind == "fasta":
        return _fasta_sample(file, num_tokens)
    if kind in ("pdb", "mmcif"):
        chain = read_structure(file)
        tokens = ProteinTokenizer().encode(chain.sequence)[:num_tokens]
        title = f"{file.name}, chain {chain.chain_id}: {_part(len(tokens), len(chain.sequence))}"
        return Sample(
            f"{title} residues",
            tokens,
            ProteinTokenizer().vocab_size,
            ca_positions=chain.ca_positions[:num_tokens].double(),
        )
    return _text_sample(file.name, read_text(file), num_tokens)


def _text_sample(name: str, text: str, num_tokens: int) -> Sample:
    tokenizer = CharacterTokenizer.from_text(text)
    tokens = tokenizer.encode(text[:num_tokens])
    title = f"{name}: {_part(len(tokens), len(text))} characters"
    return Sample(f"{title}, {tokenizer.vocab_size} distinct", tokens, tokenizer.vocab_size)


def _fasta_sample(file: Path, num_tokens: int) -> Sample:
    records = read_fasta(file)
    first = records[0]
    tokenizer = tokenizer_for_sequence(first.sequence)
    unit = "bases" if isinstance(tokenizer, NucleotideTokenizer) else "residues"
    tokens = tokenizer.encode(first.sequence)
    packed: list[int] = []
    for record in records[:4]:
        room = num_tokens - sum(packed)
        if room > 0:
            packed.append(min(room, len(record.sequence)))
    title = (
        f"{file.name}, record 1 of {len(records):,} ({first.header[:40]}): "
        f"{_part(min(len(tokens), num_tokens), len(tokens))} {unit}"
    )
    return Sample(title, tokens[:num_tokens], tokenizer.vocab_size, packed=tuple(packed))


def _part(used: int, there: int) -> str:
    return f"{used:,}" if used == there else f"the first {used:,} of {there:,}"
