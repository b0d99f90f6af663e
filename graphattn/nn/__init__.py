"""Layers over a token graph, in PyTorch Geometric's style."""

from graphattn.nn.block import PreNormBlock
from graphattn.nn.consensus import CrossConsensus, SelfConsensus
from graphattn.nn.dot_product import DotProductAttention
from graphattn.nn.gaussian import GaussianKernelAttention
from graphattn.nn.krause import KrauseAttention
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.nn.streaming import LayerCache

__all__ = [
    "CrossConsensus",
    "DotProductAttention",
    "GaussianKernelAttention",
    "KrauseAttention",
    "LayerCache",
    "PreNormBlock",
    "RotaryEmbedding",
    "SelfConsensus",
]
