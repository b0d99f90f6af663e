"""Processes that wait for functions to run together, as the ranks of a process group.

The tests of a session share four processes. They are forks of one that has imported torch and
graphattn, which takes seconds. A function that runs on fewer ranks gets a group of the first ranks.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

MOST = 4
LIMIT = 240.0  # seconds: a function that takes longer hangs


class RankError(AssertionError):
    """A function failed on some of the ranks, or did not end."""


class Ranks:
    """Processes 0 .. MOST - 1; they start when the first function runs."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def run(self, function: Any, size: int, *, limit: float = LIMIT, **arguments: Any) -> list[Any]:
        """Run ``function(group, **arguments)`` on the first `size` ranks; return their results.

        Args:
            function: a function of a module, which the processes import by its name.
            size: how many ranks run it, 1 .. MOST.
            limit: seconds after which all processes are killed.
            arguments: what can be pickled.
        """
        if not self._processes:
            self._start()
        job = function.__module__, function.__name__, size, arguments
        for connection in self._connections[:size]:
            connection.send(job)
        end = time.monotonic() + limit
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < size and time.monotonic() < end:
            waiting = {self._connections[r]: r for r in range(size) if r not in found}
            for connection in multiprocessing.connection.wait([*waiting], timeout=1.0):
                found[waiting[connection]] = self._answer(waiting[connection])
                if not found[waiting[connection]][0]:  # others may wait for this rank in vain
                    end = min(end, time.monotonic() + 5.0)
        failed = {rank: text for rank, (ok, text) in found.items() if not ok}
        if failed or len(found) < size:
            late = [rank for rank in range(size) if rank not in found]
            self.stop()
            errors = [f"rank {rank}: {text}" for rank, text in failed.items()]
            raise RankError("\n".join([*errors, f"ranks without an answer: {late}"]))
        return [found[rank][1] for rank in range(size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._connections[rank].recv()
        except EOFError:
            return False, f"died, exit code {self._processes[rank].exitcode}"
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "graphattn.nn", "graphattn.models"])
        store = os.path.join(tempfile.mkdtemp(prefix="ranks"), "store")
        for rank in range(MOST):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def stop(self) -> None:
        """End all processes; the next function starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def _serve(rank: int, store: str, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=MOST,
        timeout=timedelta(seconds=LIMIT),
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, MOST + 1)}
    while True:
        try:
            module, name, size, arguments = connection.recv()
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            connection.send((True, function(groups[size], **arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
