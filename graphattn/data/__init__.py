"""Readers and tokenizers, which turn files into tokens.

Text becomes characters or bytes, FASTA and GenBank become residues or bases, and a PDB or mmCIF
file becomes residues with coordinates. A file that cannot be read raises :class:`FileFormatError`.
Its message is one line with the name of the file, the number of the wrong line if one line is
wrong, and the reason. The functions with an argument ``max_bytes`` refuse a file that is larger
after decompression, because a gzip file can be a thousand times larger after it.

GenBank and structures are parsed by biotite, an optional dependency:
``pip install 'graphattn[bio]'``.
"""

from graphattn.data.batches import TokenBatches
from graphattn.data.corpus import Corpus, load_corpus
from graphattn.data.fasta import (
    FastaRecord,
    NucleotideTokenizer,
    ProteinTokenizer,
    read_fasta,
    tokenizer_for_sequence,
)
from graphattn.data.files import (
    MAX_BYTES,
    FileFormat,
    FileFormatError,
    read_bytes,
    read_text,
    sniff_format,
)
from graphattn.data.genbank import GenBankRecord, read_genbank
from graphattn.data.images import read_idx
from graphattn.data.splits import Part, split_corpus
from graphattn.data.structures import (
    STRUCTURE_CONTEXT,
    Structure,
    StructureTokenizer,
    read_structure,
    structure_context,
)
from graphattn.data.tables.tokenizer import TableColumn, TableTokenizer
from graphattn.data.text import CharacterTokenizer
from graphattn.data.tokenizers import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from graphattn.data.windows import Windows

__all__ = [
    "MAX_BYTES",
    "STRUCTURE_CONTEXT",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Corpus",
    "FastaRecord",
    "FileFormat",
    "FileFormatError",
    "FileTokenizer",
    "GenBankRecord",
    "NucleotideTokenizer",
    "Part",
    "ProteinTokenizer",
    "Structure",
    "StructureTokenizer",
    "TableColumn",
    "TableTokenizer",
    "TokenBatches",
    "Tokenizer",
    "Windows",
    "load_corpus",
    "load_tokenizer",
    "read_bytes",
    "read_fasta",
    "read_genbank",
    "read_idx",
    "read_structure",
    "read_text",
    "save_tokenizer",
    "sniff_format",
    "split_corpus",
    "structure_context",
    "tokenizer_for_sequence",
]
