"""Whole models made of the layers."""

from graphattn.models.encoder import SequenceEncoder
from graphattn.models.mixers import top_k_schedule
from graphattn.models.presets import Preset, presets
from graphattn.models.protein import ProteinModel

__all__ = ["Preset", "ProteinModel", "SequenceEncoder", "presets", "top_k_schedule"]
