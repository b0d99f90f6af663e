"""Finding residues among atoms: one token per C-alpha atom of an amino acid."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy
import torch
from torch import Tensor

from graphattn.data.files import FileFormatError
from graphattn.data.structures.parsing import FORCE_FIELD_NAMES
from graphattn.data.structures.structure import Structure

BACKBONE = ("N", "CA", "C", "O")


def checked_atoms(atoms: Any) -> tuple[str, ...] | None:
    """Return the names of atoms, besides CA, that `atoms` means; None for all atoms."""
    named = {"ca": (), "backbone": BACKBONE, "all": None}
    if isinstance(atoms, str):
        if atoms in named:
            return named[atoms]
    elif isinstance(atoms, list | tuple) and all(isinstance(a, str) and a for a in atoms):
        return tuple(dict.fromkeys(atoms))
    raise ValueError(
        "atoms must be 'ca', 'backbone', 'all' or a list of names of atoms, such as ['N', 'CB'], "
        f"got {atoms!r}"
    )


def structure_of_atoms(
    path: str | os.PathLike[str], atoms: Any, wanted: tuple[str, ...] | None
) -> tuple[Structure, list[str]]:
    """Make a structure from atoms; return it with a second name of every residue's chain.

    The second name is ``label_asym_id`` in mmCIF, whose assemblies use it. Otherwise it is the
    chain's name.
    """
    from biotite.structure import filter_amino_acids

    is_calcium = atoms.res_name == "CA"
    atoms = atoms[(filter_amino_acids(atoms) | ~atoms.hetero) & ~is_calcium]
    alpha = _one_alpha_carbon_per_residue(atoms)
    if len(alpha) == 0:
        raise FileFormatError(path, "holds no C-alpha atom of an amino acid")
    chain_ids = tuple(dict.fromkeys(atoms.chain_id[alpha].tolist()))
    number = {name: index for index, name in enumerate(chain_ids)}
    chain_index = numpy.array([number[name] for name in atoms.chain_id[alpha].tolist()])
    order = chain_index.argsort(kind="stable")  # A file may have a chain in several pieces.
    alpha, chain_index = alpha[order], chain_index[order]

    residues = atoms[alpha]
    places = _places_of_atoms(atoms, alpha, wanted)
    if any(value.isinf().any() for value in places.values()) or places["CA"].isnan().any():
        raise FileFormatError(path, "holds a coordinate that is not a finite number")
    names = residues.res_name.tolist()
    structure = Structure(
        sequence="".join(map(_one_letter, names, residues.hetero.tolist())),
        ca_positions=places["CA"],
        chain_index=torch.from_numpy(chain_index),
        chain_ids=chain_ids,
        residue_numbers=torch.tensor(residues.res_id.tolist(), dtype=torch.int64),
        insertion_codes=tuple(residues.ins_code.tolist()),
        residue_names=tuple(names),
        b_factors=_b_factors(residues),
        atoms=places,
        has_all_atoms=wanted is None,
    )
    keys = _annotation(residues, "label_asym_id", residues.chain_id).tolist()
    return structure, keys


def _one_alpha_carbon_per_residue(atoms: Any) -> Any:
    """Find the C-alpha atom of every residue; return indices in the order of the file."""
    alpha = numpy.flatnonzero(atoms.atom_name == "CA")
    # Alternative locations are neighbours with the same number, even if they are two different
    # residues (microheterogeneity). Equal numbers that are not neighbours are different residues,
    # because numbering restarts after 9999 and in unnamed chains. This replaces biotite's
    # altloc="first", which (in 1.6) returns both of two different residues, and leaves out residues
    # whose locations are digits, as in 1k6p.
    begins = _begins_a_residue(atoms[alpha])
    return alpha[begins & ~_is_another_location(atoms[alpha], begins.cumsum() - 1)]


def _is_another_location(atoms: Any, run: Any) -> Any:
    """Say which atoms repeat an earlier residue at another location.

    Some programs write all residues of a loop at location A, and then all of them at location B.
    """
    location = _annotation(atoms, "altloc_id", numpy.full(len(run), ""))
    location = numpy.char.strip(location.astype(str), " .?")
    repeats = numpy.zeros(len(run), dtype=bool)
    if not (location != "").any():
        return repeats
    begins = numpy.searchsorted(run, numpy.arange(run[-1] + 2))
    seen: dict[tuple[str, int, str], set[str]] = {}
    for first, end in itertools.pairwise(begins.tolist()):
        key = str(atoms.chain_id[first]), int(atoms.res_id[first]), str(atoms.ins_code[first])
        locations, before = set(location[first:end].tolist()), seen.setdefault(key, set())
        # If the same location occurred before, this is another residue with the same number.
        is_other = "" in locations | before or bool(locations & before)
        repeats[first:end] = bool(before) and not is_other
        before |= locations
    return repeats


def _begins_a_residue(atoms: Any) -> Any:
    """Say which atoms differ in chain, number or insertion code from the atom before them."""
    begins = numpy.arange(atoms.array_length()) == 0
    for column in (atoms.chain_id, atoms.res_id, atoms.ins_code):
        begins[1:] |= column[1:] != column[:-1]
    return begins


def _places_of_atoms(atoms: Any, alpha: Any, wanted: tuple[str, ...] | None) -> dict[str, Tensor]:
    """Collect coordinates by the name of atoms, [N, 3] each; NaN if a residue has no such atom.

    The atoms of a residue are around its C-alpha atom in the file, and have the same number and
    name. Of alternative locations, the one of the C-alpha atom is used, or else the first one in
    the file.
    """
    run = _begins_a_residue(atoms).cumsum() - 1
    residue_of_run = numpy.full(run[-1] + 1, -1)
    residue_of_run[run[alpha]] = numpy.arange(len(alpha))
    residue = residue_of_run[run]
    location = _annotation(atoms, "altloc_id", numpy.full(len(run), ""))
    alpha_of = alpha[residue]  # the C-alpha atom of every atom; meaningless where residue is -1
    selected = (residue >= 0) & (atoms.res_name == atoms.res_name[alpha_of])
    selected &= ~numpy.isin(atoms.element, ("H", "D")) & (atoms.atom_name != "CA")
    if wanted is not None:
        selected &= numpy.isin(atoms.atom_name, wanted)
    elsewhere = location != location[alpha_of]
    places = {"CA": atoms.coord[alpha]}
    names = dict.fromkeys(atoms.atom_name[selected].tolist()) if wanted is None else wanted
    for name in names:
        if name == "CA":
            continue
        index = numpy.flatnonzero(selected & (atoms.atom_name == name))
        # The best location is last, so that it overwrites the others below.
        index = index[elsewhere[index].argsort(kind="stable")][::-1]
        places[name] = numpy.full((len(alpha), 3), numpy.nan)
        places[name][residue[index]] = atoms.coord[index]
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in places.items()}


def _annotation(atoms: Any, name: str, default: Any) -> Any:
    return getattr(atoms, name) if name in atoms.get_annotation_categories() else default


def _b_factors(residues: Any) -> Tensor:
    """Convert B factors, floats from PDB files and text from mmCIF files; NaN if there is none."""
    column = _annotation(residues, "b_factor", None)
    if column is None:
        column = _annotation(residues, "B_iso_or_equiv", [None] * residues.array_length())
    values = []
    for value in column:
        try:
            values.append(float(value))
        except (TypeError, ValueError):
            values.append(float("nan"))
    return torch.tensor(values, dtype=torch.float32)


def _one_letter(residue_name: str, is_hetero: bool) -> str:
    """Return the letter of an amino acid, or of the one that it is a modification of; else X."""
    from biotite.sequence import ProteinSequence
    from biotite.structure.info import one_letter_code

    if not is_hetero:  # Simulations write ATOM records alone.
        residue_name = FORCE_FIELD_NAMES.get(residue_name, residue_name)
    try:
        return str(ProteinSequence.convert_letter_3to1(residue_name))
    except KeyError:
        letter: str | None = one_letter_code(residue_name)  # some are two or three residues
        return letter if letter is not None and len(letter) == 1 else "X"
