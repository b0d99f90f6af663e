"""Layers over a token graph, in PyTorch Geometric's style."""

from graphattn.nn.blocks.block import PostNormBlock, PreNormBlock
from graphattn.nn.blocks.noise_embedding import NoiseEmbedding
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.caches.model_cache import ModelCache
from graphattn.nn.caches.running_cache import RunningCache
from graphattn.nn.consensus import CrossConsensus, SelfConsensus
from graphattn.nn.dot_product import DotProductAttention
from graphattn.nn.edges.bias import DistanceBias, EdgeProjection
from graphattn.nn.edges.offset_bias import OffsetBias
from graphattn.nn.gated_krause import GatedKrauseAttention
from graphattn.nn.gaussian import GaussianKernelAttention
from graphattn.nn.krause import KrauseAttention
from graphattn.nn.linear_attention import LinearAttention
from graphattn.nn.rotary import RotaryEmbedding

__all__ = [
    "CrossConsensus",
    "DistanceBias",
    "DotProductAttention",
    "EdgeProjection",
    "GatedKrauseAttention",
    "GaussianKernelAttention",
    "KrauseAttention",
    "LayerCache",
    "LinearAttention",
    "ModelCache",
    "NoiseEmbedding",
    "OffsetBias",
    "PostNormBlock",
    "PreNormBlock",
    "RotaryEmbedding",
    "RunningCache",
    "SelfConsensus",
]
