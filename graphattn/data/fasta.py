"""FASTA files, and tokenizers for proteins and nucleic acids."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from graphattn.data.files import MAX_BYTES, FileFormatError, read_text
from graphattn.data.text import CharacterTokenizer

_NOT_SEQUENCE = re.compile(r"[^A-Za-z*\-]")


@dataclass(frozen=True)
class FastaRecord:
    """One entry of a FASTA file.

    Attributes:
        header: the text after ``>``, without the spaces around it.
        sequence: upper-case letters, ``*`` (stop) and ``-`` (gap), joined from all lines.

    Example:
        >>> import graphattn as ga
        >>> record = ga.data.FastaRecord("sp|P00698", "KVFGRCELAA")
        >>> len(record.sequence)
        10
    """

    header: str
    sequence: str


def read_fasta(
    path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES
) -> list[FastaRecord]:
    """Read all records of a FASTA file (gzipped or not), in the order of the file.

    Records with equal headers are all returned. Blank lines and ``;`` comments are skipped. Lower
    case (soft masking) becomes upper case.

    Args:
        path: the file.
        max_bytes: the largest size that is read, as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: if the file cannot be read (see :func:`~graphattn.data.read_text`) or is
            malformed: a sequence before the first ``>``, an empty header, a header without a
            sequence, a character that is not a letter, ``*`` or ``-``. The message gives the line.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "two.fasta")
        ...     _ = path.write_text(">first\\nMKV\\nLTA\\n>second\\nacgt\\n")
        ...     for record in ga.data.read_fasta(path):
        ...         print(record)
        FastaRecord(header='first', sequence='MKVLTA')
        FastaRecord(header='second', sequence='ACGT')
    """
    records: list[FastaRecord] = []
    header, header_line, pieces = "", 0, [""]

    def end() -> None:
        if not pieces:
            raise FileFormatError(path, "no sequence after this header", line=header_line)
        if header:
            records.append(FastaRecord(header, "".join(pieces).upper()))

    for number, raw_line in enumerate(read_text(path, max_bytes=max_bytes).split("\n"), start=1):
        line = raw_line.strip()
        if not line or line.startswith(";"):
            continue
        if line.startswith(">"):
            end()
            header, header_line, pieces = line[1:].strip(), number, []
            if not header:
                raise FileFormatError(path, "empty header: nothing after '>'", line=number)
        elif not header:
            raise FileFormatError(path, "not FASTA: text before the first '>'", line=number)
        elif wrong := _NOT_SEQUENCE.search(line):
            reason = f"{wrong[0]!a} in a sequence is not a letter, '*' or '-'"
            raise FileFormatError(path, reason, line=number)
        else:
            pieces.append(line)
    if not header:
        raise FileFormatError(path, "not FASTA: no line starts with '>'")
    end()
    return records


class _SequenceTokenizer:
    """Base class of the two tokenizers below, which have a fixed vocabulary."""

    vocabulary: str
    _kind: ClassVar[str]
    _letter_of: dict[str, str]  # the vocabulary's letter for every allowed capital letter

    def __init__(self) -> None:
        self._characters = CharacterTokenizer(self.vocabulary)
        both_cases = self._letter_of | {c.lower(): to for c, to in self._letter_of.items()}
        self._spelling = str.maketrans(both_cases | {"-": ""})
        self._unknown = re.compile(f"[^{re.escape(''.join(both_cases))}-]")

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocabulary)

    def encode(self, sequence: str) -> Tensor:
        """Return the tokens of `sequence`, a LongTensor [N]; N is the number of letters but ``-``.

        Raises:
            ValueError: if `sequence` contains a character that this tokenizer does not know.
        """
        unknown = self._unknown.search(sequence)
        if unknown is not None:
            raise ValueError(
                f"sequence must hold {self._kind} letters, got {unknown[0]!a} "
                f"at position {unknown.start()}"
            )
        return self._characters.encode(sequence.translate(self._spelling))

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the letters of `tokens`, which are integers [N] in ``0..vocab_size - 1``.

        Raises:
            ValueError: in the same cases as
                :meth:`CharacterTokenizer.decode <graphattn.data.CharacterTokenizer>`.
        """
        return self._characters.decode(tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


class ProteinTokenizer(_SequenceTokenizer):
    """A tokenizer with one token per residue: 20 amino acids in alphabetical order, and X.

    Lower case counts as upper case. The other letters (B, Z and J, which are ambiguous; U and O,
    which are selenocysteine and pyrrolysine) and the stop ``*`` become X. A gap ``-`` gives no
    token, because it belongs to an alignment and not to the molecule.

    Example:
        >>> import graphattn as ga
        >>> tokenizer = ga.data.ProteinTokenizer()
        >>> tokenizer.vocabulary, tokenizer.vocab_size
        ('ACDEFGHIKLMNPQRSTVWYX', 21)
        >>> tokenizer.encode("MK-vU*")
        tensor([10,  8, 17, 20, 20])
        >>> tokenizer.decode(tokenizer.encode("MK-vU*"))
        'MKVXX'
    """

    vocabulary = "ACDEFGHIKLMNPQRSTVWYX"
    _kind = "amino acid"
    _letter_of = {c: c for c in vocabulary} | dict.fromkeys("BJOUZ*", "X")


class NucleotideTokenizer(_SequenceTokenizer):
    """A tokenizer with one token per base: A, C, G, T, and N for an ambiguous base.

    Lower case counts as upper case, and U as T, so DNA and RNA have the same tokens. The other
    IUPAC codes (R, Y, S, W, K, M, B, D, H, V) become N, or keep a token each with ``iupac=True``. X
    (masked) becomes N. A gap ``-`` gives no token, as in :class:`ProteinTokenizer`. Any other
    letter (E, F, I, ...) raises ValueError.

    Args:
        iupac: whether every IUPAC code has a token of its own, 15 in place of 5: ACGTN have the
            same numbers in both.

    Source: a token per IUPAC code is from Stabilizing Transformer Training Through Consensus,
        Section 5.1.

    Example:
        >>> import graphattn as ga
        >>> tokenizer = ga.data.NucleotideTokenizer()
        >>> tokenizer.vocabulary, tokenizer.vocab_size
        ('ACGTN', 5)
        >>> tokenizer.encode("gAU-RC")
        tensor([2, 0, 3, 4, 1])
        >>> tokenizer.decode(tokenizer.encode("gAU-RC"))
        'GATNC'
        >>> ga.data.NucleotideTokenizer(iupac=True).encode("gAU-RC")
        tensor([2, 0, 3, 5, 1])
    """

    vocabulary = "ACGTN"
    _codes: ClassVar = "RYSWKMBDHV"
    _kind = "IUPAC nucleotide"
    _letter_of = {c: c for c in vocabulary} | {"U": "T", "X": "N"} | dict.fromkeys(_codes, "N")

    def __init__(self, *, iupac: bool = False) -> None:
        if not isinstance(iupac, bool):
            raise ValueError(f"iupac must be True or False, got {iupac!r}")
        self.iupac = iupac
        if iupac:
            self.vocabulary = type(self).vocabulary + self._codes
            self._letter_of = type(self)._letter_of | {c: c for c in self._codes}
        super().__init__()

    def __repr__(self) -> str:
        return f"NucleotideTokenizer({'iupac=True' * self.iupac})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NucleotideTokenizer) and self.iupac == other.iupac

    def __hash__(self) -> int:
        return hash((NucleotideTokenizer, self.iupac))


_MIN_BASE_SHARE = 0.95  # allows a few ambiguity codes, which assembled genomes have


def tokenizer_for_sequence(sequence: str) -> ProteinTokenizer | NucleotideTokenizer:
    """Choose the tokenizer for a sequence that may be a protein or a nucleic acid.

    The sequence counts as nucleotides if at least 95 % of its letters (without gaps) are A, C, G,
    T, U or N, and all others are ambiguity codes. Otherwise it counts as a protein. So with fewer
    than 20 letters, nucleotides must have no ambiguity codes.

    A, C, G, T and N also stand for amino acids, which are about a quarter of an average protein. So
    a protein of n residues is mistaken for nucleotides with a probability of about 0.26^n: 1 in
    700,000 for 10 residues, but 1 in 200 for 4. For peptides, choose the tokenizer yourself.

    Raises:
        ValueError: if `sequence` has no letter, or a character that is in neither alphabet.

    Example:
        >>> import graphattn as ga
        >>> ga.data.tokenizer_for_sequence("GATTACANNNGATTACA")
        NucleotideTokenizer()
        >>> ga.data.tokenizer_for_sequence("MKVLTAGNATC")
        ProteinTokenizer()
    """
    letters = sequence.upper().replace("-", "")
    if not letters:
        raise ValueError(f"sequence must hold at least one letter, got {sequence[:20]!a}")
    nucleotide, protein = NucleotideTokenizer(), ProteinTokenizer()
    bases = sum(letters.count(base) for base in "ACGTUN")
    if bases >= _MIN_BASE_SHARE * len(letters) and nucleotide._unknown.search(sequence) is None:
        return nucleotide
    protein.encode(sequence)  # raises ValueError if it is no sequence
    return protein
