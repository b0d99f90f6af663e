"""Attention over graphs of every kind: cases and their targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend

import graphattn as ga
from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.case import (
    BOTH,
    TWICE,
    BenchmarkCase,
    Target,
    fast,
    fast_and_small,
    share_of_bound,
    sizes,
)
from graphattn.bench.cases.inputs import AttentionInputs, attention_inputs
from graphattn.bench.cases.least_work import Size
from graphattn.bench.contenders import flex, ours
from graphattn.bench.contenders import fused_attention as fused
from graphattn.bench.contenders import peers as other
from graphattn.bench.contenders import sparse_matrices as listed
from graphattn.bench.contenders.by_hand import gathered
from graphattn.bench.contenders.by_hand import offset_slices as slices
from graphattn.bench.contenders.by_hand import window_blocks as blocks
from graphattn.bench.reporting.record import OURS


def attention_over(
    graph: Callable[[Size], ga.TokenGraph], *, shared: bool = False
) -> Callable[[Size, torch.device, torch.dtype], AttentionInputs]:
    """Random tensors over a graph of that size."""

    def make(size: Size, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
        return attention_inputs(
            graph(size),
            size["heads"],
            size["features"],
            device,
            dtype,
            size.get("top_k"),
            batch=size.get("batch"),
            shared=shared,
        )

    return make


def everything(size: Size) -> ga.TokenGraph:
    return ga.complete_graph(size["tokens"])


def causal_window(size: Size) -> ga.TokenGraph:
    """`window` keys, the token itself among them."""
    return ga.causal_window_graph(size["tokens"], size["window"])


def centred_window(size: Size) -> ga.TokenGraph:
    """`window` keys around the token, itself among them."""
    return ga.window_path_graph(size["tokens"], size["window"] // 2, self_loops=True)


def all_pairs(size: Size) -> int:
    return size["tokens"] ** 2


def in_window(size: Size) -> int:
    """Edges of a window, those that the ends of the sequence cut off too."""
    return size["tokens"] * size["window"]


HEADS = {"heads": 8, "features": 64}
THOUSANDS = {
    name: tuple(first * 2**i for i in range(count))
    for name, first, count in (("small", 512, 4), ("paper", 1024, 8), ("long", 1024, 10))
}
GATHER_SCATTER: dict[str, other.Run] = {
    "index_add": other.index_add,
    "torch-scatter": other.torch_scatter,
    "compiled": gathered.compiled,
}
MESSAGES = ("index_add", "torch-scatter")  # a message per edge and head is kept
LISTED: dict[str, other.Run] = {"torch.sparse": listed.torch_sparse, "numba": listed.numba_rows}
ON_BLOCKS: dict[str, other.Run] = {
    "blocks + topk": blocks.blocks_top_k(blocks.largest_by_topk),
    "blocks + numpy.sort": blocks.blocks_top_k(blocks.largest_by_numpy),
}
BLOCKS_DOT = "blocks + SDPA (dot product)"
STRUCTURED, FUSED = f"{OURS}, structured", f"{OURS}, fused"
OUR_DOT = f"{OURS} (dot product)"
FLASH, CUDNN = "SDPA flash (dot product)", "SDPA cuDNN (dot product)"
DENSE: dict[str, other.Run] = {
    FLASH: fused.sdpa(SDPBackend.FLASH_ATTENTION),
    CUDNN: fused.sdpa(SDPBackend.CUDNN_ATTENTION),
}
CAUSAL_FLASH = "SDPA flash, causal (dot product)"
CAUSAL_CUDNN = "SDPA cuDNN, causal (dot product)"
CAUSAL_DENSE: dict[str, other.Run] = {
    CAUSAL_FLASH: fused.sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True),
    CAUSAL_CUDNN: fused.sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True),
}
FLEX, FLEX_DOT = "FlexAttention", "FlexAttention (dot product)"
FLEX_KEPT = "FlexAttention, chosen before"
FLASH_WINDOW = "flash-attention (dot product)"
WINDOWED_DOTS: dict[str, other.Run] = {
    OUR_DOT: ours.dot_product,
    FLEX_DOT: flex.flex_dot,
    FLASH_WINDOW: fused.flash_window,
    BLOCKS_DOT: blocks.blocks_sdpa,
}


ATTENTION = [
    BenchmarkCase(
        "complete",
        "RBF attention, complete graph",
        sizes(tokens=(512, 4096, 16384), **HEADS),
        attention_over(everything),
        {
            OURS: ours.rbf,
            FUSED: ours.rbf_fused,
            FLEX: flex.flex_rbf,
            "masked dense": other.masked_dense,
            "KeOps": other.keops,
        },
        {OUR_DOT: ours.dot_product, **DENSE},
        targets=(
            Target("time", (FLASH,), at_most=1.1),
            Target("time", (FLASH,), at_most=1.25, passes=BOTH),
        ),
        work=work.attention(all_pairs),
        cuda={"paper": {"batch": 4, "tokens": 4096, "heads": 16, "features": 64}},
    ),
    BenchmarkCase(
        "gka",
        "Gaussian kernel attention: query, key and value are one tensor, complete graph",
        sizes(batch=(2, 1, 1), tokens=(256, 4096, 16384), **HEADS),
        attention_over(everything, shared=True),
        {
            OURS: ours.rbf,
            FUSED: ours.rbf_fused,
            FLEX: flex.flex_rbf,
            "masked dense": other.masked_dense,
        },
        {**DENSE, FLASH_WINDOW: fused.flash_window},
        targets=(*fast((FLASH, CUDNN), 1.0, device="cuda"), *share_of_bound(0.6, device="cuda")),
        work=work.attention(all_pairs, tensors=2),
        cuda={
            "paper": {"batch": 16, "tokens": 4096, "heads": 16, "features": 64},
            "long": {"batch": 4, "tokens": 16384, "heads": 16, "features": 64},
        },
    ),
    BenchmarkCase(
        "causal-window",
        "Attention, causal window",
        sizes(tokens=(1024, 16384, 131072), window=(64, 256, 256), **HEADS),
        attention_over(causal_window),
        {
            OURS: ours.rbf,
            STRUCTURED: ours.rbf_structured,
            FLEX: flex.flex_rbf,
            "index_add": other.index_add,
            "masked dense": other.masked_dense,
        },
        WINDOWED_DOTS,
        CAUSAL_DENSE,
        (
            *fast((CAUSAL_FLASH,), 30, of=(OURS, OUR_DOT)),
            Target("time", (FLEX_DOT,), at_least=2, of=OUR_DOT),
            *fast((BLOCKS_DOT,), 2.5, of=(OUR_DOT,)),
            *share_of_bound(0.75, of=(OURS, OUR_DOT)),
            Target("time", (OURS,), at_most=2.2, of=TWICE),
            *fast((FLEX,), 1.3, device="cuda"),
            *fast((FLEX_DOT,), 1.3, of=(OUR_DOT,), device="cuda"),
            *fast((FLASH_WINDOW,), 0.9, of=(OURS, OUR_DOT), device="cuda"),
            *share_of_bound(0.6, device="cuda"),
        ),
        twice=True,
        work=work.attention(in_window),
        cuda={"paper": {"tokens": 65536, "window": 256, **HEADS}},
    ),
    BenchmarkCase(
        "window",
        "Attention, 8 tokens on each side",
        sizes(tokens=(2048, 65536, 131072), window=17, **HEADS),
        attention_over(centred_window),
        {
            OURS: ours.rbf,
            STRUCTURED: ours.rbf_structured,
            FLEX: flex.flex_rbf,
            **GATHER_SCATTER,
            "compiled slices": slices.compiled_slices,
            **LISTED,
        },
        WINDOWED_DOTS,
        targets=(
            *fast((FLEX, "compiled", "compiled slices", *LISTED), 1.7, 2),
            *share_of_bound(0.75, of=(OURS, OUR_DOT)),
            *fast_and_small(MESSAGES, 10, 1 / 5),
            *fast((FLEX,), 2.5, device="cuda"),
            *fast((FLEX_DOT,), 2.5, of=(OUR_DOT,), device="cuda"),
            *share_of_bound(0.6, device="cuda"),  # here the bytes
        ),
        work=work.attention(in_window),
    ),
    BenchmarkCase(
        "krause",
        "Krause attention: causal window, top-k",
        sizes(tokens=(512, 8192, 65536), window=(64, 256, 256), top_k=(48, 192, 192), **HEADS),
        attention_over(causal_window),
        {
            OURS: ours.rbf,
            STRUCTURED: ours.rbf_structured,
            FLEX_KEPT: flex.flex_kept,
            "masked dense": other.masked_dense,
            **ON_BLOCKS,
        },
        yardsticks={"without top-k": ours.rbf_without_top_k},
        targets=(
            *fast(("blocks + topk",), 20, 15),
            *fast((STRUCTURED,), 15),
            *share_of_bound(0.75),
            Target("time", ("masked dense",), at_least=30),
            Target("time", ("without top-k",), at_most=3),
            *fast(("masked dense",), 5, device="cuda"),
            *fast((FLEX_KEPT,), 1.5, device="cuda"),
        ),
        work=work.attention(in_window),
        # Twice as many tokens: masked dense would take 100 GB.
        cuda={"paper": {"tokens": 16384, "window": 256, "top_k": 192, **HEADS}},
    ),
    BenchmarkCase(
        "krause-dense",
        "Krause attention of fewer tokens, beside all pairs",
        sizes(tokens=(256, 4096, 16384), window=(64, 256, 256), top_k=(48, 192, 192), **HEADS),
        attention_over(causal_window),
        {OURS: ours.rbf, "masked dense": other.masked_dense},
        targets=fast(("masked dense",), 80, 60),
        work=work.attention(in_window),
        devices=("cpu",),
    ),
    BenchmarkCase(
        "million",
        "RBF attention, causal window, a million tokens",
        sizes(tokens=(20_000, 1_000_000, 4_000_000), window=64, heads=2, features=16),
        attention_over(causal_window),
        {OURS: ours.rbf, "index_add": other.index_add},
        targets=(Target("memory", at_most=3e9, passes=BOTH),),
        work=work.attention(in_window),
    ),
    BenchmarkCase(
        "scaling-window",
        "RBF attention, causal window, by length",
        sizes(window=(32, 256, 256), heads=2, features=(32, 64, 64)),
        attention_over(causal_window),
        {OURS: ours.rbf},
        lengths=THOUSANDS,
        work=work.attention(in_window),
    ),
]  # fmt: skip
