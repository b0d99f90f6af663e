"""Whole models, built from the layers of graphattn.nn."""

from graphattn.models.encoder import SequenceEncoder
from graphattn.models.language.causal_lm import CausalLM
from graphattn.models.mixers import top_k_schedule
from graphattn.models.presets import Preset, presets
from graphattn.models.proteins.protein_model import ProteinModel
from graphattn.models.vision.swin import SwinTransformer
from graphattn.models.vision.vision_transformer import VisionTransformer

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
