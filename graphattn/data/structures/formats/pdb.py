"""PDB files: coordinate records by their columns, and copies of chains from REMARK 350."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from typing import Any

from graphattn.data.files import FileFormatError
from graphattn.data.structures.assembly import Assemblies
from graphattn.data.structures.parsing import biotite_at_work

# The fixed columns of a PDB coordinate record, counted from 0 (wwPDB format 3.3, "ATOM").
_CHAIN = 21
_RESIDUE_NUMBER = slice(22, 26)
_COORDINATES = {"x": slice(30, 38), "y": slice(38, 46), "z": slice(46, 54)}
_END_OF_COORDINATES = 54
_B_FACTOR = slice(60, 66)

# These are stricter than float() and int(), which also accept "nan", "1_0" and digits of other
# scripts. Residue numbers above 9999 are written in hybrid-36, in which A000 follows 9999.
_DECIMAL = re.compile(r" *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+) *")
_NUMBER = re.compile(r" *-?[0-9]+ *|[A-Z][0-9A-Z]{3}|[a-z][0-9a-z]{3}")

# Records between two models. Frames of a simulation, and joined files, have END and no MODEL.
_BORDERS = ("MODEL", "ENDMDL", "END")

_BIOMT = re.compile(r" +BIOMT([123]) +([0-9]+)((?: +[+-]?[0-9]*\.[0-9]+){4}) *")
_CHAINS = re.compile(r"(?:APPLY THE FOLLOWING TO| +AND) CHAINS:(.*)")


def pdb_atoms(path: str | os.PathLike[str], text: str, model: int) -> Any:
    """Read the atoms of a model, without the ligands that follow a chain."""
    from biotite.structure.io.pdb import PDBFile

    records: list[str] = []
    chain_end: dict[str, int] = {}  # the number of records before the last TER of a chain
    last = 0  # the last model that has atoms
    for line_number, number, line in _lines_with_models(text):
        if line.startswith(("ATOM", "HETATM")):
            _check_coordinate_record(path, line_number, line)  # in all models, not only in this
            last = number
            if number == model:
                records.append(line)
        elif line.startswith("TER") and number == model and records:
            chain_end[records[-1][_CHAIN]] = len(records)
    if last == 0:
        raise FileFormatError(path, "is not a PDB structure: it has no ATOM record")
    if model > last:
        raise ValueError(f"model must be <= {last}, the number of models in the file, got {model}")

    polymer = [
        _with_default_occupancy(record)
        for index, record in enumerate(records)
        if record.startswith("ATOM") or index < chain_end.get(record[_CHAIN], len(records))
    ]
    with biotite_at_work(path):
        file = PDBFile.read(io.StringIO("\n".join(polymer)))
        return file.get_structure(model=1, altloc="all", extra_fields=["b_factor"])


def _lines_with_models(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield every line with its number and the number of the model that it belongs to.

    What follows the border of a model belongs to the next one; so does the header of a joined file.
    """
    model, is_empty = 1, True
    for line_number, line in enumerate(text.split("\n"), start=1):
        if line.startswith(("ATOM", "HETATM")):
            is_empty = False
        elif line[:6].rstrip() in _BORDERS and not is_empty:
            model, is_empty = model + 1, True
        yield line_number, model, line


def _with_default_occupancy(record: str) -> str:
    """Set the occupancy of a record to 1, and a missing B factor to nan.

    Occupancies are not used here, but biotite raises an error if one is missing.
    """
    b_factor = record[_B_FACTOR]
    if not _DECIMAL.fullmatch(b_factor):
        b_factor = "nan"
    return f"{record[:_END_OF_COORDINATES]}  1.00{b_factor:>6}{record[_B_FACTOR.stop :]}"


def _check_coordinate_record(path: str | os.PathLike[str], number: int, line: str) -> None:
    """Raise if an ATOM or HETATM record does not have the columns of the format."""
    name = line[:6].strip()
    wrong = next((char for char in line if not (char.isascii() and char.isprintable())), None)
    if wrong is not None:  # This is mostly a tab, which shifts the columns.
        reason = f"{name} record holds {wrong!a}, but must be printable ASCII characters"
        raise FileFormatError(path, reason, line=number)
    if len(line) < _END_OF_COORDINATES:
        reason = f"{name} record ends at column {len(line)}, but coordinates end at column 54"
        raise FileFormatError(path, reason, line=number)
    residue_number = line[_RESIDUE_NUMBER]
    if not _NUMBER.fullmatch(residue_number):
        reason = f"residue number (columns 23-26) is {residue_number!r}, not an integer"
        raise FileFormatError(path, reason, line=number)
    for axis, columns in _COORDINATES.items():
        if not _DECIMAL.fullmatch(line[columns]):
            where = f"columns {columns.start + 1}-{columns.stop}"
            reason = f"{axis} coordinate ({where}) is {line[columns]!r}, not a finite number"
            raise FileFormatError(path, reason, line=number)


def pdb_assemblies(path: str | os.PathLike[str], text: str, model: int) -> Assemblies:
    """Read the assemblies in REMARK 350: the chains of each, and their operations.

    If several files were joined to one, those of the file with this model are read.
    """
    assemblies: Assemblies = {}
    # `of_chains` says whether the last line named chains, so that "AND CHAINS" continues the list.
    name, of_chains, first_model = "1", False, 1
    for number, model_of_line, line in _lines_with_models(text):
        if not line.startswith("REMARK 350") or model_of_line > model:
            continue
        if model_of_line > first_model:  # This is the header of the next file.
            assemblies.clear()
            name, of_chains, first_model = "1", False, model_of_line
        content = line[11:].rstrip()
        if content.startswith("BIOMOLECULE:"):
            name = content.partition(":")[2].strip()
            assemblies.setdefault(name, [])
        elif match := _CHAINS.fullmatch(content):
            steps = assemblies.setdefault(name, [])
            if not of_chains or content.startswith("APPLY"):
                steps.append(([], []))
            chains = [chain.strip() for chain in match[1].split(",")]
            steps[-1][0].extend("" if chain == "NULL" else chain for chain in chains if chain)
            of_chains = True
            continue
        elif content.startswith("  BIOMT"):
            row = _BIOMT.fullmatch(content)
            steps = assemblies.get(name, [])
            if row is None or not steps:
                reason = "is no row of a matrix" if steps else "comes before a list of chains"
                raise FileFormatError(path, f"BIOMT record {reason}", line=number)
            operations = steps[-1][1]
            if row[1] == "1":
                operations.append([])
            if not operations or len(operations[-1]) != int(row[1]) - 1:
                reason = "BIOMT1, BIOMT2 and BIOMT3 do not follow each other"
                raise FileFormatError(path, reason, line=number)
            operations[-1].append([float(value) for value in row[3].split()])
        of_chains = False
    for steps in assemblies.values():
        if any(len(operation) != 3 for _, operations in steps for operation in operations):
            raise FileFormatError(path, "REMARK 350 ends before the row BIOMT3 of a matrix")
    return {name: steps for name, steps in assemblies.items() if steps}
