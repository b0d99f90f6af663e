"""Corpora: files of any size as records of tokens, stored as memory-mapped Arrow files.

:mod:`~graphattn.data.corpus.loading` finds the files of a path (``sources``) and stores the tokens
in a cache. ``readers`` reads text, FASTA, GenBank, structures and images piece by piece
(``streams``, ``encoding``). ``writer`` writes Arrow files, and ``corpus`` reads them.
"""

from graphattn.data.corpus.corpus import Corpus
from graphattn.data.corpus.loading import load_corpus

__all__ = ["Corpus", "load_corpus"]
