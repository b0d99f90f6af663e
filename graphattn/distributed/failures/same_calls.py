"""The check that all ranks call a layer with tensors that are alike, before any of them waits.

Ranks exchange rows of equal shapes and dtypes. If one of them has another batch size, the library
below ends its process, or takes the bytes of one rank for something else. So calls are compared,
by the store of the group and by no collective, but only those that are a surprise:

- All ranks have made the same calls so far, because calls that differed have raised an error. So
  they expect the same next call: the one that followed the last time when the same eight calls came
  before it, or the same three, or the same one; or else the last call again.
- A rank whose call is the expected one sends rows at once. If all ranks do that, nothing else
  happened.
- A rank with any other call waits until all ranks have the same one. If some of them sent rows at
  once, it learns that from their threads, which look for questions as often as for failures. Their
  call was the expected one. This rank has not sent anything by then, so nothing was mixed up.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.failures.agreement import by_value
from graphattn.distributed.failures.group_watch import GroupWatch

PATIENCE = 1.0  # seconds until a rank asks the threads of the others
PAUSE = 0.05  # the longest time between two looks into the store
LENGTHS = 8, 3, 1  # of sequences of calls after which one is expected that followed them before
MOST = 100_000  # sequences that are remembered

# A name, a dtype or another value, and a shape without the number of tokens.
Fact = tuple[str, object, tuple[int, ...] | None]
Call = tuple[Fact, ...]


def call_of(layer: str, names: Iterable[str], given: Mapping[str, Any], *, both: bool) -> Call:
    """Return what must be alike on all ranks in a call of a layer.

    Args:
        layer: its name.
        names: the arguments whose rows travel, or decide what travels.
        given: all arguments by name.
        both: whether masks and positions of targets travel, too, and not only those of sources.
    """
    found: list[Fact] = [("layer", layer, None)]
    for name in names:
        x = given.get(name)
        if name not in ("valid", "positions"):
            found.append(fact_of(name, x, -2))
            continue
        pair = x if isinstance(x, tuple | list) and len(x) == 2 else (x, x)
        found.append(fact_of(f"{name} of sources", pair[1], -1))
        if both:
            found.append(fact_of(f"{name} of targets", pair[0], -1))
    x = given.get("x")
    device = x.device.type if isinstance(x, Tensor) else "cpu"
    if torch.is_autocast_enabled(device):
        found.append(("autocast", torch.get_autocast_dtype(device), None))
    return tuple(found)


def fact_of(name: str, x: Any, dim: int) -> Fact:
    """Return what must be alike of an argument, whose dimension `dim` < 0 counts the tokens."""
    if not isinstance(x, Tensor):
        return name, None if x is None else type(x).__name__, None
    if x.dim() < -dim:
        return name, x.dtype, None
    shape = tuple(x.shape)
    return name, x.dtype, (*shape[:dim], -1, *shape[len(shape) + dim + 1 :])


def facts_of(call: Call) -> dict[str, str]:
    """Return a text for every part of a call, by its name."""
    found = {}
    for name, kind, shape in call:
        text = str(kind).removeprefix("torch.")
        if shape is not None:
            text += f" [{', '.join('tokens' if size < 0 else str(size) for size in shape)}]"
        found[name] = text
    return found


class SameCalls:
    """The calls over one shard, which all ranks of its group make alike.

    Args:
        watch: the watch of this process over the group.
        name: the name of the shard, the same on all ranks.
    """

    def __init__(self, watch: GroupWatch, name: str) -> None:
        self.watch, self.name = watch, name
        self.count = 0  # how many calls this rank has begun
        self.compared = 0  # the number of the call that this rank compares now
        self.numbers: dict[Call, int] = {}  # of different calls
        self.last: tuple[int, ...] = ()  # the numbers of the last calls
        self.following: dict[tuple[int, ...], Call] = {}  # what came after such numbers last time
        self.latest: Call | None = None
        self.entries: list[str] = []  # what the last comparison has left in the store
        watch.asked_about[name] = self

    def check(self, call: Call) -> None:
        """Return if all ranks make this call, or are expected to; every rank must come here.

        Raises:
            ValueError: which names the arguments that differ, and which ranks have what.
            RankFailure: if another rank has failed meanwhile.
        """
        before = [self.last[-length:] for length in LENGTHS]
        expected = self.latest
        for numbers in before:
            if numbers in self.following:
                expected = self.following[numbers]
                break
        if call == expected:
            self.count += 1
        else:
            self.compared = self.count + 1  # before it is counted: see `answer`
            self.count += 1
            try:
                self._compare(facts_of(call), None if expected is None else facts_of(expected))
            finally:
                self.compared = 0
        if len(self.following) >= MOST:
            self.following, self.numbers, before = {}, {}, []
        self.following.update(dict.fromkeys(before, call))
        number = self.numbers.setdefault(call, len(self.numbers))
        self.last, self.latest = (*self.last[1 - LENGTHS[0] :], number), call

    def _compare(self, mine: dict[str, str], expected: dict[str, str] | None) -> None:
        """Wait until all ranks have this call, or raise an error that says who has another one."""
        watch, store = self.watch, self.watch.store_of_calls
        key = f"call/{self.name}/{self.count}"
        text = json.dumps(mine)
        same = f"{key}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        earlier, self.entries = self.entries, [same, f"{key}/all"]
        if store.add(same, 1) == watch.size:
            store.set(f"{key}/all", "1")
            for entry in earlier:  # all ranks are here, so nobody reads about an earlier call
                store.delete_key(entry)
            return
        start, pause, asked = time.monotonic(), 1e-4, False
        others: dict[int, dict[str, str]] = {}
        differ = 0.0
        while not store.check([f"{key}/all"]):
            waited = time.monotonic() - start
            if watch.failure is not None:
                raise watch.explain()
            if asked:
                self._read(key, others, expected)
                if not differ and any(facts != mine for facts in others.values()):
                    differ = waited
                if differ and (len(others) == watch.size - 1 or waited - differ > PATIENCE):
                    if store.check([f"{key}/all"]):  # an answer from after the comparison
                        break
                    raise ValueError(_difference({**others, watch.rank: mine}))
                if waited > watch.limit and not differ:
                    return  # others may run compiled code, which compares nothing
            elif waited > PATIENCE:
                store.set(f"{key}/{watch.rank}", text)
                number = store.add("questions", 1)
                store.set(f"question/{number}", json.dumps([self.name, self.count]))
                asked = True
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)

    def _read(
        self, key: str, others: dict[int, dict[str, str]], expected: dict[str, str] | None
    ) -> None:
        """Read what other ranks have said of a call; nothing means the expected one."""
        store = self.watch.store_of_calls
        for rank in range(self.watch.size):
            if rank in others or rank == self.watch.rank or not store.check([f"{key}/{rank}"]):
                continue
            found = json.loads(store.get(f"{key}/{rank}")) or expected
            if found is not None:
                others[rank] = found

    def answer(self, count: int, store: Any) -> bool:
        """Answer another rank, in the thread of the watch, if this rank made a call unasked.

        Returns:
            Whether this rank has begun the call. If not, the question has to be kept.
        """
        if self.count < count:
            return False
        if self.compared != count:  # otherwise it says itself what it has
            store.compare_set(f"call/{self.name}/{count}/{self.watch.rank}", "", "{}")
        return True


def _difference(by_rank: dict[int, dict[str, str]]) -> str:
    """Say which facts differ, and which ranks have what."""
    names = dict.fromkeys(name for facts in by_rank.values() for name in facts)
    found = []
    for name in names:
        values = {rank: by_rank[rank].get(name, "none") for rank in sorted(by_rank)}
        if len(set(values.values())) > 1:
            found.append(f"{name} must be alike on all ranks, got {by_value(values)}")
    return "; ".join(found)
