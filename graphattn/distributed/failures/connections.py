"""The connections of this process to other ranks and to the store, below torch.distributed."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from typing import Any


def store_of(group: Any) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def gloo_addresses(group: Any) -> set[tuple[str, int]]:
    """Return where the ranks of a gloo group listen, which gloo has written into the store.

    It writes (``Rank`` in gloo's ``rendezvous/context.cc``): the length of a host name and the
    name; the length of a socket address, and that, a ``sockaddr``. All lengths have 8 bytes. The
    result is empty if there is nothing of that form.
    """
    store, found = store_of(group), set()
    for rank in range(group.size()):
        key = f"cpu//0/{rank}"
        if store.check([key]):
            written = store.get(key)
            address = written[16 + int.from_bytes(written[:8], sys.byteorder) :]
            family = int.from_bytes(address[:2], sys.byteorder)
            port = int.from_bytes(address[2:4], "big")
            if family == socket.AF_INET:
                found.add((socket.inet_ntop(family, address[4:8]), port))
            elif family == socket.AF_INET6:
                found.add((socket.inet_ntop(family, address[8:24]), port))
    return found


def lines_to(store: Any) -> list[socket.socket]:
    """Return the connections of this process to a store, which show that it is gone.

    A request to a store that is gone prints a long warning.
    """
    found = []
    for connection in _connections() if hasattr(store, "port") else ():
        # Those of an earlier store with the same port may be closed already.
        if connection.getpeername()[1] == store.port and not is_closed(connection):
            found.append(connection)
        else:
            connection.close()
    return found


def is_closed(line: socket.socket) -> bool:
    """Whether the other end has closed a connection; what can be read stays there."""
    try:
        return not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def close_connections(addresses: set[tuple[str, int]]) -> None:
    """Close the connections of this process from or to these addresses.

    Gloo cannot be aborted. But a thread of it reads these connections, and raises an error in every
    operation that waits for one which is closed.
    """
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            if {connection.getsockname()[:2], connection.getpeername()[:2]} & addresses:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> list[socket.socket]:
    """Return the TCP connections of this process, as sockets of their own that can be closed."""
    found = []
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                one = socket.socket(fileno=os.dup(number))
                if one.family in (socket.AF_INET, socket.AF_INET6) and _is_connected(one):
                    found.append(one)
                else:
                    one.close()
    return found


def _is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True
