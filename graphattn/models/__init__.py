"""Whole models made of the layers."""

from graphattn.models.causal_lm import CausalLM
from graphattn.models.encoder import SequenceEncoder
from graphattn.models.mixers import top_k_schedule
from graphattn.models.presets import Preset, presets
from graphattn.models.protein import ProteinModel
from graphattn.models.swin import SwinTransformer
from graphattn.models.vision import VisionTransformer

__all__ = [
    "CausalLM",
    "Preset",
    "ProteinModel",
    "SequenceEncoder",
    "SwinTransformer",
    "VisionTransformer",
    "presets",
    "top_k_schedule",
]
