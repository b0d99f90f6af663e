"""Peak memory of one pass, without its inputs."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import torch

from graphattn.bench.cases.catalogue import CASES
from graphattn.bench.cases.least_work import Size
from graphattn.bench.contenders.peers import Run
from graphattn.bench.measuring.passes import one_pass
from graphattn.bench.reporting.record import OURS


class Peak:
    """Peak memory on a CPU, in a new process for every measurement.

    They are forked from a process that has imported PyTorch but has computed nothing.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["graphattn.bench.measuring.memory", "graphattn.nn"])

    def of(self, case: str, contender: str, size: Size, *, backward: bool) -> float | None:
        """Return the peak in bytes, or None if the process died, probably for lack of memory."""
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=_report_peak, args=(sender, case, contender, size, backward)
        )
        process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            return None
        finally:
            process.join()


def _report_peak(sender: Any, case: str, contender: str, size: Size, backward: bool) -> None:
    benchmark_case = next(c for c in CASES if c.name == case)
    run, peaks, inputs = benchmark_case.runs()[contender], [], None
    for _ in range(2):  # the first pass also loads or compiles code
        # Peers reuse arrays that depend only on the graph, such as its edges. The contenders of
        # graphattn get new inputs for each pass, so their peak includes such arrays.
        if inputs is None or contender.startswith(OURS):
            inputs = benchmark_case.make(size, torch.device("cpu"), torch.float32)
        is_forgotten = _forget_peak()
        of_model, before = held(run, inputs), _peak()
        one_pass(run, inputs, backward=backward)
        peaks.append(1024.0 * (_peak() - before) + of_model)
    sender.send(peaks[-1] if is_forgotten else peaks[0])


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> bool:
    """Reset the recorded peak to the memory in use; False where the system cannot (not Linux)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return False
    return True


def cuda_peak(run: Run, inputs: Any, *, backward: bool) -> float:
    """Return the peak on a GPU in bytes, as PyTorch counts them, in the second pass."""
    one_pass(run, inputs, backward=backward)
    torch.cuda.reset_peak_memory_stats()
    before, of_model = torch.cuda.memory_allocated(), held(run, inputs)
    one_pass(run, inputs, backward=backward)
    return torch.cuda.max_memory_allocated() - before + of_model


def held(run: Run, inputs: Any) -> float:
    """Return the bytes between two passes: weights and optimizer, or caches of a model, else 0."""
    of_model = getattr(run, "held", None)
    return 0.0 if of_model is None else float(of_model(inputs))
