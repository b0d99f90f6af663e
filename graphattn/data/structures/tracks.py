"""Features of residues from biotite: secondary structure and solvent-accessible surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import torch
from torch import Tensor

from graphattn.data.structures.parsing import FORCE_FIELD_NAMES, require_biotite

_CODES = {"a": 1, "b": 2}  # biotite's codes of helix and strand


def secondary_structure(ca_positions: Tensor, chain_index: Tensor, positions: Tensor) -> Tensor:
    """Compute the secondary structure of every residue: 0 coil, 1 helix, 2 strand.

    Args:
        ca_positions: [N, 3], coordinates of the C-alpha atoms; NaN if they are not known.
        chain_index: [N], the chain of every residue.
        positions: [N], positions along the chains, which increase by more than 1 at a break.
    """
    require_biotite("secondary_structure()")
    from biotite.structure import AtomArray, annotate_sse

    atoms = AtomArray(len(ca_positions))
    atoms.coord = ca_positions.detach().cpu().float().numpy()
    atoms.atom_name[:] = "CA"
    atoms.res_name[:] = "ALA"  # biotite needs a name, but uses only the coordinates
    atoms.element[:] = "C"
    atoms.chain_id = numpy.array(chain_index.tolist(), dtype=str).astype("U8")
    atoms.res_id = positions.cpu().numpy()  # biotite breaks the chain where these have a gap
    codes = [_CODES.get(code, 0) for code in annotate_sse(atoms).tolist()]
    return torch.tensor(codes, device=ca_positions.device)


def solvent_accessibility(
    atoms: Mapping[str, Tensor], residue_names: Sequence[str], probe_radius: float
) -> Tensor:
    """Compute the accessible surface of every residue, summed over its atoms; float64 on the CPU.

    Args:
        atoms: coordinates of all atoms except hydrogen by their names, [N, 3] each; NaN if a
            residue has no such atom.
        residue_names: N names of the Chemical Component Dictionary, or of force fields.
        probe_radius: the radius of the rolling ball, in Angstrom.
    """
    require_biotite("solvent_accessibility()")
    from biotite.structure import AtomArray, sasa

    rows, names, places = [], [], []
    for name, coordinates in atoms.items():
        there = coordinates.isfinite().all(dim=1).nonzero()[:, 0]
        rows.append(there)
        names += [name] * len(there)
        places.append(coordinates[there])
    residue = torch.cat(rows).cpu()
    atom_array = AtomArray(len(names))
    atom_array.coord = torch.cat(places).detach().cpu().float().numpy()
    radii = [
        _radius(residue_names[row], name) for row, name in zip(residue.tolist(), names, strict=True)
    ]
    area = sasa(
        atom_array,
        probe_radius=probe_radius,
        ignore_ions=False,
        vdw_radii=numpy.array(radii, dtype=numpy.float32),
    )
    total = torch.zeros(len(residue_names), dtype=torch.float64)
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
