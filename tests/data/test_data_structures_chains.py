"""Structures of several chains: what a file says of every residue and atom, read by hand."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from structure_files import mmcif, pdb_line, residue

import graphattn as ga
from graphattn.data import Structure, read_structure

pytest.importorskip("biotite", reason="structures are read with biotite")

THREE_CHAINS = "\n".join(
    [
        pdb_line("CA", "GLY", "H", -1, (0, 0, 0)),
        pdb_line("CA", "TRP", "H", 52, (4, 0, 0)),
        pdb_line("CA", "LYS", "H", 52, (8, 0, 0), insertion="A"),
        pdb_line("CA", "ALA", "L", 7, (0, 5, 0)),
        "TER",
        pdb_line("CA", "MSE", "a", 1, (0, 0, 5), hetero=True),
        pdb_line("CA", "SER", "a", "A000", (0, 4, 5)),
    ]
)


def columns(path: Path) -> dict[tuple[str, int, str], dict[str, tuple[list[float], float]]]:
    """Residue: atom name: (place, B factor), of the first locations of amino acids, by columns."""
    atoms: dict[tuple[str, int, str], dict[str, tuple[list[float], float]]] = {}
    for line in path.read_text().split("ENDMDL")[0].splitlines():
        if line.startswith("ATOM  ") and line[76:78].strip() not in ("H", "D"):
            place = [float(line[start : start + 8]) for start in (30, 38, 46)]
            key = (line[21], int(line[22:26]), line[26].strip())
            atoms.setdefault(key, {}).setdefault(line[12:16].strip(), (place, float(line[60:66])))
    return atoms


def test_every_residue_knows_its_chain_number_and_name(structure_of):
    structure = structure_of(THREE_CHAINS)
    assert structure.sequence == "GWKAMS"
    assert structure.chain_ids == ("H", "L", "a")
    assert structure.chain_index.tolist() == [0, 0, 0, 1, 2, 2]
    assert structure.residue_numbers.tolist() == [-1, 52, 52, 7, 1, 10000]
    assert structure.insertion_codes == ("", "", "A", "", "", "")
    assert structure.residue_names == ("GLY", "TRP", "LYS", "ALA", "MSE", "SER")
    assert structure.ca_positions[:, 2].tolist() == [0, 0, 0, 0, 5, 5]
    assert len(structure) == 6
    assert repr(structure) == "Structure(num_residues=6, chains={'H': 3, 'L': 1, 'a': 2})"


def test_chains_are_chosen_by_name_in_the_order_asked_for(structure_of):
    whole = structure_of(THREE_CHAINS)
    assert structure_of(THREE_CHAINS, chains="L").sequence == "A"
    turned = structure_of(THREE_CHAINS, chains=["a", "H"])
    assert turned.chain_ids == ("a", "H")
    assert turned.sequence == "MSGWK"
    assert turned.chain_index.tolist() == [0, 0, 1, 1, 1]
    assert turned.residue_numbers.tolist() == [1, 10000, -1, 52, 52]
    assert turned.insertion_codes == ("", "", "", "", "A")
    assert torch.equal(turned.ca_positions, whole.ca_positions[[4, 5, 0, 1, 2]])
    assert torch.equal(turned.atoms["CA"], turned.ca_positions)
    assert [part.sequence for part in whole.split()] == ["GWK", "A", "MS"]
    assert whole.select(chains="all") is whole


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ("B", r"chains must be names of protein chains, which are 'H', 'L', 'a', got 'B'"),
        (["H", "B"], "got 'B'"),
        ("HL", "got 'HL'"),
        (["H", "H"], "chains must be 'all', one name, or a list of different names"),
        ([], "chains must be 'all', one name"),
        (None, "got None"),
        (1, "got 1"),
    ],
)
def test_chains_that_do_not_exist_are_named(structure_of, chains, message):
    with pytest.raises(ValueError, match=message):
        structure_of(THREE_CHAINS, chains=chains)


@pytest.mark.parametrize(
    "arguments",
    [
        {"atoms": "cb"},
        {"atoms": None},
        {"atoms": [1]},
        {"model": 0},
        {"model": True},
        {"assembly": False},
        {"assembly": 1},
        {"assembly": ""},
    ],
)
def test_an_argument_out_of_range_is_named(structure_of, arguments):
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} must be"):
        structure_of(THREE_CHAINS, **arguments)


def test_a_chain_in_two_places_of_the_file_is_one_chain(structure_of):
    lines = [
        pdb_line("CA", "GLY", "A", 1),
        pdb_line("CA", "TRP", "B", 1),
        pdb_line("CA", "LYS", "A", 2),
    ]
    structure = structure_of("\n".join(lines))
    assert structure.sequence == "GKW"
    assert structure.chain_index.tolist() == [0, 0, 1]


@pytest.mark.parametrize("entry", ["1aki", "1k6p", "5zng", "1dix"])
def test_every_atom_of_an_entry_is_that_of_its_columns(real_file, entry):
    path = real_file(f"structure/pdb/{entry}.pdb")
    by_hand = {key: atoms for key, atoms in columns(path).items() if "CA" in atoms}
    structure = read_structure(path, atoms="all")
    chains = [structure.chain_ids[index] for index in structure.chain_index.tolist()]
    keys = list(
        zip(chains, structure.residue_numbers.tolist(), structure.insertion_codes, strict=True)
    )
    assert keys == list(by_hand)
    assert structure.has_all_atoms
    total = 0
    for name, places in structure.atoms.items():
        assert places.shape == (len(structure), 3)
        there = structure.has_atom(name)
        assert there.tolist() == [name in atoms for atoms in by_hand.values()]
        expected = [atoms[name][0] for atoms in by_hand.values() if name in atoms]
        torch.testing.assert_close(places[there], torch.tensor(expected))
        assert places[~there].isnan().all()
        total += int(there.sum())
    assert total == sum(len(atoms) for atoms in by_hand.values())
    b_factors = torch.tensor([atoms["CA"][1] for atoms in by_hand.values()])
    torch.testing.assert_close(structure.b_factors, b_factors)
    assert structure.has_ca.all()


def test_pdb_and_mmcif_agree_on_every_atom(real_file):
    pdb, cif = (
        read_structure(real_file(f"structure/pdb/1a8o.{kind}"), atoms="all")
        for kind in ("pdb", "cif")
    )
    assert pdb.residue_names == cif.residue_names
    assert torch.equal(pdb.residue_numbers, cif.residue_numbers)
    assert torch.equal(pdb.b_factors, cif.b_factors)
    assert set(pdb.atoms) == set(cif.atoms)
    for name in pdb.atoms:
        assert torch.equal(pdb.atoms[name].nan_to_num(-999), cif.atoms[name].nan_to_num(-999))
    assert pdb.has_atom("SE").sum() == 4  # selenomethionines


def test_which_atoms_are_read_changes_no_residue(real_file):
    path = real_file("structure/pdb/1k6p.pdb")
    alone = read_structure(path)
    assert list(alone.atoms) == ["CA"]
    assert not alone.has_all_atoms
    for atoms, names in [
        ("backbone", {"N", "CA", "C", "O"}),
        (["CB"], {"CA", "CB"}),
        (("CG1", "CA", "CG1"), {"CA", "CG1"}),
        (["FE"], {"CA", "FE"}),
    ]:
        structure = read_structure(path, atoms=atoms)
        assert set(structure.atoms) == names
        assert structure.sequence == alone.sequence
        assert torch.equal(structure.ca_positions, alone.ca_positions)
    assert not structure.has_atom("FE").any()
    assert structure.atoms["FE"].isnan().all()
    with_cb = read_structure(path, atoms=["CB"]).has_atom("CB")
    assert with_cb.tolist() == [letter != "G" for letter in alone.sequence]
    with pytest.raises(ValueError, match=r"name must be one of the atoms .*\(CA\), got 'CB'"):
        alone.has_atom("CB")


def test_hydrogens_are_left_out(real_file):
    structure = read_structure(real_file("structure/pdb/1l2y.pdb"), atoms="all")  # by NMR
    assert not [name for name in structure.atoms if name.startswith(("H", "1H", "2H", "D"))]
    assert {"NE1", "CZ2", "OG"} <= set(structure.atoms)


@pytest.mark.parametrize("names", ["AB", "BA", "12"])
def test_other_atoms_stand_at_the_location_of_the_c_alpha(structure_of, names):
    first, second = names
    lines = [
        pdb_line("N", "SER", position=(9, 0, 0)),
        pdb_line("CB", "SER", position=(2, 2, 2), altloc=second),
        pdb_line("CA", "SER", position=(1, 1, 1), altloc=first),
        pdb_line("CA", "SER", position=(3, 3, 3), altloc=second),
        pdb_line("CB", "SER", position=(1, 1, 1), altloc=first),
        pdb_line("OG", "SER", position=(4, 4, 4), altloc=second),
    ]
    structure = structure_of("\n".join(lines), atoms="all")
    assert {name: places[0, 1].item() for name, places in structure.atoms.items()} == {
        "CA": 1, "N": 0, "CB": 1, "OG": 4,
    }  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_two_residues_at_one_place_only_the_first_has_atoms(structure_of, interleaved):
    atoms = [
        pdb_line(name, kind, number=22, position=(place, i, 0), altloc=altloc)
        for place, (kind, altloc) in enumerate([("PRO", "A"), ("SER", "B")])
        for i, name in enumerate(["N", "CA", "CD" if kind == "PRO" else "OG"])
    ]
    if interleaved:
        atoms = [atoms[i] for i in (0, 3, 1, 4, 2, 5)]
    structure = structure_of("\n".join(atoms), atoms="all")
    assert structure.sequence == "P"
    assert set(structure.atoms) == {"N", "CA", "CD"}
    assert all(places[0, 0] == 0 for places in structure.atoms.values())


def test_an_atom_is_never_that_of_a_residue_with_the_same_number(structure_of):
    lines = [
        pdb_line("CA", "SER", number=1, position=(1, 0, 0)),
        pdb_line("OG", "SER", number=1, position=(1, 0, 0)),
        pdb_line("CA", "SER", number=2, position=(2, 0, 0)),
        pdb_line("CA", "SER", number=1, position=(3, 0, 0)),
        pdb_line("OG", "SER", number=1, position=(3, 0, 0)),
    ]
    structure = structure_of("\n".join(lines), atoms=["OG"])
    assert structure.has_atom("OG").tolist() == [True, False, True]
    assert structure.atoms["OG"][[0, 2], 0].tolist() == [1, 3]


@pytest.mark.parametrize("model", [1, 2, 38])
def test_a_model_is_that_of_the_file(real_file, model):
    path = real_file("structure/pdb/1l2y.pdb")
    text = path.read_text().split("\nMODEL ")[model].split("ENDMDL")[0]
    expected = [
        [float(line[i : i + 8]) for i in (30, 38, 46)]
        for line in text.splitlines()
        if line[12:16] == " CA "
    ]
    structure = read_structure(path, model=model)
    assert len(structure) == 20
    torch.testing.assert_close(structure.ca_positions, torch.tensor(expected))


def test_a_model_that_is_not_there_is_named(structure_of, real_file):
    path = real_file("structure/pdb/1l2y.pdb")
    with pytest.raises(ValueError, match="model must be <= 38, the number of models in the file"):
        read_structure(path, model=39)
    text = mmcif(residue("ALA", 1), residue("TRP", 1, pdbx_PDB_model_num="7", Cartn_x="9.0"))
    assert structure_of(text, name="x.cif", model=2).sequence == "W"
    with pytest.raises(ValueError, match="model must be <= 2"):
        structure_of(text, name="x.cif", model=3)
    with pytest.raises(ValueError, match="model must be <= 1"):
        structure_of(THREE_CHAINS, model=2)


@pytest.mark.parametrize("tail", ["", "  1.00", "  1.00******", "  1.00  nan "])
def test_a_b_factor_that_is_no_number_is_nan(structure_of, tail):
    structure = structure_of(pdb_line()[:54] + tail)
    assert structure.b_factors.isnan().all()


def test_b_factors_of_mmcif_may_be_missing(structure_of):
    text = mmcif(residue("ALA", 1), residue("TRP", 2))
    assert structure_of(text, name="x.cif").b_factors.isnan().all()


def test_a_structure_is_pickled_copied_and_moved(structure_of):
    structure = structure_of(THREE_CHAINS, atoms="all")
    before = structure.positions
    for twin in (pickle.loads(pickle.dumps(structure)), copy.deepcopy(structure)):
        assert twin.sequence == structure.sequence
        assert torch.equal(twin.positions, before)
        assert torch.equal(twin.ca_positions, structure.ca_positions)
    there = structure.to("meta")
    moved = (there.ca_positions, there.chain_index, there.residue_numbers, there.b_factors)
    assert {x.device.type for x in (*moved, *there.atoms.values())} == {"meta"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"ca_positions": torch.zeros(2, 3)}, "ca_positions"),
        ({"ca_positions": torch.zeros(3, 3, dtype=torch.int64)}, "ca_positions"),
        ({"ca_positions": [[0.0, 0.0, 0.0]] * 3}, "ca_positions"),
        ({"residue_numbers": torch.arange(2)}, "residue_numbers"),
        ({"residue_numbers": torch.arange(3.0)}, "residue_numbers"),
        ({"chain_index": torch.tensor([0, 0, 1])}, "chain_index"),
        ({"chain_index": torch.tensor([1, 0, 0]), "chain_ids": ("A", "B")}, "chain_index"),
        ({"chain_ids": ("A", "A")}, "chain_ids"),
        ({"insertion_codes": ("", "")}, "insertion_codes"),
        ({"residue_names": ("GLY",) * 4}, "residue_names"),
        ({"b_factors": torch.zeros(1)}, "b_factors"),
        ({"atoms": {"CB": torch.zeros(3, 2)}}, r"atoms\['CB'\]"),
    ],
)
def test_a_structure_made_by_hand_is_checked(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        Structure(**{"sequence": "GWK", "ca_positions": torch.zeros(3, 3)} | arguments)


def test_a_structure_made_by_hand_needs_letters_and_places_alone():
    structure = ga.data.Structure("GWX", torch.tensor([[0.0] * 3, [math.nan] * 3, [1.0] * 3]))
    assert structure.chain_ids == ("A",)
    assert structure.residue_numbers.tolist() == [1, 2, 3]
    assert structure.residue_names == ("GLY", "TRP", "UNK")
    assert structure.has_ca.tolist() == [True, False, True]
    assert structure.positions.tolist() == [0, 1, 2]
