"""The launches that are emulated: every kernel, with its options, dtypes and real sizes of tiles.

Each is a problem whose answer is known in float64. Sequences are long enough that every part of
every loop runs: tiles that need a mask, tiles that need none, and tiles beyond the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import cases_consensus
import cases_kernels
import torch
from cases_edges import cut_at, hubs, nearest, some
from cases_kernels import Case, random

import graphattn as ga

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY = (BF16, FP16, FP32)
SINGLE = 1e-5  # relative error of float32


class Problem(NamedTuple):
    """Something to run on the emulator, which raises if the answer is wrong."""

    name: str
    run: Callable[[], None]


def attention(graph: ga.TokenGraph, features: int = 64, **options: object) -> Case:
    """An attention problem with heads as wide as those of real models."""
    return Case(graph, **{"features": features, "value_features": features, "heads": 1,
                          "kv_heads": 1, **options})  # fmt: skip


def top(k: int, graph: ga.TokenGraph, **options: object) -> Case:
    """An attention problem of the k largest logits of every row."""
    return attention(graph, options={"top_k": k}, **options)


WINDOW = ga.window_path_graph(330, 150, self_loops=True)  # the middle part of loops is reached
BANDS: dict[str, tuple[Case, tuple[torch.dtype, ...]]] = {
    "window, dot": (attention(WINDOW, score="dot"), EVERY),
    "window, RBF": (attention(WINDOW), EVERY),
    "one tensor": (attention(WINDOW, shared=True), EVERY),
    "narrow window": (attention(ga.window_path_graph(150, 8), batch=(2,)), (BF16, FP32)),
    "causal, wide heads": (attention(ga.causal_graph(200), 128, score="dot"), (BF16, FP32)),
    "the widest heads": (attention(ga.causal_window_graph(150, 80), 256), (BF16,)),
    "heads of 40, values of 24": (
        attention(WINDOW, 40, value_features=24, score="dot"), (FP16, FP32),
    ),
    "heads of 7": (attention(ga.complete_graph(70), 7, value_features=5), (BF16,)),
    "long complete graph, squares stored": (
        attention(ga.complete_graph(1100), 32), (BF16,),
    ),
    "grouped queries": (
        attention(ga.causal_window_graph(250, 200), heads=4, kv_heads=2, score="dot"),
        (BF16, FP32),
    ),
    "table of biases": (attention(WINDOW, score="dot", table=True), (BF16, FP32)),
    "padding": (
        attention(ga.window_path_graph(200, 90), batch=(2,), valid="both"), (BF16, FP32),
    ),
    "no self-loops": (attention(ga.complete_graph(150, self_loops=False), score="dot"), (BF16,)),
    "dilated": (attention(ga.dilated_window_graph(300, 20, 3)), (BF16, FP32)),
    "packed": (
        attention(ga.batch([ga.causal_graph(n) for n in (130, 1, 77)]), score="dot"), (BF16,),
    ),
    "rectangle, eps": (attention(ga.bipartite_complete_graph(100, 230), eps=0.1), (BF16, FP32)),
    "top 16": (top(16, ga.causal_window_graph(250, 90)), EVERY),
    "top 5 of padded rows": (
        top(5, ga.window_path_graph(150, 40), batch=(2,), valid="both", score="dot"), (BF16,),
    ),
    "top 8 of many sources": (
        top(8, ga.bipartite_complete_graph(20, 1700), score="dot"), (BF16,),
    ),
    "top 4 of one tensor": (top(4, ga.window_path_graph(150, 16), shared=True), (BF16, FP32)),
}  # fmt: skip
EDGES: dict[str, tuple[Case, tuple[torch.dtype, ...]]] = {
    "list, RBF": (attention(some(90, 90)), EVERY),
    "list, dot, grouped queries": (
        attention(some(90, 60), score="dot", heads=4, kv_heads=2), (BF16, FP32),
    ),
    "neighbours": (attention(nearest(100, 16), batch=(2,)), (BF16, FP32)),
    "hubs in parts": (attention(hubs(), heads=2, kv_heads=1), (BF16, FP32)),
    "bias of every edge": (attention(some(60, 60), per_edge=True, score="dot"), (BF16, FP32)),
    "bias of every sample": (
        attention(hubs(), per_edge=True, per_sample=True, batch=(2,)), (BF16,),
    ),
    "padding of a list": (attention(some(90, 90), valid="both", batch=(2,)), (BF16,)),
    "longformer": (attention(ga.longformer_graph(150, 20, [0, 17]), 32), (BF16,)),
    "wide heads of a list": (attention(some(40, 40), 256, score="dot"), (BF16,)),
    "top 3 of a list": (top(3, some(90, 90)), EVERY),
    "top 6 of hubs": (top(6, hubs(), score="dot", heads=2, kv_heads=1), (BF16,)),
    "top 4 of neighbours with a bias": (top(4, nearest(60, 9), per_edge=True), (FP32,)),
}  # fmt: skip


def consensus(graph: ga.TokenGraph, update: str = "energy", **options: object):
    """A consensus problem with states as wide as those of real models."""
    return cases_consensus.Case(
        graph, update, **{"features": 64, "rank": 4, "xi": 32, "heads": 1, **options}
    )


CONSENSUS = {
    "path": (consensus(ga.window_path_graph(150, 2)), EVERY),
    "path, target": (consensus(ga.window_path_graph(150, 4), "target", step="auto"), (BF16, FP32)),
    "list": (consensus(some(40, 40), step="auto"), (BF16, FP32)),
    "hubs, target": (consensus(hubs(), "target"), (BF16,)),
    "neighbours": (consensus(nearest(60, 6), "target"), (BF16,)),
    "rotated": (consensus(ga.window_path_graph(60, 2), rotated="two tensors"), (BF16,)),
    "padding, a network for all heads": (
        consensus(ga.window_path_graph(70, 2), heads=2, one_network=True, batch=(2,),
                  valid="both", step="auto"),
        (BF16, FP32),
    ),
}  # fmt: skip


def problems() -> Iterator[Problem]:
    """Everything that is emulated."""
    for family, cases, parts in (("bands", BANDS, None), ("edges", EDGES, 16)):
        for name, (case, dtypes) in cases.items():
            for dtype in dtypes:
                yield Problem(f"{family}: {name}, {_short(dtype)}", _attention(case, dtype, parts))
    for name, (step, dtypes) in CONSENSUS.items():
        for dtype in dtypes:
            yield Problem(f"consensus: {name}, {_short(dtype)}", _consensus(step, dtype))
    for name, tokens, k in (("3 coordinates", random(150, 3, seed=0), 5),
                            ("70 coordinates", random(90, 70, seed=1), 16),
                            ("many neighbours", random(150, 9, seed=2), 100)):  # fmt: skip
        yield Problem(f"neighbours: {name}", _neighbors(tokens.float(), k))
    for kind, options in (("DotProductAttention", {"kv_heads": 1, "sink": True}),
                          ("GaussianKernelAttention", {"eps": 0.3}),
                          ("KrauseAttention", {"top_k": 5})):  # fmt: skip
        for dtype in (BF16, FP32):
            yield Problem(f"generation: {kind}, {_short(dtype)}", _steps(kind, options, dtype))


def _short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


def _attention(case: Case, dtype: torch.dtype, longest: int | None) -> Callable[[], None]:
    def run() -> None:
        with ExitStack() as stack:
            if longest is not None:  # rows of more edges are cut into parts
                stack.enter_context(cut_at(longest))
            if dtype != FP32:
                cases_kernels.check_half(case, dtype, "cpu")
            else:
                found, expected = cases_kernels.kernels(case, "cpu"), cases_kernels.exact(case)
                cases_kernels.check(found, expected, SINGLE)

    return run


def _consensus(case: cases_consensus.Case, dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        with cut_at(16):
            if dtype != FP32:
                cases_consensus.check_half(case, dtype, "cpu")
            else:
                found, expected = cases_consensus.kernels(case, "cpu"), cases_consensus.exact(case)
                cases_consensus.check(found, expected, case, SINGLE)

    return run


def _neighbors(tokens: torch.Tensor, k: int) -> Callable[[], None]:
    def run() -> None:
        within = ga.window_path_graph(len(tokens), 60)
        for options in ({}, {"self_loops": True}, {"within": within} if k <= 60 else {}):
            found = ga.knn(tokens, k, backend="triton", **options)[0]
            assert torch.equal(found, ga.knn(tokens, k, backend="reference", **options)[0])

    return run


def _steps(kind: str, options: dict[str, object], dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(7)
        window, tokens = 40, 50
        layer = getattr(ga.nn, kind)(64, 2, backend="triton", **options).to(dtype)
        exact = getattr(ga.nn, kind)(64, 2, backend="reference", **options).double()
        exact.load_state_dict(layer.state_dict())
        x = random(2, tokens, 64, seed=1).to(dtype)
        cache = layer.init_cache(2, window)
        with torch.no_grad():
            expected = exact(x.double(), ga.causal_window_graph(tokens, window))
            found = torch.stack([layer.step(x[:, i], cache) for i in range(tokens)], dim=1)
        allowed = 20 * torch.finfo(dtype).eps * float(expected.abs().max())
        assert float((found.double() - expected).abs().max()) <= allowed

    return run
