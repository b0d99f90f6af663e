"""Corpora: files of any size as records of tokens, on disk as Arrow and read by memory-mapping.

:mod:`~graphattn.data.corpus.loading` finds out what a path holds (``sources``) and keeps what was
read in a cache; ``readers`` goes through text, FASTA, GenBank, structures and images piece by piece
(``streams``, ``encoding``); ``writer`` writes Arrow files, and ``corpus`` reads them again.
"""

from graphattn.data.corpus.corpus import Corpus
from graphattn.data.corpus.loading import load_corpus

__all__ = ["Corpus", "load_corpus"]
