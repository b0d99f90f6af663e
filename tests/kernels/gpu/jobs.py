"""Jobs of a step, run by processes at the same time, until all are done or the time is over.

A process that ends or hangs takes one job with it: a wrong access on a GPU spoils everything that
its process does afterwards.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from .session import Row, Session

GRACE = 5.0  # seconds before the end of a step, in which nothing new begins


def run_jobs(
    module: str, names: Iterable[str], session: Session, *, processes: int, seconds: float
) -> None:
    """Run the jobs of a step that have not ended yet; write all their rows.

    Args:
        module: where the step is; its `work` does a job.
        processes: how many run at once.
        seconds: that one job may take; then it is stopped, and ends with an error.
    """
    rows = session.rows(module.rpartition(".")[2])
    ended, before = rows.ended(), rows.all()
    queued: queue.SimpleQueue[str] = queue.SimpleQueue()
    left = [name for name in names if name not in ended]
    for name in left:
        queued.put(name)
    lock = threading.Lock()
    workers: list[Worker] = []

    def write(row: Row) -> None:
        with lock:
            rows.add(row)

    def serve() -> None:
        worker: Worker | None = None
        while session.seconds_left > GRACE:
            try:
                name = queued.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.process.poll() is not None:
                worker = Worker(module, session)
                workers.append(worker)
            known = [row for row in before if row.get("job") == name]
            for row in worker.rows_of(name, known, seconds, session):
                write(row)
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(min(processes, len(left)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        while not queued.empty():
            queued.get_nowait()
        for worker in workers:
            worker.interrupted = True
            worker.stop()
        raise


class Worker:
    """A process that does one job after another."""

    def __init__(self, module: str, session: Session) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu.worker", module, *session.machine, session.size],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
            start_new_session=True,  # with everything that it starts, it can be stopped
        )  # fmt: skip
        self.interrupted = False  # by a person, who may go on later

    def rows_of(
        self, name: str, known: list[Row], seconds: float, session: Session
    ) -> Iterator[Row]:
        """Yield the rows of a job as they come."""
        limit = min(seconds, max(session.seconds_left, 0.0))
        timed_out = threading.Event()

        def give_up() -> None:
            timed_out.set()
            self.stop()

        timer = threading.Timer(limit, give_up)
        timer.start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"job": name, "known": known}) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                row = json.loads(line)
                yield row
                if row.get("end"):
                    return
        except (BrokenPipeError, json.JSONDecodeError):
            pass
        finally:
            timer.cancel()
        code = self.process.wait()
        if self.interrupted:
            return
        if not timed_out.is_set():
            yield {"job": name, "end": True, "error": f"its process ended with code {code}"}
        elif limit == seconds:
            yield {"job": name, "end": True, "error": f"no end within {seconds:.0f} s"}

    def stop(self) -> None:
        """End the process and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment(**more: str) -> dict[str, str]:
    """The environment of processes: kernels are compiled, and `gpu` and `problems` are found."""
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    variables = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **more}
    variables.setdefault("OMP_NUM_THREADS", "1")
    variables.pop("TRITON_INTERPRET", None)
    return variables
