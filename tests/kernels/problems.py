"""Problems that start every kernel, with its options, dtypes and real sizes of tiles.

The answer of each is known in float64. Sequences are long enough that every part of every loop
runs: tiles that need a mask, tiles that need none, and tiles beyond the end. The emulator runs
them (`emulator/`), and so does a GPU (`gpu/`). Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import cases_consensus
import cases_kernels
import cases_top_k
import torch
from cases_edges import cut_at, hubs, nearest, some
from cases_kernels import Case, Errors, random

import graphattn as ga
from graphattn.kernels.shared.configuration import SHORT_NAMES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY = (BF16, FP16, FP32)
SINGLE = 1e-5  # relative error of float32


class Problem(NamedTuple):
    """Something that is computed by kernels.

    `errors` runs it on a device. It returns how far every result is from float64, and how far it
    may be.
    """

    name: str
    errors: Callable[[str], Errors]

    @property
    def family(self) -> str:
        """The folder of its kernels: "bands"."""
        return self.name.partition(":")[0]

    @property
    def dtype(self) -> str:
        """The precision of its tensors: "bf16"."""
        last = self.name.rpartition(", ")[2]
        return last if last in SHORT_NAMES.values() else "fp32"

    def run(self, device: str = "cpu") -> None:
        """Fail if a result is wrong."""
        cases_kernels.assert_small(self.errors(device))


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
    # Tokens in fours: the kernel for Hopper takes it, where that is asked for.
    "causal window, RBF": (attention(ga.causal_window_graph(300, 180), batch=(2,)), (BF16,)),
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

# Selections that hold no logits, although the windows are short. Of most problems, every part of
# every loop runs. Rows have few words, so few candidates: counting goes on until few are left.
STREAMED: dict[str, tuple[Case, tuple[torch.dtype, ...]]] = {
    "dot": (top(40, WINDOW, score="dot"), EVERY),
    "RBF": (top(40, WINDOW), (BF16, FP32)),
    "grouped queries, biases": (
        top(25, ga.causal_window_graph(200, 120), heads=4, kv_heads=2, score="dot", table=True),
        (BF16, FP32),
    ),
    "padding, no self-loops": (
        top(17, ga.window_path_graph(100, 60), batch=(2,), valid="both", score="dot"), (BF16, FP32),
    ),
    "dilated": (top(30, ga.dilated_window_graph(250, 60, 2, self_loops=False)), (BF16,)),
    "packed": (top(50, ga.batch([ga.causal_graph(n) for n in (130, 1, 77)])), (BF16,)),
    "few values": (top(45, WINDOW), (BF16, FP32)),
    "few values, padding": (
        top(33, ga.causal_window_graph(130, 100), batch=(2,), valid="both", score="dot"), (BF16,),
    ),
    "one value": (top(100, ga.causal_window_graph(150, 120), score="dot"), (BF16, FP32)),
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
    """Every problem."""
    for family, cases, parts in (("bands", BANDS, None), ("edges", EDGES, 16)):
        for name, (case, dtypes) in cases.items():
            for dtype in dtypes:
                yield Problem(
                    f"{family}: {name}, {SHORT_NAMES[dtype]}", _attention(case, dtype, parts)
                )
    for name, (case, dtypes) in STREAMED.items():
        for dtype in dtypes:
            yield Problem(
                f"bands: streamed selection, {name}, {SHORT_NAMES[dtype]}",
                _selection(case, name.partition(" ")[0], dtype),
            )
    for name, (step, dtypes) in CONSENSUS.items():
        for dtype in dtypes:
            yield Problem(f"consensus: {name}, {SHORT_NAMES[dtype]}", _consensus(step, dtype))
    for name, tokens, k in (("3 coordinates", random(150, 3, seed=0), 5),
                            ("70 coordinates", random(90, 70, seed=1), 16),
                            ("many neighbours", random(150, 9, seed=2), 100)):  # fmt: skip
        yield Problem(f"neighbours: {name}", _neighbors(tokens.float(), k))
    for kind, options in (("DotProductAttention", {"kv_heads": 1, "sink": True}),
                          ("GaussianKernelAttention", {"eps": 0.3}),
                          ("KrauseAttention", {"top_k": 5})):  # fmt: skip
        for dtype in (BF16, FP32):
            yield Problem(f"generation: {kind}, {SHORT_NAMES[dtype]}", _steps(kind, options, dtype))


def _attention(case: Case, dtype: torch.dtype, longest: int | None) -> Callable[[str], Errors]:
    def errors(device: str) -> Errors:
        with ExitStack() as stack:
            if longest is not None:  # rows of more edges are cut into parts
                stack.enter_context(cut_at(longest))
            if dtype != FP32:
                return cases_kernels.half_errors(case, dtype, device)
            results, expected = cases_kernels.kernels(case, device), cases_kernels.exact(case)
            return _single(cases_kernels.errors(results, expected))

    return errors


def _selection(case: Case, values: str, dtype: torch.dtype) -> Callable[[str], Errors]:
    """The choice alone. With `values` "few" or "one", so many different logits, which are exact."""

    def errors(device: str) -> Errors:
        tensors = cases_top_k.with_ties(case) if values == "few" else case.tensors()
        if values == "one":
            tensors["key"] = torch.ones_like(tensors["key"])
        for name in ("query", "key", "value"):
            tensors[name] = tensors[name].to(dtype)
        with cases_top_k.streamed():
            kept = cases_top_k.chosen(case, tensors, device)
        logit = cases_top_k.logits_in_float64(case, tensors)
        if values == "one":
            logit = logit[..., :1].expand_as(logit)  # float64 may add features in another order
        rounding = 0.0 if values in ("few", "one") else SINGLE
        return cases_top_k.choice_errors(kept, case, logit, rounding)

    return errors


def _consensus(case: cases_consensus.Case, dtype: torch.dtype) -> Callable[[str], Errors]:
    def errors(device: str) -> Errors:
        with cut_at(16):
            if dtype != FP32:
                return cases_consensus.half_errors(case, dtype, device)
            results, expected = cases_consensus.kernels(case, device), cases_consensus.exact(case)
            return _single(cases_consensus.errors(results, expected, case, floor=0.1))

    return errors


def _single(errors: dict[str, float]) -> Errors:
    return {name: (error, SINGLE) for name, error in errors.items()}


def _neighbors(tokens: torch.Tensor, k: int) -> Callable[[str], Errors]:
    def errors(device: str) -> Errors:
        searches = {"all": {}, "with itself": {"self_loops": True}}
        if k <= 60:
            searches["within a window"] = {"within": ga.window_path_graph(len(tokens), 60)}
        wrong = {}
        for name, options in searches.items():
            expected = ga.knn(tokens, k, backend="reference", **options)[0]
            if "within" in options:
                options = {"within": options["within"].to(device)}
            index = ga.knn(tokens.to(device), k, backend="triton", **options)[0].cpu()
            wrong[name] = float((index != expected).double().mean()), 0.0
        return wrong

    return errors


def _steps(kind: str, options: dict[str, object], dtype: torch.dtype) -> Callable[[str], Errors]:
    """Steps err at most twice as much as those of torch operations in `dtype`, and one rounding.

    In low precision, a top-k may choose other tokens than float64 does, in either way.
    """

    def errors(device: str) -> Errors:
        window, tokens = 40, 50
        x = random(2, tokens, 64, seed=1).to(dtype)

        def layer(backend: str) -> torch.nn.Module:
            torch.manual_seed(7)
            return getattr(ga.nn, kind)(64, 2, backend=backend, **options).to(dtype)

        def steps(backend: str, on: str) -> torch.Tensor:
            stepping, inputs = layer(backend).to(on), x.to(on)
            cache = stepping.init_cache(2, window)
            outputs = [stepping.step(inputs[:, i], cache) for i in range(tokens)]
            return torch.stack(outputs, dim=1).cpu().double()

        with torch.no_grad():
            exact = layer("reference").double()
            expected = exact(x.double(), ga.causal_window_graph(tokens, window))
            largest = expected.abs().max()
            of_kernel, of_plain = (
                float((steps(backend, on) - expected).abs().max() / largest)
                for backend, on in (("triton", device), ("reference", "cpu"))
            )
        eps = torch.finfo(dtype).eps
        return {"out": (of_kernel, min(20 * eps, 2 * (of_plain + eps / 2)))}

    return errors
