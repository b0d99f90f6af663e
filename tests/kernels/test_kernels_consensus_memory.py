"""Peak memory of a consensus layer, from its allocations; on a GPU as its allocator saw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from allocations import MEGABYTE, peak_of
from torch.profiler import ProfilerActivity, profile

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases.case import BenchmarkCase
from graphattn.bench.cases.consensus import EAGER
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.measuring.memory import cuda_peak
from graphattn.bench.measuring.passes import one_pass
from graphattn.bench.reporting.record import OURS

CASES = {case.name: case for case in cases.CASES}


# The tool, on what can be counted by hand.


def test_inside_of_an_operator_of_our_own_is_counted(device: str) -> None:
    if device != "cpu":
        pytest.skip('kernels take tensors on "meta" where they are interpreted')
    q = torch.empty(64, 2, 16, device="meta")
    graph = ga.causal_window_graph(64, 8).to("meta")
    peak = peak_of(lambda: ga.dot_product_attention(q, q, q, graph, backend="triton"))
    assert peak.kernels
    out, log_sums = 4 * q.numel(), 4 * 64 * 2
    assert peak.bytes >= out + 2 * log_sums  # log-sums for the caller, and for the backward


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["consensus", "consensus-layer"])
def test_the_peak_is_the_one_that_pytorch_sees_on_a_cpu(
    name: str, dtype: torch.dtype, backward: bool
) -> None:
    """The peak found on "meta" is, to 1 %, the peak that PyTorch's profiler sees on a CPU.

    The profiler adds up what the allocator hands out and gets back, while numbers are computed.
    """
    case, size = CASES[name], {**CASES[name].sizes["small"], "tokens": 64}
    run = case.contenders[EAGER]
    real, on_meta = (inputs_of(case, size, device, dtype) for device in ("cpu", "meta"))
    on_paper = peak_of(lambda: one_pass(run, on_meta, backward=backward))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        one_pass(run, real, backward=backward)
    assert on_paper.bytes == pytest.approx(peak_of_events(profiler), rel=1e-2)


def peak_of_events(profiler: Any) -> int:
    events = profiler.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        most = max(most, now)
    return most


# The layer.


def inputs_of(case: BenchmarkCase, size: dict[str, int], device: str, dtype: torch.dtype) -> Any:
    """The benchmark's own; message passing is given the list of its edges."""
    inputs = case.make(size, torch.device(device), dtype)
    graph = ga.window_path_graph(size["tokens"], size["window"])
    assert graph.edge_index.numel()  # listed here, because a list on "meta" has no numbers
    return replace(inputs, graph=graph.to(device))


def peak(run: Callable[[Any], Any], inputs: Any, *, backward: bool) -> tuple[float, str]:
    """Return the peak of memory in bytes, and a text that says it.

    A GPU measures it; without one it follows from the allocations on "meta".
    """
    if inputs.graph.device.type == "cuda":
        measured = cuda_peak(run, inputs, backward=backward)
        return measured, f"{measured / MEGABYTE:10,.1f} MB measured"
    predicted = peak_of(lambda: one_pass(run, inputs, backward=backward))
    return predicted.bytes, str(predicted)


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_a_layer_takes_a_tenth_of_gather_and_scatter(
    device: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dim 768, 12 heads, rank 4, 256 hidden features, 64 x 1024 tokens, 2 on each side, bfloat16.

    Both have the same parameters; tokens, weights and the list of edges are not counted.
    """
    case = CASES["consensus-layer"]
    size = case.size("paper", "cuda")
    assert size == {"batch": 64, "tokens": 1024, "window": 2, "dim": 768, "heads": 12,
                    "edge_hidden": 256, "rank": 4}  # fmt: skip
    # Tensors on "meta" need no memory, however large.
    monkeypatch.setattr(contenders, "free_memory", lambda _: float("inf"))
    inputs = inputs_of(case, size, "meta" if device == "cpu" else device, torch.bfloat16)
    inputs.layer.backend = "triton"
    assert inputs.layer.update_rule == "energy"
    ours, terms = peak(case.contenders[OURS], inputs, backward=backward)
    theirs, their_terms = peak(case.contenders[EAGER], inputs, backward=backward)
    print(f"\ngraphattn\n{terms}\n\ngather/scatter\n{their_terms}\n\nratio {ours / theirs:.4f}")
    assert ours <= theirs / 10
