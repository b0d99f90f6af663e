"""`graphattn embed`: compute the features of every residue of a file, and their means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor

import graphattn as ga
from graphattn.cli.demo.sample import printable
from graphattn.cli.outputs import check_output
from graphattn.data import (
    FileFormatError,
    NucleotideTokenizer,
    ProteinTokenizer,
    Structure,
    read_bytes,
    read_fasta,
    read_structure,
    read_text,
    sniff_format,
    tokenizer_for_sequence,
)
from graphattn.data.files import STRUCTURE_FORMATS
from graphattn.near_names import did_you_mean
from graphattn.plain_tables import number_columns, plain_table

LETTERS = ProteinTokenizer().vocab_size
MOST_OTHER_TOKENS = 12  # of a protein model besides the letters; ESM's alphabet has 33 tokens
SHOWN = 10  # rows of the table


@dataclass(frozen=True)
class Protein:
    """A protein of a file, with the chain and insertion code of every residue."""

    name: str
    content: str | Structure
    sequence: str
    chains: list[str]  # chain of every residue; "" in FASTA
    numbers: list[int]
    codes: list[str]  # insertion codes; "" in FASTA


def run_embed(
    file: Path,
    model: Path | None,
    preset: str | None,
    out: Path | None,
    chains: str | None,
    seed: int,
    batch_size: int,
    max_bytes: int,
    console: Console,
) -> None:
    """Read, compute and write; the last line printed is the path of the output."""
    if str(file) == "-":
        file = Path("/dev/stdin")
    target = Path(f"{name_of(file)}-embeddings.npz") if out is None else out
    if target.suffix and not target.is_dir():
        check_output("--out", target, (".npz", ".pt"))
    elif inner := next((path for path in (target, *target.parents) if path.is_file()), None):
        raise ValueError(f"--out must not be inside a file, but {inner} is a file")
    with rereadable(file, max_bytes) as copy:
        proteins = read_proteins(copy, chains, max_bytes)
    network = model_of(model, preset, seed)
    with console.status(f"computing {len(proteins):,} proteins"):
        residues = features_of(network, proteins, batch_size)
    table = plain_table(f"{type(network).__name__}: {residues[0].shape[1]} features per residue")
    table.add_column("protein")
    number_columns(table, "residues", "norm of the mean")
    for protein, features in list(zip(proteins, residues, strict=True))[:SHOWN]:
        norm = float(features.mean(0).norm())
        table.add_row(printable(protein.name[:40]), f"{len(features):,}", f"{norm:.3f}")
    if len(proteins) > SHOWN:
        table.caption = f"and {len(proteins) - SHOWN:,} more"
    console.print(table)
    if target.suffix and not target.is_dir():
        write_file(target, proteins, residues)
    else:
        write_folder(target, proteins, residues)
    typer.echo(str(target))


def name_of(file: Path) -> str:
    return file.name.removesuffix(".gz").rpartition(".")[0] or file.name


@contextmanager
def rereadable(file: Path, max_bytes: int) -> Iterator[Path]:
    """Yield the file, or a copy of the contents of a pipe, which could be read only once."""
    if not file.is_fifo():
        yield file
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder, file.name.removesuffix(".gz") or "stdin")
        copy.write_bytes(read_bytes(file, max_bytes=max_bytes))  # unpacked
        try:
            yield copy
        except FileFormatError as error:
            raise FileFormatError(file, error.reason, line=error.line) from error


def read_proteins(file: Path, chains: str | None, max_bytes: int) -> list[Protein]:
    """Read the proteins of a file: records of FASTA, or one structure with some chains."""
    kind = sniff_format(file, "")
    if kind == "text":  # the name says nothing
        kind = sniff_format(file, read_text(file, max_bytes=max_bytes))
    if kind == "fasta":
        if chains is not None:
            raise ValueError("--chains can only be used with a structure, got a FASTA file")
        return _of_fasta(file, max_bytes)
    if kind not in STRUCTURE_FORMATS:
        raise FileFormatError(
            file, "must be a FASTA, PDB or mmCIF file, but neither its name nor its content says so"
        )
    wanted: Any = "all" if chains is None else [name.strip() for name in chains.split(",")]
    structure = read_structure(file, chains=wanted, max_bytes=max_bytes)
    owners = [structure.chain_ids[chain] for chain in structure.chain_index.tolist()]
    numbers, codes = structure.residue_numbers.tolist(), list(structure.insertion_codes)
    return [Protein(name_of(file), structure, structure.sequence, owners, numbers, codes)]


def _of_fasta(file: Path, max_bytes: int) -> list[Protein]:
    tokenizer, proteins, nucleic, empty = ProteinTokenizer(), [], 0, 0
    for record in read_fasta(file, max_bytes=max_bytes):
        sequence = tokenizer.decode(tokenizer.encode(record.sequence))
        if sequence:
            nucleic += isinstance(tokenizer_for_sequence(record.sequence), NucleotideTokenizer)
            numbers = list(range(1, len(sequence) + 1))
            blank = [""] * len(sequence)
            proteins.append(Protein(record.header, sequence, sequence, blank, numbers, blank))
        else:
            empty += 1
    if not proteins:
        raise FileFormatError(file, "all its sequences contain only gaps")
    if empty:
        records = len(proteins) + empty
        warn(f"{empty:,} of {records:,} records contain only gaps and are omitted")
    if nucleic:
        many = f"{nucleic:,} of {len(proteins):,} records"
        warn(f"{many} look like DNA or RNA, but are read as proteins")
    return proteins


def warn(text: str) -> None:
    typer.echo(f"graphattn: warning: {text}", err=True)


def model_of(folder: Path | None, preset: str | None, seed: int) -> Any:
    """Load the model of a folder, or make that of a preset with random weights, with a warning."""
    if (folder is None) == (preset is None):
        raise ValueError(
            "give either --model FOLDER (a saved model) or --preset NAME (a model with random "
            "weights)" + ("" if folder is None else ", not both")
        )
    if folder is not None:
        model = ga.load(folder)
    else:
        assert preset is not None
        known = {
            name: getattr(ga.models, entry.model)
            for name, entry in ga.models.presets().items()
            if name.startswith("protein") and entry.model in ("ProteinModel", "SequenceEncoder")
        }
        if preset not in known:
            near = did_you_mean(preset, known)
            raise ValueError(f"--preset must be one of {', '.join(known)}, got {preset!r}{near}")
        warn(
            f"the weights of --preset {preset} are random (seed {seed}), so the features have no "
            "biological meaning"
        )
        torch.manual_seed(seed)
        model = known[preset].from_preset(preset)
    if isinstance(model, ga.models.ProteinModel):
        return model.eval()
    vocab_size = getattr(model, "vocab_size", 0)
    if (
        not isinstance(model, ga.models.SequenceEncoder)
        or not LETTERS <= vocab_size <= LETTERS + MOST_OTHER_TOKENS
    ):
        raise ValueError(
            f"--model must be a ProteinModel, or a SequenceEncoder with {LETTERS} to "
            f"{LETTERS + MOST_OTHER_TOKENS} tokens, of which the first {LETTERS} are those of "
            f"ga.data.ProteinTokenizer, got a {type(model).__name__}"
            + (f" of {vocab_size} tokens" if vocab_size else "")
        )
    return model.eval()


def features_of(model: Any, proteins: list[Protein], batch_size: int) -> list[Tensor]:
    """Return the features of the residues of every protein, float32 [N, dim]."""
    if isinstance(model, ga.models.ProteinModel):
        contents = [protein.content for protein in proteins]
        residues = model.embed(contents, batch_size=batch_size)
        return [features.float().cpu() for features in residues]
    return [_by_chains(model, protein) for protein in proteins]


@torch.no_grad()
def _by_chains(model: Any, protein: Protein) -> Tensor:
    content = protein.content
    parts = content.split() if isinstance(content, Structure) else [protein]
    encode: Callable[[str], Tensor] = ProteinTokenizer().encode
    return torch.cat([model.encode(encode(part.sequence)) for part in parts]).float()


# Output.


def arrays_of(proteins: list[Protein], residues: list[Tensor]) -> dict[str, Any]:
    """Join the arrays of all proteins, in the format of `docs/protein_models.md`."""
    return {
        "names": [protein.name for protein in proteins],
        "lengths": torch.tensor([len(features) for features in residues]),
        "means": torch.stack([features.mean(0) for features in residues]),
        "residues": torch.cat(residues),
        "letters": [letter for protein in proteins for letter in protein.sequence],
        "chains": [chain for protein in proteins for chain in protein.chains],
        "numbers": torch.tensor([number for protein in proteins for number in protein.numbers]),
        "insertion_codes": [code for protein in proteins for code in protein.codes],
    }


def write_file(path: Path, proteins: list[Protein], residues: list[Tensor]) -> None:
    arrays = arrays_of(proteins, residues)
    if path.suffix == ".pt":
        torch.save(arrays, path)
        return
    import numpy

    named: dict[str, Any] = {name: numpy.asarray(value) for name, value in arrays.items()}
    numpy.savez(path, **named)


def write_folder(folder: Path, proteins: list[Protein], residues: list[Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for protein, features in zip(proteins, residues, strict=True):
        words = protein.name.split()[0]
        stem = re.sub(r"[^\w.=-]+", "_", words).strip("._")[:100] or "protein"
        name, again = stem, 1
        while name.lower() in taken:
            again += 1
            name = f"{stem}-{again}"
        taken.add(name.lower())
        write_file(folder / f"{name}.npz", [protein], [features])
