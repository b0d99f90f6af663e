"""Context of a protein model that a structure determines: features and classes of residues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from graphattn.data.structures.structure import Structure

# Widths of the tracks: a number of classes or of features, as ProteinModel(context=...) takes them.
STRUCTURE_CONTEXT = {"secondary_structure": 3, "solvent_accessibility": 1, "plddt": 1}
HUNDRED = 100.0  # Angstrom squared of surface, and the largest pLDDT


def structure_context(structure: Structure, tracks: Iterable[str]) -> dict[str, Tensor]:
    """Return tracks of context that a structure determines, for a ProteinModel.

    What is not known of a residue is -1 (classes) or NaN (features), which the model does not read.
    ``STRUCTURE_CONTEXT`` has the widths of all tracks:

    - ``secondary_structure``, 3 classes, integers [N]: 0 coil, 1 helix, 2 strand
      (:meth:`Structure.secondary_structure`); unknown without a C-alpha atom.
    - ``solvent_accessibility``, [N, 1], in 100 Angstrom squared
      (:meth:`Structure.solvent_accessibility`).
    - ``plddt``, [N, 1], from 0 to 1: the confidence of a prediction, from its B factors in per
      cent. In an experimental structure, B factors are something else.

    Args:
        structure: N residues.
        tracks: names of tracks.

    Raises:
        ValueError: if a track is unknown, if a B factor is not in 0 .. 100 or none is above 1, or
            if `solvent_accessibility` has no atoms (``read_structure(path, atoms="all")``).
        ImportError: if biotite is not installed, for the first two.

    Source: Stabilizing Transformer Training Through Consensus, Section 5.1 and Appendix E.1, has
        these three among its context tracks.

    Example:
        >>> import torch, graphattn as ga
        >>> confidence = torch.tensor([90.0, 50.0, torch.nan])
        >>> structure = ga.data.Structure("GWK", torch.eye(3), b_factors=confidence)
        >>> ga.data.structure_context(structure, ["plddt"])
        {'plddt': tensor([[0.9000],
                [0.5000],
                [   nan]])}
        >>> widths = {"plddt": ga.data.STRUCTURE_CONTEXT["plddt"]}
        >>> model = ga.models.ProteinModel(16, depth=1, heads=2, neighbors=2, context=widths)
        >>> known = ga.data.structure_context(structure, widths)
        >>> model.embed(structure, context=known).shape
        torch.Size([3, 16])
    """
    if not isinstance(structure, Structure):
        raise ValueError(f"structure must be a Structure, got {type(structure).__name__}")
    is_list = isinstance(tracks, Iterable) and not isinstance(tracks, str)
    names: list[Any] = list(tracks) if is_list else [tracks]
    for name in names:
        if not is_list or name not in STRUCTURE_CONTEXT:
            raise ValueError(
                f"tracks must be a list of some of {', '.join(STRUCTURE_CONTEXT)}, got {tracks!r}"
            )
    return {name: _COMPUTED[name](structure) for name in names}


def _secondary_structure(structure: Structure) -> Tensor:
    return structure.secondary_structure().masked_fill(~structure.has_ca, -1)


def _solvent_accessibility(structure: Structure) -> Tensor:
    surface = structure.solvent_accessibility().masked_fill(~structure.has_ca, torch.nan)
    return surface[:, None] / HUNDRED


def _plddt(structure: Structure) -> Tensor:
    confidence = structure.b_factors
    for value in confidence[(confidence < 0) | (confidence > HUNDRED)].tolist():
        raise ValueError(
            f"structure must have a pLDDT from 0 to 100 as b_factors, got {value:g}: leave the "
            "track 'plddt' out if they are B factors of an experiment"
        )
    known = confidence[~confidence.isnan()]
    if len(known) and 0 < float(known.max()) <= 1:  # as ESMFold writes it
        raise ValueError(
            f"structure must have a pLDDT from 0 to 100 as b_factors, got at most "
            f"{float(known.max()):g}: make a Structure with b_factors=100 * structure.b_factors if "
            "they are shares"
        )
    return confidence[:, None] / HUNDRED


_COMPUTED: dict[str, Callable[[Structure], Tensor]] = {
    "secondary_structure": _secondary_structure,
    "solvent_accessibility": _solvent_accessibility,
    "plddt": _plddt,
}
