"""A rank that fails, hangs or dies raises an error on every rank, which names it.

Collectives wait for all ranks. If one does not come, the others wait for minutes, or for ever. So
two threads per process and group, which :func:`watch` starts, watch over the group by its store:

- Every rank counts its heartbeats there, and reads those of the next rank: so the store answers a
  few requests per rank and second, however many ranks there are.
- A rank that raises an error writes it there (:func:`report`). An error breaks the group only if
  others are in a call that this rank will never make. If all ranks raise in the same call, nobody
  waits, and the group stays as it is.
- To break a group means to close its connections in this process. Whoever waits then gets an error
  at once, forward or backward, compiled or not, and :func:`watched` says which rank is behind it.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from graphattn.distributed.failures.connections import store_of
from graphattn.distributed.failures.group_watch import GroupWatch, RankFailure, is_of_collective
from graphattn.distributed.failures.same_calls import SameCalls
from graphattn.graphs.arguments import as_float

_WATCHES: weakref.WeakKeyDictionary[Any, GroupWatch] = weakref.WeakKeyDictionary()


def watch(group: Any, limit: float = 30.0) -> None:
    """Watch over the ranks of a process group until it is destroyed; all ranks must call it.

    A rank that dies or hangs then raises :class:`RankFailure` on all others, within the limit and a
    few seconds. A group that is watched already, or has one rank only, stays as it is.

    This was tested with gloo. With NCCL, ``group.abort()`` ends what a GPU waits for; that is what
    PyTorch documents, and could not be tested here. If a process stays inside :func:`watched` for
    another `limit` seconds nevertheless, the error is printed, and the process exits.

    Args:
        group: the process group.
        limit: how many seconds a rank may be silent. Its threads need the interpreter from time
            to time, so an operation that holds Python's lock for longer looks like a hang.

    Raises:
        ValueError: if `limit` is not positive.
    """
    import torch.distributed as dist

    limit = as_float("limit", limit, positive=True)
    if dist.get_world_size(group) == 1 or group in _WATCHES:
        return
    # A new name, because a store may outlive a group and then serve another one.
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, uuid.uuid4().hex, group)
    store, other = (
        dist.PrefixStore(f"graphattn/{names[0]}", store_of(group).clone()) for _ in range(2)
    )
    _WATCHES[group] = GroupWatch(group, store, limit, other)


def same_calls(group: Any) -> SameCalls | None:
    """Return the comparison of calls over a new shard; all ranks make shards in the same order."""
    found = _WATCHES.get(group)
    if found is None:
        return None
    found.num_shards += 1
    return SameCalls(found, str(found.num_shards))


@contextlib.contextmanager
def _watched(found: GroupWatch) -> Iterator[None]:
    found.begin()
    call = found.calls
    try:
        yield
    except RankFailure:
        raise
    except Exception as error:
        if is_of_collective(error) or found.failure is not None:
            raise found.explain() from error
        found.report(error, call)
        raise
    finally:
        found.inside -= 1
    if found.failure is not None:
        raise found.explain()


def watched(group: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context for a call that waits for other ranks, which all of them make.

    If the group breaks inside, it raises :class:`RankFailure`, which says which rank failed and
    how. Any other error inside goes to the other ranks, as :func:`report` does it, and on. It does
    nothing for a group that nobody watches, and where torch.compile traces it: wrap the call of a
    compiled function instead.

    Example:
        Rank 1 raised an error, and so this rank raises another::

            with watched(group):
                y = compiled_layer(x, shard)
            # RankFailure: rank 1 raised ValueError: x must have the 250 tokens of rank 1 of 4, ...
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    found = None if group is None else _WATCHES.get(group)
    return contextlib.nullcontext() if found is None else _watched(found)


def report(group: Any, error: BaseException) -> None:
    """Tell the other ranks that this rank raises an error in the place of its next call.

    Those that make this call raise :class:`RankFailure`. It returns as soon as the error is
    written; on the rank that hosts the store, when the others have read it, or after two seconds.

    Example:
        A check before anything waits::

            error = ValueError(f"x must have {count} rows, got {len(x)}")
            report(group, error)
            raise error
    """
    found = _WATCHES.get(group)
    if found is not None and found.failure is None and not found._has_ended():
        found.calls += 1
        found.report(error, found.calls)


__all__ = ["RankFailure", "report", "same_calls", "watch", "watched"]
