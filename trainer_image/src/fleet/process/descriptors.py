"""Descriptors of this process: as many as the system lets it have, and some that are kept for saves."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from typing import Final

__all__ = ["Reserve", "for_saves", "provide"]

_KEPT: Final = 16
"""A save has a few files and folders open at once, in one thread or two; so has a load."""


class Reserve:
    """Descriptors that nothing else of this process can use up: they are open, on nothing.

    Parameters
    ----------
    count : int
        How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._kept: list[int] = []
        self._keeps = False
        self._lent = 0

    def keep(self) -> None:
        """Take them, as many as there are, unless they are lent."""
        with self._lock:
            self._keeps = True
            self._fill()

    def give_up(self) -> None:
        """Keep none any more."""
        with self._lock:
            self._keeps = False
            self._release()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Leave them to the block, and take them again afterwards."""
        with self._lock:
            self._lent += 1
            self._release()
        try:
            yield
        finally:
            with self._lock:
                self._lent -= 1
                self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # there is none left: the next time
            while self._keeps and not self._lent and len(self._kept) < self._count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY))

    def _release(self) -> None:
        while self._kept:
            os.close(self._kept.pop())


for_saves: Final = Reserve(_KEPT)


def provide() -> None:
    """Raise the limit of open files to the highest that this process may set, and keep some for saves."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for_saves.keep()
