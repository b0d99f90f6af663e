"""Protein structures: the C-alpha trace of one chain of a PDB or mmCIF file."""

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphattn.data.files import MAX_BYTES, FileFormatError, read_text, sniff_format


@dataclass(frozen=True, eq=False, repr=False)
class ProteinChain:
    """One protein chain: a residue is a token, its C-alpha atom is the token's place in space.

    Attributes:
        chain_id: the chain's name in the file (the authors' name in mmCIF, as in PDB); ``""`` where
            a PDB file leaves it blank.
        sequence: one letter per residue, N of them; ``X`` where a residue has none.
        ca_positions: FloatTensor [N, 3], Angstrom.

    Example:
        >>> import torch, graphattn as ga
        >>> chain = ga.data.ProteinChain("A", "GWK", 3.8 * torch.eye(3))
        >>> chain
        ProteinChain(chain_id='A', num_residues=3)
        >>> ga.knn_graph(chain.ca_positions, k=1).num_edges
        3
    """

    chain_id: str
    sequence: str
    ca_positions: Tensor

    def __repr__(self) -> str:
        return f"ProteinChain(chain_id={self.chain_id!r}, num_residues={len(self.sequence)})"


def read_structure(
    path: str | os.PathLike[str],
    chain: str | None = None,
    *,
    max_bytes: int | None = MAX_BYTES,
) -> ProteinChain:
    """One chain of the first model of a PDB or mmCIF file (gzipped or not).

    A residue counts when it has a C-alpha atom and is an ``ATOM`` record or an amino acid of the
    Chemical Component Dictionary. So modified residues inside a chain stay (selenomethionine as M,
    most others as X), while ligands that are amino acids (after the chain's ``TER``; without
    ``label_seq_id`` in mmCIF) do not. Of alternative locations the first in the file is taken, also
    where they are different residues.

    Args:
        path: the file; PDB or mmCIF by its extension, else by its content.
        chain: the chain's name; by default the first chain that has amino acids.
        max_bytes: as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: the file cannot be read (see :func:`~graphattn.data.read_text`), is
            malformed (for PDB it names the line), or has no C-alpha atom.
        ValueError: the file has no protein chain `chain`.
        ImportError: biotite is not installed.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> pdb = '''\\
        ... ATOM      1  CA  GLY A   1      11.000   2.500  -3.000  1.00  0.00           C
        ... ATOM      2  CA  TRP A   2      14.800   2.500  -3.000  1.00  0.00           C
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "two.pdb")
        ...     _ = path.write_text(pdb)
        ...     structure = ga.data.read_structure(path)
        >>> structure
        ProteinChain(chain_id='A', num_residues=2)
        >>> structure.sequence
        'GW'
        >>> structure.ca_positions
        tensor([[11.0000,  2.5000, -3.0000],
                [14.8000,  2.5000, -3.0000]])
    """
    chains = protein_chains(path, max_bytes=max_bytes)
    if chain is None:
        return chains[0]
    found = next((own for own in chains if own.chain_id == chain), None)
    if found is None:
        existing = ", ".join(repr(own.chain_id) for own in chains)
        raise ValueError(f"chain must be a protein chain of the file ({existing}), got {chain!r}")
    return found


def protein_chains(
    path: str | os.PathLike[str], *, max_bytes: int | None = MAX_BYTES
) -> list[ProteinChain]:
    """Every chain that :func:`read_structure` can read, in the order of the file; one or more.

    Raises:
        FileFormatError, ImportError: as :func:`read_structure`.
    """
    try:
        import biotite  # noqa: F401
    except ImportError as error:
        message = "reading structures needs biotite: pip install 'graphattn[bio]'"
        raise ImportError(message) from error

    text = read_text(path, max_bytes=max_bytes)
    file_format = sniff_format(path, text)
    if file_format not in ("pdb", "mmcif"):
        raise FileFormatError(path, "is neither PDB nor mmCIF, by its name and its content")
    atoms = _pdb_atoms(path, text) if file_format == "pdb" else _mmcif_atoms(path, text)
    alpha_carbons = _alpha_carbons(atoms)
    if len(alpha_carbons) == 0:
        raise FileFormatError(path, "holds no C-alpha atom of an amino acid")
    chains = []
    for chain in dict.fromkeys(alpha_carbons.chain_id.tolist()):
        residues = alpha_carbons[alpha_carbons.chain_id == chain]
        ca_positions = torch.tensor(residues.coord, dtype=torch.float32)
        if not ca_positions.isfinite().all():
            raise FileFormatError(path, "holds a coordinate that is not a finite number")
        sequence = "".join(_one_letter(name) for name in residues.res_name.tolist())
        chains.append(ProteinChain(chain, sequence, ca_positions))
    return chains


# The fixed columns of a PDB coordinate record, counted from 0 (wwPDB format 3.3, "ATOM").
_PDB_CHAIN = 21
_PDB_RESIDUE_NUMBER = slice(22, 26)
_PDB_COORDINATES = {"x": slice(30, 38), "y": slice(38, 46), "z": slice(46, 54)}
_PDB_END_OF_COORDINATES = 54
_PDB_END_OF_B_FACTOR = 66

# Stricter than float() and int(), which also take "nan", "1_0" and digits of other scripts.
# Residue numbers past 9999 are written in hybrid-36: A000 follows 9999.
_DECIMAL = re.compile(r" *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+) *")
_RESIDUE_NUMBER = re.compile(r" *-?[0-9]+ *|[A-Z][0-9A-Z]{3}|[a-z][0-9a-z]{3}")


def _pdb_atoms(path: str | os.PathLike[str], text: str) -> Any:
    """The atoms of the first model, without the ligands that follow a chain."""
    from biotite.structure.io.pdb import PDBFile

    records: list[str] = []
    chain_end: dict[str, int] = {}  # the number of records before a chain's last TER
    first_model_is_over = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith(("ATOM", "HETATM")):
            _check_coordinate_record(path, number, line)  # in every model: broken is broken
            if not first_model_is_over:
                records.append(line)
        elif records and not first_model_is_over:
            if line.startswith(("MODEL", "ENDMDL")):
                first_model_is_over = True
            elif line.startswith("TER"):
                chain_end[records[-1][_PDB_CHAIN]] = len(records)
    if not records:
        raise FileFormatError(path, "is not a PDB structure: it has no ATOM record")

    polymer = [
        # Occupancy and B factor are not used here, but biotite stops where a program left them out.
        record[:_PDB_END_OF_COORDINATES] + "  1.00  0.00" + record[_PDB_END_OF_B_FACTOR:]
        for index, record in enumerate(records)
        if record.startswith("ATOM") or index < chain_end.get(record[_PDB_CHAIN], len(records))
    ]
    with _biotite_at_work(path):
        return PDBFile.read(io.StringIO("\n".join(polymer))).get_structure(model=1, altloc="all")


def _check_coordinate_record(path: str | os.PathLike[str], number: int, line: str) -> None:
    """Raise where an ATOM or HETATM record does not keep to its columns."""
    name = line[:6].strip()
    wrong = next((char for char in line if not (char.isascii() and char.isprintable())), None)
    if wrong is not None:  # above all a tab: it shifts the columns
        reason = f"{name} record holds {wrong!a}; its columns are plain ASCII"
        raise FileFormatError(path, reason, line=number)
    if len(line) < _PDB_END_OF_COORDINATES:
        reason = f"{name} record ends at column {len(line)}, the coordinates at column 54"
        raise FileFormatError(path, reason, line=number)
    residue_number = line[_PDB_RESIDUE_NUMBER]
    if not _RESIDUE_NUMBER.fullmatch(residue_number):
        reason = f"residue number (columns 23-26) is {residue_number!r}, not an integer"
        raise FileFormatError(path, reason, line=number)
    for axis, columns in _PDB_COORDINATES.items():
        if not _DECIMAL.fullmatch(line[columns]):
            where = f"columns {columns.start + 1}-{columns.stop}"
            reason = f"{axis} coordinate ({where}) is {line[columns]!r}, not a finite number"
            raise FileFormatError(path, reason, line=number)


def _mmcif_atoms(path: str | os.PathLike[str], text: str) -> Any:
    """The atoms of the first model of the first data block with atoms, without ligands."""
    from biotite.structure.io.pdbx import CIFFile, get_structure

    with _biotite_at_work(path):
        blocks = CIFFile.read(io.StringIO(text)).values()
        block = next((block for block in blocks if "atom_site" in block), None)
        if block is None:
            raise FileFormatError(path, "is not an mmCIF structure: it has no _atom_site")
        atom_site = block["atom_site"]
        for axis in "xyz":
            mask = atom_site[f"Cartn_{axis}"].mask
            if mask is not None and mask.array.any():  # biotite would read "?" as 0.0
                raise FileFormatError(path, f"an atom has no _atom_site.Cartn_{axis}")
        # Optional in the mmCIF dictionary, but biotite asks for both.
        for column, default in (("pdbx_PDB_ins_code", "?"), ("pdbx_PDB_model_num", "1")):
            if column not in atom_site:
                atom_site[column] = [default] * atom_site.row_count
        place = ["label_seq_id"] if "label_seq_id" in atom_site else []
        altloc = "all" if "label_alt_id" in atom_site else "first"
        atoms = get_structure(block, model=1, altloc=altloc, extra_fields=place)
        if place:
            atoms = atoms[~atoms.hetero | (atoms.label_seq_id != ".") & (atoms.label_seq_id != "?")]
        return atoms


def _alpha_carbons(atoms: Any) -> Any:
    """One C-alpha atom per residue, in the order of the file."""
    from biotite.structure import filter_amino_acids

    is_amino_acid = filter_amino_acids(atoms) | ~atoms.hetero
    is_calcium = atoms.res_name == "CA"
    alpha_carbons = atoms[(atoms.atom_name == "CA") & is_amino_acid & ~is_calcium]
    # Alternative locations, also of two different residues (microheterogeneity), are neighbours
    # with one number. Equal numbers further apart are different residues: numbering starts again
    # after 9999 and in unnamed chains. This replaces biotite's altloc="first", which (in 1.6) keeps
    # both of two different residues and drops residues whose locations are digits, as in 1k6p.
    place = list(
        zip(alpha_carbons.chain_id, alpha_carbons.res_id, alpha_carbons.ins_code, strict=True)
    )
    return alpha_carbons[[i for i in range(len(place)) if i == 0 or place[i] != place[i - 1]]]


def _one_letter(residue_name: str) -> str:
    from biotite.sequence import ProteinSequence

    try:
        return str(ProteinSequence.convert_letter_3to1(residue_name))
    except KeyError:
        return "X"


@contextmanager
def _biotite_at_work(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever stops biotite becomes one line about the file; its warnings stay quiet.

    It warns of guessed elements and missing optional columns, which this reader does not use.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FileFormatError:
        raise
    except Exception as error:  # a parser fed with a broken file raises anything
        cause: BaseException = error
        while cause.__context__ is not None:  # "Failed to deserialize" hides what failed
            cause = cause.__context__
        missing = "no column or block " if isinstance(cause, KeyError) else ""
        raise FileFormatError(path, f"is malformed: {missing}{cause}") from error
