"""Times on a GPU: a pass is captured once as a CUDA graph and replayed between two events.

A replay does not include the time that Python needs to launch kernels one by one. For a short
operation, this time is longer than that of the kernels. In a model, the GPU works on earlier
kernels meanwhile. Some passes cannot be captured, because they wait for the GPU or copy from the
host. Each sample launches such a pass kernel by kernel, and the result records this.
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
    """Samples of the mean time of at most 100 passes, for a millisecond, in seconds.

    A buffer larger than the L2 cache is written before every pass, so that inputs come from memory.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.replay = captured(work)
        self.is_captured = self.replay is not None
        self.launch = self.replay or work
        self.repeats = 1
        once = min(self.sample() for _ in range(3))
        self.repeats = min(MOST_REPEATS, max(1, math.ceil(LONG_ENOUGH / once)))

    def sample(self) -> float:
        """Return a mean; the host queues the launches while the GPU writes the buffer."""
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
    """Return a buffer of four times the size of the L2 cache, but of at least 256 MB."""
    size = max(2**28, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device)


def captured(work: Callable[[], object]) -> Callable[[], None] | None:
    """Return a function that replays the launches of `work`, or None if no capture is possible."""
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
    except Exception:  # the kernels can still be launched one by one
        return None
    finally:
        torch.cuda.set_stream(current)  # a failed capture does not restore it
        torch.cuda.synchronize()
    return graph.replay


def waits_for_gpu(work: Callable[[], object]) -> bool:
    """Test this before the capture, because a failed capture changes PyTorch's allocator."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
