"""PDB and mmCIF: residues and C-alpha atoms agree with the columns of the file, read by hand."""

import gzip
import io
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structure_files import mmcif, pdb_line, residue

from graphattn.data import FileFormatError, read_structure

pytest.importorskip("biotite", reason="structures are read with biotite")

NAMES = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL MSE"
ONE_LETTER = dict(zip(NAMES.split(), "ARNDCQEGHILKMFPSTWYVM", strict=True))


def by_hand(path: Path) -> dict[str, tuple[str, list[list[float]]]]:
    """Sequence and C-alpha positions of each chain: columns of the first model's records."""
    residues: dict[tuple[str, str], tuple[str, list[float]]] = {}
    for line in path.read_text().split("ENDMDL")[0].splitlines():
        if line[:6] in ("ATOM  ", "HETATM") and line[12:16] == " CA ":
            position = [float(line[i : i + 8]) for i in (30, 38, 46)]
            residues.setdefault((line[21], line[22:27]), (line[17:20], position))
    chains: dict[str, tuple[str, list[list[float]]]] = {}
    for (chain, _), (name, position) in residues.items():
        sequence, positions = chains.get(chain, ("", []))
        chains[chain] = (sequence + ONE_LETTER.get(name, "X"), [*positions, position])
    return chains


@pytest.mark.parametrize("folder", ["pdb", "globins", "homstrad"])
def test_every_chain_agrees_with_the_columns_of_the_file(real_files, folder):
    for path in real_files(f"structure/{folder}/*.pdb"):
        chains = by_hand(path)
        assert chains
        for chain, (sequence, positions) in chains.items():
            structure = read_structure(path, chains=chain)
            assert structure.chain_ids == (chain,)
            assert structure.sequence == sequence, path
            assert structure.ca_positions.dtype == torch.float32
            torch.testing.assert_close(structure.ca_positions, torch.tensor(positions))
        whole = read_structure(path)
        assert whole.chain_ids == tuple(chains)
        assert whole.sequence == "".join(sequence for sequence, _ in chains.values())


def test_mmcif_chains_agree_with_its_rows(real_file):
    path = real_file("structure/pdb/1tim.cif")
    rows = [line.split() for line in path.read_text().splitlines() if line.startswith("ATOM ")]
    for chain in "AB":
        carbons = [row for row in rows if row[3] == "CA" and row[18] == chain]
        structure = read_structure(path, chains=chain)
        assert structure.sequence == "".join(ONE_LETTER[row[5]] for row in carbons)
        expected = torch.tensor([[float(value) for value in row[10:13]] for row in carbons])
        torch.testing.assert_close(structure.ca_positions, expected)
    with pytest.raises(ValueError, match=r"chains must be .* 'A', 'B', got 'C'"):
        read_structure(path, chains="C")


def test_a_gzipped_or_unnamed_structure_is_the_same(structure_of, real_file):
    for entry in ("1a8o.pdb", "1a8o.cif"):
        content = real_file(f"structure/pdb/{entry}").read_bytes()
        plain = structure_of(content, name="unnamed")
        zipped = structure_of(gzip.compress(content), name=f"{entry}.gz")
        windows = structure_of(content.replace(b"\n", b"\r\n"), name=entry)
        for twin in (zipped, windows):
            assert twin.sequence == plain.sequence
            assert torch.equal(twin.ca_positions, plain.ca_positions)


def test_reading_is_quiet(structure_of):
    # No element, no CRYST1 values: biotite warns of both.
    line = pdb_line()[:66]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert structure_of(f"CRYST1 nonsense\n{line}\nEND\n").sequence == "A"


def test_unknown_chain_names_the_chains_that_exist(structure_of):
    lines = [
        pdb_line("P", "DA", "D", 1),
        pdb_line(chain="B", number=1),
        pdb_line(chain="A", number=1),
        pdb_line("O", "HOH", "W", 1, hetero=True),
    ]
    text = "\n".join(lines)
    assert structure_of(text).chain_ids == ("B", "A")  # the proteins, in the order of the file
    assert structure_of(text, chains="A").chain_ids == ("A",)
    for missing in ("Z", "D", "W", "a", ""):
        with pytest.raises(ValueError, match=rf"'B', 'A', got '{missing}'"):
            structure_of(text, chains=missing)


def test_a_blank_chain_is_a_chain(structure_of):
    structure = structure_of(pdb_line(chain=" "))
    assert structure.chain_ids == ("",)
    assert structure_of(pdb_line(chain=" "), chains="").sequence == "A"


def test_residues_without_c_alpha_are_skipped(structure_of):
    lines = [
        pdb_line("CA", "GLY", number=1),
        pdb_line("N", "TRP", number=2),
        pdb_line("CB", "TRP", number=2),
        pdb_line("CA", "SER", number=3),
    ]
    assert structure_of("\n".join(lines)).sequence == "GS"


@pytest.mark.parametrize("names", ["BA", "AB", "12"])  # digits as in 1k6p
def test_first_alternative_location_is_taken(structure_of, names):
    lines = [
        pdb_line("CA", "GLY", number=1),
        pdb_line("CA", "SER", number=2, position=(1, 1, 1), altloc=names[0]),
        pdb_line("CA", "SER", number=2, position=(2, 2, 2), altloc=names[1]),
        pdb_line("CA", "VAL", number=3, position=(3, 3, 3)),
    ]
    structure = structure_of("\n".join(lines))
    assert structure.sequence == "GSV"
    assert structure.ca_positions[:, 0].tolist() == [0, 1, 3]


@pytest.mark.parametrize("format", ["pdb", "cif"])
def test_locations_of_a_whole_loop_one_after_the_other_are_one_loop(structure_of, format):
    """Residues 2 and 3 at A, then both at B: a program need not write residue by residue."""
    atoms = [(1, "", 0.0), (2, "A", 1.0), (3, "A", 2.0), (2, "B", 3.0), (3, "B", 4.0), (4, "", 5.0)]
    if format == "pdb":
        lines = [
            pdb_line(name, number=number, position=(x, 0, 0), altloc=altloc or " ")
            for number, altloc, x in atoms
            for name in ("N", "CA", "CB")
        ]
        text = "\n".join(lines)
    else:
        rows = [
            residue("ALA", number, label_alt_id=altloc or ".", Cartn_x=str(x))
            | {"label_atom_id": name, "auth_atom_id": name}
            for number, altloc, x in atoms
            for name in ("N", "CA", "CB")
        ]
        text = mmcif(*rows)
    structure = structure_of(text, name=f"loop.{format}", atoms="all")
    assert structure.residue_numbers.tolist() == [1, 2, 3, 4]
    for name in ("CA", "CB"):
        assert structure.atoms[name][:, 0].tolist() == [0, 1, 2, 5]


def test_chains_without_names_keep_their_residues_with_locations(structure_of):
    """A second chain without a name keeps its residues, though their numbers repeat.

    The two residues 1 have the same alternate locations, and one of the two residues 2 has none: no
    two of them can be one residue.
    """
    first = [pdb_line(number=n, chain=" ", altloc=a) for n, a in [(1, "A"), (1, "B"), (2, " ")]]
    second = [pdb_line(number=n, chain=" ", altloc=a) for n, a in [(1, "A"), (1, "B"), (2, "B")]]
    assert structure_of("\n".join([*first, *second])).residue_numbers.tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("unknown", ["?", "."])
def test_residues_without_an_authors_number_have_that_of_the_sequence(structure_of, unknown):
    rows = [residue("ALA", 4), residue("GLY", 5, auth_seq_id=unknown), residue("TRP", 6)]
    structure = structure_of(mmcif(*rows), name="some.cif")
    assert structure.sequence == "AGW"
    assert structure.residue_numbers.tolist() == [4, 5, 6]
    rows = [residue("ALA", 4, auth_seq_id=unknown, label_seq_id="?")]
    with pytest.raises(FileFormatError, match="has neither auth_seq_id nor label_seq_id"):
        structure_of(mmcif(*rows), name="none.cif")


def test_insertion_codes_and_restarted_numbers_are_separate_residues(structure_of):
    lines = [
        pdb_line("CA", "GLY", number=52),
        pdb_line("CA", "SER", number=52, insertion="A"),
        pdb_line("CA", "VAL", number=53),
        pdb_line("CA", "TRP", number=52),  # numbers start again
        pdb_line("CA", "LEU", number="A000"),  # hybrid-36 for 10000
        pdb_line("CA", "PHE", number=-5),
    ]
    assert structure_of("\n".join(lines)).sequence == "GSVWLF"


def test_calcium_is_no_c_alpha(structure_of):
    calcium = [
        pdb_line("CA", "CA", number=200, hetero=hetero).replace("  CA ", " CA  ", 1)
        for hetero in (True, False)
    ]
    assert structure_of("\n".join([pdb_line("CA", "GLY"), *calcium])).sequence == "G"
    with pytest.raises(FileFormatError, match="no C-alpha atom"):
        structure_of("\n".join(calcium))


def test_amino_acid_ligands_after_the_chain_are_not_part_of_it(structure_of):
    lines = [
        pdb_line("CA", "MSE", number=1, hetero=True),
        pdb_line("CA", "SEP", number=2, hetero=True),
        pdb_line("CA", "ALA", number=3),
        "TER       4      ALA A   3",
        pdb_line("CA", "MSE", "B", number=1, hetero=True),
        pdb_line("CA", "ALA", "B", number=2),
        "TER",
        pdb_line("CA", "GLU", "A", number=301, hetero=True),
        pdb_line("CA", "GLU", "B", number=302, hetero=True),
    ]
    text = "\n".join(lines)
    assert structure_of(text, chains="A").sequence == "MSA"
    assert structure_of(text, chains="B").sequence == "MA"


def test_an_unknown_residue_of_an_atom_record_is_x(structure_of):
    lines = [pdb_line("CA", name, number=i) for i, name in enumerate(["ZZZ", "UNK", "GLY"])]
    assert structure_of("\n".join(lines)).sequence == "XXG"


def test_names_of_force_fields_are_those_of_their_amino_acid(structure_of):
    """The tables of residues of Amber (ff19SB) and CHARMM (top_all36_prot)."""
    same = {
        **dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "HIS"),
        "CYX": "CYS",
        "CYM": "CYS",
        "ASH": "ASP",
        "GLH": "GLU",
        "LYN": "LYS",
        "ARN": "ARG",
        "TYM": "TYR",
    }
    names = list(same)
    lines = [pdb_line("CA", name, number=i) for i, name in enumerate(names)]
    structure = structure_of("\n".join(lines))
    assert structure.sequence == "HHHHHHCCDEKRY"
    assert structure.residue_names == tuple(names)
    usual = structure_of("\n".join(map(str.replace, lines, names, same.values())), atoms="all")
    surface = structure_of("\n".join(lines), atoms="all").solvent_accessibility()
    assert torch.equal(surface, usual.solvent_accessibility())
    rows = [residue(name, i) for i, name in enumerate(names, start=1)]
    assert structure_of(mmcif(*rows), "test.cif").sequence == "HHHHHHCCDEKRY"


def test_modified_residues_have_the_letter_of_their_parent(structure_of):
    """HSE of the Chemical Component Dictionary is homoserine, and GYS three residues in one."""
    names = ["SEP", "TPO", "PTR", "MLY", "CSO", "HYP", "HSE", "DAL", "GYS"]
    lines = [pdb_line("CA", name, number=i, hetero=True) for i, name in enumerate(names)]
    assert structure_of("\n".join(lines)).sequence == "STYKCPSAX"


@pytest.mark.parametrize("between", ["END", "END   ", "ENDMDL", "TER\nEND", "ENDMDL\nEND"])
def test_every_end_of_a_frame_begins_a_model(structure_of, between):
    """VMD writes trajectories so, and `cat a.pdb b.pdb` has the same form."""
    frames = [
        "\n".join(pdb_line("CA", "GLY", number=i, position=(i, 0, shift)) for i in range(1, 5))
        for shift in (0, 10, 20)
    ]
    text = f"\n{between}\n".join(frames) + "\nEND\n"
    for model in (1, 2, 3):
        structure = structure_of(text, model=model)
        assert structure.sequence == "GGGG"
        assert structure.ca_positions[:, 2].tolist() == [10 * (model - 1)] * 4
    with pytest.raises(ValueError, match="model must be <= 3"):
        structure_of(text, model=4)


def rewritten_cif(how: str) -> str:
    """Two residues, in a spelling that the CIF 1.1 grammar allows and the wwPDB does not use."""
    rows = [residue("GLY", 1), residue("TRP", 2, Cartn_x="5.0")]
    if how == "no group_PDB":
        return mmcif(*rows, without=("group_PDB",))
    text = mmcif(*rows)
    lines = text.split("\n")
    return {
        "capital keywords": text.replace("data_", "DATA_").replace("loop_", "Loop_"),
        "capital names": text.replace("_atom_site.", "_ATOM_SITE.").replace("Cartn_x", "CARTN_X"),
        "small names": text.replace("pdbx_PDB_", "pdbx_pdb_").replace("Cartn_", "cartn_"),
        "a comment after a row": "\n".join(line + " # row" for line in lines if line != "#"),
        "names on one line": text.replace("\n_atom_site.", " _atom_site."),
        "rows on one line": text.replace("\nATOM", " ATOM"),
        "a row on two lines": text.replace(" 1.5 ", "\n1.5\n"),
        "an incomplete cell": text.replace("loop_", "_cell.length_a 10\n_cell.length_b ?\nloop_"),
        "text between semicolons": text.replace(" CA ", "\n;CA\n; "),
        "quotes": text.replace(" CA ", " 'CA' ").replace(" ALA ", ' "ALA" '),
        "a name in quotes": text.replace("loop_", "_cell.x '_atom_site.id'\nloop_"),
        "indented": text.replace("\n", "\n   "),
        "tabs": text.replace(" ", "\t"),
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        *("capital keywords", "capital names", "small names", "a comment after a row", "quotes"),
        *("names on one line", "rows on one line", "a row on two lines", "an incomplete cell"),
        *("text between semicolons", "a name in quotes", "indented", "tabs", "no group_PDB"),
    ],
)
def test_every_spelling_of_cif_is_read(structure_of, how):
    structure = structure_of(rewritten_cif(how), "test.cif")
    assert structure.sequence == "GW"
    assert structure.ca_positions.tolist() == [[1.5, 2.5, 3.5], [5.0, 2.5, 3.5]]
    assert structure_of(rewritten_cif(how), "unnamed").sequence == "GW"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data_x\nloop_\n_a.b\n_a.c\n1 2 3\n", "3 values for 2 items"),
        ("data_x\n_a.b\n_a.c 1\n", "line 3: is malformed: 0 values for 1 items"),
        ("data_x\n_a.b 1 2\n", "2 values for 1 items"),
        ("data_x\n_a.b\n;text\nwithout an end", "line 3: is malformed: the text that begins"),
    ],
)
def test_a_broken_cif_file_is_one_clear_line(structure_of, text, reason):
    with pytest.raises(FileFormatError, match=reason):
        structure_of(text, "test.cif")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_binary_cif_is_what_its_text_is(tmp_path, real_file, pack):
    from biotite.structure.io.pdbx import (
        BinaryCIFBlock,
        BinaryCIFCategory,
        BinaryCIFFile,
        CIFFile,
        compress,
    )

    for name in ("1a8o", "1tim"):
        source = real_file(f"structure/pdb/{name}.cif")
        blocks = BinaryCIFFile()
        for block, categories in CIFFile.read(source).items():
            blocks[block] = BinaryCIFBlock()
            for category, columns in categories.items():
                blocks[block][category] = BinaryCIFCategory(
                    {item: column.as_array(str) for item, column in columns.items()}
                )
        stream = io.BytesIO()
        compress(blocks).write(stream)
        path = tmp_path / f"{name}.bcif"
        path.write_bytes(pack(stream.getvalue()))
        for options in ({}, {"atoms": "all"}, {"assembly": True}):
            binary, expected = read_structure(path, **options), read_structure(source, **options)
            assert binary.sequence == expected.sequence
            assert binary.chain_ids == expected.chain_ids
            assert torch.equal(binary.ca_positions, expected.ca_positions)


@pytest.mark.parametrize(
    ("columns", "value", "reason"),
    [
        (slice(30, 38), "     nan", "x coordinate (columns 31-38) is '     nan'"),
        (slice(38, 46), "     inf", "y coordinate (columns 39-46)"),
        (slice(46, 54), "        ", "z coordinate (columns 47-54)"),
        (slice(30, 38), "  1_0.00", "x coordinate"),
        (slice(30, 38), "1.0 2.00", "x coordinate"),
        (slice(38, 46), "****.***", "y coordinate"),
        (slice(38, 46), "   1e999", "y coordinate"),
        (slice(22, 26), "    ", "residue number (columns 23-26) is '    '"),
        (slice(22, 26), " 1.5", "residue number"),
        (slice(22, 26), " 1A ", "residue number"),
        (slice(6, 11), "\t1   ", "'\\t'"),
        (slice(17, 20), "AL\u00e4", "'\\xe4'"),
        (slice(60, 66), "\x1c 0.00", "'\\x1c'"),
        (slice(53, None), "", "ends at column 53"),
        (slice(4, None), "", "ends at column 4"),
    ],
)
@pytest.mark.parametrize("hetero", [False, True])
def test_a_malformed_record_names_its_line(structure_of, tmp_path, columns, value, reason, hetero):
    line = pdb_line(number=2, hetero=hetero)
    if hetero and columns == slice(4, None):
        columns, reason = slice(6, None), "ends at column 6"
    broken = line[: columns.start] + value + ("" if columns.stop is None else line[columns.stop :])
    text = "\n".join(["REMARK   1", pdb_line(), broken, pdb_line(number=3)])
    with pytest.raises(FileFormatError) as caught:
        structure_of(text)
    assert caught.value.line == 3
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"{tmp_path / 'test.pdb'}: line 3: ")
    assert str(caught.value).isprintable()


def test_a_broken_record_in_a_later_model_is_not_overlooked(structure_of):
    text = "\n".join(
        ["MODEL        1", pdb_line(), "ENDMDL", "MODEL        2", pdb_line()[:40], "ENDMDL"]
    )
    with pytest.raises(FileFormatError, match="line 5: ATOM record ends at column 40"):
        structure_of(text)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.pdb", "REMARK nothing here\nEND\n", "it has no ATOM record"),
        ("x.pdb", pdb_line("O", "HOH", hetero=True), "no C-alpha atom of an amino acid"),
        ("x.pdb", pdb_line("P", "DA"), "no C-alpha atom of an amino acid"),
        ("x.pdb", "", "is empty"),
        ("x.pdb", b"\0\1", "binary"),
        ("x.pdb.gz", b"no gzip", "is not a whole gzip file"),
        ("x.txt", "a play", "neither PDB nor mmCIF"),
        ("x.fasta", ">a\nMKV\n", "neither PDB nor mmCIF"),
        ("x.cif", "a play", "is malformed: 2 values for 0 items"),
        ("x.cif", "data_x\n_cell.length_a 1\n", "no _atom_site"),
        ("x.cif", "data_x\nloop_\n_atom_site.id\n", "is malformed"),
        ("x.cif", "data_x\nloop_\n_atom_site.id\n1\n2\n", "no column or block 'Cartn_x'"),
    ],
)
def test_a_file_that_holds_no_protein_is_one_clear_line(structure_of, name, content, reason):
    with pytest.raises(FileFormatError) as caught:
        structure_of(content, name=name)
    assert reason in caught.value.reason
    assert str(caught.value).isprintable()


def test_mmcif_optional_columns_may_be_missing(structure_of):
    optional = ("pdbx_PDB_ins_code", "pdbx_PDB_model_num", "label_seq_id", "label_alt_id")
    text = mmcif(residue("ALA", 1), residue("TRP", 2), without=(*optional, "auth_atom_id"))
    structure = structure_of(text, name="x.cif")
    assert structure.sequence == "AW"
    assert structure.ca_positions.tolist() == [[1.5, 2.5, 3.5]] * 2


def test_mmcif_first_model_first_location_no_ligand(structure_of):
    ligand = {"group_PDB": "HETATM", "label_seq_id": "."}
    text = mmcif(
        residue("MSE", 1, group_PDB="HETATM"),
        residue("SER", 2, label_alt_id="B", Cartn_x="7.0"),
        residue("SER", 2, label_alt_id="A", Cartn_x="8.0"),
        residue("PRO", 3, label_alt_id="A"),
        residue("GLY", 3, label_alt_id="B"),
        residue("GLU", 301) | ligand,
        residue("TRP", 1, pdbx_PDB_model_num="2"),
    )
    structure = structure_of(text, name="x.cif")
    assert structure.sequence == "MSP"
    assert structure.ca_positions[1, 0] == 7.0


def test_mmcif_chains_go_by_the_authors_names(structure_of):
    text = mmcif(residue("ALA", 1, label_asym_id="C", auth_asym_id="Heavy"))
    assert structure_of(text, name="x.cif").chain_ids == ("Heavy",)


def test_mmcif_takes_the_first_block_that_has_atoms(structure_of):
    text = "data_empty\n_cell.length_a 1\n" + mmcif(residue("TRP", 1))
    assert structure_of(text, name="x.cif").sequence == "W"


@pytest.mark.parametrize("wrong", ["?", ".", "nan", "inf", "1e99", "abc"])
@pytest.mark.parametrize("axis", "xyz")
def test_an_mmcif_coordinate_that_is_no_number_is_never_read_as_one(structure_of, axis, wrong):
    text = mmcif(residue("ALA", 1), residue("ALA", 2, **{f"Cartn_{axis}": wrong}))
    with pytest.raises(FileFormatError) as caught:
        structure_of(text, name="x.cif")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("entry", ["1aki.pdb", "1a8o.cif"])
def test_a_truncated_file_is_an_error_or_a_shorter_chain(tmp_path_factory, real_file, entry):
    path = real_file(f"structure/pdb/{entry}")
    content = path.read_bytes()
    whole = read_structure(path)
    first_atom = content.index(b"\nATOM ")
    last_atom = content.index(b"\n", content.rindex(b"\nATOM ") + 1)
    outcomes = set()

    def outcome(read, path):
        try:
            return read(path)
        except FileFormatError as error:
            return error

    @settings(max_examples=60, deadline=None)
    @given(st.integers(first_atom, last_atom))
    def check(end):
        cut = tmp_path_factory.mktemp("cut") / entry
        cut.write_bytes(content[:end])
        part = outcome(read_structure, cut)
        outcomes.add(type(part))
        if isinstance(part, FileFormatError):
            assert str(part).isprintable()
        else:
            assert whole.sequence.startswith(part.sequence)
            assert torch.equal(part.ca_positions, whole.ca_positions[: len(part.sequence)])

    check()
    assert FileFormatError in outcomes


def test_without_biotite_the_error_says_what_to_install(structure_of, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "biotite"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "biotite", None)
    with pytest.raises(ImportError) as caught:
        structure_of(pdb_line())
    message = "reading structures needs biotite: install it with pip install 'graphattn[bio]'"
    assert str(caught.value) == message
