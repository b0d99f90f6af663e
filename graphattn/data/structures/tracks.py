"""What biotite computes of a structure: secondary structure, and the surface water reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from graphattn.data.structures.parsing import require_biotite

if TYPE_CHECKING:
    from graphattn.data.structures.structure import Structure

_CODES = {"a": 1, "b": 2}  # of biotite: helix and strand


def secondary_structure(structure: Structure) -> Tensor:
    """0 coil, 1 helix, 2 strand of every residue."""
    require_biotite("secondary_structure()")
    from biotite.structure import AtomArray, annotate_sse

    atoms = AtomArray(len(structure))
    atoms.coord = structure.ca_positions.detach().cpu().float().numpy()
    atoms.atom_name[:] = "CA"
    atoms.res_name[:] = "ALA"  # whatever it is: only its place is looked at
    atoms.element[:] = "C"
    atoms.chain_id = numpy.array(structure.chain_index.tolist(), dtype=str).astype("U8")
    atoms.res_id = structure.positions.cpu().numpy()  # where these jump, the chain is broken
    codes = [_CODES.get(code, 0) for code in annotate_sse(atoms).tolist()]
    return torch.tensor(codes, device=structure.ca_positions.device)


def solvent_accessibility(structure: Structure, probe_radius: float) -> Tensor:
    """The accessible surface of every residue, summed over its atoms."""
    if not structure.has_all_atoms:
        raise ValueError(
            "atoms must be all read for solvent_accessibility(), got "
            f"{', '.join(structure.atoms)}: read_structure(path, atoms='all') reads them"
        )
    require_biotite("solvent_accessibility()")
    from biotite.structure import AtomArray, sasa

    rows, names, places = [], [], []
    for name, coordinates in structure.atoms.items():
        there = structure.has_atom(name).nonzero()[:, 0]
        rows.append(there)
        names += [name] * len(there)
        places.append(coordinates[there])
    residue = torch.cat(rows).cpu()
    atoms = AtomArray(len(names))
    atoms.coord = torch.cat(places).detach().cpu().float().numpy()
    radii = [
        _radius(structure.residue_names[row], name)
        for row, name in zip(residue.tolist(), names, strict=True)
    ]
    area = sasa(
        atoms,
        probe_radius=probe_radius,
        ignore_ions=False,
        vdw_radii=numpy.array(radii, dtype=numpy.float32),
    )
    total = torch.zeros(len(structure), dtype=torch.float64)
    total.index_add_(0, residue, torch.from_numpy(numpy.asarray(area, dtype=numpy.float64)))
    return total.to(structure.ca_positions)


def _radius(residue_name: str, atom_name: str) -> float:
    """The van der Waals radius of an atom with its hydrogens, or else of its element."""
    from biotite.structure import infer_elements
    from biotite.structure.info import vdw_radius_protor, vdw_radius_single

    try:
        radius = vdw_radius_protor(residue_name, atom_name)
    except (KeyError, ValueError):
        radius = None
    if radius is None:
        radius = vdw_radius_single(str(infer_elements([atom_name])[0]))
    return 1.7 if radius is None else float(radius)  # 1.7: carbon
