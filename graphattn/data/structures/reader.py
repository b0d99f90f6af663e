"""Protein structures from PDB, mmCIF and BinaryCIF files."""

from __future__ import annotations

import os
from collections.abc import Iterable

from graphattn.data.files import MAX_BYTES, FileFormatError, read_bytes, read_text, sniff_format
from graphattn.data.structures.assembly import assembled, checked_assembly
from graphattn.data.structures.formats.mmcif import (
    binary_cif_block,
    mmcif_assemblies,
    mmcif_atoms,
    mmcif_block,
)
from graphattn.data.structures.formats.pdb import pdb_assemblies, pdb_atoms
from graphattn.data.structures.parsing import require_biotite
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
    """Read the protein chains of a PDB, mmCIF or BinaryCIF file (gzipped or not).

    A residue is read if it has a C-alpha atom, and is an ``ATOM`` record or an amino acid of the
    Chemical Component Dictionary. So modified residues inside a chain are read, with the letter of
    the amino acid that they are a modification of (selenomethionine as M, phosphoserine as S), or X
    if there is none. The names of simulations (HIE, CYX, ASH and others) have the letter of their
    amino acid. Ligands that are amino acids are not read (those after the chain's
    ``TER``, or, in mmCIF, without ``label_seq_id``). Of alternative locations, the first one in the
    file is read, even if they are different residues. Chains have the names that the authors gave;
    if a PDB file leaves the name blank, it is ``""``. Residues have the authors' numbers, or
    ``label_seq_id`` if an mmCIF file does not give them.

    Args:
        path: the file, PDB or mmCIF by its extension, or else by its content; BinaryCIF by its
            extension .bcif.
        chains: ``"all"`` for all chains with amino acids, in the order of the file; the name of one
            chain; or a list of names, for chains in this order.
        atoms: the names of atoms in :attr:`Structure.atoms`: ``"ca"``, ``"backbone"`` (N, CA, C,
            O), ``"all"`` (except hydrogen), or a list of names.
        assembly: None for the deposited chains; True for the first biological assembly that the
            file describes (in REMARK 350 or ``_pdbx_struct_assembly_gen``), or the name of one,
            such as ``"1"``. A second copy of chain A is named ``"A-2"``.
        model: the number of the model, counted from 1 in the order of the file. In a PDB file, a
            model ends at ``ENDMDL`` or ``END``, so the frames of a trajectory are models.
        max_bytes: the largest size that is read, as in :func:`~graphattn.data.read_bytes`.

    Raises:
        FileFormatError: if the file cannot be read (see :func:`~graphattn.data.read_text`), is
            malformed (for PDB, the message gives the line), or has no C-alpha atom.
        ValueError: if the file has no such protein chain, assembly or model, or an argument is
            outside its range.
        ImportError: if biotite is not installed.

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

    block, file_format, text = None, sniff_format(path, ""), ""  # judging by the name alone
    if file_format == "bcif":
        block = binary_cif_block(path, read_bytes(path, max_bytes=max_bytes))
    else:
        text = read_text(path, max_bytes=max_bytes)
        file_format = sniff_format(path, text)
        if file_format == "mmcif":
            block = mmcif_block(path, text)
        elif file_format != "pdb":
            raise FileFormatError(path, "is neither PDB nor mmCIF, judging by its name and content")
    is_pdb = block is None
    atoms_of_model = pdb_atoms(path, text, model) if is_pdb else mmcif_atoms(path, block, model)
    structure, chain_keys = structure_of_atoms(path, atoms_of_model, wanted)
    if assembly_name is not None:
        assemblies = pdb_assemblies(path, text, model) if is_pdb else mmcif_assemblies(path, block)
        structure = assembled(path, structure, chain_keys, assemblies, assembly_name)
    return structure.select(chains=chains)
