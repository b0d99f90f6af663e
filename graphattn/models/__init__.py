"""Whole models made of the layers."""

from graphattn.models.encoder import SequenceEncoder
from graphattn.models.mixers import top_k_schedule
from graphattn.models.presets import Preset, presets
from graphattn.models.swin import SwinTransformer

__all__ = ["Preset", "SequenceEncoder", "SwinTransformer", "presets", "top_k_schedule"]
