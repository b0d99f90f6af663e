"""Biological assemblies: copies of chains, where biotite and the file's own matrices put them."""

from __future__ import annotations

import pytest
import torch
from structure_files import mmcif, pdb_line, residue

from graphattn.data import FileFormatError, read_structure

pytest.importorskip("biotite", reason="structures are read with biotite")


@pytest.mark.parametrize("entry", ["1a8o.pdb", "1a8o.cif", "5zng.pdb", "1tim.cif"])
def test_an_assembly_is_where_biotite_puts_it(real_file, entry):
    from biotite.structure import filter_amino_acids
    from biotite.structure.io import pdb, pdbx

    path = real_file(f"structure/pdb/{entry}")
    if entry.endswith("cif"):
        atoms = pdbx.get_assembly(pdbx.CIFFile.read(path), model=1)
    else:
        atoms = pdb.PDBFile.read(path).get_assembly(model=1)
    atoms = atoms[filter_amino_acids(atoms) & (atoms.element != "H")]
    structure = read_structure(path, assembly=True, atoms="all")
    named = read_structure(path, assembly="1")
    for name in ("CA", "CB"):
        expected = torch.tensor(atoms.coord[atoms.atom_name == name])
        places = structure.atoms[name][structure.has_atom(name)]
        torch.testing.assert_close(places, expected, rtol=0, atol=2e-3)
    assert named.chain_ids == structure.chain_ids
    assert torch.equal(named.ca_positions, structure.ca_positions)


def test_a_dimer_has_contacts_that_its_deposited_half_has_not(real_file):
    path = real_file("structure/pdb/1a8o.pdb")
    half, dimer = read_structure(path), read_structure(path, assembly=True)
    assert half.chain_ids == ("A",)
    assert dimer.chain_ids == ("A", "A-2")
    assert dimer.sequence == 2 * half.sequence
    assert torch.equal(dimer.residue_numbers, half.residue_numbers.repeat(2))
    source, target = dimer.radius_graph(8.0).edge_index
    across = dimer.chain_index[source] != dimer.chain_index[target]
    assert int(across.sum()) > 20
    # Either copy by itself is the half, turned.
    copy = read_structure(path, assembly=True, chains="A-2")
    assert copy.sequence == half.sequence
    of_copy, of_half = copy.ca_positions.double(), half.ca_positions.double()
    distances = torch.cdist(of_half, of_half)
    torch.testing.assert_close(torch.cdist(of_copy, of_copy), distances, rtol=0, atol=1e-4)


IDENTITY = ["1.000000  0.000000  0.000000        0.00000",
            "0.000000  1.000000  0.000000        0.00000",
            "0.000000  0.000000  1.000000        0.00000"]  # fmt: skip
TURN = ["0.000000 -1.000000  0.000000       10.00000",
        "1.000000  0.000000  0.000000       20.00000",
        "0.000000  0.000000  1.000000      -30.00000"]  # fmt: skip
ATOMS = [
    pdb_line("CA", "GLY", "A", 1, (1, 2, 3)),
    pdb_line("CA", "TRP", "B", 1, (4, 5, 6)),
    pdb_line("CA", "LYS", "C", 1, (7, 8, 9)),
]


def biomt(*operations: list[str]) -> list[str]:
    return [
        f"REMARK 350   BIOMT{row}  {number:>2}  {values}"
        for number, operation in enumerate(operations, start=1)
        for row, values in enumerate(operation, start=1)
    ]


REMARK = [
    "REMARK 350 BY APPLYING BIOMT TRANSFORMATIONS",
    "REMARK 350",
    "REMARK 350 BIOMOLECULE: 1",
    "REMARK 350 APPLY THE FOLLOWING TO CHAINS: A",
    *biomt(IDENTITY),
    "REMARK 350 BIOMOLECULE: 2",
    "REMARK 350 AUTHOR DETERMINED BIOLOGICAL UNIT: TETRAMERIC",
    "REMARK 350 APPLY THE FOLLOWING TO CHAINS: A,",
    "REMARK 350                    AND CHAINS: C",
    *biomt(IDENTITY, TURN),
    "REMARK 350 APPLY THE FOLLOWING TO CHAINS: B, X",
    *biomt(TURN),
]


def test_chains_are_copied_as_remark_350_says(structure_of):
    text = "\n".join(REMARK + ATOMS)
    first = structure_of(text, assembly=True)
    assert first.chain_ids == ("A",)
    second = structure_of(text, assembly="2")
    assert second.chain_ids == ("A", "B", "C", "A-2", "C-2")
    assert second.sequence == "GWKGK"
    assert second.ca_positions.tolist() == [
        [1, 2, 3],
        [10 - 5, 20 + 4, 6 - 30],
        [7, 8, 9],
        [10 - 2, 20 + 1, 3 - 30],
        [10 - 8, 20 + 7, 9 - 30],
    ]
    assert torch.equal(second.atoms["CA"], second.ca_positions)
    assert structure_of(text, assembly="2", chains=["C-2", "B"]).sequence == "KW"
    assert structure_of(text).chain_ids == ("A", "B", "C")
    with pytest.raises(
        ValueError,
        match=(r"assembly must be an assembly of the " r"file, which are '1', '2', got '3'"),
    ):
        structure_of(text, assembly="3")


def test_an_assembly_of_joined_files_is_that_of_the_file_with_the_model(structure_of):
    other = [*REMARK[:4], *biomt(TURN), ATOMS[0]]
    text = "\n".join([*REMARK, *ATOMS, "END", *other, "END"])
    first, second = (structure_of(text, assembly="1", model=model) for model in (1, 2))
    assert first.ca_positions.tolist() == [[1, 2, 3]]
    assert second.ca_positions.tolist() == [[10 - 2, 20 + 1, 3 - 30]]
    assert len(structure_of(text, assembly="2")) == 5
    with pytest.raises(ValueError, match="which are '1', got '2'"):
        structure_of(text, assembly="2", model=2)
    # Frames without a header of their own have that of the first.
    frames = "\n".join([*REMARK, *ATOMS, "END", *ATOMS, "END"])
    assert structure_of(frames, assembly="2", model=2).sequence == "GWKGK"


def test_a_blank_chain_is_called_null_in_remark_350(structure_of):
    remark = ["REMARK 350 BIOMOLECULE: 1", "REMARK 350 APPLY THE FOLLOWING TO CHAINS: NULL"]
    text = "\n".join([*remark, *biomt(IDENTITY, TURN), pdb_line(chain=" ")])
    assert structure_of(text, assembly=True).chain_ids == ("", "-2")


@pytest.mark.parametrize("assembly", [True, "1"])
def test_a_file_that_describes_no_assembly_has_none(structure_of, assembly):
    for name, text in [("x.pdb", "\n".join(ATOMS)), ("x.cif", mmcif(residue("ALA", 1)))]:
        with pytest.raises(
            ValueError, match=("assembly must be None, because the file describes no assembly")
        ):
            structure_of(text, name=name, assembly=assembly)


@pytest.mark.parametrize(
    ("line", "replacement", "where", "reason"),
    [
        (4, "REMARK 350   BIOMT1   1  1.000000  0.000000  nan", 5, "is no row of a matrix"),
        (4, "REMARK 350   BIOMT2   1" + IDENTITY[0].rjust(47), 5, "do not follow each other"),
        (3, "REMARK 350", 5, "comes before a list of chains"),
        (6, "REMARK 350", None, "ends before the row BIOMT3"),
        (3, "REMARK 350 APPLY THE FOLLOWING TO CHAINS: Z", None, "'1' has no protein chain"),
    ],
)
def test_a_broken_remark_350_is_one_line_about_the_file(
    structure_of, line, replacement, where, reason
):
    lines = [*REMARK[:7], *ATOMS]
    lines[line] = replacement
    with pytest.raises(FileFormatError, match=reason) as caught:
        structure_of("\n".join(lines), assembly=True)
    assert caught.value.line == where
    assert structure_of("\n".join(lines)).chain_ids == ("A", "B", "C")  # nobody asked for it


def assembly_tables(expression: str, chains: str = "A") -> str:
    fields = [f"matrix[{i}][{j}]" for i in "123" for j in "123"]
    fields += [f"vector[{i}]" for i in "123"]
    turn = "0 -1 0 1 0 0 0 0 1 10 20 -30"
    shift = "1 0 0 0 1 0 0 0 1 0 0 5"
    along = "1 0 0 0 1 0 0 0 1 4 0 0"
    return "\n".join(
        [
            "loop_",
            *(f"_pdbx_struct_assembly_gen.{f}" for f in ("assembly_id", "oper_expression")),
            "_pdbx_struct_assembly_gen.asym_id_list",
            f"PAU '{expression}' {chains}",
            "#",
            "loop_",
            "_pdbx_struct_oper_list.id",
            *(f"_pdbx_struct_oper_list.{f}" for f in fields),
            "1 1 0 0 0 1 0 0 0 1 0 0 0",
            f"2 {turn}",
            f"P {shift}",
            f"X {along}",
            "#",
            "",
        ]
    )


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1", [[1, 2, 3]]),
        ("1,2", [[1, 2, 3], [8, 21, -27]]),
        ("1-2", [[1, 2, 3], [8, 21, -27]]),
        ("(1-2)", [[1, 2, 3], [8, 21, -27]]),
        ("P", [[1, 2, 8]]),
        ("(1-2)(P)", [[1, 2, 8], [8, 21, -22]]),
        ("(2)(X)", [[8, 25, -27]]),  # moved, and then turned
        ("(X)(2)", [[12, 21, -27]]),
        ("(2)(2)", [[10 - 21, 20 + 8, -57]]),
    ],
)
def test_operations_of_mmcif_are_combined_as_their_expression_says(
    structure_of, expression, expected
):
    place = {"Cartn_x": "1", "Cartn_y": "2", "Cartn_z": "3", "auth_asym_id": "Heavy"}
    text = mmcif(residue("TRP", 1, **place)) + assembly_tables(expression)
    for name in (True, "PAU"):
        structure = structure_of(text, name="x.cif", assembly=name)
        assert structure.ca_positions.tolist() == expected
        assert structure.chain_ids == ("Heavy", "Heavy-2")[: len(expected)]


def test_an_operation_that_does_not_exist_is_one_line_about_the_file(structure_of):
    for expression in ("7", "1-x", "2-1", "(2-1)(P)"):  # none may count as no operation at all
        text = mmcif(residue("TRP", 1)) + assembly_tables(expression)
        with pytest.raises(FileFormatError, match="is malformed"):
            structure_of(text, name="x.cif", assembly=True)
    text = mmcif(residue("TRP", 1)) + assembly_tables("1", chains="B,C")
    with pytest.raises(FileFormatError, match="assembly 'PAU' has no protein chain"):
        structure_of(text, name="x.cif", assembly=True)
