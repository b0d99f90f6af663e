"""Whole vision transformers: DeiT, and the same model with Gaussian kernel attention.

Both models have random weights and the shapes of DeiT (Touvron et al., 2021): patches of 16 pixels,
a class token, learned positions, pre-norm blocks, and a linear head of 1,000 classes. The first
model is plain PyTorch, with one projection to queries, keys and values, and SDPA. The second model
is :class:`graphattn.models.VisionTransformer`. The mixer is
:class:`graphattn.nn.GaussianKernelAttention` over the complete graph of all tokens, and the rest is
the same (Projection-Free Transformers via Gaussian Kernel Attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphattn as ga
from graphattn.bench.contenders.fused_attention import refuse_cudnn_on_a_cpu
from graphattn.bench.models.training import ModelInTraining, TrainingRun, in_training

PATCH, CLASSES, MLP_RATIO = 16, 1000, 4


class FusedAttention(nn.Module):
    """One projection to queries, keys and values, then SDPA, then an output projection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.output_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v)
        return self.output_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block: it mixes the tokens, then transforms each token separately."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(dim), FusedAttention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, MLP_RATIO * dim), nn.GELU(), nn.Linear(MLP_RATIO * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainVisionTransformer(nn.Module):
    """A model in plain PyTorch, images [B, 3, pixels, pixels] -> logits [B, 1000].

    Args:
        dim, heads, depth: 192, 3, 12 in DeiT-Ti; 384, 6 in DeiT-S; 768, 12 in DeiT-B.
        pixels: side of an image, a multiple of 16; 224 gives 197 tokens.

    Example:
        >>> from graphattn.bench.models.vision import PlainVisionTransformer
        >>> sum(p.numel() for p in PlainVisionTransformer(192, 3, 12).parameters())
        5717416
    """

    def __init__(self, dim: int, heads: int, depth: int, pixels: int = 224) -> None:
        super().__init__()
        tokens = (pixels // PATCH) ** 2 + 1
        self.patches = nn.Conv2d(3, dim, PATCH, PATCH)
        self.class_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, tokens, dim), std=0.02))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


def vision_model(mixer: str, dim: int, heads: int, depth: int, pixels: int = 224) -> nn.Module:
    """Make the model with the mixer "dot", in plain PyTorch, or "gka", by graphattn.

    Example:
        >>> from graphattn.bench.models.vision import vision_model
        >>> sum(p.numel() for p in vision_model("gka", 192, 3, 12).parameters())
        4383436
    """
    if mixer == "dot":
        return PlainVisionTransformer(dim, heads, depth, pixels)
    return ga.models.VisionTransformer(pixels, PATCH, CLASSES, dim, depth, heads, mixer="gka")


@dataclass(frozen=True)
class VisionInputs:
    """Images, their classes, and a model per mixer, with weights in the dtype of the images."""

    images: Tensor
    labels: Tensor
    trained: dict[str, ModelInTraining]


def vision_inputs(size: dict[str, int], device: torch.device, dtype: torch.dtype) -> VisionInputs:
    """Draw images of normal random numbers, and make models with fused AdamW optimizers."""
    generator = torch.Generator().manual_seed(0)
    pixels = size["pixels"]
    images = torch.randn(size["images"], 3, pixels, pixels, generator=generator)
    labels = torch.randint(CLASSES, (size["images"],), generator=generator)

    def trained(mixer: str) -> ModelInTraining:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = vision_model(mixer, size["dim"], size["heads"], size["depth"], pixels)
        return in_training(model, device, dtype)

    models = {mixer: trained(mixer) for mixer in ("dot", "gka")}
    return VisionInputs(images.to(device, dtype), labels.to(device), models)


@dataclass(frozen=True)
class VisionRun(TrainingRun):
    """A contender that is a model."""

    mixer: str
    backend: SDPBackend = SDPBackend.FLASH_ATTENTION  # only the mixer "dot" uses it

    def __call__(self, x: VisionInputs) -> Tensor:
        return self.logits(x, x.images)

    def logits(self, x: VisionInputs, images: Tensor) -> Tensor:
        refuse_cudnn_on_a_cpu(self.backend, images.device)
        with sdpa_kernel(self.backend):
            logits: Tensor = x.trained[self.mixer].model(images)
            return logits

    def training(self, x: VisionInputs) -> ModelInTraining:
        return x.trained[self.mixer]

    def loss(self, x: VisionInputs, which: slice = slice(None)) -> Tensor:
        return functional.cross_entropy(self.logits(x, x.images[which]).float(), x.labels[which])
