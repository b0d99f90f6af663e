"""Protein structures: residues, chains and atoms from PDB and mmCIF files.

:mod:`~graphattn.data.structures.structure` has the class :class:`Structure`, which makes graphs.
``reader`` reads a file, with ``pdb`` and ``mmcif`` for the two formats, ``residues`` to find the
residues among the atoms, and ``assembly`` for copies of chains. ``numbering`` computes positions
along chains. ``edges`` and ``tracks`` compute features of edges and of residues. ``context``
has the latter as inputs of a model. ``tokenizer`` turns the backbone around residues into codes.
"""

from graphattn.data.structures.context import STRUCTURE_CONTEXT, structure_context
from graphattn.data.structures.reader import read_structure
from graphattn.data.structures.structure import Structure
from graphattn.data.structures.tokenizer import StructureTokenizer

__all__ = [
    "STRUCTURE_CONTEXT",
    "Structure",
    "StructureTokenizer",
    "read_structure",
    "structure_context",
]
