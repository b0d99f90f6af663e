"""Features of residues from biotite: secondary structure and solvent-accessible surface."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from graphattn.data.structures.parsing import FORCE_FIELD_NAMES, require_biotite

_CODES = {"a": 1, "b": 2}  # biotite's codes of helix and strand


def secondary_structure(structure: Any) -> Tensor:
    """Compute the secondary structure of every residue: 0 coil, 1 helix, 2 strand."""
    require_biotite("secondary_structure()")
    from biotite.structure import AtomArray, annotate_sse

    atoms = AtomArray(len(structure))
    atoms.coord = structure.ca_positions.detach().cpu().float().numpy()
    atoms.atom_name[:] = "CA"
    atoms.res_name[:] = "ALA"  # biotite needs a name, but uses only the coordinates
    atoms.element[:] = "C"
    atoms.chain_id = numpy.array(structure.chain_index.tolist(), dtype=str).astype("U8")
    atoms.res_id = structure.positions.cpu().numpy()  # gaps of these break the chain in biotite
    codes = [_CODES.get(code, 0) for code in annotate_sse(atoms).tolist()]
    return torch.tensor(codes, dtype=torch.int64, device=structure.ca_positions.device)


def solvent_accessibility(structure: Any, probe_radius: float) -> Tensor:
    """Compute the accessible surface of every residue as the sum over its atoms, in float64."""
    require_biotite("solvent_accessibility()")
    from biotite.structure import AtomArray, sasa

    rows, names, places = [], [], []
    for name, coordinates in structure.atoms.items():
        there = coordinates.isfinite().all(dim=1).nonzero()[:, 0]
        rows.append(there)
        names += [name] * len(there)
        places.append(coordinates[there])
    residue = torch.cat(rows).cpu()
    atom_array = AtomArray(len(names))
    atom_array.coord = torch.cat(places).detach().cpu().float().numpy()
    radii = [
        _radius(structure.residue_names[row], name)
        for row, name in zip(residue.tolist(), names, strict=True)
    ]
    vdw_radii = numpy.array(radii, dtype=numpy.float32)
    area = sasa(atom_array, probe_radius=probe_radius, ignore_ions=False, vdw_radii=vdw_radii)
    total = torch.zeros(len(structure), dtype=torch.float64)
    return total.index_add_(0, residue, torch.from_numpy(numpy.asarray(area, dtype=numpy.float64)))


def _radius(residue_name: str, atom_name: str) -> float:
    """Return the van der Waals radius of an atom with its hydrogens, or else of its element."""
    from biotite.structure import infer_elements
    from biotite.structure.info import vdw_radius_protor, vdw_radius_single

    try:
        radius = vdw_radius_protor(FORCE_FIELD_NAMES.get(residue_name, residue_name), atom_name)
    except (KeyError, ValueError):
        radius = None
    if radius is None:
        radius = vdw_radius_single(str(infer_elements([atom_name])[0]))
    return 1.7 if radius is None else float(radius)  # 1.7 is the radius of carbon
