"""GenBank files: sequences, and labels of their bases."""

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
        name: the version (or accession, or locus) and the definition, as in a FASTA header.
        organism: the name of the organism; "" if the file does not give it.
        sequence: upper-case letters.
        labels: LongTensor [N], 1 for a base that is in a feature with the requested key, and 0 for
            others; None if no key was requested.

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
    path: str | os.PathLike[str], *, feature: str | None = None, max_bytes: int | None = MAX_BYTES
) -> list[GenBankRecord]:
    """Read all records of a GenBank file (gzipped or not), in the order of the file.

    Args:
        path: the file.
        feature: a feature key, such as ``"CDS"``. Labels then say which bases are in such a
            feature, on either strand; of a spliced feature, only the exons count. None for no
            labels.
        max_bytes: the largest size that is read, as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: if the file cannot be read (see :func:`~graphattn.data.read_text`), is
            malformed, or has a record without a sequence. If possible, the message gives the line.
        ImportError: if biotite is not installed.

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
    """Split a file into entries; return the lines of each with the number of its first line."""
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
    """Parse one entry with biotite."""
    from biotite.sequence.io.genbank import GenBankFile, get_raw_sequence

    _check_letters(path, lines, begin)
    with biotite_at_work(path):
        file = GenBankFile.read(io.StringIO("\n".join(lines)))
        sequence = get_raw_sequence(file).upper() if _field(file, "ORIGIN") else ""
        # biotite's get_locus needs fixed columns, which many programs do not write.
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
                reason = f"this line begins with base {first[1]}, but {size:,} bases come before it"
                raise FileFormatError(path, reason, line=number)
            size += len(letters)
            wrong = next((c for c in letters if not (c.isascii() and c.isalpha())), None)
            if wrong is not None:
                raise FileFormatError(path, f"{wrong!a} in a sequence is not a letter", line=number)
    stated = _LOCUS_LENGTH.search(lines[0])
    if stated is not None and size and int(stated[1]) != size:
        reason = f"LOCUS says {stated[1]} {stated[2]}, but this entry has {size}"
        raise FileFormatError(path, reason, line=begin)


def _field(file: Any, name: str) -> list[str]:
    """Return the lines of a field; an empty list if there is no such field."""
    fields = file.get_fields(name)
    return list(fields[0][0]) if fields else []


def _organism(file: Any) -> str:
    """Return the name of the organism, the first line of the subfield ORGANISM of SOURCE."""
    lines, subfields = (file.get_fields("SOURCE") or [([], {})])[0]
    named = subfields.get("ORGANISM") or lines or [""]
    return str(named[0]).strip()


def _labels(path: str | os.PathLike[str], file: Any, N: int, feature: str) -> Tensor:
    """Label the bases that are in a feature with a given key by 1, and all others by 0."""
    from biotite.sequence.io.genbank import get_annotation

    labels = torch.zeros(N, dtype=torch.long)
    if not _field(file, "FEATURES"):
        return labels
    with biotite_at_work(path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        annotation = get_annotation(file, include_only=[feature])
    # biotite leaves out a feature whose location it cannot parse, and warns.
    for warning in caught:
        if "unsupported location" in str(warning.message):
            place = str(warning.message).partition(" is an unsupported")[0]
            raise FileFormatError(path, f"a {feature} is at {place}, a location that is not known")
    for annotated in annotation:
        for place in annotated.locs:
            if place.defect & place.Defect.BETWEEN:  # A location between two bases has no base.
                continue
            if place.first < 1 or place.last > N:
                where = f"{place.first}..{place.last}, but there are only {N} bases"
                raise FileFormatError(path, f"a {feature} is at {where}")
            labels[place.first - 1 : place.last] = 1
    return labels
