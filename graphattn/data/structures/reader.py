"""Protein structures from PDB and mmCIF files."""

from __future__ import annotations

import os
from collections.abc import Iterable

from graphattn.data.files import MAX_BYTES, FileFormatError, read_text, sniff_format
from graphattn.data.structures.assembly import assembled, checked_assembly
from graphattn.data.structures.mmcif import mmcif_assemblies, mmcif_atoms, mmcif_block
from graphattn.data.structures.parsing import require_biotite
from graphattn.data.structures.pdb import pdb_assemblies, pdb_atoms
from graphattn.data.structures.residues import checked_atoms, structure_of_atoms
from graphattn.data.structures.structure import Structure
from graphattn.graphs.arguments import as_int


def read_structure(
    path: str | os.PathLike[str],
    *,
    chains: str | Iterable[str] = "all",
    atoms: str | Iterable[str] = "ca",
    assembly: str | bool | None = None,
    model: int = 1,
    max_bytes: int | None = MAX_BYTES,
) -> Structure:
    """The protein chains of a PDB or mmCIF file (gzipped or not).

    A residue counts when it has a C-alpha atom and is an ``ATOM`` record or an amino acid of the
    Chemical Component Dictionary. So modified residues inside a chain stay (selenomethionine as M,
    most others as X), while ligands that are amino acids (after the chain's ``TER``; without
    ``label_seq_id`` in mmCIF) do not. Of alternative locations the first in the file is taken, also
    where they are different residues. Chains have the authors' names in mmCIF, as in PDB, and
    ``""`` where a PDB file leaves the name blank; residues have the authors' numbers, and
    ``label_seq_id`` where an mmCIF file leaves those out.

    Args:
        path: the file; PDB or mmCIF by its extension, else by its content.
        chains: ``"all"`` that have amino acids, in the order of the file; one by its name; or a
            list of names, in that order.
        atoms: ``"ca"``, ``"backbone"`` (N, CA, C, O), ``"all"`` but hydrogen, or a list of names;
            :attr:`Structure.atoms` holds them.
        assembly: None for the chains as they were deposited; True for the first biological
            assembly that the file describes (REMARK 350; ``_pdbx_struct_assembly_gen``), or the
            name of one, such as ``"1"``. A second copy of chain A is called ``"A-2"``.
        model: which of several models, counted from 1 in the order of the file.
        max_bytes: as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: the file cannot be read (see :func:`~graphattn.data.read_text`), is
            malformed (for PDB it names the line), or has no C-alpha atom.
        ValueError: the file has no such protein chain, assembly or model, or an argument is
            outside its range.
        ImportError: biotite is not installed.

    Example:
        >>> import pathlib, tempfile, graphattn as ga
        >>> pdb = '''\\
        ... ATOM      1  CA  GLY A   1      11.000   2.500  -3.000  1.00  0.00           C
        ... ATOM      2  CA  TRP A   2      14.800   2.500  -3.000  1.00  0.00           C
        ... ATOM      3  CA  LYS B   7      14.800   8.500  -3.000  1.00  0.00           C
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "three.pdb")
        ...     _ = path.write_text(pdb)
        ...     structure = ga.data.read_structure(path)
        ...     first = ga.data.read_structure(path, chains="A")
        >>> structure
        Structure(num_residues=3, chains={'A': 2, 'B': 1})
        >>> structure.sequence, structure.chain_index, structure.residue_numbers
        ('GWK', tensor([0, 0, 1]), tensor([1, 2, 7]))
        >>> first.ca_positions
        tensor([[11.0000,  2.5000, -3.0000],
                [14.8000,  2.5000, -3.0000]])
    """
    wanted = checked_atoms(atoms)
    assembly_name = checked_assembly(assembly)
    model = as_int("model", model, 1)
    require_biotite("reading structures")

    text = read_text(path, max_bytes=max_bytes)
    file_format = sniff_format(path, text)
    if file_format == "pdb":
        found = pdb_atoms(path, text, model)
        structure, chain_keys = structure_of_atoms(path, found, wanted)
        if assembly_name is not None:
            assemblies = pdb_assemblies(path, text)
    elif file_format == "mmcif":
        block = mmcif_block(path, text)
        found = mmcif_atoms(path, block, model)
        structure, chain_keys = structure_of_atoms(path, found, wanted)
        if assembly_name is not None:
            assemblies = mmcif_assemblies(path, block)
    else:
        raise FileFormatError(path, "is neither PDB nor mmCIF, by its name and its content")
    if assembly_name is not None:
        structure = assembled(path, structure, chain_keys, assemblies, assembly_name)
    return structure.select(chains=chains)
