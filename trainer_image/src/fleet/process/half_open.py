"""Connections of whom nobody knows yet, or ever will: how long they may take, and how many there may be.

Each keeps a thread. Whoever is of the job has said so within milliseconds, so where there are too many the
oldest is one of those that never will.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final

__all__ = ["HalfOpen"]

_MOST: Final = 64
_SECONDS: Final = 10.0


class HalfOpen:
    """The connections of a server whose greeting has not come to its end.

    Parameters
    ----------
    most : int
        How many there may be.
    seconds : float
        How long all of a greeting may take.
    """

    def __init__(self, most: int = _MOST, seconds: float = _SECONDS) -> None:
        self._most = most
        self._seconds = seconds
        self._lock = threading.Lock()
        self._oldest_first: list[socket.socket] = []

    @contextlib.contextmanager
    def bounded(self, connected: socket.socket) -> Iterator[None]:
        """End the connection where the block takes too long, or others have come since, too many of them."""
        with self._lock:
            self._oldest_first.append(connected)
            surplus = self._oldest_first[: -self._most]
        for each in surplus:
            _end(each)
        late = threading.Timer(self._seconds, _end, (connected,))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            with self._lock:
                self._oldest_first.remove(connected)


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
