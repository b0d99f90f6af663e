"""mmCIF files: atoms from _atom_site, and copies of chains from _pdbx_struct_assembly_gen.

The syntax is that of CIF 1.1 (Hall, Allen and Brown, 1991): data blocks of items, alone or in
loops. biotite's own parser needs capitals, line breaks and comments where the programs of the wwPDB
put them.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy

from graphattn.data.files import FileFormatError
from graphattn.data.structures.assembly import Assemblies
from graphattn.data.structures.parsing import biotite_at_work

_CATEGORIES = ("atom_site", "pdbx_struct_assembly_gen", "pdbx_struct_oper_list")
# CIF ignores capitals in names, but biotite does not.
_CAPITALS = {
    name.lower(): name
    for name in (
        *("Cartn_x", "Cartn_y", "Cartn_z", "group_PDB", "B_iso_or_equiv"),
        *("pdbx_PDB_ins_code", "pdbx_PDB_model_num"),
    )
}


def mmcif_block(path: str | os.PathLike[str], text: str) -> Any:
    """Return the first data block that has atoms."""
    return _first_with_atoms(path, cif_blocks(path, text))


def binary_cif_block(path: str | os.PathLike[str], data: bytes) -> Any:
    """Return the first data block of a BinaryCIF file that has atoms."""
    from biotite.structure.io.pdbx import BinaryCIFFile

    with biotite_at_work(path):
        blocks = [
            {
                name: {item.lower(): block[name][item].as_array(str) for item in block[name]}
                for name in _CATEGORIES
                if name in block
            }
            for block in BinaryCIFFile.read(io.BytesIO(data)).values()
        ]
    return _first_with_atoms(path, blocks)


def _first_with_atoms(path: str | os.PathLike[str], blocks: list[Any]) -> Any:
    from biotite.structure.io.pdbx import CIFBlock, CIFCategory

    tables = next((tables for tables in blocks if "atom_site" in tables), None)
    if tables is None:
        raise FileFormatError(path, "is not an mmCIF structure: it has no _atom_site")
    categories = {}
    with biotite_at_work(path):
        for name in _CATEGORIES:
            if name in tables:
                columns = {_CAPITALS.get(item, item): x for item, x in tables[name].items()}
                categories[name] = CIFCategory(columns, name)
        return CIFBlock(categories)


def mmcif_atoms(path: str | os.PathLike[str], block: Any, model: int) -> Any:
    """Read the atoms of a model, without ligands."""
    from biotite.structure.io.pdbx import get_structure

    with biotite_at_work(path):
        atom_site = block["atom_site"]
        for axis in "xyz":
            mask = atom_site[f"Cartn_{axis}"].mask
            if mask is not None and mask.array.any():  # biotite would read "?" as 0.0.
                raise FileFormatError(path, f"an atom has no _atom_site.Cartn_{axis}")
        # These three columns are optional in the mmCIF dictionary, but biotite requires them.
        if "group_PDB" not in atom_site:
            labels = ["1"] * atom_site.row_count
            if "label_seq_id" in atom_site:  # only polymers have it
                labels = atom_site["label_seq_id"].as_array(str).tolist()
            atom_site["group_PDB"] = ["HETATM" if x in (".", "?") else "ATOM" for x in labels]
        for column, default in (("pdbx_PDB_ins_code", "?"), ("pdbx_PDB_model_num", "1")):
            if column not in atom_site:
                atom_site[column] = [default] * atom_site.row_count
        _number_what_has_no_number(path, atom_site)
        models = len(set(atom_site["pdbx_PDB_model_num"].as_array(int).tolist()))
        optional = ("label_seq_id", "label_asym_id", "B_iso_or_equiv")
        extra = [column for column in optional if column in atom_site]
    if model > models:
        raise ValueError(
            f"model must be <= {models}, the number of models in the file, got {model}"
        )
    with biotite_at_work(path):
        altloc = "all" if "label_alt_id" in atom_site else "first"
        atoms = get_structure(block, model=model, altloc=altloc, extra_fields=extra)
        if "label_seq_id" in extra:
            atoms = atoms[~atoms.hetero | (atoms.label_seq_id != ".") & (atoms.label_seq_id != "?")]
        return atoms


def _number_what_has_no_number(path: str | os.PathLike[str], atom_site: Any) -> None:
    """Fill missing numbers in auth_seq_id from label_seq_id; biotite would set them all to -1."""
    if "auth_seq_id" not in atom_site or atom_site["auth_seq_id"].mask is None:
        return
    numbers = atom_site["auth_seq_id"].as_array(str, "")
    missing = numbers == ""
    if missing.any():
        if "label_seq_id" in atom_site:
            labels = atom_site["label_seq_id"].as_array(str, "")
            numbers = numpy.where(missing, labels, numbers)
        is_polymer = atom_site["group_PDB"].as_array(str) == "ATOM"
        if (is_polymer & (numbers == "")).any():
            raise FileFormatError(path, "an ATOM row has neither auth_seq_id nor label_seq_id")
        atom_site["auth_seq_id"] = numpy.where(numbers == "", "-1", numbers)  # of ligands


def mmcif_assemblies(path: str | os.PathLike[str], block: Any) -> Assemblies:
    """Read the chains (by ``label_asym_id``) of every assembly, and their operations."""
    assemblies: Assemblies = {}
    if "pdbx_struct_assembly_gen" not in block or "pdbx_struct_oper_list" not in block:
        return assemblies
    with biotite_at_work(path):
        generators, moves = block["pdbx_struct_assembly_gen"], block["pdbx_struct_oper_list"]
        columns = [[f"matrix[{i}][{j}]" for j in "123"] + [f"vector[{i}]"] for i in "123"]
        matrices = [[moves[name].as_array(float).tolist() for name in row] for row in columns]
        names = moves["id"].as_array(str).tolist()
        operations = {
            name: [[value[index] for value in row] for row in matrices]
            for index, name in enumerate(names)
        }
        fields = ("assembly_id", "asym_id_list", "oper_expression")
        rows = zip(*(generators[name].as_array(str).tolist() for name in fields), strict=True)
        for assembly, chains, expression in rows:
            steps = assemblies.setdefault(assembly, [])
            products = [_product([operations[n] for n in p]) for p in _products_in(expression)]
            steps.append(([chain.strip() for chain in chains.split(",")], products))
    return assemblies


def _products_in(expression: str) -> list[tuple[str, ...]]:
    """Parse an expression such as ``"(1-2)(5,P)"`` into products of operations.

    Every product is a tuple of names. The operations are applied one after another, the last first.
    """
    factors = []
    for factor in expression.replace(" ", "").replace(")", "").split("("):
        names: list[str] = []
        for part in factor.split(",") if factor else []:
            first, dash, last = part.partition("-")
            if dash and int(first) > int(last):
                raise ValueError(f"{part!r} in oper_expression is a range that descends")
            names += [str(n) for n in range(int(first), int(last) + 1)] if dash else [part]
        factors += [names] if names else []
    return list(itertools.product(*factors))


def _product(operations: list[list[list[float]]]) -> list[list[float]]:
    """Multiply operations to one operation; the last one is applied first."""
    result = numpy.eye(4)
    for operation in operations:
        result = result @ numpy.array([*operation, [0.0, 0.0, 0.0, 1.0]])
    return [[float(value) for value in row] for row in result[:3]]


Tables = dict[str, dict[str, list[str]]]  # category -> item -> values; names in lower case

_WORD = re.compile(r"""'(.*?)'(?=\s|$)|"(.*?)"(?=\s|$)|\#.*|(\S+)""")
_NEEDS_A_LOOK = re.compile(r"['\"#]")
_KEYWORDS = ("data_", "save_", "loop_", "global_", "stop_")


class _Quoted(str):
    """A value in quotes: no keyword and no name, whatever it says."""

    __slots__ = ()


def cif_blocks(path: str | os.PathLike[str], text: str) -> list[Tables]:
    """Parse the data blocks of a file."""
    blocks: list[Tables] = [{}]
    columns: list[list[str]] = []  # of the loop, or of the one item, that is being read
    values: list[str] = []
    in_loop, line = False, 1

    def finish() -> None:
        """Give the values to the items that were named before them."""
        width = len(columns)
        if len(values) % width if in_loop and width else len(values) != width:
            counts = f"{len(values)} values for {width} items"
            raise FileFormatError(path, f"is malformed: {counts} before this line", line=line)
        for place, column in enumerate(columns):
            column += values[place::width]
        columns.clear()
        values.clear()

    for line, words in _words_of_lines(path, text):  # noqa: B007 (finish reads it)
        if in_loop and values and not any("_" in word for word in words):
            values += words  # most lines are such rows
            continue
        for word in words:
            is_keyword = word.lower().startswith(("_", *_KEYWORDS))
            if isinstance(word, _Quoted) or not is_keyword:
                values.append(word)
            elif word[0] == "_":
                if values or not in_loop:
                    finish()
                    in_loop = False
                category, _, item = word[1:].lower().partition(".")
                columns.append(blocks[-1].setdefault(category, {}).setdefault(item, []))
            else:
                finish()
                in_loop = word.lower() == "loop_"
                if word.lower().startswith("data_"):
                    blocks.append({})
    finish()
    return blocks


def _words_of_lines(path: str | os.PathLike[str], text: str) -> Iterator[tuple[int, list[str]]]:
    """Split every line into words, without comments; a text between semicolons is one word."""
    text_field: list[str] | None = None  # the lines of the text that is being read
    first = 0
    for number, line in enumerate(text.split("\n"), start=1):
        rest = line
        if line.startswith(";"):
            rest = line[1:]
            if text_field is None:
                text_field, first = [rest], number
                continue
            yield number, [_Quoted("\n".join(text_field))]
            text_field = None
        elif text_field is not None:
            text_field.append(line)
            continue
        if _NEEDS_A_LOOK.search(rest) is None:
            yield number, rest.split()
            continue
        words: list[str] = []
        for match in _WORD.finditer(rest):
            quoted = match[1] if match[1] is not None else match[2]
            if quoted is not None:
                words.append(_Quoted(quoted))
            elif match[3] is not None:
                words.append(match[3])
        yield number, words
    if text_field is not None:
        raise FileFormatError(path, "is malformed: the text that begins here has no end", first)
