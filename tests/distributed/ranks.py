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
PATIENCE = 20.0  # seconds for the other ranks, once a function has failed on one


class RankError(AssertionError):
    """A function failed on some of the ranks, or did not end.

    `results` has what the other ranks returned, by rank.
    """

    def __init__(self, message: str, results: dict[int, Any]) -> None:
        super().__init__(message)
        self.results = results


class Ranks:
    """Processes 0 .. MOST - 1; they start when the first function runs.

    Args:
        timeout: seconds that a collective waits for the other ranks.
    """

    def __init__(self, timeout: float = LIMIT) -> None:
        self._timeout = timeout
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
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < size and time.monotonic() < end:
            rank_of = {
                self._connections[rank]: rank
                for rank in range(size)
                if rank not in results and rank not in errors
            }
            for connection in multiprocessing.connection.wait([*rank_of], timeout=1.0):
                rank = rank_of[connection]
                ok, result = self._received(rank)
                if ok:
                    results[rank] = result
                else:  # others may wait for this rank in vain
                    errors[rank] = result
                    end = min(end, time.monotonic() + PATIENCE)
        if len(results) < size:
            self.stop()
            late = [rank for rank in range(size) if rank not in results and rank not in errors]
            lines = [f"rank {rank}: {text}" for rank, text in errors.items()]
            raise RankError("\n".join([*lines, f"ranks without a result: {late}"]), results)
        return [results[rank] for rank in range(size)]

    def _received(self, rank: int) -> tuple[bool, Any]:
        """Return whether the function returned on a rank, and its result or the traceback."""
        try:
            received: tuple[bool, Any] = self._connections[rank].recv()
        except EOFError:
            return False, f"died, exit code {self._processes[rank].exitcode}"
        return received

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "graphattn.nn", "graphattn.models"])
        store = os.path.join(tempfile.mkdtemp(prefix="ranks"), "store")
        for rank in range(MOST):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, store, there, self._timeout), daemon=True
            )
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


def _serve(rank: int, store: str, connection: Any, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=MOST, timeout=wait
    )
    groups = {size: dist.new_group(list(range(size)), timeout=wait) for size in range(1, MOST + 1)}
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
