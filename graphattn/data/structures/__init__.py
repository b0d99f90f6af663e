"""Protein structures: what PDB and mmCIF files say of residues, chains and atoms.

:mod:`~graphattn.data.structures.structure` holds what was read, and makes graphs of it;
``reader`` reads a file, with ``pdb`` and ``mmcif`` for the two formats, ``residues`` for what one
token is, and ``assembly`` for copies of chains. ``numbering`` counts along chains, ``edges`` and
``tracks`` compute what models read beside the letters.
"""

from graphattn.data.structures.reader import read_structure
from graphattn.data.structures.structure import Structure

__all__ = ["Structure", "read_structure"]
