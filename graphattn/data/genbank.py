"""GenBank files: sequences, and what is known of every base."""

from __future__ import annotations

import io
import os
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphattn.data.files import MAX_BYTES, FileFormatError, read_text
from graphattn.data.structures.parsing import biotite_at_work, require_biotite

_ORIGIN_NUMBERS = re.compile(r"[0-9\s]")
_FIRST_BASE = re.compile(r"\s*([0-9]+)\s")
_LOCUS_LENGTH = re.compile(r"\s([0-9]+)\s+(bp|aa)\b")


@dataclass(frozen=True, eq=False)
class GenBankRecord:
    """One entry of a GenBank file.

    Attributes:
        name: the version (or accession, or locus) and the definition, as a FASTA header has them.
        organism: as the file names it; "" where it does not.
        sequence: upper-case letters.
        labels: LongTensor [N], 1 where a base lies in a feature of the kind that was asked for;
            None where none was.

    Example:
        >>> import graphattn as ga
        >>> record = ga.data.GenBankRecord("TOY A toy.", "Escherichia coli", "ACGT")
        >>> len(record.sequence), record.labels
        (4, None)
    """

    name: str
    organism: str
    sequence: str
    labels: Tensor | None = None


def read_genbank(
    path: str | os.PathLike[str],
    *,
    feature: str | None = None,
    max_bytes: int | None = MAX_BYTES,
) -> list[GenBankRecord]:
    """The records of a GenBank file (gzipped or not), in their order.

    Args:
        path: the file.
        feature: a feature key, such as ``"CDS"``: labels say which bases lie in one, on either
            strand; of spliced ones the exons.
        max_bytes: as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: the file cannot be read (see :func:`~graphattn.data.read_text`), is
            malformed, or has a record without sequence; it names the line where it can.
        ImportError: biotite is not installed.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> text = '''LOCUS       TOY          12 bp    DNA     linear   UNA 01-JAN-2000
        ... DEFINITION  A toy.
        ... FEATURES             Location/Qualifiers
        ...      CDS             complement(3..8)
        ... ORIGIN
        ...         1 acgtacgtac gt
        ... //
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "toy.gb")
        ...     _ = path.write_text(text)
        ...     record = ga.data.read_genbank(path, feature="CDS")[0]
        >>> record.name, record.sequence
        ('TOY A toy.', 'ACGTACGTACGT')
        >>> record.labels
        tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    """
    require_biotite("reading GenBank")
    if feature is not None and (not isinstance(feature, str) or not feature):
        raise ValueError(f"feature must be a feature key, such as 'CDS', or None, got {feature!r}")
    records = []
    for line, lines in _entries(path, read_text(path, max_bytes=max_bytes)):
        try:
            records.append(_record(path, lines, line, feature))
        except FileFormatError as error:
            if error.line is not None:
                raise
            raise FileFormatError(path, error.reason, line=line) from error
    return records


def _entries(path: str | os.PathLike[str], text: str) -> list[tuple[int, list[str]]]:
    """Every entry's lines, with the number of its first."""
    entries: list[tuple[int, list[str]]] = []
    begin, lines = 0, text.split("\n")
    for place, line in enumerate(lines):
        if line.rstrip() == "//":
            while not lines[begin].strip():
                begin += 1
            entries.append((begin + 1, lines[begin : place + 1]))
            if not lines[begin].startswith("LOCUS"):
                reason = "not GenBank: an entry must begin with LOCUS"
                raise FileFormatError(path, reason, line=begin + 1)
            begin = place + 1
    rest = next((n for n, line in enumerate(lines[begin:], begin + 1) if line.strip()), None)
    if rest is not None:
        is_entry = lines[rest - 1].startswith("LOCUS")
        reason = "this entry does not end with '//'" if is_entry else "not GenBank: no LOCUS here"
        raise FileFormatError(path, reason, line=rest)
    return entries


def _record(
    path: str | os.PathLike[str], lines: list[str], begin: int, feature: str | None
) -> GenBankRecord:
    """One entry as biotite reads it."""
    from biotite.sequence.io.genbank import GenBankFile, get_raw_sequence

    _check_letters(path, lines, begin)
    with biotite_at_work(path):
        file = GenBankFile.read(io.StringIO("\n".join(lines)))
        sequence = get_raw_sequence(file).upper() if _field(file, "ORIGIN") else ""
        # Not by get_locus: it wants columns that many programs do not keep to.
        locus = lines[0].split()[1] if len(lines[0].split()) > 1 else ""
        version = _field(file, "VERSION") or _field(file, "ACCESSION") or [locus]
        definition = " ".join(part.strip() for part in _field(file, "DEFINITION"))
    if not sequence:
        raise FileFormatError(path, "no sequence in this entry", line=begin)
    name = (version[0].split() or [locus])[0]
    labels = None if feature is None else _labels(path, file, len(sequence), feature)
    return GenBankRecord(f"{name} {definition}".strip(), _organism(file), sequence, labels)


def _check_letters(path: str | os.PathLike[str], lines: list[str], begin: int) -> None:
    """Raise for the first character of the sequence that is no letter, and for missing bases."""
    is_sequence, size = False, 0
    for number, line in enumerate(lines, begin):
        if line.startswith("ORIGIN"):
            is_sequence = True
        elif is_sequence and line.rstrip() != "//":
            letters = _ORIGIN_NUMBERS.sub("", line)
            first = _FIRST_BASE.match(line)
            if first is not None and letters and int(first[1]) != size + 1:
                reason = (
                    f"this line begins with base {first[1]}, after {size:,} bases: some are missing"
                )
                raise FileFormatError(path, reason, line=number)
            size += len(letters)
            wrong = next((c for c in letters if not (c.isascii() and c.isalpha())), None)
            if wrong is not None:
                raise FileFormatError(path, f"{wrong!a} in a sequence is not a letter", line=number)
    told = _LOCUS_LENGTH.search(lines[0])
    if told is not None and size and int(told[1]) != size:
        reason = f"LOCUS tells of {told[1]} {told[2]}, and this entry has {size}: some are missing"
        raise FileFormatError(path, reason, line=begin)


def _field(file: Any, name: str) -> list[str]:
    """The lines of a field, none where there is no such field."""
    fields = file.get_fields(name)
    return list(fields[0][0]) if fields else []


def _organism(file: Any) -> str:
    """The organism's name: of SOURCE's subfield, whose further lines are its lineage."""
    fields = file.get_fields("SOURCE")
    if not fields:
        return ""
    lines, subfields = fields[0]
    named = subfields.get("ORGANISM") or lines or [""]
    return str(named[0]).strip()


def _labels(path: str | os.PathLike[str], file: Any, N: int, feature: str) -> Tensor:
    """Mark the bases that lie in a feature of that key by 1."""
    from biotite.sequence.io.genbank import get_annotation

    labels = torch.zeros(N, dtype=torch.long)
    if not _field(file, "FEATURES"):
        return labels
    with biotite_at_work(path), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        annotation = get_annotation(file, include_only=[feature])
    # biotite leaves out, with a warning, a feature whose place it cannot read.
    for warning in heard:
        if "unsupported location" in str(warning.message):
            place = str(warning.message).partition(" is an unsupported")[0]
            raise FileFormatError(path, f"a {feature} lies at {place}, which cannot be read")
    for found in annotation:
        for place in found.locs:
            if place.defect & place.Defect.BETWEEN:  # a place between two bases covers neither
                continue
            if place.first < 1 or place.last > N:
                raise FileFormatError(
                    path, f"a {feature} lies at {place.first}..{place.last} of {N} bases"
                )
            labels[place.first - 1 : place.last] = 1
    return labels
