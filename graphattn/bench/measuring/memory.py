"""Peak memory of one pass beyond its inputs; of a model, its weights and their steps included."""

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
from graphattn.bench.models.vision import VisionRun
from graphattn.bench.reporting.record import OURS


class Peak:
    """Peak memory on a CPU, each in a fresh process.

    The processes are forked from one that has imported torch and computed nothing.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["graphattn.bench.measuring.memory", "graphattn.nn"])

    def of(self, case: str, contender: str, size: Size, *, backward: bool) -> float | None:
        """Bytes; None where the process died (of too little memory, most likely)."""
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
    own = next(c for c in CASES if c.name == case)
    run, peaks, inputs = own.runs()[contender], [], None
    for _ in range(2):  # the first pass also loads code, or even compiles it
        # Peers keep what they derive from the graph alone, such as its edges; ours begins anew.
        if inputs is None or contender.startswith(OURS):
            inputs = own.make(size, torch.device("cpu"), torch.float32)
        is_forgotten = _forget_peak()
        before, of_model = _peak(), held(run, inputs)
        one_pass(run, inputs, backward=backward)
        peaks.append(1024.0 * (_peak() - before) + of_model)
    sender.send(peaks[-1] if is_forgotten else peaks[0])


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> bool:
    """Hand back what is free and start the peak anew from what is in use: Linux with glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return False
    return True


def cuda_peak(run: Run, inputs: Any, *, backward: bool) -> float:
    """Bytes on a GPU, by torch's own accounting, in a pass after the first."""
    one_pass(run, inputs, backward=backward)
    torch.cuda.reset_peak_memory_stats()
    before, of_model = torch.cuda.memory_allocated(), held(run, inputs)
    one_pass(run, inputs, backward=backward)
    return torch.cuda.max_memory_allocated() - before + of_model


def held(run: Run, inputs: Any) -> float:
    """Bytes that belong to a contender between passes: a model's weights and optimizer state."""
    return run.held(inputs) if isinstance(run, VisionRun) else 0.0
