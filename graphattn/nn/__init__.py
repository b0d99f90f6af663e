"""Layers over a token graph, in PyTorch Geometric's style."""

from graphattn.nn.block import PreNormBlock
from graphattn.nn.consensus import CrossConsensus, SelfConsensus
from graphattn.nn.dot_product import DotProductAttention
from graphattn.nn.edge_bias import DistanceBias, EdgeProjection
from graphattn.nn.gaussian import GaussianKernelAttention
from graphattn.nn.krause import KrauseAttention
from graphattn.nn.layer_cache import LayerCache
from graphattn.nn.linear_attention import LinearAttention
from graphattn.nn.model_cache import ModelCache
from graphattn.nn.noise_embedding import NoiseEmbedding
from graphattn.nn.offset_bias import OffsetBias
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.nn.running_cache import RunningCache

__all__ = [
    "CrossConsensus",
    "DistanceBias",
    "DotProductAttention",
    "EdgeProjection",
    "GaussianKernelAttention",
    "KrauseAttention",
    "LayerCache",
    "LinearAttention",
    "ModelCache",
    "NoiseEmbedding",
    "OffsetBias",
    "PreNormBlock",
    "RotaryEmbedding",
    "RunningCache",
    "SelfConsensus",
]
