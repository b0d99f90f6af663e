"""Read the tokens of a file of any supported kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

from torch import Tensor

from graphattn.data import (
    MAX_BYTES,
    CharacterTokenizer,
    FileFormatError,
    NucleotideTokenizer,
    ProteinTokenizer,
    Structure,
    read_fasta,
    read_structure,
    read_text,
    sniff_format,
    tokenizer_for_sequence,
)
from graphattn.data.files import STRUCTURE_FORMATS

MOST_TRAINING_TOKENS = 1_000_000
SHORTEST_CHAIN = 8  # in a folder; shorter chains are peptides


@dataclass(frozen=True)
class Sample:
    """The data of a demo."""

    title: str
    tokens: Tensor  # [N], the tokens for graphs and layers
    letters: str  # one character per token of `tokens`
    vocab_size: int
    sequences: tuple[Tensor, ...]  # all sequences of the file, for training
    packed: tuple[int, ...] = ()  # lengths of the first sequences of a FASTA file
    ca_positions: Tensor | None = None  # [N, 3], in Angstrom
    structures: tuple[Structure, ...] | None = None  # the structures of `sequences`
    sequence_name: str = "text"  # the word for one of the sequences
    notes: tuple[str, ...] = ()  # notes about omitted data


def load_sample(file: Path | None, num_tokens: int, max_bytes: int | None = MAX_BYTES) -> Sample:
    """Load the first tokens of a file, of a folder's first structure, or of Python's manual."""
    if file is None:
        text = "\n".join(topics[name] for name in sorted(topics))
        return _text_sample("Python's own manual (pydoc_data.topics)", text, num_tokens)
    if file.is_fifo():
        raise FileFormatError(
            file, "is a pipe, which cannot be read twice: save it to a file first"
        )
    if file.is_dir():
        return _folder_sample(file, num_tokens, max_bytes)
    kind = sniff_format(file, "")
    if kind == "text":  # the name says nothing
        text = read_text(file, max_bytes=max_bytes)
        kind = sniff_format(file, text)
    if kind == "fasta":
        return _fasta_sample(file, num_tokens, max_bytes)
    if kind in STRUCTURE_FORMATS:
        structure = read_structure(file, max_bytes=max_bytes)
        return _structure_sample(printable(file.name), [structure], num_tokens)
    return _text_sample(printable(file.name), text, num_tokens)


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


def _structure_sample(name: str, structures: list[Structure], num_tokens: int) -> Sample:
    first = structures[0]
    tokenizer = ProteinTokenizer()
    sequences = tuple(tokenizer.encode(structure.sequence) for structure in structures)
    chains = f"chain{'s' * (len(first.chain_ids) > 1)} {', '.join(first.chain_ids)}"
    tokens = sequences[0][:num_tokens]
    used = _part(len(tokens), len(sequences[0]))
    return Sample(
        f"{name}, {printable(chains)}: {used} residues",
        tokens,
        tokenizer.decode(tokens),
        tokenizer.vocab_size,
        sequences=sequences,
        ca_positions=first.ca_positions[:num_tokens].double(),
        structures=tuple(structures),
        sequence_name="structure",
    )


def _folder_sample(folder: Path, num_tokens: int, max_bytes: int | None) -> Sample:
    """Read all usable structures in a folder and its subfolders.

    If a file cannot be read, a note says so, and the others are still used.
    """
    everything = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [file for file in everything if sniff_format(file.name, "") in STRUCTURE_FORMATS]
    structures: list[Structure] = []
    notes: list[str] = []
    first_file, total, read, too_short, chains = None, 0, 0, 0, 0
    for file in files:
        if total >= MOST_TRAINING_TOKENS:
            notes.append(f"omitted: {len(files) - read - len(notes):,} more files")
            break
        try:
            structure = read_structure(file, max_bytes=max_bytes)
        except FileFormatError as error:
            notes.append(f"omitted: {error}")
            continue
        sizes = structure.chain_index.bincount(minlength=len(structure.chain_ids)).tolist()
        named = zip(structure.chain_ids, sizes, strict=True)
        long = [name for name, size in named if size >= SHORTEST_CHAIN]
        too_short += len(sizes) - len(long)
        read += 1
        if not long:
            continue
        if first_file is None:
            first_file = file
        structures.append(structure if len(long) == len(sizes) else structure.select(chains=long))
        total += len(structures[-1])
        chains += len(long)
    if first_file is None:
        reason = f"none of its {len(files):,} files can be used" if files else "holds none"
        raise FileFormatError(
            folder, f"is a folder without structures (.pdb, .ent, .cif, .mmcif, .bcif): {reason}"
        )
    if too_short:
        notes.append(f"omitted: {too_short:,} chains with fewer than {SHORTEST_CHAIN} residues")
    if others := [printable(file.name) for file in everything if file not in files]:
        notes.append(f"omitted, because they are no structures: {', '.join(others)}")
    title = f"{printable(folder.resolve().name)}: {chains:,} chains of {read:,} files; shown: "
    sample = _structure_sample(f"{title}{printable(first_file.name)}", structures, num_tokens)
    return replace(sample, notes=tuple(notes))


def _fasta_sample(file: Path, num_tokens: int, max_bytes: int | None) -> Sample:
    records = read_fasta(file, max_bytes=max_bytes)
    numbered = [(n, r) for n, r in enumerate(records, start=1) if r.sequence.strip("-")]
    if not numbered:
        raise FileFormatError(file, "all its sequences contain only gaps")
    number, first = numbered[0]
    tokenizer = tokenizer_for_sequence(first.sequence)
    unit = "bases" if isinstance(tokenizer, NucleotideTokenizer) else "residues"
    sequences, total = [], 0
    for _, record in numbered:  # only records of the same kind as the first
        is_alike = type(tokenizer_for_sequence(record.sequence)) is type(tokenizer)
        if total < MOST_TRAINING_TOKENS and is_alike:
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
        sequence_name="record",
    )


def printable(name: str) -> str:
    """Return `name` with escapes for control characters and characters that cannot be written."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _part(used: int, there: int) -> str:
    return f"{used:,}" if used == there else f"the first {used:,} of {there:,}"
