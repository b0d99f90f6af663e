"""Catalogue of cases: one case per row of the performance targets, in three sizes.

The targets are those of ``--size paper``, of a CPU with two cores and of a data-centre GPU; at
other sizes their numbers are shown and say little.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

import graphattn as ga
from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.attention import ATTENTION
from graphattn.bench.cases.case import BenchmarkCase, Target, Targets, fast_and_small, sizes
from graphattn.bench.cases.consensus import CONSENSUS, SCALING_CONSENSUS
from graphattn.bench.cases.edges import OVER_EDGES
from graphattn.bench.cases.inputs import (
    NeighborInputs,
    WindowSize,
    spectral_inputs,
    streams_of,
)
from graphattn.bench.cases.least_work import Size
from graphattn.bench.cases.mixers import WHOLE_MODELS
from graphattn.bench.cases.small_layers import SMALL
from graphattn.bench.cases.whole import WHOLE
from graphattn.bench.contenders import ours
from graphattn.bench.contenders import peers as other
from graphattn.bench.models.generation import (
    DOT,
    GKA,
    PLAIN,
    WINDOWED,
    GenerationRun,
    generation_inputs,
)
from graphattn.bench.models.language import (
    ALL,
    KRAUSE,
    SLIDING,
    WINDOW,
    LanguageRun,
    language_inputs,
)
from graphattn.bench.models.vision import VisionRun, vision_inputs
from graphattn.bench.reporting.record import OURS


def points(size: Size, device: torch.device, dtype: torch.dtype) -> NeighborInputs:
    """Normal random points, in float32 everywhere: bfloat16 does not tell neighbours apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size["tokens"], size["features"], generator=generator)
    return NeighborInputs(x.to(device), size["k"])


SEARCHES = {
    "cdist + topk": other.cdist_topk,
    "scikit-learn brute": other.sklearn_brute,
    "FAISS flat": other.faiss_flat,
}
# Memory O(N k): four times the indices and distances that a search returns, and its points once
# more. A tile of 1024 rows of distances alone, 268 MB, is four times as much.
ON_GPU = {"tokens": 65536, "features": 64, "k": 16}
OF_NEIGHBORS = (
    4 * 12.0 * ON_GPU["tokens"] * ON_GPU["k"] + 4.0 * ON_GPU["tokens"] * ON_GPU["features"]
)
DEIT_FLASH, DEIT_CUDNN = "DeiT (SDPA flash)", "DeiT (SDPA cuDNN)"


LAYER = {"dim": 512, "heads": 8}
A_TOKEN: dict[str, Any] = {
    "contenders": {OURS: ours.late_step, "early in a stream": ours.early_step},
    "yardsticks": {"its projections alone": other.projections_alone},
    "backward": False,
    "memory": False,
    "work": work.stream_step,
}


def of_a_token(device: str) -> Targets:
    """A step takes as long late as early, and twice as long as the layer's projections at most."""
    return (
        Target("time", ("early in a stream",), at_most=1.1, device=device),
        Target("time", ("its projections alone",), at_most=2, device=device),
    )


def vision_case(name: str, title: str, dim: int, heads: int, images: int) -> BenchmarkCase:
    """A vision transformer of that width: inference, and a step of training."""
    model = {"dim": dim, "heads": heads}
    return BenchmarkCase(
        name,
        f"{title}: inference, and a step of training in place of the backward pass",
        sizes(images=(2, 4, 8), pixels=(64, 224, 224), depth=(2, 12, 12), **model),
        vision_inputs,
        {
            OURS: VisionRun("gka"),
            DEIT_FLASH: VisionRun("dot"),
            DEIT_CUDNN: VisionRun("dot", SDPBackend.CUDNN_ATTENTION),
        },
        targets=fast_and_small((DEIT_FLASH, DEIT_CUDNN), 1.15, 0.9, device="cuda"),
        cuda=sizes(images=(8, images, 2 * images), pixels=224, depth=12, **model),
    )


def language_case(tokens: int) -> BenchmarkCase:
    """A language model of so many tokens, all of whose layers attend in a window."""
    return BenchmarkCase(
        f"llama-{tokens}",
        "A language model of transformers, in a window",
        sizes(
            tokens=(tokens // 16, tokens, 2 * tokens),
            window=(16, 256, 256),
            top_k=(4, 64, 64),
            dim=(48, 768, 768),
            heads=(4, 12, 12),
            kv_heads=(2, 4, 4),
            layers=(2, 6, 6),
        ),
        language_inputs,
        {OURS: LanguageRun(WINDOW), "SDPA, sliding window": LanguageRun(SLIDING)},
        yardsticks={
            "SDPA, all before": LanguageRun(ALL),
            f"{OURS}, Krause": LanguageRun(KRAUSE),
        },
        devices=("cpu",),
    )


CASES = [
    *ATTENTION,
    *OVER_EDGES,
    vision_case("gka-tiny", "GKA-Ti and DeiT-Ti", 192, 3, 256),
    vision_case("gka-small", "GKA-S and DeiT-S", 384, 6, 256),
    vision_case("gka-base", "GKA-B and DeiT-B", 768, 12, 128),
    *(language_case(tokens) for tokens in (2048, 4096, 8192, 16384)),
    *WHOLE_MODELS,
    *WHOLE,
    *CONSENSUS,
    *SMALL,
    BenchmarkCase(
        "knn",
        "Nearest neighbours",
        sizes(tokens=(1024, 16384, 32768), features=64, k=16),
        points,
        {OURS: ours.neighbors, **SEARCHES},
        targets=(
            Target("time", ("cdist + topk", "scikit-learn brute"), at_most=1),
            Target("memory", ("cdist + topk",), at_most=1 / 20),
            Target("time", ("cdist + topk",), at_least=1.5, device="cuda"),
            Target("memory", at_most=OF_NEIGHBORS, device="cuda"),
        ),
        backward=False,
        work=work.neighbors,
        cuda={"paper": ON_GPU},
    ),
    BenchmarkCase(
        "edges",
        "The edges of a window-path graph",
        sizes(tokens=(100_000, 1_000_000, 4_000_000), window=8),
        lambda size, device, dtype: WindowSize(size["tokens"], size["window"]),
        {OURS: ours.list_edges, "offsets and mask": other.offsets_and_mask},
        yardsticks={"graph without edges": ours.build_graph},
        targets=(
            Target("time", at_most=1e-3, of="graph without edges"),
            Target("time", at_most=1.0),
        ),
        backward=False,
        work=work.edges,
        devices=("cpu",),
    ),
    BenchmarkCase(
        "fiedler",
        "Fiedler value, random weights",
        sizes(tokens=(5_000, 100_000, 1_000_000), window=8),
        lambda size, device, dtype: spectral_inputs(size["tokens"], size["window"]),
        {OURS: ours.fiedler_value, "eigsh, shift-invert": other.shift_invert_lanczos},
        targets=(Target("time", at_most=1.0), Target("error", at_most=1e-9)),
        backward=False,
        devices=("cpu",),
    ),
    BenchmarkCase(
        "streaming",
        "One token of dot-product attention, late in a stream",
        sizes(window=(64, 256, 256), **LAYER, early=(100, 1_000, 1_000),
              late=(2_000, 100_000, 300_000)),
        streams_of(lambda size: ga.nn.DotProductAttention(size["dim"], size["heads"])),
        **A_TOKEN,
        targets=(*of_a_token("cpu"), *of_a_token("cuda")),
        cuda={"paper": {"window": 256, **LAYER, "early": 1_000, "late": 5_000}},
    ),
    BenchmarkCase(
        "streaming-krause",
        "One token of Krause attention, late in a stream",
        sizes(batch=1, window=(64, 256, 256), top_k=(48, 192, 192), **LAYER,
              early=(100, 1_000, 1_000), late=(2_000, 20_000, 100_000)),
        streams_of(
            lambda size: ga.nn.KrauseAttention(size["dim"], size["heads"], top_k=size["top_k"])
        ),
        **A_TOKEN,
        targets=of_a_token("cuda"),
        cuda={
            "paper": {"batch": 64, "window": 256, "top_k": 192, **LAYER, "early": 1_000,
                      "late": 5_000},
        },
    ),
    BenchmarkCase(
        "generation",
        "Texts written token by token by a language model",
        sizes(texts=(2, 4, 4), prompt=(32, 512, 2048), new_tokens=(32, 128, 512),
              dim=(64, 512, 512), depth=(2, 8, 8), heads=(4, 8, 8), window=(16, 128, 128)),
        generation_inputs,
        {OURS: GenerationRun(DOT), "SDPA with a cache": GenerationRun(PLAIN)},
        yardsticks={
            f"{OURS}, Gaussian kernel": GenerationRun(GKA),
            f"{OURS}, in a window": GenerationRun(WINDOWED),
        },
        backward=False,
        cuda={
            "paper": {"texts": 8, "prompt": 1024, "new_tokens": 256, "dim": 1280, "depth": 20,
                      "heads": 10, "window": 1024},
        },
    ),
    SCALING_CONSENSUS,
]  # fmt: skip
