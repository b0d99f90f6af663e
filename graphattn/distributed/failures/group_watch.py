"""The two threads with which a process watches over a process group, by the store of the group."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from graphattn.distributed.failures.agreement import said
from graphattn.distributed.failures.connections import (
    close_connections,
    gloo_addresses,
    is_closed,
    lines_to,
)

BEAT = 0.5  # seconds between two heartbeats
SILENT = 2.5  # seconds without one after which a rank is dead, if a connection was closed
GRACE = 1.0  # seconds in which ranks that make the same call may raise errors of their own
TO_READ = 2.0  # seconds that the host of the store waits until others have read a failure


class RankFailure(RuntimeError):
    """Error of a rank whose group is broken, because another rank of the group failed."""


class Failure(NamedTuple):
    """News of a failure, which a rank has written about itself or about another one.

    Attributes:
        rank: the rank that failed.
        call: the number of the call that it will not make, or 0 if it is dead.
        text: what happened.
        left: whether it ended in order.
        since: the round in which it was read.
    """

    rank: int
    call: int
    text: str
    left: bool
    since: int


class GroupWatch:
    """The watch of one process over one group. All requests to the store are in one thread.

    A second thread notices if the store does not answer, because a request cannot be cancelled.
    """

    def __init__(self, group: Any, store: Any, limit: float, store_of_calls: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _world

        self.groups = _world.pg_map  # those that are not destroyed
        self.group, self.store, self.limit = weakref.ref(group), store, limit
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_hosted = isinstance(store._underlying_non_prefix_store, dist.TCPStore)
        self.hosts_store = is_hosted and dist.get_rank() == 0 and not by_agent
        self.host = "torchrun" if by_agent else "rank 0"
        self.addresses = gloo_addresses(group)
        self.lines = lines_to(store._underlying_non_prefix_store)
        self.calls = 0  # how many calls this rank has begun
        self.inside = 0  # how many of them it is in
        self.raised: set[int] = set()  # calls in which this rank has raised an error
        self.failure: str | None = None  # the message of the failure that broke the group
        self.failures: list[Failure] = []
        self.outbox: list[tuple[int, int, str, bool]] = []
        # For comparisons of calls (`same_calls.py`), whose requests are not in the thread.
        self.store_of_calls = store_of_calls
        self.num_shards = 0  # how many have been made
        self.asked_about: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.questions: list[tuple[str, int]] = []  # that this rank cannot answer yet
        self.asked = 0  # how many questions this rank has read
        self.read = 0  # how many failures this rank has read
        # Time is counted in rounds of the threads. If all ranks are stopped for a while, as a
        # scheduler may do it, none of them looks dead when they go on.
        self.pause = min(BEAT, limit / 4)
        self.rounds, self.unanswered = 0, 0
        self.beats: dict[int, tuple[int, int]] = {}  # the last heartbeat of others, and its round
        self.gone: set[int] = set()
        self.broken, self.sent, self.explained = 0.0, threading.Event(), threading.Event()
        self.suspicious, self.wake, self.stopped = (threading.Event() for _ in range(3))
        self.lock = threading.Lock()
        self.threads = [
            threading.Thread(target=run, name=f"graphattn-{run.__name__}", daemon=True)
            for run in (self._talk, self._guard)
        ]
        for thread in self.threads:
            thread.start()
        atexit.register(self.leave)

    # The thread that talks to the store.

    def _talk(self) -> None:
        try:
            while not self._has_ended() and not self._is_cut_off():
                self._beat()
                self.rounds += not self.wake.wait(self.pause)
                self.wake.clear()
            if self.failure is None and not self._is_cut_off():
                self._send(self.rank, self.calls + 1, _how_it_ended(), True)
        except RuntimeError:  # as all stores raise it
            pass
        if not self._has_ended():
            self._break(f"{self.host}, which hosts the store, stopped answering")
        for line in self.lines:
            line.close()
        atexit.unregister(self.leave)

    def _has_ended(self) -> bool:
        return self.stopped.is_set() or self.group() not in self.groups

    def _is_cut_off(self) -> bool:
        return any(map(is_closed, self.lines))

    def _beat(self) -> None:
        self.store.add(f"beat/{self.rank}", 1)
        while self.outbox:
            self._send(*self.outbox.pop(0))
        self._read()
        self._answer()
        if self.failure is None:
            if self.suspicious.is_set():
                self._look_at(range(self.size), SILENT)
            else:
                self._look_at([(self.rank + 1) % self.size], self.limit)
        self.unanswered = 0

    def _send(self, rank: int, call: int, text: str, left: bool) -> None:
        number = self.store.add("failures", 1)
        self.store.set(f"failure/{number}", json.dumps([rank, call, text, left]))
        self._read()
        if not left or getattr(sys, "last_value", None) is not None:
            self._await_readers()
        self.sent.set()

    def _read(self) -> None:
        """Read new failures, and break the group if one of them concerns this rank."""
        count = self.store.add("failures", 0)
        for number in range(self.read + 1, count + 1):
            rank, call, text, left = json.loads(self.store.get(f"failure/{number}"))
            self.failures.append(Failure(rank, call, text, left, since=self.rounds))
            if call == 0 or left:
                self.gone.add(rank)
        if count > self.read:
            self.store.add("read", count - self.read)
        self.read = count
        for failure in self.failures:
            if self._concerns(failure):
                self._break(f"{self._name(failure.rank)} {failure.text}")

    def _concerns(self, failure: Failure) -> bool:
        if failure.call == 0:
            return True
        if failure.rank == self.rank or failure.call in self.raised:
            return False
        if self.calls > failure.call or self.suspicious.is_set():
            return True
        is_same_call = self.calls == failure.call
        if failure.left:
            return is_same_call
        # In the same call, this rank may be about to find the same mistake in its own arguments.
        return self._seconds_since(failure.since) > (GRACE if is_same_call else self.limit)

    def _answer(self) -> None:
        """Answer what ranks ask that wait until all make the same call."""
        count = self.store.add("questions", 0)
        for number in range(self.asked + 1, count + 1):
            self.questions.append(tuple(json.loads(self.store.get(f"question/{number}"))))
        self.asked, waiting = count, self.questions
        self.questions = []
        for shard, call in waiting:
            calls = self.asked_about.get(shard)
            if calls is None or not calls.answer(call, self.store):
                self.questions.append((shard, call))

    def _seconds_since(self, round_: int) -> float:
        return (self.rounds - round_) * self.pause

    def _look_at(self, ranks: Iterable[int], limit: float) -> None:
        """Report the ranks that have not changed their heartbeat for `limit` seconds."""
        for rank in ranks:
            beats = self.store.add(f"beat/{rank}", 0)
            before, since = self.beats.get(rank, (-1, 0))
            silent = self._seconds_since(since)
            if beats != before:
                self.beats[rank] = beats, self.rounds
            elif silent > limit and rank not in self.gone | {self.rank}:
                self._send(rank, 0, f"stopped answering {silent:.0f} s ago", False)

    def _await_readers(self) -> None:
        """Let the others read what was written, if the store ends together with this process."""
        until = time.monotonic() + TO_READ
        while self.hosts_store and time.monotonic() < until:
            if self.store.add("read", 0) >= self.read * (self.size - len(self.gone)):
                return
            time.sleep(0.02)

    # The thread that looks after the other one.

    def _guard(self) -> None:
        while not self.stopped.wait(self.pause) and not self._has_ended():
            self.unanswered += 1
            if self.unanswered * self.pause > self.limit:
                self._break(f"{self.host}, which hosts the store, stopped answering")
            if self.failure and self.inside and time.monotonic() - self.broken > self.limit:
                print(f"graphattn ends this process: {self.failure}", file=sys.stderr, flush=True)
                os._exit(1)

    def _break(self, failure: str) -> None:
        with self.lock:
            if self.failure is not None:
                return
            self.failure, self.broken = failure, time.monotonic()
        group = self.group()
        with contextlib.suppress(Exception):
            close_connections(self.addresses)
        with contextlib.suppress(Exception):
            if group is not None:
                group.abort()  # does something for NCCL only
        with contextlib.suppress(Exception):
            if threading.current_thread() is self.threads[0]:
                self._await_readers()
        self.explained.set()

    def _name(self, rank: int) -> str:
        of_all = self.global_ranks[rank]
        return f"rank {rank}" if of_all == rank else f"rank {rank} (global rank {of_all})"

    # The threads of the user.

    def begin(self) -> None:
        self.calls += 1
        if self.failure is not None:
            raise self.explain()
        self.inside += 1

    def report(self, error: BaseException, call: int) -> None:
        self.raised.add(call)
        self.sent.clear()
        self.outbox.append((self.rank, call, f"raised {said(error)}", False))
        self.wake.set()
        self.sent.wait(TO_READ)

    def explain(self) -> RankFailure:
        """Find out which rank failed, after an operation of the group has raised an error."""
        self.suspicious.set()
        self.wake.set()
        self.explained.wait(SILENT + 2 * TO_READ)
        return RankFailure(self.failure or "a rank closed its connection; which one is unknown")

    def leave(self) -> None:
        """Tell the others that this process ends, and stop both threads."""
        error = getattr(sys, "last_value", None)
        if error is not None and not isinstance(error, RankFailure) and is_of_collective(error):
            # Outside of `watched`. Who is behind it is found before the others blame this rank.
            print(f"graphattn: {self.explain()}", file=sys.stderr, flush=True)
        self.stopped.set()
        self.wake.set()
        self.threads[0].join(TO_READ)


def is_of_collective(error: BaseException) -> bool:
    """Whether an operation between ranks raised this error, for which there is no class."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(r"gloo/|NCCL|nccl", str(error)) is not None
    )


def _how_it_ended() -> str:
    error = getattr(sys, "last_value", None)
    return "has left the group" if error is None else f"ended with {said(error)}"
