"""Whole models made of the layers."""

from graphattn.models.encoder import SequenceEncoder

__all__ = ["SequenceEncoder"]
