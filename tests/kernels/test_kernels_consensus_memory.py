"""Peak memory of a consensus layer, from its allocations; on a GPU as its allocator saw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
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
from graphattn.kernels.shared.launch import launch

N = 1000  # numbers of a tensor; in float32 4 kB
CASES = {case.name: case for case in cases.CASES}


def numbers(**options: Any) -> torch.Tensor:
    return torch.empty(N, device="meta", **options)


# The tool, on what can be counted by hand.


def test_a_tensor_that_is_gone_is_not_counted() -> None:
    def work() -> torch.Tensor:
        a = x + 1
        b = a + 1  # a and b
        del a
        c = b + 1  # b and c
        return c.exp()  # b, c and the result

    x = numbers()
    found = peak_of(work)
    assert found.bytes == 3 * 4 * N
    assert found.inputs == 4 * N


def test_views_and_what_is_done_in_place_take_nothing() -> None:
    def work() -> torch.Tensor:
        x.view(10, -1)[2:].add_(1)
        return (x + 1).mul_(2).view(10, -1).mT

    x = numbers()
    found = peak_of(work)
    assert found.bytes == 4 * N
    assert [block.made_by for block in found.blocks] == ["aten::add"]


def test_half_precision_takes_half() -> None:
    x = numbers()
    assert peak_of(lambda: x.bfloat16()).bytes == 2 * N


def test_what_the_backward_needs_is_held_until_then() -> None:
    """exp keeps its result: 3 of them, a sum, and then 2 gradients in turn while they go."""

    def forward() -> torch.Tensor:
        return x.exp().exp().exp().sum()

    x = numbers(requires_grad=True)
    assert peak_of(forward).bytes == 3 * 4 * N + 4
    with torch.no_grad():
        assert peak_of(forward).bytes == 2 * 4 * N  # one from the other
    # The sum, the 1 that a backward starts with, which stands for all of the sum's gradient; with
    # all three results one gradient; the others come while results go.
    assert peak_of(lambda: torch.autograd.grad(forward(), x)).bytes == 4 * 4 * N + 2 * 4


def test_every_input_is_counted_once() -> None:
    x, y = numbers(), numbers()
    found = peak_of(lambda: x[:500] + x[500:] + y[:500] * y[0])
    assert found.inputs == 2 * 4 * N


def test_the_blocks_of_the_peak_make_up_the_peak() -> None:
    x = numbers()
    found = peak_of(lambda: (x + 1, x.double(), x[:10] * 2))
    assert [block.bytes for block in found.blocks] == [8 * N, 4 * N, 40]
    assert sum(block.bytes for block in found.blocks) == found.bytes
    assert "aten::_to_copy [1000] float64" in str(found)
    assert "in 1 smaller ones" in str(found)


def test_a_kernel_that_was_noted_holds_no_workspace() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            workspace = x + 1
            launch(kernel, (1,), num_warps=4, num_stages=1, p_workspace=workspace)
            del workspace
        return x + 1

    x, kernel = numbers(), SimpleNamespace(fn=peak_of)
    found = peak_of(work)
    assert found.kernels == ["peak_of"] * 3
    assert found.bytes == 4 * N


def test_inside_of_an_operator_of_our_own_is_counted(device: str) -> None:
    if device != "cpu":
        pytest.skip('kernels take tensors on "meta" where they are interpreted')
    q = torch.empty(64, 2, 16, device="meta")
    graph = ga.causal_window_graph(64, 8).to("meta")
    found = peak_of(lambda: ga.dot_product_attention(q, q, q, graph, backend="triton"))
    assert found.kernels
    out, log_sums = 4 * q.numel(), 4 * 64 * 2
    assert found.bytes >= out + 2 * log_sums  # log-sums for the caller, and for the backward


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
    found = peak_of(lambda: one_pass(run, on_meta, backward=backward))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        one_pass(run, real, backward=backward)
    assert found.bytes == pytest.approx(peak_of_events(profiler), rel=1e-2)


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
    found = peak_of(lambda: one_pass(run, inputs, backward=backward))
    return found.bytes, str(found)


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
