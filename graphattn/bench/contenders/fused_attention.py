"""Fused attention by other libraries: SDPA with a chosen backend, and flash-attention.

SDPA reads [B, H, N, D] and flash-attention reads [B, N, H, D]. Transposing an input copies nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphattn.bench.cases.inputs import AttentionInputs, MissingError
from graphattn.bench.contenders.peers import Run, check_memory, installed
from graphattn.graphs.structures.structure import Band


def sdpa(backend: SDPBackend, *, is_causal: bool = False) -> Run:
    """Compute dense dot-product SDPA with one backend."""

    def run(x: AttentionInputs) -> Tensor:
        refuse_cudnn_on_a_cpu(backend, x.query.device)
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(*by_head(x), is_causal=is_causal)
        return by_token(out, x)

    return run


def refuse_cudnn_on_a_cpu(backend: SDPBackend, device: torch.device) -> None:
    """Raise a MissingError for cuDNN on a CPU, before PyTorch prints five warnings."""
    if backend is SDPBackend.CUDNN_ATTENTION and device.type == "cpu":
        raise MissingError("cuDNN needs a GPU")


def by_head(x: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return [B, H, N, D]; without a batch dimension, SDPA uses no fused kernel on a CPU."""
    q, k, v = (t.transpose(-3, -2) for t in (x.query, x.key, x.value))
    return (q, k, v) if q.dim() == 4 else (q[None], k[None], v[None])


def by_token(out: Tensor, x: AttentionInputs) -> Tensor:
    """Return an output [B, H, N, D] in the layout of the inputs."""
    return out.transpose(-3, -2).reshape(x.query.shape)


def masked_sdpa(backend: SDPBackend) -> Run:
    """Compute dense dot-product SDPA with the graph as an additive mask, made once."""

    def run(x: AttentionInputs) -> Tensor:
        on_cpu = x.query.device.type == "cpu"
        refuse_cudnn_on_a_cpu(backend, x.query.device)
        if "additive_mask" not in x.prepared:
            mask = dense_mask(x)
            zero = torch.zeros(mask.shape, dtype=x.query.dtype, device=mask.device)
            x.prepared["additive_mask"] = zero.masked_fill_(~mask, -torch.inf)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if on_cpu else backend):
            out = functional.scaled_dot_product_attention(
                *by_head(x), attn_mask=x.prepared["additive_mask"]
            )
        return by_token(out, x)

    return run


def dense_mask(x: AttentionInputs) -> Tensor:
    """Return the mask of the graph, [N, M]: True for an edge."""
    check_memory(float(x.graph.num_targets) * x.graph.num_sources, "its mask", x.query)
    return x.graph.to_mask()


# flash-attention


def flash_window(x: AttentionInputs) -> Tensor:
    """Compute attention in a window, or over all pairs, by the package flash_attn."""
    attend = installed("flash_attn").flash_attn_func
    structure = x.graph.structure
    if x.graph.num_edges == x.graph.num_targets * x.graph.num_sources:
        window = (-1, -1)
    elif isinstance(structure, Band) and structure.self_loops and structure.dilation == 1:
        window = (structure.before, structure.after)
    else:
        raise MissingError("flash-attention supports only windows")
    q, k, v = (t if t.dim() == 4 else t[None] for t in (x.query, x.key, x.value))
    return attend(q, k, v, window_size=window).reshape(x.query.shape)
