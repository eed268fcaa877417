"""Connections of whom nobody knows yet, or ever will: how long they may take, and how many there may be.

Each keeps a thread or descriptors. Whoever is of the job has said so within milliseconds, so where there are
too many one goes that never will: the oldest of the host that has most, so that a host which opens many takes
the place of nobody but itself.
"""

import contextlib
import socket
import threading
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

__all__ = ["MOST", "HalfOpen", "Unknown"]

MOST: Final = 64
_SECONDS: Final = 10.0

Connection = TypeVar("Connection", bound=Hashable)


class Unknown(Generic[Connection]):
    """The connections of whom nobody knows yet, by host.

    Parameters
    ----------
    most : int
        How many there may be.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._count = 0
        self._hosts: dict[str, dict[Connection, None]] = {}
        """Of each host the oldest first."""

    def add(self, connection: Connection, host: str) -> Connection | None:
        """Count one; return another one that has to go, and is not counted any more."""
        self._hosts.setdefault(host, {})[connection] = None
        self._count += 1
        if self._count <= self._most:
            return None
        largest = max(self._hosts, key=lambda each: len(self._hosts[each]))
        surplus = next(iter(self._hosts[largest]))
        self.remove(surplus, largest)
        return surplus

    def remove(self, connection: Connection, host: str) -> None:
        """Count one no more; safe to repeat."""
        of_host = self._hosts.get(host, {})
        if connection in of_host:
            del of_host[connection]
            self._count -= 1
            if not of_host:
                del self._hosts[host]


class HalfOpen:
    """The connections of a server whose greeting has not come to its end.

    Parameters
    ----------
    most : int
        How many there may be.
    seconds : float
        How long all of a greeting may take.
    """

    def __init__(self, most: int = MOST, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._unknown = Unknown[socket.socket](most)

    @contextlib.contextmanager
    def bounded(self, connected: socket.socket) -> Iterator[None]:
        """End the connection where the block takes too long, or others have come since, too many of them."""
        host = _host_of(connected)
        with self._lock:
            surplus = self._unknown.add(connected, host)
        if surplus is not None:
            _end(surplus)
        late = threading.Timer(self._seconds, _end, (connected,))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            with self._lock:
                self._unknown.remove(connected, host)


def _host_of(connected: socket.socket) -> str:
    """Return the address of the other end; empty for a Unix socket, and for one that has gone already."""
    try:
        name = connected.getpeername()
    except OSError:
        return ""
    return str(name[0]) if connected.family != socket.AF_UNIX else ""


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
