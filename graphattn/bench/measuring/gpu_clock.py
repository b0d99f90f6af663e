"""Times on a GPU: the launches of a pass captured once and replayed, between two events.

Replaying leaves out what Python takes to launch kernels one by one, which for a short operation is
longer than the kernels themselves; in a model it is hidden behind the work before it. Whatever
cannot be captured (it waits for the GPU, or copies from the host) is launched anew every time and
says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

WARM_UPS = 3
LONG_ENOUGH = 1e-3  # seconds of one sample
MOST_REPEATS = 100


class GpuClock:
    """Samples of one pass, in seconds: its mean over a millisecond or more.

    Before every pass a buffer larger than the L2 cache is written, so that inputs come from memory.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.replay = captured(work)
        self.is_captured = self.replay is not None
        self.launch = self.replay or work
        self.repeats = 1
        once = min(self.sample() for _ in range(3))
        self.repeats = min(MOST_REPEATS, max(1, math.ceil(LONG_ENOUGH / once)))

    def sample(self) -> float:
        """The host runs ahead while the buffer is written, so that it is never waited for."""
        flush = larger_than_cache(torch.cuda.current_device())
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.repeats)
        ]
        for start, end in events:
            flush.zero_()
            start.record()
            self.launch()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) / len(events) / 1000


@cache
def larger_than_cache(device: int) -> Tensor:
    """A buffer of four times the L2 cache, 256 MB at least."""
    size = max(2**28, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device)


def captured(work: Callable[[], object]) -> Callable[[], None] | None:
    """Replays what `work` launches; None where it cannot be captured."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    current.wait_stream(stream)
    torch.cuda.synchronize()
    if waits_for_gpu(work):
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
    except Exception:  # whatever the reason: it can still be launched one by one
        return None
    finally:
        torch.cuda.set_stream(current)  # a capture that fails does not come back to it
        torch.cuda.synchronize()
    return graph.replay


def waits_for_gpu(work: Callable[[], object]) -> bool:
    """Found out beforehand, because a capture that fails leaves traces in torch's allocator."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
