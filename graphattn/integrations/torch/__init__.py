"""Token graphs inside plain PyTorch: `nn.MultiheadAttention`, `nn.Transformer`, timm.

from graphattn.integrations import torch as gtorch

encoder = gtorch.convert(nn.TransformerEncoder(...), mixer="krause", window=32, top_k=16)
model = VisionTransformer(..., attn_layer=gtorch.timm_attention(grid=(14, 14), radius=3))
"""

from graphattn.integrations.torch.convert import convert, converted
from graphattn.integrations.torch.timm import timm_attention
from graphattn.near_names import explain_functions

__all__ = ["convert", "converted", "timm_attention"]

explain_functions(globals(), __all__)
