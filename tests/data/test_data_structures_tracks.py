"""Secondary structure and solvent accessibility: ideal shapes, files' own records, biotite.

Also the context of a model, which is made of these.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.data import STRUCTURE_CONTEXT, Structure, read_structure, structure_context

pytest.importorskip("biotite", reason="biotite computes these")

PROBE, CARBON = 1.4, 1.88  # Angstrom: water, and a C-alpha with its hydrogen (Tsai et al., 1999)


def helix(length: int) -> Tensor:
    """C-alpha atoms of an ideal alpha helix: 100 degrees and 1.5 Angstrom per residue."""
    turn = torch.arange(length) * math.radians(100)
    return torch.stack([2.3 * turn.cos(), 2.3 * turn.sin(), 1.5 * torch.arange(length)], dim=1)


def strand(length: int) -> Tensor:
    """C-alpha atoms of a twisted strand: 3.3 Angstrom per residue, 190 degrees."""
    turn = torch.arange(length) * math.radians(190)
    return torch.stack([0.95 * turn.cos(), 0.95 * turn.sin(), 3.3 * torch.arange(length)], dim=1)


def test_ideal_helices_and_strands_are_found():
    of_helix = Structure("A" * 20, helix(20)).secondary_structure()
    of_strand = Structure("A" * 20, strand(20)).secondary_structure()
    assert of_helix.dtype == of_strand.dtype == torch.int64
    assert of_helix[3:-3].tolist() == [1] * 14
    assert of_strand[3:-3].tolist() == [2] * 14
    assert Structure("GWK", helix(3)).secondary_structure().tolist() == [0, 0, 0]


def test_no_helix_runs_from_chain_to_chain():
    """Two halves of five turns, or twenty pieces of one residue: the same places."""
    places = helix(20)
    halves = Structure("A" * 20, places, torch.arange(20) // 10, ("A", "B"))
    assert halves.secondary_structure()[2:8].tolist() == [1] * 6
    names = tuple(f"{i}" for i in range(20))
    pieces = Structure("A" * 20, places, torch.arange(20), names)
    assert not pieces.secondary_structure().any()


def test_no_helix_runs_over_a_break_of_a_chain():
    """No helix runs over a gap in the residue numbers: its two sides count as two chains."""
    places, numbers = helix(20), torch.arange(1, 21)
    whole = Structure("A" * 20, places, residue_numbers=numbers)
    for start in (3, 9, 10, 16):
        broken = replace(whole, residue_numbers=numbers + 30 * (numbers > start))
        apart = Structure("A" * 20, places, (numbers > start).long(), ("A", "B"))
        assert torch.equal(broken.secondary_structure(), apart.secondary_structure())
    pieces = replace(whole, residue_numbers=2 * numbers)
    assert whole.secondary_structure().any()
    assert not pieces.secondary_structure().any()


def test_a_residue_without_a_place_is_coil():
    places = helix(20)
    places[10] = math.nan
    codes = Structure("A" * 20, places).secondary_structure()
    assert codes[10] == 0
    assert codes[3:7].tolist() == [1] * 4


def recorded(path: Path, structure: Structure) -> Tensor:
    """Alpha helices and strands by the HELIX and SHEET records of a PDB file."""
    codes = torch.zeros(len(structure), dtype=torch.int64)
    numbers = structure.residue_numbers
    for line in path.read_text().splitlines():
        if line.startswith("HELIX") and line[38:40].strip() == "1":
            chain, first, last, kind = line[19], line[21:25], line[33:37], 1
        elif line.startswith("SHEET"):
            chain, first, last, kind = line[21], line[22:26], line[33:37], 2
        else:
            continue
        in_chain = structure.chain_index == structure.chain_ids.index(chain)
        codes[in_chain & (numbers >= int(first)) & (numbers <= int(last))] = kind
    return codes


def test_helices_and_strands_are_mostly_those_of_the_entries(real_file):
    """Helices and strands found by P-SEA are mostly those that the entries record.

    Records are by hydrogen bonds (DSSP), and longer: P-SEA sees C-alpha atoms alone.
    """
    pairs = []
    for entry in ("1aki", "3o5r", "5l33", "6mrr", "1k6p", "1dix", "1o1z", "5zng"):
        path = real_file(f"structure/pdb/{entry}.pdb")
        structure = read_structure(path)
        pairs.append(torch.stack([recorded(path, structure), structure.secondary_structure()]))
    true, results = torch.cat(pairs, dim=1)
    both = [[int(((true == a) & (results == b)).sum()) for b in range(3)] for a in range(3)]
    assert both[1][1] > 0.7 * sum(both[1])  # of 339 residues in helices
    assert both[2][2] > 0.5 * sum(both[2])  # of 377 in strands
    assert both[1][1] > 0.95 * int((results == 1).sum())
    assert both[2][2] > 0.75 * int((results == 2).sum())
    assert both[1][2] + both[2][1] <= 1  # they are never taken for each other


@pytest.mark.long
def test_the_surface_of_one_atom_is_a_sphere():
    alone = Structure("G", torch.zeros(1, 3), has_all_atoms=True)
    expected = 4 * math.pi * (CARBON + PROBE) ** 2
    assert alone.solvent_accessibility().item() == pytest.approx(expected, rel=1e-5)
    dry = alone.solvent_accessibility(probe_radius=0.001).item()
    assert dry == pytest.approx(4 * math.pi * (CARBON + 0.001) ** 2, rel=1e-5)


def test_two_spheres_lose_the_caps_that_they_cover():
    radius, distance = CARBON + PROBE, 4.0
    pair = Structure("GG", torch.tensor([[0.0, 0, 0], [distance, 0, 0]]), has_all_atoms=True)
    # A plane halfway cuts a cap of height r - d / 2 off either sphere.
    expected = 4 * math.pi * radius**2 - 2 * math.pi * radius * (radius - distance / 2)
    assert pair.solvent_accessibility().tolist() == pytest.approx([expected] * 2, rel=0.02)


def test_accessibility_is_what_biotite_says_of_the_atoms(real_file):
    import numpy
    from biotite.structure import apply_residue_wise, filter_amino_acids, sasa
    from biotite.structure.io.pdb import PDBFile

    path = real_file("structure/pdb/1aki.pdb")
    atoms = PDBFile.read(path).get_structure(model=1)
    atoms = atoms[filter_amino_acids(atoms)]
    expected = apply_residue_wise(atoms, sasa(atoms), numpy.nansum)
    computed = read_structure(path, atoms="all").solvent_accessibility()
    torch.testing.assert_close(
        computed, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-3
    )


def test_an_interface_is_covered(real_file):
    """Chains of the HIV protease dimer (1K6P) hide surface from water; far apart they do not."""
    dimer = read_structure(real_file("structure/pdb/1k6p.pdb"), atoms="all")
    together = dimer.solvent_accessibility()
    alone = torch.cat([chain.solvent_accessibility() for chain in dimer.split()])
    assert (alone - together >= -1e-3).all()
    assert 1000 < float((alone - together).sum()) < 6000
    far = (dimer.chain_index * 500.0)[:, None]
    moved = {name: places + far for name, places in dimer.atoms.items()}
    apart = replace(dimer, ca_positions=moved["CA"], atoms=moved)
    torch.testing.assert_close(apart.solvent_accessibility(), alone, rtol=0.02, atol=3.0)


def test_modified_residues_have_a_surface(real_file):
    structure = read_structure(real_file("structure/pdb/1a8o.pdb"), atoms="all")
    odd = replace(structure, residue_names=("ZZZ9",) * len(structure))  # radii of elements
    for each in (structure, odd):
        area = each.solvent_accessibility()
        assert area.isfinite().all()
        assert 4000 < float(area.sum()) < 6000


@pytest.mark.parametrize("atoms", ["ca", "backbone", ["CB"]])
def test_without_all_atoms_the_error_says_how_to_read_them(real_file, atoms):
    structure = read_structure(real_file("structure/pdb/1aki.pdb"), atoms=atoms)
    with pytest.raises(ValueError, match=r"read_structure\(path, atoms='all'\)"):
        structure.solvent_accessibility()


def test_a_probe_has_a_size():
    alone = Structure("G", torch.zeros(1, 3), has_all_atoms=True)
    with pytest.raises(ValueError, match="probe_radius must be"):
        alone.solvent_accessibility(probe_radius=-1.0)


def test_a_structure_needs_biotite_for_its_tracks_alone(monkeypatch):
    """Graphs need no biotite; tests/test_imports.py shows that nothing imports it by itself."""
    for name in ("biotite", *(name for name in sys.modules if name.startswith("biotite."))):
        monkeypatch.setitem(sys.modules, name, None)
    structure = Structure("GWK", torch.eye(3))
    assert structure.window_graph(1).num_edges == 4
    with pytest.raises(ImportError) as caught:
        structure.secondary_structure()
    assert str(caught.value) == (
        "secondary_structure() needs biotite: install it with pip install 'graphattn[bio]'"
    )


# Context of a model.


def test_context_is_what_is_known_of_every_residue():
    """Surfaces are those of single atoms, far from each other; the sixth residue has no atom."""
    places = helix(20) * 50
    places[5] = math.nan
    confidence = torch.arange(20.0) * 5
    confidence[7] = math.nan
    structure = Structure("A" * 20, places, b_factors=confidence, has_all_atoms=True)
    context = structure_context(structure, STRUCTURE_CONTEXT)
    assert list(context) == ["secondary_structure", "solvent_accessibility", "plddt"]
    coil = torch.zeros(20).long()
    coil[5] = -1
    assert torch.equal(context["secondary_structure"], coil)
    surface = torch.full((20, 1), 4 * math.pi * (CARBON + PROBE) ** 2 / 100)
    surface[5] = math.nan
    torch.testing.assert_close(
        context["solvent_accessibility"], surface, rtol=1e-4, atol=0, equal_nan=True
    )
    torch.testing.assert_close(context["plddt"][:, 0], confidence / 100, equal_nan=True)
    found = structure_context(Structure("A" * 20, helix(20)), ["secondary_structure"])
    assert found["secondary_structure"][3:-3].tolist() == [1] * 14


def test_a_model_takes_the_context_and_reads_no_unknown_residue():
    places = helix(12)
    places[5] = math.nan
    structure = Structure("A" * 12, places, b_factors=torch.rand(12) * 100, has_all_atoms=True)
    torch.manual_seed(0)
    model = ga.models.ProteinModel(16, 2, 2, neighbors=3, context=STRUCTURE_CONTEXT)
    context = structure_context(structure, model.context)
    out = model.logits(structure, context=context)
    assert out.isfinite().all()
    for name in context:
        left_out = {key: track for key, track in context.items() if key != name}
        assert (model.logits(structure, context=left_out) - out).abs().max() > 1e-5
    empty = structure_context(Structure("", torch.zeros(0, 3), has_all_atoms=True), ["plddt"])
    assert empty["plddt"].shape == (0, 1)
    none = structure_context(Structure("", torch.zeros(0, 3)), ["secondary_structure"])
    assert none["secondary_structure"].dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "tracks", "says"),
    [
        ({}, "plddt", "tracks must be a list of some of secondary_structure, .*got 'plddt'"),
        ({}, ["plddt", "domains"], "got .*domains"),
        ({"b_factors": torch.tensor([1.0, 120.0, 3.0])}, ["plddt"], "0 to 100 .*, got 120: leave"),
        (
            {"b_factors": torch.tensor([0.9, math.nan, 0])},
            ["plddt"],
            "0 to 100 .*, got at most 0.9",
        ),
        ({}, ["solvent_accessibility"], r"read_structure\(path, atoms='all'\)"),
    ],
)
def test_context_that_cannot_be_made_is_refused(change, tracks, says):
    structure = Structure("GWK", torch.eye(3), **change)
    with pytest.raises(ValueError, match=says):
        structure_context(structure, tracks)
    with pytest.raises(ValueError, match="structure must be a Structure, got str"):
        structure_context("GWK", tracks)
